"""The receptive field and the total stride of a network, from the geometry of one forward pass.

Forward hooks on every module, however deep, record each sparse layer that runs, with its grid and its window. A layer
moves the cells that its output depends on by a fixed interval, so the receptive field is the widest sum of those
intervals over the paths from the output to the input. The paths are those of the autograd graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shiplap.plugin_api import error
from shiplap_sparse3d.axes import Triple
from shiplap_sparse3d.geometry import Geometry
from shiplap_sparse3d.nn import GenerativeConv3d, GlobalPool, SparseConvTranspose3d, SparseInverseConv3d, SubMConv3d
from shiplap_sparse3d.nn.conv import Convolution
from shiplap_sparse3d.nn.pool import WindowPool
from shiplap_sparse3d.spconv.conv import SparseConvolution
from shiplap_sparse3d.spconv.pool import IndicePool as FacadePool
from shiplap_sparse3d.spconv.pool import SparseGlobalMaxOrAvgPool
from shiplap_sparse3d.tensor import SparseTensor

Run = Callable[[SparseTensor], Any]
"""A network as the survey calls it: voxels → a tensor or a sparse tensor with a row for each of them."""

_GRID, _BLOCK, _SAMPLES = 1024, 24, 800  # cells of the sample's grid, of the block in it that is used; voxels


@dataclass(frozen=True)
class Field:
    """The cells of the input grid on which an output voxel depends, one number for each axis.

    Attributes:
        before, after: an output at cell ``c`` depends on the cells from ``c - before`` to ``c + after``.
        stride: the total stride: results stay the same when the origin of the grid moves by a multiple of it.
        layers: sparse layers that ran.
        exact: whether the paths through the network could be followed. Otherwise the intervals of all layers are
            added, which is never too small.
    """

    before: Triple
    after: Triple
    stride: Triple
    layers: int
    exact: bool = True

    @property
    def halo(self) -> Triple:
        """Return the smallest margin around a tile, in input cells along x, y and z, that covers ``before`` and
        ``after`` and is a multiple of ``stride``.
        """
        x, y, z = (-(-max(b, a) // s) * s for b, a, s in zip(self.before, self.after, self.stride, strict=True))
        return x, y, z


@dataclass(frozen=True)
class _FieldWindow:
    """Window of a layer in cells of its own grid, one number for each axis."""

    kernel: Triple
    stride: Triple
    padding: Triple
    dilation: Triple

    @property
    def span(self) -> Triple:
        """Return the distance between the first and the last cell of the window, along each axis: dilation * (kernel -
        1).
        """
        x, y, z = (d * (k - 1) for k, d in zip(self.kernel, self.dilation, strict=True))
        return x, y, z


@dataclass
class _GridLevel:
    """A grid that the network has reached: its voxels, its stride over the input grid, and the step that led to it."""

    geometry: Geometry
    stride: Triple
    window: _FieldWindow | None = None
    origin: _GridLevel | None = None


@dataclass
class _PassRecord:
    """The layers of one forward pass: the interval of each, and its output in the autograd graph."""

    levels: list[_GridLevel]
    nodes: dict[Any, tuple[Triple, Triple]] = field(default_factory=dict)
    intervals: list[tuple[Triple, Triple]] = field(default_factory=list)
    lost: bool = False

    def level_of(self, geometry: Geometry, where: str) -> _GridLevel:
        """Return the known level with the shape and the coordinates of ``geometry``, which may be another object.
        Raises SL820, with ``where`` as the layer's name, if no layer has made these voxels.
        """
        # Identity first: a comparison of values makes the host wait for a GPU.
        for same in (operator.is_, torch.equal):
            for level in self.levels:
                alike = level.geometry.spatial_shape == geometry.spatial_shape
                if alike and same(level.geometry.coords, geometry.coords):
                    return level
        raise error(
            "SL820",
            where=where,
            got="voxels that no layer before it has made",
            expected="layers on the input's voxels and on grids that strided layers made of them",
        )

    def note_layer(self, module: nn.Module, x: Any, y: Any) -> None:
        """Add the receptive field of one call of the layer ``module``, with the sparse input ``x`` and output ``y``, to
        the record, and the grid of ``y`` to its levels. Modules without a window are ignored. Raises SL820.
        """
        where, window = type(module).__name__, _window_of(module)
        if window is None:
            return
        level = self.level_of(x.geometry, where)
        if (
            isinstance(module, SubMConv3d)
            or getattr(module, "subm", False)
            or max(window.kernel) == 1 == max(window.stride)
        ):
            # A submanifold kernel is centred, and an even one reaches one cell further back.
            back = _scale_by([k // 2 * d for k, d in zip(window.kernel, window.dilation, strict=True)], level.stride)
            ahead = _scale_by([s - k // 2 * d for s, k, d in _window_axes(window)], level.stride)
            self._keep_interval(y, (back, ahead))
        elif isinstance(module, SparseInverseConv3d) or getattr(module, "inverse", False):
            if level.window is None or level.origin is None:
                raise error("SL820", where=where, got="an inverse layer on voxels that no step made", expected="a step")
            self._keep_interval(y, _inverse_interval(level.window, level.origin.stride))
        elif isinstance(module, SparseConvTranspose3d) or getattr(module, "transposed", False):
            stride = _refined_stride(level.stride, window.stride, where)
            self._reach_level(y, _GridLevel(y.geometry, stride))
            self._keep_interval(y, _inverse_interval(window, stride))
        else:
            self._reach_level(y, _GridLevel(y.geometry, _scale_by(level.stride, window.stride), window, level))
            back = _scale_by(window.padding, level.stride)
            ahead = _scale_by([s - p for s, p in zip(window.span, window.padding, strict=True)], level.stride)
            self._keep_interval(y, (back, ahead))

    def _reach_level(self, y: Any, level: _GridLevel) -> None:
        """Append ``level``, the grid of the layer output ``y``, to the known levels unless its coordinates are the same
        tensor as those of a known one.
        """
        if not any(known.geometry.coords is y.geometry.coords for known in self.levels):
            self.levels.append(level)

    def _keep_interval(self, y: Any, interval: tuple[Triple, Triple]) -> None:
        """Keep ``interval`` (cells before, cells after), the receptive field of one layer, under the autograd node of
        its output ``y``. Without such a node, ``lost`` becomes true.
        """
        self.intervals.append(interval)
        node = rows_of(y).grad_fn
        # Without a node, as after ``detach``, the paths cannot be followed: the sum of all intervals is used.
        if node is None:
            self.lost = True
        else:
            self.nodes[node] = interval


def _window_axes(window: _FieldWindow) -> Iterator[tuple[int, int, int]]:
    """Return an iterator over the axes of ``window``, with (span, kernel, dilation) of each in cells."""
    return zip(window.span, window.kernel, window.dilation, strict=True)


def _scale_by(values: Sequence[int], stride: Sequence[int]) -> Triple:
    """Return ``values`` times ``stride``, axis by axis: cells of a level as cells of the input grid."""
    x, y, z = (v * s for v, s in zip(values, stride, strict=True))
    return x, y, z


def _inverse_interval(window: _FieldWindow, stride: Triple) -> tuple[Triple, Triple]:
    """Return the interval (before, after) in input cells of an inverse or transposed layer with ``window`` on a fine
    grid of ``stride``: fine cell ``i`` reads the coarse cells ``o`` with ``i = o*S - P + k*D``.
    """
    back = _scale_by([s - p for s, p in zip(window.span, window.padding, strict=True)], stride)
    return back, _scale_by(window.padding, stride)


def _refined_stride(stride: Triple, step: Triple, where: str) -> Triple:
    """Return ``stride / step`` for each axis: the stride of the grid that a transposed layer with the stride ``step``
    makes. Raises SL820, with ``where`` as the layer's name, if that grid would be finer than the input's.
    """
    if any(s % t for s, t in zip(stride, step, strict=True)):
        raise error(
            "SL820",
            where=where,
            got=f"a grid finer than the input's: stride {step} from a grid of stride {stride}",
            expected="outputs on the voxels of the input",
        )
    x, y, z = (s // t for s, t in zip(stride, step, strict=True))
    return x, y, z


def _window_of(module: nn.Module) -> _FieldWindow | None:
    """Return the kernel, stride, padding and dilation of a convolution or pooling layer of this package or of its
    spconv facade, or None for other modules. Raises SL820 unless the kernel has three axes.
    """
    if not isinstance(module, Convolution | WindowPool | SparseConvolution | FacadePool):
        return None
    kernel = module.kernel_size
    if len(kernel) != 3 or min(kernel) < 1:
        raise error("SL820", where=type(module).__name__, got=f"a kernel of {kernel} cells", expected="three axes")
    window = _FieldWindow(
        _as_triple(kernel),
        *(
            _as_triple(getattr(module, name, (usual,) * 3))
            for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1))
        ),
    )
    if isinstance(module, GenerativeConv3d):
        around = _as_triple([k // 2 * d for k, d in zip(window.kernel, window.dilation, strict=True)])
        return _FieldWindow(window.kernel, (1, 1, 1), around, window.dilation)
    return window


def _as_triple(values: Sequence[int]) -> Triple:
    """Return three numbers as a tuple of three Python integers."""
    x, y, z = values
    return int(x), int(y), int(z)


def rows_of(value: Any) -> Tensor:
    """Return the feature rows of a sparse tensor of this package (``feats``) or of its spconv facade (``features``),
    and a plain tensor unchanged. Raises SL825 for any other value.
    """
    for name in ("feats", "features"):
        if hasattr(value, name):
            value = getattr(value, name)
    if not isinstance(value, Tensor):
        raise error("SL825", where="the network", got=f"a {type(value).__name__}", expected="a tensor of logits")
    return value


@contextmanager
def evaluation_mode(net: nn.Module) -> Iterator[None]:
    """Run the block of a context manager with ``net`` in evaluation mode. Afterwards each module has its former mode
    again.

    A network in evaluation mode is left alone: setting the modes of 70 modules took a tenth of the host's time for a
    small tile.
    """
    training = [module for module in net.modules() if module.training]
    if not training:
        yield
        return
    net.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def receptive_field(net: nn.Module, channels: int, run: Run | None = None) -> Field:
    """Return the receptive field and the total stride of ``net``, measured from the sparse layers that one forward pass
    calls.

    Args:
        net: its modules are watched. It runs once on random voxels, on the device it is on, in evaluation mode.
        channels: features of a voxel.
        run: how the network is called (default: ``net(voxels)``).

    Raises:
        SurveyError: SL820 for global pooling, for outputs on other voxels than the input's and for layers on voxels
            of unknown origin; SL825 if the network does not run or does not return rows.
    """
    parameter = next(net.parameters(), None)
    device = parameter.device if parameter is not None else torch.device("cpu")
    # Gradients make the graph in which the paths through the network are followed.
    feats = torch.randn(_SAMPLES, channels, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    voxels = SparseTensor(feats, _sample_voxels().to(device), (_GRID,) * 3)
    record = _PassRecord([_GridLevel(voxels.geometry, (1, 1, 1))])
    handles = [module.register_forward_hook(_recording_hook(record)) for module in net.modules()]
    try:
        with evaluation_mode(net), torch.enable_grad():
            out = rows_of((run or net)(voxels))
    finally:
        for handle in handles:
            handle.remove()
    if out.shape[:1] != feats.shape[:1]:
        got, expected = f"{out.shape[0] if out.dim() else 0} rows", f"{_SAMPLES}, one for each voxel"
        raise error("SL820", where="the network's output", got=got, expected=expected)
    # Only paths that carry a gradient are in the graph of autograd.
    widest = None if record.lost or out.grad_fn is None else _widest_interval(out.grad_fn, feats, record.nodes)
    before, after = widest or _sum_intervals(record.intervals)
    # A shift of the grid has to be a multiple of the stride of every level.
    x, y, z = (math.lcm(*(level.stride[axis] for level in record.levels)) for axis in range(3))
    return Field(before, after, (x, y, z), len(record.intervals), exact=widest is not None)


def _sample_voxels() -> Tensor:
    """Return ``int32 [800, 4]`` coordinates (scene 0, x, y, z) of distinct random voxels within the first 24 cells of
    each axis, always the same ones.
    """
    draw = torch.Generator().manual_seed(0)
    cells = torch.randperm(_BLOCK**3, generator=draw)[:_SAMPLES].sort().values
    parts = (cells // _BLOCK**2, cells // _BLOCK % _BLOCK, cells % _BLOCK)
    return torch.stack([torch.zeros_like(cells), *parts], 1).int()


def _recording_hook(record: _PassRecord) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    """Return a forward hook that adds the receptive field of each layer which it is called for to ``record``."""

    def record_call(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Add one call of ``module`` on sparse tensors to ``record``. Raises SL820 for a pooling over all voxels, whose
        receptive field has no bound.
        """
        x = args[0] if args else None
        if not isinstance(getattr(x, "geometry", None), Geometry):
            return
        if isinstance(module, GlobalPool | SparseGlobalMaxOrAvgPool):
            raise error("SL820", where=type(module).__name__, got="a pooling over all voxels", expected="a window")
        if hasattr(output, "geometry"):
            record.note_layer(module, x, output)

    return record_call


def _sum_intervals(intervals: list[tuple[Triple, Triple]]) -> tuple[Triple, Triple]:
    """Return the sum of all (before, after) intervals, as if the layers followed each other: never less than the widest
    path through the network.
    """
    before, after = (
        _as_triple([sum(max(0, interval[side][axis]) for interval in intervals) for axis in range(3)])
        for side in (0, 1)
    )
    return before, after


def _widest_interval(end: Any, feats: Tensor, nodes: dict[Any, tuple[Triple, Triple]]) -> tuple[Triple, Triple] | None:
    """Return the largest (before, after) over all paths of the autograd graph from the node ``end`` to the input
    ``feats``, each the sum of the intervals that ``nodes`` holds for its nodes, or None if there is no path.
    """
    known: dict[Any, tuple[Triple, Triple] | None] = {}
    waiting = [end]
    while waiting:  # no recursion: a graph may be deeper than Python's stack
        node = waiting[-1]
        inputs = [parent for parent, _ in node.next_functions if parent is not None]
        missing = [parent for parent in inputs if parent not in known]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        # Paths begin at the input alone, and not at parameters.
        hull = ((0, 0, 0), (0, 0, 0)) if getattr(node, "variable", None) is feats else None
        for parent in inputs:
            hull = _interval_hull(hull, known[parent])
        known[node] = _add_intervals(hull, nodes[node]) if hull is not None and node in nodes else hull
    widest = known[end]
    return (
        None
        if widest is None
        else (_as_triple([max(0, v) for v in widest[0]]), _as_triple([max(0, v) for v in widest[1]]))
    )


def _interval_hull(
    one: tuple[Triple, Triple] | None, two: tuple[Triple, Triple] | None
) -> tuple[Triple, Triple] | None:
    """Return the smallest (before, after) interval that contains both ``one`` and ``two``. None is an empty
    interval.
    """
    if one is None or two is None:
        return one or two
    before, after = (_as_triple([max(a, b) for a, b in zip(one[s], two[s], strict=True)]) for s in (0, 1))
    return before, after


def _add_intervals(one: tuple[Triple, Triple], two: tuple[Triple, Triple]) -> tuple[Triple, Triple]:
    """Return the (before, after) interval of two layers in succession: the sum of both on each side and axis."""
    before, after = (_as_triple([a + b for a, b in zip(one[s], two[s], strict=True)]) for s in (0, 1))
    return before, after
