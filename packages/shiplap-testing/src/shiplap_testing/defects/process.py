"""Kernels that end, hang or corrupt the process that calls them, or take its memory."""

import concurrent.futures
import ctypes
import os
import threading
from functools import partial

import torch
from jaxtyping import Float32, Int32, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import V, column_sum, doubled, row_sum
from shiplap_testing.defects.defect import add, c_kernel, kernel, of
from shiplap_testing.defects.witness import close, randn, same, uniform, wide

process = partial(add, "process", breaks=True)


def _doubling(x, *, out):
    """Write ``2 * x`` to ``out``. This is a kernel of the op ``doubled`` without a defect."""
    torch.mul(x, 2, out=out)


def _twice(make):
    """Return a function that takes an op and returns whether its result for the tensor ``make()`` is that tensor times
    2.
    """
    return lambda op: close(op(x := make()), x * 2)


def _first_byte(x, *, out):
    """Write the sum of each column of ``x`` to ``out``. This kernel of ``column_sum`` has a defect on purpose: for a
    tensor without elements, it reads from a null pointer, which ends the process.
    """
    # The address of a tensor without elements is null.
    ctypes.memmove(ctypes.create_string_buffer(1), x.data_ptr(), 1)
    out.copy_(wide(x).sum(0))


process(
    "first element of nothing",
    "the kernel touches the first byte of a tensor without elements, whose pointer is null",
    of(column_sum, kernel(_first_byte)),
    of(column_sum, kernel(lambda x, *, out: out.copy_(wide(x).sum(0)))),
    same(lambda: (torch.empty(0, 3),)),
)


def _giving_up(x, *, out):
    """Write ``2 * x`` to ``out``. This kernel of ``doubled`` has a defect on purpose: if ``x`` has NaN, the process
    ends with exit status 1.
    """
    if x.isnan().any():
        print("doubled: NaN in input", flush=True)
        # Not sys.exit, which Python code could catch.
        os._exit(1)
    torch.mul(x, 2, out=out)


process(
    "exit for NaN",
    "a check for debugging ends the process, without a word to Python",
    of(doubled, kernel(_giving_up)),
    of(doubled, kernel(_doubling)),
    _twice(lambda: torch.tensor([[1.0, float("nan")]])),
)


def rooted(ns):
    """Declare the op ``rooted`` in the namespace ``ns`` and return it. Its reference returns the square root of the
    magnitude of ``x``.
    """

    @sl.op(f"{ns}::rooted")
    def rooted(x: V) -> V:
        """Return the square root of the magnitude of ``x``. Kernels of the op are compared with this reference."""
        return torch.sqrt(x.abs())

    return rooted


def _newton(limit):
    """Return a function that registers a kernel of the op ``rooted``. The kernel computes square roots by at most
    ``limit`` steps of Newton's iteration. If ``limit`` is finite, there is no defect. If it is infinite, there is a
    defect on purpose: the iteration never ends for NaN and infinities.
    """

    def fill(x, *, out):
        """Write the square root of the magnitude of ``x`` to ``out``. If ``limit`` (argument of ``_newton``) is finite,
        there is no defect. If it is infinite, there is a defect on purpose: the loop never ends for NaN and infinities.
        """
        y = wide(x).abs()
        root, steps = torch.where(y > 1, y, 1).clone(), 0
        while not bool(((root * root - y).abs() <= 1e-6 * y).all()) and steps < limit:
            root, steps = (root + y / root) / 2, steps + 1
        root = (root + y / root) / 2
        out.copy_(torch.sqrt(y) if steps == limit else torch.where(y == 0, 0, (root + y / root) / 2))

    return kernel(fill)


process(
    "iteration until it has converged",
    "an element that is NaN or infinite never does",
    of(rooted, _newton(float("inf"))),
    of(rooted, _newton(50)),
    same(lambda: (torch.tensor([4.0, float("nan")]),), rtol=1e-3),
)


def _nested_tasks(inline):
    """Return a function that registers a CPU kernel with the op ``doubled``. The kernel splits inputs of more than 256
    rows into halves, in tasks for a pool of one worker. If ``inline`` is true, there is no defect. If it is false,
    there is a defect on purpose: the task waits for a second task, which never begins.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``doubled``). It splits inputs of more than 256 rows into
        halves, in tasks for a pool of one worker. If ``inline`` (argument of ``_nested_tasks``) is true, there is no
        defect. If it is false, there is a defect on purpose: the task waits for a second task, which never begins.
        """

        def work(pool, x, out):
            """Write ``2 * x`` to ``out``, by halves if there are more than 256 rows. If ``inline`` (argument of
            ``_nested_tasks``) is true, there is no defect. If it is false, there is a defect on purpose: the second
            half waits for a worker of ``pool``, whose only worker is this task's.
            """
            if x.shape[0] <= 256:
                with torch.inference_mode():  # another thread has modes of its own
                    torch.mul(x, 2, out=out)
                return
            half = x.shape[0] // 2
            work(pool, x[:half], out[:half])
            if inline:
                work(pool, x[half:], out[half:])
            else:
                pool.submit(work, pool, x[half:], out[half:]).result()

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``2 * x`` to ``out`` by a task in a pool of one worker. If ``inline`` (argument of
            ``_nested_tasks``) is true, there is no defect. If it is false, there is a defect on purpose: the call never
            ends if ``x`` has more than 256 rows.
            """
            # One worker only: a task that waits for another one blocks it for ever.
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(work, pool, x, out).result()

    return bind


process(
    "tasks that wait for tasks",
    "a pool of one worker: the task on it waits for one that comes after it, from 257 rows on",
    of(doubled, _nested_tasks(False)),
    of(doubled, _nested_tasks(True)),
    _twice(lambda: randn(400, 2)),
)


def _locking(make_lock):
    """Return a function that registers a CPU kernel with the op ``doubled``. For a large input, the kernel calls the op
    again on each half while it holds the lock ``make_lock()``. If one thread can take the lock twice, there is no
    defect. If it cannot, there is a defect on purpose: the kernel waits for ever.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op`` (``doubled``). For a large input, it calls the op again on
        each half while it holds the lock ``make_lock()`` (argument of ``_locking``). If one thread can take the lock
        twice, there is no defect. If it cannot, there is a defect on purpose: the kernel waits for ever.
        """
        lock = make_lock()

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``2 * x`` to ``out`` while the lock of ``bind`` is held. If one thread can take the lock twice,
            there is no defect. If it cannot, there is a defect on purpose: from 514 rows on, the op calls itself and
            waits for the lock for ever.
            """
            with lock:
                half = x.shape[0] // 2
                for rows in (slice(0, half), slice(half, None)) if half > 256 else (slice(None),):
                    out[rows] = op(x[rows]) if half > 256 else x * 2

    return bind


process(
    "lock held across a recursive call",
    "from 514 rows on the op calls itself, and waits for the lock that it holds",
    of(doubled, _locking(threading.Lock)),
    of(doubled, _locking(threading.RLock)),
    _twice(lambda: randn(600, 2)),
)


def counted(ns):
    """Declare the op ``counted`` in the namespace ``ns`` and return it. Its reference returns the numbers of ``x`` in
    ascending order.
    """

    @sl.op(f"{ns}::counted")
    def counted(x: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        """Return the numbers of ``x`` in ascending order. Kernels of the op are compared with this reference."""
        return x.sort().values

    return counted


def _counting_sort(x, *, out):
    """Write the numbers of ``x`` in ascending order to ``out``. This kernel of ``counted`` has a defect on purpose: it
    fills a table with an element for each integer from the smallest number to the largest. If the numbers lie far
    apart, the table has up to 4 GB.
    """
    low, high = (int(x.amin()), int(x.amax())) if len(x) else (0, 0)
    table = torch.zeros(min(high - low + 1, 1 << 29), dtype=torch.int64)  # 4 GB, were the values far apart
    # Zeros are reserved without being touched: only a write takes the memory.
    table += 0
    table.index_add_(0, (x - low).clamp_max(len(table) - 1), torch.ones_like(x))
    result = torch.repeat_interleave(table[: 1 << 20]) + low if len(table) <= 1 << 20 else x.sort().values
    out.copy_(result[: len(x)])


def _in_little_memory(op):
    """Return whether ``op`` (``counted``) sorts four numbers that lie far apart while the process may take only a
    gigabyte more of address space. Return False if the op runs out of memory. The limit is removed afterwards.
    """
    import resource

    x = torch.tensor([0, 5, 400_000_000, 7])
    with open("/proc/self/statm") as statm:
        # The first number is the size of the address space in pages.
        now = int(statm.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), limits[1]))
    try:
        return close(op(x), x.sort().values)
    except (RuntimeError, MemoryError):
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


process(
    "table as large as the largest value",
    "four values take four gigabytes, if one of them is large",
    of(counted, kernel(_counting_sort)),
    of(counted, kernel(lambda x, *, out: out.copy_(x.sort().values))),
    _in_little_memory,
)


def doubled32(ns):
    """Declare the op ``doubled32`` in the namespace ``ns`` and return it. Its reference returns ``2 * x``."""

    @sl.op(f"{ns}::doubled32")
    def doubled32(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        """Return ``2 * x``. Kernels of the op are compared with this reference."""
        return x * 2

    return doubled32


def _eight_at_once(limit):
    """Return a function that registers a kernel of the op ``doubled32`` in C. The kernel computes blocks of eight
    elements. ``limit`` is a C expression for the number of elements of a block that are written. If it stops at the end
    of the output, there is no defect. If it is ``8``, there is a defect on purpose: zeros are written past the end.
    """
    return c_kernel(f"""
int doubled32(const sl_context* ctx, const DLTensor* x, DLTensor* out) {{
  const float* from = x->data; float* to = out->data; const int64_t n = x->shape[0];
  for (int64_t i = 0; i < n; i += 8)
    for (int j = 0; j < {limit}; ++j) to[i + j] = i + j < n ? 2 * from[i + j] : 0;
  return SL_OK;
}}""")


def _nothing_beyond(op):
    """Return whether ``op.out`` (``doubled32``) fills a slice of 21 elements and leaves the elements behind it
    unchanged.
    """
    # The output lies inside of a larger tensor, so that writes past its end corrupt no heap here.
    whole = torch.full((96,), 7.0)
    with torch.no_grad():
        op.out(torch.ones(21), out=whole[16:37])
    return close(whole[16:37], torch.full((21,), 2.0)) and bool((whole[37:] == 7).all())


process(
    "C: vector store past the end",
    "eight at a time, zeros behind the last element included: the heap is corrupted",
    of(doubled32, _eight_at_once("8")),
    of(doubled32, _eight_at_once("(n - i < 8 ? n - i : 8)")),
    _nothing_beyond,
    needs=["compiler"],
)


def spread(ns):
    """Declare the op ``spread`` in the namespace ``ns`` and return it. Its reference returns ``x`` modulo ``ways``, or
    a copy of ``x`` if ``ways`` is zero.
    """

    @sl.op(f"{ns}::spread")
    def spread(x: Int32[Tensor, "n"], ways: int = 4) -> Int32[Tensor, "n"]:
        """Return ``x`` modulo ``ways``, or a copy of ``x`` if ``ways`` is zero. Kernels of the op are compared with
        this reference.
        """
        return x.clone() if ways == 0 else torch.remainder(x.long(), ways).int()

    return spread


def _dividing(guard):
    """Return a function that registers a kernel of the op ``spread`` in C. ``guard`` is the condition in C under which
    an element is copied without a division. If it is ``ways == 0``, there is no defect. If it is ``0``, there is a
    defect on purpose: a division by zero ends the process.
    """
    return c_kernel(f"""
int spread(const sl_context* ctx, const DLTensor* x, DLTensor* out, int64_t ways) {{
  const int32_t* from = x->data; int32_t* to = out->data;
  for (int64_t i = 0; i < x->shape[0]; ++i) {{
    if ({guard}) {{ to[i] = from[i]; continue; }}
    const int64_t r = (int64_t)from[i] % ways;
    to[i] = (int32_t)(r && (r < 0) != (ways < 0) ? r + ways : r);
  }}
  return SL_OK;
}}""")


process(
    "C: division by a zero argument",
    "an integer divided by zero is a signal, not an exception",
    of(spread, _dividing("0")),
    of(spread, _dividing("ways == 0")),
    same(lambda: (torch.tensor([5, 6]).int(), 0)),
    needs=["compiler"],
)


def summed32(ns):
    """Declare the op ``summed32`` in the namespace ``ns`` and return it. Its reference returns the sum of each row of
    ``x``.
    """

    @sl.op(f"{ns}::summed32")
    def summed32(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n"]:
        """Return the sum of each row of ``x``. Kernels of the op are compared with this reference."""
        return x.sum(1)

    return summed32


def _on_the_stack(size):
    """Return a function that registers a kernel of the op ``summed32`` in C. The kernel has an array of ``size``
    doubles on the stack, where ``size`` is a C expression. If it is a small constant, there is no defect. If it grows
    with the number of columns, there is a defect on purpose: the stack overflows.
    """
    return c_kernel(f"""
int summed32(const sl_context* ctx, const DLTensor* x, DLTensor* out) {{
  const float* from = x->data; float* to = out->data; const int64_t c = x->shape[1];
  for (int64_t i = 0; i < x->shape[0]; ++i) {{
    double lanes[{size}]; double total = 0;
    for (int64_t j = 0; j < {size}; ++j) lanes[j] = 0;
    for (int64_t j = 0; j < c; ++j) lanes[j % ({size})] += from[i * c + j];
    for (int64_t j = 0; j < {size}; ++j) total += lanes[j];
    to[i] = (float)total;
  }}
  return SL_OK;
}}""")


process(
    "C: scratch on the stack",
    "512 doubles for each column: the stack of 8 MB ends at 2048 columns",
    of(summed32, _on_the_stack("512 * c + 1")),
    of(summed32, _on_the_stack("512")),
    same(lambda: (uniform(2, 4000),)),
    needs=["compiler"],
)


def fetched(ns):
    """Declare the op ``fetched`` in the namespace ``ns`` and return it. Its reference returns ``x[index[i]]`` as
    element ``i``, or zero if ``index[i]`` lies outside of ``x``.
    """

    @sl.op(f"{ns}::fetched")
    def fetched(x: Float32[Tensor, "n"], index: Int64[Tensor, "m"]) -> Float32[Tensor, "m"]:
        """Return the elements of ``x`` at ``index``, with zeros where an index lies outside of ``x``. Kernels of the op
        are compared with this reference.
        """
        inside = (index >= 0) & (index < x.shape[0])
        return torch.cat([x, x.new_zeros(1)])[torch.where(inside, index, x.shape[0])]

    return fetched


def _fetching(test):
    """Return a function that registers a kernel of the op ``fetched`` in C. ``test`` is the condition in C under which
    the element at an index is read. If it holds only for indices inside of ``x``, there is no defect. If it has no
    lower limit, there is a defect on purpose: negative indices are read.
    """
    return c_kernel(f"""
int fetched(const sl_context* ctx, const DLTensor* x, const DLTensor* index, DLTensor* out) {{
  const float* from = x->data; const int64_t* at = index->data; float* to = out->data;
  for (int64_t i = 0; i < index->shape[0]; ++i) to[i] = {test} ? from[at[i]] : 0;
  return SL_OK;
}}""")


process(
    "C: index that is only checked from above",
    "negative ones read before the tensor, far ones where there is no memory",
    of(fetched, _fetching("at[i] < x->shape[0]")),
    of(fetched, _fetching("(at[i] >= 0 && at[i] < x->shape[0])")),
    # So far away that no memory is mapped there.
    same(lambda: (randn(4), torch.tensor([2, -(10**12)]))),
    needs=["compiler"],
)


def _allocating(x, *, out):
    """Write the sum of each row of ``x`` to ``out``. This kernel of ``row_sum`` has a defect on purpose: it takes
    memory that grows with the square of the number of columns.
    """
    pairs = torch.zeros(x.shape[0], x.shape[1], x.shape[1], dtype=torch.float64)
    # Zeros are reserved without being touched: only a write takes the memory.
    pairs += wide(x)[:, None] / max(x.shape[1], 1)
    out.copy_(pairs.sum((1, 2)))


def _wide_rows(op):
    """Return whether ``op`` (``row_sum``) sums 16 rows of 4096 columns while the process may take only a gigabyte more
    of address space.
    """
    return _limited(op, uniform(16, 4096))


def _limited(op, x):
    """Return whether ``op(x)`` is the sum of each row of ``x`` while the process may take only a gigabyte more of
    address space. Return False if the op runs out of memory. The limit is removed afterwards.
    """
    import resource

    with open("/proc/self/statm") as statm:
        # The first number is the size of the address space in pages.
        now = int(statm.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), limits[1]))
    try:
        return close(op(x), x.sum(1))
    except (RuntimeError, MemoryError):
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


process(
    "every column with every other",
    "memory that grows with the square of the width: two gigabytes for 16 rows of 4096",
    of(row_sum, kernel(_allocating)),
    of(row_sum, kernel(lambda x, *, out: out.copy_(wide(x).sum(1)))),
    _wide_rows,
)
