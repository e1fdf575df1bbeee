"""Right on contiguous tensors: kernels that take a pointer and believe they know where the elements lie."""

from functools import partial

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import add_to, added, doubled, row_sum, scaled, update
from shiplap_testing.defects.defect import add, c_kernel, kernel, of
from shiplap_testing.defects.values_float import filled
from shiplap_testing.defects.witness import close, randn, same, wide

layout = partial(add, "layout")


def images(ns):
    """Declare the op ``images`` in the namespace ``ns`` and return it. Its reference returns ``x`` with ``bias[c]``
    added to each element of channel ``c``.
    """

    @sl.op(f"{ns}::images")
    def images(x: Float[Tensor, "n c h w"], bias: Float[Tensor, "c"]) -> Float[Tensor, "n c h w"]:
        """Return ``x + bias``, with ``bias`` added to each channel. Kernels of the op are compared with this
        reference.
        """
        return x + bias[:, None, None]

    return images


def _pixels(last):
    """Return a function that registers a kernel of the op ``images`` with a path for channels-last memory. If ``last``
    is true, there is no defect. If it is false, there is a defect on purpose: this path computes the channel of an
    element as for contiguous memory.
    """

    def pixels(x, bias, *, out):
        """Write ``x`` plus the ``bias`` of each channel to ``out``. If ``last`` (argument of ``_pixels``) is true,
        there is no defect. If it is false, there is a defect on purpose: elements of images in channels-last memory get
        the ``bias`` of another channel.
        """
        # An image of one channel is contiguous in both orders, and then both paths agree.
        if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
            n, c, h, w = x.shape
            flat = x.permute(0, 2, 3, 1).reshape(-1)
            place = torch.arange(flat.numel())
            flat = flat + bias[place % c if last else place // (h * w) % c]
            out.copy_(flat.view(n, h, w, c).permute(0, 3, 1, 2))
        else:
            torch.add(x, bias[:, None, None], out=out)

    return kernel(pixels)


layout(
    "bias of channels last",
    "the path for channels_last computes the channel of an element as if it were channels first",
    of(images, _pixels(False)),
    of(images, _pixels(True)),
    same(lambda: (randn(2, 3, 4, 5).to(memory_format=torch.channels_last), randn(3))),
)


def volumes(ns):
    """Declare the op ``volumes`` in the namespace ``ns`` and return it. Its reference returns ``2 * x``."""

    @sl.op(f"{ns}::volumes")
    def volumes(x: Float[Tensor, "n c d h w"]) -> Float[Tensor, "n c d h w"]:
        """Return ``2 * x``. Kernels of the op are compared with this reference."""
        return x * 2

    return volumes


def _in_its_order(back):
    """Return a function that registers a kernel of the op ``volumes``, which computes ``2 * x``. The kernel computes
    the result in the memory order of ``x``. If ``back`` is true, there is no defect. If it is false, there is a defect
    on purpose: the result is read with the strides of ``out``.
    """

    def fill(x, *, out):
        """Write ``2 * x`` to ``out``. If ``back`` (argument of ``_in_its_order``) is true, there is no defect. If it is
        false, there is a defect on purpose: if ``x`` is not contiguous, its elements end at wrong positions of ``out``.
        """
        result = torch.empty_like(x).copy_(x * 2)  # strides as x has them
        # The output is contiguous, whatever the order of x.
        out.copy_(result if back else torch.as_strided(result, out.shape, out.stride()))

    return kernel(fill)


layout(
    "result in the memory order of the argument",
    "empty_like keeps channels_last_3d, and the result is handed over as if it were contiguous",
    of(volumes, _in_its_order(False)),
    of(volumes, _in_its_order(True)),
    same(lambda: (randn(2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),)),
)


def _column_major(packed):
    """Return a function that registers a kernel of the op ``scaled`` with a path for transposed matrices. If ``packed``
    is false, there is no defect. If it is true, there is a defect on purpose: the stride between columns is taken to be
    the number of rows.
    """

    def fill(x, scale, *, out):
        """Write ``x * scale`` to ``out``. If ``packed`` (argument of ``_column_major``) is false, there is no defect.
        If it is true, there is a defect on purpose: a slice of a transposed matrix is read as if its columns followed
        each other without gaps.
        """
        n, c = x.shape
        # With a single row or column, strides say nothing about the order.
        if n > 1 and c > 1 and x.stride(0) == 1:
            # BLAS calls the distance of columns the leading dimension.
            leading = n if packed else x.stride(1)
            x = torch.as_strided(x, (n, c), (1, leading), x.storage_offset())
        torch.mul(x, scale, out=out)

    return kernel(fill)


layout(
    "transposed matrix taken to be packed",
    "the leading dimension of a transposed view is its number of rows only where nothing was sliced",
    of(scaled, _column_major(True)),
    of(scaled, _column_major(False)),
    same(lambda: (randn(4, 6)[:, 1:4].T, 2.0)),
)


def _strided_copy(offset):
    """Return a function that registers a kernel of the op ``scaled``. The kernel reads ``x`` from the storage offset
    ``offset(x)``. If this is the offset of ``x``, there is no defect. If it is always 0, there is a defect on purpose:
    slices are read from the start of their storage.
    """
    return filled(lambda x, scale: torch.as_strided(x, x.shape, x.stride(), offset(x)) * scale)


layout(
    "storage offset left out",
    "the kernel begins at the start of the storage",
    of(scaled, _strided_copy(lambda x: 0)),
    of(scaled, _strided_copy(lambda x: x.storage_offset())),
    same(lambda: (randn(6, 3)[2:5], 2.0)),
)


def _packed(x):
    """Return a view of the memory of ``x`` with its shape and contiguous strides. A kernel of ``scaled`` that calls it
    with a tensor that is not contiguous has a defect on purpose: elements are at wrong positions.
    """
    return torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())


layout(
    "strides computed from the shape",
    "the kernel gets a pointer and sizes",
    of(scaled, filled(lambda x, scale: _packed(x) * scale)),
    of(scaled, filled(lambda x, scale: _packed(x.contiguous()) * scale)),
    same(lambda: (randn(3, 4)[:, ::2], 2.0)),
)


def _borrowed(x, y):
    """Return ``x + y``. This kernel of ``added`` has a defect on purpose: ``y`` is read with the strides of ``x``. The
    result is wrong if the strides of ``y`` differ.
    """
    return x + torch.as_strided(y, y.shape, x.stride(), y.storage_offset())


layout(
    "one tensor read with the strides of another",
    "the kernel has one pair of strides for both arguments",
    of(added, filled(_borrowed)),
    of(added, filled(lambda x, y: x + y)),
    same(lambda: (randn(3, 3), randn(3, 3, seed=1).T)),
)


def _stride_zero(by_dim):
    """Return a function that registers a kernel of the op ``doubled`` with a short cut for one row expanded to several.
    If ``by_dim`` is true, there is no defect. If it is false, there is a defect on purpose: the short cut is taken for
    any stride of zero, also for an expanded column.
    """

    def fill(x):
        """Return ``2 * x``. If ``by_dim`` (argument of ``_stride_zero``) is true, there is no defect. If it is false,
        there is a defect on purpose: for an expanded column, the first row is returned in all rows.
        """
        # An expanded dim has a stride of zero.
        if 0 in x.stride() and x.numel():
            return (x[:1] if not by_dim or x.stride(0) == 0 else x).expand(x.shape) * 2
        return x * 2

    return filled(fill)


layout(
    "expanded columns taken for expanded rows",
    "any stride of zero means that all rows are alike, thinks the short cut",
    of(doubled, _stride_zero(False)),
    of(doubled, _stride_zero(True)),
    same(lambda: (randn(3, 1).expand(3, 4),)),
)


def _as_one_run(exact):
    """Return a function that registers a kernel of the op ``doubled`` with a path for rows that follow each other in
    memory. If ``exact`` is true, there is no defect. If it is false, there is a defect on purpose: this path is also
    taken for rows that overlap in memory.
    """

    def fill(x, *, out):
        """Write ``2 * x`` to ``out``. If ``exact`` (argument of ``_as_one_run``) is true, there is no defect. If it is
        false, there is a defect on purpose: rows that overlap in memory are read as if they followed each other.
        """
        n, c = x.shape
        if x.numel() and x.stride(1) == 1 and (x.stride(0) == c if exact else x.stride(0) <= c):
            out.view(-1).copy_(torch.as_strided(x, (n * c,), (1,), x.storage_offset())).mul_(2)
        else:
            torch.mul(x, 2, out=out)

    return kernel(fill)


layout(
    "overlapping windows read as one run",
    "no gap between the rows is not the same as rows that follow each other",
    of(doubled, _as_one_run(False)),
    of(doubled, _as_one_run(True)),
    same(lambda: (randn(30)[:10].unfold(0, 4, 2),)),
)
layout(
    "view of what cannot be viewed",
    "x.view(-1) raises for a transposed argument",
    of(doubled, kernel(lambda x, *, out: torch.mul(x.view(-1), 2, out=out.view(-1)))),
    of(doubled, kernel(lambda x, *, out: torch.mul(x.reshape(-1), 2, out=out.view(-1)))),
    same(lambda: (randn(3, 4).T,)),
)


def batched(ns):
    """Declare the op ``batched`` in the namespace ``ns`` and return it. Its reference returns the sum of each row of
    each matrix of ``x``.
    """

    @sl.op(f"{ns}::batched")
    def batched(x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n"]:
        """Return the sum of each row of each matrix of ``x``. Kernels of the op are compared with this reference."""
        return x.sum(2)

    return batched


def _batch_stride(own):
    """Return a function that registers a kernel of the op ``batched``, the sums of rows. If ``own`` is true, there is
    no defect. If it is false, there is a defect on purpose: the stride between matrices is taken to be the number of
    rows times that of columns.
    """

    def fill(x):
        """Return the sum over the last dim of ``x``. If ``own`` (argument of ``_batch_stride``) is true, there is no
        defect. If it is false, there is a defect on purpose: a slice of a batch is read as if its matrices followed
        each other.
        """
        b, n, c = x.shape
        strides = (x.stride(0) if own else n * c, x.stride(1), x.stride(2))
        return wide(torch.as_strided(x, (b, n, c), strides, x.storage_offset())).sum(2)

    return filled(fill)


layout(
    "batch stride of rows times columns",
    "the strides of a matrix are passed, that of the batch is computed: wrong for x[:, :n]",
    of(batched, _batch_stride(False)),
    of(batched, _batch_stride(True)),
    same(lambda: (randn(3, 5, 4)[:, :2],)),
)


def heads(ns):
    """Declare the op ``heads`` in the namespace ``ns`` and return it. Its reference returns ``2 * x``."""

    @sl.op(f"{ns}::heads")
    def heads(x: Float[Tensor, "b s h d"]) -> Float[Tensor, "b s h d"]:
        """Return ``2 * x``. Kernels of the op are compared with this reference."""
        return x * 2

    return heads


def _outer_and_inner(exact):
    """Return a function that registers a kernel of the op ``heads``, which computes ``2 * x``, with a path for
    contiguous memory. If ``exact`` is true, there is no defect. If it is false, there is a defect on purpose: only the
    first and the last stride are tested for contiguity.
    """

    def fill(x, *, out):
        """Write ``2 * x`` to ``out``. If ``exact`` (argument of ``_outer_and_inner``) is true, there is no defect. If
        it is false, there is a defect on purpose: if the middle dims of ``x`` are transposed, ``x`` is read as if it
        were contiguous.
        """
        packed = x.stride(3) == 1 and x.stride(0) == x[0].numel() if x.numel() else False
        if x.is_contiguous() if exact else packed:
            torch.mul(torch.as_strided(x, (x.numel(),), (1,), x.storage_offset()), 2, out=out.view(-1))
        else:
            torch.mul(x, 2, out=out)

    return kernel(fill)


layout(
    "contiguous by its first and last stride",
    "(b, h, s, d).transpose(1, 2) passes that test",
    of(heads, _outer_and_inner(False)),
    of(heads, _outer_and_inner(True)),
    same(lambda: (randn(2, 3, 4, 5).transpose(1, 2),)),
)


def _gap_means_turned(checked):
    """Return a function that registers a kernel of the op ``row_sum`` with a path for transposed matrices. If
    ``checked`` is true, there is no defect. If it is false, there is a defect on purpose: this path is taken for any
    matrix whose second stride is not 1.
    """

    def fill(x):
        """Return the sum of each row of ``x``. If ``checked`` (argument of ``_gap_means_turned``) is true, there is no
        defect. If it is false, there is a defect on purpose: a slice with every second column of a matrix is read as a
        transposed matrix.
        """
        n, c = x.shape
        if x.stride(1) != 1 and (not checked or x.T.is_contiguous()) and x.numel():
            x = torch.as_strided(x, (n, c), (1, n), x.storage_offset())
        return wide(x).sum(1)

    return filled(fill)


layout(
    "every second column taken for a transposed matrix",
    "an inner stride other than one means column-major, thinks the kernel",
    of(row_sum, _gap_means_turned(False)),
    of(row_sum, _gap_means_turned(True)),
    same(lambda: (randn(3, 8)[:, ::2],)),
)


def _update_copy(table, x):
    """Add ``x`` to ``table.contiguous()`` in place. This kernel of ``update`` has a defect on purpose: a ``table`` that
    is not contiguous is not changed, but only a copy of it.
    """
    table.contiguous().add_(x)


layout(
    "update of a contiguous copy",
    "what a table that is not contiguous should get goes to a copy of it",
    of(update, kernel(_update_copy)),
    of(update, kernel(add_to)),
    same(lambda: (randn(4, 3).T, randn(3, 4))),
)


def picked(ns):
    """Declare the op ``picked`` in the namespace ``ns`` and return it. Its reference returns a copy of ``x``."""

    @sl.op(f"{ns}::picked")
    def picked(x: Int8[Tensor, "n c"]) -> Int8[Tensor, "n c"]:
        """Return a copy of ``x``. Kernels of the op are compared with this reference."""
        return x.clone()

    return picked


def _copy(kind):
    """Return a function that registers a C kernel of the op ``picked``. The kernel copies ``x`` and computes offsets in
    the C type ``kind``. If it is ``int64_t``, there is no defect. If it is ``int``, there is a defect on purpose:
    offsets of two gigabytes and more wrap around.
    """
    return c_kernel(
        f"""
int picked(const sl_context* ctx, const DLTensor* x, DLTensor* out) {{
  const int8_t* from = (const int8_t*)x->data; int8_t* to = (int8_t*)out->data;
  const int64_t c = x->shape[1], rows = x->strides[0], columns = x->strides[1];
  for (int64_t i = 0; i < x->shape[0]; ++i)
    for (int64_t j = 0; j < c; ++j) {{
      const {kind} offset = ({kind})(i * rows + j * columns);
      to[i * c + j] = from[offset];
    }}
  return SL_OK;
}}""",
        strided=["x"],
    )


def _spread_out():
    """Return a tuple of one argument for ``picked``, a matrix of 2 by 4 bytes whose columns lie a gigabyte apart. Most
    of the memory between them is reserved but never touched.
    """
    step = 1 << 30
    memory = torch.empty(3 * step + 8, dtype=torch.int8)  # reserved, hardly touched
    for j in range(4):
        memory[j * step : j * step + 2] = j + 1
    return (torch.as_strided(memory, (2, 4), (1, step)),)


layout(
    "C: column offset in 32 bits",
    "columns that lie 2^30 bytes apart: the offset of the third wraps",
    of(picked, _copy("int")),
    of(picked, _copy("int64_t")),
    same(_spread_out),
    needs=["compiler"],
    breaks=True,
)


def doubled32(ns):
    """Declare the op ``doubled32`` in the namespace ``ns`` and return it. Its reference returns ``2 * x``."""

    @sl.op(f"{ns}::doubled32")
    def doubled32(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n c"]:
        """Return ``2 * x``. Kernels of the op are compared with this reference."""
        return x * 2

    return doubled32


def _rows(stride):
    """Return a function that registers a kernel of the op ``doubled32`` in C. ``stride`` is a C expression for the
    distance of the rows of ``x`` in elements. If it is ``x->strides[0]``, there is no defect. If it is ``c``, the
    number of columns, there is a defect on purpose: rows of a slice are read from wrong addresses.
    """
    return c_kernel(
        f"""
int doubled32(const sl_context* ctx, const DLTensor* x, DLTensor* out) {{
  const float* from = x->data; float* to = out->data;
  const int64_t c = x->shape[1];
  for (int64_t i = 0; i < x->shape[0]; ++i)
    for (int64_t j = 0; j < c; ++j) to[i * c + j] = 2 * from[i * {stride} + j * x->strides[1]];
  return SL_OK;
}}""",
        strided=["x"],
    )


layout(
    "C: rows taken to follow each other",
    "the kernel says that it takes strides, and heeds the inner one",
    of(doubled32, _rows("c")),
    of(doubled32, _rows("x->strides[0]")),
    same(lambda: (randn(4, 6)[:, :3],)),
    needs=["compiler"],
)


def _aligned(rounding):
    """Return a function that registers a kernel of the op ``doubled32`` in C. The kernel clears those bits of the
    address of ``x`` that are set in the C number ``rounding``. If it is ``0``, there is no defect. If it is ``15``,
    there is a defect on purpose: views are read from an address that is rounded down.
    """
    return c_kernel(f"""
int doubled32(const sl_context* ctx, const DLTensor* x, DLTensor* out) {{
  const float* from = (const float*)((uintptr_t)x->data & ~(uintptr_t){rounding}); float* to = out->data;
  for (int64_t i = 0; i < x->shape[0] * x->shape[1]; ++i) to[i] = 2 * from[i];
  return SL_OK;
}}""")


layout(
    "C: pointer rounded down to 16 bytes",
    "a view that begins at the second element is read from the first",
    of(doubled32, _aligned("15")),
    of(doubled32, _aligned("0")),
    lambda op: close(op(torch.arange(13.0)[1:].view(3, 4)), 2 * torch.arange(1.0, 13.0).view(3, 4)),
    needs=["compiler"],
)


def any_rank(ns):
    """Declare the op ``any_rank`` in the namespace ``ns`` and return it. Its reference returns ``x * weight``, where
    ``weight`` has an element for each index of the last dim of ``x``.
    """

    @sl.op(f"{ns}::any_rank")
    def any_rank(x: Float[Tensor, "*batch c"], weight: Float[Tensor, "c"]) -> Float[Tensor, "*batch c"]:
        """Return ``x * weight`` along the last dim of ``x``. Kernels of the op are compared with this reference."""
        return x * weight

    return any_rank


def _flattened(x, weight, *, out):
    """Write ``x * weight`` to ``out``. This kernel of ``any_rank`` has a defect on purpose: if ``x`` has three dims,
    ``weight`` is multiplied along the second dim instead of the last.
    """
    rows = x.reshape(x.shape[0], -1, x.shape[-1]) if x.dim() > 2 else x
    out.copy_((rows * weight[: x.shape[-1]]).view(out.shape) if x.dim() != 3 else x * weight[: x.shape[1]][:, None])


layout(
    "weight along the wrong dim for three dims",
    "the path for a batch of matrices scales rows instead of columns",
    of(any_rank, kernel(_flattened)),
    of(any_rank, filled(lambda x, weight: x * weight)),
    same(lambda: (randn(2, 3, 3), randn(3, seed=1))),
)
