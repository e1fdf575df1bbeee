"""Each edit of what an op uses changes the key under which torch caches its graphs, and no other edit does."""

from __future__ import annotations

import importlib
import re
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

    def key(edit: tuple[str, str, str] | None, files: dict[str, str] = FILES) -> str:
        for name in [n for n in sys.modules if n.partition(".")[0] == "edited"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        for name, text in files.items():
            if edit is not None and edit[0] == name:
                assert text.count(edit[1]) == 1, edit
                text = text.replace(edit[1], edit[2])
            (tmp_path / "edited" / name).parent.mkdir(exist_ok=True)
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


# Each form in which Python code can hold a constant or use other code. Each number with a point stands once.
FORMS = """
import functools, collections, contextlib, types, enum, typing
BASE = 1.0
ITEMS = (2.0, 3.0)
SET = frozenset({4.0})
def scaled(x): return x * BASE
class Meta(type):
    rate = 5.0
class WithMeta(metaclass=Meta): pass
class Parent:
    k = 6.0
    def inherited(self, x): return x + 7.0
    @staticmethod
    def st(x): return x + 8.0
    @classmethod
    def cm(cls, x): return x + cls.k * 9.0
class Child(Parent):
    __slots__ = ("s",)
    def __init__(self): self.s = 10.0
    def __call__(self, x): return x + 11.0
    def __getitem__(self, i): return 12.0
    def __enter__(self): return 13.0
    def __exit__(self, *a): return None
child = Child()
class Desc:
    def __get__(self, o, t=None): return 14.0
class UsesDesc: d = Desc()
NT = typing.NamedTuple("NT", [("a", float)])
nt = NT(15.0)
class NT2(typing.NamedTuple):
    b: float = 16.0
ns = types.SimpleNamespace(v=17.0)
dd = collections.defaultdict(lambda: 18.0)
od = collections.OrderedDict(q=19.0)
@functools.lru_cache
def cached(k): return k + 20.0
@functools.singledispatch
def single(x): return 21.0
@single.register
def _(x: int): return 22.0
@contextlib.contextmanager
def region():
    yield 23.0
lam = {"f": lambda x: x + 24.0}
nested = [[25.0], {"z": (26.0,)}]
def outer(x):
    def inner(y):
        def innermost(z): return z + 27.0
        return innermost(y)
    return inner(x)
def gen(x): return sum(x * k for k in (28.0, 29.0))
def comp(x): return [x + v for v in range(30)][-1]
def fstr(x): return x + len(f"abc{31}def")
def bytes_(x): return x + b"a"[0]
def match_(x, m=2):
    match m:
        case 32: return x + 33.0
        case _: return x + 34.0
def tryit(x):
    try: return x + 35.0
    except ValueError: return x + 36.0
def glob(x):
    return x + globals()["BASE2"]
BASE2 = 37.0
def gattr(x):
    return x + getattr(ns, "v" "")
def local_import(x):
    from edited import late
    return x + late.LATE
def star(x, *a, **k): return x
def kw(x): return star(x + 38.0, *(39.0,), **{"u": 40.0})
def walrus(x): return x + (y := 41.0)
def chained(x): return x + (42.0 if BASE < 43.0 else 44.0)
def sliced(x): return x[45:] if False else x
def big(x): return x + 123456789012345678901234567890 % 46
def cplx(x): return x + (47j).imag
def neg(x): return x + -0.0
def annotated(x: "48" = 49.0): return x
import numpy as np, torch
ARR = np.array([50.0, 51.0])
TEN = torch.tensor([52.0, 53.0])
PAR = torch.nn.Linear(1, 1)
with torch.no_grad(): PAR.weight.fill_(54.0); PAR.bias.fill_(54.5)
DT = torch.float32
DEV = torch.device("cpu")
def setit(x): x.shiplap_attr = 55.0; return x
def fn_attr(x): return x + fn_attr.rate
fn_attr.rate = 56.0
def deff(x, table={"t": 57.0}): return x + table["t"]
def deleg(x): return deleg2(x)
def deleg2(x): return deleg3(x)
def deleg3(x): return x + 58.0
BIG = list(range(100))
BIGD = {str(i): float(i) for i in range(200)}
class WithInit:
    def __init__(self, w=59.0): self.w = w
def makes(x): return x + WithInit().w
class P:
    @property
    def p(self): return 60.0
    @functools.cached_property
    def c(self): return 61.0
pp = P()
TPL = "template {x} 62"
def fmt(x): return x + len(TPL.format(x="63"))
def order(x): return (x - 64.0) * 65.0
def logic(x): return x if (True and not False) else x + 66.0
def loops(x):
    for i in range(67): x = x + i
    while False: x = x + 1
    return x
def asserts(x):
    assert 68 > 0, "message"
    return x
def decorated_twice(f):
    @functools.wraps(f)
    def w(x): return f(x) * 69.0
    return w
@decorated_twice
@decorated_twice
def twice(x): return x + 70.0
"""

OP_OF_FORMS = """
import torch, shiplap as sl
from jaxtyping import Float
from torch import Tensor
from edited import helpers as h
from edited.helpers import *
from edited import sub
import edited.sub as aliased
def tile(sizes, config): return (1, 1, 1)
@sl.op("edited::f")
def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    y = h.scaled(x) + h.ITEMS[0] + len(h.SET) + h.WithMeta.rate if False else x
    y = h.child.inherited(y) + h.Parent.st(y) + h.Child.cm(y) + h.child(y) + h.child[0] + h.child.s
    with h.child as e, h.region() as r: y = y + e + r
    y = y + h.UsesDesc().d + h.nt.a + h.NT2().b + h.ns.v + h.dd["x"] + h.od["q"] + h.cached(1) + h.single(2)
    y = h.lam["f"](y) + h.nested[1]["z"][0] + h.nested[0][0]
    for fn in (h.outer, h.gen, h.comp, h.fstr, h.bytes_, h.match_, h.tryit, h.gattr): y = fn(y)
    for fn in (h.kw, h.walrus, h.chained, h.sliced, h.big, h.cplx, h.neg, h.annotated): y = fn(y)
    y = y + h.ARR[0] + h.TEN[0] + h.PAR(y[:1]) + torch.ones(1, dtype=h.DT, device=h.DEV)
    y = h.setit(y) + h.fn_attr(y) + h.deff(y) + h.deleg(y) + h.BIG[3] + h.BIGD["7"] + h.makes(y) + h.pp.p + h.pp.c
    y = h.fmt(y) + h.order(y) + h.logic(y) + h.loops(y) + h.asserts(y) + h.twice(y)
    y = y + scaled(y) + sub.SUB + aliased.fn(y) + list(h.WithMeta.__mro__ and [h.Meta.rate])[0]
    return y
@f.kernel("cpu")
def _(x, *, out): out.copy_(h.local_import(x) + h.glob(x))
f.samples(lambda rng, sizes, dtype, device: (torch.ones(sizes["n"]) * 72.0,))
"""

FILES_OF_FORMS = {
    "__init__.py": "",
    "helpers.py": FORMS,
    "ops.py": OP_OF_FORMS,
    "late.py": "LATE = 73.0\n",
    "sub/__init__.py": "from edited.sub.deep import fn, SUB\n",
    "sub/deep.py": "SUB = 74.0\ndef fn(x): return x + 75.0\n",
}

OTHER_EDITS = [
    ("helpers.py", *edit)
    for edit in [
        ("range(30)", "range(31)"),
        ('f"abc{31}def"', 'f"abcd{31}def"'),
        ("{31}", "{310}"),
        ('b"a"', 'b"b"'),
        ("case 32", "case 2"),
        ("x[45:]", "x[46:]"),
        ("% 46", "% 47"),
        ("47j", "48j"),
        ("-0.0", "0.0"),
        ("torch.float32", "torch.float64"),
        ("{x} 62", "{x} 622"),
        ('x="63"', 'x="633"'),
        ("range(67)", "range(68)"),
        ("assert 68 > 0", "assert 68 > 1"),
        ("True and not False", "True or not False"),
        ("list(range(100))", "list(range(1, 101))"),
        ("float(i) for i", "float(i+1) for i"),
        ("@decorated_twice\n@decorated_twice", "@decorated_twice"),
        ("except ValueError", "except TypeError"),
        ('"v" ""', '"v2"[:1] + ""'),
        ("(x - 64.0) * 65.0", "x - 64.0 * 65.0"),
    ]
] + [
    ("ops.py", "h.child(y) +", ""),
    ("ops.py", "h.kw, h.walrus", "h.walrus, h.kw"),
    ("sub/__init__.py", "from edited.sub.deep import fn, SUB", "from edited.sub.deep import fn\nSUB = 5.5"),
]


@pytest.mark.long
def test_each_form_of_a_constant_or_of_a_use_changes_the_key(key_after):
    numbers = [
        (name, number, str(float(number) + 0.5))
        for name, text in FILES_OF_FORMS.items()
        for number in re.findall(r"(?<![\w.])\d+\.\d+(?!\w)", text)
        if text.count(number) == 1
    ]
    edits = [*numbers, *OTHER_EDITS]
    before = key_after(None, FILES_OF_FORMS)
    assert before == key_after(None, FILES_OF_FORMS)
    keys = {edit: key_after(edit, FILES_OF_FORMS) for edit in edits}
    assert [edit for edit, key in keys.items() if key == before] == []
    assert len({*keys.values()}) == len(edits) >= 75
