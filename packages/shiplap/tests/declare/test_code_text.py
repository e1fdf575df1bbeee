"""What the instructions of a function name."""

from __future__ import annotations

import dis
from types import CodeType

import pytest
import torch

from shiplap.declare import code_text
from shiplap.declare.code_text import code_use, constant_text, plain_text

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


def code_of(text: str) -> CodeType:
    """The code of the first function or class in a text."""
    return next(c for c in compile(text, "<text>", "exec").co_consts if isinstance(c, CodeType))


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        ("STATE['a'] = x", {"STATE"}),
        ("del STATE[x]", {"STATE"}),
        ("global STATE; STATE = x", {"STATE"}),
        ("x['a'] = STATE", set()),
        ("y = [1]; y[0] = STATE", set()),
        ("return STATE[x]", set()),
    ],
)
def test_names_to_which_code_writes(body, stored):
    assert code_use(code_of(f"def f(x):\n    {body}\n")).stored & {"STATE"} == stored


@pytest.mark.parametrize(
    ("line", "imported"),
    [
        ("import a.b", (0, "a.b", ())),
        ("import a.b as c", (0, "a.b", ())),
        ("from a import b, c", (0, "a", ("b", "c"))),
        ("from . import b", (1, "", ("b",))),
        ("from ..a import b", (2, "a", ("b",))),
    ],
)
def test_what_code_imports(line, imported):
    assert code_use(code_of(f"def f():\n    {line}\n")).imports == [imported]


@pytest.mark.parametrize(
    ("body", "hiding"),
    [
        ("return eval(x)", "eval"),
        ("return getattr(x, 'name')", ""),
        ("return getattr(x, x)", "getattr"),
        ("return evaluate(x)", ""),
    ],
)
def test_code_that_hides_what_it_uses(body, hiding):
    use = code_use(code_of(f"def f(x):\n    {body}\n"))
    assert use.hiding == hiding
    assert ("name" in use.names) is ("'name'" in body)


ALIKE = [
    ("def f(x):\n    y = x\n    return y", "def f(x):\n    w = x\n\n    return w"),
    ("class A:\n    'one'\n    k = 1", "class B:\n    'two'\n\n    k = 1"),
    ("class A:\n    k = 1", "class B:\n    'two'\n    k = 1"),
]
OTHER = [
    ("def f(x):\n    return 1", "def f(x):\n    return True"),
    ("def f(x):\n    return 1", "def f(x):\n    return 1.0"),
    ("def f(x, y): return x", "def f(x, *, y): return x"),
    ("def f(x, y): return x", "def f(x, y, /): return x"),
    ("def f(x): return x", "def f(*x): return x"),
    ("def f(x): return x", "def f(x): yield x"),
    ("class A:\n    k = 1", "class A:\n    k = 2"),
    ("class A:\n    k = 1", "class A:\n    l = 1"),
    ("def f(x):\n    while x:\n        x -= 1\n        g()", "def f(x):\n    while x:\n        x -= 1\n    g()"),
]


def test_the_text_of_code_is_what_it_does():
    for one, other in ALIKE:
        assert code_use(code_of(one)).text == code_use(code_of(other)).text, other
    for one, other in OTHER:
        assert code_use(code_of(one)).text != code_use(code_of(other)).text, other


def test_constants_have_types():
    assert [plain_text(v) for v in (1, True, 1.0, "1", None)] == [
        "int 1",
        "bool True",
        "float 1.0",
        "str '1'",
        "NoneType None",
    ]
    assert constant_text((1, (2.0, "a"))) == "(int 1, (float 2.0, str 'a'))"
    assert constant_text(frozenset({2, 1, 3})) == "{int 1, int 2, int 3}"
    code = code_of("def f(): pass")
    assert constant_text((code,)) == f"({code_use(code).text})"
    assert code_use(code) is code_use(code)


def test_a_variable_that_is_loaded_twice_at_once_is_the_same(monkeypatch):
    """As Python 3.13 loads the operands of ``x * x``."""
    code = (lambda x, y: x).__code__
    load = next(each for each in dis.get_instructions(code) if each.opname.startswith("LOAD_FAST"))
    both = load._replace(opname="LOAD_FAST_LOAD_FAST", arg=0, argval=("x", "x"))
    monkeypatch.setattr(code_text.dis, "get_instructions", lambda given: [both])
    assert [(each.arg, each.argval) for each in code_text.plain_instructions(code)] == [(0, "x"), (0, "x")]
