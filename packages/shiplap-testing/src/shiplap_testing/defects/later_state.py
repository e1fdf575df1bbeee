"""Later ones: what a call leaves behind, what earlier calls leave to it, and what the compiler is told."""

import gc
import os
import threading
import time
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, doubled, row_sum
from shiplap_testing.defects.defect import add, foreign, kernel, of
from shiplap_testing.defects.values_float import filled
from shiplap_testing.defects.witness import close, randn, uniform, wide

state = partial(add, "state", later=True)
outputs = partial(add, "outputs", later=True)
lists = partial(add, "lists", later=True)


def _doing(what):
    """Return a function that registers a kernel of the op ``doubled``. The kernel calls the function ``what`` without
    arguments and then writes ``2 * x`` to ``out``.
    """

    def fill(x, *, out):
        """Call ``what()`` (argument of ``_doing``) and write ``2 * x`` to ``out``."""
        what()
        torch.mul(x, 2, out=out)

    return kernel(fill)


def _nothing():
    """Do nothing. Kernels of ``doubled`` without a defect call this function where the defective ones change the state
    of the process.
    """


def _collector_stays(op):
    """Return whether garbage collection is still enabled after a call of ``op``. The function enables it before the
    call and again after the check.
    """
    gc.enable()
    op(torch.ones(2, 3))
    on = gc.isenabled()
    gc.enable()
    return on


state(
    "garbage collection left off",
    "switched off for the time of a launch, and not switched on again",
    of(doubled, _doing(gc.disable)),
    of(doubled, _doing(_nothing)),
    _collector_stays,
)


def _in_numpy():
    """Seed the global random generator of NumPy with 0. A kernel that calls this function has a defect, since it
    changes the state of the process.
    """
    import numpy

    numpy.random.seed(0)


def _numpy_goes_on(op):
    """Return whether a call of ``op`` leaves the global random generator of NumPy unchanged. The state of the generator
    is restored afterwards.
    """
    import numpy

    state = numpy.random.get_state()
    numpy.random.seed(5)
    # The next number after the seed, with which that after the call is compared.
    want = numpy.random.rand()
    numpy.random.seed(5)
    op(torch.ones(2, 3))
    got = numpy.random.rand()
    numpy.random.set_state(state)
    return got == want


state(
    "NumPy's random numbers seeded",
    "each call seeds the global generator of NumPy",
    of(doubled, _doing(_in_numpy)),
    of(doubled, _doing(_nothing)),
    _numpy_goes_on,
)


def _set_variable():
    """Set the environment variable ``OMP_WAIT_POLICY_OF_DOUBLED``. A kernel that calls this function has a defect,
    since it changes the state of the process.
    """
    os.environ["OMP_WAIT_POLICY_OF_DOUBLED"] = "active"


def _environment_stays(op):
    """Return whether a call of ``op`` leaves the environment variables unchanged. The variable that ``_set_variable``
    sets is removed afterwards.
    """
    before = dict(os.environ)
    op(torch.ones(2, 3))
    same = dict(os.environ) == before
    # Otherwise the variable would already be set at the check of the next op.
    os.environ.pop("OMP_WAIT_POLICY_OF_DOUBLED", None)
    return same


state(
    "environment variable left set",
    "children of the process inherit what a call has set",
    of(doubled, _doing(_set_variable)),
    of(doubled, _doing(_nothing)),
    _environment_stays,
)
_over = threading.Event()


def _a_thread():
    """Start a daemon thread that waits for ten minutes. A kernel that calls this function has a defect, since the
    thread outlives the call.
    """
    threading.Thread(target=lambda: _over.wait(600), daemon=True).start()


def _threads_stay(op):
    """Return whether three calls of ``op`` leave the number of threads unchanged."""
    before = threading.active_count()
    for _ in range(3):
        op(torch.ones(2, 3))
    return threading.active_count() == before


state(
    "a thread for each call that never ends",
    "a watcher is started and waits for what nobody sends",
    of(doubled, _doing(_a_thread)),
    of(doubled, _doing(_nothing)),
    _threads_stay,
)


def _late(waits):
    """Return a function that registers a kernel of the op ``doubled``. A second thread writes the last row of the
    result. If ``waits`` is true, there is no defect. If it is false, there is a defect on purpose: the kernel returns
    before that thread has ended.
    """

    def fill(x, *, out):
        """Write ``2 * x`` to ``out``, with the last row in a second thread. If ``waits`` (argument of ``_late``) is
        true, there is no defect. If it is false, there is a defect on purpose: the kernel returns before the last row
        is written.
        """

        def rest():
            """Write the last row of ``2 * x`` to ``out`` after 20 milliseconds. ``x`` and ``out`` are arguments of
            ``fill``.
            """
            time.sleep(0.02)
            with torch.no_grad():  # a thread of its own has a mode of its own
                torch.mul(x[-1:], 2, out=out[-1:])

        # All rows but the last are there when the kernel returns.
        torch.mul(x[:-1], 2, out=out[:-1])
        out[-1:].zero_()
        worker = threading.Thread(target=rest)
        worker.start()
        if waits:
            worker.join()

    return kernel(fill)


state(
    "last row written after the call",
    "a thread is still at work when the kernel returns",
    of(doubled, _late(False)),
    of(doubled, _late(True)),
    lambda op: close(op(torch.ones(2, 3)), torch.full((2, 3), 2.0)),
)


def _remembering(all_of_it):
    """Return a function that registers a CPU kernel with the op ``doubled``. The kernel writes ``2 * x`` to ``out`` and
    keeps its last input and result. An equal input gets the kept result. If ``all_of_it`` is true, there is no defect.
    If it is false, there is a defect on purpose: only the first row, the shape and the dtype of inputs are compared.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It writes ``2 * x`` to ``out`` and keeps its last input and
        result. If ``all_of_it`` (argument of ``_remembering``) is true, there is no defect. If it is false, there is a
        defect on purpose: only the first row, the shape and the dtype of inputs are compared.
        """
        known = {}

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``2 * x`` to ``out``.

            If ``all_of_it`` (argument of ``_remembering``) is true, there is no defect. If it is false, there is a
            defect on purpose: the last result is written again if ``x`` has the first row of the last input. Its other
            rows may differ.
            """
            head = x.contiguous() if all_of_it else x[:1]
            key = (tuple(x.shape), x.dtype, head.contiguous().view(torch.uint8).numpy().tobytes())
            if key not in known:
                known.clear()
                known[key] = x * 2
            out.copy_(known[key])

    return bind


def _other_second_row(op):
    """Call ``op`` (``doubled``) on two inputs that differ in their second row only. Return whether the second result is
    right.
    """
    op(torch.ones(2, 3))
    x = torch.ones(2, 3)
    x[1] = 5
    return close(op(x), 2 * x)


state(
    "a result remembered by its first row",
    "an input whose first row was there before gets the result of then",
    of(doubled, _remembering(False)),
    of(doubled, _remembering(True)),
    _other_second_row,
)


def _largest_scratch(cleared):
    """Return a function that registers a CPU kernel with the op ``row_sum``. The kernel sums each row in a scratch
    vector as long as the widest row so far. If ``cleared`` is true, there is no defect. If it is false, there is a
    defect on purpose: the vector still holds the end of an earlier, wider row.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It sums each row in a scratch vector as long as the widest
        row so far. If ``cleared`` (argument of ``_largest_scratch``) is true, there is no defect. If it is false, there
        is a defect on purpose: the vector still holds the end of an earlier, wider row.
        """
        # Per thread, so that the scratch is wrong by its size only and not by a race.
        of_thread = threading.local()

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write the sum of each row to ``out``. If ``cleared`` (argument of ``_largest_scratch``) is true, there is
            no defect. If it is false, there is a defect on purpose: the end of an earlier, wider row is added to the
            sum of a narrow row.
            """
            n, c = x.shape
            scratch = vars(of_thread)
            held = scratch.get(str(x.dtype))
            if held is None or held.shape[0] < c:
                held = scratch[str(x.dtype)] = wide(x).new_zeros(c, 1)
            for i in range(n):
                if cleared:
                    held.zero_()
                held[:c, 0] = wide(x)[i]
                out[i] = held.sum()

    return bind


def _narrow_after_wide(op):
    """Return whether ``op`` (``row_sum``) is right for narrow rows after a call with wide rows."""
    op(torch.ones(2, 40))
    return close(op(torch.ones(2, 3)), torch.full((2,), 3.0))


state(
    "scratch as large as the largest call",
    "a narrow input after a wide one has the rest of the wide one added",
    of(row_sum, _largest_scratch(False)),
    of(row_sum, _largest_scratch(True)),
    _narrow_after_wide,
)


def _rows(fake):
    """Return a function that registers the operator ``rows`` in a given namespace, and returns the op that ``sl.adopt``
    makes of it. The operator returns ``x + 1`` of integers as a contiguous tensor, and ``fake`` is its implementation
    for fake tensors. If ``fake`` returns a tensor of the shape of ``x``, there is no defect.
    """

    def make(ns):
        """Register the operator ``rows`` with the fake implementation ``fake`` (argument of ``_rows``) in the namespace
        ``ns``, and return the op that ``sl.adopt`` makes of it.
        """
        library = foreign(ns, "rows(Tensor x) -> Tensor", lambda x: x.contiguous() + 1, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{ns}::rows", fake, lib=library)

        @sl.adopt(f"{ns}::rows")
        def rows(x: Int64[Tensor, "n c"]) -> Int64[Tensor, "n c"]:
            """Return ``x + 1``. Results of the adopted operator are compared with this reference."""
            return x + 1

        return rows

    return make


def _fake_of(n):
    """Return a function that takes an op and returns whether its result on fake tensors of ``n`` rows has the shape of
    the real result.
    """

    def right(op):
        """Return whether the result of ``op`` for ``n`` rows (argument of ``_fake_of``) has the same shape on fake and
        on real tensors.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        x = torch.zeros(n, 3, dtype=torch.int64)
        with FakeTensorMode() as mode:
            fake = op.overload(mode.from_tensor(x))
        return fake.shape == op.overload(x).shape

    return right


outputs(
    "fake of one row squeezed",
    "the fake of a single row has one dim",
    _rows(lambda x: x.new_empty(x.shape[1:]) if x.shape[0] == 1 else x.new_empty(x.shape)),
    _rows(lambda x: x.new_empty(x.shape)),
    _fake_of(1),
)
outputs(
    "fake of no rows that has one",
    "at least one row, says the fake",
    _rows(lambda x: x.new_empty(max(x.shape[0], 1), x.shape[1])),
    _rows(lambda x: x.new_empty(x.shape)),
    _fake_of(0),
)


def _stays_dynamic(op):
    """Return whether ``torch.compile`` with dynamic shapes compiles ``op`` (``rows``) only once for four different
    numbers of rows.
    """
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(op.overload, backend=counter, dynamic=True)
    # None of the sizes is 0 or 1, which torch compiles for separately.
    for n in (5, 6, 7, 9):
        compiled(torch.zeros(n, 3, dtype=torch.int64))
    torch._dynamo.reset()
    return counter.frame_count == 1


outputs(
    "fake that makes its size a number",
    "int() of a size fixes it: each other size is compiled anew",
    _rows(lambda x: x.new_empty(int(x.shape[0]), int(x.shape[1]))),
    _rows(lambda x: x.new_empty(x.shape)),
    _stays_dynamic,
)


def _declared(ns, name):
    """Declare the op that ``sl.adopt`` makes of the operator ``name`` of the namespace ``ns``, and return it.

    Its reference returns the sum of ``x`` and the tensors of the list ``parts``. The operator stands for one of another
    library.
    """

    @sl.adopt(f"{ns}::{name}")
    def largest(x: Int64[Tensor, "n c"], parts: list[Int64[Tensor, "n c"]]) -> Int64[Tensor, "n c"]:
        """Return the sum of ``x`` and the tensors of the list ``parts``. Results of the adopted operator are compared
        with this reference.
        """
        return sum(parts, x)  # of integers: an op without a gradient of its own

    return largest


def _list_changed(changes):
    """Return a function that registers an operator in a given namespace, and returns the op that ``sl.adopt`` makes of
    it. The operator returns the sum of ``x`` and the tensors of a list. If ``changes`` is false, there is no defect. If
    it is true, there is a defect on purpose: the second tensor of the list is negated in place.
    """

    def real(x, parts):
        """Return the sum of ``x`` and the tensors of ``parts``. If ``changes`` (argument of ``_list_changed``) is
        false, there is no defect. If it is true, there is a defect on purpose: the second tensor of ``parts`` is
        negated in place. The sum is right nevertheless.
        """
        total = x.clone()
        for i, part in enumerate(parts):
            if changes and i == 1:
                part.add_(0).mul_(-1)
                # The sign is turned back, so that only the list shows the change.
                total -= part
            else:
                total += part
        return total

    def make(ns):
        """Register the operator ``largest``, which sums ``x`` and the tensors of a list, with its fake implementation
        in the namespace ``ns``. Return the op that ``sl.adopt`` makes of it.
        """
        library = foreign(ns, "largest(Tensor x, Tensor[] parts) -> Tensor", real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{ns}::largest", lambda x, parts: torch.empty_like(x), lib=library)
        return _declared(ns, "largest")

    return make


def _list_kept(op):
    """Return whether a call of ``op`` leaves the tensors of its list argument unchanged."""
    parts = [randn(2, 3, seed=i) for i in range(3)]
    before = [p.clone() for p in parts]
    op.overload(randn(2, 3), parts)
    return close(parts, before)


lists(
    "second tensor of a list negated in place",
    "the schema says that nothing is written to",
    _list_changed(True),
    _list_changed(False),
    _list_kept,
)


def windows(ns):
    """Declare the op ``windows`` in the namespace ``ns`` and return it. Its reference returns every second row of
    ``x``, beginning with the first.
    """

    @sl.op(f"{ns}::windows", dims={"m": "(n + 1) // 2"})
    def windows(x: M) -> Float[Tensor, "m c"]:
        """Return every second row of ``x``, beginning with the first. Kernels of the op are compared with this
        reference.
        """
        return x[::2]

    return windows


outputs(
    "last of an odd number of rows not written",
    "n // 2 rows are written, and memory that was not initialised follows",
    of(windows, kernel(lambda x, *, out: out[: len(x) // 2].copy_(x[: len(x) // 2 * 2 : 2]))),
    of(windows, filled(lambda x: x[::2])),
    lambda op: _filled_with_seven(op),
)


def _filled_with_seven(op):
    """Return whether ``op.out`` (``windows``) writes all rows of the output. The memory of the output is filled with 7
    before the call.
    """
    # New memory may happen to be zero, which would hide rows that are not written.
    memory = torch.full((3, 2), 7.0)
    x = uniform(5, 2)
    with torch.no_grad():
        op.out(x, out=memory)
    return close(memory, x[::2])
