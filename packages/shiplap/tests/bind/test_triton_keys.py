"""A kernel that is compiled without a launch lies where Triton's own launches look for it: the keys are the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shiplap.bind.specialise import Form, compile_form
from shiplap.compat.triton_keys import triton_attributes

triton = pytest.importorskip("triton")

SIGNATURE = {"x": "*fp32", "n": "i32", "one": "constexpr", "flag": "u1", "BLOCK": "constexpr"}
CONSTANTS = {(2,): 1, (4,): 64}
DIVISIBLE = [["tt.divisibility", 16]]
OURS = {(0,): DIVISIBLE, (1,): [], (2,): [], (4,): []}


class Backend:
    @staticmethod
    def parse_attr(description: str) -> list[list[object]]:
        return [["tt.divisibility", 16]] if "D" in description else []


class Kernel:
    """What Triton 3.7 makes of a call's arguments; with ``before``, what Triton 3.6 made of them."""

    debug = False

    def __init__(self, before: bool) -> None:
        self.before = before

    def _pack_args(self, backend: Any, kwargs: Any, bound: Any, special: Any, options: Any) -> tuple[Any, ...]:
        assert list(bound) == list(SIGNATURE)
        kinds = [kind for kind, _ in special]
        output = [v if self.before else "" if kind == "constexpr" else v for kind, v in special]
        attributes = {(at,): backend.parse_attr(v) for at, v in enumerate(output) if isinstance(v, str)}
        constants = {(at,): list(bound.values())[at] for at, kind in enumerate(kinds) if kind == "constexpr"}
        return {}, dict(zip(SIGNATURE, kinds, strict=True)), constants, attributes


def test_constants_are_among_the_attributes_where_triton_lists_them():
    told = triton_attributes(Kernel(False), Backend, SIGNATURE, CONSTANTS, OURS)
    assert told == OURS
    assert list(told) == list(OURS), "the key has them in their order"


def test_constants_are_not_among_the_attributes_of_triton_3_6():
    told = triton_attributes(Kernel(True), Backend, SIGNATURE, CONSTANTS, OURS)
    assert told == {(0,): DIVISIBLE, (1,): []}


def test_a_triton_that_packs_otherwise_gets_our_own_attributes():
    assert triton_attributes(object(), Backend, SIGNATURE, CONSTANTS, OURS) == OURS


@pytest.mark.parametrize("before", [False, True])
def test_the_compiler_is_given_what_a_launch_gives_it(before, monkeypatch):
    asked = []

    def compile(source: Any, **_: Any) -> Any:
        asked.append(source.attrs)
        facts = SimpleNamespace(name="f", num_warps=4, shared=0, _asdict=lambda: {"num_ctas": 1})
        return SimpleNamespace(metadata=facts, asm={"cubin": b""})

    monkeypatch.setattr("triton.compile", compile)
    monkeypatch.setattr("triton.compiler.ASTSource", lambda *given: SimpleNamespace(attrs=given[3]))
    monkeypatch.setattr("triton.compiler.make_backend", lambda target: Backend)
    compile_form(Kernel(before), Form(SIGNATURE, CONSTANTS, OURS, {}), 0, (), 90)
    assert asked == [{(0,): DIVISIBLE, (1,): []} if before else OURS]
