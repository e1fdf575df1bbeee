"""``Guard``, a condition on the values that a pattern's arguments are bound to. A guard is text that is evaluated,
digested and printed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiplap.cached_property import cached_property
from shiplap.declare.dim_expression import FUNCTIONS, Expr
from shiplap.errors import ShiplapError, error
from shiplap.torch_private import symbolic_sizes

# Nodes of Python's syntax that a guard may contain. Calls, names and attributes are restricted further below.
_ALLOWED_SYNTAX = (
    *(ast.Expression, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Name, ast.Subscript, ast.Slice),
    *(ast.Tuple, ast.List, ast.Load, ast.boolop, ast.cmpop, ast.Not, ast.USub),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
)
# Properties that fake tensors have, too: a guard is evaluated while a graph is compiled.
_TENSOR_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "type", "itemsize", "requires_grad"})
_TENSOR_METHODS = frozenset({"is_contiguous", "stride", "numel", "size", "dim"})
_DTYPES_BY_NAME = {n: getattr(torch, n) for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)}


@dataclass(frozen=True)
class Guard:
    """A condition on the arguments and dims of a pattern, such as ``x.shape[-1] % 16 == 0``, ``x.dtype in (float16,
    bfloat16)`` or ``eps < 1e-3``. ``source`` is the condition as a Python expression.

    The names in it are the arguments and dims of the pattern, the names of dtypes, and functions of sizes such as
    ``min`` and ``cdiv``. ``x.device == "cuda"`` compares the type of the device, as ``x.device.type == "cuda"`` does.
    """

    source: str

    @classmethod
    def parse(cls, source: str, names: frozenset[str], where: str) -> Guard:
        """Return the guard with the expression ``source``. Raise ``SL803`` if its syntax is not allowed in guards.
        Raise it also for a name that is neither in ``names`` nor a dtype nor a function of guards.

        ``names`` are the arguments and dims of the pattern. ``where`` is the location that the error reports.
        """
        try:
            tree = ast.parse(source.strip(), mode="eval")
        except SyntaxError as e:
            raise error("SL803", where=where, got=source, expected=str(e.msg)) from None
        # A method that is not called is always true, so its missing parentheses would go unnoticed.
        called = {n.func for n in ast.walk(tree) if isinstance(n, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in _TENSOR_METHODS and node not in called:
                raise error(
                    "SL803",
                    where=where,
                    got=source,
                    expected=f"{ast.unparse(node)}()",
                    fix="call the method: without parentheses the expression is always true",
                )
            if not _is_allowed_syntax(node):
                part = repr(ast.unparse(node)) if isinstance(node, ast.expr) else type(node).__name__
                raise error("SL803", where=where, got=source, expected=f"an expression without {part}")
            if isinstance(node, ast.Name) and node.id not in names | _DTYPES_BY_NAME.keys() | FUNCTIONS.keys():
                raise error(
                    "SL803",
                    where=where,
                    got=f"{source!r} uses {node.id!r}",
                    expected=f"names among {', '.join(sorted(names))}",
                )
        return cls(source.strip())

    @cached_property
    def _tree(self) -> ast.expr:
        """The syntax tree of the guard's expression."""
        return ast.parse(self.source, mode="eval").body

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of arguments, dims and functions that the guard reads, without those of dtypes."""
        return frozenset(n.id for n in ast.walk(self._tree) if isinstance(n, ast.Name)) - _DTYPES_BY_NAME.keys()

    def in_named_dims(self, dim_at: Callable[[str, int], str], dims: frozenset[str]) -> str:
        """Return the source of the guard in which the name of a dim replaces each ``x.shape[i]``. Sizes that meet the
        returned condition are then searched for samples.

        Return an empty string if the guard reads anything but sizes of named dims, or if the expression language of op
        declarations lacks its syntax. ``dim_at`` maps an argument's name and a position to the name of the dim, or to
        an empty string. ``dims`` are the names of all dims.
        """

        class Named(ast.NodeTransformer):
            """A transformer of syntax trees that writes the name of a dim for each ``x.shape[i]``."""

            def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
                """Return the name of the dim in place of an expression ``x.shape[i]``. If that dim has no name, return
                the node unchanged.
                """
                owner, at = node.value, node.slice
                if isinstance(owner, ast.Attribute) and owner.attr == "shape" and isinstance(owner.value, ast.Name):
                    try:
                        name = dim_at(owner.value.id, int(ast.literal_eval(at)))
                    except (ValueError, TypeError):
                        name = ""
                    return ast.Name(name, ast.Load()) if name else node
                return node

        text = ast.unparse(Named().visit(ast.parse(self.source, mode="eval")))
        try:
            # The language of declarations is smaller than that of guards. A guard outside of it is checked on samples,
            # but no sizes are searched for it.
            expr = Expr.parse(text, "guard")
        except ShiplapError:
            return ""
        # Sizes are searched for named dims; other values come with a sample.
        return text if expr.names and expr.names <= dims else ""

    def why_refused(self, env: Mapping[str, Any], *, may_guard: bool = True) -> str:
        """Return an empty string if the guard holds for ``env``, which maps the names of arguments and dims to their
        values. Otherwise return the reason, such as ``x.shape[-1] is 100``.

        If the guard depends on symbolic sizes and ``may_guard`` is true, it becomes a condition of the compiled code.
        If ``may_guard`` is false, a guard that depends on symbolic sizes does not hold.
        """
        try:
            if symbolic_sizes.condition_holds(self._value(self._tree, env), may_guard=may_guard):
                return ""
        # A guard that cannot be evaluated does not hold: x.shape[3] of a matrix, say.
        except (ArithmeticError, LookupError, TypeError, AttributeError) as e:
            return f"{type(e).__name__}: {e}"
        # A size that only data decides cannot be guarded, so the guard does not hold.
        except symbolic_sizes.data_dependent():
            pass
        # The values of the parts say why the guard does not hold; the value of the whole is only False.
        leaves = {ast.unparse(n): _format_value(self._value(n, env)) for n in _lookup_expressions(self._tree)}
        return ", ".join(f"{name} is {held}" for name, held in leaves.items())

    def _value(self, node: ast.expr, env: Mapping[str, Any]) -> Any:
        """Return the value of ``node``, an expression in the guard, for the arguments and dims in ``env``. Python's
        builtins are not in scope.
        """
        code = compile(ast.Expression(node), f"<guard {self.source}>", "eval")
        held = {k: _TensorView(v) if isinstance(v, Tensor) else v for k, v in env.items()}
        # Safe: parse() admitted only lookups, arithmetic and a few methods, and builtins are absent.
        return eval(code, {**_DTYPES_BY_NAME, **FUNCTIONS, **held, "__builtins__": {}})


class _DeviceType(str):
    """A str that holds the type of a device, so that guards can compare it. Its attribute ``type`` is the same str."""

    __slots__ = ()

    @property
    def type(self) -> str:
        """The type of the device as a string, so that guards may also write ``x.device.type``."""
        return str(self)


class _TensorView:
    """An object with the attributes and methods of a tensor that a guard may read, such as ``shape``."""

    def __init__(self, tensor: Tensor) -> None:
        """Copy the attributes that guards may read from a tensor."""
        self.shape, self.dtype, self.ndim = tuple(tensor.shape), tensor.dtype, tensor.dim()
        self.device, self.itemsize, self.requires_grad = (
            _DeviceType(tensor.device.type),
            tensor.itemsize,
            tensor.requires_grad,
        )
        self.is_contiguous, self.stride, self.numel = tensor.is_contiguous, tensor.stride, tensor.numel
        self.size, self.dim = tensor.size, tensor.dim

    def __repr__(self) -> str:
        """Return the dtype and the sizes as text, such as ``float32[8, 64]``."""
        return f"{_format_value(self.dtype)}{list(self.shape)}"


def _is_allowed_syntax(node: ast.AST) -> bool:
    """Return whether a guard may contain the node ``node`` of Python's syntax tree."""
    if isinstance(node, (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)):
        return isinstance(node, _ALLOWED_SYNTAX)
    if isinstance(node, ast.Attribute):
        return node.attr in _TENSOR_ATTRIBUTES | _TENSOR_METHODS
    if isinstance(node, ast.Call):
        method = isinstance(node.func, ast.Attribute) and node.func.attr in _TENSOR_METHODS
        function = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
        return (method or function) and not node.keywords
    if isinstance(node, ast.Constant):
        return node.value is None or isinstance(node.value, (bool, int, float, str))
    return isinstance(node, _ALLOWED_SYNTAX)


def _lookup_expressions(tree: ast.AST) -> list[ast.expr]:
    """Return the largest expressions within ``tree`` that only look up a value, such as ``x.shape[-1]`` or ``k``. Names
    of dtypes and functions are left out.
    """
    if isinstance(tree, (ast.Name, ast.Attribute, ast.Subscript)) or (
        isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute)
    ):
        return [] if isinstance(tree, ast.Name) and tree.id in _DTYPES_BY_NAME.keys() | FUNCTIONS.keys() else [tree]
    return [leaf for child in ast.iter_child_nodes(tree) for leaf in _lookup_expressions(child)]


def _format_value(held: Any) -> str:
    """Return ``str(held)``, without the prefix ``torch.`` if ``held`` is a dtype."""
    return str(held).removeprefix("torch.") if isinstance(held, torch.dtype) else str(held)
