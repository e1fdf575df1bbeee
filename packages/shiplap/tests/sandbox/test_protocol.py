"""What the referee reads of a result runs no code of the one who made it."""

import os
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch

from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.protocol import structure_of, tree_leaves

HELD = torch.ones(1)


class Listed(list):
    def __iter__(self):
        return iter([torch.zeros(1)])


class Paired(tuple):
    def __iter__(self):
        return iter([torch.zeros(1)])


class Mapped(dict):
    def values(self):
        return [torch.zeros(1)]


class Named(NamedTuple):
    out: torch.Tensor
    rest: list


@pytest.mark.parametrize("result", [Listed([HELD]), Paired([HELD]), Mapped(out=HELD)], ids=lambda r: type(r).__name__)
def test_a_container_is_read_as_it_lies_in_memory(result):
    (leaf,) = tree_leaves([result])
    assert leaf is HELD


def test_honest_containers():
    values, at = torch.rand(4).max(0)
    result = Named(values, [at, OrderedDict(a=HELD, b=None), 3])
    assert [id(v) for v in tree_leaves(result)] == [id(values), id(at), id(HELD), id(3)]
    assert len(tree_leaves(torch.rand(4).max(0))) == 2


def test_nobody_changes_the_length_of_a_file_with_arguments():
    """A process that is judged has it open, too; the referee would write into what is no longer there."""
    arena = ArgumentArena()
    arena.pack([torch.rand(8)])
    handle = arena.write()
    try:
        for length in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(handle, length)
        arena.write(handle)
    finally:
        os.close(handle)


def test_how_results_lie_in_each_other():
    assert structure_of([HELD, None, {"b": HELD, "a": (HELD,)}]) == "(.,None,{a:(.),b:.})"
    assert structure_of(Named(HELD, [])) == structure_of((HELD, ())) == "(.,())"
    assert structure_of(Mapped(out=HELD)) == "{out:.}"
    assert tree_leaves({"b": 1, "a": 2}) == tree_leaves({"a": 2, "b": 1}) == [2, 1]
