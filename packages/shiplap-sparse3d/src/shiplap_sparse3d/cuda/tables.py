"""Sorted tables of neighbours on CUDA as launch programs: lookups (lookup.py), then sorts (sort.py); and transposes."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from shiplap.plugin_api import TritonLaunches, launch_program
from shiplap_sparse3d.cuda import sort, status
from shiplap_sparse3d.cuda.brick_plan import BRICKS, DENSE, brick_numbers, by_bricks, ordered_entries
from shiplap_sparse3d.cuda.hash import SLOT_BYTES, report_row
from shiplap_sparse3d.cuda.lookup import (
    CAPACITY,
    NEAR,
    OUTPUT_GRID,
    OUTPUT_OUTSIDE,
    OUTSIDE,
    TWICE,
    LookupQueries,
    look_up,
    lookup_numbers,
    scenes_below,
)

__all__ = [
    "CONV_PLAN",
    "SUBM_PLAN",
    "TRANSPOSE_TABLE",
    "subm_plan",
]

OUTPUT_TWICE = "duplicate coordinates: out_coords row {row} occurs more than once"
ENTRY = "row {row} has an entry outside [-1, rows)"
ENTRY_TWICE = "an entry of row {row} occurs twice under its tap"

SELVES = LookupQueries("coords", "n", "spatial_shape[{i}]", "1", "kernel[{i}] // 2 * dilation[{i}]", OUTSIDE, True)
OUTPUTS = LookupQueries(
    "out_coords",
    "m",
    OUTPUT_GRID,
    "stride[{i}]",
    "padding[{i}]",
    OUTPUT_OUTSIDE,
    False,
)
HASHED = f"{SLOT_BYTES} * capacity"  # bytes of the hash, at the start of a workspace


def subm_plan(near: int, hashed: int, dense: int) -> TritonLaunches:
    """Return the launch program (a sequence of kernel launches) of ``planning.subm_plan``, which makes the sorted
    neighbour table of a submanifold convolution.

    Up to ``near`` voxels are compared with each other. With more than ``hashed`` voxels, bricks (4 x 4 x 4 cells with
    one bit each) replace the unsorted table. If every brick of the grid can have a word of memory, they do so with more
    than ``dense`` voxels.
    """
    table, below = ("int32", "place"), scenes_below(*[f"spatial_shape[{i}]" for i in range(3)])
    sorting = sort.TableSort("", "n", "parts", table, HASHED, tableless="bricks")
    values = {
        "capacity": CAPACITY,
        **brick_numbers(hashed, dense),
        **sort.sort_numbers(sorting),
        **lookup_numbers(SELVES, near, "bricks"),
        "batches": f"where(scenes > 0, min(scenes, {below}), {below})",
        "batches_of_grid": "batches",
        "place": f"{HASHED} + {sort.scratch_bytes('n', 'parts')}",
    }
    program = look_up(launch_program(values=values, errors=status.ERRORS), SELVES, table)
    program = by_bricks(program, {"code": OUTSIDE, "code_twice": TWICE})
    return ordered_entries(sort.add_row_sort(program, sorting), sorting.origins)


SUBM_PLAN = subm_plan(NEAR, BRICKS, DENSE)


@triton.jit(do_not_specialize=["entries", "k", "rows", "code", "code_twice"])
def transpose_kernel(table, out, status: tl.int64, entries, k, rows, code, code_twice, BLOCK: tl.constexpr):
    """Write the transpose of a neighbour table, ``out[table[j, v], v] = j``. If several ``j`` have one place, the
    largest remains, and the row is reported as a duplicate. Numbers below -1, and those from ``rows`` on, are reported,
    too. The reports go to a status word, from which the host raises ``SL211`` later.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(table + at, mask=at < entries, other=-1)
    row = at // k
    good = (entry >= 0) & (entry < rows)
    old = tl.atomic_max(out + entry.to(tl.int64) * k + at % k, row.to(tl.int32), mask=good, sem="relaxed")
    report_row(status, code, row, (entry < -1) | (entry >= rows))
    # The maximum returns the entry that was there, so duplicates need no second pass.
    report_row(status, code_twice, row, good & (old != -1))


@triton.jit(do_not_specialize=["size"])
def nothing_kernel(out, size, BLOCK: tl.constexpr):
    """Write -1 to all ``size`` elements of the table ``out``, into which a transpose is written afterwards."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.full((BLOCK,), -1, tl.int32), mask=at < size)


def _add_transpose(program: TritonLaunches, twice: str, when: str, **of: Any) -> TritonLaunches:
    """Return ``program``, a sequence of kernel launches, plus the launch that transposes a neighbour table of ``m``
    rows. The transpose is written into a table that must be filled with -1.

    The launch runs in calls where the expression ``when`` is 1, or always if that is empty. ``twice`` is the error
    message for duplicates. ``of`` has further options of the launch.
    """
    return program.then(
        transpose_kernel,
        grid="cdiv(m * k, 1024)",
        when=when,
        constants={"BLOCK": 1024, "num_warps": 4},
        word="status",
        codes={"code": ENTRY, "code_twice": twice},
        **of,
    )


TRANSPOSE_TABLE = _add_transpose(
    launch_program(errors=status.ERRORS).then(
        nothing_kernel, grid="cdiv(rows * k, 1024)", arguments={"size": "rows * k"}, constants={"BLOCK": 1024}
    ),
    ENTRY_TWICE,
    "",
    arguments={"entries": "m * k"},
)


def _conv_plan() -> TritonLaunches:
    """Return the launch program (a sequence of kernel launches) of ``planning.conv_plan``, which makes the sorted
    neighbour tables of a strided convolution in both directions. The workspace holds the hash, the memory of both
    sorts, and the tables.
    """
    table, back = ("int32", "place"), ("int32", "place_back")
    sorting = sort.TableSort("", "m", "parts", table, HASHED)
    behind = f"{HASHED} + {sort.scratch_bytes('m', 'parts')}"
    sorting_back = sort.TableSort("t_", "n", "parts_t", back, behind, "_t")
    values = {
        "capacity": CAPACITY,
        **sort.sort_numbers(sorting),
        **sort.sort_numbers(sorting_back),
        **lookup_numbers(OUTPUTS, 0),
        "place": f"t_counts + {sort.scratch_bytes('n', 'parts_t')}",
        "place_back": "place + 4 * k * m",
    }
    program = look_up(launch_program(values=values, errors=status.ERRORS), OUTPUTS, table)
    program = sort.add_row_sort(program, sorting)
    # Bytes of 255 are -1 in every entry.
    program = program.fill("place_back", "4 * k * n", byte=255, when="parts_t > 0")
    given, scratch = {"entries": "m * k", "rows": "n"}, {"table": table, "out": back}
    program = _add_transpose(program, OUTPUT_TWICE, "parts_t > 0", arguments=given, scratch=scratch)
    return sort.add_row_sort(sort.add_sort_keys(program, sorting_back), sorting_back)


CONV_PLAN = _conv_plan()
