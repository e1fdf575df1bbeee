"""A builder of samples with the ranges of recorded calls, as source lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shiplap.draft.calls import Call, Seen, each
from shiplap.draft.dims import Dims, environments, plain_name, ranges
from shiplap.draft.schema import Field, Form

__all__ = ["sampler_of"]


def sampler_of(form: Form, dims: Dims, recorded: Sequence[Call]) -> list[str]:
    """The body of ``fn(rng, sizes, dtype, device)``. Empty where one of the arguments cannot be built."""
    lines, made = [], []
    for a in form.arguments:
        if not a.tensor:
            made.append(f'sizes["{a.name}"]')
            continue
        values = _values(a, dims, recorded)
        if values is None:
            return []
        lines.append(f"{a.name} = {values}")
        made.append(a.name)
    return [*lines, f"return {', '.join(made)}{',' * (len(made) == 1)}"] if lines else []


def _values(a: Field, dims: Dims, recorded: Sequence[Call]) -> str | None:
    seen = [s for c in recorded for s in each(c.arguments.get(a.name))]
    shape = dims.shapes.get(a.name)
    if a.optional and not seen:
        return "None"
    if a.many or shape is None or not seen:
        return None
    size = f"({', '.join(_size(text, dims) for text in shape)}{',' * (len(shape) == 1)})"
    low, high = ranges(recorded, a.name)
    return _drawn(size, seen[0].dtype, low, high, _limit(a.name, dims, recorded, high))


def _size(text: str, dims: Dims) -> str:
    return f'sizes["{text}"]' if plain_name(text) else text


def _drawn(size: str, dtype: str, low: float | None, high: float | None, limit: str | None) -> str:
    """An expression for values between ``low`` and ``high``, or below the size ``limit``."""
    if dtype == "bool":
        return f"(torch.rand({size}, generator=rng) < 0.5).to(device)"
    if dtype.startswith(("int", "uint")):
        least = int(low or 0)
        top = f"max({limit}, {least + 1})" if limit else str(int(high or 0) + 1)
        return f"torch.randint({least}, {top}, {size}, generator=rng, dtype=torch.{dtype}).to(device)"
    if dtype.startswith(("float", "bfloat")) and low is not None and high is not None:
        spread, start = _round(high - low) or 1.0, _round(low)
        shift = f" + {start!r}" if start > 0 else f" - {-start!r}" if start < 0 else ""
        return f"(torch.rand({size}, generator=rng) * {spread!r}{shift}).to(device, torch.{dtype})"
    return f"torch.randn({size}, generator=rng).to(device, torch.{dtype})"


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def _limit(name: str, dims: Dims, recorded: Sequence[Call], high: float | None) -> str | None:
    """The dim that the values stayed below in all calls and came within a half of: rows of something. None if none."""
    rows = environments(dims, recorded)
    tops: list[tuple[float, dict[str, Any]]] = []
    for call, env in rows:
        value = call.arguments.get(name)
        if isinstance(value, Seen) and value.high is not None:
            tops.append((value.high, dict(env)))
    if not tops or high is None or high < 1:
        return None
    own = set(dims.shapes.get(name) or ())
    candidates = [
        (sum(env[d] for _, env in tops), d)
        for d in dims.slots
        if all(top < env[d] <= 4 * (top + 1) for top, env in tops) and (d not in own or len(dims.slots) == 1)
    ]
    return f'sizes["{min(candidates)[1]}"]' if candidates else None
