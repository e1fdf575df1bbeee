"""Results that depend on earlier calls, on the thread, on settings or on chance."""

import sys
import threading
from functools import partial

import torch
from jaxtyping import Float, Float32
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, V, doubled
from shiplap_testing.defects.defect import add, of
from shiplap_testing.defects.witness import close, in_thread, randn, restored, uniform, wide

state = partial(add, "state")


def _calls(when):
    """Return a function that registers a CPU kernel with the op ``doubled``. The kernel writes ``2 * x`` to ``out``. If
    ``when(number)`` is never true, there is no defect. Otherwise there is a defect on purpose: each call for whose
    number it is true writes zeros. The first call has the number 0.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``doubled``). It writes ``2 * x`` to ``out``. If
        ``when(number)`` (argument of ``_calls``) is never true, there is no defect. Otherwise there is a defect on
        purpose: each call for whose number it is true writes zeros. The first call has the number 0.
        """
        count = [0]

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``2 * x`` to ``out``. If ``when(number)`` (argument of ``_calls``) is false for the number of this
            call, there is no defect. If it is true, there is a defect on purpose: zeros are written. The first call has
            the number 0.
            """
            torch.mul(x, 0 if when(count[0]) else 2, out=out)
            count[0] += 1

    return bind


def _in_each_call(op):
    """Return whether each of 40 calls of ``op`` (``doubled``) is right."""
    return all(close(op(torch.ones(2, 3)), torch.full((2, 3), 2.0)) for _ in range(40))


state(
    "a first call that warms up",
    "the first call initialises, and returns zeros",
    of(doubled, _calls(lambda number: number == 0)),
    of(doubled, _calls(lambda number: False)),
    _in_each_call,
)
state(
    "a recalibration every 32 calls",
    "that call returns zeros",
    of(doubled, _calls(lambda number: number % 32 == 31)),
    of(doubled, _calls(lambda number: False)),
    _in_each_call,
)


def quantised(ns):
    """Declare the op ``quantised`` in the namespace ``ns`` and return it. Its reference returns ``x`` rounded to
    multiples of a step, which is an eighth of the largest magnitude in ``x``.
    """

    @sl.op(f"{ns}::quantised", requires="n >= 1")
    def quantised(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        """Return ``x`` rounded to multiples of an eighth of its largest magnitude. Kernels of the op are compared with
        this reference.
        """
        step = x.abs().amax().clamp_min(1e-6) / 8
        return (x / step).round() * step

    return quantised


def _delayed(own):
    """Return a function that registers a CPU kernel with the op ``quantised``. The kernel rounds ``x`` to multiples of
    a step. If ``own`` is true, the step follows the largest magnitude of ``x``, and there is no defect. If it is false,
    there is a defect on purpose: the step follows the largest magnitude of all calls so far.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``quantised``). It rounds ``x`` to multiples of a step. If
        ``own`` (argument of ``_delayed``) is true, there is no defect. If it is false, there is a defect on purpose:
        the step follows the largest magnitude of all calls so far.
        """
        seen = [0.0]

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``x`` rounded to multiples of a step to ``out``. If ``own`` (argument of ``_delayed``) is true,
            there is no defect. If it is false, there is a defect on purpose: after a call with larger numbers the step
            is too large.
            """
            now = x.abs().amax().clamp_min(1e-6)
            seen[0] = max(seen[0], float(now))
            step = (now if own else torch.tensor(seen[0], dtype=x.dtype)) / 8
            out.copy_((x / step).round() * step)

    return bind


def _after_a_large_one(op):
    """Return whether ``op`` (``quantised``) is right after a call with numbers that are a hundred times larger."""
    op(torch.tensor([100.0, 1.0]))
    return close(op(torch.tensor([1.0, 0.5])), torch.tensor([1.0, 0.5]))


state(
    "a scale that remembers the largest input",
    "one outlier makes the results of all later calls coarse",
    of(quantised, _delayed(False)),
    of(quantised, _delayed(True)),
    _after_a_large_one,
)


def positioned(ns):
    """Declare the op ``positioned`` in the namespace ``ns`` and return it. Its reference returns ``x`` with row ``i``
    multiplied by the cosine of ``i``.
    """

    @sl.op(f"{ns}::positioned")
    def positioned(x: M) -> M:
        """Return each row of ``x`` times the cosine of its number. Kernels of the op are compared with this
        reference.
        """
        return x * torch.cos(torch.arange(x.shape[0], dtype=wide(x).dtype))[:, None].to(x.dtype)

    return positioned


def _table(grows):
    """Return a function that registers a CPU kernel with the op ``positioned``. The kernel multiplies row ``i`` by
    element ``i`` of a table of cosines. If ``grows`` is true, there is no defect. If it is false, there is a defect on
    purpose: the table stays as long as the first input.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``positioned``). It multiplies row ``i`` by element ``i`` of
        a table of cosines. If ``grows`` (argument of ``_table``) is true, there is no defect. If it is false, there is
        a defect on purpose: the table stays as long as the first input.
        """
        table = []

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``x`` with row ``i`` multiplied by the cosine of ``i`` to ``out``. If ``grows`` (argument of
            ``_table``) is true, there is no defect. If it is false, there is a defect on purpose: rows past the length
            of the first input are multiplied by the last cosine of its table.
            """
            n, dtype = x.shape[0], wide(x).dtype
            held = table[0] if table else None
            if held is None or (grows and (len(held) < n or held.dtype != dtype)):
                held = torch.cos(torch.arange(max(n, 1), dtype=dtype))
                table[:] = [held]
            # Past the end of the table its last entry is read.
            place = torch.arange(n).clamp_max(len(held) - 1)
            out.copy_(x * held[place][:, None].to(x.dtype))

    return bind


def _short_then_long(op):
    """Return whether ``op`` (``positioned``) is right for 8 rows after a call with 3 rows."""
    op(torch.ones(3, 2))
    return close(op(torch.ones(8, 2)), op.reference(torch.ones(8, 2)))


state(
    "a table made for the first length",
    "later and longer sequences read its last entry again and again",
    of(positioned, _table(False)),
    of(positioned, _table(True)),
    _short_then_long,
)


def summed(ns):
    """Declare the op ``summed`` in the namespace ``ns`` and return it. Its reference returns the sum of each column of
    ``x``.
    """

    @sl.op(f"{ns}::summed")
    def summed(x: M) -> Float[Tensor, "c"]:
        """Return the sum of each column of ``x``. Kernels of the op are compared with this reference."""
        return x.sum(0)

    return summed


def _accumulators(clear):
    """Return a function that registers a CPU kernel with the op ``summed``. The kernel writes the sum of each column to
    ``out``. If ``clear`` is true, there is no defect. If it is false, there is a defect on purpose: the sums of earlier
    calls with the same number of columns and dtype are added.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``summed``). It writes the sum of each column to ``out``. If
        ``clear`` (argument of ``_accumulators``) is true, there is no defect. If it is false, there is a defect on
        purpose: the sums of earlier calls with the same number of columns and dtype are added.
        """
        buffers = {}

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write the sum of each column of ``x`` to ``out``. If ``clear`` (argument of ``_accumulators``) is true,
            there is no defect. If it is false, there is a defect on purpose: the sums of earlier calls with the same
            number of columns and dtype are added.
            """
            y = wide(x).sum(0)
            total = torch.zeros_like(y)
            if not clear:
                total = buffers.setdefault((y.shape, y.dtype), total)
            out.copy_(total.add_(y))

    return bind


def _same_twice(op):
    """Return whether two calls of ``op`` with one tensor return equal results."""
    x = uniform(4, 3)
    return close(op(x), op(x))


state(
    "an accumulator that is not cleared",
    "a second call of the same width adds to the first",
    of(summed, _accumulators(False)),
    of(summed, _accumulators(True)),
    _same_twice,
)


def _per_thread(everywhere):
    """Return a function that registers a CPU kernel with the op ``doubled``. The kernel writes ``2 * x`` to ``out``. If
    ``everywhere`` is true, there is no defect. If it is false, there is a defect on purpose: only the thread that
    registers the kernel multiplies by 2. Other threads multiply by 0.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``doubled``). It writes ``2 * x`` to ``out``. If
        ``everywhere`` (argument of ``_per_thread``) is true, there is no defect. If it is false, there is a defect on
        purpose: only the thread that registers the kernel multiplies by 2. Other threads multiply by 0.
        """
        local = threading.local()
        local.factor = 2

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``2 * x`` to ``out``. If ``everywhere`` (argument of ``_per_thread``) is true, there is no defect.
            If it is false, there is a defect on purpose: in all threads but the one that registered this kernel, zeros
            are written.
            """
            torch.mul(x, 2 if everywhere else getattr(local, "factor", 0), out=out)

    return bind


state(
    "a constant in thread-local memory",
    "set in the thread that loaded the kernel, and zero in all others",
    of(doubled, _per_thread(False)),
    of(doubled, _per_thread(True)),
    lambda op: close(in_thread(lambda: op(torch.ones(2, 3))), torch.full((2, 3), 2.0)),
)


def _scratch(shared):
    """Return a function that registers a CPU kernel with the op ``doubled``. The kernel computes each row in a scratch
    buffer and copies it to the output. If ``shared`` is false, there is no defect. If it is true, there is a defect on
    purpose: all threads use the same buffer.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``doubled``). It computes each row in a scratch buffer and
        copies it to the output. If ``shared`` (argument of ``_scratch``) is false, there is no defect. If it is true,
        there is a defect on purpose: all threads use the same buffer.
        """
        rows = {}

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``2 * x`` to ``out`` row by row, by way of a scratch buffer. If ``shared`` (argument of
            ``_scratch``) is false, there is no defect. If it is true, there is a defect on purpose: another thread may
            overwrite the buffer before it is copied to ``out``.
            """
            fresh = torch.empty(x.shape[1:], dtype=x.dtype)
            row = rows.setdefault((x.shape[1:], x.dtype), fresh) if shared else fresh
            for i in range(x.shape[0]):
                row.copy_(x[i])
                row.mul_(2)
                out[i] = row

    return bind


def _two_at_once(op):
    """Return whether ``op`` (``doubled``) is right in four threads that call it 40 times each at the same time. For
    these calls, the interval after which Python switches threads is a microsecond.
    """
    op(torch.ones(1, 2000))
    wrong, start, interval = [], threading.Barrier(4), sys.getswitchinterval()
    # Threads change places as often as possible, so that two meet in the kernel.
    sys.setswitchinterval(1e-6)

    def work(number):
        """Call ``op`` (argument of ``_two_at_once``) up to 40 times on a tensor full of ``number``. At a wrong result,
        append ``number`` to the list ``wrong``, which all threads share.
        """
        x = torch.full((200, 2000), float(number))
        # All threads begin at the same time.
        start.wait()
        for _ in range(40):  # whether two meet is chance
            wrong.extend([] if wrong or close(op(x), 2 * x) else [number])

    threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    sys.setswitchinterval(interval)
    return not wrong


state(
    "scratch memory that threads share",
    "one buffer for the process: calls from two threads at once write over each other's rows",
    of(doubled, _scratch(True)),
    of(doubled, _scratch(False)),
    _two_at_once,
)


def _for_inference(exact):
    """Return a function that registers a CPU kernel with the op ``doubled``. The kernel writes ``2 * x`` to ``out``. If
    ``exact`` is true, there is no defect. If it is false, there is a defect on purpose: ``x`` is rounded to bfloat16
    while gradients are disabled.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It writes ``2 * x`` to ``out``. If ``exact`` (argument of
        ``_for_inference``) is true, there is no defect. If it is false, there is a defect on purpose: ``x`` is rounded
        to bfloat16 while gradients are disabled.
        """

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``2 * x`` to ``out``. If ``exact`` (argument of ``_for_inference``) is true, there is no defect. If
            it is false, there is a defect on purpose: ``x`` is rounded to bfloat16 while gradients are disabled.
            """
            short = not exact and not torch.is_grad_enabled()
            out.copy_((x.bfloat16() if short else x) * 2)

    return bind


def _without_gradients(op):
    """Return whether ``op`` (``doubled``) is right under ``torch.no_grad``."""
    x = randn(2, 3)
    with torch.no_grad():
        return close(op(x), x * 2)


state(
    "another precision without gradients",
    "under no_grad the kernel thinks that it serves, and rounds to bfloat16",
    of(doubled, _for_inference(False)),
    of(doubled, _for_inference(True)),
    _without_gradients,
)


def ramp(ns):
    """Declare the op ``ramp`` in the namespace ``ns`` and return it. Its reference adds ``i / 7`` to element ``i`` of
    ``x``, where the quotient is computed in float64.
    """

    @sl.op(f"{ns}::ramp")
    def ramp(x: V) -> V:
        """Return ``x`` plus a seventh of the position of each element, computed in float64. Kernels of the op are
        compared with this reference.
        """
        return x + torch.arange(len(x), dtype=torch.float64).div(7).to(x.dtype)

    return ramp


def _ramp(**dtype):
    """Return a function that registers a CPU kernel with the op ``ramp``, which adds ``i / 7`` to element ``i``.

    The kernel passes the keyword arguments ``dtype`` to ``torch.arange``. With ``dtype=torch.float64`` there is no
    defect. Without arguments there is a defect on purpose: the quotients have the precision of the default dtype.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``ramp``).

        It passes the keyword arguments ``dtype`` (argument of ``_ramp``) to ``torch.arange``. With
        ``dtype=torch.float64`` there is no defect. Without arguments there is a defect on purpose: the quotients have
        the precision of the default dtype.
        """

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``x`` with ``i / 7`` added to element ``i`` to ``out``. If ``dtype`` (argument of ``_ramp``) names
            float64, there is no defect. If it is empty, there is a defect on purpose: the quotients have the precision
            of the default dtype.
            """
            steps = torch.arange(len(x), **dtype) * torch.tensor(1 / 7, **dtype)
            out.copy_(x + steps.to(x.dtype))

    return bind


def _other_default(op):
    """Return whether ``op`` (``ramp``) agrees with its reference in float64 while the default dtype is float16."""
    x = uniform(300).double()
    with restored():
        torch.set_default_dtype(torch.float16)
        return close(op(x), op.reference(x))


state(
    "a table in the default dtype",
    "a step of 1 / 7 in float32 for results in float64, and coarser under another default",
    of(ramp, _ramp()),
    of(ramp, _ramp(dtype=torch.float64)),
    _other_default,
)


def _stochastic(nearest):
    """Return a function that registers a CPU kernel with the op ``quantised``. The kernel rounds ``x`` to multiples of
    a step. If ``nearest`` is true, there is no defect. If it is false, there is a defect on purpose: it draws at random
    whether a number is rounded up or down.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``quantised``). It rounds ``x`` to multiples of a step. If
        ``nearest`` (argument of ``_stochastic``) is true, there is no defect. If it is false, there is a defect on
        purpose: it draws at random whether a number is rounded up or down.
        """

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``x`` rounded to multiples of a step to ``out``. If ``nearest`` (argument of ``_stochastic``) is
            true, there is no defect. If it is false, there is a defect on purpose: each call draws anew at random
            whether a number is rounded up or down.
            """
            generator = torch.Generator()
            # Seeded by the system, so that the global generator is neither read nor changed.
            generator.seed()
            noise = 0.5 if nearest else torch.rand(x.shape, generator=generator, dtype=torch.float32).to(x.dtype)
            step = x.abs().amax().clamp_min(1e-6) / 8
            out.copy_(((x / step) + noise).floor() * step if not nearest else (x / step).round() * step)

    return bind


state(
    "stochastic rounding",
    "each call rounds another way, where the declaration rounds to the nearest",
    of(quantised, _stochastic(False)),
    of(quantised, _stochastic(True)),
    lambda op: close(op(x := randn(50)), op.reference(x)),
)


def _unfilled(fill):
    """Return a function that registers a CPU kernel with the op ``row_total``. The kernel copies rows to a buffer whose
    width is a multiple of 16, and sums each row of the buffer. If ``fill`` is true, there is no defect. If it is false,
    there is a defect on purpose: the additional columns of the buffer are not set to zero.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``row_total``). It copies rows to a buffer whose width is a
        multiple of 16, and sums each row of the buffer. If ``fill`` (argument of ``_unfilled``) is true, there is no
        defect. If it is false, there is a defect on purpose: the additional columns of the buffer are not set to zero.
        """

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write the sum of each row of ``x`` to ``out``. If ``fill`` (argument of ``_unfilled``) is true, there is
            no defect. If it is false, there is a defect on purpose: uninitialised memory of a wider buffer is added to
            each sum.
            """
            n, c = x.shape
            padded = torch.empty(n, -(-c // 16) * 16, dtype=x.dtype)
            padded[:, :c] = x
            if fill:
                padded[:, c:] = 0
            else:
                padded[:, c:] += 1  # whatever lies there, and different from zero
            out.copy_(wide(padded).sum(1))

    return bind


def row_total(ns):
    """Declare the op ``row_total`` in the namespace ``ns`` and return it. Its reference returns the sum of each row of
    ``x``.
    """

    @sl.op(f"{ns}::row_total")
    def row_total(x: M) -> V:
        """Return the sum of each row of ``x``. Kernels of the op are compared with this reference."""
        return x.sum(1)

    return row_total


state(
    "padding that is not initialised",
    "rows are padded to multiples of 16 with what lay in memory",
    of(row_total, _unfilled(False)),
    of(row_total, _unfilled(True)),
    lambda op: close(op(x := uniform(3, 10)), x.sum(1)),
)
