"""Kernels in Triton, run by its interpreter: masks, grids, strides and updates."""

from functools import partial

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.defect import Part, add, of
from shiplap_testing.defects.witness import close, randn, same, uniform

M32 = Float32[Tensor, "n c"]
size = partial(add, "size", needs=["triton"])
values = partial(add, "values", needs=["triton"])
layout = partial(add, "layout", needs=["triton"], breaks=True)


def cdiv(a, b):
    """Return ``a / b`` rounded up, for integers."""
    return -(-a // b)


def scaled(ns):
    """Declare the op ``scaled`` in the namespace ``ns`` and return it. Its reference returns ``x * by``."""

    @sl.op(f"{ns}::scaled")
    def scaled(x: Float32[Tensor, "n"], by: float = 2.0) -> Float32[Tensor, "n"]:
        """Return ``x * by``. Kernels of the op are compared with this reference."""
        return x * by

    return scaled


def _scale(grid) -> Part:
    """Return a function that registers a CPU kernel with the op ``scaled``. The kernel launches the Triton kernel
    ``scale`` with ``grid(n)`` programs for ``n`` elements, in blocks of 256. If ``grid`` rounds up, there is no defect.
    If it rounds down, there is a defect on purpose: the last elements stay zero.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``scaled``). It launches the Triton kernel ``scale`` with
        ``grid(n)`` (argument of ``_scale``) programs for ``n`` elements, in blocks of 256. If ``grid`` rounds up, there
        is no defect. If it rounds down, there is a defect on purpose: the last elements stay zero.
        """
        from shiplap_testing.defects import triton_kernels

        @op.kernel("cpu")
        def forward(x, by, *, out):
            """Launch the Triton kernel ``scale``, which writes ``x * by`` to ``out``. If ``grid`` (argument of
            ``_scale``) rounds the number of blocks up, there is no defect. If it rounds down, there is a defect on
            purpose: the last elements stay zero.
            """
            out.zero_()
            if len(x):
                triton_kernels.scale[(grid(len(x)),)](x.contiguous(), out, len(x), by, BLOCK=256)

    return bind


size(
    "Triton: grid rounded down",
    "n // BLOCK programs where there should be cdiv(n, BLOCK), one at least",
    of(scaled, _scale(lambda n: max(n // 256, 1))),
    of(scaled, _scale(lambda n: cdiv(n, 256))),
    same(lambda: (randn(600), 3.0)),
)


def highest(ns):
    """Declare the op ``highest`` in the namespace ``ns`` and return it. Its reference returns the maximum of each row
    of ``x``.
    """

    @sl.op(f"{ns}::highest", requires=("c >= 1", "c <= 256"))
    def highest(x: M32) -> Float32[Tensor, "n"]:
        """Return the maximum of each row of ``x``. Kernels of the op are compared with this reference."""
        return x.amax(1)

    return highest


def _highest(other) -> Part:
    """Return a function that registers a CPU kernel with the op ``highest``. The kernel launches the Triton kernel
    ``row_max``, which puts ``other`` behind the end of each row. If ``other`` is minus infinity, there is no defect. If
    it is zero, there is a defect on purpose: the maximum of a row of negative numbers is zero.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``highest``). It launches the Triton kernel ``row_max``,
        which puts ``other`` (argument of ``_highest``) behind the end of each row. If ``other`` is minus infinity,
        there is no defect. If it is zero, there is a defect on purpose: the maximum of a row of negative numbers is
        zero.
        """
        from shiplap_testing.defects import triton_kernels

        @op.kernel("cpu")
        def forward(x, *, out):
            """Launch the Triton kernel ``row_max``, which writes the maximum of each row of ``x`` to ``out``. If
            ``other`` (argument of ``_highest``) is minus infinity, there is no defect. If it is zero, there is a defect
            on purpose: the maximum of a row of negative numbers is zero.
            """
            if len(x):
                triton_kernels.row_max[(cdiv(len(x), 32),)](
                    x.contiguous(), out, *x.shape, OTHER=other, ROWS=32, BLOCK=256
                )

    return bind


values(
    "Triton: maximum over zeros beyond the row",
    "masked lanes load zero, which is more than a row of negative numbers has",
    of(highest, _highest(0.0)),
    of(highest, _highest(-float("inf"))),
    lambda op: close(op(torch.tensor([[-1.0, -2.0]])), torch.tensor([-1.0])),
)


def normal(ns):
    """Declare the op ``normal`` in the namespace ``ns`` and return it. Its reference returns the softmax of each row of
    ``x``.
    """

    @sl.op(f"{ns}::normal", requires="c >= 1")
    def normal(x: M32) -> M32:
        """Return the softmax of each row of ``x``. Kernels of the op are compared with this reference."""
        return torch.softmax(x, 1)

    return normal


def _normal(guarded) -> Part:
    """Return a function that registers a CPU kernel with the op ``normal``, the softmax of rows. The kernel launches
    the Triton kernel ``softmax``. If ``guarded`` is true, there is no defect. If it is false, there is a defect on
    purpose: the sum also counts the padding behind the end of a row.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``normal``). It launches the Triton kernel ``softmax``. If
        ``guarded`` (argument of ``_normal``) is true, there is no defect. If it is false, there is a defect on purpose:
        the sum also counts the padding behind the end of a row.
        """
        from shiplap_testing.defects import triton_kernels

        @op.kernel("cpu")
        def forward(x, *, out):
            """Launch the Triton kernel ``softmax``, which writes the softmax of each row of ``x`` to ``out``. If
            ``guarded`` (argument of ``_normal``) is true, there is no defect. If it is false, there is a defect on
            purpose: the sum also counts the padding behind the end of a row.
            """
            if len(x):
                grid = (cdiv(len(x), 32),)
                triton_kernels.softmax[grid](x.contiguous(), out, *x.shape, GUARDED=guarded, ROWS=32, BLOCK=128)

    return bind


size(
    "Triton: softmax that counts the tail",
    "lanes beyond the row load zero and add exp(-maximum) to the sum",
    of(normal, _normal(False)),
    of(normal, _normal(True)),
    same(lambda: (uniform(2, 130) * 0.1,)),
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


def _multiplied(rest) -> Part:
    """Return a function that registers a CPU kernel with the op ``multiplied``, the matrix product ``a @ b``. The
    kernel launches the Triton kernel ``product``. If ``rest`` is true, there is no defect. If it is false, there is a
    defect on purpose: the last step over ``k`` adds the last column of ``a`` several times.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``multiplied``). It launches the Triton kernel ``product``.
        If ``rest`` (argument of ``_multiplied``) is true, there is no defect. If it is false, there is a defect on
        purpose: the last step over ``k`` adds the last column of ``a`` several times.
        """
        from shiplap_testing.defects import triton_kernels

        @op.kernel("cpu")
        def forward(a, b, *, out):
            """Launch the Triton kernel ``product``, which writes ``a @ b`` to ``out``. If ``rest`` (argument of
            ``_multiplied``) is true, there is no defect. If it is false, there is a defect on purpose: the last step
            over ``k`` adds the last column of ``a`` several times.
            """
            (m, k), n = a.shape, b.shape[1]
            out.zero_()
            if m and n and k:
                grid = (cdiv(m, 64), cdiv(n, 64))
                triton_kernels.product[grid](a.contiguous(), b.contiguous(), out, m, n, k, BLOCK=64, REST=rest)

    return bind


size(
    "Triton: mask of k that does not count down",
    "offsets within a step are compared with all of k: the last step adds its last column again",
    of(multiplied, _multiplied(False)),
    of(multiplied, _multiplied(True)),
    same(lambda: (uniform(5, 100), uniform(100, 7, seed=1))),
)


def centred(ns):
    """Declare the op ``centred`` in the namespace ``ns`` and return it. Its reference subtracts the mean of each row of
    ``x`` from that row and returns the result.
    """

    @sl.op(f"{ns}::centred", requires=("c >= 1", "c <= 256"))
    def centred(x: M32) -> M32:
        """Return ``x`` less the mean of each row. Kernels of the op are compared with this reference."""
        return x - x.mean(1, keepdim=True)

    return centred


def _centred(own) -> Part:
    """Return a function that registers a CPU kernel with the op ``centred``, which subtracts the mean of each row. The
    kernel launches the Triton kernel ``centre``. If ``own`` is true, there is no defect. If it is false, there is a
    defect on purpose: the output is written with the row stride of the input.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``centred``). It launches the Triton kernel ``centre``. If
        ``own`` (argument of ``_centred``) is true, there is no defect. If it is false, there is a defect on purpose:
        the output is written with the row stride of the input.
        """
        from shiplap_testing.defects import triton_kernels

        @op.kernel("cpu")
        def forward(x, *, out):
            """Launch the Triton kernel ``centre``, which subtracts the mean of each row of ``x`` and writes the result
            to ``out``. If ``own`` (argument of ``_centred``) is true, there is no defect. If it is false, there is a
            defect on purpose: if ``x`` is a slice, rows are written with the row stride of ``x``, to wrong positions.
            """
            # The kernel takes any distance of rows, and columns that follow each other.
            x = x if x.stride(1) == 1 else x.contiguous()
            if len(x):
                # The layer norm of Triton's tutorial has one stride for both.
                strides = x.stride(0), out.stride(0) if own else x.stride(0)
                triton_kernels.centre[(cdiv(len(x), 32),)](x, out, *strides, *x.shape, ROWS=32, BLOCK=256)

    return bind


def _within_a_larger(op):
    """Return whether ``op.out`` (``centred``) is right for a slice as argument and writes nothing behind the end of its
    output.
    """
    x = randn(3, 8)[:, :4]
    with torch.no_grad():  # rows of the argument lie 8 apart; there is room for that behind this output
        memory = torch.zeros(8, 4)
        op.out(x, out=memory[:3])
    return close(memory[:3], op.reference(x)) and not memory[3:].any()


layout(
    "Triton: output written with the stride of the input",
    "the layer norm of the tutorial: rows of a sliced argument lie further apart than those of the output",
    of(centred, _centred(False)),
    of(centred, _centred(True)),
    _within_a_larger,
)


def tallied(ns):
    """Declare the op ``tallied`` in the namespace ``ns`` and return it. Its reference returns a vector of ``bins``
    sums. Sum ``i`` is that of the elements of ``x`` with ``index % bins == i``.
    """

    @sl.op(f"{ns}::tallied", requires="bins >= 1")
    def tallied(x: Float32[Tensor, "n"], index: Int64[Tensor, "n"], bins: int = 7) -> Float32[Tensor, "bins"]:
        """Return, for each of ``bins`` classes, the sum of the elements of ``x`` whose ``index`` modulo ``bins`` is the
        class. Kernels of the op are compared with this reference.
        """
        return x.new_zeros(bins).index_add(0, index % bins, x)

    return tallied


def _tallied(atomic) -> Part:
    """Return a function that registers a CPU kernel with the op ``tallied``, sums of elements by index. The kernel
    launches the Triton kernel ``accumulate``. If ``atomic`` is true, there is no defect. If it is false, there is a
    defect on purpose: of the elements of a block with equal indices, only one is added.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``tallied``). It launches the Triton kernel ``accumulate``.
        If ``atomic`` (argument of ``_tallied``) is true, there is no defect. If it is false, there is a defect on
        purpose: of the elements of a block with equal indices, only one is added.
        """
        from shiplap_testing.defects import triton_kernels

        @op.kernel("cpu")
        def forward(x, index, bins, *, out):
            """Launch the Triton kernel ``accumulate``, which adds ``x`` to zeros in ``out`` at ``index`` modulo
            ``bins``. If ``atomic`` (argument of ``_tallied``) is true, there is no defect. If it is false, there is a
            defect on purpose: of the elements of a block with equal indices, only one is added.
            """
            out.zero_()
            if len(x):
                place = (index % bins).contiguous()
                triton_kernels.accumulate[(cdiv(len(x), 64),)](
                    x.contiguous(), place, out, len(x), BLOCK=64, ATOMIC=atomic
                )

    return bind


values(
    "Triton: load, add and store without an atomic",
    "of equal indices in one block the last one is kept",
    of(tallied, _tallied(False)),
    of(tallied, _tallied(True)),
    same(lambda: (torch.ones(6), torch.tensor([1, 1, 2, 1, 3, 3]), 7)),
)
