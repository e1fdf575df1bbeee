"""Which declared expressions may fail in a call, so that their errors are caught there; and sizes that are symbols."""

import ast
from types import SimpleNamespace

import pytest
import torch

from shiplap import torch_private
from shiplap.declare.dim_expression import Expr
from shiplap.declare.spec import Arg, TensorType
from shiplap.plan.expression import (
    Expression,
    TensorPlace,
    VariableNames,
    _node_can_fail,
    argument_variable,
    can_fail,
    declared_value,
    equal_expression,
    parameter_list,
    values_text,
)
from shiplap.plan.python_source import PythonWriter, possibly_unset
from shiplap.plan.rule import ArgumentRule, format_template
from shiplap.plan.steps import EachStep, EvaluateStep, LetStep, MeetStep, PackStep, PresentStep, UnsetStep, VariableType
from shiplap.plan.values import has_own_memory, memory_text

SAFE = ("n", "n // 2", "n % 7", "cdiv(n, 2)", "min(n, m)", "max(n, m, 3)", "broadcast(n, m)", "-1")
FAILS = ("n // m", "n // 0", "n % 0", "cdiv(n, m)", "cdiv(n, 0)", "min(n)", "-n", "n + m", "n * 2", "n[0]", "sum(n)")


@pytest.mark.parametrize("text", [*SAFE, *FAILS])
def test_what_may_fail(text):
    assert any(map(_node_can_fail, ast.walk(ast.parse(text, mode="eval")))) is (text in FAILS)


@pytest.mark.parametrize(
    ("scalars", "spread", "fails"), [({}, (), False), ({"n": "float"}, (), True), ({}, ("n",), True)]
)
def test_numbers_of_any_size_and_lists_may_fail(scalars, spread, fails):
    names = SimpleNamespace(scalars=scalars, spread=spread)
    expression = SimpleNamespace(names={"n"}, source="n")
    assert can_fail(expression, names) is fails


@pytest.mark.parametrize(
    ("name", "shown"),
    [("pads", "list(a_pads)"), ("c", "show(d_c)"), ("by", "a_by"), ("n", "d_n"), ("threads", "w_threads")],
)
def test_how_errors_print_what_is_declared(name, shown):
    """Tuples of sizes as shapes, and lists as lists, since generated code has tuples of both."""
    names = VariableNames.__new__(VariableNames)
    names.scalars, names.spread = {"pads": "list[int]", "by": "int"}, {"c"}
    assert names.term(name).shown[0] == shown


@pytest.mark.parametrize("view_of", [torch.Tensor.t, lambda x: x.as_strided(x.shape, (1, 1))], ids=["turned", "sums"])
def test_memory_of_unknown_sizes_is_not_looked_at(view_of):
    real = torch.empty(4, 6)
    with torch_private.fake_mode(symbolic=True) as mode:
        view = view_of(torch_private.make_fake_tensor(mode, real, True))
        assert not isinstance(view.shape[0], int)
        contiguous, before = view.is_contiguous(), len(mode.shape_env.guards)
        assert not contiguous
        assert has_own_memory(view)
        assert len(mode.shape_env.guards) == before


def test_the_words_for_what_was_passed_to_be_written_to():
    x = torch.zeros(2, 3)
    assert memory_text(x.t()) == "torch.float32 on cpu"
    assert memory_text(x.t(), extents=True) == "torch.float32 on cpu, (3, 2) by (1, 3)"
    assert memory_text(x.to_sparse(), extents=True) == "torch.float32 on cpu, torch.sparse_coo"
    assert memory_text([x]) == "list"


X, XS = TensorPlace("lib::f", "x"), TensorPlace("lib::f", "xs", many=True)
OUT = TensorPlace("lib::f", "out", role="output", variable="want_out")


def test_a_place_in_python_and_in_cpp():
    """Behind a variadic dim, C++ counts from the rank, since it has no negative indices."""
    assert [X.size(axis).cpp for axis in (0, 1, -1, -2)] == [
        *("shape_x[0]", "shape_x[1]", "shape_x[rank_x - 1]", "shape_x[rank_x - 2]")
    ]
    assert [X.size(axis).python for axis in (0, 1, -1)] == ["shape_x[0]", "shape_x[1]", "shape_x[-1]"]
    assert [X.axis(axis) for axis in (0, 2)] == [("0",), ("2",)]
    assert X.axis(-2) == (Expression("len(shape_x) - 2", "rank_x - 2"),)
    assert X.rank == Expression("len(shape_x)", "rank_x")
    assert X.shape.shown == ("show(shape_x)", "Sizes(shape_x, rank_x)")
    assert X.strides.shown == ("tuple(t_x.stride())", "Tuple(t_x.strides(), t_x.dim())")
    assert X.dtype.shown == ("type_x", "Dtype{type_x}")
    assert OUT.device == Expression("want_out.device", "device_of(want_out)")
    assert [at.tensor.python for at in (X, XS, OUT)] == ["t_x", "t_xs", "want_out"]
    assert [format_template(at.where) for at in (X, XS, OUT)] == [
        *("\"lib::f, argument 'x'\"", "\"lib::f, argument 'xs[{}]'\".format(i_xs)", "\"lib::f, output 'out'\"")
    ]
    assert equal_expression(X.rank, X.size(0)) == Expression("len(shape_x) == shape_x[0]", "rank_x == shape_x[0]")


def test_the_parameters_of_a_generated_function():
    tensor = TensorType("Float", (), ())
    args = [Arg("x", tensor), Arg("xs", tensor, many=True), Arg("k", scalar="int", default=3), Arg("eps", scalar="int")]
    assert list(map(argument_variable, args)) == ["t_x", "a_xs", "a_k", "a_eps"]
    assert parameter_list(args) == "t_x, a_xs, a_k=defaults[2], a_eps=defaults[3]"
    assert parameter_list(args[:2]) == "t_x, a_xs"


def test_declared_values_in_both_languages():
    names = VariableNames.__new__(VariableNames)
    names.scalars, names.spread = {"k": "int"}, set()
    assert declared_value(Expr.parse("max(n, k)", ""), names) == Expression("(max(d_n, a_k))", "shiplap::max(d_n, a_k)")
    assert declared_value(Expr.parse("mode == 'é'", ""), names).cpp == ""
    shown = values_text(Expr.parse("n + k", ""), names)
    assert format_template(shown) == "'k = {}, n = {}'.format(a_k, d_n)"
    assert format_template(("a {", "}")) == "'a {}'"
    assert format_template(("{", Expression("v", ""), "}")) == "'{{{}}}'.format(v)"


@pytest.mark.parametrize(
    ("type", "cpp", "unset", "condition"),
    [
        (VariableType.SIZE, "int64_t", "-1", "v < 0"),
        (VariableType.BOOL, "bool", "false", "!v"),
        (VariableType.DTYPE, "int32_t", "-1", "v < 0"),
        (VariableType.DEVICE, "Device", "Device{-1, -1}", "v.type < 0"),
        (VariableType.SHAPE, "const int64_t*", "nullptr", "v == nullptr"),
    ],
)
def test_variables_of_cpp(type, cpp, unset, condition):
    assert (type.cpp, type.unset, type.is_unset("v")) == (cpp, unset, condition)


COPY = "t_x = t_x.clone(memory_format=contiguous_format)"
BACK = ["    copies.append((t_x, t_x.clone(memory_format=contiguous_format)))", "    t_x = copies[-1][1]"]


@pytest.mark.parametrize(
    ("strided", "align", "written", "lines"),
    [
        (True, 1, False, []),
        (True, 1, True, []),
        (False, 1, False, ["if not (t_x.is_contiguous()):", f"    {COPY}"]),
        (True, 2, False, ["if not (t_x.data_ptr() % 2 == 0):", f"    {COPY}"]),
        (False, 16, True, ["if not (t_x.is_contiguous() and t_x.data_ptr() % 16 == 0):", *BACK]),
    ],
)
def test_where_a_kernel_gets_a_copy(strided, align, written, lines):
    assert PythonWriter(careful=False).step(PackStep(X, strided, align, written)) == lines


def test_steps_in_python():
    rule = ArgumentRule("SL202", Expression("a == b", ""), ("here",), ("got ", Expression("a", "")), ("expected",))
    size = Expression("n", "")
    let = LetStep("v", VariableType.SIZE, size)
    quick, careful = PythonWriter(careful=False), PythonWriter(careful=True)
    assert quick.step(UnsetStep("v", VariableType.SIZE)) == ["v = from_v = None"]
    assert (quick.step(let), quick.step(LetStep("v", VariableType.SIZE, Expression("", "n")))) == (["v = n"], [])
    assert quick.step(MeetStep("v", VariableType.SIZE, size, ("x",), (rule,))) == [
        *("if v is None:", "    v, from_v = n, 'x'", "else:"),
        "    if not (a == b): refuse(0, 'here', 'got {}'.format(a), 'expected')",
    ]
    assert careful.step(PresentStep(X, (let,))) == ["if t_x is not None:", "    v = n"]
    each = "for i_xs, t_xs in enumerate(a_xs"
    assert quick.step(EachStep(XS, (let,), False)) == [f"{each}):", "    v = n"]
    assert quick.step(EachStep(XS, (let,), True)) == [f"{each} or ()):", "    v = n"]
    assert careful.check(rule) == ["expect(a == b, 0, lambda: ('here', 'got {}'.format(a), 'expected'))"]
    assert quick.step(EvaluateStep("v", VariableType.SIZE, Expr("n"), size, rule)) == [
        *("try:", "    v = n", "except (ArithmeticError, LookupError, TypeError, ValueError) as why:"),
        "    refuse(1, 'here', 'got {}'.format(a), 'expected')",
    ]
    assert (len(quick.rules), len(careful.rules)) == (2, 1)
    assert possibly_unset([let, UnsetStep("w", VariableType.SIZE), let]) == ("w",)


def test_the_fix_of_a_rule():
    rule = ArgumentRule("SL202", Expression("True", ""), (), (), (), fix="any", fix_of_one="expand")
    assert [rule.fix_for(got) for got in ("n = 1", "n = 11", "n = 1, more", "n = 2")] == ["expand", "any", "any", "any"]
    plain = ArgumentRule("SL202", Expression("True", ""), (), (), ())
    assert plain.fix_for("n = 1") == ""
    assert (rule.error_fix, bool(plain.error_fix), bool(plain.error_title)) == ("any", True, True)
