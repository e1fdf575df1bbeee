"""The answers to DTensor, which calls this module for the ways to cut a call of an op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shiplap.declare.sharding_rule import ShardedPart, ShardingRule
from shiplap.dispatch import Op
from shiplap.errors import ShiplapError, error
from shiplap.sharding.derive import known_rules, why_underivable
from shiplap.sharding.simulate import NotAdmitted, chunk_sizes, cut_size, local_args
from shiplap.torch_private import dtensor

_registered: dict[str, tuple[object, ...]] = {}


def register_with_dtensor(op: Op) -> bool:
    """Register the sharding rules of ``op`` with DTensor, and return True. Return False if this was done before for the
    present declaration of the op.
    """
    # A call may reach DTensor above or below autograd, by either of both overloads.
    overloads = tuple({id(o): o for o in (op.overload, op.below_autograd)}.values())
    if _registered.get(op.spec.name) == overloads:
        return False
    scalars = [i for i, a in enumerate(op.spec.args) if a.scalar is not None]
    first = scalars[0] if scalars else len(op.spec.args)
    dtensor.register_sharding_rules(overloads, first, lambda mesh, *args: _ways_to_cut(op, mesh, args))
    _registered[op.spec.name] = overloads
    return True


def _ways_to_cut(op: Op, mesh: tuple[int, ...], given: Sequence[Any]) -> list[dtensor.CallPlacements]:
    """Return DTensor's placements of outputs and arguments for each way to cut a call of ``op``. ``mesh`` holds the
    sizes of the device mesh, and ``given`` the arguments.

    In the first way nothing is cut. The others follow from the sharding rules that hold for the call. Raise ``SL217``
    if an argument is cut or partial and the op has no rules.
    """
    from torch.distributed.tensor import Replicate

    args = op.spec.complete(given)
    rules = known_rules(op, args)
    cut = [a.name for a, v in zip(op.spec.args, args, strict=True) if not _is_whole(v)]
    if not rules and cut:
        why = why_underivable(op) or (
            "its declaration says so" if op.shardings is not None else "no dim of it may be cut"
        )
        got = f"{', '.join(cut)} cut or partial"
        raise error("SL217", where=op.spec.name, got=got, expected=f"whole tensors: {why}")
    # Whole tensors are always possible.
    results = op.spec.made if op.spec.traced else op.spec.outputs
    ways = [([Replicate() for _ in results], [_whole_placement(v) for v in given])]
    for rule in rules:
        if all(_shards_admitted(op, rule, args, world) for world in mesh):
            inputs = dict(rule.inputs)
            # Arguments with defaults may be missing at the end of ``given``.
            pairs = zip(op.spec.args, given, strict=False)
            placed = [
                _dtensor_placement(inputs.get(a.name, "whole")) if hasattr(v, "shape") else None for a, v in pairs
            ]
            ways.append(([_dtensor_placement(part) for part in rule.outputs], placed))
    return ways


def _is_whole(value: Any) -> bool:
    """Return whether an argument is not cut. This is true for a DTensor that is replicated over the whole mesh, and for
    any value that is no DTensor.
    """
    return all(p.is_replicate() for p in getattr(value, "placements", ()))


def _whole_placement(value: Any) -> Any:
    """Return DTensor's placement of a tensor that is not cut. Return None for an argument that is no tensor."""
    return _dtensor_placement("whole") if hasattr(value, "shape") else None


def _dtensor_placement(part: ShardedPart) -> Any:
    """Return DTensor's placement for ``part``, the share of a tensor that a sharding rule gives each rank. It is
    ``Shard`` if ``part`` is the number of a dim, ``Replicate`` if it is ``"whole"``, and ``Partial`` if it is the name
    of a reduction.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    if isinstance(part, int):
        return Shard(part)
    return Replicate() if part == "whole" else Partial(part)


def _shards_admitted(op: Op, rule: ShardingRule, args: Sequence[Any], world: int) -> bool:
    """Return whether the declaration of ``op`` admits each rank's shard, if a call with ``args`` is cut over ``world``
    ranks by ``rule``. A shard of size 0 is admitted only if ``rule.empty`` is true.
    """
    blank = tuple(_without_data(v) for v in args)
    size = cut_size(op, rule, blank)
    if size is None:
        # The cut dim has no single size in this call, so only a rule that cuts no argument fits.
        return all(not isinstance(part, int) for _, part in rule.inputs)
    sizes = chunk_sizes(size, world)
    if 0 in sizes and not rule.empty:
        return False
    try:
        # Ranks whose shards have one size need one test.
        for local in local_args(op, rule, blank, sorted(set(sizes))):
            op.bind(local)
    except (ShiplapError, NotAdmitted, RuntimeError):
        return False
    return True


def _without_data(value: Any) -> Any:
    """Return a tensor on the meta device with the shape and dtype of ``value``, if that is DTensor's description of a
    tensor. Return any other value unchanged.
    """
    meta = getattr(value, "tensor_meta", None)
    if meta is None:
        return value
    made: Tensor = torch.empty(tuple(meta.shape), dtype=meta.dtype, device="meta")
    return made
