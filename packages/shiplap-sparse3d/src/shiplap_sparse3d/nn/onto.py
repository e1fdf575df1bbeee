"""Steps onto given voxels: convolution and resampling whose outputs are chosen by the caller."""

from __future__ import annotations

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap.plugin_api.memos import built_outside_modes
from shiplap_sparse3d import ops
from shiplap_sparse3d.coords import check_scenes
from shiplap_sparse3d.geometry import Geometry, GeometryOrigin, Strided
from shiplap_sparse3d.offsets import box_offsets
from shiplap_sparse3d.plan import Plan, wants_sorted
from shiplap_sparse3d.steps import StepWindow, Triple, connect_voxels
from shiplap_sparse3d.tensor import SparseTensor


def step_onto(
    where: str, x: SparseTensor, window: StepWindow, target: Tensor | SparseTensor, *, plain: bool = False
) -> Strided:
    """Return the voxels of ``target`` and the plan of convolutions from those of ``x`` onto them.

    ``target`` is a sparse tensor, or coordinates of cells whose first tap lies in the padded grid. ``plain`` leaves
    tables unsorted. The table is built in each call. Raises SL202 for voxels of another batch or of other axes.
    """
    here, kind = x.geometry, f"{x.geometry.ndim} axes, {x.batch_size} scenes"
    if isinstance(target, SparseTensor):
        there = target.geometry
    else:
        shape = window.shape(here.spatial_shape)
        if window.output_padding is None:
            axes = zip(here.spatial_shape, window.stride, window.padding, strict=True)
            a, b, c = ((cells + p - 1) // step + 1 for cells, step, p in axes)
            shape = a, b, c
        there = Geometry(target, shape[3 - here.ndim :] if here.bounded else None, x.batch_size)
    if there.ndim != here.ndim or there.batch_size != here.batch_size:
        raise error("SL202", where=f"{where}, argument 'coordinates'", got=there, expected=kind)
    if not torch.compiler.is_compiling() and there.coords.device.type == "cpu":
        check_scenes(where, there.coords, there.batch_size)
    return Strided(there, _plan_onto(here, window, there, plain))


def _plan_onto(here: Geometry, window: StepWindow, there: Geometry, plain: bool) -> Plan:
    if not here.bounded:
        kernel, stride, padding, dilation = (each[3 - here.ndim :] for each in window[:4])
        taps, transposed = box_offsets(kernel, dilation, padding=padding), window.output_padding is not None
        return here.onto(there, taps, stride, transposed=transposed, plain=plain).plan
    ordered, back = wants_sorted(here.coords) and not plain, torch.is_grad_enabled()
    grid = _wide_grid(window, here.spatial_shape, there.spatial_shape)
    plan = connect_voxels(window, here.coords, grid, there.coords, ordered=ordered, back=back)
    plan = plan.complete() if back else plan
    return plan.sorted() if ordered else plan


def _wide_grid(window: StepWindow, grid: Triple, reached: Triple) -> Triple:
    """Return a grid of inputs that holds ``grid``, and whose step has the cells of ``reached`` at least."""
    kernel, stride, padding, dilation, extra, _ = window
    around = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    if extra is None:
        least = [(m - 1) * s + a for m, s, a in zip(reached, stride, around, strict=True)]
    else:
        axes = zip(reached, stride, around, extra, strict=True)
        least = [-(-(m - a - e) // s) + 1 for m, s, a, e in axes]
    x, y, z = map(max, grid, least)
    return x, y, z


def floor_step(x: SparseTensor, kernel: Triple, stride: Triple, dilation: Triple, *, centred: bool = True) -> Strided:
    """Return the step onto the cells ``floor(c / stride)`` of the voxels, and no others: MinkowskiEngine's rule.

    The middle tap of the kernel, of an even one the first, lies on the first cell of those that a coarse cell spans;
    unless ``centred`` it is the first tap of any kernel. Raises SL208 for padded voxels.
    """
    here = x.geometry
    if here.padded:
        raise error(
            "SL208",
            where="a step to the cells floor(c / stride)",
            got="padded voxels",
            expected="voxels without padding",
            fix="pass the voxels of the outputs as the second argument of the call",
        )
    padding = tuple((k - 1) // 2 * d if centred and k % 2 else 0 for k, d in zip(kernel, dilation, strict=True))
    a, b, c = (-(-cells // step) for cells, step in zip(here.spatial_shape, stride, strict=True))
    coarse = Geometry.unchecked(_floor_cells(here.coords, stride), (a, b, c), here.batch_size, False, here.ndim)
    window = StepWindow(kernel, stride, (padding[0], padding[1], padding[2]), dilation)
    if not here.bounded:
        coarse.spatial_shape, coarse.bounded = here.spatial_shape, False
    plan = _plan_onto(here, window, coarse, False)
    coarse.parent = GeometryOrigin(here, window, plan)
    return Strided(coarse, plan)


@built_outside_modes
def _floor_cells(coords: Tensor, stride: Triple) -> Tensor:
    steps = torch.tensor([1, *stride], dtype=coords.dtype, device=coords.device)
    cells: Tensor = ops.unique_coords(torch.div(coords, steps, rounding_mode="floor"))[0]
    return cells
