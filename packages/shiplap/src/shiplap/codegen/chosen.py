"""The C++ that looks up tuned choices. The key of a call is computed before the arguments are taken over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shiplap.declare.bucket import BucketRule
from shiplap.declare.config import Space
from shiplap.declare.dim_expression import Expr
from shiplap.declare.spec import OpSpec


def config_values(space: Space | None) -> list[int]:
    """Return the default compile-time values of a kernel as integers, in the order of their names. Return an empty list
    if the kernel has none, if ``space`` is None, or if the default depends on sizes.
    """
    static = space.static if space is not None else None
    return [int(value) for _, value in static.items] if static is not None else []


@dataclass(frozen=True)
class NativeChoice:
    """One of several kernels of an op on a device. All of them are C functions of one library.

    ``symbol`` is the name of the C function. ``dtypes`` are the names of the dtypes that it accepts, or an empty tuple
    for all declared ones. ``workspace`` is the size of its scratch memory in bytes, or None if it has none. ``space``
    holds its configs, that is sets of compile-time values, or is None if it has none.
    """

    symbol: str
    dtypes: tuple[str, ...] = ()
    workspace: Expr | None = None
    space: Space | None = None


def config_rows(kernels: Sequence[NativeChoice]) -> list[list[int]]:
    """Return one row of integers for each kernel. A row has the number of the kernel, then its default compile-time
    values, and is padded with zeros to the length of the longest row.
    """
    values = [config_values(kernel.space) for kernel in kernels]
    # A C++ array of rows needs rows of one length.
    width = max(map(len, values), default=0)
    return [[number, *row, *[0] * (width - len(row))] for number, row in enumerate(values)]


def lookup_key(spec: OpSpec, rule: BucketRule | None) -> list[str]:
    """Return C++ expressions of the integers by which a call is looked up in the table of tuned choices, in the order
    of the table. Return an empty list if C++ cannot compute them all, or if ``rule`` is None.

    ``rule`` sorts calls into classes that share a choice. The integers are the rounded sizes, the dtypes, and for each
    optional tensor whether it is given. They do not include the memory layout. The table holds choices for contiguous
    tensors, and Python handles all other calls.
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

    The first dict has sizes by dim name, and the second has int and bool scalars by argument name. The third has dtypes
    by dtype class, the name in an annotation such as ``Float``. The expressions read only arguments that are never
    None.
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
