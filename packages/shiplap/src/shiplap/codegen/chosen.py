"""The C++ that looks up tuned choices. The key of a call is computed before the arguments are taken over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shiplap.declare.bucket import BucketRule
from shiplap.declare.config import Space
from shiplap.declare.dim_expression import Expr
from shiplap.declare.spec import OpSpec


def config_values(space: Space | None) -> list[int]:
    """Return the values of the default config of a kernel as integers, in the order of the config's names. Empty for a
    kernel without configs, or without a static default.
    """
    static = space.static if space is not None else None
    return [int(value) for _, value in static.items] if static is not None else []


@dataclass(frozen=True)
class NativeChoice:
    """One of several kernels of an op on a device, all of them C functions of one library."""

    symbol: str
    dtypes: tuple[str, ...] = ()
    workspace: Expr | None = None
    space: Space | None = None


def config_rows(kernels: Sequence[NativeChoice]) -> list[list[int]]:
    """Return one row of integers for each kernel: its number and its default config, padded with zeros to the length of
    the longest row.
    """
    values = [config_values(kernel.space) for kernel in kernels]
    # A C++ array of rows needs rows of one length.
    width = max(map(len, values), default=0)
    return [[number, *row, *[0] * (width - len(row))] for number, row in enumerate(values)]


def lookup_key(spec: OpSpec, rule: BucketRule | None) -> list[str]:
    """Return the C++ expressions of the numbers that key a call in the table of tuned choices: rounded sizes, dtypes,
    presence of optional tensors. Empty if C++ cannot compute the key.

    The key has no layout: the table holds choices for contiguous tensors, and Python handles other calls.
    """
    if rule is None:
        return []
    sizes, scalars, dtypes = _peek_expressions(spec)
    key = []
    for name, kind in rule.kinds:
        source = scalars.get(name) or sizes.get(name)
        if kind == "none":
            continue
        if source is None:
            return []
        # The order of entries is that of the table, which Python fills by the same rule.
        key.append(f"rounded({source})" if kind == "pow2" else source)
    # Without a tensor that is always there, the dtype of a class cannot be read at this place.
    if any(c not in dtypes for c in rule.classes):
        return []
    optional = [i for i, a in enumerate(spec.args) if a.tensor is not None and a.optional]
    return [*key, *(dtypes[c] for c in rule.classes), *(f"int64_t{{peek_present(values[{i}])}}" for i in optional)]


def _peek_expressions(spec: OpSpec) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return three maps to C++ expressions: of sizes by dim, scalars by argument and dtypes by dtype class. They read
    the boxed arguments of a call, only those that are never None.
    """
    sizes: dict[str, str] = {}
    scalars: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    for index, arg in enumerate(spec.args):
        if arg.scalar in ("int", "bool") and not arg.optional:
            scalars[arg.name] = f"peek_{arg.scalar}(values[{index}])"
        # An absent tensor has no sizes, and the key is computed before the checks of the call.
        if arg.tensor is None or arg.optional or arg.many:
            continue
        for axis, dim in enumerate(arg.tensor.dims):
            if dim.kind == "name" and not arg.tensor.variadic:
                sizes.setdefault(dim.text, f"peek_size(values[{index}], {axis})")
        if not arg.tensor.concrete:
            dtypes.setdefault(arg.tensor.dtype_class, f"peek_dtype(values[{index}])")
    return sizes, scalars, dtypes
