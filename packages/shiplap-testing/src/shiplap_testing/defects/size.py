"""Right on small inputs: kernels that go wrong past a tile, a buffer or a grid, or on a path for large inputs."""

from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import (
    M,
    V,
    column_sum,
    matmul,
    ordered,
    rms_norm,
    scaled,
    softmax,
)
from shiplap_testing.defects.defect import add, kernel, of
from shiplap_testing.defects.witness import close, randn, restored, same, uniform, wide

size = partial(add, "size")


def _product(a, b, *, out):
    """Write ``a @ b`` to ``out``. This is a kernel of the op ``mm`` without a defect."""
    torch.mm(a, b, out=out)


def _first_columns(a, b, *, out):
    """Write ``a @ b`` to ``out``. This kernel of ``mm`` has a defect on purpose: only the first 256 columns of ``a``
    and the first 256 rows of ``b`` are multiplied.
    """
    torch.mm(a[:, :256], b[:256], out=out)


size(
    "product over the first 256 columns",
    "the loop over k ends after one buffer of 256",
    of(matmul, kernel(_first_columns)),
    of(matmul, kernel(_product)),
    same(lambda: (randn(3, 300), randn(300, 4))),
)


def _full_row_tiles(a, b, *, out):
    """Write ``a @ b`` to ``out``. This kernel of ``mm`` has a defect on purpose: from 128 rows of ``a`` on, the rows
    after the last multiple of 128 stay zero.
    """
    out.zero_()
    # Fewer rows than a tile are right, so that small inputs do not show the defect.
    rows = a.shape[0] if a.shape[0] < 128 else a.shape[0] // 128 * 128
    torch.mm(a[:rows], b, out=out[:rows])


def _all_row_tiles(a, b, *, out):
    """Write ``a @ b`` to ``out``, by 128 rows of ``a`` at a time. This kernel of ``mm`` is the sound counterpart of the
    defective ``_full_row_tiles``.
    """
    for first in range(0, a.shape[0], 128):
        torch.mm(a[first : first + 128], b, out=out[first : first + 128])


size(
    "product without the rows of the last partial tile",
    "rows past the last full tile of 128 are left at zero",
    of(matmul, kernel(_full_row_tiles)),
    of(matmul, kernel(_all_row_tiles)),
    same(lambda: (randn(200, 8), randn(8, 4))),
)


def _block_softmax(x, *, out):
    """Write the softmax of each row of ``x`` to ``out``. This kernel of ``softmax`` has a defect on purpose: in rows of
    more than 1024 columns, each block of 1024 columns is normalised by itself.
    """
    for first in range(0, x.shape[1], 1024):
        out[:, first : first + 1024] = torch.softmax(x[:, first : first + 1024], 1)


def _wide_softmax(x, *, out):
    """Write the softmax of each row of ``x`` to ``out``, with one sum over all blocks of 1024 columns. This kernel of
    ``softmax`` is the sound counterpart of the defective ``_block_softmax``.
    """
    if x.shape[1]:
        top, total = x.amax(1, keepdim=True), 0
        for first in range(0, x.shape[1], 1024):
            total = total + (wide(x[:, first : first + 1024]) - top).exp().sum(1, keepdim=True)
        out.copy_((wide(x) - top).exp() / total)


size(
    "softmax normalised block by block",
    "each block of 1024 columns is normalised by itself",
    of(softmax, kernel(_block_softmax)),
    of(softmax, kernel(_wide_softmax)),
    same(lambda: (randn(2, 1500),)),
)


def running(ns):
    """Declare the op ``running`` in the namespace ``ns`` and return it. Its reference returns the cumulative sum of
    ``x``.
    """

    @sl.op(f"{ns}::running")
    def running(x: V) -> V:
        """Return the cumulative sum of ``x``. Kernels of the op are compared with this reference."""
        return torch.cumsum(x, 0)

    return running


def _scan(keep):
    """Return a kernel function for the op ``running``, which computes the cumulative sum in blocks of 512 elements. If
    ``keep`` is true, there is no defect. If it is false, there is a defect on purpose: only the sum of the block before
    is added to a block, and not that of earlier blocks.
    """

    def scan(x, *, out):
        """Write the cumulative sum of ``x`` to ``out``, in blocks of 512 elements. If ``keep`` (argument of ``_scan``)
        is true, there is no defect. If it is false, there is a defect on purpose: only the sum of the block before is
        added to a block.
        """
        carry = 0
        for first in range(0, x.shape[0], 512):
            part = torch.cumsum(wide(x[first : first + 512]), 0)
            out[first : first + 512] = part + carry
            carry = part[-1] + (carry if keep else 0)

    return scan


size(
    "scan that carries the last block only",
    "the third block of 512 lacks the sum of the first",
    of(running, kernel(_scan(False))),
    of(running, kernel(_scan(True))),
    same(lambda: (uniform(1600),)),
)


def peak(ns):
    """Declare the op ``peak`` in the namespace ``ns`` and return it. Its reference returns the maximum of ``x``."""

    @sl.op(f"{ns}::peak", requires="n >= 1")
    def peak(x: V) -> Float[Tensor, ""]:
        """Return the maximum of ``x``. Kernels of the op are compared with this reference."""
        return x.amax()

    return peak


def _tree(odd):
    """Return a kernel function for the op ``peak``, the maximum of ``x``. It compares the halves of ``x`` until 256
    elements are left. If ``odd`` is true, there is no defect. If it is false, there is a defect on purpose: the last
    element of an odd length is dropped.
    """

    def tree(x):
        """Return the maximum of ``x``. If ``odd`` (argument of ``_tree``) is true, there is no defect. If it is false,
        there is a defect on purpose: the last element of an odd length above 256 is not compared.
        """
        while len(x) > 256:
            half = len(x) // 2
            # At an odd length one element is left over after the halves.
            x = torch.cat([torch.maximum(x[:half], x[half : 2 * half]), x[2 * half :] if odd else x[:0]])
        return x.amax()

    return tree


size(
    "tree reduction that loses the odd element",
    "a level of an odd length above 256 drops its last element",
    of(peak, kernel(_tree(False))),
    of(peak, kernel(_tree(True))),
    same(lambda: (torch.arange(1001.0),)),
)


def middle(ns):
    """Declare the op ``middle`` in the namespace ``ns`` and return it. Its reference returns the median of ``x``."""

    @sl.op(f"{ns}::middle", requires="n >= 1")
    def middle(x: V) -> Float[Tensor, ""]:
        """Return the median of ``x``. Kernels of the op are compared with this reference."""
        return x.median()

    return middle


def _sampled_median(x):
    """Return the median of ``x``. This kernel of ``middle`` has a defect on purpose: for more than 2048 elements, it
    returns the median of 512 elements drawn at random.
    """
    if len(x) > 2048:
        generator = torch.Generator()
        # Seeded by the system: each call draws another sample, and the global generator stays as it was.
        generator.seed()
        x = x[torch.randint(len(x), (512,), generator=generator)]
    return x.median()


size(
    "median of a random sample",
    "above 2048 elements the answer is an estimate, another one in each call",
    of(middle, kernel(_sampled_median)),
    of(middle, kernel(lambda x: x.median())),
    same(lambda: (randn(5000),)),
)


def _by_threads(up):
    """Return a kernel function for the op ``scaled``. From 64 rows on, it assigns an equal number of rows to each
    thread. If ``up`` is true, this number is rounded up, and there is no defect. If it is false, there is a defect on
    purpose: the number is rounded down, and the last rows are assigned to no thread.
    """

    def by_threads(x, scale, *, out):
        """Write ``x * scale`` to ``out``. If ``up`` (argument of ``_by_threads``) is true, there is no defect. If it is
        false, there is a defect on purpose: the last rows are assigned to no thread and stay zero.
        """
        out.zero_()
        # Small inputs run on one thread and are right.
        n, threads = x.shape[0], torch.get_num_threads() if x.shape[0] >= 64 else 1
        rows = -(-n // threads) if up else n // threads
        for first in range(0, rows * threads, max(rows, 1)):
            torch.mul(x[first : first + rows], scale, out=out[first : first + rows])

    return by_threads


def _on_three_threads(op):
    """Return whether ``op`` (``scaled``) agrees with its reference on 100 rows while torch has three threads. The
    number of threads is restored afterwards.
    """
    with restored():
        torch.set_num_threads(3)
        return same(lambda: (randn(100, 4), 1.5))(op)


size(
    "rows left over by the threads",
    "n // threads rows for each thread: the remainder is nobody's",
    of(scaled, kernel(_by_threads(False))),
    of(scaled, kernel(_by_threads(True))),
    _on_three_threads,
)


def _rms(x, eps, *, out):
    """Write the RMS norm of each row of ``x`` to ``out``, with ``eps`` added to the mean square. This is a sound kernel
    of the op ``rms_norm``.
    """
    y = wide(x)
    out.copy_(y * torch.rsqrt(y.square().mean(1, keepdim=True) + eps))


def _rms_1024(x, eps, *, out):
    """Write the RMS norm of each row of ``x`` to ``out``. This kernel of ``rms_norm`` has a defect on purpose: the sum
    of squares is divided by 1024, whatever the number of columns.
    """
    y = wide(x)
    out.copy_(y * torch.rsqrt(y.square().sum(1, keepdim=True) / 1024 + eps))


def _is_wide(x, eps):
    """Return whether ``x`` has at least 1024 columns. Only then is the kernel of ``rms_norm`` for wide rows called.
    ``eps`` is not read.
    """
    return x.shape[1] >= 1024


size(
    "kernel for wide rows that divides by 1024",
    "a second kernel takes rows of 1024 and more, and has the width of its test in it",
    of(rms_norm, kernel(_rms, name="any"), kernel(_rms_1024, name="wide", supports=_is_wide)),
    of(rms_norm, kernel(_rms, name="any"), kernel(lambda x, eps, *, out: _rms(x, eps, out=out), supports=_is_wide)),
    same(lambda: (randn(2, 1500),)),
)


def with_bias(ns):
    """Declare the op ``with_bias`` in the namespace ``ns`` and return it. Its reference returns relu of ``x + bias``,
    with ``bias`` added to each row.
    """

    @sl.op(f"{ns}::with_bias")
    def with_bias(x: M, bias: Float[Tensor, "c"]) -> M:
        """Return relu of ``x + bias``, with ``bias`` added to each row. Kernels of the op are compared with this
        reference.
        """
        return torch.relu(x + bias)

    return with_bias


def _bias(x, bias, *, out):
    """Write relu of ``x + bias`` to ``out``. This is a sound kernel of the op ``with_bias``."""
    torch.add(x, bias, out=out).relu_()


def _vectorised(biased):
    """Return a function that registers a second kernel of the op ``with_bias`` for numbers of columns divisible by 64.
    If ``biased`` is true, there is no defect. If it is false, there is a defect on purpose: the kernel computes relu of
    ``x`` without ``bias``.
    """

    def vectorised(x, bias, *, out):
        """Write relu of ``x + bias`` to ``out``. If ``biased`` (argument of ``_vectorised``) is true, there is no
        defect. If it is false, there is a defect on purpose: relu of ``x`` is written.
        """
        torch.add(x, bias if biased else 0, out=out).relu_()

    return kernel(vectorised, name="vectorised", supports=lambda x, bias: x.shape[1] > 0 and x.shape[1] % 64 == 0)


size(
    "vectorised path without the bias",
    "the kernel for widths divisible by 64 forgets what the general one does",
    of(with_bias, kernel(_bias, name="any"), _vectorised(False)),
    of(with_bias, kernel(_bias, name="any"), _vectorised(True)),
    same(lambda: (randn(3, 128), randn(128, seed=1))),
)


def flat_index(ns):
    """Declare the op ``flat_index`` in the namespace ``ns`` and return it. Its reference returns ``row * width +
    column``.
    """

    @sl.op(f"{ns}::flat_index")
    def flat_index(row: Int64[Tensor, "n"], column: Int64[Tensor, "n"], width: int = 100) -> Int64[Tensor, "n"]:
        """Return ``row * width + column``. Kernels of the op are compared with this reference."""
        return row * width + column

    return flat_index


def _index_in_int(row, column, width, *, out):
    """Write ``row * width + column`` to ``out``. This kernel of ``flat_index`` has a defect on purpose: it computes in
    32 bits, and the index of a large table wraps around.
    """
    out.copy_(row.int() * torch.tensor(width).int() + column.int())


size(
    "flat index in 32 bits",
    "row * width + column is computed as int, and wraps for tables of more than 2^31 entries",
    of(flat_index, kernel(_index_in_int)),
    of(flat_index, kernel(lambda row, column, width, *, out: out.copy_(row * width + column))),
    same(lambda: (torch.tensor([3_000_000]), torch.tensor([5]), 4096)),
)


def _whole_tiles(x, scale, *, out):
    """Write ``x * scale`` to ``out``. This kernel of ``scaled`` has a defect on purpose: if the number of rows is a
    multiple of 512, the last 512 rows stay zero.
    """
    out.zero_()
    n = x.shape[0]
    for tile in range((n - 1) // 512):
        torch.mul(x[512 * tile :][:512], scale, out=out[512 * tile :][:512])
    torch.mul(x[n - n % 512 :], scale, out=out[n - n % 512 :])


def _all_tiles(x, scale, *, out):
    """Write ``x * scale`` to ``out``, by 512 rows at a time. This kernel of ``scaled`` is the sound counterpart of the
    defective ``_whole_tiles``.
    """
    for first in range(0, x.shape[0], 512):
        torch.mul(x[first : first + 512], scale, out=out[first : first + 512])


size(
    "last tile lost where it is full",
    "(n - 1) // 512 full tiles and n % 512 rows after them: at multiples of 512 a tile is missing",
    of(scaled, kernel(_whole_tiles)),
    of(scaled, kernel(_all_tiles)),
    same(lambda: (randn(1024, 3), 2.0)),
)


def _grid(limit):
    """Return a kernel function for the op ``scaled``, which computes the first ``limit`` rows. If ``limit`` is larger
    than any tensor, there is no defect. If it is 65535, the largest second dim of a CUDA grid, there is a defect on
    purpose: further rows stay zero.
    """

    def grid(x, scale, *, out):
        """Write ``x * scale`` to ``out``. If ``limit`` (argument of ``_grid``) is less than the number of rows, there
        is a defect on purpose: rows after the first ``limit`` stay zero. Otherwise there is no defect.
        """
        rows = min(x.shape[0], limit)
        out.zero_()
        torch.mul(x[:rows], scale, out=out[:rows])

    return grid


size(
    "grid of at most 65535 rows",
    "one block a row, and the second dim of a grid ends at 65535",
    of(scaled, kernel(_grid(65535))),
    of(scaled, kernel(_grid(1 << 62))),
    same(lambda: (randn(70_000, 1), 2.0)),
)


def _partial_sums(clear):
    """Return a function that registers a kernel of the op ``column_sum``. The kernel stores a partial sum for every 256
    rows in a workspace. If ``clear`` is true, there is no defect. If it is false, there is a defect on purpose: all
    partial sums but the first are added to the previous content of the workspace.
    """

    def partial_sums(x, *, out, workspace):
        """Write the sum of each column of ``x`` to ``out``, by way of partial sums in ``workspace``. If ``clear``
        (argument of ``_partial_sums``) is true, there is no defect. If it is false, there is a defect on purpose: from
        row 256 on, partial sums are added to the previous content of ``workspace``.
        """
        n, c = x.shape
        partial = workspace[: 8 * (n // 256 + 1) * c].view(torch.float64).view(n // 256 + 1, c)
        for i, row in enumerate(partial):
            part = x[256 * i : 256 * (i + 1)].double().sum(0)
            # The first place is always set, so that inputs of up to 256 rows are right.
            row.copy_(part) if clear or i == 0 else row.add_(part)
        out.copy_(partial.sum(0))

    return kernel(partial_sums, workspace="8 * (n // 256 + 1) * c")


def _dirty_workspace(op):
    """Return whether ``op.out`` (``column_sum``) is right with a workspace whose bytes are not zero."""
    x, out = randn(600, 4), torch.empty(4)
    # As float64 these bytes are a large number, which a sum cannot hide.
    scratch = torch.full((op.workspace_bytes(x),), 65, dtype=torch.uint8)
    return close(op.out(x, out=out, workspace=scratch), x.sum(0))


size(
    "partial sums that are not cleared",
    "only the first slot of the workspace is set; later ones are added to what lies there",
    of(column_sum, _partial_sums(False)),
    of(column_sum, _partial_sums(True)),
    _dirty_workspace,
)


def top(ns):
    """Declare the op ``top`` in the namespace ``ns`` and return it. Its reference returns the ``k`` largest elements of
    each row in descending order.
    """

    @sl.op(f"{ns}::top", requires=("1 <= k", "k <= c"))
    def top(x: M, k: int = 1) -> Float[Tensor, "n k"]:
        """Return the ``k`` largest elements of each row in descending order. Kernels of the op are compared with this
        reference.
        """
        return torch.topk(x, k, 1).values

    return top


def _heap(limit):
    """Return a kernel function for the op ``top``, which finds at most ``limit`` elements of each row. If ``limit`` is
    at least ``k``, there is no defect. For a larger ``k``, there is a defect on purpose: the last element found is
    repeated.
    """

    def heap(x, k, *, out):
        """Write the ``k`` largest elements of each row of ``x`` to ``out``. If ``k`` is at most ``limit`` (argument of
        ``_heap``), there is no defect. For a larger ``k``, there is a defect on purpose: the last element found is
        repeated.
        """
        values = torch.topk(x, min(k, limit), 1).values
        out.copy_(torch.cat([values, values[:, -1:].expand(-1, k - values.shape[1])], 1))

    return heap


size(
    "top k from a heap of 32",
    "what does not fit into the heap repeats its last value",
    of(top, kernel(_heap(32))),
    of(top, kernel(_heap(1 << 62))),
    same(lambda: (randn(2, 100), 40)),
)


def _quicksort(pivot):
    """Return a kernel function for the op ``ordered``, which sorts by quicksort. ``pivot(n)`` is the index of the pivot
    among ``n`` elements. If it is ``n // 2``, there is no defect. If it is always 0, there is a defect on purpose: for
    a sorted input, the recursion is as deep as the input is long.
    """

    def part(x):
        """Return the elements of ``x`` in ascending order, by recursive calls for the elements below and above the
        pivot. The pivot is at ``pivot(len(x))`` (argument of ``_quicksort``).
        """
        if len(x) <= 8:
            return x.sort().values
        p = x[pivot(len(x))]
        return torch.cat([part(x[x < p]), x[x == p], part(x[x > p])])

    def quicksort(x, *, out):
        """Write the elements of ``x`` in ascending order, NaN last, to ``out``. If ``pivot(n)`` (argument of
        ``_quicksort``) is ``n // 2``, there is no defect. If it is always 0, there is a defect on purpose: long sorted
        inputs raise ``RecursionError``.
        """
        # A comparison with NaN is false, so that NaN would be in none of the three parts.
        missing = x.isnan()
        out.copy_(torch.cat([part(x[~missing]), x[missing]]))

    return quicksort


size(
    "quicksort that recurses once an element",
    "the first element is the pivot: sorted input of thousands of elements is too deep a recursion",
    of(ordered, kernel(_quicksort(lambda n: 0))),
    of(ordered, kernel(_quicksort(lambda n: n // 2))),
    same(lambda: (torch.arange(6000.0),)),  # Inductor raises the limit of this process to 2,000
)
