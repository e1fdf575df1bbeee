"""A stable radix sort of keys of up to 31 bits in Triton, with one launch for each digit and little host time.

``torch.sort`` of some 100,000 keys keeps the host busy for longer than the device. Here a page of rows is sorted by a
digit in place, and each row moves behind those of smaller digits, and behind those of its own digit in earlier pages.
The counts of each digit in a page, and in a group of pages, are known by then: the kernel that writes a row to its
place counts its next digit there. Rows of a part that are not in one run are sorted run by run. The workspace has
counts of pages and then of groups, digit by digit, which start as zeros; then keys, keys, rows and rows of 32 bits,
since each pass reads one copy and writes the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shiplap.plugin_api import TritonLaunches
from shiplap_sparse3d.cuda.sort_form import TableSort

__all__ = ["BITS", "by_digits", "count_digit", "count_digit_page", "digit_numbers"]

BITS, PASSES = 9, 4  # of a digit at most; a part has at most 31 taps
ROWS = 1 << 18  # of all parts up to here: beyond, torch's kernels save more than its calls cost the host
PAGE = 512
GROUP = tl.constexpr(16)  # pages whose counts a program reads at once
WARPS = 4


@triton.jit
def _int_pointer(address):
    """Return the integer ``address`` as a pointer to int32."""
    return address.to(tl.int64).to(tl.pointer_type(tl.int32))


@triton.jit
def _counts_begin(counts, part, pages, BINS: tl.constexpr):
    """Return a pointer to the digit counts of a part (a group of the neighbour table's columns). There are ``BINS``
    counts for each page, the successive rows that one program moves. As many counts for each group of pages follow.
    """
    return _int_pointer(counts) + part * (pages + (pages + GROUP - 1) // GROUP) * BINS


@triton.jit
def count_digit(counts, part, page, pages, digit, inside, BINS: tl.constexpr):
    """Count ``digit``, a digit of a sort key, for each row where ``inside`` is true. It is counted for the row's
    ``page`` (the successive rows that one program moves) and for the page's group of pages.
    """
    # Each row is counted in the line of its page and in that of its group.
    mine = _counts_begin(counts, part, pages, BINS) + digit
    tl.atomic_add(mine + page * BINS, 1, mask=inside, sem="relaxed")
    tl.atomic_add(mine + (pages + page // GROUP) * BINS, 1, mask=inside, sem="relaxed")


@triton.jit
def count_digit_page(counts, part, page, pages, digit, inside, BINS: tl.constexpr):
    """Count the digits of all rows of one page, successive rows of which this program handles all. Then add the page's
    counts to those of its group of pages, once for each digit. Atomics on one address wait for each other, and some
    digits occur thousands of times in a group.
    """
    line, bins = _counts_begin(counts, part, pages, BINS), tl.arange(0, BINS)
    tl.atomic_add(line + page * BINS + digit, 1, mask=inside, sem="relaxed")
    # All counts of the page must have arrived before they are read.
    tl.debug_barrier()
    # The atomics changed the L2 cache. The L1 cache may hold old values.
    count = tl.load(line + page * BINS + bins, cache_modifier=".cg")
    tl.atomic_add(line + (pages + page // GROUP) * BINS + bins, count, mask=count > 0, sem="relaxed")


@triton.jit
def _add_counts(line, pages, target, count, wanted, BINS: tl.constexpr):
    """Add ``count`` to two counts of a digit, where ``wanted`` is true and ``target`` is not -1. They are the counts
    for a page of rows and for its group of pages. ``target`` encodes page and digit.
    """
    wanted = wanted & (target >= 0)
    count = tl.where(wanted, count, 0)  # the interpreter's atomics take every other value of a half for the next one
    tl.atomic_add(line + target, count, mask=wanted, sem="relaxed")
    group = line + (pages + target // BINS // GROUP) * BINS + target % BINS
    tl.atomic_add(group, count, mask=wanted, sem="relaxed")


@triton.jit
def _add_pairs(line, pages, target, count, BINS: tl.constexpr, SIZE: tl.constexpr):
    """Merge the counts of each pair of neighbours with the same ``target``, and return half as many targets and counts.
    A target encodes a page of rows and a digit. If the targets of a pair differ, the count of the second one is added
    to memory at once.
    """
    target, other = tl.split(tl.reshape(target, (SIZE // 2, 2)))
    count, others = tl.split(tl.reshape(count, (SIZE // 2, 2)))
    _add_counts(line, pages, other, others, target != other, BINS)
    return target, count + tl.where(target == other, others, 0)


@triton.jit
def count_digit_runs(counts, part, page, pages, digit, inside, BINS: tl.constexpr, SIZE: tl.constexpr):
    """Count the digits of the sort keys of ``SIZE`` rows, for each row's page (the successive rows that one program
    moves) and its group of pages. Up to eight neighbours with the same page and digit take one atomic addition.
    """
    line, target = _counts_begin(counts, part, pages, BINS), tl.where(inside, page * BINS + digit, -1)
    target, count = _add_pairs(line, pages, target, tl.full((SIZE,), 1, tl.int32), BINS, SIZE)
    target, count = _add_pairs(line, pages, target, count, BINS, SIZE // 2)
    target, count = _add_pairs(line, pages, target, count, BINS, SIZE // 4)
    _add_counts(line, pages, target, count, True, BINS)


@triton.jit
def _sum_counts(at, first, begin, before, end, bins, BINS: tl.constexpr):
    """Return two sums of counts for each digit over the ``GROUP`` lines from ``first`` on. A line has the counts of one
    page (successive rows) or of one group of pages. The first sum takes the lines from ``begin`` to ``before - 1``, and
    the second those from ``begin`` to ``end - 1``.
    """
    line = first + tl.arange(0, GROUP)
    inside = ((line >= begin) & (line < end))[:, None]
    count = tl.load(at + line[:, None] * BINS + bins[None, :], mask=inside, other=0)
    return tl.sum(tl.where((line < before)[:, None], count, 0), 0), tl.sum(count, 0)


@triton.jit(do_not_specialize=["keys", "rows", "to_keys", "to_rows", "counts", "next_counts", "m", "each"])
def digit_kernel(
    order,
    keys: tl.int64,
    rows: tl.int64,
    to_keys: tl.int64,
    to_rows: tl.int64,
    counts: tl.int64,
    next_counts: tl.int64,
    m,
    each,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Move the keys and rows of one page to their new positions by one digit of a stable radix sort.

    A page is ``PAGE`` successive rows, which one program moves. A group is ``GROUP`` successive pages, which have a sum
    of counts. A run is ``each`` successive pages, whose rows are sorted apart from those of other runs. If there are
    several runs, a run ends where a group ends. A row moves behind the rows of its run with smaller digits, and behind
    earlier rows with an equal digit.

    ``m`` is the number of rows. ``keys``, ``rows`` and ``counts`` are addresses of the data that the pass reads, and
    ``to_keys``, ``to_rows`` and ``next_counts`` are addresses of the data that it writes for the next pass. The digit
    has ``WIDTH`` bits from the bit ``SHIFT`` on. The first pass (``FIRST``) takes the positions as rows. The last pass
    (``LAST``) writes the rows to ``order`` and nothing else.
    """
    BINS: tl.constexpr = 1 << WIDTH
    page, part, lane, bins = tl.program_id(0), tl.program_id(1), tl.arange(0, PAGE), tl.arange(0, BINS)
    pages, begin = tl.num_programs(0), page // each * each
    mine, first_row = _int_pointer(keys) + part.to(tl.int64) * m, page * PAGE
    digit = (tl.load(mine + first_row + lane, mask=first_row + lane < m, other=0) >> SHIFT) & (BINS - 1)
    digit = tl.where(first_row + lane < m, digit, BINS)  # rows that there are not come last
    # The lane in the low bits makes the sort stable and leads back to the row.
    by_digit = tl.sort(digit * PAGE + lane)
    at = _counts_begin(counts, part, pages, BINS)
    group, end = page // GROUP, (tl.minimum(begin + each, pages) + GROUP - 1) // GROUP
    before, total = _sum_counts(at, group * GROUP, begin, page, page, bins, BINS)  # in this group
    # Totals come from the lines of groups, which include this group.
    total = tl.zeros_like(total)
    for first in range(begin // GROUP, end, GROUP):
        earlier, some = _sum_counts(at + pages * BINS, first, begin // GROUP, group, end, bins, BINS)
        before, total = before + earlier, total + some
    own = tl.load(at + page * BINS + bins)
    start = tl.cumsum(total - own, 0) - total + own + before  # less how many smaller digits there are in this page
    digit, source = by_digit // PAGE, first_row + by_digit % PAGE
    # The lane counts the rows of this page before it, of smaller and of equal digits.
    place = begin * PAGE + lane + tl.gather(start, tl.minimum(digit, BINS - 1), 0)
    inside, key = digit < BINS, tl.load(mine + source, mask=digit < BINS, other=0)
    if not FIRST:
        source = tl.load(_int_pointer(rows) + part.to(tl.int64) * m + source, mask=inside, other=0)
    if LAST:
        tl.store(order + part.to(tl.int64) * m + place, source, mask=inside)
    else:
        tl.store(_int_pointer(to_rows) + part.to(tl.int64) * m + place, source, mask=inside)
        tl.store(_int_pointer(to_keys) + part.to(tl.int64) * m + place, key, mask=inside)
        # Counted here, where key and place are at hand, so that the next pass needs no launch for it.
        next_digit = (key >> (SHIFT + WIDTH)) & (BINS - 1)
        count_digit_runs(next_counts, part, place // PAGE, pages, next_digit, inside, BINS, PAGE)


def digit_numbers(sort: TableSort, tile: int) -> dict[str, str]:
    """Return the values that a launch program (a sequence of kernel launches) computes in each call for a radix sort,
    as expressions by name. They use the value ``ranked``, which must exist.

    They state whether the sort goes by digits, and the number of digits and of their bits. They also give the number of
    pages and of the rows of the array of counts. A page is a run of rows that one program moves. Without digits it is a
    tile of ``tile`` rows.
    """
    p, rows, parts = sort.prefix, sort.rows, sort.parts
    # Runs have to end at the border of a group, or a group's counts would belong to two runs.
    fits = f"{parts} * {rows} <= {ROWS} and {rows} <= where(run % {PAGE * GROUP.value} == 0, {rows}, run)"
    lines = f"{p}tiles + cdiv({p}tiles, {GROUP.value})"
    return {
        f"{p}digits": f"{p}ranked == 1 and {fits}",
        f"{p}passes": f"{p}digits * cdiv({p}size, {BITS})",
        f"{p}width": f"cdiv({p}size, max({p}passes, 1))",
        f"{p}tiles": f"cdiv({rows}, where({p}digits == 1, {PAGE}, {tile}))",
        f"{p}lines": f"where({p}digits == 1, {p}passes * ({lines}), {p}tiles)",
    }


def by_digits(program: TritonLaunches, sort: TableSort) -> TritonLaunches:
    """Return ``program``, a sequence of kernel launches, plus the launches of a radix sort, one for each digit. They
    write the rows of each part (group of the neighbour table's columns), in the order of their keys, to the output
    ``order``.
    """
    p, parts, rows = sort.prefix, sort.parts, sort.rows
    each = f"4 * {parts} * {rows}"
    columns = [f"{p}keys + {turn} * {each}" for turn in range(4)]
    for turn in range(PASSES):
        # Passes alternate between the two copies of keys and rows.
        here, there = (columns[1::2], columns[::2]) if turn % 2 else (columns[::2], columns[1::2])
        counts = [
            f"{p}counts + {4 * at} * {parts} * {p}bins * ({p}tiles + cdiv({p}tiles, {GROUP.value}))"
            for at in (turn, turn + 1)
        ]
        names = ("keys", "rows", "to_keys", "to_rows", "counts", "next_counts")
        program = program.then(
            digit_kernel,
            grid=(f"{p}tiles", parts),
            when=f"{p}passes > {turn}",
            arguments={
                "order": f"order{sort.outputs}",
                "m": rows,
                "each": f"where({p}runs > 1, run // {PAGE}, max({p}tiles, 1))",
                "SHIFT": f"{turn} * {p}width",
                "WIDTH": f"{p}width",
                "LAST": f"{p}passes == {turn + 1}",
            },
            constants={"FIRST": turn == 0, "PAGE": PAGE, "num_warps": WARPS},
            scratch={name: ("int64", at) for name, at in zip(names, (*here, *there, *counts), strict=True)},
        )
    return program
