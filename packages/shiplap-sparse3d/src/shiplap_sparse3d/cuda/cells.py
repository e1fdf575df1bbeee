"""Output voxels of a strided convolution and their number in one launch program, whose result is read back once.

Few voxels go into a hash set, whose keys are compared with each other. For more voxels there is one bit for each cell
of the output grids. Unless voxels are very sparse, such a bitmap takes fewer bytes than a hash set, needs no search,
has no contention and is already in order, so nothing is sorted. Voxels of vast grids are found by hash and sorted
(``coords.py``).
"""

from __future__ import annotations

from math import prod

import triton
import triton.language as tl
from torch import Tensor

from shiplap.plugin_api import TritonLaunches, launch_program
from shiplap_sparse3d import bounded
from shiplap_sparse3d.coords import most_outputs, output_shape
from shiplap_sparse3d.cuda import status
from shiplap_sparse3d.cuda.coords import (
    NO_KEY,
    SIZES,
    WINDOW,
    output_numbers,
    reached_output,
    window_arguments,
    with_keys,
    write_voxels,
)
from shiplap_sparse3d.cuda.coords import out_coords as by_hash
from shiplap_sparse3d.cuda.hash import is_inside, load_coords, report_row
from shiplap_sparse3d.cuda.lookup import OUTSIDE

__all__ = ["FIRST_VOXELS", "out_coords", "scenes_for"]

BLOCK = 256
CHUNK = 512  # words of 32 cells that a program counts or lists
FEW = 4096  # voxels up to here are compared with each other: three launches, where the cells take six
CELLS_PER_VOXEL = 256  # of the bitmap, at most: 32 bytes, where the hash set takes 16 and its sort 24 of each output
SCENES, VAST, SCENES_OF_VAST = 64, 1 << 24, 4  # at most so many scenes; of vast grids few: each costs two reads of it
COPIED = 1 << 16  # rows from here on are copied out of a tensor of which they are less than half


def scenes_for(rows: int, cells: int) -> int:
    """Return the number of scenes, of ``cells`` output cells each, for which a bitmap is not too large for ``rows``
    input voxels. It is 0 for few voxels, since these are compared with each other. It is also 0 for grids that are too
    large.
    """
    if rows <= FEW or cells == 0:
        return 0
    return min(CELLS_PER_VOXEL * rows // cells, SCENES if cells < VAST else SCENES_OF_VAST)


@triton.jit(do_not_specialize=["keys", "count", "capacity", "width", "height", "depth"])
def place_few_kernel(keys, voxels, count, capacity, width, height, depth, ROWS: tl.constexpr, OTHERS: tl.constexpr):
    """Write the voxels of ``count`` distinct keys to ``voxels`` in ascending order of the keys, followed by padding
    (-1) up to ``capacity`` rows. Each key is compared with all others, which suits few keys.
    """
    m = tl.minimum(tl.load(count), capacity).to(tl.int32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key = tl.load(keys + row, mask=row < m, other=NO_KEY)
    # Keys are distinct, so the number of smaller ones is the place.
    smaller = tl.zeros((ROWS, OTHERS), tl.int32)
    for first in range(0, m, OTHERS):
        at = first + tl.arange(0, OTHERS)
        smaller += (tl.load(keys + at, mask=at < m, other=NO_KEY)[None, :] < key[:, None]).to(tl.int32)
    write_voxels(voxels, tl.where(row < m, tl.sum(smaller, 1), row), key, row < capacity, width, height, depth)


@triton.jit(do_not_specialize=["keys", "count", "capacity", "width", "height", "depth"])
def write_listed_kernel(keys, voxels, count, capacity, width, height, depth, BLOCK: tl.constexpr):
    """Write the voxels of the first ``count`` of the ascending ``keys`` to ``voxels``, followed by padding (-1) up to
    ``capacity`` rows.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + at, mask=at < tl.minimum(tl.load(count), capacity), other=NO_KEY)
    write_voxels(voxels, at, key, at < capacity, width, height, depth)


@triton.jit(do_not_specialize=["bits", "beyond", "size"])
def clear_cells_kernel(bits, beyond, size, BLOCK: tl.constexpr):
    """Write zeros to the ``size`` words of the bitmap ``bits`` and to the flag ``beyond``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(bits + at, tl.zeros((BLOCK,), tl.int32), mask=at < size)
    if tl.program_id(0) == 0:
        tl.store(beyond, 0)


@triton.jit(do_not_specialize=["bits", "beyond", *SIZES, *WINDOW, "scenes", "code"])
def mark_kernel(
    coords,
    bits,
    beyond,
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
    scenes,
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
    """Set the bit of each output cell that a block of input voxels reaches in ``bits``. Set the flag ``beyond`` if a
    voxel lies in a scene without a bitmap. Rows outside the grid are reported in a status word, from which the host
    raises ``SL211`` later.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, j = at // REACH, (at % REACH).to(tl.int32)
    b, x, y, z = load_coords(coords, row, row < n)
    good = is_inside(b, x, y, z, width, height, depth, batches)
    report_row(status, code, row, (b != -1) & ~good)
    # A flag and not a count: all threads store the same value, so no atomic is needed.
    tl.store(beyond + j * 0, j * 0 + 1, mask=good & (b >= scenes))
    x, y, z, there = reached_output(
        x, y, z, sx, sy, sz, px, py, pz, dx, dy, dz, j, KX, KY, KZ, JX, JY, JZ, UNIT, TX, TY, TZ
    )
    good = good & there & (b < scenes) & (x < width_q) & (y < height_q) & (z < depth_q)
    key = ((b.to(tl.int64) * width_q + x) * height_q + y) * depth_q + z
    place, bit = bits + (key >> 5), (key & 31).to(tl.int32)
    # Most cells are reached more than once: who sees the bit already has no need of an atomic operation.
    missing = good & (((tl.load(place, mask=good, other=0) >> bit) & 1) == 0)
    tl.atomic_or(place, tl.full((BLOCK,), 1, tl.int32) << bit, mask=missing, sem="relaxed")


@triton.jit
def _count_bits(words):
    """Return the number of set bits of each 32-bit word."""
    x = words.to(tl.uint32, bitcast=True)
    # The usual parallel count: pairs of bits, then groups of four, eight and more.
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).to(tl.int32)


@triton.jit(do_not_specialize=["bits", "sums"])
def count_cells_kernel(bits, sums, CHUNK: tl.constexpr):
    """Write the number of set bits of each chunk of ``CHUNK`` words to ``sums``."""
    chunk = tl.program_id(0)
    words = tl.load(bits + chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK))
    tl.store(sums + chunk, tl.sum(_count_bits(words), 0))


@triton.jit(do_not_specialize=["sums", "beyond", "chunks"])
def sum_cells_kernel(sums, beyond, count, chunks, BLOCK: tl.constexpr):
    """Replace each of the ``chunks`` numbers in ``sums`` by the sum of those before it. Write their total to ``count``,
    or -1 if the flag ``beyond`` is set.
    """
    before = tl.zeros((1,), tl.int32)
    for first in range(0, chunks, BLOCK):
        at = first + tl.arange(0, BLOCK)
        own = tl.load(sums + at, mask=at < chunks, other=0)
        # An exclusive sum: the place of a chunk's first cell.
        tl.store(sums + at, tl.cumsum(own, 0) - own + before, mask=at < chunks)
        before += tl.sum(own, 0)
    total = tl.where(tl.load(beyond) != 0, -1, before)
    tl.store(count + tl.arange(0, 1), total.to(tl.int64))


@triton.jit(do_not_specialize=["bits", "sums", "capacity"])
def list_cells_kernel(bits, sums, keys, count, capacity, CHUNK: tl.constexpr):
    """Write the cell numbers of the set bits of a chunk to ``keys``, ascending. They begin at the index that ``sums``
    holds for the chunk. If ``count`` is negative, write nothing.
    """
    word = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    words = tl.load(bits + word)
    own = _count_bits(words)
    # Most chunks of a sparse grid are empty, and a negative count means that the bitmap is not used.
    if (tl.sum(own, 0) > 0) & (tl.load(count) >= 0):
        place = tl.load(sums + tl.program_id(0)) + tl.cumsum(own, 0) - own
        for bit in range(32):
            hit = (words >> bit) & 1
            tl.store(keys + place, word * 32 + bit, mask=(hit > 0) & (place < capacity))
            place += hit


def _first_voxels() -> TritonLaunches:
    """Return the launch program (a sequence of kernel launches) of ``bounded.first_voxels``. It finds the output voxels
    of a convolution in order, up to a capacity, and their number. Few keys are compared with each other, and otherwise
    a bitmap of the output cells is used.

    The workspace holds the keys, then the hash set or the bits, their sums and a flag for a missing scene.
    """
    keys, behind = ("int64", "0"), "8 * capacity"
    bits, sums = ("int32", behind), ("int32", f"{behind} + 4 * words")
    beyond = "int32", f"{behind} + 4 * words + 4 * chunks"
    values = {
        **output_numbers(),
        "words": f"{CHUNK} * cdiv(scenes * grid_x * grid_y * grid_z, {32 * CHUNK})",
        "chunks": f"words // {CHUNK}",
        "few": "scenes == 0",
    }
    # The kernels divide by these sizes, also for an empty grid.
    grid = {name: f"max(1, grid_{axis})" for name, axis in zip(("width", "height", "depth"), "xyz", strict=True)}
    program = launch_program(values=values, errors=status.ERRORS)
    program = with_keys(program, {"slots": ("int64", behind), "keys": keys}, "few").then(
        place_few_kernel,
        grid="cdiv(capacity, 16)",
        when="few == 1",
        arguments=grid,
        constants={"ROWS": 16, "OTHERS": 256, "num_warps": 4},
        scratch={"keys": keys},
    )
    return _by_cells(program, bits, sums, beyond, keys).then(
        write_listed_kernel,
        grid="cdiv(capacity, 256)",
        when="few == 0",
        arguments=grid,
        constants={"BLOCK": 256, "num_warps": 4},
        scratch={"keys": keys},
    )


def _by_cells(program: TritonLaunches, *places: tuple[str, str]) -> TritonLaunches:
    """Return ``program``, a sequence of kernel launches, plus the launches that list and count the reached output cells
    in order, with one bit for each cell. ``places`` are the dtypes and workspace offsets of the bits, of their sums, of
    a flag and of the keys.
    """
    bits, sums, beyond, keys = places
    program = program.then(
        clear_cells_kernel,
        grid="cdiv(max(words, 1), 2048)",
        when="few == 0",
        arguments={"size": "words"},
        constants={"BLOCK": 2048, "num_warps": 8},
        scratch={"bits": bits, "beyond": beyond},
    ).then(
        mark_kernel,
        grid=f"cdiv(n * lanes, {BLOCK})",
        when="live == 1 and few == 0",
        arguments=window_arguments(),
        constants={"BLOCK": BLOCK, "num_warps": 4},
        scratch={"bits": bits, "beyond": beyond},
        word="status",
        codes={"code": OUTSIDE},
    )
    constants, scratch = {"CHUNK": CHUNK, "num_warps": 4}, {"bits": bits, "sums": sums}
    program = program.then(count_cells_kernel, grid="chunks", when="words > 0", constants=constants, scratch=scratch)
    program = program.then(
        sum_cells_kernel,
        grid=1,
        when="few == 0",
        constants={"BLOCK": 4096, "num_warps": 16},
        scratch={"sums": sums, "beyond": beyond},
    )
    scratch["keys"] = keys
    return program.then(list_cells_kernel, grid="chunks", when="words > 0", constants=constants, scratch=scratch)


FIRST_VOXELS = _first_voxels()


def out_coords(
    coords: Tensor, shape: list[int], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """Return the voxels ``int32 [m, 4]`` that a convolution reaches from ``coords`` (``int32 [n, 4]``) in the grid
    ``shape``, ascending. This is the CUDA kernel of ``ops.out_coords``.

    It uses a bitmap of cells, or a hash if a bitmap would be too large. The host reads the number of voxels. If it
    exceeds the reserved rows, the program runs again with more rows.
    """
    window, n = (kernel, stride, padding, dilation), coords.shape[0]
    scenes = scenes_for(n, prod(output_shape(shape, *window)))
    most, room = most_outputs(n, window), max(1024, n)
    # The grid is too large for a bitmap, and the voxels too many to compare all with all.
    if scenes == 0 and n > FEW:
        return by_hash(coords, shape, *window)
    # Usually there are no more outputs than inputs. The second round has room for any number of outputs.
    for capacity in (min(room, most), most):
        voxels, count = bounded.first_voxels(coords, shape, *window, capacity, scenes)
        m = int(count)
        if 0 <= m <= capacity:
            first = voxels[:m]
            return first.clone() if m > COPIED and 2 * m < capacity else first
        if m < 0 or (scenes == 0 and most > 2 * FEW):
            break
    return by_hash(coords, shape, *window)
