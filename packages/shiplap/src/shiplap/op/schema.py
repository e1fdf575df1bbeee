"""``OpSpec`` → torch schema string and tags."""

from __future__ import annotations

import json
from types import EllipsisType

import torch

from shiplap.op.spec import Arg, OpSpec
from shiplap.op.values import Value

__all__ = ["BELOW", "below", "schema", "tags"]

BELOW = "raw"  # the overload below autograd

_TYPES = {
    "int": "SymInt",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "list[int]": "SymInt[]",
    "list[float]": "float[]",
    "list[bool]": "bool[]",
    "complex": "complex",
    "Scalar": "Scalar",
    "dtype": "ScalarType",
    "device": "Device",
    "layout": "Layout",
    "memory_format": "MemoryFormat",
    "Generator": "Generator",
    "list[str]": "str[]",
    "list[Scalar]": "Scalar[]",
}


def below(name: str) -> str:
    """The overload below autograd of an op, which may be an overload itself."""
    return f"{name}_{BELOW}" if "." in name else f"{name}.{BELOW}"


def schema(spec: OpSpec, name: str = "") -> str:
    """``name(Tensor x, Tensor(a0!) table, SymInt k=3, *, float eps=1e-05) -> (Tensor, Tensor)``, without namespace."""
    parts: list[str] = []
    for index, arg in enumerate(spec.args):
        if arg.keyword_only and "*" not in parts:
            parts.append("*")
        parts.append(_argument(arg, index))
    returns = ["Tensor"] * len(spec.outputs)
    result = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    return f"{name or spec.opname}({', '.join(parts)}) -> {result}"


def _argument(arg: Arg, index: int) -> str:
    if arg.tensor is not None:
        kind = f"Tensor(a{index}!)" if arg.mutated else "Tensor"
        kind += "[]" if arg.many else ""
    else:
        kind = _TYPES[str(arg.scalar)]
    optional = "?" if arg.optional else ""
    default = f"={_literal(arg.default)}" if arg.has_default else ""
    return f"{kind}{optional} {arg.name}{default}"


def _literal(value: Value | EllipsisType) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_literal(v) for v in value)}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def tags(spec: OpSpec) -> tuple[torch.Tag, ...]:
    """What torch may assume of the op."""
    chosen = [torch.Tag.pt2_compliant_tag]
    if any(a.contiguous or a.mutated for a in spec.args):
        chosen.append(torch.Tag.needs_exact_strides)
    if spec.dynamic:
        chosen += [torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe]
    return tuple(chosen)
