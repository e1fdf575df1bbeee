"""The C++ that looks up tuned choices. The key of a call is computed before the arguments are taken over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shiplap.declare.bucket import BucketRule
from shiplap.declare.config import Space
from shiplap.declare.dim_expression import Expr
from shiplap.declare.spec import OpSpec


def config_values(space: Space | None) -> list[int]:
    """Return the default compile-time values of a kernel (its config) as integers, in the order of their names. Return
    an empty list if the kernel has no such values, or if its default depends on sizes.
    """
    static = space.static if space is not None else None
    return [int(value) for _, value in static.items] if static is not None else []


@dataclass(frozen=True)
class NativeChoice:
    """One of several kernels of an op on a device. All of them are C functions of one library.

    ``symbol`` is the name of the C function. ``dtypes`` are the dtypes that it accepts, or an empty tuple for all
    declared ones. ``workspace`` is the size of its scratch memory in bytes, or None. ``space`` holds its configs (sets
    of compile-time values), or is None if it has none.
    """

    symbol: str
    dtypes: tuple[str, ...] = ()
    workspace: Expr | None = None
    space: Space | None = None


def config_rows(kernels: Sequence[NativeChoice]) -> list[list[int]]:
    """Return one row of integers for each kernel. A row has the number of the kernel and its default compile-time
    values, and is padded with zeros to the length of the longest row.
    """
    values = [config_values(kernel.space) for kernel in kernels]
    # A C++ array of rows needs rows of one length.
    width = max(map(len, values), default=0)
    return [[number, *row, *[0] * (width - len(row))] for number, row in enumerate(values)]


def lookup_key(spec: OpSpec, rule: BucketRule | None) -> list[str]:
    """Return the C++ expressions of the numbers by which a call is looked up in the table of tuned choices. Return an
    empty list if C++ cannot compute them all, or if ``rule`` is None.

    ``rule`` sorts calls into classes that share a choice. The numbers are the rounded sizes, the dtypes and the
    presence of optional tensors. They do not include the memory layout, since the table holds choices for contiguous
    tensors, and Python handles other calls.
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
    """Return three dicts of C++ expressions that read the boxed arguments of a call.

    The first has sizes by dim name, the second scalars by argument name, and the third dtypes by dtype class (an
    annotation's name such as ``Float``). The expressions read only arguments that are never None.
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
