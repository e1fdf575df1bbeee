"""The table of choices as numbers, for natively bound ops. The binding gets a new copy whenever choices change."""

from __future__ import annotations

from shiplap.codegen.chosen import config_values, lookup_key
from shiplap.declare.bucket import Key
from shiplap.declare.kernel import Kernel
from shiplap.dispatch import Op, tuned_choices
from shiplap.dtypes import number


def choice_rows(op: Op, device: str) -> list[list[int]]:
    """Return a row for each choice: the key, whether Python runs it, and the config."""
    (kernel,) = op.native_kernels(device)
    width = len(config_values(kernel.space))
    count = len(lookup_key(op.spec, op.rule))
    if not count:
        return []
    table = []
    for key, picked in tuned_choices.resolved_choices(op).items():
        numbers = _native_choice_key(op, key) if key[0] == device else None
        if numbers is None or len(numbers) != count:  # it is no key of this op: no call has it
            continue
        ours = isinstance(picked, Kernel) and picked.template is None
        config = [int(v) for _, v in picked.config.items] if isinstance(picked, Kernel) and ours else [0] * width
        table.append([*numbers, int(not ours), *config])
    return table


def _native_choice_key(op: Op, key: Key) -> list[int] | None:
    """Return a key of the table as C++ computes it. None for other layouts than contiguous, and for templates."""
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
    numbers += [int(code == "c") for a, code in zip(op.spec.tensors, codes, strict=True) if a.optional]
    return numbers
