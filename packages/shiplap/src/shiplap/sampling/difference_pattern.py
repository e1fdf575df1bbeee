"""The pattern of the elements that differ between two results: the part of the result that they fill, and a relation
of their values, such as a constant factor. It often names the cause of a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

CLOSE = 1e-4  # relative deviation up to which factors and offsets count as equal
SLIGHT = 100 * CLOSE  # relative deviation up to which a difference is slight
FEWEST = 3  # elements whose factor or offset is no chance
MOST_COMPARED = 1 << 22  # elements of a result that is looked at
WRAPPED = "have wrapped around"  # part of a text about integers of a dtype that is too narrow
MOST_SORTED = 1 << 16  # elements of a result whose order is compared


def describe_pattern(bad: Tensor, got: Tensor, expected: Tensor) -> str:
    """Return a text about the elements of ``got`` at which the mask ``bad`` is set, to be appended to the number of
    them. It says which part of the result they fill and how their values follow from those of ``expected``. Return an
    empty string if neither has a simple pattern, and for a large result, of which copies could exhaust the memory.
    """
    if bad.numel() > MOST_COMPARED:
        return ""
    texts = [describe_place(bad), describe_relation(bad, got, expected)]
    return "".join(f", {text}" for text in texts if text)


def describe_place(bad: Tensor) -> str:
    """Return the part of a result that the set elements of the mask ``bad`` fill, in the notation of indexing, such as
    ``all of [:, 256:]``. Return an empty string if they are all or fill no such part.
    """
    if not bad.dim() or bool(bad.all()):
        return ""
    slices, filled = list[str](), 1
    for dim in range(bad.dim()):
        others = [d for d in range(bad.dim()) if d != dim]
        at = (bad.any(dim=others) if others else bad).nonzero()[:, 0].tolist()
        if (text := _slice_of(at, bad.shape[dim])) is None:
            return ""
        slices.append(text)
        filled *= len(at)
    return f"all of [{', '.join(slices)}]" if filled == int(bad.sum()) else ""


def _slice_of(indices: list[int], size: int) -> str | None:
    """Return ascending ``indices`` of a dim of ``size`` elements as a slice, such as ``4:`` or ``1::2``. Return None if
    they have no constant step.
    """
    first, last = indices[0], indices[-1]
    if len(indices) == 1:
        return str(first) if size > 1 else ":"
    step = indices[1] - first
    if any(b - a != step for a, b in pairwise(indices)) or (step > 1 and len(indices) < FEWEST):
        return None
    stop = last + step
    ends = f"{first or ''}:{'' if stop >= size else stop}"
    return ends if step == 1 else f"{ends}:{step}"


def describe_relation(bad: Tensor, got: Tensor, expected: Tensor) -> str:
    """Return how the values of ``got`` at the set elements of the mask ``bad`` follow from those of ``expected``, such
    as ``each is 0.5 times the expected``. Return an empty string if no simple relation holds.
    """
    if got.is_complex() or got.dtype == torch.bool or got.shape != expected.shape:
        return ""
    whole_g, whole_e = got.double(), expected.double()
    g, e = whole_g[bad], whole_e[bad]
    if g.numel() < 2 or not bool((torch.isfinite(g) & torch.isfinite(e)).all()):
        return ""
    if torch.allclose(g, e, rtol=SLIGHT, atol=0):  # most numbers are near such a relation of the expected ones
        return ""
    if bool((g == 0).all()):
        return "each is 0"
    if bool((e == 0).all()):
        return "each is expected to be 0"
    if bits := _wrapped_bits(got[bad], expected[bad]):
        return f"each is off by a multiple of 2^{bits}, as numbers of {bits} bits that {WRAPPED}"
    if text := next(_moved(bad, whole_g, whole_e), ""):
        return text
    if g.numel() < FEWEST or _alike(e):
        return ""
    if bool((e != 0).all()) and _alike(factors := g / e):
        return f"each is {float(factors.mean()):.4g} times the expected"
    return f"each is off by {float((g - e).mean()):.4g}" if _alike(g - e) else ""


def _wrapped_bits(got: Tensor, expected: Tensor) -> int:
    """Return the number of bits of the widest integer dtype whose numbers, if they wrap around, differ from integers
    ``expected`` as those of ``got`` do. Return 0 if there is none.
    """
    if got.is_floating_point() or expected.is_floating_point():
        return 0
    off = got.long() - expected.long()
    fitting = (bits for bits in (32, 16, 8) if bool((off % (1 << bits) == 0).all()))
    return next((bits for bits in fitting if bits > 8 or off.numel() >= FEWEST), 0)


def _alike(values: Tensor) -> bool:
    """Return whether all ``values`` are equal up to rounding."""
    middle = values.median()
    return bool(((values - middle).abs() <= CLOSE * middle.abs()).all())


def _moved(bad: Tensor, got: Tensor, expected: Tensor) -> Iterator[str]:
    """Yield a text if the set elements of the mask ``bad`` have in ``got`` the values that ``expected`` has at the next
    or at the previous index of a dim, or if ``got`` has the values of ``expected`` in another order.
    """
    if expected.numel() < 2 or bool((expected == expected.flatten()[0]).all()):
        return
    for dim in range(expected.dim()):
        for step, name in ((1, "previous"), (-1, "next")):
            if expected.shape[dim] > 2 and torch.allclose(got[bad], expected.roll(step, dim)[bad], rtol=CLOSE, atol=0):
                yield f"each is what is expected at the {name} index of dim {dim}"
    if FEWEST < expected.numel() <= MOST_SORTED:
        pair = got.flatten().sort().values, expected.flatten().sort().values
        if torch.allclose(*pair, rtol=CLOSE, atol=0):
            yield "the values are the expected ones in another order"
