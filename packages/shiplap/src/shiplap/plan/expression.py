"""The expressions of call plans, each in Python and in C++, and the texts of errors that quote their values.

Both languages use the same variables. Of an argument ``x``: ``t_x`` the tensor, ``shape_x``, ``rank_x`` (C++ only) and
``type_x``, its dtype; ``a_k`` is a scalar or a list. ``d_n`` is a dim, ``dtype_Float`` the dtype of a dtype class,
``device`` the device of the call. Where the first argument that has one of these may be absent, ``from_d_n`` (and so
on) says at run time which argument it came from.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shiplap.declare.cpp_expression import to_cpp
from shiplap.declare.dim_expression import Expr
from shiplap.declare.spec import Arg, OpSpec


@dataclass(frozen=True)
class Expression:
    """One expression in Python and in C++. The ``_text`` forms print its value in errors, where that needs a call."""

    python: str
    cpp: str
    python_text: str = ""
    cpp_text: str = ""

    @property
    def shown(self) -> tuple[str, str]:
        """The expression whose value an error shows, in Python and in C++."""
        return self.python_text or self.python, self.cpp_text or self.cpp


Text = tuple[str | Expression, ...]


def equal_expression(a: Expression, b: Expression) -> Expression:
    """Return the expression that two values are equal."""
    return Expression(f"{a.python} == {b.python}", f"{a.cpp} == {b.cpp}")


def shared_variable(variable: str) -> Expression:
    """Return a variable, which has the same name in both languages."""
    return Expression(variable, variable)


def argument_variable(arg: Arg) -> str:
    """Return the name of the variable of an argument."""
    return f"t_{arg.name}" if arg.tensor is not None and not arg.many else f"a_{arg.name}"


def parameter_list(args: Sequence[Arg]) -> str:
    """Return the parameter list of a generated function.

    Defaults are looked up by index in ``defaults``, so that any value can be one. Every parameter behind the first one
    with a default has a default too, as Python demands: keyword-only arguments are positional here.
    """
    first = next((i for i, a in enumerate(args) if a.has_default), len(args))
    return ", ".join(argument_variable(a) + (f"=defaults[{i}]" if i >= first else "") for i, a in enumerate(args))


def quoted_text(text: Text) -> Text:
    return ("'", *text, "'")


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a call that steps refer to: an argument, or each element of a list of tensors."""

    op: str
    arg: str
    many: bool = False
    role: str = "argument"
    variable: str = ""  # where it is not ``t_<argument>``

    @property
    def label(self) -> Text:
        """The caller's name of the tensor: ``x``, or ``xs[1]``."""
        return (f"{self.arg}[", Expression(f"i_{self.arg}", ""), "]") if self.many else (self.arg,)

    @property
    def where(self) -> Text:
        return (f"{self.op}, {self.role} ", *quoted_text(self.label))

    @property
    def tensor(self) -> Expression:
        return shared_variable(self.variable or f"t_{self.arg}")

    @property
    def rank(self) -> Expression:
        return Expression(f"len(shape_{self.arg})", f"rank_{self.arg}")

    @property
    def shape(self) -> Expression:
        name = f"shape_{self.arg}"
        return Expression(name, name, f"show({name})", f"Sizes({name}, rank_{self.arg})")

    @property
    def strides(self) -> Expression:
        t = self.tensor.python
        return Expression(f"tuple({t}.stride())", "", "", f"Tuple({t}.strides(), {t}.dim())")

    @property
    def dtype(self) -> Expression:
        name = f"type_{self.arg}"
        return Expression(name, name, "", f"Dtype{{{name}}}")

    @property
    def device(self) -> Expression:
        return Expression(f"{self.tensor.python}.device", f"device_of({self.tensor.cpp})")

    def size(self, axis: int) -> Expression:
        """Return the size along an axis, which is negative behind a variadic dim."""
        at = f"shape_{self.arg}[{axis}]"
        return Expression(at, at if axis >= 0 else f"shape_{self.arg}[rank_{self.arg} - {-axis}]")

    def axis(self, axis: int) -> Text:
        """Return the number of an axis, counted from the front."""
        return (
            (str(axis),)
            if axis >= 0
            else (Expression(f"len(shape_{self.arg}) - {-axis}", f"rank_{self.arg} - {-axis}"),)
        )


class VariableNames:
    """The map from names of a declaration to the variables of generated code."""

    def __init__(self, spec: OpSpec) -> None:
        self.scalars = {a.name: str(a.scalar) for a in spec.scalars}
        self.spread = {d.text for a in spec.tensors if a.tensor for d in a.tensor.dims if d.kind == "variadic"}

    def __call__(self, name: str) -> str:
        prefix = "a_" if name in self.scalars else "w_" if name in ("threads", "itemsize") else "d_"
        return prefix + name

    def term(self, name: str) -> Expression:
        """Return a dim, or a scalar argument, as an expression."""
        variable = self(name)
        listed = name in self.spread or self.scalars.get(name, "").startswith("list")
        text = f"show({variable})" if name in self.spread else f"list({variable})"
        return Expression(variable, variable, text if listed else "")


def declared_value(expr: Expr, names: VariableNames) -> Expression:
    """Return a declared expression. Its C++ form is empty where C++ cannot express it."""
    tree = _RenamedVariables(names).visit(ast.parse(expr.source, mode="eval"))
    try:
        cpp = to_cpp(expr, names)
    except ValueError:
        cpp = ""
    return Expression(f"({ast.unparse(tree)})", cpp)


class _RenamedVariables(ast.NodeTransformer):
    """The renaming of names to variables. Functions keep their names, also where an argument has the same name."""

    def __init__(self, names: Callable[[str], str]) -> None:
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.Call:
        return ast.Call(node.func, [self.visit(a) for a in node.args], [])

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.names(node.id), ast.Load())


def values_text(expr: Expr, names: VariableNames) -> Text:
    """Return the text ``n = 3, k = 2`` with the values of the names of an expression."""
    text: list[str | Expression] = []
    for name in sorted(expr.names):
        text += [f"{', ' if text else ''}{name} = ", names.term(name)]
    return tuple(text)


def can_fail(expr: Expr, names: VariableNames) -> bool:
    """Whether the expression may have no value.

    It may divide by zero, index beyond the end of a list, or need more than 64 bits for an intermediate value.
    """
    if any(names.scalars.get(n, "int") not in ("int", "bool") or n in names.spread for n in expr.names):
        return True
    return any(map(_node_can_fail, ast.walk(ast.parse(expr.source, mode="eval"))))


def _node_can_fail(node: ast.AST) -> bool:
    """Whether evaluating a node may raise: a division, a power of two, an empty minimum."""
    match node:
        case ast.BinOp(op=ast.FloorDiv() | ast.Mod(), right=divisor):
            return not (isinstance(divisor, ast.Constant) and divisor.value)
        case ast.UnaryOp(operand=operand):
            return not isinstance(operand, ast.Constant)
        case ast.Call(func=ast.Name(id="cdiv"), args=[_, divisor]):
            return not (isinstance(divisor, ast.Constant) and divisor.value)
        case ast.Call(func=ast.Name(id=name), args=args):
            return name not in ("broadcast", "min", "max") or (len(args) < 2 and name in ("min", "max"))
        case ast.BinOp() | ast.Subscript():
            return True
    return False
