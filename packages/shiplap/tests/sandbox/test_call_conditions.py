"""Arguments under other conditions of a caller, and in memory that two processes share."""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch

from shiplap.sandbox.arguments import ArgumentArena, unpack_arguments
from shiplap.sandbox.call_conditions import CONDITIONS
from shiplap.sandbox.kept_results import all_are_equal


def seen_under(conditions: str, *args: Any) -> tuple[Any, ...]:
    with torch.no_grad():
        return tuple(CONDITIONS[conditions](lambda *given: given, *args))


def test_on_parameters_tensors_of_numbers_are_parameters_that_share_memory() -> None:
    x, n = torch.randn(3), torch.arange(3)
    given = seen_under("parameters", x, n, 2, None)
    assert isinstance(given[0], torch.nn.Parameter)
    assert given[0].data_ptr() == x.data_ptr()
    assert given[1:] == (n, 2, None)


def test_on_one_tensor_equal_arguments_are_the_same() -> None:
    x = torch.randn(3, 4)
    given = seen_under("one tensor", x, x.clone(), x + 1, x.clone().t().contiguous().t(), 2)
    assert given[1] is given[0] is x
    assert len({id(g) for g in given}) == 4  # others differ in values, strides or kind


def test_arguments_are_views_at_times_and_at_times_none() -> None:
    arena = ArgumentArena()
    packed = arena.pack([torch.randn(4, 6)[:, 1:3], torch.randn(3)])
    handle = arena.write()
    try:
        with mmap.mmap(handle, 0) as memory:
            made = [unpack_arguments(packed, memory) for _ in range(40)]
            # Of a call, all or none, since torch.compile may compile once more for each mixture.
            assert {tuple(t._is_view() for t in listed) for listed in made} == {(True, True), (False, False)}
            assert all(torch.equal(a, b) for listed in made for a, b in zip(listed, made[0], strict=True))
            assert {listed[0].stride() for listed in made} == {(6, 1)}
            del made
    finally:
        os.close(handle)


def test_small_results_are_compared_together_and_large_ones_alone() -> None:
    small, large = torch.zeros(8, dtype=torch.uint8), torch.zeros(3 << 20, dtype=torch.uint8)
    pairs = [(small, small.clone()), (large, large.clone()), (small[:0], small[:0])]
    assert all_are_equal(pairs)
    assert all_are_equal([])
    for changed in (pairs[0][1], pairs[1][1]):
        changed[-1] = 1
        assert not all_are_equal(pairs)
        changed[-1] = 0
