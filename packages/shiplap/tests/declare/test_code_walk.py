"""One walk over what code uses: each edit that changes results changes the digest, and no other edit does."""

import dis
import importlib
import os
import subprocess
import sys
from types import FunctionType, ModuleType, SimpleNamespace

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.declare.code_digest import code_digest, first_unfollowed
from shiplap.declare.code_text import _is_lookup_of_constant, code_use
from shiplap.declare.code_walk import constants_used, libraries_used
from shiplap_testing import forked

HELPERS = '''
FACTOR = 2.0
class Deep:
    """A class that is used through its module."""
    rate = 1.5
    def of(self, x): return x * self.rate
def scaled(x): return x * FACTOR
def unused(x): return x - 100
'''

MAIN = '''
import enum, functools, json, math, types
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from author import helpers
from author.helpers import Deep as Renamed
import author.inner.leaf

HERE = Path(__file__).parent
CONSTANT = 1.25
TABLE = {"gelu": 0.5, "relu": [1, 2, 3]}
NESTED = [{"k": (1, 2.5)}, {"a", "b"}]
ORDERED = OrderedDict(first=1, second=2)
SPACE = types.SimpleNamespace(tile=16)
ARRAY = np.array([1.0, 2.0])
WEIGHT = torch.tensor([1.0, 2.0, 3.0])
DATA = HERE / "data.txt"
CHAINS = {"double": lambda x: x * 2, "list": [lambda x: x + 4]}

class Mode(enum.Enum):
    FAST = 7

@dataclass
class Settings:
    block: int = 64
    sizes: list = field(default_factory=lambda: [8])

class Base:
    bias = 0.125
    def shift(self, x): return x + self.bias
    def unrelated(self): return None

class Config(Base):
    """A docstring."""
    __slots__ = ("rank",)
    limit = 9
    def __init__(self, k):
        self.k, self.rank, self.fn = k, 21, lambda x: x * 31
        self.nested = Settings()
    def apply(self, x): return self.shift(x) * self.k + self.doubled
    @property
    def doubled(self): return self.limit * 41
    @staticmethod
    def fixed(x): return x + 51
    @classmethod
    def made(cls, x): return x + 61
    @functools.cached_property
    def kept(self): return 71
    def __call__(self, x): return x * 81

config = Config(3.5)
bound = Config(4.5).apply
part = functools.partial(helpers.scaled, 91)

def decorate(by):
    def wrap(fn):
        @functools.wraps(fn)
        def run(x): return fn(x) * by + 101
        return run
    return wrap

@decorate(111)
def decorated(x): return x + 121

@torch.no_grad()
def without(x): return x + 131

@functools.lru_cache(maxsize=None)
def cached(x): return x + 141

@functools.singledispatch
def dispatched(x): return x + 151

@dispatched.register
def _(x: int): return x + 161

def closing(value):
    def inner(x): return x * value
    return inner
closed = closing(171)

def with_default(x, k=181, *, named=191): return x * k + named
def attributed(x): return x * attributed.scale
attributed.scale = 201

def chosen(x):
    return getattr(helpers, "scaled")(x)

def nested(x):
    """A docstring of the function."""
    def inside(y: float) -> float:
        return y + 211
    class Local:
        """A docstring inside."""
        size = 221
    return inside(x) + Local.size

class Meta(type):
    def __getitem__(cls, i): return i + 231
class Indexed(metaclass=Meta): pass

_memo = {}
def remembered(x):
    if x not in _memo:
        _memo[x] = x * 241
    return _memo[x]

def other(x): return x + 999

def late(x): return defined_below(x)

def root(x: float, y: int = 1) -> float:
    """The docstring of the root."""
    # a comment
    a = helpers.scaled(x) + Renamed().of(x) + author.inner.leaf.leaf(x)
    b = config.apply(x) + bound(x) + part() + config(x) + Config.fixed(x) + Config.made(x) + config.kept + config.fn(x)
    c = decorated(x) + without(x) + cached(x) + dispatched(x) + closed(x) + with_default(x) + attributed(x)
    d = CONSTANT + TABLE["gelu"] + NESTED[0]["k"][1] + ORDERED["first"] + SPACE.tile + ARRAY.sum() + WEIGHT.sum()
    e = CHAINS["double"](x) + Mode.FAST.value + len(DATA.read_text()) + chosen(x) + nested(x) + Indexed[1] + late(x)
    return a + b + c + d + e + math.pi + 251 if x > 261 else remembered(x)

def defined_below(x): return x + 271
'''

LEAF = "LEAF = 281\ndef leaf(x): return x + LEAF\n"
FILES = {"__init__.py": "", "helpers.py": HELPERS, "main.py": MAIN, "inner/__init__.py": "", "inner/leaf.py": LEAF}

EDITS = {
    "function of an imported module": ("helpers.py", "x * FACTOR", "x / FACTOR"),
    "constant of an imported module": ("helpers.py", "FACTOR = 2.0", "FACTOR = 3.0"),
    "method of an imported class": ("helpers.py", "x * self.rate", "x + self.rate"),
    "attribute of an imported class": ("helpers.py", "rate = 1.5", "rate = 1.75"),
    "constant of a nested module": ("inner/leaf.py", "LEAF = 281", "LEAF = 282"),
    "function of a nested module": ("inner/leaf.py", "x + LEAF", "x - LEAF"),
    "constant": ("main.py", "CONSTANT = 1.25", "CONSTANT = 1.5"),
    "type of a constant": ("main.py", "CONSTANT = 1.25", "CONSTANT = True"),
    "table": ("main.py", '"gelu": 0.5', '"gelu": 0.75'),
    "order of a table": (
        "main.py",
        '"gelu": 0.5, "relu": [1, 2, 3]',
        '"relu": [1, 2, 3], "gelu": 0.5',
    ),
    "list in a table": ("main.py", "[1, 2, 3]", "[1, 2, 4]"),
    "tuple in a dict in a list": ("main.py", "(1, 2.5)", "(1, 3.5)"),
    "set in a list": ("main.py", '{"a", "b"}', '{"a", "c"}'),
    "ordered dict": ("main.py", "second=2", "second=3"),
    "namespace": ("main.py", "tile=16", "tile=32"),
    "array": ("main.py", "np.array([1.0, 2.0])", "np.array([1.0, 2.5])"),
    "tensor": ("main.py", "[1.0, 2.0, 3.0]", "[1.0, 2.0, 4.0]"),
    "dtype of a tensor": ("main.py", "[1.0, 2.0, 3.0])", "[1.0, 2.0, 3.0], dtype=torch.float64)"),
    "file that a path names": ("data.txt", "text", "longer text"),
    "lambda in a dict": ("main.py", "lambda x: x * 2,", "lambda x: x * 2.5,"),
    "lambda in a list": ("main.py", "lambda x: x + 4]", "lambda x: x + 5]"),
    "enum": ("main.py", "FAST = 7", "FAST = 8"),
    "default of a dataclass": ("main.py", "block: int = 64", "block: int = 65"),
    "factory of a dataclass": ("main.py", "lambda: [8]", "lambda: [9]"),
    "attribute of a base class": ("main.py", "bias = 0.125", "bias = 0.25"),
    "method of a base class": ("main.py", "x + self.bias", "x - self.bias"),
    "other base class": ("main.py", "class Config(Base):", "class Config(Base, Settings):"),
    "class attribute": ("main.py", "limit = 9", "limit = 10"),
    "argument of a constructor": ("main.py", "config = Config(3.5)", "config = Config(3.75)"),
    "slot": ("main.py", "k, 21,", "k, 22,"),
    "function in an attribute": ("main.py", "lambda x: x * 31", "lambda x: x * 32"),
    "method": ("main.py", "* self.k + self.doubled", "* self.k - self.doubled"),
    "property": ("main.py", "self.limit * 41", "self.limit * 42"),
    "static method": ("main.py", "x + 51", "x + 52"),
    "class method": ("main.py", "x + 61", "x + 62"),
    "cached property": ("main.py", "return 71", "return 72"),
    "call of an object": ("main.py", "x * 81", "x * 82"),
    "object of a bound method": ("main.py", "Config(4.5)", "Config(4.75)"),
    "argument of a partial function": ("main.py", "helpers.scaled, 91", "helpers.scaled, 92"),
    "decorator": ("main.py", "* by + 101", "* by + 102"),
    "argument of a decorator": ("main.py", "@decorate(111)", "@decorate(112)"),
    "decorated function": ("main.py", "x + 121", "x + 122"),
    "function in a decorator of torch": ("main.py", "x + 131", "x + 132"),
    "decorator taken away": ("main.py", "@torch.no_grad()\n", ""),
    "function in a cache": ("main.py", "x + 141", "x + 142"),
    "dispatched function": ("main.py", "x + 151", "x + 152"),
    "registered function": ("main.py", "x + 161", "x + 162"),
    "closure": ("main.py", "closing(171)", "closing(172)"),
    "default": ("main.py", "k=181", "k=182"),
    "keyword default": ("main.py", "named=191", "named=192"),
    "attribute of a function": ("main.py", "attributed.scale = 201", "attributed.scale = 202"),
    "constant name of getattr": ("main.py", 'getattr(helpers, "scaled")', 'getattr(helpers, "unused")'),
    "nested function": ("main.py", "y + 211", "y + 212"),
    "class in a function": ("main.py", "size = 221", "size = 222"),
    "metaclass": ("main.py", "i + 231", "i + 232"),
    "function that fills a table": ("main.py", "x * 241", "x * 242"),
    "constant of the root": ("main.py", "+ 251", "+ 252"),
    "branch of the root": ("main.py", "x > 261", "x >= 261"),
    "function defined below": ("main.py", "x + 271", "x + 272"),
}

NEUTRAL = {
    "comment": ("main.py", "# a comment", "# another comment\n    # and one more"),
    "blank lines": ("main.py", "def root", "\n\n\ndef root"),
    "docstring of the root": ("main.py", '"""The docstring of the root."""', '"""Another."""'),
    "docstring taken away": ("main.py", '    """The docstring of the root."""\n', ""),
    "docstring of a class": ("main.py", '"""A docstring."""', '"""Another docstring."""'),
    "docstring of a nested class": ("main.py", '"""A docstring inside."""', '"""Another."""'),
    "docstring of a helper": ("helpers.py", "that is used through", "used by way of"),
    "annotation": ("main.py", "def root(x: float, y: int = 1) -> float:", "def root(x: object, y = 1):"),
    "annotation of a nested function": ("main.py", "def inside(y: float) -> float:", "def inside(y):"),
    "future import": ("main.py", "\nimport enum", "from __future__ import annotations\nimport enum"),
    "another function of a helper module": ("helpers.py", "x - 100", "x - 101"),
    "unused constant": ("helpers.py", "FACTOR = 2.0", "FACTOR = 2.0\nUNUSED = 5"),
}


@pytest.fixture
def author(tmp_path, monkeypatch):
    """Imports the package ``author`` with one edit, and returns its module ``main``."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(edit=None, files=FILES):
        for name in [n for n in sys.modules if n.partition(".")[0] == "author"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        texts = {"data.txt": "text", **files}
        if edit is not None:
            name, old, new = edit
            assert texts[name].count(old) >= 1, edit
            texts[name] = texts[name].replace(old, new)
        for name, text in texts.items():
            (tmp_path / "author" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "author" / name).write_text(text)
        return importlib.import_module("author.main")

    yield load
    for name in [n for n in sys.modules if n.partition(".")[0] == "author"]:
        del sys.modules[name]


# Each with annotations in place of "::" or without. In a dataclass they decide what the class is.
ANNOTATED = {
    "many parameters": ["    def inside(a::, b::, c::, d::, e::): return a"],
    "defaults and a captured variable": ["    def inside(a:: = x, *, b:: = 2): return a + b + x"],
    "functions one in another": [
        "    def inside(a::):",
        "        def deep(b::, c::): return a + b",
        "        return deep",
    ],
    "methods": [
        "    class inside:",
        "        def first(self, a::): return super().first(a)",
        "        def last(self, a::): return a",
    ],
}


@pytest.mark.parametrize("body", ANNOTATED.values(), ids=ANNOTATED)
def test_annotations_of_inner_functions_leave_the_digest(body):
    def digest(annotation, head=""):
        names = {"__name__": "walk_annotated"}
        lines = [line.replace("::", annotation) for line in body]
        text = "\n".join([head, "def root(x):", *lines, "    return inside"])
        exec(compile(text, "f", "exec", dont_inherit=True), names)
        return code_digest(names["root"])

    without = digest("")
    assert digest(": float") == digest(": dict[str, list[int]]") == without
    assert digest(": float", "from __future__ import annotations") == without


# A table that code fills depends on its whole file.
SIMPLE = {**FILES, "main.py": MAIN.replace("else remembered(x)", "else x")}
before: dict[str, str] = {}  # digests without an edit


def digest_before(author, files):
    if files["main.py"] not in before:
        before[files["main.py"]] = code_digest(author(files=files).root)
    return before[files["main.py"]]


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_that_changes_results_changes_the_digest(author, edit):
    files = FILES if edit[1] == "x * 241" else SIMPLE
    assert code_digest(author(edit, files=files).root) != digest_before(author, files)


@pytest.mark.parametrize("edit", NEUTRAL.values(), ids=NEUTRAL)
def test_an_edit_that_changes_no_result_leaves_the_digest(author, edit):
    assert code_digest(author(edit, files=SIMPLE).root) == digest_before(author, SIMPLE)


def test_annotations_of_a_function_that_is_returned_at_once_are_no_part_of_the_digest():
    """More instructions compute the annotations than follow behind them."""

    def typed():
        def inner(a: Tensor, b: Tensor, c: torch.dtype, d: torch.device) -> tuple[Tensor, torch.Size]:
            return a + b, c, d

        return inner

    def plain():
        def inner(a, b, c, d):
            return a + b, c, d

        return inner

    assert code_use(typed.__code__).text == code_use(plain.__code__).text


def test_what_a_function_of_a_library_has_captured_is_part_of_the_digest():
    def digest(rate):
        settings = SimpleNamespace(rate=rate)

        def root(x):
            return x * settings.rate

        return code_digest(FunctionType(root.__code__, {"__name__": "scipy.special"}, closure=root.__closure__))

    assert digest(1.0) == digest(1.0)
    assert digest(1.0) != digest(2.0)


class Stand:
    """An object that stands for another, which is not there yet."""

    __slots__ = ("why",)

    def __init__(self, why):
        self.why = why

    def __getattr__(self, name):
        raise RuntimeError(self.why)


def test_the_class_behind_a_name_for_its_method_apply_is_followed():
    """In torch 2.15 the method is a compiled function."""

    def made(factor):
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * factor

        scaled = Scaled.apply

        def root(x):
            return scaled(x)

        return root

    assert code_digest(made(2)) != code_digest(made(3))
    assert not first_unfollowed(made(2))


def test_an_object_that_raises_where_it_has_no_attribute_is_followed():
    def root(x):
        return x if stand is None else -x

    stand = Stand("not built")
    digest = code_digest(root)
    stand.why = "not here"
    assert code_digest(root) != digest


def test_all_of_the_package_is_followed(author):
    main = author(files=SIMPLE)
    assert first_unfollowed(main.root) == ""
    assert libraries_used(main.root) >= {"author", "torch", "numpy"}
    constants = constants_used(main.root, most=1000)
    assert {1.25, "gelu", 0.5, 2.5, 251, 31, 21, 281} <= set(constants)
    assert "The docstring of the root." not in constants


def test_a_table_that_code_fills_is_not_part_of_the_digest_but_its_file_is(author):
    main = author()
    digest = code_digest(main.root)
    main.remembered(3)
    assert main._memo
    assert code_digest(main.root) == digest
    assert code_digest(author(("main.py", "_memo = {}", "_memo = {3: 5}")).root) != digest


def test_a_value_that_is_set_from_outside_is_part_of_the_digest(author):
    main = author(files=SIMPLE)
    digest = code_digest(main.root)
    main.config.k = 99
    assert code_digest(main.root) != digest


HIDDEN = {
    "a computed name": "return getattr(helpers, 'scal' + name[4:])(x)",
    "a joined name": "return getattr(helpers, ''.join(['scal', 'ed']))(x)",
    "a name given as an argument": "return getattr(helpers, name)(x)",
    "eval": "return eval('helpers.scaled(x)')",
    "globals": "return globals()['helpers'].scaled(x)",
    "importlib": "return importlib.import_module('author.helpers').scaled(x)",
    "an import inside": "from author import helpers as h; return h.scaled(x)",
    "a relative import inside": "from . import helpers as h; return h.scaled(x)",
    "attributes of a module as a table": "return vars(helpers)['scaled'](x)",
    "sys.modules": "return sys.modules['author.helpers'].scaled(x)",
}


@pytest.mark.parametrize("body", HIDDEN.values(), ids=HIDDEN)
def test_code_that_hides_what_it_uses_depends_on_the_files_of_its_package(author, body):
    main = f"import importlib, sys\nfrom author import helpers\ndef root(x, name='scaled'):\n    {body}\n"
    files = {**FILES, "main.py": main}
    digest = code_digest(author(files=files).root)
    assert first_unfollowed(author(files=files).root)
    assert code_digest(author(files=files).root) == digest
    edit = ("helpers.py", "x * FACTOR", "x / FACTOR")
    assert code_digest(author(edit, files=files).root) != digest


def test_a_module_that_is_no_package_stands_with_those_that_it_imports(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for factor in (2, 2, 3):
        for name in ("walk_script", "walk_helper"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        (tmp_path / "walk_helper.py").write_text(f"def scaled(x): return x * {factor}\n")
        root = "def root(x, name): return getattr(walk_helper, name)(x)"
        (tmp_path / "walk_script.py").write_text(f"import json\nimport walk_helper\n{root}\n")
        digests.append(code_digest(importlib.import_module("walk_script").root))
    assert digests[0] == digests[1] != digests[2]


def test_variables_of_the_environment_that_code_reads_are_part_of_the_digest(monkeypatch):
    def root(x):
        return x * float(os.environ.get("SHIPLAP_TEST_FACTOR", "1"))

    monkeypatch.setenv("SHIPLAP_TEST_FACTOR", "2")
    digest = code_digest(root)
    monkeypatch.setenv("SHIPLAP_TEST_FACTOR", "3")
    assert code_digest(root) != digest


def test_an_edit_after_the_import_does_not_reach_the_digest_of_the_old_code(author, tmp_path):
    main = author(files=SIMPLE)
    digest = code_digest(main.root)
    (tmp_path / "author" / "helpers.py").write_text(HELPERS.replace("x * FACTOR", "x / FACTOR"))
    assert code_digest(main.root) == digest


def test_circles_and_depth_do_not_stop_the_walk():
    module = ModuleType("walk_deep")
    lines = [f"def f{i}(x): return f{i + 1}(x) + {i}" for i in range(3000)]
    exec("\n".join([*lines, "def f3000(x): return f0(x) if x else LOOP"]), vars(module))
    loop: list[object] = []
    loop.append({"again": loop})
    vars(module)["LOOP"] = loop
    digest = code_digest(module.f0)
    assert code_digest(module.f0) == digest
    exec("def f2999(x): return f3000(x) + 7", vars(module))
    assert code_digest(module.f0) != digest


def test_ops_that_a_function_calls_are_followed(ns):
    def declared(factor):
        @sl.op(f"{ns}::f")
        def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
            return x * factor

        return f

    def by_object(x):
        return held[0](x)

    held = [declared(2)]
    by_name = eval(f"lambda x: torch.ops.{ns}.f(x)", {"torch": torch, "__name__": "walk_by_name"})
    overload = getattr(torch.ops, ns).f.default

    def by_overload(x):
        return overload(x)

    ways = by_object, by_name, by_overload
    digests = {*map(code_digest, ways)}
    held[0] = declared(3)
    assert not digests & {*map(code_digest, ways)}
    assert first_unfollowed(by_name) == ""


def test_the_digest_is_the_same_in_every_process(tmp_path):
    """Whatever the seed of hashes, and whether the code was compiled now or read from a cache."""
    for name, text in {**FILES, "data.txt": "text"}.items():
        (tmp_path / "author" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "author" / name).write_text(text)
    program = (
        "from author.main import root; from shiplap.declare.code_digest import code_digest; print(code_digest(root))"
    )

    # The folders of PYTHONPATH stay: the packages under test may come from there.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    seed = "2" if env.get("PYTHONHASHSEED") == "1" else "1"  # another than that of the forked process
    compiled = subprocess.check_output([sys.executable, "-c", program], env={**env, "PYTHONHASHSEED": seed}, text=True)
    assert list(tmp_path.rglob("*.pyc"))
    cached = forked.python("-c", program, env=env)
    assert cached.stdout == compiled, cached.stderr


TRITON = """
import triton
import triton.language as tl
SCALE: tl.constexpr = tl.constexpr(3)
@triton.jit
def helper(x):
    return x * SCALE
@triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=4)], key=["n"])
@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    'A docstring.'
    # a comment
    tl.store(x, helper(tl.load(x)) + 11)
"""


def test_kernels_of_triton_are_followed(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest(old="", new=""):
        sys.modules.pop("walk_triton", None)
        importlib.invalidate_caches()
        assert old in TRITON
        (tmp_path / "walk_triton.py").write_text(TRITON.replace(old, new) if old else TRITON)
        return code_digest(importlib.import_module("walk_triton").kernel)

    first = digest()
    assert digest() == first
    assert digest("A docstring.", "Another.") == digest("# a comment", "# another") == first
    edits = [("+ 11", "+ 12"), ("constexpr(3)", "constexpr(4)"), ("x * SCALE", "x + SCALE")]
    edits += [("BLOCK: tl.constexpr", "BLOCK"), ('"BLOCK": 64', '"BLOCK": 32'), ("num_warps=4", "num_warps=8")]
    assert first not in {digest(*edit) for edit in edits}


@pytest.mark.parametrize(
    ("text", "constant"),
    [
        ("getattr(o, 'name')", True),
        ("getattr(o.part, 'name')", True),
        ("getattr(o.part.inner, 'name')", True),
        ("getattr(o, 'name', None)", True),
        ("getattr(o, o.name)", False),
        ("getattr(o, 'na' + o.me)", False),
    ],
)
def test_a_name_that_is_looked_up_is_a_constant(text, constant):
    listed = list(dis.get_instructions(compile(text, "text", "eval")))
    at = next(i for i, each in enumerate(listed) if each.argval == "getattr")
    assert _is_lookup_of_constant(listed, at) is constant
