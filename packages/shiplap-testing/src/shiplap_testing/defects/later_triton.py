"""Later ones in Triton, run by its interpreter."""

from functools import partial

import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.defect import Part, add, of
from shiplap_testing.defects.witness import randn, same, uniform

M32 = Float32[Tensor, "n c"]
size = partial(add, "size", needs=["triton"], later=True)


def cdiv(a, b):
    """Return ``a / b`` rounded up, for integers."""
    return -(-a // b)


def normed(ns):
    """Declare the op ``normed`` in the namespace ``ns`` and return it. Its reference returns ``x`` with the mean of
    each row subtracted. Each row is then divided by the square root of its variance plus 0.001.
    """

    @sl.op(f"{ns}::normed", requires=("c >= 1", "c <= 512"))
    def normed(x: M32) -> M32:
        """Return the rows of ``x``, each less its mean and divided by the root of its variance plus 0.001. Kernels of
        the op are compared with this reference.
        """
        y = x - x.mean(1, keepdim=True)
        return y * torch.rsqrt(y.square().mean(1, keepdim=True) + 1e-3)

    return normed


def _normed(masked) -> Part:
    """Return a function that registers a CPU kernel with the op ``normed``. The kernel launches the Triton kernel
    ``norm``. If ``masked`` is true, there is no defect. If it is false, there is a defect on purpose: the variance also
    counts the padding behind the end of a row.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``normed``). It launches the Triton kernel ``norm``. If
        ``masked`` (argument of ``_normed``) is true, there is no defect. If it is false, there is a defect on purpose:
        the variance also counts the padding behind the end of a row.
        """
        from shiplap_testing.defects import triton_kernels

        @op.kernel("cpu")
        def forward(x, *, out):
            """Launch the Triton kernel ``norm``, which writes the normalised rows of ``x`` to ``out``. If ``masked``
            (argument of ``_normed``) is true, there is no defect. If it is false, there is a defect on purpose: the
            variance also counts the padding behind the end of a row.
            """
            if len(x):
                block = 16
                # tl.arange takes powers of two only.
                while block < x.shape[1]:
                    block *= 2
                triton_kernels.norm[(cdiv(len(x), 16),)](
                    x.contiguous(), out, *x.shape, MASKED=masked, ROWS=16, BLOCK=block
                )

    return bind


size(
    "Triton: variance that counts the padding",
    "lanes beyond the row hold minus the mean after it was subtracted",
    of(normed, _normed(False)),
    of(normed, _normed(True)),
    same(lambda: (uniform(2, 70) + 1,)),
)


def multiplied(ns):
    """Declare the op ``multiplied`` in the namespace ``ns`` and return it. Its reference returns the matrix product ``a
    @ b``.
    """

    @sl.op(f"{ns}::multiplied")
    def multiplied(a: Float32[Tensor, "m k"], b: Float32[Tensor, "k n"]) -> Float32[Tensor, "m n"]:
        """Return the matrix product ``a @ b``. Kernels of the op are compared with this reference."""
        return a @ b

    return multiplied


def _multiplied(clipped) -> Part:
    """Return a function that registers a CPU kernel with the op ``multiplied``, the matrix product ``a @ b``. The
    kernel launches the Triton kernel ``grouped``. If ``clipped`` is true, there is no defect. If it is false, there is
    a defect on purpose: some tiles of the result are left out if the number of rows of tiles is not a multiple of four.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``multiplied``). It launches the Triton kernel ``grouped``.
        If ``clipped`` (argument of ``_multiplied``) is true, there is no defect. If it is false, there is a defect on
        purpose: some tiles of the result are left out.
        """
        from shiplap_testing.defects import triton_kernels

        @op.kernel("cpu")
        def forward(a, b, *, out):
            """Launch the Triton kernel ``grouped``, which writes ``a @ b`` to ``out``. If ``clipped`` (argument of
            ``_multiplied``) is true, there is no defect. If it is false, there is a defect on purpose: some tiles of
            ``out`` stay zero if the number of rows of tiles is not a multiple of four.
            """
            (m, k), n = a.shape, b.shape[1]
            out.zero_()
            if m and n and k:
                grid = (cdiv(m, 32) * cdiv(n, 32),)
                triton_kernels.grouped[grid](
                    a.contiguous(), b.contiguous(), out, m, n, k, GROUP=4, BLOCK=32, CLIPPED=clipped
                )

    return bind


size(
    "Triton: groups of tiles of full height",
    "the last group of rows of tiles is taken to have four, so that tiles are left out",
    of(multiplied, _multiplied(False)),
    of(multiplied, _multiplied(True)),
    same(lambda: (randn(170, 5), randn(5, 70, seed=1))),
)


def shifted(ns):
    """Declare the op ``shifted`` in the namespace ``ns`` and return it. Its reference returns ``x + bias``, with
    ``bias`` added to each row.
    """

    @sl.op(f"{ns}::shifted")
    def shifted(x: M32, bias: Float32[Tensor, "c"]) -> M32:
        """Return ``x + bias``, with ``bias`` added to each row. Kernels of the op are compared with this reference."""
        return x + bias

    return shifted


def _shifted(own) -> Part:
    """Return a function that registers a CPU kernel with the op ``shifted``, which adds ``bias`` to each row of ``x``.
    The kernel launches the Triton kernel ``shift``. If ``own`` is true, there is no defect. If it is false, there is a
    defect on purpose: from column 64 on, the ``bias`` of the first 64 columns is added.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``shifted``). It launches the Triton kernel ``shift``. If
        ``own`` (argument of ``_shifted``) is true, there is no defect. If it is false, there is a defect on purpose:
        from column 64 on, the ``bias`` of the first 64 columns is added.
        """
        from shiplap_testing.defects import triton_kernels

        @op.kernel("cpu")
        def forward(x, bias, *, out):
            """Launch the Triton kernel ``shift``, which writes ``x + bias`` to ``out``. If ``own`` (argument of
            ``_shifted``) is true, there is no defect. If it is false, there is a defect on purpose: from column 64 on,
            the ``bias`` of the first 64 columns is added.
            """
            if x.numel():
                grid = (cdiv(x.shape[0], 16), cdiv(x.shape[1], 64))
                triton_kernels.shift[grid](x.contiguous(), bias.contiguous(), out, *x.shape, OWN=own, ROWS=16, BLOCK=64)

    return bind


size(
    "Triton: bias of the first tile of columns",
    "the offset of the tile is missing where the bias is loaded",
    of(shifted, _shifted(False)),
    of(shifted, _shifted(True)),
    same(lambda: (randn(3, 100), randn(100, seed=1))),
)
