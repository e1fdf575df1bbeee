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


def _result_shares_memory(op, *args):
    """Return whether adding to the result of ``op(*args)`` in place changes one of the tensors among ``args``. If so,
    they share memory.
    """
    before = [a.clone() for a in args if isinstance(a, Tensor)]
    op(*args).add_(1)
    return not close([a for a in args if isinstance(a, Tensor)], before)


def _adopted_operator(schema, fn, declare):
    """Return a function of a namespace ``ns``. It registers ``fn`` there as the operator with the torch schema
    ``schema``, as another library would. It returns the op that ``declare(ns, name)`` makes of the operator ``name``.
    """

    def make(ns):
        """Register ``fn`` in the namespace ``ns`` as the operator with the torch schema ``schema``. Return the op that
        ``declare`` makes of it. All three are arguments of ``_adopted_operator``.
        """
        foreign(ns, schema, fn)
        return declare(ns, schema.partition("(")[0])

    return make


def _scaled(ns, name):
    """Declare the op that ``sl.adopt`` makes of the operator ``name`` of the namespace ``ns``, and return it.

    Its reference returns ``x * scale``. The operator stands for one of another library.
    """

    @sl.adopt(f"{ns}::{name}")
    def scaled(x: M, scale: float = 1.0) -> M:
        """Return ``x * scale``. Results of the adopted operator are compared with this reference."""
        return x * scale

    return scaled


aliasing(
    "an argument that is returned when there is nothing to do",
    "for a scale of one the result is the argument itself",
    _adopted_operator(
        "scaled(Tensor x, float scale=1.0) -> Tensor", lambda x, scale=1.0: x if scale == 1 else x * scale, _scaled
    ),
    _adopted_operator("scaled(Tensor x, float scale=1.0) -> Tensor", lambda x, scale=1.0: x * scale, _scaled),
    lambda op: not _result_shares_memory(op.overload, randn(2, 3), 1.0),
)


def _turned(ns, name):
    """Declare the op that ``sl.adopt`` makes of the operator ``name`` of the namespace ``ns``, and return it.

    Its reference returns the transpose of ``x``. The operator stands for one of another library.
    """

    @sl.adopt(f"{ns}::{name}")
    def turned(x: M) -> Float[Tensor, "c n"]:
        """Return the transpose of ``x``. Results of the adopted operator are compared with this reference."""
        return x.T

    return turned


aliasing(
    "a view of an argument that is returned",
    "contiguous() copies nothing where a transposed matrix already is, as one of a single column",
    _adopted_operator("turned(Tensor x) -> Tensor", lambda x: x.T.contiguous(), _turned),
    _adopted_operator(
        "turned(Tensor x) -> Tensor", lambda x: x.T.clone(memory_format=torch.contiguous_format), _turned
    ),
    # The transpose of a single column is contiguous already.
    lambda op: not _result_shares_memory(op.overload, randn(4, 1)),
)


def _counted(ns, name):
    """Declare the op that ``sl.adopt`` makes of the operator ``name`` of the namespace ``ns``, and return it.

    Its reference returns ``2 * x`` of integers. The operator stands for one of another library.
    """

    @sl.adopt(f"{ns}::{name}")
    def doubled(x: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        """Return ``2 * x``, of integers. Results of the adopted operator are compared with this reference."""
        return x * 2

    return doubled


def _ring(length):
    """Return a function that registers an operator that doubles integers in a given namespace, and returns the op that
    ``sl.adopt`` makes of it. If ``length`` is 0, there is no defect. Otherwise there is a defect on purpose: for each
    shape, the operator returns one of ``length`` buffers in turn.
    """

    def make(ns):
        """Register the operator ``doubled`` in the namespace ``ns`` with an implementation and one for fake tensors.
        Return the op that ``sl.adopt`` makes of it.
        """
        buffers, turn = {}, itertools.count()

        def fn(x):
            """Return ``2 * x``. If ``length`` (argument of ``_ring``) is 0, there is no defect. Otherwise there is a
            defect on purpose: the result is one of ``length`` buffers for each shape, and a later call with the shape
            overwrites it.
            """
            if not length:
                return x * 2
            key = x.shape, next(turn) % length
            return torch.mul(x, 2, out=buffers.setdefault(key, torch.empty_like(x)))

        library = foreign(ns, "doubled(Tensor x) -> Tensor", fn, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{ns}::doubled", lambda x: x.new_empty(x.shape), lib=library)
        return _counted(ns, "doubled")

    return make


def _keeps_results(calls):
    """Return a function that calls an op (``doubled``) ``calls`` times with different numbers. It returns whether each
    result ``2 * x`` is unchanged after the last call.
    """

    def keeps(op):
        """Call ``op`` (``doubled``) ``calls`` times (argument of ``_keeps_results``) with different numbers. Return
        whether each result ``2 * x`` is unchanged after the last call.
        """
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
    # The fourth call reuses the buffer of the first.
    _keeps_results(4),
)


def _caching(cache):
    """Return a function that registers a CPU kernel with the op ``doubled``. The kernel returns ``2 * x``. If ``cache``
    is false, there is no defect. If it is true, there is a defect on purpose: each call with the same shape and dtype
    returns the same buffer.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It returns ``2 * x``. If ``cache`` (argument of
        ``_caching``) is false, there is no defect. If it is true, there is a defect on purpose: each call with the same
        shape and dtype returns the same buffer.
        """
        buffers = {}

        @op.kernel("cpu")
        def forward(x):
            """Return ``2 * x``. If ``cache`` (argument of ``_caching``) is false, there is no defect. If it is true,
            there is a defect on purpose: the result is a buffer kept for its shape and dtype. The next call with this
            shape and dtype overwrites it.
            """
            if not cache:
                return x * 2
            # Only the memory is reused: the numbers are computed anew in each call.
            fresh = torch.empty_like(x, memory_format=torch.contiguous_format)
            return torch.mul(x, 2, out=buffers.setdefault((x.shape, x.dtype), fresh))

    return bind


def _first_result_stays(op):
    """Call ``op`` (``doubled``) with ones and then with zeros. Return whether the first result still holds 2."""
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
    """Declare the op ``centred`` in the namespace ``ns`` and return it. Its reference subtracts the mean of each row of
    ``x`` from that row and returns the result.
    """

    @sl.op(f"{ns}::centred", requires="c >= 1")
    def centred(x: M) -> M:
        """Return ``x`` less the mean of each row. Kernels of the op are compared with this reference."""
        return x - x.mean(1, keepdim=True)

    return centred


def _in_place(x, *, out):
    """Subtract the mean of each row of ``x`` from that row and write the result to ``out``. This kernel of ``centred``
    has a defect on purpose: it also overwrites its argument ``x`` with the result.
    """
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
    """Write ``x + y`` to ``out``. This kernel of ``added`` has a defect on purpose: it adds ``y`` to ``x`` in place and
    subtracts it again. The digits of small numbers in ``x`` are lost.
    """
    x.add_(y)
    out.copy_(x)
    x.sub_(y)


aliasing(
    "an argument that is changed and changed back",
    "adding and subtracting a large number loses the digits of a small one",
    of(added, kernel(_restored)),
    of(added, kernel(lambda x, y, *, out: torch.add(x, y, out=out))),
    # The numbers of x lie below the rounding error of those of y.
    same(lambda: (_small_numbers(), torch.full((2, 3), 1e6))),
)


def _small_numbers():
    """Return a matrix of 2 by 3 normally distributed random numbers with a standard deviation of 0.001."""
    return randn(2, 3) * 1e-3


def folded(ns):
    """Declare the op ``folded`` in the namespace ``ns`` and return it. Its reference returns ``x - y``."""

    @sl.op(f"{ns}::folded")
    def folded(x: M, y: M) -> M:
        """Return ``x - y``. Kernels of the op are compared with this reference."""
        return x - y

    return folded


def _negating(x, y, *, out):
    """Write ``x - y`` to ``out``. This kernel of ``folded`` has a defect on purpose: ``y`` is negated in place during
    the addition. If ``x`` and ``y`` are one tensor, the result is therefore ``-2 * x`` and not zero.
    """
    y.data.neg_()  # `data` is not counted as a write, as in foreign code
    torch.add(x, y, out=out)
    y.data.neg_()


def _subtract_self(op):
    """Return whether ``op(x, x)`` is zero. ``op`` is ``folded``, which subtracts its second argument from the first."""
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
    """Declare the op ``gram`` in the namespace ``ns`` and return it. Its reference returns ``a @ b.T``, the products of
    all rows of ``a`` with all rows of ``b``.
    """

    @sl.op(f"{ns}::gram")
    def gram(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
        """Return ``a @ b.T``, the products of all rows of ``a`` with all rows of ``b``. Kernels of the op are compared
        with this reference.
        """
        return a @ b.T

    return gram


def _symmetric(exact):
    """Return a function that registers a kernel of the op ``gram``, which computes ``a @ b.T``. If the kernel takes
    ``a`` and ``b`` for one tensor, it computes ``a @ a.T`` instead. If ``exact`` is true, there is no defect. If it is
    false, there is a defect on purpose: addresses and shapes are compared, but not strides. The kernel then takes a
    square matrix and its transpose for one tensor.
    """

    def fill(a, b, *, out):
        """Write ``a @ b.T`` to ``out``, computed as ``a @ a.T`` if ``a`` and ``b`` are taken for one tensor. If
        ``exact`` (argument of ``_symmetric``) is true, there is no defect. If it is false, there is a defect on
        purpose: a square matrix and its transpose are taken for one tensor.
        """
        # A kernel sees addresses and sizes, not which Python objects it was passed.
        alike = a.data_ptr() == b.data_ptr() and a.shape == b.shape
        if alike and (not exact or a.stride() == b.stride()):
            torch.mm(a, a.T, out=out)
        else:
            torch.mm(a, b.T, out=out)

    return kernel(fill)


def _with_its_transpose(op):
    """Return whether ``op(x, x.T)`` is ``x @ x`` for a square matrix ``x``. ``op`` is ``gram``, which multiplies its
    first argument by the transpose of the second.
    """
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
    """Declare the op that ``sl.adopt`` makes of the operator ``name`` of the namespace ``ns``, and return it.

    Its reference returns ``x + 1`` two times, as two tensors. The operator stands for one of another library.
    """

    @sl.adopt(f"{ns}::{name}")
    def twice(x: Int64[Tensor, "n"]) -> tuple[Int64[Tensor, "n"], Int64[Tensor, "n"]]:
        """Return ``x + 1`` two times, as two tensors. Results of the adopted operator are compared with this
        reference.
        """
        return x + 1, x + 1

    return twice


def _two_outputs(copy):
    """Return an implementation of the operator ``twice``, which returns ``x + 1`` as two tensors. If ``copy`` is true,
    there is no defect. If it is false, there is a defect on purpose: the second output is a view of the first.
    """

    def fn(x):
        """Return two outputs, both ``x + 1``. If ``copy`` (argument of ``_two_outputs``) is true, there is no defect.
        If it is false, there is a defect on purpose: both outputs lie in the same memory.
        """
        y = x + 1
        # A view is another tensor object with the same memory, so a comparison of objects does not show it.
        return y, y.clone() if copy else y.view(y.shape)

    return fn


def _outputs_disjoint(op):
    """Return whether the second output of ``op`` (``twice``) stays unchanged if the first is set to zero in place."""
    first, second = op.overload(torch.arange(4))
    first.zero_()
    return int(second[3]) == 4


aliasing(
    "two outputs in the same memory",
    "they have the same values, until one of them is written to",
    _adopted_operator("twice(Tensor x) -> (Tensor, Tensor)", _two_outputs(False), twice),
    _adopted_operator("twice(Tensor x) -> (Tensor, Tensor)", _two_outputs(True), twice),
    _outputs_disjoint,
)
