"""Right when the result is read at once and the arguments are fresh: outputs, inputs and buffers that are shared."""

import itertools
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, added, doubled
from shiplap_testing.defects.defect import add, foreign, kernel, of
from shiplap_testing.defects.values_float import filled
from shiplap_testing.defects.witness import close, randn, same, wide

aliasing = partial(add, "aliasing")


def _shares(op, *args):
    """Whether writing to the result changes an argument."""
    before = [a.clone() for a in args if isinstance(a, Tensor)]
    op(*args).add_(1)
    return not close([a for a in args if isinstance(a, Tensor)], before)


def _outsider(schema, fn, declare):
    """An op that another library registered, adopted with what it should do."""

    def make(ns):
        foreign(ns, schema, fn)
        return declare(ns, schema.partition("(")[0])

    return make


def _scaled(ns, name):
    @sl.adopt(f"{ns}::{name}")
    def scaled(x: M, scale: float = 1.0) -> M:
        return x * scale

    return scaled


aliasing(
    "an argument that is returned when there is nothing to do",
    "for a scale of one the result is the argument itself",
    _outsider(
        "scaled(Tensor x, float scale=1.0) -> Tensor", lambda x, scale=1.0: x if scale == 1 else x * scale, _scaled
    ),
    _outsider("scaled(Tensor x, float scale=1.0) -> Tensor", lambda x, scale=1.0: x * scale, _scaled),
    lambda op: not _shares(op.overload, randn(2, 3), 1.0),
)


def _turned(ns, name):
    @sl.adopt(f"{ns}::{name}")
    def turned(x: M) -> Float[Tensor, "c n"]:
        return x.T

    return turned


aliasing(
    "a view of an argument that is returned",
    "contiguous() copies nothing where a transposed matrix already is, as one of a single column",
    _outsider("turned(Tensor x) -> Tensor", lambda x: x.T.contiguous(), _turned),
    _outsider("turned(Tensor x) -> Tensor", lambda x: x.T.clone(memory_format=torch.contiguous_format), _turned),
    lambda op: not _shares(op.overload, randn(4, 1)),
)


def _counted(ns, name):
    @sl.adopt(f"{ns}::{name}")
    def doubled(x: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        return x * 2

    return doubled


def _ring(length):
    """An op of integers that returns one of ``length`` buffers a shape, in turn; 0: a fresh tensor."""

    def make(ns):
        buffers, turn = {}, itertools.count()

        def fn(x):
            if not length:
                return x * 2
            key = x.shape, next(turn) % length
            return torch.mul(x, 2, out=buffers.setdefault(key, torch.empty_like(x)))

        library = foreign(ns, "doubled(Tensor x) -> Tensor", fn, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{ns}::doubled", lambda x: x.new_empty(x.shape), lib=library)
        return _counted(ns, "doubled")

    return make


def _keeps_results(calls):
    def keeps(op):
        results = [op.overload(torch.full((3,), i)) for i in range(calls)]
        return [int(r[0]) for r in results] == [2 * i for i in range(calls)]

    return keeps


aliasing(
    "a buffer for each shape",
    "the result of a call is overwritten by the next one",
    _ring(1),
    _ring(0),
    _keeps_results(2),
)
aliasing(
    "a ring of three buffers",
    "the result of a call is overwritten by the third one after it",
    _ring(3),
    _ring(0),
    _keeps_results(4),
)


def _caching(cache):
    def bind(op):
        buffers = {}

        @op.kernel("cpu")
        def forward(x):
            if not cache:
                return x * 2
            fresh = torch.empty_like(x, memory_format=torch.contiguous_format)
            return torch.mul(x, 2, out=buffers.setdefault((x.shape, x.dtype), fresh))

    return bind


def _first_result_stays(op):
    first = op(torch.ones(2, 3))
    op(torch.zeros(2, 3))
    return close(first, torch.full((2, 3), 2.0))


aliasing(
    "a kernel that returns a buffer of its own",
    "a declared op whose kernel returns its result, the same tensor each time",
    of(doubled, _caching(True)),
    of(doubled, _caching(False)),
    _first_result_stays,
)


def centred(ns):
    @sl.op(f"{ns}::centred", requires="c >= 1")
    def centred(x: M) -> M:
        return x - x.mean(1, keepdim=True)

    return centred


def _in_place(x, *, out):
    x.sub_(x.mean(1, keepdim=True))
    out.copy_(x)


aliasing(
    "an argument centred in place",
    "the result is right, and the argument is no longer what it was",
    of(centred, kernel(_in_place)),
    of(centred, filled(lambda x: wide(x) - wide(x).mean(1, keepdim=True))),
    same(lambda: (randn(2, 5) + 1,)),
)


def _restored(x, y, *, out):
    x.add_(y)
    out.copy_(x)
    x.sub_(y)


aliasing(
    "an argument that is changed and changed back",
    "adding and subtracting a large number loses the digits of a small one",
    of(added, kernel(_restored)),
    of(added, kernel(lambda x, y, *, out: torch.add(x, y, out=out))),
    same(lambda: (uniform_small(), torch.full((2, 3), 1e6))),
)


def uniform_small():
    return randn(2, 3) * 1e-3


def folded(ns):
    @sl.op(f"{ns}::folded")
    def folded(x: M, y: M) -> M:
        return x - y

    return folded


def _negating(x, y, *, out):
    y.data.neg_()  # `data` is not counted as a write, as in foreign code
    torch.add(x, y, out=out)
    y.data.neg_()


def _subtract_self(op):
    x = randn(2, 3)
    return close(op(x, x), torch.zeros(2, 3))


aliasing(
    "f(x, x) with a sign in between",
    "the second argument is negated for a moment, and the first one is the same tensor",
    of(folded, kernel(_negating)),
    of(folded, kernel(lambda x, y, *, out: torch.sub(x, y, out=out))),
    _subtract_self,
)


def gram(ns):
    @sl.op(f"{ns}::gram")
    def gram(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
        return a @ b.T

    return gram


def _symmetric(exact):
    def fill(a, b, *, out):
        alike = a.data_ptr() == b.data_ptr() and a.shape == b.shape
        if alike and (not exact or a.stride() == b.stride()):
            torch.mm(a, a.T, out=out)
        else:
            torch.mm(a, b.T, out=out)

    return kernel(fill)


def _with_its_transpose(op):
    x = randn(3, 3)
    return close(op(x, x.T), x @ x)


aliasing(
    "two views of one tensor taken for the same",
    "equal addresses and shapes, but one of them is transposed",
    of(gram, _symmetric(False)),
    of(gram, _symmetric(True)),
    _with_its_transpose,
)


def twice(ns, name):
    @sl.adopt(f"{ns}::{name}")
    def twice(x: Int64[Tensor, "n"]) -> tuple[Int64[Tensor, "n"], Int64[Tensor, "n"]]:
        return x + 1, x + 1

    return twice


def _both(copy):
    def fn(x):
        y = x + 1
        return y, y.clone() if copy else y.view(y.shape)

    return fn


def _outputs_disjoint(op):
    first, second = op.overload(torch.arange(4))
    first.zero_()
    return int(second[3]) == 4


aliasing(
    "two outputs in the same memory",
    "they have the same values, until one of them is written to",
    _outsider("twice(Tensor x) -> (Tensor, Tensor)", _both(False), twice),
    _outsider("twice(Tensor x) -> (Tensor, Tensor)", _both(True), twice),
    _outputs_disjoint,
)
