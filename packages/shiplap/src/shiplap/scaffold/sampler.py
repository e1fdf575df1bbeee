"""Write a builder of samples with the ranges of recorded calls, as source lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shiplap.scaffold.calls import DispatchedCall, SeenTensor, seen_tensors
from shiplap.scaffold.dims import NamedDims, calls_with_dims, is_plain_name, value_range
from shiplap.scaffold.schema import SchemaField, SchemaForm


def write_sampler(form: SchemaForm, dims: NamedDims, recorded: Sequence[DispatchedCall]) -> list[str]:
    """Return the source lines of the body of a builder ``fn(rng, sizes, dtype, device)`` of samples for the schema
    ``form``. It draws arguments whose shapes consist of the named dims ``dims``, with values in the ranges of the
    recorded calls. Return an empty list if an argument cannot be built.
    """
    lines, made = [], []
    for a in form.arguments:
        if not a.tensor:
            made.append(f'sizes["{a.name}"]')
            continue
        values = _expression_of_argument(a, dims, recorded)
        if values is None:
            return []
        lines.append(f"{a.name} = {values}")
        made.append(a.name)
    # A builder returns a tuple, even for a single argument.
    return [*lines, f"return {', '.join(made)}{',' * (len(made) == 1)}"] if lines else []


def _expression_of_argument(a: SchemaField, dims: NamedDims, recorded: Sequence[DispatchedCall]) -> str | None:
    """Return the source of an expression that draws the tensor argument ``a``. Its shape is made of the named dims in
    ``dims``, and its values lie in the range of those in ``recorded``. Return None if it cannot be built.
    """
    seen = [s for c in recorded for s in seen_tensors(c.arguments.get(a.name))]
    shape = dims.shapes.get(a.name)
    if a.optional and not seen:
        return "None"
    if a.many or shape is None or not seen:
        return None
    if fields := _expression_of_columns(a.name, dims, recorded):
        return fields
    low, high = value_range(recorded, a.name)
    return _expression_of_draw(
        _source_of_shape(shape), seen[0].dtype, low, high, _limit_of_index(a.name, dims, recorded, _highest_value)
    )


def _source_of_shape(shape: Sequence[str]) -> str:
    """Return the source of a tuple of sizes. For a dim with a name, such as ``n``, it reads ``sizes["n"]``."""
    return f"({', '.join(map(_source_of_size, shape))}{',' * (len(shape) == 1)})"


def _expression_of_columns(name: str, dims: NamedDims, recorded: Sequence[DispatchedCall]) -> str:
    """Return the source of an expression that draws the matrix argument ``name`` column by column, in the ranges of the
    recorded calls.

    Return an empty string unless a column has only whole numbers, such as the column that holds the number of a box's
    image. Return it also if the ranges of the columns are not known.
    """
    shape, calls = (
        dims.shapes[name] or (),
        [s for c in recorded for s in seen_tensors(c.arguments.get(name)) if s.shape[0]],
    )
    count = int(shape[1]) if len(shape) == 2 and shape[1].isdigit() else 0
    if not count or not calls or any(len(s.columns) != count for s in calls):
        return ""
    columns = list(zip(*(s.columns for s in calls), strict=True))
    whole = [all(c.whole for c in column) for column in columns]
    if not any(whole):
        return ""
    drawn = []
    for at, column in enumerate(columns):
        low, high = min(c.low for c in column), max(c.high for c in column)
        dtype = "int64" if whole[at] else "float32"
        limit = _limit_of_index(name, dims, recorded, partial(_highest_in_column, at))
        drawn.append(
            # Stacked columns need one dtype, which is that of the matrix.
            _expression_of_draw(
                _source_of_shape(shape[:1]), dtype, low, high, limit, moved=f".to(torch.{calls[0].dtype})"
            )
        )
    return f"torch.stack([{', '.join(drawn)}], 1).to(device)"


def _source_of_size(text: str) -> str:
    """Return the source of one size. It is ``sizes["n"]`` for the name ``n``, and otherwise the text itself."""
    return f'sizes["{text}"]' if is_plain_name(text) else text


def _expression_of_draw(
    size: str, dtype: str, low: float | None, high: float | None, limit: str | None, moved: str | None = None
) -> str:
    """Return the source of an expression that draws a tensor of the dtype ``dtype``. ``size`` is the source of its
    shape. Floating-point values lie between ``low`` and ``high``. Integers lie from ``low`` up to ``limit``, which
    is excluded, or up to ``high`` if ``limit`` is None. Bools are True with probability 1/2.

    The expression ends with ``moved`` or, if that is None, with a move to the device.
    """
    to = moved if moved is not None else ".to(device)"
    if dtype == "bool":
        return f"(torch.rand({size}, generator=rng) < 0.5){to}"
    if dtype.startswith(("int", "uint")):
        # randint excludes its upper bound.
        top = limit or str(int(high or 0) + 1)
        return f"torch.randint({int(low or 0)}, {top}, {size}, generator=rng, dtype=torch.{dtype}){to}"
    to = moved if moved is not None else f".to(device, torch.{dtype})"
    if dtype.startswith(("float", "bfloat")) and low is not None and high is not None:
        # Rounded to be readable: a sample need not reach the exact bounds.
        spread, start = _round_to_3_digits(high - low) or 1.0, _round_to_3_digits(low)
        shift = f" + {start!r}" if start > 0 else f" - {-start!r}" if start < 0 else ""
        return f"(torch.rand({size}, generator=rng) * {spread!r}{shift}){to}"
    return f"torch.randn({size}, generator=rng){to}"


def _round_to_3_digits(value: float) -> float:
    """Return the value rounded to three significant digits."""
    return float(f"{value:.3g}")


def _highest_value(seen: SeenTensor) -> float | None:
    """Return the highest finite value of a recorded tensor, or None if it has none."""
    return seen.high


def _highest_in_column(column: int, seen: SeenTensor) -> float | None:
    """Return the highest value in one column of a recorded tensor, or None if its columns are not known."""
    return seen.columns[column].high if seen.columns else None


def _limit_of_index(
    name: str, dims: NamedDims, recorded: Sequence[DispatchedCall], highest: Callable[[SeenTensor], float | None]
) -> str | None:
    """Return the source of an upper limit for the values of the index argument ``name``. Return None if no dim was
    larger than its values in all calls.

    The limit is the smallest dim that was larger than the argument's maximum in all calls, but at most about four times
    as large. If there is none, the limit is one above the highest recorded value. It is then at most each of the larger
    dims, since the value may be an index into any of them.
    """
    tops: list[tuple[float, dict[str, Any]]] = []
    for call, env in calls_with_dims(dims, recorded):
        value = call.arguments.get(name)
        if isinstance(value, SeenTensor) and (high := highest(value)) is not None:
            tops.append((high, dict(env)))
    most = max((top for top, _ in tops), default=-1.0)
    if most < 0:
        return None
    # An index into its own dim is rare, unless there is no other.
    own = set(dims.shapes.get(name) or ())
    larger = [
        d for d in dims.slots if all(top < env[d] for top, env in tops) and (d not in own or len(dims.slots) == 1)
    ]
    # A maximum of at least a quarter of the dim counts as close to it.
    close = [d for d in larger if all(env[d] <= 4 * (top + 1) for top, env in tops)] if most >= 1 else []
    if close:
        return f'sizes["{min(close, key=lambda d: (sum(env[d] for _, env in tops), d))}"]'
    bounds = [str(int(most) + 1), *(f'sizes["{d}"]' for d in larger)]
    return f"min({', '.join(bounds)})" if larger else None
