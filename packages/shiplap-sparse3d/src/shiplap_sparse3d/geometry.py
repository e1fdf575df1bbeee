"""``Geometry``: the active voxels of a grid, and every table computed on them so far.

Layers on the same voxels share one table, and a network whose tables exist runs without touching a coordinate.
Coordinates of one or two axes get leading axes of one cell. A row whose batch index is -1 is padding: no voxel.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

from shiplap.plugin_api import error
from shiplap_sparse3d.coords import check_scenes
from shiplap_sparse3d.plan import Plan, wants_sorted
from shiplap_sparse3d.steps import Triple, Window, connect, reach, submanifold

__all__ = [
    "NOTHING",
    "Axes",
    "Geometry",
    "Origin",
    "Recipe",
    "Strided",
    "Triple",
    "per_axis",
    "same_number",
    "same_numbers",
    "triple",
]

Axes = int | Sequence[int]


def per_axis(value: Axes, name: str, ndim: int = 3) -> tuple[int, ...]:
    """``3`` or ``(3, 3, 1)`` → one int for each of ``ndim`` axes; NumPy's and torch's integers count.

    Raises SL208 for another number of them, SL209 for what is no integer.
    """
    if not is_compiling():  # a graph would learn a guard for each size that is looked at
        value = _integers(value, name, ndim)
    values = (value,) * ndim if isinstance(value, int) else tuple(value)
    if len(values) != ndim:
        raise error("SL208", where=name, got=values, expected=_PER_AXIS.format(ndim))
    return values


def _integers(value: Any, name: str, ndim: int) -> Axes:
    """``value`` in Python's own integers."""
    try:
        return tuple(operator.index(v) for v in value) if hasattr(value, "__len__") else operator.index(value)
    except TypeError as wrong:
        raise error("SL209", where=name, got=repr(value), expected=_PER_AXIS.format(ndim)) from wrong


_PER_AXIS = "an int, or one int for each of {} axes"


def triple(value: Axes, name: str, ndim: int = 3, fill: int = 1) -> Triple:
    """The same for all three axes; where ``ndim`` is less, the leading ones get ``fill``."""
    if ndim == 3 and not is_compiling():  # what layers give, each time
        if type(value) is int:
            return value, value, value
        if isinstance(value, (list, tuple)) and [*map(type, value)] == _THREE:
            x, y, z = value
            return x, y, z
    elif ndim == 3 and isinstance(value, (list, tuple)) and len(value) == 3:  # in a graph, which is traced line by line
        x, y, z = value
        return x, y, z
    x, y, z = (*(fill,) * (3 - ndim), *per_axis(value, name, ndim))
    return x, y, z


_THREE = [int, int, int]


def same_number(a: int, b: int) -> bool:
    """``a == b``, in a graph by their order.

    Where two sizes are equal, torch writes one for the other, and a guard on their order does not say so. Inductor
    (torch 2.11 to 2.13) has no value for a size that objects hold and nothing else does: its code ends in a NameError.
    """
    return not (a < b or a > b)


def same_numbers(known: Sequence[int], given: Sequence[int]) -> bool:
    """Whether ``given`` are the last of the numbers ``known``.

    Three are taken apart: Dynamo compares two sequences by a program of a hundred instructions, which it traces.
    """
    if len(given) == 3 and len(known) == 3:
        x, y, z = known
        a, b, c = given
        return not (x < a or x > a or y < b or y > b or z < c or z > c)
    if not is_compiling():
        return [*known][-len(given) :] == [*given]
    start = len(known) - len(given)
    return start >= 0 and all(same_number(known[start + i], given[i]) for i in range(len(given)))


@dataclass
class Strided:
    """The result of one step: the geometry it leads to, and the plan of convolutions onto it."""

    geometry: Geometry
    plan: Plan


@dataclass(frozen=True)
class Origin:
    """The step that made a geometry: from which voxels, and how."""

    geometry: Geometry
    window: Window

    @property
    def plan(self) -> Plan:
        """The plan of convolutions that made that step."""
        return self.geometry.step(self.window, back=True).plan


class Recipe(NamedTuple):
    """Which tables were asked of some voxels, and of those that lead on from them: not the tables themselves.

    Attributes:
        subm: of submanifold convolutions: kernel, dilation, and whether the way back was wanted.
        steps: of each step: its window, of each of its plans whether it is plain and whether the way back was wanted,
            and the same of the voxels that it leads to.
    """

    subm: tuple[tuple[Triple, Triple, bool], ...] = ()
    steps: tuple[tuple[Window, tuple[tuple[bool, bool], ...], Recipe], ...] = ()


NOTHING = Recipe()


class Geometry:
    """Active voxels of a grid.

    Args:
        coords: ``int32 [n, 1 + d]``: rows of a batch index and ``d`` of (x, y, z), distinct and inside the grid.
        spatial_shape: cells per axis, ``d`` of them.
        batch_size: number of scenes. A row of another scene is refused when a table is built (SL211), but in compiled
            graphs of the CPU.
        padded: rows may be padding. Then every step to other voxels leads to a fixed number of rows, too.

    Attributes:
        coords: ``int32 [n, 4]``; like ``spatial_shape`` it has three axes, whatever ``ndim`` is.
        ndim: axes of the voxels, 1 to 3.
        parent: the step that led here, for the way back.
        shared: of voxels that share cells, which ``spconv`` allows in submanifold layers: for each row the first one of
            its cell, and the voxels with padding in place of the other rows. Found when it is asked for.
    """

    shared: tuple[Tensor, Geometry] | None = None

    def __init__(self, coords: Tensor, spatial_shape: Axes, batch_size: int, *, padded: bool = False) -> None:
        if coords.dim() != 2 or coords.dtype != torch.int32:
            id, got = ("SL201", f"{coords.dim()} dims") if coords.dim() != 2 else ("SL204", coords.dtype)
            raise error(id, where="Geometry, argument 'coords'", got=got, expected="int32 [n, 1 + axes]")
        self.ndim = coords.shape[1] - 1
        if not 1 <= self.ndim <= 3:
            raise error("SL201", where="Geometry, argument 'coords'", got=f"{self.ndim + 1} columns", expected="2 to 4")
        lead = 3 - self.ndim
        self.coords = torch.cat([coords[:, :1], pad(coords[:, 1:], (lead, 0))], 1) if lead else coords
        self.spatial_shape = triple(spatial_shape, "spatial_shape", self.ndim)
        self.batch_size, self.padded = batch_size, padded
        self.parent: Origin | None = None
        self._subm: dict[tuple[Triple, Triple], Plan] = {}
        self._reached: dict[Window, Geometry] = {}
        self._plans: dict[tuple[Window, bool], Plan] = {}

    @classmethod
    def unchecked(cls, coords: Tensor, spatial_shape: Triple, batch_size: int, padded: bool, ndim: int) -> Geometry:
        """A geometry of the attributes that another one had, without a look at any of them, and without tables."""
        made = cls.__new__(cls)
        made.ndim, made.coords, made.spatial_shape = ndim, coords, spatial_shape
        made.batch_size, made.padded, made.parent = batch_size, padded, None
        made._subm, made._reached, made._plans = {}, {}, {}
        return made

    def subm(self, kernel: Axes, dilation: Axes = 1, *, back: bool | None = None) -> Plan:
        """Plan of a submanifold convolution, built at most once. ``back``: as in :meth:`step`."""
        key = self._axes(kernel, "kernel"), self._axes(dilation, "dilation")
        neighbours = self._subm.get(key)
        back = torch.is_grad_enabled() if back is None else back
        if neighbours is None:
            if not is_compiling():  # a graph knows no values
                self._check_scenes("Geometry.subm")
            neighbours = submanifold(self.coords, self.spatial_shape, *key, self.batch_size)
            self._subm[key] = neighbours = self._settled(neighbours, back)
        elif back and not neighbours.whole:
            self._subm[key] = neighbours = neighbours.complete()
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
        """One strided convolution away: every voxel that an input reaches. ``back``: as in :meth:`step`.

        With ``capacity`` there are that many rows, the last ones padding, and more voxels are SL211; on a padded
        geometry it is the largest number there can be unless given.
        """
        return self.step(self._window(kernel, stride, padding, dilation, capacity=capacity), back=back)

    def pooled(
        self, kernel: Axes, stride: Axes = 1, padding: Axes = 0, dilation: Axes = 1, *, capacity: int | None = None
    ) -> Strided:
        """The same voxels as :meth:`strided`, with a plan for pooling: its tables are never sorted."""
        return self.step(self._window(kernel, stride, padding, dilation, capacity=capacity), plain=True)

    def generative(self, kernel: Axes, dilation: Axes = 1, *, capacity: int | None = None) -> Strided:
        """Every voxel that a submanifold kernel reaches from an input: the taps are those of :meth:`subm`.

        The grid stays as it is; along axes of even kernel size it grows by ``dilation`` at its far end.
        """
        around = [k // 2 * d for k, d in zip(self._axes(kernel, ""), self._axes(dilation, ""), strict=True)]
        return self.step(self._window(kernel, 1, around[3 - self.ndim :], dilation, capacity=capacity))

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
        """One transposed convolution away, onto new voxels: every ``o = i*S - P + k*Dl`` inside the output grid.

        That grid has ``(in - 1)*S - 2P + Dl*(K - 1) + 1 + output_padding`` cells per axis, as ``torch.nn.
        ConvTranspose3d`` has; a negative ``output_padding`` cuts off its far end. ``capacity``: see :meth:`strided`.
        """
        return self.step(self._window(kernel, stride, padding, dilation, output_padding, capacity=capacity), back=back)

    def step(self, window: Window, *, plain: bool = False, back: bool | None = None) -> Strided:
        """What ``window`` leads to; coordinates and tables are built at most once.

        ``plain`` leaves tables unsorted. The plan has its way ``back`` (default: while gradients are recorded).
        """
        back = torch.is_grad_enabled() if back is None else back
        if window not in self._reached:
            if not is_compiling():  # a graph knows no values
                self._check_scenes("Geometry.step")
            coords, shape = reach(window, self.coords, self.spatial_shape), window.shape(self.spatial_shape)
            self._reached[window] = self._alike(coords, shape, padded=window.capacity is not None)
        step = self._reached[window]._under(Origin(self, window))
        plain = plain or not wants_sorted(self.coords)
        plan = self._plans.get((window, plain))
        if plan is None or (back and not plan.whole and not plain):  # of sorted tables both ways are made in one go
            plan = connect(window, self.coords, self.spatial_shape, step.coords, ordered=not plain, back=back)
            self._plans[window, plain] = plan = self._settled(plan, back, plain)
        elif back and not plan.whole:
            self._plans[window, plain] = plan = plan.complete()
        return Strided(step, plan)

    @property
    def recipe(self) -> Recipe:
        """Which tables there are of these voxels, to :meth:`build` them for others.

        Empty for padded voxels: their steps lead to fixed numbers of rows, which others need not have.
        """
        if self.padded:
            return NOTHING
        subm = tuple((*key, plan.whole) for key, plan in self._subm.items())
        plans = {
            window: tuple((p, plan.whole) for (w, p), plan in self._plans.items() if w == window)
            for window in self._reached
        }
        return Recipe(subm, tuple((window, plans[window], to.recipe) for window, to in self._reached.items()))

    def build(self, recipe: Recipe) -> None:
        """Build the tables of ``recipe`` that are not there yet: those for which a network would wait in its layers."""
        if self.padded:
            return
        for kernel, dilation, back in recipe.subm:
            self.subm(kernel[3 - self.ndim :], dilation[3 - self.ndim :], back=back)
        for window, plans, behind in recipe.steps:
            for plain, back in plans:
                self.step(window, plain=plain, back=back)
            if window in self._reached:
                self._reached[window].build(behind)

    @property
    def tensors(self) -> list[Tensor]:
        """Coordinates and tables of these voxels and of all that lead on from them, to record."""
        plans = [tensor for plan in (*self._subm.values(), *self._plans.values()) for tensor in plan.tensors]
        return [self.coords, *plans, *(tensor for other in self._reached.values() for tensor in other.tensors)]

    def to(self, device: torch.device | str) -> Geometry:
        """The same voxels on another device, without tables."""
        return self._alike(self.coords.to(device), self.spatial_shape, padded=self.padded)

    def same(self, other: Geometry) -> bool:
        """Whether the rows of both are known to be the same voxels; looks at none."""
        return self.coords is other.coords and same_numbers(self.spatial_shape, other.spatial_shape)

    @property
    def is_voxel(self) -> Tensor:
        """``bool [n, 1]``: which rows are voxels, and not padding."""
        return self.coords[:, :1] >= 0

    def _check_scenes(self, where: str) -> None:
        """SL211 for a row of a scene that there is not, before a table is built: a look at one column, on the CPU.

        The kernels of GPUs look themselves.
        """
        coords = self.coords
        if type(coords) is not Tensor or coords.device.type != "cpu" or coords.shape[0] == 0:
            return
        try:
            last = int(coords[:, 0].max())
        except RuntimeError:  # make_fx and vmap give no values
            return
        if last >= self.batch_size:
            check_scenes(where, coords, self.batch_size)

    def _alike(self, coords: Tensor, shape: Triple, *, padded: bool) -> Geometry:
        """Other voxels with as many axes and scenes."""
        return Geometry.unchecked(coords, shape, self.batch_size, padded, self.ndim)

    def _under(self, parent: Origin) -> Geometry:
        """The same voxels and tables with a parent. What is kept has none, or the two would keep each other alive."""
        child = self._alike(self.coords, self.spatial_shape, padded=self.padded)
        child.parent, child._subm, child._reached, child._plans = parent, self._subm, self._reached, self._plans
        return child

    def _axes(self, value: Axes, name: str, fill: int = 1) -> Triple:
        return triple(value, name, self.ndim, fill)

    def _window(
        self,
        kernel: Axes,
        stride: Axes,
        padding: Axes,
        dilation: Axes,
        output_padding: Axes | None = None,
        *,
        capacity: int | None,
    ) -> Window:
        window = Window(
            self._axes(kernel, "kernel"),
            self._axes(stride, "stride"),
            self._axes(padding, "padding", 0),
            self._axes(dilation, "dilation"),
            None if output_padding is None else self._axes(output_padding, "output_padding", 0),
            capacity,
        )
        if not self.padded or capacity is not None:
            return window
        if min(*window.stride, *window.dilation) < 1:  # otherwise the op of the step says so
            got = f"stride {window.stride}, dilation {window.dilation}"
            raise error("SL208", where="a step of padded voxels", got=got, expected="1 or more")
        return window._replace(capacity=window.most(self.coords.shape[0], self.spatial_shape, self.batch_size))

    def _settled(self, plan: Plan, back: bool, plain: bool = False) -> Plan:
        """``plan`` as the kernels of this device want it, with its way back only if that is wanted."""
        if back or plan.back is not None:
            plan = plan.complete() if back else replace(plan, back=None)
        return plan.sorted() if wants_sorted(self.coords) and not plain else plan

    def __repr__(self) -> str:
        kind = ", padded" if self.padded else ""
        shape = self.spatial_shape[3 - self.ndim :]
        return f"Geometry(n={self.coords.shape[0]}, spatial_shape={shape}, batch_size={self.batch_size}{kind})"
