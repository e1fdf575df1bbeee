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
    torch.mul(x, 2, out=out)


def _into_a_slice(op):
    """A slice of a larger tensor is filled, and nothing else of it is touched."""
    whole, x = torch.full((6, 3), 7.0), randn(2, 3)
    op.out(x, out=whole[2:4])
    return close(whole[2:4], x * 2) and bool((whole[:2] == 7).all() and (whole[4:] == 7).all())


def _from_the_start(x, *, out):
    torch.as_strided(out, out.shape, out.stride(), 0).copy_(x * 2)


outputs(
    "output written from the start of its storage",
    "right for a fresh tensor, and over other rows where the output is a slice",
    of(doubled, kernel(_from_the_start)),
    of(doubled, kernel(_doubling)),
    _into_a_slice,
)


def _clearing_storage(x, *, out):
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
    @sl.op(f"{ns}::positive")
    def positive(x: M) -> M:
        return torch.where(x > 0, x, 0)

    return positive


def _where_positive(clear):
    def fill(x, *, out):
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
    """Sums over pairs, with a size of the fake and one of the kernel for odd lengths."""

    def count(n, up):
        return (n + 1) // 2 if up else n // 2

    def real(x):
        n = count(x.shape[0], real_rounds_up)
        return torch.nn.functional.pad(x, (0, 1))[: 2 * n].view(n, 2).sum(1)

    def make(ns):
        library = foreign(ns, "pools(Tensor x) -> Tensor", real, "CompositeExplicitAutograd")

        def fake(x):
            return x.new_empty(count(x.shape[0], fake_rounds_up))

        torch.library.register_fake(f"{ns}::pools", fake, lib=library)

        @sl.adopt(f"{ns}::pools", dims={"m": "n // 2"})
        def pools(x: Int64[Tensor, "n"]) -> Int64[Tensor, "m"]:
            return x[: len(x) // 2 * 2].view(-1, 2).sum(1)

        return pools

    return make


def _fake_agrees(*args):
    def agrees(op):
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
    def make(ns):
        library = foreign(ns, "flips(Tensor x) -> Tensor", real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{ns}::flips", fake, lib=library)

        @sl.adopt(f"{ns}::flips")
        def flips(x: Int64[Tensor, "n c"]) -> Int64[Tensor, "n c"]:
            return x + 1

        return flips

    return make


def _fresh(x):
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
    """The default of the registered schema may differ from the declared one."""

    def make(ns):
        foreign(ns, f"scales(Tensor x, int k={default}) -> Tensor", lambda x, k=default: x * k)

        @sl.adopt(f"{ns}::scales")
        def scales(x: Int64[Tensor, "n"], k: int = 2) -> Int64[Tensor, "n"]:
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
    return torch.unique(x)


outputs(
    "distinct values with a sentinel",
    "a value that ends the list is returned with it: one more than the bound where all are distinct",
    of(distinct, kernel(lambda x: torch.cat([torch.unique(x), x.new_tensor([2**62])]))),
    of(distinct, kernel(_sorted_distinct)),
    same(lambda: (torch.tensor([3, 1, 2]),)),
)


def _neighbours(x):
    return torch.unique_consecutive(x)


outputs(
    "distinct values of sorted input",
    "equal neighbours are merged, so values that come back are returned again",
    of(distinct, kernel(_neighbours)),
    of(distinct, kernel(lambda x: torch.unique_consecutive(x.sort().values))),
    same(lambda: (torch.tensor([1, 1, 2, 1]),)),
)


def _padded(x):
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
    @sl.op(f"{ns}::above", bounds={"m": "n"})
    def above(x: V, limit: float = 0.0) -> Float[Tensor, "m"]:
        return x[x > limit]

    return above


def _from_first(x, limit):
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
    @sl.op(f"{ns}::normalised", requires="c >= 1")
    def normalised(x: M) -> M:
        return x / (1 + x.abs().amax(1, keepdim=True))

    return normalised


def _in_workspace(bytes_):
    def fill(x, *, out, workspace):
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
    @sl.op(f"{ns}::halved", dims={"m": "n - k + 1"}, requires=("k >= 1", "k <= n"))
    def halved(x: V, k: int = 2) -> Float[Tensor, "m"]:
        return x.unfold(0, k, 1).amax(1)

    return halved


def _sliding(first):
    def fill(x, k, *, out):
        out.copy_(x.unfold(0, k, 1).amax(1))
        if not first:
            out[0] = x[: k - 1 or 1].amax()

    return kernel(fill)


outputs(
    "first window one short",
    "the window fills up from the left, and the first result comes one element early",
    of(halved, _sliding(False)),
    of(halved, _sliding(True)),
    same(lambda: (torch.arange(5.0), 3)),
)
