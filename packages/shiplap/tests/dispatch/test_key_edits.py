"""Each edit of what an op uses changes the key under which torch caches its graphs, and no other edit does."""

from __future__ import annotations

import importlib
import sys

import pytest

from shiplap.dispatch import compile_cache_key
from shiplap.torch_private import graph_keys

HELPERS = """
FACTOR = 2.0
TABLE = {"a": 3.0, "b": [4.0, 5.0]}

def scaled(x): return x * FACTOR
def unused(x): return x - 100
"""

OPS = '''
import enum, functools
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from edited import helpers

CONSTANT = 11.0

class Mode(enum.Enum):
    FAST = 13

@dataclass
class Settings:
    block: int = 17

class Scaler:
    rate = 19.0
    def __init__(self, by): self.by = by
    def apply(self, x): return x * self.rate + self.by
    @property
    def twice(self): return self.by * 23.0

scaler = Scaler(29.0)

def closing(value):
    def inner(x): return x + value
    return inner
closed = closing(31.0)

def decorate(by):
    def wrap(fn):
        @functools.wraps(fn)
        def run(x): return fn(x) + by + 37.0
        return run
    return wrap

@decorate(41.0)
def decorated(x): return x + 43.0

def default(x, k=47.0, *, named=53.0): return x * k + named
def for_kernel(x): return x + 59.0
def for_gradient(g): return g * 61.0
def for_condition(x): return len(x) > 67
part = functools.partial(default, k=71.0)

@sl.op("edited::f", requires="n >= 1", autocast="float32", tolerance=(1e-3, "a reason"))
def f(x: Float[Tensor, "n"], a: float = 73.0, way: Literal["up", "down"] = "up") -> Float[Tensor, "n"]:
    """A docstring."""
    y = helpers.scaled(x) + helpers.TABLE["a"] + helpers.TABLE["b"][1] + CONSTANT + Mode.FAST.value  # a comment
    y = scaler.apply(y) + scaler.twice + Settings().block + closed(y) + decorated(y) + default(y) + part(y)
    return y * 79.0 if way == "up" else y

def default_config(sizes): return {"BLOCK": 2}
def prior(sizes, config): return config["BLOCK"] * 83.0

@f.kernel("cpu", name="first", dtypes=("float32", "float64"), supports=lambda x: for_condition(x), workspace="4 * n",
          configs=[{"BLOCK": 2}, {"BLOCK": 4}], default=default_config, prior=prior)
def first(x, a, way, out, workspace, *, BLOCK):
    out.copy_(for_kernel(x) * 89.0)

@f.kernel("cuda", name="second")
def second(x, a, way):
    return x * 97.0

f.template("cpu", "k.cpp.jinja", configs=[{"TILE": 8}], supports=lambda sizes, dtypes, config: sizes["n"] > 101)

def traced(x, a, way): return x * 103.0
f.template("cuda", traced, default=False)

def surrogate(x, a, way): return x * 107.0

@f.backward(surrogate=surrogate)
def gradient(grad, saved, needs):
    return {"x": for_gradient(grad) * saved.x}

f.buckets("pow2")
'''

FILES = {
    "__init__.py": "",
    "helpers.py": HELPERS,
    "ops.py": OPS,
    "k.cpp.jinja": 'template {% include "part.jinja" %}\n',
    "part.jinja": "part 109\n",
}

EDITS = {
    "reference": ("ops.py", "y * 79.0", "y * 80.0"),
    "branch of the reference": ("ops.py", 'way == "up"', 'way == "down"'),
    "helper in another module": ("helpers.py", "x * FACTOR", "x / FACTOR"),
    "constant of another module": ("helpers.py", "FACTOR = 2.0", "FACTOR = 2.5"),
    "table of another module": ("helpers.py", '"a": 3.0', '"a": 3.5'),
    "list in a table": ("helpers.py", "[4.0, 5.0]", "[4.0, 5.5]"),
    "constant": ("ops.py", "CONSTANT = 11.0", "CONSTANT = 12.0"),
    "enum": ("ops.py", "FAST = 13", "FAST = 14"),
    "dataclass": ("ops.py", "block: int = 17", "block: int = 18"),
    "class attribute": ("ops.py", "rate = 19.0", "rate = 20.0"),
    "method": ("ops.py", "x * self.rate + self.by", "x * self.rate - self.by"),
    "property": ("ops.py", "self.by * 23.0", "self.by * 24.0"),
    "attribute of an object": ("ops.py", "Scaler(29.0)", "Scaler(30.0)"),
    "closure": ("ops.py", "closing(31.0)", "closing(32.0)"),
    "function with a closure": ("ops.py", "return x + value", "return x - value"),
    "decorator": ("ops.py", "+ by + 37.0", "+ by + 38.0"),
    "argument of a decorator": ("ops.py", "@decorate(41.0)", "@decorate(42.0)"),
    "decorated function": ("ops.py", "x + 43.0", "x + 44.0"),
    "decorator taken away": ("ops.py", "@decorate(41.0)\n", ""),
    "default of a helper": ("ops.py", "k=47.0", "k=48.0"),
    "keyword default of a helper": ("ops.py", "named=53.0", "named=54.0"),
    "partial function": ("ops.py", "k=71.0", "k=72.0"),
    "default of an argument": ("ops.py", "a: float = 73.0", "a: float = 74.0"),
    "choices of an argument": ("ops.py", '["up", "down"]', '["up", "down", "on"]'),
    "precondition": ("ops.py", 'requires="n >= 1"', 'requires="n >= 2"'),
    "autocast rule": ("ops.py", 'autocast="float32"', 'autocast="widest"'),
    "tolerance": ("ops.py", "(1e-3,", "(1e-2,"),
    "kernel": ("ops.py", "* 89.0)", "* 90.0)"),
    "helper of a kernel": ("ops.py", "x + 59.0", "x + 60.0"),
    "kernel of another device": ("ops.py", "x * 97.0", "x * 98.0"),
    "name of a kernel": ("ops.py", 'name="second"', 'name="other"'),
    "dtypes of a kernel": ("ops.py", 'dtypes=("float32", "float64")', 'dtypes=("float32",)'),
    "condition of a kernel": ("ops.py", "for_condition(x),", "not for_condition(x),"),
    "helper of a condition": ("ops.py", "len(x) > 67", "len(x) > 68"),
    "workspace": ("ops.py", '"4 * n"', '"8 * n"'),
    "config": ("ops.py", '{"BLOCK": 4}', '{"BLOCK": 8}'),
    "default config": ("ops.py", 'return {"BLOCK": 2}', 'return {"BLOCK": 4}'),
    "prior": ("ops.py", "* 83.0", "* 84.0"),
    "source of a template": ("k.cpp.jinja", "template", "another template"),
    "file in a template": ("part.jinja", "part 109", "part 110"),
    "config of a template": ("ops.py", '{"TILE": 8}', '{"TILE": 16}'),
    "condition of a template": ("ops.py", "> 101)", "> 102)"),
    "function as a template": ("ops.py", "x * 103.0", "x * 104.0"),
    "default template": ("ops.py", "default=False", "default=True"),
    "template taken away": ("ops.py", 'f.template("cuda", traced, default=False)', ""),
    "surrogate": ("ops.py", "x * 107.0", "x * 108.0"),
    "gradient": ("ops.py", "for_gradient(grad) * saved.x", "for_gradient(grad) + saved.x"),
    "helper of a gradient": ("ops.py", "g * 61.0", "g * 62.0"),
    "saved values": ("ops.py", "surrogate=surrogate)", 'surrogate=surrogate, saves=("x", "out"))'),
    "strides of a gradient": ("ops.py", "surrogate=surrogate)", "surrogate=surrogate, strided=True)"),
    "gradient taken away": ("ops.py", "@f.backward(surrogate=surrogate)\n", ""),
    "buckets": ("ops.py", 'f.buckets("pow2")', 'f.buckets("exact")'),
}

NEUTRAL = {
    "comment": ("ops.py", "# a comment", "# another comment"),
    "docstring": ("ops.py", '"""A docstring."""', '"""Another docstring."""'),
    "unused function": ("helpers.py", "x - 100", "x - 101"),
    "unused constant": ("helpers.py", "FACTOR = 2.0", "FACTOR = 2.0\nUNUSED = 5"),
    "blank lines": ("ops.py", "CONSTANT = 11.0", "\n\nCONSTANT = 11.0"),
}


@pytest.fixture
def key_after(tmp_path, monkeypatch):
    """Writes the package ``edited`` with one edit, imports it, and returns the key of a graph with its op."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))

    def key(edit: tuple[str, str, str] | None) -> str:
        for name in [n for n in sys.modules if n.partition(".")[0] == "edited"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        (tmp_path / "edited").mkdir(exist_ok=True)
        for name, text in FILES.items():
            if edit is not None and edit[0] == name:
                assert text.count(edit[1]) == 1, edit
                text = text.replace(edit[1], edit[2])
            (tmp_path / "edited" / name).write_text(text)
        op = importlib.import_module("edited.ops").f
        names = frozenset({op.overload.name()})  # what a graph that calls the op has
        return compile_cache_key.graph_cache_key(graph_keys.GraphOperators(names, traced_later=False, others=False))

    return key


def test_each_edit_changes_the_key_of_a_graph(key_after):
    before = key_after(None)
    assert before == key_after(None)
    keys = {name: key_after(edit) for name, edit in EDITS.items()}
    assert [name for name, key in keys.items() if key == before] == []
    assert len({*keys.values()}) == len(EDITS) >= 40
    assert [name for name, edit in NEUTRAL.items() if key_after(edit) != before] == []
