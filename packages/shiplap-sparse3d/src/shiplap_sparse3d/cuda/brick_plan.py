"""The launches of ``bricks.py`` in a program that makes a submanifold table.

The workspace begins with the list of rows, the slots that have bits, and the slot of each row. Behind them, in front of
the memory that the sort expects as zeros, are the words of bits or the slots of a hash, and two counters. The starts of
the bricks' rows are where other methods have their table. The slot of a brick in a hash and the start of its rows
depend on the order of threads; the resulting table does not.
"""

from __future__ import annotations

from shiplap.plugin_api import TritonLaunches
from shiplap_sparse3d.cuda import sort
from shiplap_sparse3d.cuda.bricks import (
    ENTRIES,
    brick_entries_kernel,
    brick_hits_kernel,
    brick_insert_kernel,
    brick_start_kernel,
)
from shiplap_sparse3d.cuda.digits import PAGE
from shiplap_sparse3d.cuda.hash import SLOT_BYTES

__all__ = ["BRICKS", "DENSE", "brick_numbers", "by_bricks", "ordered_entries"]

BRICKS = 128_000  # voxels from here on, in a hash: below, the other hash takes a launch less, and stays in the L2 cache
DENSE = 32_000  # voxels from here on where each brick has a word: tables of fewer are sorted by counting
LEAST = 64  # the memory of the other hash is enough from here on
WORDS = 8  # bricks for each voxel at most that have a word each
TAPS = 8  # of a window at least: the starts of bricks take no more than the table would
INSERTS, INSERT_WARPS = 512, 4  # rows that a program puts in
TAKEN = 1024  # slots that a program looks at
ROWS = 128  # rows that a program looks up, or those of a page where they are sorted by digits
ENTRY_WARPS = 2

CLEAR = f"{SLOT_BYTES} * capacity - slot_bytes - 16"  # up to the memory of the sort
SCRATCH = {
    "rows": ("int64", "0"),
    "taken": ("int64", "4 * n"),
    "own": ("int64", "8 * n"),
    "starts": ("int64", "place"),
    "slots": ("int64", CLEAR),
    "counters": ("int64", f"{SLOT_BYTES} * capacity - 16"),
}


def brick_numbers(hashed: int, dense: int) -> dict[str, str]:
    """Return values of a launch program, as expressions by name, for tables that are made by bricks. A launch program
    is a sequence of kernel launches. A brick is a block of 4 x 4 x 4 cells with one bit each.

    ``bricks`` is 1 if the table of ``n`` voxels is made by bricks. The kernel must then have 8 to 27 cells, at most
    three along each axis, without dilation. There must also be more than ``hashed`` voxels, unless the value ``dense``
    is 1. The value ``dense`` is 1 if every brick of the grid, with or without voxels, has a 64-bit word for its bits.
    This requires more voxels than the argument ``dense``. ``room`` is the number of scenes for which there is memory
    for such words. ``slot_bytes`` is the number of bytes that hold the bits of all bricks.
    """
    many, long = f"cdiv(k, max(parts, 1)) > {sort.COUNTED_TAPS}", f"n > min({sort.COUNTED_ROWS}, run)"
    # Launch values have no "or".
    ranked = f"where({many}, 1, where({long}, 1, 0)) == 1"
    small = f"k >= {TAPS} and k <= 27 and max(kernel) <= 3 and max(dilation) == 1 and {ranked}"
    sides = [f"max(1, cdiv(spatial_shape[{i}], 4))" for i in range(3)]
    return {
        "room": f"min({WORDS} * n, {2**30}) // {' // '.join(sides)}",  # scenes whose bricks may have a word each
        "dense": f"scenes > 0 and scenes <= room and n > {max(dense, LEAST)} and {small}",
        "bricks": f"where(dense == 1, 1, n > {max(hashed, LEAST)} and {small})",
        "slot_bytes": f"where(dense == 1, 8 * min(scenes, room) * {' * '.join(sides)}, 16 * bricks * capacity)",
    }


def _brick_arguments(rows: str) -> dict[str, str]:
    """Return the arguments, as expressions by name, of a kernel over bricks (blocks of 4 x 4 x 4 cells with one bit
    each). ``rows`` is the kernel's name for the number of voxels.
    """
    sizes = {name: f"spatial_shape[{i}]" for i, name in enumerate(("width", "height", "depth"))}
    around = {f"p{axis}": f"padding_{axis}" for axis in "xyz"}
    taps = {f"K{axis}": f"kernel[{i}]" for i, axis in enumerate("XYZ")}
    return {**sizes, "batches": "batches", **around, **taps, rows: "n", "SIZE": "size", "DENSE": "dense"}


def _scratch_offsets(*names: str) -> dict[str, tuple[str, str]]:
    """Return the dtype and the workspace offset of each of the scratch arguments ``names`` of the kernels over bricks
    (blocks of 4 x 4 x 4 cells).
    """
    return {name: SCRATCH[name] for name in names}


def by_bricks(program: TritonLaunches, codes: dict[str, str]) -> TritonLaunches:
    """Return ``program``, a sequence of kernel launches, plus the launches that put voxels into bricks. A brick is 4 x
    4 x 4 cells with one bit each. The launches also make the keys by which the table's rows are sorted.

    ``codes`` are the error messages for invalid and for duplicate rows, by the kernel's argument for the code.
    """
    when, arguments = "bricks == 1", _brick_arguments("n")
    # One fill clears the slots, the two counters and the zeros of the sort.
    program = program.fill(CLEAR, "slot_bytes + 16 + zeros", when=when).then(
        brick_insert_kernel,
        grid=f"cdiv(n, {INSERTS})",
        when=when,
        arguments={name: arguments[name] for name in ("width", "height", "depth", "batches", "DENSE")},
        constants={"BLOCK": INSERTS, "num_warps": INSERT_WARPS},
        scratch=_scratch_offsets("slots", "counters", "own", "taken"),
        word="status",
        codes=codes,
    )
    program = program.then(
        brick_start_kernel,
        grid=f"cdiv(n, {TAKEN})",
        when=when,
        arguments={"DENSE": "dense"},
        constants={"BLOCK": TAKEN, "num_warps": 4},
        scratch=_scratch_offsets("slots", "counters", "starts", "taken"),
    )
    keys = {"keys": ("int64", "keys"), "counts": ("int64", "counts")}
    # A sort by digits counts whole pages, so a program takes as many rows as a page has.
    for rows, how in ((PAGE, f"{when} and digits == 1"), (ROWS, f"{when} and digits == 0")):
        program = program.then(
            brick_hits_kernel,
            grid=f"cdiv(n, {rows})",
            when=how,
            arguments={**arguments, "PARTS": "parts", "KEY": "key", "BINS": "bins", "PAGE": "page"},
            constants={"ROWS": rows, "num_warps": rows // 32},
            scratch={**_scratch_offsets("slots", "starts", "rows", "own"), **keys},
        )
    return program


def ordered_entries(program: TritonLaunches, origins: str) -> TritonLaunches:
    """Return ``program``, a sequence of kernel launches, plus the launch that writes the sorted neighbour table, row by
    row, from bricks. A brick is 4 x 4 x 4 cells with one bit each. ``origins`` is the workspace offset of the row
    numbers in the order of torch's sort.
    """
    return program.then(
        brick_entries_kernel,
        grid=(f"cdiv(n, {ENTRIES.value})", "parts"),
        when="bricks == 1",
        arguments={**_brick_arguments("m"), "PARTS": "parts", "ORDERED": "digits"},
        constants={"num_warps": ENTRY_WARPS},
        scratch={**_scratch_offsets("slots", "starts", "rows"), "sorted_rows": ("int64", origins)},
    )
