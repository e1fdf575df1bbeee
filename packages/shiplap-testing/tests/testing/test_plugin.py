"""How the plugin of all tests spreads them, and what it does with a worker whose device no longer answers."""

import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from shiplap_testing import plugin, schedule
from shiplap_testing.forked import python

TESTS = """
import pytest, torch
pytestmark = pytest.mark.gpu

def broken():
    raise RuntimeError("an illegal memory access was encountered")

def test_that_breaks_the_device(monkeypatch):
    torch.cuda.is_initialized, torch.cuda.synchronize = (lambda: True), broken
    assert False, "the answer was wrong"

@pytest.mark.parametrize("n", range(4))
def test_that_needs_the_device(n):
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
"""


def ran(folder: Path, *options: str) -> str:
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n")
    command = ("-m", "pytest", "-q", "-p", "shiplap_testing.plugin", *options, folder / "test_it.py")
    return python(*command, cwd=folder).stdout


def test_a_file_stays_together_and_with_those_that_share_a_process():
    tests = "packages/shiplap/tests"
    disjoint = [
        f"{tests}/judge/test_cheats.py::test_a_cheat[a]",
        f"{tests}/dispatch/test_fake.py::test_it[a]",
        f"{tests}/gpu/test_zoo_gpu.py::test_it[a]",
        "packages/shiplap-dense/tests/dense/gpu/test_cuda.py::test_it[a]",
        "packages/shiplap-dense/tests/dense/gpu/test_cuda.py::test_of_every_config_of[a]",
        "packages/shiplap-dense/tests/dense/gpu/test_cuda.py::test_of_every_config_of[b]",
    ]
    assert len({schedule.unit_of(nodeid) for nodeid in disjoint}) == len(disjoint)
    assert schedule.unit_of(disjoint[0]) == schedule.unit_of(f"{tests}/judge/test_fresh.py::test_it")
    assert schedule.unit_of(disjoint[1]) == schedule.unit_of(f"{tests}/dispatch/test_fake.py::test_more")
    assert schedule.unit_of(disjoint[3]) == schedule.unit_of(disjoint[3].replace("[a]", "[b]"))


@pytest.mark.long
def test_a_worker_whose_device_is_broken_is_replaced(tmp_path):
    shown = ran(tmp_path, "-n", "1", "--dist", "loadfile")
    assert "the answer was wrong" in shown
    assert "worker 'gw0' crashed" in shown
    assert "4 passed" in shown


@pytest.mark.long
def test_without_workers_the_run_ends(tmp_path):
    shown = ran(tmp_path, "-n", "0")
    assert "the device stopped answering after" in shown
    assert "passed" not in shown


@pytest.mark.parametrize(
    ("visible", "worker", "device", "together"),
    [
        ("0,1", "gw0", "0", 3),
        ("0,1", "gw3", "1", 2),
        ("2,5,7", "gw4", "5", 2),
        ("3", "gw4", "3", 5),
        ("", "gw1", "", 5),
    ],
)
def test_workers_take_devices_in_turn(monkeypatch, visible, worker, device, together):
    """Each worker of five sees one device of those that the run sees, and knows how many share it with it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "5")
    config = SimpleNamespace(workerinput={"workerid": worker}, stash={})
    plugin._take_one_device(config)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == device
    assert config.stash[plugin._TOGETHER] == together


def test_devices_are_numbered_as_cuda_numbers_them(monkeypatch):
    """A container can have the files of devices 3 and 5 alone, which are devices 0 and 1 of CUDA in it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "5")
    monkeypatch.setattr(plugin, "glob", lambda pattern: ["/dev/nvidia5", "/dev/nvidia3"])
    for worker, device, together in (("gw0", "0", 3), ("gw3", "1", 2)):
        config = SimpleNamespace(workerinput={"workerid": worker}, stash={})
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        plugin._take_one_device(config)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == device
        assert config.stash[plugin._TOGETHER] == together


def test_a_module_that_is_imported_while_a_name_is_patched_does_not_keep_the_patch(tmp_path, monkeypatch):
    """Otherwise later tests of the worker see it, if no earlier one has imported the module."""
    (tmp_path / "shiplap_first.py").write_text("def name():\n    return 'original'\n")
    (tmp_path / "shiplap_second.py").write_text(
        "from shiplap_first import name\nfrom shiplap_first import name as other\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    first = import_module("shiplap_first")
    loaded = frozenset(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first, "name", lambda: "patched")
        second = import_module("shiplap_second")
        assert second.name() == "patched"
        assert plugin.release_patches(patch, loaded) == ["shiplap_second.name", "shiplap_second.other"]
        assert first.name() == "patched", "while the test runs"
    assert first.name() == second.name() == second.other() == "original"
    for name in ("shiplap_first", "shiplap_second"):
        del sys.modules[name]


DRAWN = """
import random, numpy, pytest, torch

drawn = []

@pytest.mark.parametrize("n", range(3))
def test_draws(n):
    drawn.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
    assert len({*drawn}) == len(drawn)
    print("drew", n, drawn[-1])
"""


def test_a_test_draws_the_same_values_alone_and_after_others(tmp_path):
    (tmp_path / "test_it.py").write_text(DRAWN)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def drew(*options: str) -> list[str]:
        command = ("-m", "pytest", "-q", "-s", "-p", "shiplap_testing.plugin", *options, tmp_path / "test_it.py")
        return [
            line.partition("drew")[2] for line in python(*command, cwd=tmp_path).stdout.splitlines() if "drew" in line
        ]

    every = drew()
    assert len(every) == 3
    assert drew("-k", "2") == every[2:]
    others = drew("--hypothesis-seed=7")
    assert len({*every, *others}) == 6, "a number draws other values"
    assert drew("--hypothesis-seed=7", "-k", "2") == others[2:]
