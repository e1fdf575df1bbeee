"""``sort_table`` in Triton: rows of each part by the Gray rank of their hits.

Few rows in parts of few taps are sorted by one program a part. More of them, in parts with few ranks, are placed by one
counting sort: a histogram of each tile of rows, running sums, then each row to its place. Somewhat more rows are sorted
digit by digit (``digits.py``), and the rest by ``torch.sort``, which is stable too. Addresses are integer offsets into
one workspace. The sort is a part of a launch program, so that C++ launches it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shiplap.plugin_api import TritonLaunches, launch_program
from shiplap_sparse3d.cuda.digits import BITS, PAGE, by_digits, count_digit, count_digit_page, digit_numbers
from shiplap_sparse3d.cuda.sort_form import TableSort

__all__ = [
    "SORT_TABLE",
    "TAP_BLOCKS",
    "TableSort",
    "add_row_sort",
    "add_sort_keys",
    "scratch_bytes",
    "sort_numbers",
    "store_key",
]

TILE = tl.constexpr(128)  # rows of a histogram; a row finds its place in the tile by comparing with all of them
ALONE_TAPS, ALONE_ROWS = 4, 2048  # a part up to here has one program: beyond, it takes longer than a launch
COUNTED_TAPS = 9  # parts up to here are counted: 512 ranks
COUNTED_ROWS = 1 << 17  # tables up to here: beyond, the histograms outweigh the rows
MASK_ROWS = tl.constexpr(64)  # ROWS_PER_MASK


@triton.jit
def _load_hits(table, row, m, k, part, SIZE: tl.constexpr, TAPS: tl.constexpr):
    """Return the numbers ``[rows, taps]`` of the neighbour table in the rows ``row`` and the columns of a part (a group
    of ``SIZE`` taps). Return also an integer with a bit for each number that is not -1, and a mask of the elements that
    lie inside the table.
    """
    v = tl.arange(0, TAPS)
    tap = part * SIZE + v
    inside = (row < m)[:, None] & ((v < SIZE) & (tap < k))[None, :]
    entry = tl.load(table + row.to(tl.int64)[:, None] * k + tap[None, :], mask=inside, other=-1)
    return entry, tl.sum((entry >= 0).to(tl.int32) << v[None, :], 1), inside


@triton.jit
def _sort_key(hits, SIZE: tl.constexpr):
    """Return the sort key of the bits ``hits``, one for each column of the neighbour table in which a row has a
    neighbour. Ascending keys are descending ranks of a Gray code. Rows that are near each other in this order have
    neighbours in similar columns, and rows without a neighbour come last.
    """
    rank = hits ^ (hits >> 1)  # the prefix XOR that undoes a Gray code
    rank ^= rank >> 2
    rank ^= rank >> 4
    rank ^= rank >> 8
    rank ^= rank >> 16
    return ((1 << SIZE) - 1) - rank


@triton.jit
def _store_key_bits(keys, place, key, inside, KEY: tl.constexpr):
    """Store each key as a number of ``KEY`` bits (16, 32 or 64) at index ``place`` behind the address ``keys``, where
    ``inside`` is true.
    """
    if KEY == 16:
        tl.store(keys.to(tl.int64).to(tl.pointer_type(tl.int16)) + place, key.to(tl.int16), mask=inside)
    elif KEY == 32:
        tl.store(keys.to(tl.int64).to(tl.pointer_type(tl.int32)) + place, key, mask=inside)
    else:
        tl.store(keys.to(tl.int64).to(tl.pointer_type(tl.int64)) + place, key, mask=inside)


@triton.jit
def store_key(
    keys,
    counts,
    masks,
    hits,
    row,
    m,
    part,
    run,
    runs,
    SIZE: tl.constexpr,
    KEY: tl.constexpr,
    BINS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Store the sort keys of rows with the bits ``hits``, one for each column with a neighbour, and count the keys for
    the sort that follows.

    If ``PAGE`` is not 0, a first digit of the keys is counted in pages of ``PAGE`` rows. Otherwise, if ``BINS`` is not
    0, the keys are counted in tiles of rows and the masks are cleared. If both are 0, a key includes the number of the
    part (group of columns) and that of the run of rows.
    """
    key, place = _sort_key(hits, SIZE), m.to(tl.int64) * part + row
    if PAGE:
        _store_key_bits(keys, place, key, row < m, KEY)
        page, pages, digit = row // PAGE, (m + PAGE - 1) // PAGE, key & (BINS - 1)
        # A program that has a whole page can count in its own line first.
        if row.shape[0] == PAGE:
            count_digit_page(counts, part, tl.min(page, 0), pages, digit, row < m, BINS)
        else:
            count_digit(counts, part, page, pages, digit, row < m, BINS)
    elif BINS:
        _store_key_bits(keys, place, key, row < m, KEY)
        tiles, blocks = (m + TILE - 1) // TILE, (m + MASK_ROWS - 1) // MASK_ROWS
        count = counts.to(tl.int64).to(tl.pointer_type(tl.int32))
        tl.atomic_add(count + (part * tiles + row // TILE).to(tl.int64) * BINS + key, 1, mask=row < m, sem="relaxed")
        block = masks + blocks.to(tl.int64) * part + row // MASK_ROWS
        tl.store(block, tl.zeros_like(row), mask=(row < m) & (row % MASK_ROWS == 0))
    else:
        # Part and run are the high bits, so that one sort keeps parts and runs apart.
        first = part * runs + row // run
        if KEY == 64:
            first, key = first.to(tl.int64), key.to(tl.int64)
        _store_key_bits(keys, place, (first << SIZE) | key, row < m, KEY)


@triton.jit(do_not_specialize=["keys", "counts", "m", "k", "run", "runs"])
def key_kernel(
    table,
    keys: tl.int64,
    counts: tl.int64,
    masks,
    m,
    k,
    run,
    runs,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    KEY: tl.constexpr,
    BINS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Write the sort keys of ``ROWS`` rows for one part, and count them for the sort that follows. A part is a group of
    ``SIZE`` columns of the neighbour ``table`` that is sorted separately.
    """
    part, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _, hits, _ = _load_hits(table, row, m, k, part, SIZE, TAPS)
    store_key(keys, counts, masks, hits, row, m, part, run, runs, SIZE, KEY, BINS, PAGE)


@triton.jit(do_not_specialize=["m", "k"])
def alone_kernel(
    table,
    columns,
    order,
    masks,
    m,
    k,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sort all rows of one part of the neighbour ``table`` in one program, ``ROWS`` at a time. A part is a group of
    ``SIZE`` columns that is sorted separately.

    Write the sorted rows to ``columns``, the row at each place to ``order``, and the columns in which any row of each
    block of 64 has a neighbour to ``masks``.
    """
    part, bins = tl.program_id(0), tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for first in range(0, m, ROWS):
        row = first + tl.arange(0, ROWS)
        _, hits, _ = _load_hits(table, row, m, k, part, SIZE, TAPS)
        total += tl.sum(((_sort_key(hits, SIZE)[:, None] == bins[None, :]) & (row < m)[:, None]).to(tl.int32), 0)
    # The rows are read twice: first for the counts, now for the places.
    begin = tl.cumsum(total, 0) - total
    before, tap = begin, (part * SIZE + tl.arange(0, TAPS)).to(tl.int64)
    for first in range(0, m, ROWS):
        row = first + tl.arange(0, ROWS)
        entry, hits, inside = _load_hits(table, row, m, k, part, SIZE, TAPS)
        same = ((_sort_key(hits, SIZE)[:, None] == bins[None, :]) & (row < m)[:, None]).to(tl.int32)
        place = tl.sum(same * (tl.cumsum(same, 0) - 1 + before[None, :]), 1)
        before += tl.sum(same, 0)
        tl.store(columns + tap[None, :] * m + place[:, None], entry, mask=inside)
        tl.store(order + part.to(tl.int64) * m + place, row, mask=row < m)
    # The hits of a rank are known, so masks need no second look at the table.
    rank = ((1 << SIZE) - 1) - bins
    hit = rank ^ (rank >> 1)
    blocks = (m + MASK_ROWS - 1) // MASK_ROWS
    for first in range(0, blocks, ROWS // MASK_ROWS):
        block = first + tl.arange(0, ROWS // MASK_ROWS)
        within = (begin[None, :] < (block * MASK_ROWS + MASK_ROWS)[:, None]) & (total > 0)[None, :]
        within = within & ((begin + total)[None, :] > (block * MASK_ROWS)[:, None])
        mask = tl.zeros_like(block)
        for v in tl.static_range(SIZE):
            mask |= tl.max(tl.where(within, (hit >> v)[None, :] & 1, 0), 1) << v
        tl.store(masks + part.to(tl.int64) * blocks + block, mask, mask=block < blocks)


@triton.jit(do_not_specialize=["counts", "totals", "tiles"])
def scan_kernel(
    counts: tl.int64, totals: tl.int64, tiles, BINS: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr
):
    """Replace the histogram of the keys of each tile (128 rows) by the sum of the histograms of the tiles before it.
    Write the sum over all tiles to ``totals``.
    """
    counts = counts.to(tl.int64).to(tl.pointer_type(tl.int32))
    totals = totals.to(tl.int64).to(tl.pointer_type(tl.int32))
    part = tl.program_id(1)
    bins = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    before = tl.zeros([CHUNK], tl.int32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        at = counts + (part * tiles + tile).to(tl.int64)[:, None] * BINS + bins[None, :]
        inside = (tile < tiles)[:, None] & (bins < BINS)[None, :]
        count = tl.load(at, mask=inside, other=0)
        # A sum without the tile itself is where the keys of the tile begin.
        tl.store(at, tl.cumsum(count, 0) - count + before[None, :], mask=inside)
        before += tl.sum(count, 0)
    tl.store(totals + part * BINS + bins, before, mask=bins < BINS)


@triton.jit(do_not_specialize=["keys", "counts", "totals", "m", "k"])
def place_kernel(
    table,
    keys: tl.int64,
    counts: tl.int64,
    totals: tl.int64,
    columns,
    order,
    masks,
    m,
    k,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the rows of one tile (128 rows) of the neighbour ``table`` to their places in the sorted order. These are
    behind all rows with smaller keys and behind earlier rows with equal keys.

    Write the row at each place to ``order``, and the columns in which any row of each block of 64 has a neighbour to
    ``masks``.
    """
    counts = counts.to(tl.int64).to(tl.pointer_type(tl.int32))
    totals = totals.to(tl.int64).to(tl.pointer_type(tl.int32))
    tile, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, TILE)
    row = tile * TILE + lane
    mine = keys.to(tl.int64).to(tl.pointer_type(tl.int16)) + part.to(tl.int64) * m
    key = tl.load(mine + row, mask=row < m, other=0).to(tl.int32)
    place = tl.load(counts + (part * tl.num_programs(0) + tile).to(tl.int64) * BINS + key, mask=row < m, other=0)
    total = tl.load(totals + part * BINS + tl.arange(0, BINS))
    # The start of this key over all tiles; earlier tiles are counted in ``place``.
    place += tl.gather(tl.cumsum(total, 0) - total, key, 0)
    for first in range(0, TILE, CHUNK):
        other = first + tl.arange(0, CHUNK)
        theirs = tl.load(mine + tile * TILE + other, mask=tile * TILE + other < m, other=-1).to(tl.int32)
        # Earlier rows of this tile with the same key.
        place += tl.sum(((theirs[None, :] == key[:, None]) & (other[None, :] < lane[:, None])).to(tl.int32), 1)
    entry, hits, inside = _load_hits(table, row, m, k, part, SIZE, TAPS)
    tap = part * SIZE + tl.arange(0, TAPS)
    tl.store(columns + tap.to(tl.int64)[None, :] * m + place[:, None], entry, mask=inside)
    tl.store(order + part.to(tl.int64) * m + place, row, mask=row < m)
    blocks = (m + MASK_ROWS - 1) // MASK_ROWS
    # The rows of one mask may be in different programs.
    tl.atomic_or(masks + part.to(tl.int64) * blocks + place // MASK_ROWS, hits, mask=hits != 0, sem="relaxed")


@triton.jit
def ordered_rows(sorted_rows, order, place, part, m, ORDERED: tl.constexpr):
    """Return the rows at the positions ``place`` in the sorted order of a part (a group of the neighbour table's
    columns that is sorted separately). If ``ORDERED`` is true, they are read from ``order``. Otherwise they are read
    from ``sorted_rows``, the result of torch's sort, and written to ``order`` as int32.
    """
    first = part.to(tl.int64) * m
    if ORDERED:
        row = tl.load(order + first + place, mask=place < m, other=0)
    else:
        sorted_rows = sorted_rows.to(tl.int64).to(tl.pointer_type(tl.int64))
        # Rows are numbered through all parts there.
        row = (tl.load(sorted_rows + first + place, mask=place < m, other=0) - first).to(tl.int32)
        tl.store(order + first + place, row, mask=place < m)
    return row


@triton.jit(do_not_specialize=["sorted_rows", "m", "k"])
def gather_kernel(
    table,
    sorted_rows: tl.int64,
    columns,
    order,
    masks,
    m,
    k,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """Write a block of 64 sorted rows of the neighbour ``table`` to ``columns``, for one part (a group of columns that
    is sorted separately). Write the columns in which any of these rows has a neighbour to ``masks``. If ``ORDERED`` is
    false, write the order of the rows to ``order`` as int32.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    place = block * MASK_ROWS + tl.arange(0, MASK_ROWS)
    # Places behind the last row read row m below, which is out of range and hits nothing.
    row = ordered_rows(sorted_rows, order, place, part, m, ORDERED)
    entry, _, inside = _load_hits(table, tl.where(place < m, row, m), m, k, part, SIZE, TAPS)
    v = tl.arange(0, TAPS)
    tl.store(columns + (part * SIZE + v).to(tl.int64)[None, :] * m + place[:, None], entry, mask=inside)
    any_row = tl.max((entry >= 0).to(tl.int32), 0)
    # A sum of distinct powers of two is a bit mask.
    tl.store(masks + part.to(tl.int64) * tl.num_programs(0) + block, tl.sum(any_row << v, 0))


def sort_numbers(sort: TableSort) -> dict[str, str]:
    """Return the integers that a launch program (a sequence of kernel launches) computes in each call for the sort of
    one neighbour table, as a dict from name to dim expression. Later expressions use the names of earlier ones, so the
    program must keep the order. Each name begins with ``sort.prefix``.

    The table is ``int32 [rows, k]``. Its columns are cut into ``parts`` groups, each of which is sorted separately. The
    expressions use ``k``, ``run`` (the number of rows of a run, within which rows are sorted) and the names in
    ``sort.rows`` and ``sort.parts``. The program that takes them must define these names; otherwise it raises
    ``SL618`` when it is bound.

    * ``size``: the columns of a part. ``taps``: ``size`` rounded up to a power of two. ``runs``: the runs of a ranked
      sort, otherwise 1.
    * ``alone``, ``counted``, ``ranked``, ``digits``: 1 if the sort of this name is used, otherwise 0. Exactly one of
      the first three is 1, unless the table has no rows or no parts: then all are 0. ``digits`` is 1 only if ``ranked``
      is.
    * ``passes``, ``width``, ``tiles``, ``lines``: the values of :func:`digit_numbers`.
    * ``ranks``: the counts of a line of a counted sort. ``bins``: those of the sort that is used, or 0.
    * ``key``: the bits of a key: 16, 32 or 64, or 0 if the sort stores no keys. ``long`` and ``bits`` are steps to it.
    * ``page``: the rows of a page of a sort by digits, or 0.
    * ``zeros``: the bytes of all histograms, which must be zero at the start.
    * ``counts``, ``totals``, ``keys``: offsets in bytes in the workspace, ascending. ``counts`` is ``sort.scratch``.
    """
    p, rows, parts = sort.prefix, sort.rows, sort.parts
    live, spread = f"{rows} > 0 and {parts} > 0", f"pow2ceil({parts} * {p}runs)"
    return {
        f"{p}size": f"cdiv(k, max({parts}, 1))",
        f"{p}taps": f"pow2ceil({p}size)",
        f"{p}alone": f"{live} and {rows} <= min({ALONE_ROWS}, run) and {p}size <= {ALONE_TAPS}",
        f"{p}counted": f"{live} and {p}alone == 0 and {rows} <= min({COUNTED_ROWS}, run) and {p}size <= {COUNTED_TAPS}",
        f"{p}ranked": f"{live} and {p}alone + {p}counted == 0",
        **digit_numbers(sort, TILE.value),
        f"{p}ranks": f"{p}counted * max(2, pow2(min({p}size, {COUNTED_TAPS})))",
        f"{p}bins": f"where({p}digits == 1, pow2(min({p}width, {BITS})), {p}ranks)",
        f"{p}zeros": f"4 * {parts} * {p}bins * {p}lines",
        # The other ways take tables of a single run only.
        f"{p}runs": f"where({p}ranked == 1, cdiv({rows}, run), 1)",
        # The narrowest keys that hold part, run and rank: a radix sort takes fewer passes over them.
        f"{p}long": f"where({spread} <= {2**31} // pow2({p}size), 32, 64)",
        f"{p}bits": f"where({spread} <= {2**15} // pow2({p}size), 16, {p}long)",
        f"{p}page": f"{p}digits * {PAGE}",
        f"{p}key": f"where({p}counted == 1, 16, where({p}digits == 1, 32, {p}ranked * {p}bits))",
        f"{p}counts": sort.scratch,
        f"{p}totals": f"{p}counts + {p}zeros",
        f"{p}keys": f"{p}totals + 4 * {parts} * {p}bins",
    }


def scratch_bytes(rows: str, parts: str) -> str:
    """Return an expression for the largest number of bytes that any sort of ``rows`` rows in ``parts`` parts (groups of
    columns) needs. It is rounded up to whole 64-bit words, since keys may follow.
    """
    return f"({parts} * (24 * {rows} + min(8 * {rows}, {1 << 21}) + 16384) + 7) // 8 * 8"


def add_sort_keys(program: TritonLaunches, sort: TableSort) -> TritonLaunches:
    """Return ``program``, a sequence of kernel launches, plus the launches that clear the counts of a sort and write
    the keys of the rows of its neighbour table.
    """
    p, rows = sort.prefix, f"max(64, 2048 // {sort.prefix}taps)"
    return program.fill(f"{p}counts", f"{p}zeros", when=f"{p}zeros > 0").then(
        key_kernel,
        grid=(f"cdiv({sort.rows}, {rows})", sort.parts),
        when=f"{p}key > 0",
        arguments={
            **sort.given,
            "masks": f"masks{sort.outputs}",
            "m": sort.rows,
            "runs": f"{p}runs",
            "SIZE": f"{p}size",
            "TAPS": f"{p}taps",
            "ROWS": rows,
            "KEY": f"{p}key",
            "BINS": f"{p}bins",
            "PAGE": f"{p}page",
        },
        constants={"num_warps": 4},
        scratch={**sort.placed, "keys": ("int64", f"{p}keys"), "counts": ("int64", f"{p}counts")},
    )


def add_row_sort(program: TritonLaunches, sort: TableSort) -> TritonLaunches:
    """Return ``program``, a sequence of kernel launches, plus the launches that sort a neighbour table whose keys
    exist. They write its sorted columns, the order of its rows, and for each block of 64 rows a mask of the columns in
    which any row has a neighbour.
    """
    p, rows, parts = sort.prefix, sort.rows, sort.parts
    outputs = {name: f"{name}{sort.outputs}" for name in ("columns", "order", "masks")}
    common = {**sort.given, **outputs, "m": rows, "SIZE": f"{p}size", "TAPS": f"{p}taps"}
    few = {"BINS": f"max(2, pow2({p}size))", "ROWS": f"min(1024, max({MASK_ROWS.value}, pow2ceil({rows})))"}
    program = program.then(
        alone_kernel,
        grid=parts,
        when=f"{p}alone == 1",
        arguments={**common, **few},
        constants={"num_warps": 8},
        scratch=sort.placed,
    )
    places = {"counts": ("int64", f"{p}counts"), "totals": ("int64", f"{p}totals")}
    program = program.then(
        scan_kernel,
        grid=(f"{p}bins // min({p}bins, 16)", parts),
        when=f"{p}counted == 1",
        arguments={"tiles": f"{p}tiles", "BINS": f"{p}bins", "CHUNK": f"min({p}bins, 16)"},
        constants={"TILES": 64, "num_warps": 4},
        scratch=places,
    ).then(
        place_kernel,
        grid=(f"{p}tiles", parts),
        when=f"{p}counted == 1",
        arguments={**common, "BINS": f"{p}bins"},
        constants={"CHUNK": 32, "num_warps": 4},
        scratch={**sort.placed, **places, "keys": ("int64", f"{p}keys")},
    )
    program, count, origins = by_digits(program, sort), f"{parts} * {rows}", sort.origins
    values, many = f"{p}keys + 8 * {count}", f"{p}ranked > {p}digits"  # keys are 64 bits wide at most
    return program.sort(bits=f"{p}key", count=count, keys=f"{p}keys", values=values, rows=origins, when=many).then(
        gather_kernel,
        grid=(f"cdiv({rows}, {MASK_ROWS.value})", parts),
        when=f"{p}ranked == 1 and {sort.tableless} == 0",
        arguments={**common, "ORDERED": f"{p}digits"},
        constants={"num_warps": 4},
        scratch={**sort.placed, "sorted_rows": ("int64", origins)},
    )


_TABLE = TableSort("", "m", "parts", "table", "0")
SORT_TABLE = add_row_sort(add_sort_keys(launch_program(values=sort_numbers(_TABLE)), _TABLE), _TABLE)


@triton.jit(do_not_specialize=["parts", "b", "size"])
def tap_kernel(masks, blocks, counts, parts, b, size, BLOCK: tl.constexpr):
    """Write to ``blocks[tap]`` the numbers of the blocks of 64 sorted rows in which any row has a neighbour in column
    ``tap`` of the neighbour table, followed by zeros. Write how many these are to ``counts[tap]``.
    """
    tap, before = tl.program_id(0), 0
    part, bit = tap // size, tl.minimum(tap % size, 31)
    mine = blocks + tap.to(tl.int64) * b
    for first in range(0, b, BLOCK):
        block = first + tl.arange(0, BLOCK)
        mask = tl.load(masks + part.to(tl.int64) * b + block, mask=(block < b) & (part < parts), other=0)
        hit = (mask >> bit) & 1
        place = before + tl.cumsum(hit, 0) - hit  # of hits; of the others as many are before as are not there
        tl.store(mine + tl.where(hit > 0, place, b - 1 - (block - place)), tl.where(hit > 0, block, 0), mask=block < b)
        before += tl.sum(hit, 0)
    tl.store(counts + tap, before)


TAP_BLOCKS = launch_program(values={"size": "max(1, cdiv(taps, max(parts, 1)))"})
for _when, _block, _warps in (("b <= 512", 512, 4), ("b > 512", 4096, 16)):
    TAP_BLOCKS = TAP_BLOCKS.then(tap_kernel, grid="taps", when=_when, constants={"BLOCK": _block, "num_warps": _warps})
