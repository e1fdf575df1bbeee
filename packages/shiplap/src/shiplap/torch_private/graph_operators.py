"""The operator that a node of a graph calls, in any spelling of torch, and the names of its arguments."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.torch_private.graph_nodes import node_value


class OperatorParameter(NamedTuple):
    """A parameter of an operator.

    ``default`` is ``inspect.Parameter.empty`` if there is none. ``numbers`` is the length of a list for which one
    number may be given (``stride=2`` of a ``conv2d``), else 0.
    """

    default: Any = inspect.Parameter.empty
    numbers: int = 0


OperatorSignature = dict[str, OperatorParameter]

VIEWS = frozenset({"view", "reshape", "_unsafe_view"})  # the same elements in the same order
OPERATORS = {"truediv": "div", "mod": "remainder", "and_": "bitwise_and", "or_": "bitwise_or", "invert": "bitwise_not"}
NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}  # torch takes these for its own
HOMES = (torch, torch.nn.functional, torch._C._nn, torch.Tensor)


def operator_of(node: Node) -> Any:
    """Return ``"linear"`` for every spelling of torch's own operator, ``"ns::name"`` for other ops, else the
    function.
    """
    target = node.target
    if node.op == "call_method":
        return _canonical_name(str(target))
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet = target if isinstance(target, torch._ops.OpOverloadPacket) else target.overloadpacket
        namespace, _, name = packet._qualified_op_name.partition("::")
        return _canonical_name(name) if namespace == "aten" else f"{namespace}::{name}"
    name = getattr(target, "__name__", "")
    # A function of the same name from elsewhere is not torch's operator, so identity decides.
    own = getattr(operator, name, None) is target or any(getattr(home, name, None) is target for home in HOMES)
    return _canonical_name(name) if name and own else target


def _canonical_name(name: str) -> str:
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    name = OPERATORS.get(name, name)
    return "view" if name in VIEWS else name


def signature_of(node: Node, args: Sequence[Any]) -> OperatorSignature:
    """Return names and defaults of the arguments of this call, in the order of ``args``. Empty if they are not
    known.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _signature_of_schema(target)
    if node.op == "call_function" and inspect.isfunction(target):
        parameters = inspect.signature(target).parameters.values()
        return (
            {}
            if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
            else {p.name: OperatorParameter(p.default) for p in parameters}
        )
    packet = target if isinstance(target, torch._ops.OpOverloadPacket) else _aten_packet(str(operator_of(node)))
    for overload in _python_overloads(packet):
        if _overload_fits(overload, args, node.kwargs):
            return _signature_of_schema(overload)
    return {}


def _aten_packet(name: str) -> Any:
    return getattr(torch.ops.aten, name, None)


@cache
def _python_overloads(packet: Any) -> tuple[Any, ...]:
    """Return the overloads that Python calls, with the fewest arguments first. Dims have no names in compiled code."""
    names = packet.overloads() if packet is not None else ()
    overloads = [o for o in (getattr(packet, n) for n in names if "out" not in n) if "Dimname" not in str(o._schema)]
    return tuple(sorted(overloads, key=lambda o: len(o._schema.arguments)))


@cache
def _signature_of_schema(overload: Any) -> OperatorSignature:
    empty = inspect.Parameter.empty
    return {
        a.name: OperatorParameter(a.default_value if a.has_default_value() else empty, a.N or 0)
        for a in overload._schema.arguments
    }


def _overload_fits(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    # Keyword-only arguments can never take a positional value.
    positional = [a for a in overload._schema.arguments if not a.kwarg_only]
    names = {"input" if a.name == "self" else a.name for a in overload._schema.arguments}
    if len(args) > len(positional) or not {NUMPY_NAMES.get(k, k) for k in kwargs} <= names:
        return False
    pairs = zip(positional, args, strict=False)
    return all(_type_accepts(str(a.type), v) for a, v in pairs if v is not None)


def _type_accepts(kind: str, v: Any) -> bool:
    if isinstance(v, torch.dtype):  # of x.view(dtype), whose other form takes sizes
        return "List" not in kind
    return _is_tensor(v) == (kind in ("Tensor", "Optional[Tensor]"))


def _is_tensor(v: Any) -> bool:
    return isinstance(v, Node) and isinstance(node_value(v), Tensor)
