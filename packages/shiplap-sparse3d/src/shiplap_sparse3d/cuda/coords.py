"""Output voxels of a strided convolution in Triton, as launch programs.

The keys of candidates go into a hash set, and new ones also into a list, which is then ordered. Few keys are compared
with each other to find their places; more keys are sorted by torch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shiplap.plugin_api import TritonLaunches, launch_program
from shiplap_sparse3d import bounded, ops
from shiplap_sparse3d.coords import most_outputs, output_shape
from shiplap_sparse3d.cuda import status
from shiplap_sparse3d.cuda.hash import is_inside, load_coords, report_row
from shiplap_sparse3d.cuda.lookup import AXES, OUTPUT_GRID, OUTSIDE, scenes_below

__all__ = [
    "BOUNDED",
    "NO_KEY",
    "REACHED_KEYS",
    "SIZES",
    "VOXELS_OF_KEYS",
    "WINDOW",
    "out_coords",
    "out_coords_bounded",
    "output_numbers",
    "reached_output",
    "voxels_of_keys",
    "window_arguments",
    "with_keys",
    "write_voxels",
]

MANY = "more than {row} output voxels, which is the capacity"
BLOCK = 256
FEW = 8192  # keys that are compared with each other
NO_KEY = tl.constexpr(bounded.NO_KEY)  # an empty slot; sorts after every key
LINE = tl.constexpr(2)  # as in hash.py
IN_LINE = tl.constexpr(3)


@triton.jit
def _reached_along(at, stride, padding, dilation, j, SIZE: tl.constexpr, UNIT: tl.constexpr, STEP: tl.constexpr):
    """Return the j-th output cell that the input cell ``at`` may reach along one axis, and whether a tap (cell of the
    window) leads to it. ``UNIT`` is true if the dilation is 1. ``STEP`` is the stride if the dilation is 1 and 32-bit
    numbers suffice, and otherwise 0. As a constant it makes the divisions faster, which take most of the time.
    """
    if STEP > 0:
        moved = at + padding
        # The highest output first. Each further one is reached by a tap that is a stride higher.
        out, tap = moved // STEP - j, moved % STEP + j * STEP
        there = (tap < SIZE) & (out >= 0)
    elif UNIT:
        moved = at.to(tl.int64) + padding
        out, tap = moved // stride - j, moved % stride + j * stride
        there = (tap < SIZE) & (out >= 0)
    else:
        # With dilation, candidates are the taps themselves, of which many fall between outputs.
        moved = at.to(tl.int64) + padding - j.to(tl.int64) * dilation
        out, there = moved // stride, (moved >= 0) & (moved % stride == 0)
    return out, there


@triton.jit
def reached_output(
    x,
    y,
    z,
    sx,
    sy,
    sz,
    px,
    py,
    pz,
    dx,
    dy,
    dz,
    j,
    KX: tl.constexpr,
    KY: tl.constexpr,
    KZ: tl.constexpr,
    JX: tl.constexpr,
    JY: tl.constexpr,
    JZ: tl.constexpr,
    UNIT: tl.constexpr,
    TX: tl.constexpr,
    TY: tl.constexpr,
    TZ: tl.constexpr,
):
    """Return the j-th output cell (x, y, z) that an input voxel may reach, and whether a tap (cell of the window) leads
    to it. ``j`` numbers the combinations of the ``JX``, ``JY`` and ``JZ`` candidates along the axes.
    """
    x, x_there = _reached_along(x, sx, px, dx, j // (JY * JZ), KX, UNIT, TX)
    y, y_there = _reached_along(y, sy, py, dy, j // JZ % JY, KY, UNIT, TY)
    z, z_there = _reached_along(z, sz, pz, dz, j % JZ, KZ, UNIT, TZ)
    return x, y, z, (j < JX * JY * JZ) & x_there & y_there & z_there


@triton.jit
def _first_slot(key, mask):
    """Return the first slot of ``key`` in the hash set of output cells. It is the hash of the key's line of
    neighbouring keys, combined with the key's position in that line.
    """
    # Neighbouring keys share a line of slots, and with it a sector of memory.
    line = key >> LINE
    # Constants of well-tested integer mixers: close lines must spread over the table.
    h = (line ^ (line >> 32)).to(tl.uint32) * 0x9E3779B1 + (line >> 32).to(tl.uint32) * 0x85EBCA77
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    h = h ^ (h >> 15)
    return ((h << LINE).to(tl.int32) | (key.to(tl.int32) & IN_LINE)) & mask


@triton.jit(do_not_specialize=["slots", "keys", "count", "size", "capacity"])
def clear_kernel(slots, keys, count, size, capacity, BLOCK: tl.constexpr):
    """Write the empty key to the ``size`` slots of the hash set and to the ``capacity`` listed ``keys``. Write 0 to
    ``count``.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    nothing = tl.full((BLOCK,), NO_KEY, tl.int64)
    tl.store(slots + at, nothing, mask=at < size)
    tl.store(keys + at, nothing, mask=at < capacity)
    if tl.program_id(0) == 0:
        tl.store(count, 0)


SIZES = ("n", "width", "height", "depth", "width_q", "height_q", "depth_q", "batches")
WINDOW = [f"{what}{axis}" for what in "spd" for axis in AXES]


@triton.jit(do_not_specialize=["slots", "keys", "count", *SIZES, *WINDOW, "mask", "limit", "capacity", "code"])
def reach_kernel(
    coords,
    slots,
    keys,
    count,
    status: tl.int64,
    n,
    width,
    height,
    depth,
    width_q,
    height_q,
    depth_q,
    batches,
    sx,
    sy,
    sz,
    px,
    py,
    pz,
    dx,
    dy,
    dz,
    mask,
    limit,
    capacity,
    code,
    KX: tl.constexpr,
    KY: tl.constexpr,
    KZ: tl.constexpr,
    JX: tl.constexpr,
    JY: tl.constexpr,
    JZ: tl.constexpr,
    UNIT: tl.constexpr,
    TX: tl.constexpr,
    TY: tl.constexpr,
    TZ: tl.constexpr,
    REACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the keys of all output cells that a block of input voxels reaches to the hash set ``slots``. Append each new
    key to the list ``keys`` and count it in ``count``. If ``count`` exceeds ``capacity``, or if a key finds no slot
    within ``limit + 1`` steps, ``count`` ends above ``capacity`` and keys are missing. Rows outside the grid are
    reported in a status word, from which the host raises ``SL211`` later.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, j = at // REACH, (at % REACH).to(tl.int32)
    b, x, y, z = load_coords(coords, row, row < n)
    good = is_inside(b, x, y, z, width, height, depth, batches)
    report_row(status, code, row, (b != -1) & ~good)
    x, y, z, there = reached_output(
        x, y, z, sx, sy, sz, px, py, pz, dx, dy, dz, j, KX, KY, KZ, JX, JY, JZ, UNIT, TX, TY, TZ
    )
    good = good & there & (x < width_q) & (y < height_q) & (z < depth_q)
    key = ((b.to(tl.int64) * width_q + x) * height_q + y) * depth_q + z
    slot = _first_slot(key, mask)
    # If the list is full already, the result is discarded, and further search is a waste.
    active, new = good & (tl.load(count) <= capacity), good & False
    step = 0
    while (tl.max(active.to(tl.int32), 0) > 0) & (step <= limit):
        # There is no masked compare-and-swap: who is done compares with what no slot holds.
        old = tl.atomic_cas(slots + slot, tl.where(active, NO_KEY, -1).to(tl.int64), key, sem="relaxed")
        new = new | (active & (old == NO_KEY))
        active = active & (old != NO_KEY) & (old != key)
        slot = tl.where(active, (slot + 1) & mask, slot)
        step += 1
    new = new.to(tl.int32)
    # Whoever found no slot counts as one too many.
    added = tl.sum(new, 0).to(tl.int64) + tl.where(tl.max(active.to(tl.int32), 0) > 0, capacity.to(tl.int64) + 1, 0)
    first = tl.atomic_add(count, added, sem="relaxed")
    # One atomic for a block of keys, and places within the block by a running sum.
    place = first + tl.cumsum(new, 0) - 1
    tl.store(keys + place, key, mask=(new > 0) & (place < capacity))


@triton.jit
def write_voxels(reached, place, key, inside, width, height, depth):
    """Write the voxel (scene, x, y, z) of each ``key`` to row ``place`` of ``reached``, where ``inside`` is true. The
    empty key is written as padding (-1).
    """
    there = key != NO_KEY
    at = reached + place.to(tl.int64) * 4
    # Divisions of 64 bits are slow, so remainders are computed by multiplication.
    plane = tl.where(there, key, 0) // depth
    line = plane // height
    tl.store(at + 3, tl.where(there, key - plane * depth, -1).to(tl.int32), mask=inside)
    tl.store(at + 2, tl.where(there, plane - line * height, -1).to(tl.int32), mask=inside)
    tl.store(at + 1, tl.where(there, line % width, -1).to(tl.int32), mask=inside)
    tl.store(at, tl.where(there, line // width, -1).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["keys", "m", "width", "height", "depth"])
def rank_kernel(keys, reached, m, width, height, depth, ROWS: tl.constexpr, OTHERS: tl.constexpr):
    """Write the voxels of ``m`` keys to ``reached`` in ascending order, with equal keys in their old order. Each key is
    compared with all others, which suits few keys.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key = tl.load(keys + row, mask=row < m, other=NO_KEY)
    place = row * 0
    for first in range(0, m, OTHERS):
        at = first + tl.arange(0, OTHERS)
        other = tl.load(keys + at, mask=at < m, other=NO_KEY)[None, :]
        # Equal keys keep the order of their rows, so that no two rows have one place.
        before = (other < key[:, None]) | ((other == key[:, None]) & (at[None, :] < row[:, None]))
        place += tl.sum((before & (at < m)[None, :]).to(tl.int32), 1)
    write_voxels(reached, place, key, row < m, width, height, depth)


@triton.jit(do_not_specialize=["keys", "m", "width", "height", "depth"])
def write_kernel(keys, reached, m, width, height, depth, BLOCK: tl.constexpr):
    """Write the voxels of ``m`` sorted keys to the rows of ``reached``, in the same order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + at, mask=at < m, other=NO_KEY)
    write_voxels(reached, at, key, at < m, width, height, depth)


@triton.jit(do_not_specialize=["copy", "m"])
def copy_kernel(keys, copy, m, BLOCK: tl.constexpr):
    """Write the ``m`` keys to ``copy`` in the workspace, so that the sort may overwrite them."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(copy + at, tl.load(keys + at, mask=at < m), mask=at < m)


@triton.jit(do_not_specialize=["voxels", "capacity", "code"])
def count_kernel(voxels, count, status: tl.int64, capacity, code):
    """Write the number ``voxels`` as int32 to ``count``, at most ``capacity``. A larger number is reported in the word
    ``status``, from which the host raises an error later.
    """
    total = tl.load(voxels)
    tl.store(count, tl.minimum(total, capacity).to(tl.int32))
    report_row(status, code, capacity, total > capacity)


# --- programs ---------------------------------------------------------------------------------------------------------

SLOTS = f"pow2ceil(max(64, 2 * min(capacity, {ops.OUT_COORDS_BOUND})))"  # of the set, int64


def output_numbers() -> dict[str, str]:
    """Return the values that a launch program (a sequence of kernel launches) computes in each call to find output
    voxels, as expressions by name.

    They are the output grid, the number of output cells that an input may reach along each axis, the size of the hash
    set, and the number of scenes.
    """
    axes = list(enumerate(AXES))
    return {
        **{f"grid_{axis}": OUTPUT_GRID.format(i=i) for i, axis in axes},
        "unit": "max(dilation) == 1",
        # Strides as constants of the kernel: divisions become multiplications. Larger ones are rare, and each would be
        # compiled.
        "known": f"unit == 1 and max(stride) <= 8 and max(spatial_shape) < {2**30} and max(padding) < {2**30}",
        **{f"reach_{axis}": f"where(unit == 1, cdiv(kernel[{i}], stride[{i}]), kernel[{i}])" for i, axis in axes},
        "lanes": "pow2ceil(reach_x * reach_y * reach_z)",
        "bound": ops.OUT_COORDS_BOUND,
        "size": SLOTS,
        "batches": f"min({scenes_below(*[f'spatial_shape[{i}]' for i in range(3)])}, "
        f"{scenes_below('grid_x', 'grid_y', 'grid_z')})",
        "live": "n > 0",  # where the output grid is empty, too: rows outside and scenes beyond are told there as well
    }


def window_arguments() -> dict[str, str]:
    """Return the arguments, as expressions by name, of a kernel that finds the output cells of a convolution. They are
    the input grid, the output grid, the window, and the number of output cells that an input may reach along each axis.
    """
    axes = list(enumerate(AXES))
    sizes = {name: f"spatial_shape[{i}]" for i, name in enumerate(("width", "height", "depth"))}
    grid = {f"{name}_q": f"grid_{axis}" for name, axis in zip(("width", "height", "depth"), AXES, strict=True)}
    window = {
        f"{letter}{axis}": f"{name}[{i}]"
        for letter, name in (("s", "stride"), ("p", "padding"), ("d", "dilation"))
        for i, axis in axes
    }
    taps = {f"K{axis.upper()}": f"kernel[{i}]" for i, axis in axes}
    each = {f"J{axis.upper()}": f"reach_{axis}" for axis in AXES}
    steps = {f"T{axis.upper()}": f"known * stride[{i}]" for i, axis in axes}
    return {**sizes, **grid, **window, **taps, **each, **steps, "UNIT": "unit", "REACH": "lanes"}


def with_keys(program: TritonLaunches, scratch: dict[str, tuple[str, str]], when: str = "1") -> TritonLaunches:
    """Return ``program``, a sequence of kernel launches, plus the launches that list and count the keys of all output
    cells that an input reaches. They run in calls where the expression ``when`` is 1. ``scratch`` holds, by argument
    name, the dtype and workspace offset of the hash set and of results that are not outputs of the op.
    """
    # One launch clears both, so its grid is for the longer one.
    clearing = "cdiv(max(size, capacity), 1024)"
    return program.then(
        clear_kernel, grid=clearing, when=f"{when} == 1", constants={"BLOCK": 1024}, scratch=scratch
    ).then(
        reach_kernel,
        grid=f"cdiv(n * lanes, {BLOCK})",
        when=f"live * {when} == 1",
        arguments={
            **window_arguments(),
            "mask": "size - 1",
            # A set of too few slots is never searched to its end: a long search means that it is full.
            "limit": "where(min(capacity, bound) < capacity, size, min(size, 4096))",
        },
        constants={"BLOCK": BLOCK, "num_warps": 4},
        scratch=scratch,
        word="status",
        codes={"code": OUTSIDE},
    )


def _order_keys(
    program: TritonLaunches, few: int, rows: str, grid: tuple[str, str, str], given: dict[str, str], keys: str, out: str
) -> TritonLaunches:
    """Return ``program``, a sequence of kernel launches, plus the launches that write the voxels of ``rows`` keys in
    ascending order to the argument ``out``. Up to ``few`` keys are compared with each other. More keys are sorted at
    the offset ``keys`` of the workspace.

    ``given`` names the argument that holds the keys. It is empty if they lie in the workspace, with room behind them
    for the sorted keys and their old places.
    """
    cells = {name: f"max(1, {size})" for name, size in zip(("width", "height", "depth"), grid, strict=True)}
    arguments, there = {**cells, "m": rows, "reached": out}, ("int64", keys)
    values, origins = f"{keys} + 8 * {rows}", f"{keys} + 16 * {rows}"
    program = program.then(
        rank_kernel,
        grid=f"cdiv({rows}, 32)",
        when=f"{rows} <= {few}",
        arguments={**arguments, **given},
        constants={"ROWS": 32, "OTHERS": 256, "num_warps": 4},
        scratch={} if given else {"keys": there},
    )
    many = f"{rows} > {few}"
    if given:
        copied = {"copy": there}
        program = program.then(
            copy_kernel, grid=f"cdiv({rows}, 1024)", when=many, constants={"BLOCK": 1024}, scratch=copied
        )
    return program.sort(bits="64", count=rows, keys=keys, values=values, rows=origins, when=many).then(
        write_kernel,
        grid=f"cdiv({rows}, {BLOCK})",
        when=many,
        arguments=arguments,
        constants={"BLOCK": BLOCK, "num_warps": 4},
        scratch={"keys": ("int64", values)},
    )


def _reach_program(keys: dict[str, tuple[str, str]]) -> TritonLaunches:
    """Return a launch program (a sequence of kernel launches) that lists and counts the keys of all output cells that
    an input reaches. ``keys`` holds, by argument name, the dtype and workspace offset of results that are not outputs
    of the op. The hash set lies at the start of the workspace.
    """
    return with_keys(launch_program(values=output_numbers(), errors=status.ERRORS), {"slots": ("int64", "0"), **keys})


def voxels_of_keys(few: int) -> TritonLaunches:
    """Return the launch program (a sequence of kernel launches) of ``bounded.voxels_of_keys``, which writes the voxels
    of keys in ascending order. Up to ``few`` keys are compared with each other. More keys are sorted.
    """
    return _order_keys(launch_program(), few, "m", ("grid[0]", "grid[1]", "grid[2]"), {"keys": "keys"}, "0", "out")


def out_coords_bounded(few: int) -> TritonLaunches:
    """Return the launch program (a sequence of kernel launches) of ``bounded.out_coords_bounded``. It writes the output
    voxels of a convolution and their number, and the host reads nothing. The workspace holds the hash set, the number
    of keys and the keys. Up to ``few`` keys are compared with each other.
    """
    voxels, keys = "8 * size", "8 * size + 8"
    program = _reach_program({"count": ("int64", voxels), "keys": ("int64", keys)})
    return _order_keys(program, few, "capacity", ("grid_x", "grid_y", "grid_z"), {}, keys, "reached").then(
        count_kernel,
        grid=1,
        constants={"num_warps": 1},
        scratch={"voxels": ("int64", voxels)},
        word="status",
        codes={"code": MANY},
    )


REACHED_KEYS, VOXELS_OF_KEYS, BOUNDED = _reach_program({}), voxels_of_keys(FEW), out_coords_bounded(FEW)


def out_coords(
    coords: Tensor, shape: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """Return the voxels ``int32 [m, 4]`` that a convolution reaches from ``coords`` (``int32 [n, 4]``) in the grid
    ``shape``, ascending. This is a CUDA implementation of ``ops.out_coords`` with a hash set of the voxels' keys.

    The host reads the number of voxels before the sort. Only that many keys are then sorted, and the device is busy
    with them while the next ops are launched. If there are more outputs than reserved places, the first kernels run
    again with more.
    """
    window, n = (kernel, stride, padding, dilation), coords.shape[0]
    keys, count = bounded.reached_keys(coords, shape, *window, max(1024, n))
    m = int(count)
    if m > keys.shape[0]:
        keys, count = bounded.reached_keys(coords, shape, *window, most_outputs(n, window))
        m = int(count)
    return bounded.voxels_of_keys(keys[:m], [max(1, size) for size in output_shape(shape, *window)])
