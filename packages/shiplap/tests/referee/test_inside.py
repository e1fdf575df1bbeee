"""What an answer of the sandboxed process points to is still there when the referee reads it."""

from __future__ import annotations

import contextlib
import gc
import os

import pytest
import torch
from torch import Tensor

from shiplap.referee import inside
from shiplap.referee.wire import Arena


@pytest.fixture
def memory():
    """One packed tensor, and the memory that holds it."""
    arena = Arena(1)
    told = arena.pack([torch.arange(64.0)])
    handle = arena.write()
    yield told, handle
    os.close(handle)


def alive() -> set[int]:
    """Addresses of all tensors. Other tests may have left some that have none, such as sparse ones."""
    gc.collect()
    addresses = set()
    for tensor in gc.get_objects():
        if type(tensor) is Tensor:
            with contextlib.suppress(RuntimeError):
                addresses.add(tensor.data_ptr())
    return addresses


@pytest.mark.parametrize("asked", ["call", "ops"])
def test_copies_of_results_on_a_device_are_kept(monkeypatch, memory, asked) -> None:
    monkeypatch.setattr(inside, "_home", lambda v: v.detach().clone() if isinstance(v, Tensor) else v)  # as of a device
    told, handle = memory
    host = inside.Host()
    host._target = lambda x: (x + 1, x * 2)
    answer = host.answer({"do": asked, "args": told}, handle)
    places = {out["tensor"]["at"] for out in answer["outs"]}
    assert len(places) == 2
    assert places <= alive()
