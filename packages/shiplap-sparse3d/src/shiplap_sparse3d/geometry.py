"""``Geometry``: the active voxels of a grid, and every table computed on them so far.

Layers on the same voxels share one table, and a network whose tables exist runs without touching a coordinate.
Coordinates of one or two axes get leading axes of one cell. A row whose batch index is -1 is padding: no voxel. Voxels
without a grid, and those of four axes, have the tables of ``offsets.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

from shiplap.plugin_api import error
from shiplap.plugin_api.memos import built_outside_modes
from shiplap_sparse3d import ops
from shiplap_sparse3d.axes import Axes, Triple, expand_axes, per_axis, same_numbers
from shiplap_sparse3d.coords import assert_some_rows, check_scenes, count_axes, require_scenes
from shiplap_sparse3d.offsets import (
    box_offsets,
    connect_by_offsets,
    distinct_cells,
    join_cells,
    reached_cells,
    unbounded,
)
from shiplap_sparse3d.plan import Plan, wants_sorted
from shiplap_sparse3d.rows import rows_where
from shiplap_sparse3d.steps import StepWindow, connect_voxels, output_cells, submanifold_plan, vanished_grid_error

__all__ = ["NOTHING", "Geometry", "GeometryOrigin", "Strided", "TableRecipe"]

_MOST_CELLS = 2**31 - 1  # along an axis without a bound


@built_outside_modes
def _with_leading_axes(coords: Tensor, lead: int) -> Tensor:
    """Return ``coords [n, 1 + d]`` with ``lead`` columns of zeros, axes of one cell each, after the scene's column."""
    return torch.cat([coords[:, :1], pad(coords[:, 1:], (lead, 0))], 1)


def in_passing_graph() -> bool:
    """Return whether Dynamo is tracing a graph without gradients, which may later run in inference mode."""
    return is_compiling() and not torch.is_grad_enabled()


def _is_captured(coords: Tensor) -> bool:
    """Return whether a CUDA graph is being captured with the tensor ``coords``. In Dynamo's graphs it is False."""
    # A walker of containers may put anything in the place of ``coords``.
    return not is_compiling() and getattr(coords, "is_cuda", False) and torch.cuda.is_current_stream_capturing()


def _number_of_scenes(batch_size: Any) -> int:
    """Return ``batch_size`` as an int. Raise ``SL209`` if it is not an integer, and ``SL208`` if it is negative."""
    where = "Geometry, argument 'batch_size'"
    try:
        number = operator.index(batch_size)
    except TypeError as wrong:
        raise error("SL209", where=where, got=repr(batch_size), expected="an int") from wrong
    if number < 0:
        raise error("SL208", where=where, got=number, expected="0 or more")
    return number


@dataclass
class Strided:
    """The output voxels ``geometry`` of a layer, and the ``plan`` (neighbour tables) from its input voxels to them."""

    geometry: Geometry
    plan: Plan


@dataclass(frozen=True)
class GeometryOrigin:
    """The layer by which some voxels were made. ``window`` is its window, and ``geometry`` has its input voxels.
    ``built`` is its plan (neighbour tables), or None if ``geometry`` stores the plan.
    """

    geometry: Geometry
    window: StepWindow
    built: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan (neighbour tables) from the layer's input voxels to its output voxels, with its transpose."""
        return self.geometry.step(self.window, back=True).plan if self.built is None else self.built.complete()

    @property
    def plain_plan(self) -> Plan:
        """The unsorted plan (neighbour tables) from the layer's input to its output voxels, with its transpose."""
        if self.built is not None:
            return self.built.unsorted().complete()
        return self.geometry.step(self.window, plain=True, back=True).plan


class TableRecipe(NamedTuple):
    """A description of the neighbour tables that were built on some voxels and on those reached from them by layers.

    Attributes:
        subm: kernel and dilation of each submanifold convolution, and whether the transposed table was built.
        steps: the window of each layer that led to other voxels, whether each of its plans is unsorted and has the
            transposed table, and the recipe of these other voxels.
    """

    subm: tuple[tuple[Triple, Triple, bool], ...] = ()
    steps: tuple[tuple[StepWindow, tuple[tuple[bool, bool], ...], TableRecipe], ...] = ()


NOTHING = TableRecipe()


class Tables:
    """The plans (neighbour tables) and output voxels that were built from some voxels so far.

    Attributes:
        subm: plans of submanifold convolutions, by kernel and dilation.
        reached: the output voxels of each layer that leads to other voxels, by the layer's window.
        plans: plans onto the output voxels, by the layer's window and whether the plan is unsorted.
    """

    def __init__(self) -> None:
        self.subm: dict[tuple[Triple, Triple], Plan] = {}
        self.reached: dict[StepWindow, Geometry] = {}
        self.plans: dict[tuple[StepWindow, bool], Plan] = {}


class Geometry:
    """Active voxels of a grid, with the neighbour tables that were built on them.

    Args:
        coords: ``int32 [n, 1 + d]``, rows of a batch index and ``d`` coordinates, distinct and inside the grid.
        spatial_shape: cells per axis, ``d`` of them. If it is None, there is no grid, and coordinates may be negative.
        batch_size: the number of scenes. For a row of another scene, building a table raises ``SL211``.
        padded: whether rows may be padding. Every layer then leads to a fixed number of rows.

    Attributes:
        coords: ``int32 [n, 4]``. Like ``spatial_shape`` it has at least three axes, whatever ``ndim`` is.
        ndim: the number of axes of the voxels, 1 to 4.
        bounded: whether there is a grid. Without one ``spatial_shape`` is the largest possible.
        parent: the layer that made these voxels, for inverse convolutions, or None.
        shared: for voxels that share cells (allowed in submanifold layers of ``spconv``), the first row of each row's
            cell, and the voxels with padding in place of the other rows. It is None until it is needed.
    """

    shared: tuple[Tensor, Geometry] | None = None
    _is_reached = False  # whether a step of other voxels led to these, or their scenes were looked at

    bounded = True

    def __init__(self, coords: Tensor, spatial_shape: Axes | None, batch_size: int, *, padded: bool = False) -> None:
        self.ndim = count_axes(coords)
        lead = 3 - self.ndim
        self.coords = _with_leading_axes(coords, lead) if lead > 0 else coords
        self.bounded = spatial_shape is not None
        cells = _MOST_CELLS if spatial_shape is None else spatial_shape
        self.spatial_shape = self._read_per_axis(cells, "spatial_shape")
        self.batch_size = batch_size if is_compiling() else _number_of_scenes(batch_size)
        self.padded = padded
        self.parent: GeometryOrigin | None = None
        self._tables, self._passing = Tables(), Tables()
        self._captured = _is_captured(self.coords)

    @classmethod
    def unchecked(cls, coords: Tensor, spatial_shape: Triple, batch_size: int, padded: bool, ndim: int) -> Geometry:
        """Return a geometry with these attributes, which are not checked, without tables and without a parent."""
        made = cls.__new__(cls)
        made.ndim, made.coords, made.spatial_shape = ndim, coords, spatial_shape
        made.batch_size, made.padded, made.parent = batch_size, padded, None
        made._tables, made._passing, made._captured = Tables(), Tables(), _is_captured(coords)
        return made

    @property
    def _store(self) -> Tables:
        """The object that stores the tables that are built now. It is ``_tables`` or, in two cases, ``_passing``.
        One case is a graph traced without gradients, which may run in inference mode and then makes inference tensors.
        The other is the capture of a CUDA graph, whose tables have values only once that graph has run.
        """
        if is_compiling():
            return self._passing if in_passing_graph() else self._tables
        return (
            self._passing if self.coords.is_cuda and not self._captured and _is_captured(self.coords) else self._tables
        )

    def subm(self, kernel: Axes, dilation: Axes = 1, *, back: bool | None = None) -> Plan:
        """Return the plan (neighbour tables) of a submanifold convolution. ``back`` is as in :meth:`step`."""
        key, kept = (self._read_per_axis(kernel, "kernel"), self._read_per_axis(dilation, "dilation")), self._store
        neighbours = self._tables.subm.get(key) or kept.subm.get(key)
        back = torch.is_grad_enabled() if back is None else back
        if neighbours is None and self._by_offsets:
            odd, around = all(k % 2 for k in key[0]), [k // 2 * d for k, d in zip(*key, strict=True)]
            taps = self._box(key[0], (), around, key[1])
            neighbours = connect_by_offsets(self.coords, self.coords, taps, [1] * self.coords.shape[1])
            kept.subm[key] = neighbours = self._finish_plan(replace(neighbours, symmetric=odd), back)
        elif neighbours is None:
            self._check_scenes("Geometry.subm")
            neighbours = submanifold_plan(self.coords, self.spatial_shape, *key, self.batch_size)
            kept.subm[key] = neighbours = self._finish_plan(neighbours, back)
        elif back and not neighbours.whole:
            kept.subm[key] = neighbours = neighbours.complete()
        return neighbours

    def strided(
        self,
        kernel: Axes,
        stride: Axes = 1,
        padding: Axes = 0,
        dilation: Axes = 1,
        *,
        capacity: int | None = None,
        back: bool | None = None,
    ) -> Strided:
        """Return the output voxels of a strided convolution, and the plan (neighbour tables) from these voxels to them.
        If ``capacity`` is given, the output has that many rows, the last ones padding, and more voxels raise ``SL211``.
        On a padded geometry the default is the largest possible number. ``back`` is as in :meth:`step`.
        """
        return self.step(self._make_window(kernel, stride, padding, dilation, capacity=capacity), back=back)

    def strided_within(
        self, kernel: Axes, stride: Axes, padding: Axes, dilation: Axes, *, spatial_shape: Axes
    ) -> Strided:
        """Return the outputs of a strided convolution in a grid of ``spatial_shape``, and the plan (neighbour tables).
        A grid of ``ceil(cells / stride)`` also has the outputs whose window leaves the input grid. Nothing is stored.
        """
        self._check_scenes("Geometry.strided_within")
        window = self._make_window(kernel, stride, padding, dilation, capacity=None)
        shape = self._read_per_axis(spatial_shape, "spatial_shape")
        wide = self._similar_geometry(self.coords, window.grid_before(self.spatial_shape, shape), padded=self.padded)
        there = wide._reach(window)
        # A graph, which does not know whether there is anything to cut off, always does so.
        if is_compiling() or shape != there.spatial_shape:
            cells = there.coords[:, 1:]
            inside = (cells < torch.tensor(shape, device=cells.device)).all(1)
            there.coords = there.coords.index_select(0, rows_where(inside))
        there.spatial_shape = shape
        plain, back = not wants_sorted(self.coords), torch.is_grad_enabled()
        return Strided(there, wide._connect(window, there, wide.spatial_shape, plain, back))

    def pooled(
        self, kernel: Axes, stride: Axes = 1, padding: Axes = 0, dilation: Axes = 1, *, capacity: int | None = None
    ) -> Strided:
        """Return the output voxels of :meth:`strided` with these arguments, and an unsorted plan onto them."""
        return self.step(self._make_window(kernel, stride, padding, dilation, capacity=capacity), plain=True)

    def generative(self, kernel: Axes, dilation: Axes = 1, *, capacity: int | None = None) -> Strided:
        """Return all voxels within the reach of a centred kernel from an input, and the plan (neighbour tables). The
        grid is unchanged, except that it grows by ``dilation`` at its far end along axes of even kernel size.
        ``capacity`` is as in :meth:`strided`.
        """
        around = [
            k // 2 * d for k, d in zip(self._read_per_axis(kernel, ""), self._read_per_axis(dilation, ""), strict=True)
        ]
        return self.step(self._make_window(kernel, 1, around[-self.ndim :], dilation, capacity=capacity))

    def transposed(
        self,
        kernel: Axes,
        stride: Axes = 1,
        padding: Axes = 0,
        dilation: Axes = 1,
        output_padding: Axes = 0,
        *,
        capacity: int | None = None,
        back: bool | None = None,
    ) -> Strided:
        """Return the outputs ``o = i*S - P + k*Dl`` of a transposed convolution, and the plan (neighbour tables).
        The grid has ``(in - 1)*S - 2P + Dl*(K - 1) + 1 + output_padding`` cells per axis, as in ``torch.nn``. A
        negative ``output_padding`` cuts off its far end. ``capacity`` and ``back`` are as in :meth:`strided`.
        """
        return self.step(
            self._make_window(kernel, stride, padding, dilation, output_padding, capacity=capacity), back=back
        )

    def step(self, window: StepWindow, *, plain: bool = False, back: bool | None = None) -> Strided:
        """Return the output voxels of a layer with this ``window``, and the plan (neighbour tables) onto them.
        Both are stored here. If ``plain`` is true, the tables are unsorted, and otherwise sorted on a GPU. If ``back``
        is true, the plan has the transposed table, too. If it is None, that is so while gradients are recorded.
        """
        back, kept = torch.is_grad_enabled() if back is None else back, self._store
        there = self._tables.reached.get(window) or kept.reached.get(window)
        if there is None:
            self._check_scenes("Geometry.step")
            kept.reached[window] = there = self._reach(window)
        step = there._with_parent(GeometryOrigin(self, window))
        plain = plain or not wants_sorted(self.coords)
        plan = self._tables.plans.get((window, plain)) or kept.plans.get((window, plain))
        if plan is None or (back and not plan.whole and not plain):  # of sorted tables both ways are made in one go
            plan = self._connect(window, step, self.spatial_shape, plain, back)
            kept.plans[window, plain] = plan
        elif back and not plan.whole:
            kept.plans[window, plain] = plan = plan.complete()
        return Strided(step, plan)

    def _reach(self, window: StepWindow) -> Geometry:
        """Return the voxels that a layer with ``window`` reaches. Raise ``SL208`` if the output grid has no cells."""
        shape = window.shape(self.spatial_shape) if self.bounded else self.spatial_shape
        if any(isinstance(cells, int) and cells < 1 for cells in shape):
            raise vanished_grid_error(window, self.spatial_shape[-self.ndim :], shape[-self.ndim :])
        if self._by_offsets:
            limits, transposed = shape if self.bounded else None, window.output_padding is not None
            coords = self._reach_by_offsets(self._box(*window[:4]), [1, *window.stride], limits, transposed)
        else:
            coords = output_cells(window, self.coords, self.spatial_shape)
            self._check_scene_of_last(coords, window)
        if is_compiling() and not self.padded and window.keeps_voxels(self.spatial_shape if self.bounded else None):
            assert_some_rows(coords, self.coords)
        there = self._similar_geometry(coords, shape, padded=window.capacity is not None)
        there._is_reached = True
        return there

    def _connect(self, window: StepWindow, there: Geometry, grid: Triple, plain: bool, back: bool) -> Plan:
        """Return a layer's plan onto ``there``, unsorted if ``plain`` is true, with the transpose if ``back`` is."""
        if self._by_offsets or not there.bounded:
            columns, transposed = [1, *window.stride], window.output_padding is not None
            taps = self._box(*window[:4])
            plan = connect_by_offsets(self.coords, there.coords, taps, columns, transposed=transposed)
        else:
            plan = connect_voxels(window, self.coords, grid, there.coords, ordered=not plain, back=back)
        return self._finish_plan(plan, back, plain)

    def onto(
        self,
        voxels: Tensor | Geometry | None,
        taps: StepWindow | Tensor | Sequence[Sequence[int]],
        stride: Axes = 1,
        *,
        spatial_shape: Axes | None = None,
        transposed: bool = False,
        plain: bool = False,
        back: bool | None = None,
    ) -> Strided:
        """Return ``voxels`` and a plan onto them, in which output ``o`` reads ``o * stride + taps[v]`` by tap ``v``.

        Args:
            voxels: the outputs, ``int32 [m, 1 + axes]`` or a geometry, or None for every voxel that an input reaches.
            taps: offsets ``[k, axes]`` (see ``box_offsets``), or a layer's window, which has a stride and a direction.
            stride: one number per axis. It is 1 for coordinates in units of a finest grid (a tensor stride).
            spatial_shape: the grid of the outputs. None stands for no grid. With a window it stands for the outputs
                whose first tap lies in the padded input grid.
            transposed: whether tap ``v`` of input ``i`` adds to output ``i * stride + taps[v]`` instead.
            plain, back: as in :meth:`step`. The plan is not stored here, since all layers on these voxels use it.

        Raises:
            ArgumentError: ``SL202`` for voxels of another batch or of other axes, ``SL211`` for rows of other scenes.
        """
        back = torch.is_grad_enabled() if back is None else back
        self._check_scenes("Geometry.onto")
        if isinstance(taps, StepWindow):
            if voxels is None:
                return self.step(taps, plain=plain, back=back)
            there = self._read_voxels(voxels, self._grid_before(taps) if spatial_shape is None else spatial_shape)
            grid = taps.grid_before(self.spatial_shape, there.spatial_shape)
            return Strided(there, self._connect(taps, there, grid, plain or not wants_sorted(self.coords), back))
        rows = torch.as_tensor(taps, dtype=torch.int32, device=self.coords.device).reshape(-1, self.ndim)
        box = pad(rows, (self.coords.shape[1] - self.ndim, 0))
        columns = [1, *self._read_per_axis(per_axis(stride, "stride", self.ndim, 1), "stride")]
        if voxels is not None:
            there = self._read_voxels(voxels, spatial_shape)
        else:
            shape = None if spatial_shape is None else self._read_per_axis(spatial_shape, "spatial_shape")
            cells = self._reach_by_offsets(box, columns, shape, transposed)
            there = self._similar_geometry(cells, shape or self._read_per_axis(_MOST_CELLS, ""), padded=False)
            there.bounded = shape is not None
        plan = connect_by_offsets(self.coords, there.coords, box, columns, transposed=transposed)
        return Strided(there, self._finish_plan(plan, back, plain))

    def _read_voxels(self, voxels: Tensor | Geometry, shape: Axes | None) -> Geometry:
        """Return ``voxels``, a tensor in a grid ``shape``, as a geometry. Raise ``SL202`` for other axes or scenes."""
        if not isinstance(voxels, Geometry) and (getattr(voxels, "ndim", 0) != 2 or voxels.shape[1] == self.ndim + 1):
            voxels = Geometry(voxels, shape, self.batch_size)
        there = voxels
        if not isinstance(there, Geometry) or there.ndim != self.ndim or there.batch_size != self.batch_size:
            got = there if isinstance(there, Geometry) else f"coordinates {tuple(there.shape)}"
            expected = f"{self.ndim} axes, {self.batch_size} scenes"
            raise error("SL202", where="Geometry.onto, argument 'voxels'", got=got, expected=expected)
        there._check_scenes("Geometry.onto", given=True)
        return there

    def _grid_before(self, window: StepWindow) -> tuple[int, ...] | None:
        """Return the output grid of a layer with ``window``, or None for voxels without a grid. For a strided window it
        has all outputs whose first kernel cell lies before the end of the padded input grid.
        """
        if not self.bounded:
            return None
        if window.output_padding is not None:
            return window.shape(self.spatial_shape)[-self.ndim :]
        axes = zip(self.spatial_shape, window.stride, window.padding, strict=True)
        return tuple((cells + p - 1) // step + 1 for cells, step, p in axes)[-self.ndim :]

    def floored(self, kernel: Axes, stride: Axes, dilation: Axes = 1, *, centred: bool = True) -> Strided:
        """Return the cells ``floor(c / stride)`` of the voxels (the rule of MinkowskiEngine) and the plan onto them.
        One cell of the kernel lies on the first cell that a coarse cell spans. It is the middle one if the kernel is
        odd and ``centred`` is true, and otherwise the first one. Raise ``SL208`` for padded voxels.
        """
        if self.padded:
            raise error(
                "SL208",
                where="a step to the cells floor(c / stride)",
                got="padded voxels",
                expected="voxels without padding",
                fix="pass the voxels of the outputs as the second argument of the call",
            )
        window = self._make_window(kernel, stride, 0, dilation, capacity=None)
        axes = zip(window.kernel, window.dilation, strict=True)
        padding = tuple((k - 1) // 2 * d if centred and k % 2 else 0 for k, d in axes)
        window = window._replace(padding=cast("Triple", padding))
        shape = self.spatial_shape
        if self.bounded:
            shape = cast("Triple", tuple(-(-cells // s) for cells, s in zip(shape, window.stride, strict=True)))
        there = self._similar_geometry(self._floor_cells(window.stride), shape, padded=False)
        step = self.onto(there, window)
        there.parent = GeometryOrigin(self, window, step.plan)
        return step

    @built_outside_modes
    def _floor_cells(self, stride: Triple) -> Tensor:
        """Return the distinct cells ``floor(coords / stride)`` of the voxels with their scene, ascending."""
        steps = torch.tensor([1, *stride], dtype=self.coords.dtype, device=self.coords.device)
        cells = torch.div(self.coords, steps, rounding_mode="floor")
        return distinct_cells(cells) if self._by_offsets else ops.distinct_voxels(cells)[0]

    def coarsen(self, stride: Axes) -> Strided:
        """Return the voxels ``floor(c / stride) * stride`` in this grid, and the plan (neighbour tables) onto them."""
        step = self.floored(stride, per_axis(stride, "stride", self.ndim, 1), centred=False)
        assert step.geometry.parent is not None
        size = torch.tensor([1, *step.geometry.parent.window.stride], device=self.coords.device)
        there = self._similar_geometry((step.geometry.coords * size).int(), self.spatial_shape, padded=False)
        return Strided(there, step.plan.unsorted())

    def select(self, mask: Tensor) -> Strided:
        """Return the voxels where ``mask [n]`` is true, and a plan that copies their rows. The host waits for a GPU."""
        rows = rows_where(mask)
        there = self._similar_geometry(self.coords.index_select(0, rows), self.spatial_shape, padded=self.padded)
        return Strided(there, self._finish_plan(Plan(rows.int()[:, None], self.coords.shape[0]), False, plain=True))

    def union(self, *others: Geometry) -> tuple[Geometry, list[Plan]]:
        """Return the distinct voxels of this and all ``others``, ascending, and a plan onto them from each geometry."""
        every = (self, *others)
        for geometry in every:
            geometry._check_scenes("Geometry.union")
        by_offsets = any(g._by_offsets or g.padded for g in every)
        cells, numbers = join_cells([g.coords for g in every], by_offsets)
        union = self._similar_geometry(cells, self.spatial_shape, padded=False)
        m = cells.shape[0]
        plans = [Plan(ops.transpose_table(rows, m), rows.shape[0], back=(rows, None, None)) for rows in numbers]
        return union, plans

    @property
    def _by_offsets(self) -> bool:
        """Whether tables are built by the ops of ``offsets.py``, and not by those for grids of up to three axes."""
        return not self.bounded or self.ndim > 3

    def _box(
        self, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
    ) -> Tensor:
        """Return the offset of each cell of a kernel from its output, ``int32 [k, 1 + axes]``, in the order of a
        convolution's weight. The first column, that of the scene, is 0. ``stride`` is not used.
        """
        taps = torch.tensor(box_offsets(kernel, dilation, padding=padding), dtype=torch.int32)
        return pad(taps, (1, 0)).to(self.coords.device)

    @built_outside_modes
    def _reach_by_offsets(
        self, taps: Tensor, columns: list[int], shape: Sequence[int] | None, transposed: bool
    ) -> Tensor:
        """Return the output voxels, ascending, in the grid ``shape`` if that is given. ``taps`` are the offsets of the
        kernel's cells, and ``columns`` is 1 and the stride. ``transposed`` is that of :meth:`onto`.
        """
        low, high = unbounded(len(columns) - 1)
        if shape is not None:
            low, high = [0] * len(columns), [high[0], *shape]
        cells = reached_cells(self.coords, taps, columns, low, high, transposed)
        return cells

    @property
    def recipe(self) -> TableRecipe:
        """A description of the tables built so far, for :meth:`build` of other voxels. It is empty for padded ones."""
        if self.padded:  # their steps lead to fixed numbers of rows, which others need not have
            return NOTHING
        made, passing = self._tables, self._passing
        subm = tuple((*key, plan.whole) for key, plan in {**passing.subm, **made.subm}.items())
        reached, built = {**passing.reached, **made.reached}, {**passing.plans, **made.plans}
        plans = {w: tuple((p, plan.whole) for (to, p), plan in built.items() if to == w) for w in reached}
        return TableRecipe(subm, tuple((window, plans[window], to.recipe) for window, to in reached.items()))

    def build(self, recipe: TableRecipe) -> None:
        """Build the tables that ``recipe`` describes and this object lacks. For padded voxels, do nothing."""
        if self.padded:
            return
        for kernel, dilation, back in recipe.subm:
            self.subm(kernel[-self.ndim :], dilation[-self.ndim :], back=back)
        for window, plans, behind in recipe.steps:
            for plain, back in plans:
                self.step(window, plain=plain, back=back)
            if window in self._tables.reached:
                self._tables.reached[window].build(behind)

    @property
    def tensors(self) -> list[Tensor]:
        """All coordinates and neighbour tables of these voxels and of those that layers reached from them."""
        found = [self.coords]
        for made in (self._tables, self._passing):
            found += [tensor for plan in (*made.subm.values(), *made.plans.values()) for tensor in plan.tensors]
            found += [tensor for other in made.reached.values() for tensor in other.tensors]
        return found

    def to(self, device: torch.device | str) -> Geometry:
        """Return a geometry with these voxels on ``device``, without tables."""
        return self._similar_geometry(self.coords.to(device), self.spatial_shape, padded=self.padded)

    def same(self, other: Geometry) -> bool:
        """Return whether ``other`` has the same tensor of coordinates and an equal grid. Values are not compared."""
        return self.coords is other.coords and same_numbers(self.spatial_shape, other.spatial_shape)

    @property
    def is_voxel(self) -> Tensor:
        """The mask ``bool [n, 1]`` that is True for voxels and False for rows of padding."""
        return self.coords[:, :1] >= 0

    def _check_scenes(self, where: str, *, given: bool = False) -> None:
        """Raise ``SL211`` for a row of a scene that does not exist. ``where`` names the caller in the error.
        Output voxels of a layer are not checked. Other voxels on a GPU are checked once, and only if they were passed
        as outputs (``given`` is true) or have no grid of up to three axes. Otherwise the kernels check them.
        """
        if not self._is_reached:
            looks = (given or self._by_offsets) and not is_compiling() and not _is_captured(self.coords)
            require_scenes(where, self.coords, self.batch_size, on_gpu=looks)
            if looks and self.coords.is_cuda:  # a graph would guard on what it writes here
                self._is_reached = True

    def _check_scene_of_last(self, reached: Tensor, window: StepWindow) -> None:
        """Raise ``SL211`` if the last of ``reached`` (ascending, on a GPU) is in a scene that does not exist."""
        if is_compiling() or self._is_reached or window.capacity is not None or _is_captured(reached):
            return
        if type(reached) is Tensor and reached.is_cuda and len(reached) and int(reached[-1, 0]) >= self.batch_size:
            check_scenes("Geometry.step", self.coords, self.batch_size)

    def _similar_geometry(self, coords: Tensor, shape: Triple, *, padded: bool) -> Geometry:
        """Return a geometry of ``coords`` in a grid of ``shape``, otherwise like this one, without tables."""
        other = Geometry.unchecked(coords, shape, self.batch_size, padded, self.ndim)
        other.bounded = self.bounded
        return other

    def _with_parent(self, parent: GeometryOrigin) -> Geometry:
        """Return a geometry that shares these voxels and tables and has the attribute ``parent``."""
        # Geometries in the tables have no parent, or the two would keep each other alive.
        child = self._similar_geometry(self.coords, self.spatial_shape, padded=self.padded)
        child.parent, child._tables, child._passing = parent, self._tables, self._passing
        child._is_reached = self._is_reached
        return child

    def _read_per_axis(self, value: Axes, name: str, fill: int = 1) -> Triple:
        """Return ``value`` for three axes or more, with ``fill`` for leading axes. ``name`` is used in errors."""
        return expand_axes(value, name, self.ndim, fill)

    def _make_window(
        self,
        kernel: Axes,
        stride: Axes,
        padding: Axes,
        dilation: Axes,
        output_padding: Axes | None = None,
        *,
        capacity: int | None,
    ) -> StepWindow:
        """Return a window of these arguments. Padded voxels get a capacity, which without a grid raises ``SL208``."""
        read = self._read_per_axis
        extra = None if output_padding is None else read(output_padding, "output_padding", 0)
        axes = read(kernel, "kernel"), read(stride, "stride"), read(padding, "padding", 0), read(dilation, "dilation")
        window = StepWindow(*axes, extra, capacity)
        if self._by_offsets and (self.padded or capacity is not None):
            got = "padded voxels, or capacity="
            raise error("SL208", where="a step of voxels without a grid or of four axes", got=got, expected="neither")
        if not self.padded or capacity is not None:
            return window
        if min(*window.stride, *window.dilation) < 1:  # otherwise the op of the step says so
            got = f"stride {window.stride}, dilation {window.dilation}"
            raise error("SL208", where="a step of padded voxels", got=got, expected="1 or more")
        return window._replace(capacity=window.max_outputs(self.coords.shape[0], self.spatial_shape, self.batch_size))

    def _finish_plan(self, plan: Plan, back: bool, plain: bool = False) -> Plan:
        """Return ``plan``, sorted on a GPU unless ``plain`` is true, with its transpose only if ``back`` is true."""
        if back or plan.back is not None:
            plan = plan.complete() if back else replace(plan, back=None)
        return plan.sorted() if wants_sorted(self.coords) and not plain else plan

    def __repr__(self) -> str:
        kind = ", padded" if self.padded else ""
        shape = self.spatial_shape[-self.ndim :] if self.bounded else None
        return f"Geometry(n={self.coords.shape[0]}, spatial_shape={shape}, batch_size={self.batch_size}{kind})"
