"""The table of tuned choices as numbers, for natively bound ops. The binding gets a new copy if choices change."""

from __future__ import annotations

from shiplap.codegen.chosen import config_values, lookup_key
from shiplap.declare.bucket import Key
from shiplap.declare.kernel import Kernel
from shiplap.dispatch import Op, tuned_choices
from shiplap.dtypes import number


def choice_rows(op: Op, device: str) -> list[list[int]]:
    """Return the choices that tuning has made for ``op`` on ``device`` as rows of integers for native code. The list is
    empty if choices of the op do not depend on the call.

    A row begins with the key, integers that stand for the sizes, dtypes and layout of a call. The next integer is 1 if
    Python must run calls with this key, and otherwise 0. The row ends with the config. If there are several kernels,
    the number of the kernel precedes the config.
    """
    native = op.native_choices(device)
    kernels, width = [k.name for k in native], max(len(config_values(k.space)) for k in native)
    several = len(kernels) > 1
    count = len(lookup_key(op.spec, op.rule))
    # An op without a key, such as one without sizes, has no choices by size.
    if not count:
        return []
    table = []
    for key, picked in tuned_choices.resolved_choices(op).items():
        numbers = _native_choice_key(op, key) if key[0] == device else None
        if numbers is None or len(numbers) != count:  # it is no key of this op: no call has it
            continue
        config = [0] * (several + width)
        ours = isinstance(picked, Kernel) and picked.name in kernels and _takes_key(picked, key)
        if isinstance(picked, Kernel) and ours:
            values = [int(v) for _, v in picked.config.items]
            config = [*([kernels.index(picked.name)] if several else []), *values, *[0] * (width - len(values))]
        table.append([*numbers, int(not ours), *config])
    return table


def packed_rows(op: Op, device: str) -> tuple[tuple[int, ...], ...]:
    """Return the rows of tuned choices whose kernel native code can run, as a tuple of tuples. They are for a library
    that is used without Python. :func:`choice_rows` describes the rows.
    """
    count = len(lookup_key(op.spec, op.rule))
    # The number behind the key is 1 where Python runs the choice.
    return tuple(tuple(row) for row in choice_rows(op, device) if not row[count])


def _takes_key(kernel: Kernel, key: Key) -> bool:
    """Return whether ``kernel`` accepts the dtypes in ``key``, the key of a tuned choice. The dtypes may be wrong,
    since a file of choices may have been written by hand.
    """
    pairs = [pair.partition("=")[2] for pair in str(key[-2]).split(", ") if pair]
    return not kernel.dtypes or all(dtype.removeprefix("torch.") in kernel.dtypes for dtype in pairs)


def _native_choice_key(op: Op, key: Key) -> list[int] | None:
    """Return the key of a tuned choice as the integers that C++ computes for a call. Return None if C++ computes no
    such key. The reasons are a tensor that is not contiguous, a value that is not a 64-bit integer, and a choice
    between Inductor's templates.
    """
    *values, dtypes, layout = key[1:]
    if not isinstance(layout, str) or not isinstance(dtypes, str):
        return None
    codes = layout.split(",")
    tensors = [a for a in op.spec.args if a.tensor is not None or (a.optional and a.scalar is not None)]
    if not set(codes) <= {"c", "-"} or len(codes) != len([a for a in tensors if a.tensor is not None]):
        return None
    numbers = [int(v) for v in values if isinstance(v, int)]
    if len(numbers) != len(values) or not all(-(1 << 63) <= n < 1 << 63 for n in numbers):
        return None
    numbers += [number(pair.partition("=")[2]) for pair in dtypes.split(", ") if pair]
    # C++ tells absent arguments from contiguous ones by these.
    numbers += [int(code == "c") for a, code in zip(op.spec.tensors, codes, strict=True) if a.optional]
    return numbers
