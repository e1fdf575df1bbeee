"""What the instructions of a function name."""

import torch

from shiplap.declare.code_text import code_use

FIRST, SECOND = [], []


def changes_the_first():
    one = FIRST
    other = SECOND
    one.append(1)
    return other


def calls_an_operator(x):
    return torch.ops.demo.thing(x)


def test_a_local_name_stands_for_what_was_assigned_to_it():
    assert code_use(changes_the_first.__code__).stored == {"FIRST"}


def test_operators_are_found_by_their_module():
    assert code_use(calls_an_operator.__code__).operators == {("torch", "demo::thing")}
    assert code_use((lambda x: x.other.ops.demo).__code__).operators == set()
