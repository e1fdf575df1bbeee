"""Right for indices that are spread evenly and all there: repeated ones, padding and negative keys."""

from functools import partial

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, gather, scatter
from shiplap_testing.defects.defect import add, kernel, of
from shiplap_testing.defects.values_float import filled
from shiplap_testing.defects.witness import ints, randn, same, uniform, wide

values = partial(add, "values")


def _capacity(limit):
    """Return a function that registers a kernel of the op ``scatter``, which sums rows by index. If ``limit`` is larger
    than the number of rows, there is no defect. If it is smaller, there is a defect on purpose: of the rows of one bin,
    only the first ``limit`` are added.
    """

    def place(x, index, bins, *, out):
        """Write a matrix of ``bins`` rows to ``out``, of which row ``i`` is the sum of the rows of ``x`` with ``index %
        bins == i``. If at most ``limit`` (argument of ``_capacity``) rows belong to each sum, there is no defect.
        Otherwise there is a defect on purpose: only the first ``limit`` of them are added.
        """
        key = index % bins
        order = torch.sort(key, stable=True).indices
        counts = torch.bincount(key, minlength=bins)
        rank = torch.arange(len(key)) - (counts.cumsum(0) - counts)[key[order]]
        # The rank of a row is its place among the rows of its bin.
        kept = order[rank < limit]
        out.copy_(wide(x).new_zeros(bins, x.shape[1]).index_add(0, key[kept], wide(x)[kept]))

    return kernel(place)


values(
    "buckets of a fixed capacity",
    "what comes to a bucket after the 64th entry is dropped: skewed indices",
    of(scatter, _capacity(64)),
    of(scatter, _capacity(1 << 62)),
    same(lambda: (uniform(100, 2), torch.zeros(100, dtype=torch.int64), 5)),
)


def _lost_updates(x, index, bins, *, out):
    """Write a matrix of ``bins`` rows to ``out``, of which row ``i`` is the sum of the rows of ``x`` with ``index %
    bins == i``. This kernel of ``scatter`` has a defect on purpose: only one of several rows of a bin is added.
    """
    out.zero_()
    # Reads once, adds, and writes once: of equal indices the last write stays.
    out[index % bins] += x


values(
    "scatter without accumulation",
    "of rows with the same index one is kept",
    of(scatter, kernel(_lost_updates)),
    of(
        scatter,
        filled(lambda x, i, bins: wide(x).new_zeros(bins, x.shape[1]).index_put((i % bins,), wide(x), accumulate=True)),
    ),
    same(lambda: (uniform(4, 2), torch.tensor([1, 1, 2, 1]), 5)),
)


def _per_chunk(x, index, bins, *, out):
    """Write a matrix of ``bins`` rows to ``out``, of which row ``i`` is the sum of the rows of ``x`` with ``index %
    bins == i``. In each 32 rows, neighbours of one bin are summed first. This kernel of ``scatter`` has a defect on
    purpose: if a bin comes back after another one within the 32 rows, only one of its sums is added.
    """
    total = wide(x).new_zeros(bins, x.shape[1])
    for part, rows in zip((index % bins).split(32), wide(x).split(32), strict=True):
        keys, back = torch.unique_consecutive(part, return_inverse=True)
        # An indexed ``+=`` keeps only one of several writes to the same key.
        total[keys] += rows.new_zeros(len(keys), rows.shape[1]).index_add(0, back, rows)
    out.copy_(total)


values(
    "scatter that merges equal neighbours only",
    "right for sorted indices; an index that comes back within a chunk overwrites",
    of(scatter, kernel(_per_chunk)),
    of(scatter, filled(lambda x, i, bins: wide(x).new_zeros(bins, x.shape[1]).index_add(0, i % bins, wide(x)))),
    same(lambda: (uniform(4, 2), torch.tensor([1, 2, 1, 2]), 5)),
)


def _zero_where_absent(x, index):
    """Return the rows of ``x`` at ``index``, with zeros for negative indices. This is a kernel of the op ``gather``
    without a defect.
    """
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return padded[torch.where(index < 0, len(x), index)]


values(
    "padding index taken from the end",
    "-1 is the last row, as in Python, where the declaration has zeros",
    of(gather, filled(lambda x, index: x[index])),
    of(gather, filled(_zero_where_absent)),
    same(lambda: (randn(4, 2), torch.tensor([0, -1, 3]))),
)


def _prefix(x, index):
    """Return the rows of ``x`` at ``index``, with zeros for -1. This kernel of ``gather`` has a defect on purpose: it
    takes each -1 to be at the end of ``index``. If a valid index follows a -1, rows are wrong.
    """
    count = int((index >= 0).sum())
    return torch.cat([x[index[:count]], x.new_zeros(len(index) - count, x.shape[1])])


values(
    "padding taken to be at the end",
    "valid indices are counted, and that many of the first ones read",
    of(gather, filled(_prefix)),
    of(gather, filled(lambda x, index: torch.cat([x, x.new_zeros(1, x.shape[1])])[index])),
    same(lambda: (randn(4, 2), torch.tensor([-1, 2, 3]))),
)


def label_loss(ns):
    """Declare the op ``label_loss`` in the namespace ``ns`` and return it. Its reference returns the mean cross entropy
    of ``logits`` for the labels that are not negative, or zero if there are none.
    """

    @sl.op(f"{ns}::label_loss", requires="c >= 1")
    def label_loss(logits: M, label: Int64[Tensor, "n"]) -> Float[Tensor, ""]:
        """Return the mean cross entropy of ``logits`` for the labels that are not negative, or zero if there are none.
        Kernels of the op are compared with this reference.
        """
        losses = -torch.log_softmax(logits, 1).gather(1, label.clamp_min(0)[:, None])[:, 0]
        return torch.where(label >= 0, losses, 0).sum() / (label >= 0).sum().clamp_min(1)

    @label_loss.samples
    def _(rng, sizes, dtype, device):
        """Return sample arguments of ``label_loss``, which are random logits and random labels. Labels go from -1,
        which stands for padding, to the last class.
        """
        logits = torch.randn(sizes["n"], sizes["c"], generator=rng).to(device, dtype)
        return logits, torch.randint(-1, sizes["c"], (sizes["n"],), generator=rng).to(device)

    return label_loss


def _loss(smallest):
    """Return a function that registers a kernel of the op ``label_loss``. The kernel divides the sum of losses by the
    number of labels, or by ``smallest`` if that is larger. If ``smallest`` is 1, there is no defect. If it is 0, there
    is a defect on purpose: the loss is NaN if all labels are padding.
    """

    def loss(logits, label):
        """Return the mean cross entropy of ``logits`` for the labels that are not negative. If ``smallest`` (argument
        of ``_loss``) is 1, there is no defect. If it is 0, there is a defect on purpose: the result is NaN if all
        labels are negative.
        """
        valid = label >= 0
        losses = torch.nn.functional.cross_entropy(wide(logits)[valid], label[valid], reduction="sum")
        return losses / valid.sum().clamp_min(smallest)

    return filled(loss)


values(
    "loss of labels that are all padding",
    "the mean over no label is NaN",
    of(label_loss, _loss(0)),
    of(label_loss, _loss(1)),
    same(lambda: (randn(3, 4), torch.tensor([-1, -1, -1]))),
)


def code(ns):
    """Declare the op ``code`` in the namespace ``ns`` and return it. Its reference returns ``x * 2 ** 32 + y`` in
    int64.
    """

    @sl.op(f"{ns}::code")
    def code(x: Int32[Tensor, "n"], y: Int32[Tensor, "n"]) -> Int64[Tensor, "n"]:
        """Return one number with ``x`` in its high and ``y`` in its low 32 bits. Kernels of the op are compared with
        this reference.
        """
        return (x.long() << 32) + y.long()

    return code


values(
    "key packed from negative coordinates",
    "the low half is joined with |, and its sign fills the high half",
    of(code, filled(lambda x, y: (x.long() << 32) | y.long())),
    of(code, filled(lambda x, y: (x.long() * 2**32) + y.long())),
    same(lambda: (torch.tensor([5]).int(), torch.tensor([-1]).int())),
)


def counting(ns):
    """Declare the op ``counting`` in the namespace ``ns`` and return it. Its reference returns the numbers of ``x`` in
    ascending order.
    """

    @sl.op(f"{ns}::counting")
    def counting(x: Int32[Tensor, "n"]) -> Int32[Tensor, "n"]:
        """Return the numbers of ``x`` in ascending order. Kernels of the op are compared with this reference."""
        return x.sort().values

    return counting


def _radix(signed):
    """Return a function that registers a kernel of the op ``counting``, which sorts integers. The kernel sorts them as
    keys of int64. If ``signed`` is true, there is no defect. If it is false, there is a defect on purpose: negative
    numbers are converted to large positive keys.
    """

    def radix(x):
        """Return the numbers of ``x`` in ascending order. If ``signed`` (argument of ``_radix``) is true, there is no
        defect. If it is false, there is a defect on purpose: negative numbers come after positive ones.
        """
        keys = x.long() if signed else x.long() & 0xFFFFFFFF
        # Back to a signed number of 32 bits.
        return (keys.sort().values + 2**31) % 2**32 - 2**31

    return filled(radix)


values(
    "radix sort of unsigned keys",
    "negative numbers sort after positive ones",
    of(counting, _radix(False)),
    of(counting, _radix(True)),
    same(lambda: (ints(-5, 5, 9, dtype=torch.int32),)),
)
