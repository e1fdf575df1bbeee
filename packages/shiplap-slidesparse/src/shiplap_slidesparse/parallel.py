"""Tensor parallelism: each rank keeps rows or columns of a model's linear layers, and packs its part.

A layer holds the pruned dense weight, which can be cut: rows anywhere, columns between groups only. A cut through a
group would give a shard other windows than the weight has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch import nn

from shiplap.plugin_api import error
from shiplap_slidesparse.linear import Linear

# Of layers of these styles, what goes in and comes out is whole: so are they.
WHOLE = ("colwise_gather_output", "colwise_rep", "replicate", "rowwise_split_input")


@dataclass(frozen=True)
class LayerCut:
    """A layer to cut over ranks. ``name`` is its name in the model. If ``style`` is ``"colwise"``, each rank keeps rows
    of the weight (output features). If it is ``"rowwise"``, each rank keeps columns (input features).
    """

    name: str
    layer: nn.Linear
    style: str

    @property
    def size(self) -> int:
        """The number of features that are divided among ranks. These are output features for ``colwise`` and input
        features for ``rowwise``.
        """
        return self.layer.out_features if self.style == "colwise" else self.layer.in_features

    @property
    def unit(self) -> int:
        """The number of which each rank's features must be a multiple. It is the group size of the sparsity pattern for
        a converted layer that is cut along its input features, and 1 otherwise.
        """
        return self.layer.pattern.size if self.style == "rowwise" and isinstance(self.layer, Linear) else 1


def shard(model: nn.Module, plan: Mapping[str, str] | None = None, group: Any = None) -> list[str]:
    """Shard the linear layers of ``model``, in place, for tensor parallelism, and return their names.

    Converted layers and layers of ``nn.Linear`` are sharded in the same way. Their parameters become DTensors, so
    ``torch.distributed.checkpoint`` saves whole weights, which any number of ranks can load. A ``colwise`` layer gives
    each rank a part of the output features. A ``rowwise`` layer takes such a part as its input, and sums its results
    over the ranks. In the 8-bit modes each rank computes the scales of its own part of a row.

    Args:
        model: the whole model, on every rank and on the device of that rank.
        plan: the name of a layer → ``"colwise"`` or ``"rowwise"``. A ``*`` in a name matches any text, such as the
            number of a block. The default is ``model.tp_plan``, which models of transformers have.
        group: a process group or a one-dimensional ``DeviceMesh``. The default is all ranks.

    Raises:
        ShiplapError: ``SL211``, before any layer is sharded, for a plan that names no linear layer, for an unknown
            style, and for a size that is not a multiple of the number of ranks (for ``rowwise``: of the number of ranks
            times the group size of the sparsity pattern).
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    from shiplap_slidesparse.tensor_parallel import Colwise, Rowwise  # here: DTensor takes long to import

    world = group.size() if isinstance(group, DeviceMesh) else dist.get_world_size(group)
    cuts = plan_cuts(model, getattr(model, "tp_plan", None) or {} if plan is None else plan, world)
    device = cuts[0].layer.weight.device.type
    mesh = group if isinstance(group, DeviceMesh) else DeviceMesh.from_group(group or _world_group(), device)
    for each in cuts:
        parallelize_module(each.layer, mesh, Colwise() if each.style == "colwise" else Rowwise())
    return [each.name for each in cuts]


def plan_cuts(model: nn.Module, plan: Mapping[str, str], world: int) -> list[LayerCut]:
    """Return a ``LayerCut`` for each linear layer of ``model`` that ``plan`` names, for ``world`` ranks. Layers with a
    style of ``WHOLE`` are left out. Raise ``SL211`` if there is no such layer, a style is unknown, or a size cannot be
    divided.
    """
    plans = []
    for name, module in model.named_modules():
        # Plans of transformers name layers from any level, so a name may begin in the middle.
        style = next((s for wanted, s in plan.items() if fnmatchcase(f".{name}", f"*.{wanted}")), None)
        if style is not None and isinstance(module, nn.Linear) and style not in WHOLE:
            plans.append(LayerCut(name, module, style))
    where = "slidesparse.shard"
    if not plans:
        raise error(
            "SL211",
            where=where,
            got=f"a plan that cuts no linear layer: {dict(plan)}",
            expected="names of layers",
            fix='pass plan={"layers.*.up_proj": "colwise", ...}',
        )
    for each in plans:
        if each.style not in ("colwise", "rowwise"):
            raise error(
                "SL211",
                where=f"{where}: {each.name}",
                got=f"style {each.style!r}",
                expected="colwise, rowwise",
                fix="leave the layer out of the plan, which keeps it whole on every rank",
            )
        if each.size % (world * each.unit):
            groups = f" groups of {each.unit}" if each.unit > 1 else ""
            raise error(
                "SL211",
                where=f"{where}: {each.name}",
                got=f"{each.size} {_cut_sides(each)} for {world} ranks",
                expected=f"the same number{f' of{groups}' if groups else ''} on each rank",
                fix="leave the layer and the layer before it out of the plan, or take another pattern",
            )
    return plans


def _cut_sides(each: LayerCut) -> str:
    """Return what ``each`` divides among the ranks, for error messages. It is ``features of the output`` or
    ``columns``.
    """
    return "features of the output" if each.style == "colwise" else "columns"


def _world_group() -> dist.ProcessGroup:
    """Return torch's process group of all ranks, which exists because the number of ranks was read before."""
    world = dist.group.WORLD
    assert world is not None
    return world
