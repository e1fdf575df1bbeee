"""Rows under the taps of queries, in Triton: the part of a launch program that all sorted tables share.

Voxels are put into a hash (hash.py) and looked up. Kernels of at most three cells per axis look up blocks, of which a
window meets eight; others look up taps. Few voxels are compared with each other instead, which takes one launch and not
three. Every entry is looked up, also where a submanifold table could be mirrored: neighbouring lookups share cache
lines, rows are written whole, and no two programs write the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shiplap.plugin_api import TritonLaunches
from shiplap_sparse3d.coords import MAX_CELLS
from shiplap_sparse3d.cuda.hash import SLOT_BYTES
from shiplap_sparse3d.cuda.lookup_kernels import block_kernel, insert_kernel, lookup_kernel, near_kernel

__all__ = [
    "CAPACITY",
    "NEAR",
    "OUTPUT_GRID",
    "OUTPUT_OUTSIDE",
    "OUTSIDE",
    "TWICE",
    "LookupQueries",
    "batches_below",
    "look_up",
    "lookup_numbers",
    "scenes_below",
]

# The texts of the errors that the kernels report.
OUTSIDE = "coords row {row} is outside spatial_shape or of a scene beyond the last (or its grid has 2^63 cells or more)"
OUTPUT_OUTSIDE = "out_coords row {row} is outside the output grid (or that has 2^63 cells or more)"
TWICE = "duplicate coordinates: row {row} occurs more than once"

INSERTS = 64  # rows of a program; one warp each, which waits for its own slowest search only
LOOKUPS = 256  # entries of a program
BLOCK_ROWS, BLOCK_WARPS = 8, 1  # queries of a program that looks up blocks, and its warps
NEAR = 1024  # voxels up to here are compared with each other
NEAR_ROWS, NEAR_OTHERS = 4, 256

CAPACITY = "max(2 * n, 64)"  # slots: twice the blocks that there can be
# An axis of the output grid of a strided convolution: coords.output_shape as an expression.
OUTPUT_GRID = (
    "max(0, (spatial_shape[{i}] + 2 * padding[{i}] - dilation[{i}] * (kernel[{i}] - 1) - 1) // stride[{i}] + 1)"
)
AXES = "xyz"


class LookupQueries(NamedTuple):
    """The queries of a lookup of neighbours among the voxels ``coords``. ``tensor`` names the tensor of the queries,
    and ``rows`` is the expression of their number. ``message`` is the error message for an invalid query.

    Attributes:
        grid, stride, padding: the expressions for one axis, with ``{i}`` in place of the axis's number.
        themselves: whether the queries are the voxels themselves.
    """

    tensor: str
    rows: str
    grid: str
    stride: str
    padding: str
    message: str
    themselves: bool


def lookup_numbers(queries: LookupQueries, near: int, otherwise: str = "0") -> dict[str, str]:
    """Return the values that a launch program (a sequence of kernel launches) computes in each call for a lookup of
    neighbours, as expressions by name.

    They are the output grid, the stride and the padding, the largest numbers of scenes for which cells can be numbered,
    and the choice of the kernel that finds the rows. Up to ``near`` voxels are compared with each other. If the
    expression ``otherwise`` is 1, the rows are found by other means than the hash. ``sort.sort_numbers`` has the values
    of the sort.
    """
    per_axis = {
        f"{name}{axis}": text.format(i=i)
        for name, text in (("grid_", queries.grid), ("stride_", queries.stride), ("padding_", queries.padding))
        for i, axis in enumerate(AXES)
    }
    reach = "max(grid_x, grid_y, grid_z) * max(stride_x, stride_y, stride_z) + max(padding_x, padding_y, padding_z)"
    few = f"{queries.rows} > 0 and n <= {near} and key == 0" if queries.themselves else "0"
    return {
        **per_axis,
        "batches": scenes_below(*[f"spatial_shape[{i}]" for i in range(3)]),
        "batches_of_grid": scenes_below("grid_x", "grid_y", "grid_z"),
        # Positions beyond int32 are computed in int64.
        "far": f"{reach} + max(kernel) * max(dilation) >= {2**31}",
        "blocks": "max(kernel) <= 3 and max(dilation) == 1",
        "near": few,
        "hashed": f"{queries.rows} > 0 and near == 0 and {otherwise} == 0",
    }


def batches_below(shape: Sequence[int]) -> int:
    """Return the largest number of scenes whose grids of ``shape`` have fewer than 2^63 cells together."""
    return min(2**31 - 1, (MAX_CELLS - 1) // max(1, shape[0] * shape[1] * shape[2]))


def scenes_below(*grid: str) -> str:
    """Return an expression for :func:`batches_below` of a grid, whose three sizes are expressions, in 64-bit numbers.
    For an empty grid the result is the largest number.
    """
    return f"min({2**31 - 1}, {MAX_CELLS - 1} // {' // '.join(f'max(1, {size})' for size in grid)})"


def look_up(program: TritonLaunches, queries: LookupQueries, table: tuple[str, str]) -> TritonLaunches:
    """Return ``program``, a sequence of kernel launches, plus the launches that find the voxel under each tap (cell of
    the kernel) of each query. They write its row to ``table`` in the workspace, and the keys by which the table is
    sorted. The workspace starts with the hash, and the zeros of the sort lie behind it.
    """
    program = _add_hash(program)
    if queries.themselves:
        program = _add_near(program, table)
    shared, rows = _shared_arguments(queries), queries.rows
    scratch = {"table": table, "slots": ("int64", "0"), "keys": ("int64", "keys"), "counts": ("int64", "counts")}
    program = program.then(
        block_kernel,
        grid=f"cdiv({rows}, {BLOCK_ROWS})",
        when="hashed == 1 and blocks == 1",
        arguments={**shared, "KX": "kernel[0]", "PARTS": "parts"},
        constants={"ROWS": BLOCK_ROWS, "num_warps": BLOCK_WARPS},
        scratch=scratch,
        word="status",
        codes={"code": queries.message},
    )
    dilation = {f"d{axis}": f"dilation[{i}]" for i, axis in enumerate(AXES)}
    return program.then(
        lookup_kernel,
        grid=(f"cdiv({rows}, {LOOKUPS} // taps)", "parts"),  # the last ones may have no taps, but have keys
        when="hashed == 1 and blocks == 0",
        arguments={**shared, **dilation, "TAPS": "taps", "ROWS": f"{LOOKUPS} // taps"},
        constants={"num_warps": 1},
        scratch=scratch,
        word="status",
        codes={"code": queries.message},
    )


def _add_hash(program: TritonLaunches) -> TritonLaunches:
    """Return ``program``, a sequence of kernel launches, plus the launches that clear the hash at the start of the
    workspace and insert the voxels. Rows outside the grid and duplicates are reported in a status word, from which the
    host raises ``SL211`` later.
    """
    # The zeros of the sort follow the hash, so one launch clears both.
    return program.fill("0", f"{SLOT_BYTES} * capacity + zeros", when="hashed == 1").then(
        insert_kernel,
        grid=f"cdiv(n, {INSERTS})",
        when="hashed == 1",
        arguments=_voxel_grid("batches"),
        constants={"BLOCK": INSERTS, "num_warps": 1},
        scratch={"slots": ("int64", "0")},
        word="status",
        codes={"code": OUTSIDE, "code_twice": TWICE},
    )


def _shared_arguments(queries: LookupQueries) -> dict[str, str]:
    """Return the arguments that both kernels of a lookup of neighbours take, as expressions by name. They are grids,
    stride, padding and sizes of the sort.
    """
    return {
        **_voxel_grid("batches_of_grid"),
        **{f"{name}_q": f"grid_{axis}" for name, axis in zip(("width", "height", "depth"), AXES, strict=True)},
        **{f"s{axis}": f"stride_{axis}" for axis in AXES},
        **{f"p{axis}": f"padding_{axis}" for axis in AXES},
        "queries": queries.tensor,
        "m": queries.rows,
        "KY": "kernel[1]",
        "KZ": "kernel[2]",
        "WIDE": "far",
        "KEY": "key",
        "BINS": "bins",
        "PAGE": "page",
        "SIZE": "size",
    }


def _add_near(program: TritonLaunches, table: tuple[str, str]) -> TritonLaunches:
    """Return ``program``, a sequence of kernel launches, plus the launch that compares few voxels with each other. It
    writes the neighbour's row under each tap (cell of the kernel) of each voxel to ``table``, the dtype and workspace
    offset of a neighbour table.
    """
    return program.then(
        near_kernel,
        grid=f"cdiv(n, {NEAR_ROWS})",
        when="near == 1",
        arguments={
            **_voxel_grid("batches"),
            **{f"p{axis}": f"padding_{axis}" for axis in AXES},
            **{f"d{axis}": f"dilation[{i}]" for i, axis in enumerate(AXES)},
            **{f"K{axis.upper()}": f"kernel[{i}]" for i, axis in enumerate(AXES)},
            "WIDE": "far",
        },
        constants={"ROWS": NEAR_ROWS, "OTHERS": NEAR_OTHERS, "num_warps": 4},
        scratch={"table": table},
        word="status",
        codes={"code": OUTSIDE, "code_twice": TWICE},
    )


def _voxel_grid(batches: str) -> dict[str, str]:
    """Return the arguments, as expressions by name, for the grid of the voxels. ``batches`` is the expression of the
    number of scenes.
    """
    sizes = {name: f"spatial_shape[{i}]" for i, name in enumerate(("width", "height", "depth"))}
    return {**sizes, "batches": batches}
