"""The expressions of call plans, each in Python and in C++, and the texts of errors that quote their values.

Both languages use the same variables. The tensor of an argument ``x`` is ``t_x``, and ``shape_x``, ``rank_x`` (C++
only) and ``type_x`` are its shape, rank and dtype. ``a_k`` is a scalar or a list ``k``. ``d_n`` is a dim,
``dtype_Float`` the dtype of a dtype class, and ``device`` the device of the call. If the first argument that determines
one of these may be absent, ``from_d_n`` (and so on) holds at run time the argument that determined it.
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
    """One expression for generated code, as source in Python and in C++. ``python_text`` and ``cpp_text`` print its
    value in errors if the expression itself would print it wrongly. Otherwise they are empty.
    """

    python: str
    cpp: str
    python_text: str = ""
    cpp_text: str = ""

    @property
    def shown(self) -> tuple[str, str]:
        """The expressions, as ``(in Python, in C++)``, that print this value in an error. They are ``python_text`` and
        ``cpp_text``, or the expression itself where these are empty.
        """
        return self.python_text or self.python, self.cpp_text or self.cpp


Text = tuple[str | Expression, ...]


def equal_expression(a: Expression, b: Expression) -> Expression:
    """Return the expression ``a == b`` for generated code, with its source in Python and its source in C++."""
    return Expression(f"{a.python} == {b.python}", f"{a.cpp} == {b.cpp}")


def shared_variable(variable: str) -> Expression:
    """Return the expression that reads the variable ``variable`` of generated code, which has the same name in Python
    and in C++.
    """
    return Expression(variable, variable)


def argument_variable(arg: Arg) -> str:
    """Return the name of an argument's variable in generated code. It is ``t_x`` for a tensor ``x``, and ``a_k`` for a
    scalar or a list ``k``.
    """
    return f"t_{arg.name}" if arg.tensor is not None and not arg.many else f"a_{arg.name}"


def parameter_list(args: Sequence[Arg]) -> str:
    """Return the Python parameter list of a generated function that takes ``args``, as text.

    A default is looked up by index in ``defaults``, so that any value can be one. Python requires a default for every
    parameter behind the first one with a default. In the generated
    function, keyword-only arguments are therefore positional with a default.
    """
    first = next((i for i, a in enumerate(args) if a.has_default), len(args))
    return ", ".join(argument_variable(a) + (f"=defaults[{i}]" if i >= first else "") for i, a in enumerate(args))


def quoted_text(text: Text) -> Text:
    """Return ``text`` between single quotes, as errors print the name of an argument."""
    return ("'", *text, "'")


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a call, as steps refer to it. It is an argument, an output, or each element of a list of tensors.

    ``op`` and ``arg`` are the names of the op and of the argument or output. ``many`` states that it is a list.
    ``role`` is the word for it in errors. ``variable`` is its variable in generated code, or an empty string for
    ``t_<arg>``.
    """

    op: str
    arg: str
    many: bool = False
    role: str = "argument"
    variable: str = ""  # where it is not ``t_<argument>``

    @property
    def label(self) -> Text:
        """The name of the tensor as errors print it, such as ``x``. For an element of a list it is ``xs[1]``, with the
        index of the element in this call.
        """
        return (f"{self.arg}[", Expression(f"i_{self.arg}", ""), "]") if self.many else (self.arg,)

    @property
    def where(self) -> Text:
        """The beginning of errors about the tensor, ``<op>, <role> '<name>'``. The role is a word such as ``argument``
        or ``output``.
        """
        return (f"{self.op}, {self.role} ", *quoted_text(self.label))

    @property
    def tensor(self) -> Expression:
        """The expression that reads this tensor in generated code. It is the variable ``t_<argument>``, unless another
        name was given as ``variable``.
        """
        return shared_variable(self.variable or f"t_{self.arg}")

    @property
    def rank(self) -> Expression:
        """The expression for the number of dims of the tensor. Python computes it from the shape, and C++ reads a
        variable.
        """
        return Expression(f"len(shape_{self.arg})", f"rank_{self.arg}")

    @property
    def shape(self) -> Expression:
        """The expression for the sizes of the tensor, which errors print as a tuple."""
        name = f"shape_{self.arg}"
        return Expression(name, name, f"show({name})", f"Sizes({name}, rank_{self.arg})")

    @property
    def strides(self) -> Expression:
        """The expression for the strides of the tensor as a tuple. In C++ it can only be printed in errors."""
        t = self.tensor.python
        return Expression(f"tuple({t}.stride())", "", "", f"Tuple({t}.strides(), {t}.dim())")

    @property
    def dtype(self) -> Expression:
        """The expression for the dtype of the tensor. It is a ``torch.dtype`` in Python and a number in C++."""
        name = f"type_{self.arg}"
        return Expression(name, name, "", f"Dtype{{{name}}}")

    @property
    def device(self) -> Expression:
        """The expression for the device of the tensor, in Python and in C++."""
        return Expression(f"{self.tensor.python}.device", f"device_of({self.tensor.cpp})")

    def size(self, axis: int) -> Expression:
        """Return the expression for the tensor's size along ``axis``. Behind a variadic dim, which stands for any
        number of axes, ``axis`` is negative and counts from the end.
        """
        at = f"shape_{self.arg}[{axis}]"
        # C++ has no negative indices.
        return Expression(at, at if axis >= 0 else f"shape_{self.arg}[rank_{self.arg} - {-axis}]")

    def axis(self, axis: int) -> Text:
        """Return the text of the number of ``axis``, counted from the front. If ``axis`` is negative, the text computes
        the number from the rank.
        """
        return (
            (str(axis),)
            if axis >= 0
            else (Expression(f"len(shape_{self.arg}) - {-axis}", f"rank_{self.arg} - {-axis}"),)
        )


class VariableNames:
    """A callable object that returns the variable of generated code for a name of a declaration."""

    def __init__(self, spec: OpSpec) -> None:
        """Store the scalar arguments of a declaration with their types, and the names of its variadic dims."""
        self.scalars = {a.name: str(a.scalar) for a in spec.scalars}
        self.spread = {d.text for a in spec.tensors if a.tensor for d in a.tensor.dims if d.kind == "variadic"}

    def __call__(self, name: str) -> str:
        """Return the variable of a declared name. Its prefix is ``a_`` for a scalar argument, ``w_`` for ``threads``
        and ``itemsize``, and ``d_`` for a dim.
        """
        # Prefixes keep the names of a declaration apart from those of the generated code.
        prefix = "a_" if name in self.scalars else "w_" if name in ("threads", "itemsize") else "d_"
        return prefix + name

    def term(self, name: str) -> Expression:
        """Return the expression that reads the dim or scalar argument ``name`` in generated code. For a list of sizes,
        the expression has a separate text by which errors print the list.
        """
        variable = self(name)
        # Tuples of sizes print as shapes in errors, lists as lists.
        listed = name in self.spread or self.scalars.get(name, "").startswith("list")
        text = f"show({variable})" if name in self.spread else f"list({variable})"
        return Expression(variable, variable, text if listed else "")


def declared_value(expr: Expr, names: VariableNames) -> Expression:
    """Return ``expr``, an expression of the declaration, as source in Python and in C++. ``names`` returns the variable
    of each name in the expression.

    The C++ source is empty if C++ cannot express it.
    """
    # Parsed anew, since the visitor changes the tree in place.
    tree = _RenamedVariables(names).visit(ast.parse(expr.source, mode="eval"))
    try:
        cpp = to_cpp(expr, names)
    except ValueError:
        cpp = ""
    return Expression(f"({ast.unparse(tree)})", cpp)


class _RenamedVariables(ast.NodeTransformer):
    """A visitor that replaces declared names by variables of generated code. Functions keep their names, even if an
    argument has the same name.
    """

    def __init__(self, names: Callable[[str], str]) -> None:
        """Store ``names``, which returns the variable of a declared name."""
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Return the call with the names in its arguments replaced by variables of generated code. The function's name
        is unchanged.
        """
        # The function is not visited: an argument may be called ``min`` and keeps its own variable.
        return ast.Call(node.func, [self.visit(a) for a in node.args], [])

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Return a syntax node that reads the variable of generated code for the declared name in ``node``."""
        return ast.Name(self.names(node.id), ast.Load())


def values_text(expr: Expr, names: VariableNames) -> Text:
    """Return the values in ``expr`` as a text for errors, such as ``n = 3, k = 2``. It is a tuple of strings and
    expressions, which print the values in the call. The names are sorted.
    """
    text: list[str | Expression] = []
    # Sorted, so that the text of an error is the same in every process.
    for name in sorted(expr.names):
        text += [f"{', ' if text else ''}{name} = ", names.term(name)]
    return tuple(text)


def can_fail(expr: Expr, names: VariableNames) -> bool:
    """Return whether the evaluation of the declared expression ``expr`` may fail in some calls.

    It may divide by zero, index beyond the end of a list, or have an intermediate value that does not fit into 64 bits.
    """
    # Lists may be too short, and other values than integers may be of any size.
    if any(names.scalars.get(n, "int") not in ("int", "bool") or n in names.spread for n in expr.names):
        return True
    return any(map(_node_can_fail, ast.walk(ast.parse(expr.source, mode="eval"))))


def _node_can_fail(node: ast.AST) -> bool:
    """Return whether the evaluation of one syntax node may raise an error or exceed 64 bits.

    Examples are a division by a non-constant, an index, a product and a ``min`` of one list.
    """
    match node:
        case ast.BinOp(op=ast.FloorDiv() | ast.Mod(), right=divisor):
            return not (isinstance(divisor, ast.Constant) and divisor.value)
        # The negative of the lowest integer does not fit into 64 bits.
        case ast.UnaryOp(operand=operand):
            return not isinstance(operand, ast.Constant)
        case ast.Call(func=ast.Name(id="cdiv"), args=[_, divisor]):
            return not (isinstance(divisor, ast.Constant) and divisor.value)
        case ast.Call(func=ast.Name(id=name), args=args):
            return name not in ("broadcast", "min", "max") or (len(args) < 2 and name in ("min", "max"))
        # A sum or product of sizes may need more than 64 bits.
        case ast.BinOp() | ast.Subscript():
            return True
    return False
