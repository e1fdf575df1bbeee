"""A device whose memory other programs hold is no fault of a candidate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shiplap.sandbox import candidate, machine_lack
from shiplap.sandbox.supervisor import Bounds

TEXT = "OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB."


@pytest.fixture
def process(tmp_path):
    return SimpleNamespace(launcher=SimpleNamespace(folder=str(tmp_path)), bounds=Bounds())


def use_device(monkeypatch, free, initialized=True):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 100))


def test_a_full_device_is_a_lack(monkeypatch, process):
    use_device(monkeypatch, 2)
    assert machine_lack.find_lack(TEXT, process) == f"too little free memory on a device: {TEXT}"
    assert not machine_lack.find_lack("RuntimeError: wrong", process)


@pytest.mark.parametrize(("free", "initialized"), [(98, True), (2, False)])
def test_a_candidate_that_asks_for_too_much_of_a_free_device_is_at_fault(monkeypatch, process, free, initialized):
    use_device(monkeypatch, free, initialized)
    assert not machine_lack.find_lack(TEXT, process)


def test_a_comparison_without_memory_says_nothing_of_the_results():
    def against(got):
        raise torch.OutOfMemoryError(TEXT)

    with pytest.raises(candidate.MachineLack, match="no memory of the device"):
        candidate._compare(SimpleNamespace(against=against), [])
