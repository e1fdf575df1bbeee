"""Bring calls into one form. It has the operator and the arguments by name, without those that equal their default.

``F.softmax(x, dim=1)``, ``torch.softmax(x, 1)`` and ``x.softmax(-1)`` of a matrix are one call in this form.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import fake_value
from shiplap.rewrite.walk import as_list
from shiplap.torch_private.graph_nodes import NUMPY_NAMES, operator_of, signature_of, whole_mutation

# Both orders of two operands are tried for these.
COMMUTATIVE_OPERATORS = frozenset(
    {"add", "mul", "maximum", "minimum", "logical_and", "logical_or", "bitwise_and", "bitwise_or"}
)
# Arguments that count dims, and may count them from the end.
DIM_ARGUMENTS = ("dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim")
DIMS_OF_RESULT = ("unsqueeze", "stack", "diag_embed")  # their dims are those of what they return
SPREADING_METHODS = (
    "view",
    "expand",
    "permute",
    "repeat",
    "tile",
    "flip",
)  # methods that take a list as several arguments
# Arguments without a meaning for the result.
IGNORED_ARGUMENTS = ("_stacklevel",)
# torch.split has its own names
ARGUMENT_SYNONYMS = {"self": "input", "tensor": "input", "split_size_or_sections": "split_size", **NUMPY_NAMES}
# Calls of one argument that are a power, with its exponent.
POWER_EXPONENTS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
FACTORIES = frozenset({"empty", "zeros", "ones", "full"})  # those of *_like take the dtype of their argument
FACTORY_PLACES = frozenset({"device", "layout", "pin_memory"})
EMPTY = inspect.Parameter.empty

CAST_NAMES = {"to", "type", "float", "half", "bfloat16", "double", "type_as"}
# "getattr" stands for x.T and x.mT.
SWAP_NAMES = {"transpose", "swapaxes", "swapdims", "permute", "t", "getattr"}


def canonical_name(node: Node) -> Any:
    """Return the name of the operator that ``node`` calls, the same for all ways to write the call. For example, every
    cast is ``"to"``, and every swap of two dims is ``"transpose"``.

    If ``node`` calls ``auto_functionalized``, return a tuple of that name and the operator inside the call. For a
    function that is not torch's, return the function.
    """
    name = _raw_operator_name(node)
    if not isinstance(name, str) and (mutation := whole_mutation(node)) is not None:
        return "auto_functionalized", mutation[0]
    if name in CAST_NAMES and _cast_dtype(node) is not None:
        return "to"
    return "transpose" if name in SWAP_NAMES and _swapped_dims(node) is not None else name


def base_and_exponent(node: Node) -> tuple[Node, float] | None:
    """Return ``(x, p)`` if ``node`` computes ``x ** p`` in any way of writing it, such as ``x.square()``, ``x * x`` or
    ``x.rsqrt()``. Return None for any other node.
    """
    name, given = canonical_name(node), node.args
    if not given or not isinstance(given[0], Node):
        return None
    if name in POWER_EXPONENTS and len(given) == 1 and not node.kwargs:
        return given[0], POWER_EXPONENTS[name]
    if len(given) != 2 or node.kwargs:
        return None
    if name == "mul" and given[0] is given[1]:
        return given[0], 2.0
    exponent = given[1]
    # In Python, a bool is an int, too.
    if name != "pow" or not isinstance(exponent, (int, float)) or isinstance(exponent, bool):
        return None
    return given[0], float(exponent)


def _raw_operator_name(node: Node) -> Any:
    """Return the name of the operator that ``node`` calls, or the function if it is not torch's. Unlike
    :func:`canonical_name`, this function does not give different casts, or different swaps of dims, one name.
    """
    return "getattr" if node.target is getattr else operator_of(node)


def _cast_dtype(node: Node) -> torch.dtype | None:
    """Return the dtype of the result if ``node`` at most casts a tensor. Return None if the argument or the result is
    no tensor, or if they are on different devices. Return None also if the call has the argument ``copy``, ``layout``
    or ``memory_format``.
    """
    given = node.args[0] if node.args else None
    before, after = fake_value(given) if isinstance(given, Node) else None, fake_value(node)
    # A call that moves to another device as well is no plain cast.
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)) or before.device != after.device:
        return None
    return None if {"copy", "memory_format", "layout"} & node.kwargs.keys() else after.dtype


def _swapped_dims(node: Node) -> tuple[DimNumber, DimNumber] | None:
    """Return the numbers of the two dims that ``node`` swaps, in ascending order. Return None if it does not swap two
    dims.
    """
    name, given = _raw_operator_name(node), node.args[0] if node.args else None
    held = fake_value(given) if isinstance(given, Node) else None
    if not isinstance(held, Tensor) or held.dim() < 2:
        return None
    rank, rest = held.dim(), [*node.args[1:], *node.kwargs.values()]
    if name == "getattr":
        dims = [-2, -1] if rest[:1] == ["mT"] or (rest[:1] == ["T"] and rank == 2) else []
    elif name == "t":
        dims = [0, 1] if rank == 2 else []
    else:
        named = [d for r in rest for d in as_list(r)]
        dims = [d for d in named if type(d) is int]
        # A dim that the graph computes is not known.
        if len(dims) != len(named):
            return None
        if name == "permute":
            # A permutation that moves two dims only is a swap.
            moved = [i for i, d in enumerate(dims) if d % rank != i] if len(dims) == rank else []
            dims = moved if len(moved) == 2 else []
    if len(dims) != 2:
        return None
    # The order of two swapped dims has no meaning.
    first, second = sorted(DimNumber.from_written(d, rank) for d in dims)
    return (first, second) if first != second else None


class DimNumber(int):
    """The number of a dim, counted from the front. Its ``rank`` is that of the tensor, and ``from_end`` states whether
    it was written as a negative number. Dims of tensors of different rank are compared as they were written.
    """

    rank: int
    from_end: bool

    @classmethod
    def from_written(cls, written: int, rank: int) -> DimNumber:
        """Return the dim that is written as ``written``, possibly counted from the end, in a call on a tensor of
        ``rank`` dims.
        """
        made = cls(written % rank)
        made.rank, made.from_end = rank, written < 0
        return made

    def fits_dim(self, other: int) -> bool:
        """Return whether this dim, written in a pattern, is the dim ``other`` of a graph. The dims are compared from
        the end if this one was written as a negative number, and otherwise from the front.
        """
        return (
            self - self.rank == other - other.rank if self.from_end and isinstance(other, DimNumber) else self == other
        )


def canonical_arguments(node: Node, spelled: Collection[str] = ()) -> dict[str, Any]:
    """Return the arguments of the call ``node`` by name, written in one way for equal calls. A value is a node, a
    constant, or a list of these. Arguments of unknown name are ``arg0``, ``arg1``, and so on.

    An argument that equals its default is left out, unless its name is in ``spelled``. An argument in ``spelled`` that
    the call does not give is included with its default, unless that is None.
    """
    if isinstance(name := canonical_name(node), tuple):
        _, named = whole_mutation(node) or (None, {})
        return named
    if name == "to" and (dtype := _cast_dtype(node)) is not None:
        return {"input": node.args[0], "dtype": dtype}
    if name == "transpose" and (dims := _swapped_dims(node)) is not None:
        return {"input": node.args[0], "dim0": dims[0], "dim1": dims[1]}
    passed = node.args
    if canonical_name(node) in SPREADING_METHODS and len(passed) > 2:  # x.view(2, 3)
        passed = (passed[0], passed[1:])
    # Functions and methods of torch call the same argument "input", "self" or "tensor".
    signature = {_canonical_argument(k): p for k, p in signature_of(node, passed).items()}
    names = [*signature, *(f"arg{i}" for i in range(len(signature), len(passed)))]
    if canonical_name(node) in COMMUTATIVE_OPERATORS and not signature and len(passed) == 2:
        names = ["other", "input"]  # 2 * x
    given = {
        _canonical_argument(k): v
        for k, v in (*zip(names, passed, strict=False), *node.kwargs.items())
        if k not in IGNORED_ARGUMENTS
    }
    rank = _rank_of_dims(node, given)
    defaults = {
        k: _canonical_value(k, p.default, p.numbers, node, rank) for k, p in signature.items() if p.default is not EMPTY
    }
    named = {
        k: _canonical_value(k, v, signature[k].numbers if k in signature else 0, node, rank) for k, v in given.items()
    }
    if name in FACTORIES and isinstance(held := fake_value(node), Tensor):
        # A factory may name the dtype that it has anyway. What is computed on another device cannot be combined.
        named = {**{k: v for k, v in named.items() if k not in FACTORY_PLACES}, "dtype": held.dtype}
    # An argument with its default is written by some models and left out by others.
    kept = {k: v for k, v in named.items() if not (k in defaults and _equals_default(v, defaults[k]))}
    return {k: v for k, v in {**defaults, **named}.items() if k in kept or (k in spelled and v is not None)}


def reduced_dims(node: Node) -> list[int]:
    """Return the numbers of the dims over which the call ``node`` reduces, counted from the front. The list is empty if
    the call names no dims.
    """
    dims = canonical_arguments(node).get("dim")
    return [] if dims is None else as_list(dims)


def _rank_of_dims(node: Node, given: Mapping[str, Any]) -> int:
    """Return the rank of the tensor whose dims the call ``node`` names, or 0 if there is no such tensor."""
    inputs = [given.get("input"), *node.all_input_nodes]
    of = node if canonical_name(node) in DIMS_OF_RESULT else next((n for n in inputs if isinstance(n, Node)), None)
    held = (
        fake_value(of) if of is not None and canonical_name(node) != "tensordot" else None
    )  # its dims may be a number of dims
    return held.dim() if isinstance(held, Tensor) else 0


def _canonical_argument(name: str) -> str:
    """Return one name for an argument that torch calls by several names. For example, ``self`` becomes ``input``."""
    return ARGUMENT_SYNONYMS.get(name, name)


def _equals_default(given: Any, default: Any) -> bool:
    """Return whether an argument equals its default. 1 and 1.0 are equal, and neither equals True."""
    if isinstance(given, Node) or isinstance(given, bool) != isinstance(default, bool):
        return False
    numbers = isinstance(given, (int, float)) and isinstance(default, (int, float))
    return (numbers or type(given) is type(default)) and bool(given == default)


def _canonical_value(name: str, given: Any, count: int, node: Node, rank: int) -> Any:
    """Return the value ``given`` of the argument ``name`` of the call ``node``, written in one way for equal calls.

    Dims are counted from the front of a tensor with ``rank`` dims. The sizes of a view contain no -1. If ``count`` is
    not 0, a single number is returned as a list of ``count`` equal numbers.
    """
    if count and isinstance(given, int) and not isinstance(given, bool):
        given = [given] * count
    if name in DIM_ARGUMENTS and rank:
        if isinstance(given, int) and not isinstance(given, bool):
            return DimNumber.from_written(given, rank)
        if isinstance(given, (list, tuple)) and all(isinstance(d, int) for d in given):
            return [DimNumber.from_written(d, rank) for d in given]
    # The fake value has the sizes that -1 stands for.
    if (
        canonical_name(node) in ("view", "expand")
        and name in ("size", "shape")
        and isinstance(fake_value(node), Tensor)
    ):
        return list(fake_value(node).shape)
    return list(given) if isinstance(given, (list, tuple)) else given
