"""Calls that a recogniser may skip, with their effect on values, in any way of writing them.

A pass that looks for a computation, and not for one way of writing it, has to follow values through such calls. They
return the values unchanged (a cast, ``contiguous``, dropout of an evaluated model) or scaled by a constant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import fake_value
from shiplap.rewrite.normalize_call import canonical_arguments, canonical_name
from shiplap.torch_private import symbolic_sizes

# Spellings of a cast before autograd, and the one of ATen.
CAST_OPERATORS = frozenset({"to", "type", "float", "half", "bfloat16", "double", "type_as", "_to_copy"})
VALUE_KEEPING_OPERATORS = CAST_OPERATORS | {"contiguous", "alias", "detach_", "positive"}
# Views of a tensor, or of its parts. Some copy where there is no view.
VIEWING_OPERATORS = frozenset(
    {
        "chunk",
        "contiguous",
        "expand",
        "expand_as",
        "flatten",
        "getitem",
        "movedim",
        "narrow",
        "permute",
        "select",
        "split",
        "squeeze",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
        "view_as",
    }
)
# Calls that fill a tensor with one number, which models use in place of a Python number.
FILLING_OPERATORS = frozenset({"full", "full_like", "tensor", "scalar_tensor", "new_full"})


def torch_call_name(node: Any) -> str:
    """Return the canonical name of the operator that ``node`` calls, such as ``"softmax"``. Return an empty string if
    ``node`` is no call or the operator has no name.
    """
    if not isinstance(node, Node) or not node.op.startswith("call"):
        return ""
    name = canonical_name(node)
    return name if isinstance(name, str) else ""


def positional_then_named(node: Node) -> list[Any]:
    """Return the values of the positional arguments of a call, then of the named ones."""
    return [*node.args, *node.kwargs.values()]


def tensor_argument(node: Node) -> Node:
    """Return the first argument of the call ``node``. It must be a node itself, not a constant."""
    first = node.args[0]
    assert isinstance(first, Node), node
    return first


def is_active_dropout(node: Node) -> bool:
    """Return whether ``node`` is a dropout that drops elements, as in training."""
    return torch_call_name(node) == "dropout" and not _is_idle_dropout(node)


def _is_idle_dropout(node: Node) -> bool:
    """Return whether the dropout ``node`` returns its argument unchanged, because it is not in training or has
    probability 0.
    """
    given = canonical_arguments(node)
    return given.get("training", given.get("train", True)) is False or given.get("p", 0.5) == 0


def keeps_values(node: Any) -> bool:
    """Return whether ``node`` returns the values of its first argument, possibly in another floating-point dtype or
    layout.
    """
    name = torch_call_name(node)
    if not name or not node.args or not isinstance(node.args[0], Node):
        return False
    given, made = fake_value(node.args[0]), fake_value(node)
    if not (isinstance(given, Tensor) and isinstance(made, Tensor)) or given.device != made.device:
        return False
    # Only between floating dtypes: a cast to an integer cuts fractions off.
    if name in VALUE_KEEPING_OPERATORS:
        return made.is_floating_point() and given.is_floating_point() and same_shape(given, made)
    # These keep values in order only where the shape stays.
    if name in ("view", "expand", "flatten"):
        return given.dtype == made.dtype and same_shape(given, made)
    return name == "dropout" and _is_idle_dropout(node)


def keeps_tensor(node: Any) -> bool:
    """Return whether ``node`` returns its argument unchanged. Such calls are a cast to the dtype that the argument
    already has, and dropout that drops nothing.
    """
    if not keeps_values(node) or torch_call_name(node) not in (*CAST_OPERATORS, "dropout"):
        return False
    given, made = fake_value(node.args[0]), fake_value(node)
    return given.dtype == made.dtype and tuple(given.stride()) == tuple(made.stride()) and not _forces_copy(node)


def _forces_copy(node: Node) -> bool:
    """Return whether a cast always copies because of its argument ``copy`` or ``memory_format``."""
    return bool(node.kwargs.get("copy") or node.kwargs.get("memory_format"))


def same_shape(a: Tensor, b: Tensor) -> bool:
    """Return whether the shapes of two tensors are known to be equal. Symbolic sizes are compared by their text, which
    adds no guard.
    """
    return a.dim() == b.dim() and all(
        # Symbols are compared by their text, since a comparison of symbols would add a guard.
        x is y or (isinstance(x, int) and isinstance(y, int) and x == y) or str(x) == str(y)
        for x, y in zip(a.shape, b.shape, strict=True)
    )


def single_user(node: Node) -> Node | None:
    """Return the one node that reads ``node``, or None if no node or several nodes read it."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def skip_idle_calls(node: Any, passed: list[Node] | None = None) -> Any:
    """Follow the first argument of ``node``, its first argument, and so on, through calls that keep values, such as a
    cast or an inactive dropout. Return the first value that is not the result of such a call.

    The calls that are skipped are appended to the list ``passed``, unless it is None.
    """
    while keeps_values(node):
        if passed is not None:
            passed.append(node)
        node = node.args[0]
    return node


def as_constant(given: Any) -> float | None:
    """Return the constant that ``given``, an argument of a call in a graph, stands for, as a float. It may be a number
    other than a bool, or a node that fills a tensor of no dims with one number. It may also be a node with a symbolic
    float. The present value of that float is returned, and torch then guards on it. Return None for any other argument.
    """
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return float(given)
    held = fake_value(given) if isinstance(given, Node) else None
    if isinstance(held, torch.SymFloat):
        try:
            return float(held)  # a number of a module under dynamic shapes: it becomes a guard
        except symbolic_sizes.data_dependent():
            return None
    if torch_call_name(given) in FILLING_OPERATORS:
        numbers = [a for a in positional_then_named(given) if isinstance(a, (int, float)) and not isinstance(a, bool)]
        # Two numbers would leave open which of them is the value.
        if isinstance(held, Tensor) and held.dim() == 0 and len(numbers) == 1:
            return float(numbers[0])
    return None


def tensor_and_factor(node: Any) -> tuple[Node, float] | None:
    """Return ``(x, c)`` if ``node`` is ``x * c`` or ``c * x`` for a constant ``c``, in place or not. Return ``(x, 1 /
    c)`` if it is ``x / c`` for a constant other than 0. Return None for any other node.
    """
    # The in-place operators of Python are "imul" and "itruediv".
    name = torch_call_name(node).removeprefix("i")
    if name not in ("mul", "multiply", "div", "divide", "truediv") or len(given := positional_then_named(node)) != 2:
        return None
    first, second = given
    # bool is an int, and no factor.
    if isinstance(first, Node) and not isinstance(second, bool) and (number := as_constant(second)) is not None:
        if name in ("mul", "multiply"):
            return first, number
        # Division by 0 has no factor.
        return (first, 1 / number) if number else None
    if name in ("mul", "multiply") and isinstance(second, Node) and (number := as_constant(first)) is not None:
        return second, number
    return None


def is_32_bit_or_wider(dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` is float32 or float64."""
    return dtype in (torch.float32, torch.float64)
