"""Sorted tables of neighbours on CUDA as launch programs: lookups (lookup.py), then sorts (sort.py). Transposes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shiplap.extend import TritonLaunches, launch_program, triton_launcher
from shiplap_sparse3d.cuda import sort, status
from shiplap_sparse3d.cuda.hash import SLOT_BYTES, report
from shiplap_sparse3d.cuda.lookup import CAPACITY, NEAR, OUTPUT_GRID, OUTPUT_OUTSIDE, OUTSIDE, Queries, look_up, numbers

__all__ = [
    "CONV_PLAN",
    "SUBM_PLAN",
    "subm_plan",
    "transpose_table",
]

OUTPUT_TWICE = "duplicate coordinates: out_coords row {row} occurs more than once"
ENTRY = "row {row} has an entry outside [-1, rows)"
ENTRY_TWICE = "an entry of row {row} occurs twice under its tap"

SELVES = Queries("coords", "n", "spatial_shape[{i}]", "1", "kernel[{i}] // 2 * dilation[{i}]", OUTSIDE, True)
OUTPUTS = Queries(
    "out_coords",
    "m",
    OUTPUT_GRID,
    "stride[{i}]",
    "padding[{i}]",
    OUTPUT_OUTSIDE,
    False,
)
HASHED = f"{SLOT_BYTES} * capacity"  # bytes of the hash, at the start of a workspace


def subm_plan(near: int) -> TritonLaunches:
    """The program of ``planning.subm_plan``: the table lies in the workspace, behind the hash and the sort's memory."""
    table = "int32", "place"
    sorting = sort.Sort("", "n", "parts", table, HASHED)
    values = {
        "capacity": CAPACITY,
        **sort.numbers(sorting),
        **numbers(SELVES, near),
        "place": f"{HASHED} + {sort.scratch_bytes('n', 'parts')}",
    }
    program = look_up(launch_program(values=values, errors=status.ERRORS), SELVES, table)
    return sort.sorted_rows(program, sorting)


SUBM_PLAN = subm_plan(NEAR)


@triton.jit(do_not_specialize=["entries", "k", "rows", "code", "code_twice"])
def transpose_kernel(table, out, status: tl.int64, entries, k, rows, code, code_twice, BLOCK: tl.constexpr):
    """``out[table[j, v], v] = j``; of two such j the larger one stays."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(table + at, mask=at < entries, other=-1)
    row = at // k
    good = (entry >= 0) & (entry < rows)
    old = tl.atomic_max(out + entry.to(tl.int64) * k + at % k, row.to(tl.int32), mask=good, sem="relaxed")
    report(status, code, row, (entry < -1) | (entry >= rows))
    report(status, code_twice, row, good & (old != -1))


_transpose = triton_launcher(transpose_kernel)


def transpose_table(table: Tensor, rows: int, *, out: Tensor) -> None:
    """See ``ops.transpose_table``."""
    word, entries = status.word(table.device), table.numel()
    out.fill_(-1)
    if entries:
        _transpose[(-(-entries // 1024),)](
            table.contiguous(),
            out,
            word,
            entries,
            table.shape[1],
            rows,
            status.code_of("transpose_table", ENTRY),
            status.code_of("transpose_table", ENTRY_TWICE),
            BLOCK=1024,
            num_warps=4,
        )


def _conv_plan() -> TritonLaunches:
    """The program of ``planning.conv_plan``. In the workspace: the hash, what both sorts need, then the tables."""
    table, back = ("int32", "place"), ("int32", "place_back")
    sorting = sort.Sort("", "m", "parts", table, HASHED)
    behind = f"{HASHED} + {sort.scratch_bytes('m', 'parts')}"
    sorting_back = sort.Sort("t_", "n", "parts_t", back, behind, "_t")
    values = {
        "capacity": CAPACITY,
        **sort.numbers(sorting),
        **sort.numbers(sorting_back),
        **numbers(OUTPUTS, 0),
        "place": f"t_counts + {sort.scratch_bytes('n', 'parts_t')}",
        "place_back": "place + 4 * k * m",
    }
    program = look_up(launch_program(values=values, errors=status.ERRORS), OUTPUTS, table)
    program = sort.sorted_rows(program, sorting)
    program = program.fill("place_back", "4 * k * n", byte=255, when="parts_t > 0").then(
        transpose_kernel,
        grid="cdiv(m * k, 1024)",
        when="parts_t > 0",
        arguments={"entries": "m * k", "rows": "n"},
        constants={"BLOCK": 1024, "num_warps": 4},
        scratch={"table": table, "out": back},
        word="status",
        codes={"code": ENTRY, "code_twice": OUTPUT_TWICE},
    )
    return sort.sorted_rows(sort.with_keys(program, sorting_back), sorting_back)


CONV_PLAN = _conv_plan()
