"""A kernel that is compiled without a launch lies where Triton's own launches look for it: the keys are the same."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shiplap.kernels.triton import triton_launcher
from shiplap.kernels.triton.specialize import SpecializedForm, compile_form
from shiplap.torch_private.triton_keys import settle_cache_key, triton_attributes

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
    compile_form(Kernel(before), SpecializedForm(SIGNATURE, CONSTANTS, OURS, {}), 0, (), 90)
    assert asked == [{(0,): DIVISIBLE, (1,): []} if before else OURS]


MODULES = {
    "shared_inner": """
import sys
from triton.runtime.jit import JITFunction
import triton.language as tl

WIDTH = tl.constexpr(7)
shared_outer = sys.modules[__name__.replace("inner", "outer")]

@JITFunction
def innermost(x):
    return x + WIDTH

@JITFunction
def endless(x):
    return endless(x) + WIDTH
""",
    "shared_outer": """
from triton.runtime.jit import JITFunction
import triton.language as tl
import shared_inner
from shared_inner import innermost

STEP = tl.constexpr(3)

@JITFunction
def middle(x):
    return innermost(x) * STEP

def make(called):
    @JITFunction
    def closed(x, BLOCK: tl.constexpr):
        return called(x)
    return closed

@JITFunction
def first(x, BLOCK: tl.constexpr):
    tl.store(x, middle(tl.load(x)))

@JITFunction
def second(x, BLOCK: tl.constexpr):
    tl.store(x, middle(shared_inner.shared_outer.shared_inner.innermost(tl.load(x))))

@JITFunction
def third(x, BLOCK: tl.constexpr):
    tl.store(x, shared_inner.endless(tl.load(x)))

closed = make(middle)

@JITFunction
def wrong(x, BLOCK: tl.constexpr):
    return print_it(x)

def print_it(x): ...

@JITFunction
def calls_wrong(x, BLOCK: tl.constexpr):
    return wrong(x, BLOCK)
""",
}
KERNELS = "first", "second", "third", "closed"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """What a new process imports: nothing has asked for a key of its kernels."""

    def load() -> ModuleType:
        specs = []
        for name, text in MODULES.items():
            path = tmp_path / f"{name}.py"
            path.write_text(text)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
            specs.append(spec.loader)
        for name, loader in zip(MODULES, specs, strict=True):
            loader.exec_module(sys.modules[name])
        return sys.modules["shared_outer"]

    return load


def keys(module: ModuleType, order: tuple[str, ...]) -> dict[str, str]:
    for name in order:
        settle_cache_key(getattr(module, name))
        _ = getattr(module, name).cache_key
    return {name: getattr(module, name).cache_key for name in KERNELS}


def test_a_kernel_has_one_key_whatever_was_launched_before_it(module):
    """Triton's own depends on it: a process that launched another kernel first compiled all of them again."""
    assert keys(module(), KERNELS) == keys(module(), KERNELS[::-1])


def test_a_kernels_key_holds_the_globals_of_all_that_it_calls(module):
    first = module().first
    settle_cache_key(first)
    _ = first.cache_key
    assert {name for name, _ in first.used_global_vals} == {"STEP", "WIDTH"}


def test_what_triton_refuses_is_still_refused(module):
    outer = module()
    settle_cache_key(outer.calls_wrong)
    with pytest.raises(RuntimeError, match="Unsupported function"):
        _ = outer.calls_wrong.cache_key


def launch(kernel: Any) -> None:
    triton_launcher(kernel)[(1,)]
    _ = kernel.cache_key  # which Triton asks for when it is called


def compile_ahead(kernel: Any) -> None:
    kernel.warmup = lambda **_: kernel.cache_key
    triton_launcher(kernel).compile((1,))


def compile_for_a_wheel(kernel: Any) -> None:
    form = SpecializedForm({"x": "*fp32", "BLOCK": "constexpr"}, {(1,): 64}, {(0,): DIVISIBLE}, {})
    compile_form(kernel, form, 0, (), 90)


@pytest.mark.parametrize("way", [launch, compile_ahead, compile_for_a_wheel])
def test_whoever_asks_for_a_key_settles_it_before(way, module, monkeypatch):
    want, outer = keys(module(), KERNELS), module()

    def asked(source: Any, **_: Any) -> Any:
        _ = source.fn.cache_key
        facts = SimpleNamespace(name="f", num_warps=4, shared=0, _asdict=lambda: {"num_ctas": 1})
        return SimpleNamespace(metadata=facts, asm={"cubin": b""})

    monkeypatch.setattr("triton.compile", asked)
    monkeypatch.setattr("shiplap.kernels.triton.launcher._unsupported_reason", lambda kernel: "is only asked for")
    for name in KERNELS[::-1]:
        way(getattr(outer, name))
    assert {name: getattr(outer, name).cache_key for name in KERNELS} == want
