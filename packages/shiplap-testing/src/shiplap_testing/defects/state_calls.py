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
    """Return a function that registers a CPU kernel with the op ``doubled``. The kernel writes ``2 * x`` to ``out``.
    This function has a defect on purpose: it writes zeros in each call for which ``when(number)`` is true. The first
    call has the number 0.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It writes ``2 * x`` to ``out``. This function has a defect
        on purpose: it writes zeros in each call for which ``when(number)`` (``when`` is the argument of ``_calls``) is
        true. The first call has the number 0.
        """
        count = [0]

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``2 * x`` to ``out``. This function has a defect on purpose: zeros are written if ``when``
            (argument of ``_calls``) is true for the number of this call. The first call has the number 0.
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
    multiples of an eighth of its largest magnitude.
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
    a step. If ``own`` is true, there is no defect. If it is false, there is one on purpose: the step follows the
    largest magnitude of all calls so far, as delayed scaling does.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It rounds ``x`` to multiples of a step. If ``own`` (argument
        of ``_delayed``) is true, there is no defect. If it is false, there is one on purpose: the step follows the
        largest magnitude of all calls so far, as delayed scaling does.
        """
        seen = [0.0]

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``x`` rounded to multiples of a step to ``out``. If ``own`` (argument of ``_delayed``) is true,
            there is no defect. If it is false, there is one on purpose: after a call with larger numbers the step is
            too coarse.
            """
            now = x.abs().amax().clamp_min(1e-6)
            seen[0] = max(seen[0], float(now))
            step = (now if own else torch.tensor(seen[0], dtype=x.dtype)) / 8
            out.copy_((x / step).round() * step)

    return bind


def _after_a_large_one(op):
    """Return whether ``op`` (``quantised``) is right after a call with a hundred times larger numbers."""
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
    """Declare the op ``positioned`` in the namespace ``ns`` and return it. Its reference returns each row of ``x``
    times the cosine of its number.
    """

    @sl.op(f"{ns}::positioned")
    def positioned(x: M) -> M:
        """Return each row of ``x`` times the cosine of its number. Kernels of the op are compared with this
        reference.
        """
        return x * torch.cos(torch.arange(x.shape[0], dtype=wide(x).dtype))[:, None].to(x.dtype)

    return positioned


def _table(grows):
    """Return a function that registers a CPU kernel with the op ``positioned``. The kernel multiplies rows by a table
    of cosines. If ``grows`` is true, there is no defect. If it is false, there is one on purpose: the table stays as
    long as the first input.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It multiplies rows by a table of cosines. If ``grows``
        (argument of ``_table``) is true, there is no defect. If it is false, there is one on purpose: the table stays
        as long as the first input.
        """
        table = []

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write each row of ``x`` times the cosine of its number to ``out``. If ``grows`` (argument of ``_table``)
            is true, there is no defect. If it is false, there is one on purpose: rows past the length of the first
            input get the last cosine.
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
    ``out``. If ``clear`` is true, there is no defect. If it is false, there is one on purpose: sums of earlier calls of
    the same width are added.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It writes the sum of each column to ``out``. If ``clear``
        (argument of ``_accumulators``) is true, there is no defect. If it is false, there is one on purpose: sums of
        earlier calls of the same width are added.
        """
        buffers = {}

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write the sum of each column to ``out``. If ``clear`` (argument of ``_accumulators``) is true, there is
            no defect. If it is false, there is one on purpose: the sums of earlier calls are added.
            """
            y = wide(x).sum(0)
            total = torch.zeros_like(y)
            if not clear:
                total = buffers.setdefault((y.shape, y.dtype), total)
            out.copy_(total.add_(y))

    return bind


def _same_twice(op):
    """Return whether two calls of ``op`` with the same tensor return the same."""
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
    ``everywhere`` is true, there is no defect. If it is false, there is one on purpose: the factor 2 is set only in the
    thread that declares the op. It is 0 in other threads.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It writes ``2 * x`` to ``out``. If ``everywhere`` (argument
        of ``_per_thread``) is true, there is no defect. If it is false, there is one on purpose: the factor 2 is set
        only in the thread that declares the op. It is 0 in other threads.
        """
        local = threading.local()
        local.factor = 2

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``2 * x`` to ``out``. If ``everywhere`` (argument of ``_per_thread``) is true, there is no defect.
            If it is false, there is one on purpose: in other threads zeros are written.
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
    """Return a function that registers a CPU kernel with the op ``doubled``. The kernel copies each row through a
    scratch row. If ``shared`` is false, there is no defect. If it is true, there is one on purpose: all threads use the
    same scratch row.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It copies each row through a scratch row. If ``shared``
        (argument of ``_scratch``) is false, there is no defect. If it is true, there is one on purpose: all threads use
        the same scratch row.
        """
        rows = {}

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``2 * x`` to ``out`` row by row. If ``shared`` (argument of ``_scratch``) is false, there is no
            defect. If it is true, there is one on purpose: another thread may overwrite the scratch row in between.
            """
            fresh = torch.empty(x.shape[1:], dtype=x.dtype)
            row = rows.setdefault((x.shape[1:], x.dtype), fresh) if shared else fresh
            for i in range(x.shape[0]):
                row.copy_(x[i])
                row.mul_(2)
                out[i] = row

    return bind


def _two_at_once(op):
    """Return whether ``op`` (``doubled``) is right in four threads that call it 40 times each at the same time. Python
    switches threads more often than usual meanwhile.
    """
    op(torch.ones(1, 2000))
    wrong, start, interval = [], threading.Barrier(4), sys.getswitchinterval()
    # Threads change places as often as possible, so that two meet in the kernel.
    sys.setswitchinterval(1e-6)

    def work(number):
        """Call ``op`` (argument of ``_two_at_once``) 40 times on tensors full of ``number``. At the first wrong result,
        append the number to a list that the threads share.
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
    ``exact`` is true, there is no defect. If it is false, there is one on purpose: ``x`` is rounded to bfloat16 while
    gradients are disabled.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It writes ``2 * x`` to ``out``. If ``exact`` (argument of
        ``_for_inference``) is true, there is no defect. If it is false, there is one on purpose: ``x`` is rounded to
        bfloat16 while gradients are disabled.
        """

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``2 * x`` to ``out``. If ``exact`` (argument of ``_for_inference``) is true, there is no defect. If
            it is false, there is one on purpose: ``x`` is rounded to bfloat16 while gradients are disabled.
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
    """Declare the op ``ramp`` in the namespace ``ns`` and return it. Its reference returns ``x`` plus a seventh of the
    position of each element, computed in float64.
    """

    @sl.op(f"{ns}::ramp")
    def ramp(x: V) -> V:
        """Return ``x`` plus a seventh of the position of each element, computed in float64. Kernels of the op are
        compared with this reference.
        """
        return x + torch.arange(len(x), dtype=torch.float64).div(7).to(x.dtype)

    return ramp


def _ramp(**dtype):
    """Return a function that registers a CPU kernel with the op ``ramp``.

    The kernel computes its steps by ``torch.arange`` with the keyword arguments ``dtype``. If there are none, there is
    a defect on purpose: the steps have the default dtype. Otherwise there is none.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``.

        It computes its steps by ``torch.arange`` with the keyword arguments ``dtype`` (argument of ``_ramp``). If there
        are none, there is a defect on purpose: the steps have the default dtype. Otherwise there is none.
        """

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``x`` plus a seventh of the position of each element to ``out``. If ``dtype`` (argument of
            ``_ramp``) is empty, there is a defect on purpose: steps have the precision of the default dtype. Otherwise
            there is none.
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
    a step. If ``nearest`` is true, there is no defect. If it is false, there is one on purpose: numbers are rounded up
    or down at random.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It rounds ``x`` to multiples of a step. If ``nearest``
        (argument of ``_stochastic``) is true, there is no defect. If it is false, there is one on purpose: numbers are
        rounded up or down at random.
        """

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``x`` rounded to multiples of a step to ``out``. If ``nearest`` (argument of ``_stochastic``) is
            true, there is no defect. If it is false, there is one on purpose: each call rounds by other random numbers.
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
    """Return a function that registers a CPU kernel with the op ``row_total``. The kernel sums rows that are padded to
    multiples of 16. If ``fill`` is true, there is no defect. If it is false, there is one on purpose: the padding is
    not set to zero.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It sums rows that are padded to multiples of 16. If ``fill``
        (argument of ``_unfilled``) is true, there is no defect. If it is false, there is one on purpose: the padding is
        not set to zero.
        """

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write the sum of each row to ``out``. If ``fill`` (argument of ``_unfilled``) is true, there is no
            defect. If it is false, there is one on purpose: uninitialised padding is added.
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
