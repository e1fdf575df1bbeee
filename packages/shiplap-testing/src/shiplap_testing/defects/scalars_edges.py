"""Scalars at the edge of what they may be: zero, one, None and signs."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, V, scaled
from shiplap_testing.defects.defect import add, c_kernel, kernel, of
from shiplap_testing.defects.values_float import filled
from shiplap_testing.defects.witness import close, randn, same

scalars = partial(add, "scalars")


def dropped(ns):
    """Declare the op ``dropped`` in the namespace ``ns`` and return it. Its reference returns ``x * kept / (1 - p)``,
    or zero if ``p`` is 1.
    """

    @sl.op(f"{ns}::dropped")
    def dropped(x: M, kept: M, p: float = 0.5) -> M:
        """Return ``x * kept / (1 - p)``, or zero if ``p`` is 1. Kernels of the op are compared with this reference."""
        return x * kept * (0.0 if p == 1 else 1 / (1 - p))

    return dropped


scalars(
    "dropout of everything",
    "p = 1 divides by zero",
    of(dropped, filled(lambda x, kept, p: x * kept * (1 / (1 - p)))),
    of(dropped, filled(lambda x, kept, p: x * kept * (0.0 if p == 1 else 1 / (1 - p)))),
    same(lambda: (randn(2, 3), torch.zeros(2, 3), 1.0)),
)


def cropped(ns):
    """Declare the op ``cropped`` in the namespace ``ns`` and return it. Its reference returns ``x`` without its first
    and last ``pad`` elements.
    """

    @sl.op(f"{ns}::cropped", dims={"m": "n - 2 * pad"}, requires=("pad >= 0", "n >= 2 * pad"))
    def cropped(x: V, pad: int = 1) -> Float[Tensor, "m"]:
        """Return ``x`` without its first and last ``pad`` elements. Kernels of the op are compared with this
        reference.
        """
        return x[pad : len(x) - pad]

    return cropped


scalars(
    "crop by nothing",
    "x[pad:-pad] is empty for pad = 0",
    of(cropped, filled(lambda x, pad: x[pad:-pad])),
    of(cropped, filled(lambda x, pad: x[pad : len(x) - pad])),
    same(lambda: (randn(6), 0)),
)


def limited(ns):
    """Declare the op ``limited`` in the namespace ``ns`` and return it. Its reference returns ``x`` with elements above
    ``limit`` replaced by ``limit``. If ``limit`` is None, it returns ``x``.
    """

    @sl.op(f"{ns}::limited")
    def limited(x: V, limit: float | None = None) -> V:
        """Return ``x`` with elements above ``limit`` replaced by ``limit``, or ``x`` if ``limit`` is None. Kernels of
        the op are compared with this reference.
        """
        return x if limit is None else x.clamp_max(limit)

    return limited


scalars(
    "limit of zero taken for none",
    "`if limit` where `if limit is not None` is meant",
    of(limited, filled(lambda x, limit: x.clamp_max(limit) if limit else x)),
    of(limited, filled(lambda x, limit: x if limit is None else x.clamp_max(limit))),
    same(lambda: (randn(6), 0.0)),
)


def _default_when_zero(test):
    """Return a function that registers a kernel of the op ``shrunk`` in C, which computes ``x * by``. ``test`` is a C
    expression of ``by``, and the kernel multiplies by its value. If it is ``by``, there is no defect. If it yields the
    default 0.125 for a ``by`` of zero, there is a defect on purpose.
    """
    return c_kernel(f"""
int shrunk(const sl_context* ctx, const DLTensor* x, DLTensor* out, double by) {{
  const float* from = x->data; float* to = out->data; const float s = (float)({test});
  for (int64_t i = 0; i < x->shape[0]; ++i) to[i] = from[i] * s;
  return SL_OK;
}}""")


def shrunk(ns):
    """Declare the op ``shrunk`` in the namespace ``ns`` and return it. Its reference returns ``x * by``."""
    from jaxtyping import Float32

    @sl.op(f"{ns}::shrunk")
    def shrunk(x: Float32[Tensor, "n"], by: float = 0.125) -> Float32[Tensor, "n"]:
        """Return ``x * by``. Kernels of the op are compared with this reference."""
        return x * by

    return shrunk


scalars(
    "C: zero stands for the default",
    "an argument of 0 was not given, thinks the kernel, and takes a default of its own",
    of(shrunk, _default_when_zero("by == 0 ? 0.125 : by")),
    of(shrunk, _default_when_zero("by")),
    same(lambda: (randn(6), 0.0)),
    needs=["compiler"],
)


def _only_positive(x, scale, *, out):
    """Write ``x * scale`` to ``out``. This kernel of ``scaled`` has a defect on purpose: it multiplies by the magnitude
    of ``scale``, which is wrong for a negative ``scale``.
    """
    torch.mul(x, abs(scale), out=out)


scalars(
    "scale without its sign",
    "the scale goes through a table of exponents, which has no sign",
    of(scaled, kernel(_only_positive)),
    of(scaled, kernel(lambda x, scale, *, out: torch.mul(x, scale, out=out))),
    lambda op: close(op(torch.ones(2, 2), -3.0), torch.full((2, 2), -3.0)),
)
