"""The receptive field of a network, its proof, and the tiles that it allows.

The field and the total stride come from the geometry of one forward pass.

Forward hooks on every module, however deep, record each sparse layer that runs, with its grid and its window. A layer
moves the cells that its output depends on by a fixed interval, so the receptive field is the widest sum of those
intervals over the paths from the output to the input. The paths are those of the autograd graph.

A probe tests the field: one voxel is changed, and nothing beyond the derived field may change with it.

Tiles are squares of cells, aligned to the network's stride, and each is predicted with a halo around it.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from shiplap_sparse3d.axes import Triple, per_axis
from shiplap_sparse3d.errors import survey_error
from shiplap_sparse3d.geometry import Geometry
from shiplap_sparse3d.modes import device_of, evaluation_mode
from shiplap_sparse3d.nn import GenerativeConv3d, GlobalPool, SparseConvTranspose3d, SparseInverseConv3d, SubMConv3d
from shiplap_sparse3d.nn.conv import Convolution
from shiplap_sparse3d.nn.pool import WindowPool
from shiplap_sparse3d.spconv.conv import SparseConvolution
from shiplap_sparse3d.spconv.pool import IndicePool, SparseGlobalMaxOrAvgPool
from shiplap_sparse3d.tensor import SparseTensor

# A network as the survey calls it: voxels → a tensor or a sparse tensor with a row for each of them.
Run = Callable[[SparseTensor], Any]

# Numbers of cells, ``int64 [3]`` for the axes, or ``int64 [2, 3]``: those before and those behind an output.
Cells = np.ndarray[Any, Any]

# The place of a tile along x and y, in tiles.
Tile = tuple[int, int]

# The sparse layers: those in which all voxels affect each other, and those with a window.
_GLOBAL, _LOCAL = GlobalPool | SparseGlobalMaxOrAvgPool, Convolution | WindowPool | SparseConvolution | IndicePool

_SMALLEST = 128  # cells of a tile: below that, it is mostly halo
_GRID, _BLOCK, _FILLED = 1024, 24, 0.06  # cells of the sample's grid, of the block in it that is used; share of voxels
MOST_SCENES = 32  # of a batch of tiles
_ACROSS, _TOLERANCE = 5, 1e-4  # cells across the corridor of a probe; of the largest logit


@dataclass(frozen=True)
class Field:
    """The receptive field of a network, the cells of the input grid on which an output voxel depends.

    Attributes:
        before, after: numbers of cells for each axis. An output at cell ``c`` depends on the cells from ``c - before``
            to ``c + after``.
        stride: the total stride. Results stay the same when the origin of the grid moves by a multiple of it.
        layers: the number of sparse layers that ran.
        exact: True if the paths through the network could be followed. Otherwise the intervals of all layers were
            added, so the field may be too large, but never too small.
    """

    before: Triple
    after: Triple
    stride: Triple
    layers: int
    exact: bool = True


class _GridLevel(NamedTuple):
    """A grid that the network has reached. ``geometry`` has its voxels, and ``stride`` (``int64 [3]``) is the number of
    input cells that one of its cells spans on each axis. ``back`` is the interval ``int64 [2, 3]`` (input cells before
    and behind an output) of an inverse layer that leads back to the previous grid. It is None if there is no previous
    grid.
    """

    geometry: Geometry
    stride: Cells
    back: Cells | None = None


@dataclass
class _PassRecord:
    """The record of the layers of one forward pass. ``levels`` are the grids that it has reached. ``intervals`` holds,
    for each layer, the numbers of input cells before and behind an output on which the output depends. ``nodes`` maps
    the layer's node in the autograd graph to this interval.
    """

    levels: list[_GridLevel]
    nodes: dict[Any, Cells] = field(default_factory=dict)
    intervals: list[Cells] = field(default_factory=list)

    def level_of(self, geometry: Geometry, where: str) -> _GridLevel:
        """Return the element of ``levels`` whose geometry has the shape and the coordinates of ``geometry``. It may be
        another object with equal coordinates. Raise ``SL820``, with ``where`` as the layer's name, if no layer has made
        these voxels.
        """
        # Identity first: a comparison of values makes the host wait for a GPU.
        for same in (operator.is_, torch.equal):
            for level in self.levels:
                known = level.geometry
                if known.spatial_shape == geometry.spatial_shape and same(known.coords, geometry.coords):
                    return level
        expected = "layers on the input's voxels and on grids that strided layers made of them"
        raise survey_error("SL820", where, "voxels that no layer before it has made", expected)

    def note_layer(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Record one call of ``module`` if it is a sparse layer, and otherwise do nothing. This is a forward hook.
        Raise ``SL820`` for a global pooling, and for a layer that leads to a finer grid than the input's or to voxels
        of unknown origin.
        """
        geometry, where = getattr(args[0] if args else None, "geometry", None), type(module).__name__
        if not isinstance(geometry, Geometry) or not isinstance(module, _GLOBAL | _LOCAL):
            return
        if isinstance(module, _GLOBAL):
            raise survey_error("SL820", where, "a pooling over all voxels", "a window")
        level, (step, padding, span) = self.level_of(geometry, where), _window_of(module)
        interval = np.stack([padding, span - padding]) * level.stride
        if isinstance(module, SparseInverseConv3d) or getattr(module, "inverse", False):
            if level.back is None:
                raise survey_error("SL820", where, "an inverse layer on voxels that no step made", "a step")
            interval = level.back
        elif isinstance(module, SparseConvTranspose3d) or getattr(module, "transposed", False):
            if (level.stride % step).any():
                got = f"a grid finer than the input's: stride {step.tolist()} from a grid of stride {level.stride}"
                raise survey_error("SL820", where, got, "outputs on the voxels of the input")
            # Fine cell i reads the coarse o with i = o * step - padding + k * dilation.
            interval = interval[::-1] // step
            self.levels.append(_GridLevel(output.geometry, level.stride // step))
        elif not _is_submanifold(module):
            self.levels.append(_GridLevel(output.geometry, level.stride * step, interval[::-1]))
        self.intervals.append(interval)
        # None without a graph, as after ``detach``: then the paths cannot be followed.
        self.nodes[rows_of(output).grad_fn] = interval


def _is_submanifold(module: nn.Module) -> bool:
    """Return whether ``module`` is a submanifold convolution of this package or of its replacement for spconv."""
    return isinstance(module, SubMConv3d) or getattr(module, "subm", False)


def _window_of(module: Any) -> tuple[Cells, Cells, Cells]:
    """Return the stride of a layer, its padding, and the number of cells that its window spans beyond the first, each
    as ``int64 [3]``. Raise ``SL820`` for a kernel that does not have three axes.
    """
    kernel = np.array(module.kernel_size)
    if len(kernel) != 3 or kernel.min() < 1:
        raise survey_error("SL820", type(module).__name__, f"a kernel of {module.kernel_size} cells", "three axes")
    absent = {"dilation": 1, "stride": 1, "padding": 0}
    dilation, step, padding = (np.array(getattr(module, name, (value,) * 3)) for name, value in absent.items())
    if _is_submanifold(module) or isinstance(module, GenerativeConv3d):
        # These kernels are centred, and an even one reaches one cell further back.
        step, padding = np.ones_like(kernel), kernel // 2 * dilation
    return step, padding, (kernel - 1) * dilation


def rows_of(value: Any) -> Tensor:
    """Return the feature rows ``[n, c]`` of a sparse tensor of this package or of its replacement for spconv. Return
    any other tensor unchanged. Raise ``SL825`` for any other value.
    """
    for name in ("feats", "features"):
        value = getattr(value, name, value)
    if not isinstance(value, Tensor):
        raise survey_error("SL825", "the network", f"a {type(value).__name__}", "a tensor of logits")
    return value


def receptive_field(net: nn.Module, channels: int, run: Run | None = None) -> Field:
    """Return the receptive field and the total stride of ``net``, derived from the sparse layers that one forward pass
    calls.

    Args:
        net: the network. It runs once on random voxels, on its present device and in evaluation mode.
        channels: the number of features of a voxel.
        run: a function of the voxels that calls the network. If it is None, ``net(voxels)`` is called.

    Raises:
        SurveyError: ``SL820`` for global pooling, for outputs on other voxels than the input's and for layers on voxels
            of unknown origin, and ``SL825`` if the network does not return rows.
    """
    draw, device = torch.Generator().manual_seed(0), device_of(net)
    cells = (torch.rand(_BLOCK, _BLOCK, _BLOCK, generator=draw) < _FILLED).nonzero()
    feats = torch.randn(len(cells), channels, generator=draw).to(device).requires_grad_()
    voxels = SparseTensor(feats, nn.functional.pad(cells, (1, 0)).int().to(device), (_GRID,) * 3)
    record = _PassRecord([_GridLevel(voxels.geometry, np.ones(3, np.int64))])
    with contextlib.ExitStack() as hooks, evaluation_mode(net), torch.enable_grad():
        for module in net.modules():
            hooks.enter_context(module.register_forward_hook(record.note_layer))
        out = rows_of((run or net)(voxels))
    if out.shape[:1] != feats.shape[:1]:
        got = f"{out.shape[0] if out.dim() else 0} rows"
        raise survey_error("SL820", "the network's output", got, f"{len(feats)}, one for each voxel")
    # Only paths that carry a gradient are in the graph of autograd.
    widest = None if None in record.nodes or out.grad_fn is None else _widest_interval(out.grad_fn, feats, record.nodes)
    total = sum((np.maximum(each, 0) for each in record.intervals), np.zeros((2, 3), np.int64))
    before, after = np.maximum(total if widest is None else widest, 0)
    stride = np.lcm.reduce([level.stride for level in record.levels])
    return Field(triple(before), triple(after), triple(stride), len(record.intervals), exact=widest is not None)


def triple(values: Any) -> Triple:
    """Return ``values``, an array or tensor of three integers, as a tuple of Python's integers."""
    return cast(Triple, tuple(values.tolist()))


def _widest_interval(end: Any, feats: Tensor, nodes: dict[Any, Cells]) -> Cells | None:
    """Return the largest interval ``int64 [2, 3]`` (cells before and behind an output) over all paths of the autograd
    graph from the node ``end`` to the input ``feats``. A path's interval is the sum of those that ``nodes`` holds for
    its nodes. Return None if there is no path.
    """
    known, waiting = dict[Any, Cells | None](), [end]
    while waiting:  # no recursion: a graph may be deeper than Python's stack
        inputs = [parent for parent, _ in waiting[-1].next_functions if parent is not None]
        if missing := [parent for parent in inputs if parent not in known]:
            waiting += missing
            continue
        node = waiting.pop()
        hulls = [hull for parent in inputs if (hull := known[parent]) is not None]
        if getattr(node, "variable", None) is feats:
            hulls.append(np.zeros((2, 3), np.int64))
        known[node] = np.max(hulls, 0) + nodes.get(node, 0) if hulls else None
    return known[end]


def probe(net: nn.Module, channels: int, field: Field, run: Run | None = None) -> Field:
    """Test the derived receptive field ``field`` of the network by changing single voxels and comparing its outputs.

    The inputs are long, narrow blocks of random voxels along x and along y, three times as long as the receptive field.
    The voxel in the middle gets another value, then a NaN, which no weight and no activation can hide, and is then
    removed. At last all voxels outside its receptive field are removed.

    Args:
        net, channels, run: the arguments of :func:`receptive_field`.
        field: the receptive field that :func:`receptive_field` has derived.

    Returns:
        A copy of ``field`` whose ``before`` and ``after`` are the distances, in voxels, up to which outputs changed.
        They are at most those of ``field``.

    Raises:
        SurveyError: ``SL820`` if an output outside the receptive field changes, and ``SL825`` if an output is not
            finite.
    """
    got, far = "", torch.zeros(2, 3, dtype=torch.long)
    with evaluation_mode(net), torch.no_grad():
        for axis in (0, 1):
            for shift in {0, field.stride[axis] - 1}:
                changed, cropped = _changed_distances(run or net, channels, device_of(net), field, axis, shift)
                far = torch.maximum(far, torch.stack([-changed, changed]).amax(1))
                got = "another output after all voxels beyond its field were left out" if cropped else got
    before, after = map(triple, far)
    if (far > torch.tensor([field.before, field.after])).any():
        got = f"a change {before} cells before and {after} behind the voxel that depends on it"
    if got:
        what = "the network looks beyond the receptive field of its layers"
        expected = f"changes within {field.before} and {field.after} cells, the field of its sparse layers"
        fix = "remove layers that mix voxels in another way than sparse layers do, such as attention or means over rows"
        raise survey_error("SL820", "the probe of the receptive field", got, expected, fix, what)
    return replace(field, before=before, after=after)


def takes_batches(net: nn.Module, channels: int, field: Field, run: Run) -> bool:
    """Return whether the network gives the voxels of each scene in a batch the outputs that the scene has alone, apart
    from rounding. A batch of ``MOST_SCENES`` scenes of several sizes is compared. The arguments are those of
    :func:`probe`. The result is False if the network raises an exception.
    """
    (coords, feats, grid, _), device = _draw_corridor(field, channels, 0, 0), device_of(net)

    def outputs(*numbers: int) -> Tensor:
        """Return the outputs for a batch of the scenes ``numbers``, in cells that the scenes share in part."""
        parts = [slice(number, None, 2 + number % 7) for number in numbers]
        cells = [nn.functional.pad(coords[part, 1:], (1, 0), value=scene) for scene, part in enumerate(parts)]
        some = torch.cat([feats[part] for part in parts])
        return rows_of(run(SparseTensor(some.to(device), torch.cat(cells).to(device), grid, len(parts))))

    try:
        with evaluation_mode(net), torch.no_grad():
            alone, together = torch.cat([*map(outputs, range(MOST_SCENES))]), outputs(*range(MOST_SCENES))
            return torch.allclose(alone, together, 0, _TOLERANCE * float(alone.abs().amax()))
    except Exception:  # whatever a network for one scene raises
        return False


def _draw_corridor(field: Field, channels: int, axis: int, shift: int) -> tuple[Tensor, Tensor, Triple, int]:
    """Return random voxels in a narrow block along ``axis``, as coordinates ``int32 [v, 4]``, random features
    ``float32 [v, channels]``, the grid, and the row of the middle voxel.

    The block is six times as long as the larger side of the receptive field, and somewhat more. The line of cells along
    its middle has no gaps. ``shift`` is the number of cells by which the middle voxel is moved along the axis.
    """
    stride = field.stride[axis]
    # Room beyond the field on both sides, where a change would be an error.
    half = 3 * max(field.before[axis], field.after[axis]) + 4 * stride + 32
    centre = torch.full((3,), _ACROSS // 2)
    centre[axis] = -(-half // stride) * stride + shift
    used = torch.rand((2 * centre + 1).tolist(), generator=torch.Generator().manual_seed(axis)) < 0.7
    # Without gaps, or a dilated kernel might have nothing to see where it looks.
    used.movedim(axis, 0)[:, _ACROSS // 2, _ACROSS // 2] = True
    cells, strides = used.nonzero(), torch.tensor(field.stride)
    row = int((cells == centre).all(1).nonzero())
    grid, feats = triple(-(-torch.tensor(used.shape) // strides) * strides), torch.Generator().manual_seed(1)
    return nn.functional.pad(cells, (1, 0)).int(), torch.randn(len(cells), channels, generator=feats), grid, row


def _changed_distances(
    run: Run, channels: int, device: torch.device, field: Field, axis: int, shift: int
) -> tuple[Tensor, bool]:
    """Change one voxel of a random block in several ways. Return how far from it outputs of the network change, and
    whether cropping changes its own output.

    The first result, ``int64 [changes, 3]``, has the distance in cells from each changed output to the voxel, for all
    ways together. The voxel gets another value, then a NaN, and is then removed. Its own distance, 0, is included. The
    second result is true if its output changes when all voxels outside its receptive field are removed. ``field``,
    ``axis`` and ``shift`` are arguments of :func:`_draw_corridor`.
    """
    coords, feats, grid, row = _draw_corridor(field, channels, axis, shift)
    away = (coords[row] - coords)[:, 1:].long()
    rest = torch.arange(len(coords)) != row
    near = ((-away >= -torch.tensor(field.before)) & (-away <= torch.tensor(field.after))).all(1)

    def outputs(value: Tensor | float, kept: Tensor) -> Tensor:
        """Return the network's output rows on the CPU with ``value`` as the features of the changed voxel. Only the
        voxels where the mask ``kept`` is true are passed.
        """
        some = feats.clone()
        some[row] = value
        rows = rows_of(run(SparseTensor(some[kept].to(device), coords[kept].to(device), grid)))
        return rows.reshape(len(rows), -1).float().cpu()

    everything = torch.ones_like(rest)
    whole, without, crop = (outputs(feats[row], kept) for kept in (everything, rest, near))
    if not bool(whole.isfinite().all()):
        raise survey_error("SL825", "the probe of the network", "logits that are not finite", "numbers")
    # With fewer voxels, sums run in another order, so results may differ by rounding.
    limit, of_row = (_TOLERANCE * float(each.abs().amax().clamp_min(1e-6)) for each in (whole, whole[row]))
    changes = [
        # A large change: weights near zero must not hide it below the rounding of float32.
        away[(outputs(feats[row] + 10, everything) != whole).any(1)],
        away[outputs(torch.nan, everything).isnan().any(1)],
        away[rest][((without - whole[rest]).abs() > limit).any(1)],
        away[row : row + 1],
    ]
    return torch.cat(changes), bool(((whole[row] - crop[int(near[:row].sum())]).abs() > of_row).any())


class CellBox(NamedTuple):
    """A box of cells, counted from coordinate 0. ``low`` is its first cell and ``high`` the cell behind its last, as
    ``int64 [3]``.
    """

    low: Cells
    high: Cells

    @property
    def shape(self) -> Triple:
        """The number of cells along each axis."""
        return triple(self.high - self.low)


@dataclass(frozen=True)
class Tiling:
    """The cut of the plane of cells into square tiles. :func:`tiling` makes and checks it.

    Attributes:
        size: the number of cells of a tile along x and y.
        halo: the width, in cells, of the margin around a tile that the network reads for it.
        origin: the cell (x, y) at a corner of a tile.
        stride: the total stride of the network.
    """

    size: int
    halo: int
    origin: tuple[int, int]
    stride: Triple

    def core(self, tile: Tile) -> tuple[Cells, Cells]:
        """Return the first cell of ``tile`` along x and y, and the cell behind its last, each as ``int64 [2]``."""
        first = np.array(self.origin) + np.array(tile) * self.size
        return first, first + self.size

    def grid(self, tile: Tile, extent: CellBox) -> CellBox:
        """Return the box of cells on which ``tile`` is predicted. It is the tile with its halo (the margin that the
        network reads), cut off where the survey ends.

        ``extent`` is the box of the survey's cells. Beyond it there are no voxels, so layers find the same border in a
        tile as in the whole survey. The box begins and ends at multiples of the stride.
        """
        # Strided layers group cells from the origin of the grid, so it has to be aligned.
        stride, (first, end) = np.array(self.stride), self.core(tile)
        low, high = extent.low // stride * stride, -(-extent.high // stride) * stride
        # Cut off at the border of the survey, where the untiled grid ends as well.
        low[:2], high[:2] = np.maximum(low[:2], first - self.halo), np.minimum(high[:2], end + self.halo)
        return CellBox(low, high)

    def around(self, tile: Tile, cells: int) -> list[Tile]:
        """Return the indices (x, y) of all tiles that may have a cell within ``halo + cells`` cells of ``tile``, with
        or without points. ``tile`` is among them.
        """
        far = -(-(self.halo + cells) // self.size)
        return [(tile[0] + x, tile[1] + y) for x in range(-far, far + 1) for y in range(-far, far + 1)]


def tiling(field: Field, size: int | None = None, halo: int | None = None, origin: tuple[int, int] = (0, 0)) -> Tiling:
    """Return the tiling of a survey on which the network gives the same values as on the whole survey. All lengths are
    numbers of voxels, and must be multiples of the total stride of the network.

    Args:
        field: the receptive field of the network.
        size: the edge of a tile along x and y. The default is four halos, and at least 128.
        halo: the margin around a tile. It must cover the receptive field, which is also the default.
        origin: a corner of a tile along x and y, counted from coordinate 0.

    Raises:
        SurveyError: ``SL821`` for a size, a halo or an origin that is not a multiple of the total stride, and for a
            halo that is too small.
    """
    # Tiles are square, so both strides have to divide their edge.
    step = math.lcm(*field.stride[:2])
    least = -(-max(*field.before[:2], *field.after[:2]) // step) * step
    (halo,) = per_axis(least if halo is None else halo, "halo of the survey", 1)
    (size,) = per_axis(-(-max(4 * halo, _SMALLEST) // step) * step if size is None else size, "tile of the survey", 1)
    x, y = per_axis(origin, "origin of the survey", 2)
    sees = f": the network sees {field.before} cells before and {field.after} behind a voxel"
    limits = [("tile", size, step, ""), ("halo", halo, least, sees), ("origin", x, x, ""), ("origin", y, y, "")]
    for name, value, lowest, why in limits:
        expected, fix = f"a multiple of {step}, the network's total stride", f"pass {-(-value // step) * step}"
        if value < lowest:
            expected, fix = f"{lowest} or more{why}", ""
        if value % step or value < lowest:
            raise survey_error("SL821", f"{name} of the survey", f"{value} cells", expected, fix)
    return Tiling(size, halo, (x, y), field.stride)
