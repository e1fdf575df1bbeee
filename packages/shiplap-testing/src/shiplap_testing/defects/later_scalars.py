"""Later ones: right for the usual options, scalars and lists."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, V
from shiplap_testing.defects.defect import add, of
from shiplap_testing.defects.values_float import filled
from shiplap_testing.defects.witness import randn, same, wide

scalars = partial(add, "scalars", later=True)
lists = partial(add, "lists", later=True)


def floored(ns):
    """Declare the op ``floored`` in the namespace ``ns`` and return it. Its reference returns ``x`` with numbers below
    ``low`` replaced by ``low``.
    """

    @sl.op(f"{ns}::floored")
    def floored(x: M, low: float = 0.5) -> M:
        """Return ``x`` with numbers below ``low`` replaced by ``low``. Kernels of the op are compared with this
        reference.
        """
        return x.clamp_min(low)

    return floored


scalars(
    "negative threshold taken for zero",
    "the register holds the threshold without a sign: relu is the least that it does",
    of(floored, filled(lambda x, low: x.clamp_min(max(low, 0.0)))),
    of(floored, filled(lambda x, low: x.clamp_min(low))),
    same(lambda: (torch.tensor([[-1.0, -3.0]]), -2.0)),
)


def reduced(ns):
    """Declare the op ``reduced`` in the namespace ``ns`` and return it. For each row of ``x``, its reference returns
    the mean if ``how`` is ``mean``, the Euclidean norm if it is ``norm``, and the sum otherwise.
    """

    @sl.op(f"{ns}::reduced", requires="c >= 1")
    def reduced(x: M, how: str = "mean") -> V:
        """Return, for each row of ``x``, the mean if ``how`` is ``mean``, the Euclidean norm if it is ``norm``, and the
        sum otherwise. Kernels of the op are compared with this reference.
        """
        if how == "mean":
            return x.mean(1)
        if how == "norm":
            return torch.linalg.vector_norm(wide(x), dim=1).to(x.dtype)
        return x.sum(1)

    return reduced


def _reduced(rooted):
    """Return a function that registers a kernel of the op ``reduced``. If ``rooted`` is true, there is no defect. If it
    is false, there is a defect on purpose: for ``how="norm"``, the kernel returns the sum of squares without its square
    root.
    """

    def fill(x, how):
        """Return, for each row of ``x``, the mean if ``how`` is ``mean``, the Euclidean norm if it is ``norm``, and the
        sum otherwise. If ``rooted`` (argument of ``_reduced``) is true, there is no defect. If it is false, there is a
        defect on purpose: the norm lacks its square root.
        """
        y = wide(x)
        if how == "mean":
            return y.mean(1)
        if how == "norm":
            return torch.linalg.vector_norm(y, dim=1) if rooted else y.square().sum(1)
        return y.sum(1)

    return filled(fill)


scalars(
    "norm without a root",
    "one of three ways to reduce, chosen by a string",
    of(reduced, _reduced(False)),
    of(reduced, _reduced(True)),
    same(lambda: (randn(2, 3), "norm")),
)


def along(ns):
    """Declare the op ``along`` in the namespace ``ns`` and return it. Its reference returns the cumulative sum of ``x``
    along dim ``dim``.
    """

    @sl.op(f"{ns}::along", requires=("dim >= -3", "dim <= 2"))
    def along(x: Float[Tensor, "a b c"], dim: int = -1) -> Float[Tensor, "a b c"]:
        """Return the cumulative sum of ``x`` along dim ``dim``. Kernels of the op are compared with this reference."""
        return x.cumsum(dim)

    return along


scalars(
    "dim counted from the end as if there were two",
    "-2 is the second of three dims, and the kernel takes the first",
    of(along, filled(lambda x, dim: wide(x).cumsum(dim if dim >= -1 else dim + 2 if dim == -2 else 0))),
    of(along, filled(lambda x, dim: wide(x).cumsum(dim))),
    same(lambda: (randn(2, 3, 4), -2)),
)


def dilated(ns):
    """Declare the op ``dilated`` in the namespace ``ns`` and return it. Its reference returns ``x[i] - x[i - step]``
    for each index ``i`` of the vector ``x``. ``x[i - step]`` counts as zero if ``i`` is less than ``step``.
    """

    @sl.op(f"{ns}::dilated", requires=("step >= 1", "step <= 8"))
    def dilated(x: Float[Tensor, "n"], step: int = 1) -> Float[Tensor, "n"]:
        """Return each element of ``x`` less the element ``step`` places before it, which counts as zero where there is
        none. Kernels of the op are compared with this reference.
        """
        padded = torch.nn.functional.pad(x, (step, 0))
        return x - padded[: len(x)]

    return dilated


scalars(
    "difference at distance two at most",
    "the halo of the kernel holds two elements",
    of(dilated, filled(lambda x, step: x - torch.nn.functional.pad(x, (min(step, 2), 0))[: len(x)])),
    of(dilated, filled(lambda x, step: x - torch.nn.functional.pad(x, (step, 0))[: len(x)])),
    same(lambda: (randn(9), 3)),
)


def combined(ns):
    """Declare the op ``combined`` in the namespace ``ns`` and return it. Its reference returns the sum of ``x`` and the
    tensors of ``parts``. The tensor at index ``i`` of ``parts`` has the factor ``weights ** i``.
    """

    @sl.op(f"{ns}::combined")
    def combined(x: M, parts: list[M], weights: float = 0.5) -> M:
        """Return ``x`` plus the tensors of ``parts``. The tensor at index ``i`` has the factor ``weights ** i``.
        Kernels of the op are compared with this reference.
        """
        return sum((p * weights**i for i, p in enumerate(parts)), x)

    return combined


lists(
    "weights that stop at the third",
    "the third and later parts of a list have the weight of the second",
    of(combined, filled(lambda x, parts, w: sum((p * w ** min(i, 1) for i, p in enumerate(parts)), x))),
    of(combined, filled(lambda x, parts, w: sum((wide(p) * w**i for i, p in enumerate(parts)), wide(x)))),
    same(lambda: (randn(2, 3), [randn(2, 3, seed=i) for i in range(3)], 0.5)),
)
lists(
    "mean over a list that begins with an empty one",
    "without parts, x is returned twice over",
    of(combined, filled(lambda x, parts, w: sum((p * w**i for i, p in enumerate(parts)), x) if parts else x + x)),
    of(combined, filled(lambda x, parts, w: sum((wide(p) * w**i for i, p in enumerate(parts)), wide(x)))),
    same(lambda: (randn(2, 3), [], 0.5)),
)
