"""Layers with one part on each rank: parameters are DTensors, and each rank multiplies with its local part.

A DTensor knows its place in the whole, so ``torch.distributed.checkpoint`` saves and loads the whole weight, for any
number of ranks. The products are those of the local tensors: no DTensor reaches an op.

``parallelize_module`` takes the styles of this module::

    parallelize_module(model, mesh, {"up": Colwise(), "down": Rowwise()})
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from shiplap.plugin_api import error
from shiplap_slidesparse.linear import Linear
from shiplap_slidesparse.sharded import gather_whole

__all__ = ["Colwise", "LayerPart", "Rowwise", "Style", "cut_unit", "place_layer", "slice_of"]

Style = Literal["colwise", "rowwise"]


@dataclass(frozen=True)
class LayerPart:
    """The shard of a layer on this rank of ``mesh``. If ``style`` is ``"colwise"``, the rank holds some rows of the
    weight (output features). If it is ``"rowwise"``, the rank holds some columns (input features).
    """

    style: Style
    mesh: DeviceMesh

    @property
    def rank(self) -> int:
        """The number of this rank in the mesh."""
        return int(self.mesh.get_local_rank())

    def local(self, held: Tensor) -> Tensor:
        """Return this rank's shard of the parameter ``held``. If ``fully_shard`` has sharded the parameter once more,
        it is gathered first.
        """
        with torch.no_grad():
            # ``fully_shard`` cut the part once more, over a mesh of its own.
            if isinstance(held, DTensor) and held.device_mesh != self.mesh:
                gathered, cut = gather_whole(held), held.placements[-1]  # the mesh of fully_shard comes before this one
                return gathered.chunk(self.mesh.size(), cut.dim)[self.rank] if isinstance(cut, Shard) else gathered
            part: Tensor = held.to_local() if isinstance(held, DTensor) else held
        return part

    def forward(self, layer: Linear, x: Tensor) -> Tensor:
        """Return the result of the sharded layer on ``x``. In the colwise style it has this rank's slice of the output
        features. In the rowwise style it is the sum of all ranks' products.

        A frozen bias is part of the first rank's product. A bias that learns is added to the sum, on each rank.
        """
        bias, group = layer.bias, self.mesh.get_group()
        part = bias.to_local() if isinstance(bias, DTensor) else bias
        if self.style == "colwise":
            return layer.multiply(_SharedInput.apply(x, group), part)
        learns = part is not None and part.requires_grad
        out = _SummedOutput.apply(layer.multiply(x, part if self.rank == 0 and not learns else None), group)
        return out + part.to(out.dtype) if part is not None and learns else out

    def refuse_move(self, layer: Linear) -> Linear:
        """Raise ``SL211``, since a shard is packed for the device on which it was cut and cannot be moved. Nothing is
        returned.
        """
        raise error(
            "SL211",
            where=f"{type(layer).__name__}, a part of a layer",
            got="a move to another device or dtype",
            expected="the device on which it was cut",
            fix="move the model first, then cut it",
        )


class _SharedInput(torch.autograd.Function):
    """The autograd function of an input that all ranks share. The gradient of the input is the sum of the ranks'
    gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Return a view of the input ``x``, which has the same elements and shape. Save ``group``, over whose ranks the
        gradients of ``x`` are summed.
        """
        ctx.group = group
        # A new tensor object: autograd attaches the node to it.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the sum of ``grad`` over the ranks of the group, and None for the argument ``group``."""
        # A clone, because ``all_reduce`` writes in place and autograd may share the gradient.
        summed = grad.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _SummedOutput(torch.autograd.Function):
    """The autograd function that sums the results of the ranks. Every rank uses the whole sum, so its gradient is
    complete on each rank.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        """Return the sum of ``part``, the result of each rank, over the ranks of ``group``."""
        # A copy, since all_reduce works in place and ``part`` is the caller's.
        summed = part.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return ``grad`` unchanged, since each rank's result has the derivative 1 in the sum. Return None for the
        argument ``group``.
        """
        return grad, None


def cut_unit(layer: nn.Module, style: str) -> int:
    """Return the number of which each rank's features of ``layer`` must be a multiple in ``style``. It is the group
    size of the sparsity pattern for a converted layer that is cut along its input features (``rowwise``), and 1
    otherwise.
    """
    return layer.pattern.size if style == "rowwise" and isinstance(layer, Linear) else 1


def slice_of(layer: Linear, style: Style, rank: int, world: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return copies of ``(weight, weight_scale, bias)`` of ``layer`` for ``rank`` of ``world`` ranks. The whole layer
    can be freed afterwards. ``style`` is ``"colwise"`` for rows of the weight, and ``"rowwise"`` for columns.

    Raises:
        ShiplapError: ``SL211`` for a size that is not a multiple of the ranks (rowwise: of the ranks
            times the group size of the sparsity pattern).
    """
    size = layer.out_features if style == "colwise" else layer.in_features
    group = cut_unit(layer, style)
    if size % (world * group):
        sides, groups = "features of the output" if style == "colwise" else "columns", f" groups of {group}"
        raise error(
            "SL211",
            where=f"slidesparse, a {style} layer",
            got=f"{size} {sides} for {world} ranks",
            expected=f"the same number{f' of{groups}' if group > 1 else ''} on each rank",
            fix="leave the layer and the layer before it out of the plan, or take another pattern",
        )
    mine = slice(rank * (size // world), (rank + 1) * (size // world))
    scale, bias = layer.weight_scale, layer.bias

    def part(held: Tensor | None, *where: slice) -> Tensor | None:
        """Return a copy of ``held[where]``, or None if ``held`` is None."""
        # A copy, so that the whole layer can be freed.
        return None if held is None else held.detach()[where].clone()

    weight = part(layer.weight, mine) if style == "colwise" else part(layer.weight, slice(None), mine)
    assert weight is not None
    # A rowwise cut leaves all rows, and with them all scales.
    return (weight, part(scale, mine), part(bias, mine)) if style == "colwise" else (weight, part(scale), part(bias))


def place_layer(layer: Linear, style: Style, mesh: DeviceMesh) -> Linear:
    """Cut ``layer`` in place for this rank of a one-dimensional ``mesh``, pack the rank's shard, and return the layer.
    Raise ``SL211`` if the layer is already cut or its size cannot be divided. ``style`` is ``"colwise"`` for rows of
    the weight, and ``"rowwise"`` for columns.
    """
    if layer.placed is not None:
        raise error(
            "SL211",
            where="slidesparse, a layer to cut",
            got="a part of a layer",
            expected="a whole layer",
            fix="split each layer once, by one plan",
        )
    parts = slice_of(layer, style, mesh.get_local_rank(), mesh.size())
    split: Placement = Shard(0 if style == "colwise" else 1)
    # Scale and bias belong to output features, which rowwise layers do not cut.
    rest: Placement = split if style == "colwise" else Replicate()
    layer.packed, layer.placed = None, LayerPart(style, mesh)
    for name, part, where in zip(("weight", "weight_scale", "bias"), parts, (split, rest, rest), strict=True):
        if part is not None:
            old = getattr(layer, name)
            # Without a check, which would exchange metadata between the ranks for each parameter.
            held = DTensor.from_local(part, mesh, [where], run_check=False, shape=old.shape, stride=old.stride())
            setattr(layer, name, nn.Parameter(held, requires_grad=old.requires_grad))
    return layer.pack()


class _CutStyle(ParallelStyle):
    """The base of the two styles for ``parallelize_module``. It cuts a converted layer itself, and passes an
    ``nn.Linear`` to torch's style of the same name.
    """

    style: Style
    plain: Callable[[], ParallelStyle]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cut ``module`` over ``device_mesh`` in place and return it. A module that is not converted is cut by torch's
        own style.
        """
        if isinstance(module, Linear):
            return place_layer(module, self.style, device_mesh)
        done: nn.Module = self.plain()._apply(module, device_mesh)
        return done


class Colwise(_CutStyle):
    """A style for ``parallelize_module``, by which each rank holds rows of the weight ``[out, in]``.

    The input is the whole ``[..., in]`` on every rank. The output is ``[..., out / ranks]``, the features of this rank.

    Raises:
        ShiplapError: ``SL211`` if ``out`` is not a multiple of the number of ranks.
    """

    style: Style = "colwise"
    plain = ColwiseParallel


class Rowwise(_CutStyle):
    """A style for ``parallelize_module``, by which each rank holds columns of the weight ``[out, in]``.

    The input is ``[..., in / ranks]``, the features of this rank. The output is the whole ``[..., out]`` on every rank,
    which is the sum over the ranks.

    Raises:
        ShiplapError: ``SL211`` if ``in`` is not a multiple of the number of ranks times the group size of the
            sparsity pattern.
    """

    style: Style = "rowwise"
    plain = RowwiseParallel
