"""Right where the output is fresh and of the expected size: out=, fakes, bounds, defaults of schemas, workspaces."""

from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, V, distinct, doubled
from shiplap_testing.defects.defect import add, foreign, kernel, of
from shiplap_testing.defects.witness import close, ints, randn, same

outputs = partial(add, "outputs")


def _doubling(x, *, out):
    """Write ``2 * x`` to ``out``. This is a kernel of the op ``doubled`` without a defect."""
    torch.mul(x, 2, out=out)


def _into_a_slice(op):
    """Return whether ``op.out`` (``doubled``) fills the slice that it is passed and leaves the other elements of the
    sliced tensor unchanged.
    """
    # Seven is in none of the results, so that each element that was written to shows.
    whole, x = torch.full((6, 3), 7.0), randn(2, 3)
    op.out(x, out=whole[2:4])
    return close(whole[2:4], x * 2) and bool((whole[:2] == 7).all() and (whole[4:] == 7).all())


def _from_the_start(x, *, out):
    """Write ``2 * x`` to the start of the storage of ``out``. This kernel of ``doubled`` has a defect on purpose: if
    ``out`` is a slice of a larger tensor, its storage offset is ignored.
    """
    torch.as_strided(out, out.shape, out.stride(), 0).copy_(x * 2)


outputs(
    "output written from the start of its storage",
    "right for a fresh tensor, and over other rows where the output is a slice",
    of(doubled, kernel(_from_the_start)),
    of(doubled, kernel(_doubling)),
    _into_a_slice,
)


def _clearing_storage(x, *, out):
    """Write ``2 * x`` to ``out``. This kernel of ``doubled`` has a defect on purpose: if ``out`` is a slice of a larger
    tensor, all of that tensor is set to zero first.
    """
    # The storage of a slice is that of the whole tensor.
    out.untyped_storage().fill_(0)
    out.add_(x, alpha=2)


outputs(
    "output whose storage is cleared",
    "the rows around a slice are set to zero",
    of(doubled, kernel(_clearing_storage)),
    of(doubled, kernel(_doubling)),
    _into_a_slice,
)


def _into_used_memory(op):
    """Fill an output with 7 and pass it to ``op.out``. Return whether it then holds the result of the reference."""
    # Fresh memory is mostly zero, which would hide what the kernel does not write.
    x, out = randn(2, 3), torch.full((2, 3), 7.0)
    return close(op.out(x, out=out), op.reference(x))


outputs(
    "output that is taken to be zero",
    "the kernel adds to it, since fresh memory is mostly zero",
    of(doubled, kernel(lambda x, *, out: out.add_(x, alpha=2))),
    of(doubled, kernel(_doubling)),
    _into_used_memory,
)


def positive(ns):
    """Declare the op ``positive`` in the namespace ``ns`` and return it. Its reference returns ``x`` with numbers that
    are not positive replaced by zero.
    """

    @sl.op(f"{ns}::positive")
    def positive(x: M) -> M:
        """Return ``x`` where it is positive, and zero elsewhere. Kernels of the op are compared with this reference."""
        return torch.where(x > 0, x, 0)

    return positive


def _where_positive(clear):
    """Return a function that registers a kernel of the op ``positive``. The kernel writes those elements of the output
    for which ``x`` is positive. If ``clear`` is true, there is no defect. If it is false, there is a defect on purpose:
    other elements of the output are not set to zero.
    """

    def fill(x, *, out):
        """Write the positive elements of ``x`` to ``out``, and zero elsewhere if ``clear`` (argument of
        ``_where_positive``) is true. If it is false, there is a defect on purpose: the other elements of ``out`` keep
        what was in the memory.
        """
        if clear:
            out.zero_()
        out[x > 0] = x[x > 0]

    return kernel(fill)


outputs(
    "output written where there is something to write",
    "other entries keep what lay in memory",
    of(positive, _where_positive(False)),
    of(positive, _where_positive(True)),
    _into_used_memory,
)


def _pools(fake_rounds_up, real_rounds_up):
    """Return a function that registers the operator ``pools``, the sums of neighbouring pairs, in a given namespace. It
    returns the op that ``sl.adopt`` makes of it. If ``fake_rounds_up`` or ``real_rounds_up`` is true, there is a defect
    on purpose: for an odd length, the fake or the real implementation has one sum too many. If both are false, there is
    no defect.
    """

    def count(n, up):
        """Return half of ``n`` as an integer, rounded up if ``up`` is true and down otherwise."""
        return (n + 1) // 2 if up else n // 2

    def real(x):
        """Return the sums of neighbouring pairs of ``x``. If ``real_rounds_up`` (argument of ``_pools``) is false,
        there is no defect. If it is true, there is a defect on purpose: for an odd length, there is one sum more than
        declared.
        """
        n = count(x.shape[0], real_rounds_up)
        # Padded by one, so that an odd length has a last pair.
        return torch.nn.functional.pad(x, (0, 1))[: 2 * n].view(n, 2).sum(1)

    def make(ns):
        """Register the operator ``pools``, the sums of neighbouring pairs, in the namespace ``ns``. Its implementations
        are ``real`` and, for fake tensors, ``fake``. Return the op that ``sl.adopt`` makes of it.
        """
        library = foreign(ns, "pools(Tensor x) -> Tensor", real, "CompositeExplicitAutograd")

        def fake(x):
            """Return an uninitialised tensor with the shape of the result. If ``fake_rounds_up`` (argument of
            ``_pools``) is false, there is no defect. If it is true, there is a defect on purpose: the shape is one
            element too long for odd lengths.
            """
            return x.new_empty(count(x.shape[0], fake_rounds_up))

        torch.library.register_fake(f"{ns}::pools", fake, lib=library)

        @sl.adopt(f"{ns}::pools", dims={"m": "n // 2"})
        def pools(x: Int64[Tensor, "n"]) -> Int64[Tensor, "m"]:
            """Return the sums of neighbouring pairs, where the last of an odd number of elements is left out. Results
            of the adopted operator are compared with this reference.
            """
            return x[: len(x) // 2 * 2].view(-1, 2).sum(1)

        return pools

    return make


def _fake_agrees(*args):
    """Return a function that calls an op on ``args`` and on fake tensors made from ``args``, and calls its reference on
    ``args``. It returns whether all three results agree in shape, and whether those of the op on real and fake tensors
    agree in strides and dtype.
    """

    def agrees(op):
        """Return whether the results of ``op`` on ``args`` (argument of ``_fake_agrees``) and on fake tensors made from
        ``args`` have equal shapes, strides and dtypes. The result of the reference must have the same shape.
        """
        from torch._subclasses import FakeTensorMode

        real = op.overload(*args)
        with FakeTensorMode() as mode:
            fake = op.overload(*(mode.from_tensor(a) for a in args))
        same_size = fake.shape == real.shape and fake.stride() == real.stride()
        return bool(same_size and fake.dtype == real.dtype and real.shape == op.reference(*args).shape)

    return agrees


outputs(
    "fake that rounds a size up",
    "(n + 1) // 2 in the fake, n // 2 in the kernel: the two differ for odd sizes",
    _pools(True, False),
    _pools(False, False),
    _fake_agrees(torch.arange(5)),
)
outputs(
    "kernel that rounds a size up",
    "declaration and fake say n // 2, the kernel returns one more for odd sizes",
    _pools(False, True),
    _pools(False, False),
    _fake_agrees(torch.arange(5)),
)


def _flips(real, fake):
    """Return a function that registers the operator ``flips`` in a given namespace, and returns the op that
    ``sl.adopt`` makes of it. ``real`` is its implementation, and ``fake`` is that for fake tensors. If ``real`` returns
    ``x + 1`` for integers and ``fake`` agrees with it in shape, strides and dtype, there is no defect.
    """

    def make(ns):
        """Register the operator ``flips`` with ``real`` and ``fake`` (arguments of ``_flips``) in the namespace ``ns``,
        and return the op that ``sl.adopt`` makes of it.
        """
        library = foreign(ns, "flips(Tensor x) -> Tensor", real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{ns}::flips", fake, lib=library)

        @sl.adopt(f"{ns}::flips")
        def flips(x: Int64[Tensor, "n c"]) -> Int64[Tensor, "n c"]:
            """Return ``x + 1``. Results of the adopted operator are compared with this reference."""
            return x + 1

        return flips

    return make


def _fresh(x):
    """Return a contiguous, uninitialised tensor with the shape and dtype of ``x``."""
    return x.new_empty(x.shape)


outputs(
    "fake of other strides",
    "the kernel keeps the strides of a transposed argument, the fake says contiguous",
    _flips(lambda x: x + 1, _fresh),
    _flips(lambda x: x.contiguous() + 1, _fresh),
    _fake_agrees(ints(0, 9, 3, 4).T),
)
outputs(
    "fake of another dtype",
    "the kernel counts in int32 where declaration and fake say int64",
    _flips(lambda x: (x.contiguous() + 1).int(), _fresh),
    _flips(lambda x: x.contiguous() + 1, _fresh),
    _fake_agrees(ints(0, 9, 3, 4)),
)


def _powers(default):
    """Return a function that registers an operator in a given namespace, and returns the op that ``sl.adopt`` makes of
    it. The operator returns ``x * k``, and ``k`` has the default ``default`` in its schema. If it is 2, there is no
    defect. Otherwise there is a defect on purpose: it differs from the default that is declared to Shiplap.
    """

    def make(ns):
        """Register the operator ``scales``, which returns ``x * k``, in the namespace ``ns``. Its ``k`` has the default
        ``default`` (argument of ``_powers``). Return the op that ``sl.adopt`` makes of it.
        """
        foreign(ns, f"scales(Tensor x, int k={default}) -> Tensor", lambda x, k=default: x * k)

        @sl.adopt(f"{ns}::scales")
        def scales(x: Int64[Tensor, "n"], k: int = 2) -> Int64[Tensor, "n"]:
            """Return ``x * k``. Results of the adopted operator are compared with this reference."""
            return x * k

        return scales

    return make


outputs(
    "another default in the schema",
    "who leaves k out gets three, where the declaration says two",
    _powers(3),
    _powers(2),
    lambda op: close(op.overload(x := torch.arange(4)), op.reference(x)),
)


def _sorted_distinct(x):
    """Return the distinct numbers of ``x`` in ascending order. This is a kernel of the op ``distinct`` without a
    defect.
    """
    return torch.unique(x)


outputs(
    "distinct values with a sentinel",
    "a value that ends the list is returned with it: one more than the bound where all are distinct",
    of(distinct, kernel(lambda x: torch.cat([torch.unique(x), x.new_tensor([2**62])]))),
    of(distinct, kernel(_sorted_distinct)),
    same(lambda: (torch.tensor([3, 1, 2]),)),
)


def _neighbours(x):
    """Return ``x`` without numbers that are equal to the one before. This kernel of ``distinct`` has a defect on
    purpose: in unsorted input, a number that occurs again later is returned again.
    """
    return torch.unique_consecutive(x)


outputs(
    "distinct values of sorted input",
    "equal neighbours are merged, so values that come back are returned again",
    of(distinct, kernel(_neighbours)),
    of(distinct, kernel(lambda x: torch.unique_consecutive(x.sort().values))),
    same(lambda: (torch.tensor([1, 1, 2, 1]),)),
)


def _padded(x):
    """Return the distinct numbers of ``x``. This kernel of ``distinct`` has a defect on purpose: if numbers repeat,
    zeros are appended up to the length of ``x``.
    """
    values = torch.unique(x)
    return torch.cat([values, values.new_zeros(len(x) - len(values))])


outputs(
    "distinct values up to the bound",
    "the result is not cut to its size: zeros follow",
    of(distinct, kernel(_padded)),
    of(distinct, kernel(_sorted_distinct)),
    same(lambda: (torch.tensor([5, 5, 7]),)),
)


def above(ns):
    """Declare the op ``above`` in the namespace ``ns`` and return it. Its reference returns the elements of ``x`` above
    ``limit``.
    """

    @sl.op(f"{ns}::above", bounds={"m": "n"})
    def above(x: V, limit: float = 0.0) -> Float[Tensor, "m"]:
        """Return the elements of ``x`` above ``limit``. Kernels of the op are compared with this reference."""
        return x[x > limit]

    return above


def _from_first(x, limit):
    """Return the elements of ``x`` above ``limit``. This kernel of ``above`` has a defect on purpose: if no element is
    above ``limit``, it raises ``IndexError``.
    """
    rows = (x > limit).nonzero()[:, 0]
    first = int(rows[0])  # raises where there is none
    return x[first:][x[first:] > limit]


outputs(
    "a selection that selects nothing",
    "the first hit is looked up before anybody knows whether there is one",
    of(above, kernel(_from_first)),
    of(above, kernel(lambda x, limit: x[x > limit])),
    same(lambda: (torch.tensor([-1.0, -2.0]), 0.0)),
)


def normalised(ns):
    """Declare the op ``normalised`` in the namespace ``ns`` and return it. Its reference returns ``x`` divided by one
    plus the largest magnitude of its row.
    """

    @sl.op(f"{ns}::normalised", requires="c >= 1")
    def normalised(x: M) -> M:
        """Return ``x`` divided by one plus the largest magnitude of its row. Kernels of the op are compared with this
        reference.
        """
        return x / (1 + x.abs().amax(1, keepdim=True))

    return normalised


def _in_workspace(bytes_):
    """Return a function that registers a kernel of the op ``normalised``. The kernel keeps one number for each row in a
    workspace. ``bytes_`` is an expression for the size of the workspace in bytes. If it is ``itemsize * n``, there is
    no defect. If it is ``4 * n``, there is a defect on purpose: the workspace is too small for float64.
    """

    def fill(x, *, out, workspace):
        """Write ``x`` divided by one plus the largest magnitude of its row to ``out``. The magnitudes are kept in
        ``workspace``, a tensor of bytes.
        """
        top = workspace.view(x.dtype)[: x.shape[0]]
        torch.amax(x.abs(), 1, out=top)
        torch.div(x, 1 + top[:, None], out=out)

    return kernel(fill, workspace=bytes_)


outputs(
    "workspace of four bytes a row",
    "enough for float32, and half of what float64 needs",
    of(normalised, _in_workspace("4 * n")),
    of(normalised, _in_workspace("itemsize * n")),
    same(lambda: (randn(5, 3).double(),)),
)


def halved(ns):
    """Declare the op ``halved`` in the namespace ``ns`` and return it. Its reference returns a vector whose element
    ``i`` is the maximum of ``x[i : i + k]``, for each such window inside of ``x``.
    """

    @sl.op(f"{ns}::halved", dims={"m": "n - k + 1"}, requires=("k >= 1", "k <= n"))
    def halved(x: V, k: int = 2) -> Float[Tensor, "m"]:
        """Return the maximum of each window of ``k`` neighbouring elements of ``x``. Kernels of the op are compared
        with this reference.
        """
        return x.unfold(0, k, 1).amax(1)

    return halved


def _sliding(first):
    """Return a function that registers a kernel of the op ``halved``, the maximum of each window. If ``first`` is true,
    there is no defect. If it is false, there is a defect on purpose: the first window lacks its last element.
    """

    def fill(x, k, *, out):
        """Write the maximum of each window of ``k`` elements to ``out``. If ``first`` (argument of ``_sliding``) is
        true, there is no defect. If it is false, there is a defect on purpose: the first maximum is that of ``k - 1``
        elements.
        """
        out.copy_(x.unfold(0, k, 1).amax(1))
        if not first:
            # A window of one element cannot lack its last.
            out[0] = x[: k - 1 or 1].amax()

    return kernel(fill)


outputs(
    "first window one short",
    "the window fills up from the left, and the first result comes one element early",
    of(halved, _sliding(False)),
    of(halved, _sliding(True)),
    same(lambda: (torch.arange(5.0), 3)),
)
