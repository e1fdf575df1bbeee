"""Tensors beside memory that nobody may touch."""

import os
import signal

import pytest
import torch

from shiplap.audit.guarded_memory import PAGE, copy_beside_guard
from shiplap_testing.crashes import read_unmapped


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.complex128])
def test_values_and_place(after, dtype):
    t = torch.arange(15).reshape(5, 3).T.to(dtype)
    placed = copy_beside_guard(t, after=after)
    assert torch.equal(placed, t)
    assert placed.is_contiguous()
    size = t.numel() * t.itemsize
    assert (placed.data_ptr() + (size if after else 0)) % PAGE == 0


@pytest.mark.parametrize("after", [True, False])
def test_an_access_beside_it_ends_the_process(after):
    placed = copy_beside_guard(torch.ones(5), after=after)
    child = os.fork()
    if not child:
        read_unmapped(placed.data_ptr() + (20 if after else -1))
        os._exit(0)
    assert os.waitpid(child, 0)[1] & 0x7F == signal.SIGSEGV


def test_nothing_to_place():
    empty = torch.empty(0, 3)
    assert copy_beside_guard(empty, after=True) is empty
