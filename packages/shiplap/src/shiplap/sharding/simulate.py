"""A mesh of ranks in one process: a call is cut as a rule says, each part runs, and the results are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shiplap.declare.sharding_rule import ShardedPart, ShardingRule
from shiplap.dispatch import Op
from shiplap.errors import ShiplapError

Run = Callable[[tuple[Any, ...]], Sequence[Tensor]]


class NotAdmitted(Exception):
    """The error which says that a shard has sizes that the declaration of the op does not admit. It is no evidence
    against a sharding rule.
    """


def chunk_sizes(size: int, world: int) -> list[int]:
    """Return the sizes into which ``torch.chunk``, and therefore DTensor, cuts a dim of ``size`` for ``world`` ranks.
    Ranks after the last chunk get 0.
    """
    # Rounded up, as ``torch.chunk`` does.
    step = -(-size // world)
    return [max(0, min(step, size - rank * step)) for rank in range(world)]


def local_args(op: Op, rule: ShardingRule, args: tuple[Any, ...], sizes: Sequence[int]) -> list[tuple[Any, ...]]:
    """Return, for each rank, the arguments of a call of ``op`` that is cut by ``rule``. ``sizes`` are the sizes of the
    cut dim on the ranks, in order.
    """
    parts, starts = dict(rule.inputs), [0, *accumulate(sizes)]
    return [
        tuple(
            _local_value(value, parts.get(a.name, "whole"), rank, starts[rank], size)
            for a, value in zip(op.spec.args, args, strict=True)
        )
        for rank, size in enumerate(sizes)
    ]


def _local_value(value: Any, part: ShardedPart, rank: int, start: int, size: int) -> Any:
    """Return the share of the argument ``value`` that the rank number ``rank`` gets.

    If ``part`` is the number of a dim, the share is the slice of ``size`` elements from ``start`` on along that dim. If
    ``part`` is ``"whole"``, it is the whole argument. If ``part`` is a reduction such as ``"sum"``, it is the argument
    on the first rank and zeros on all others. A value that is no tensor is returned unchanged.
    """
    if not isinstance(value, Tensor) or part == "whole":
        return value
    if isinstance(part, int):
        return value.narrow(part, start, size)
    # A term of a sum is added once, so the other ranks have zeros.
    return value if rank == 0 else torch.zeros_like(value)


def cut_size(op: Op, rule: ShardingRule, args: tuple[Any, ...]) -> int | None:
    """Return the size of the dim that ``rule`` cuts in the arguments ``args`` of a call. Return None if no tensor has
    it, or if two tensors have different sizes there.
    """
    parts = dict(rule.inputs)
    pairs = [(v, parts.get(a.name)) for a, v in zip(op.spec.args, args, strict=True) if isinstance(v, Tensor)]
    # All cut tensors of a call have the same size along the cut, or the rule does not fit this call.
    sizes = {v.shape[p] for v, p in pairs if isinstance(p, int) and p < v.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def run_shards(
    op: Op, rule: ShardingRule, run: Run, args: tuple[Any, ...], sizes: Sequence[int]
) -> list[Sequence[Tensor]]:
    """Cut the call of ``op`` with ``args`` by ``rule`` into shards of the sizes ``sizes``. Return, for each rank, the
    results of ``run`` on the tuple of its arguments.

    Raise ``NotAdmitted`` if a requirement of the declaration refuses the sizes of a shard.
    """
    made = local_args(op, rule, args, sizes)
    for local in made:
        try:
            op.bind(local)
        except ShiplapError as e:
            # SL208 is an unmet requirement of the declaration, which the sizes of a shard may cause.
            if e.id != "SL208":
                raise
            raise NotAdmitted(str(e.got)) from e
    return [run(local) for local in made]


def merge_shards(parts: Sequence[ShardedPart], results: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the outputs of the whole call, merged from ``results``, which holds the outputs of each rank. ``parts``
    states how each output is merged. It is the dim along which the shards are concatenated, ``"whole"`` for an output
    that all ranks have, or the name of a reduction.
    """
    return [_merge_column(part, list(column)) for part, column in zip(parts, zip(*results, strict=True), strict=True)]


def _merge_column(part: ShardedPart, column: list[Tensor]) -> Tensor:
    """Return one output of the whole call, merged from ``column``, the outputs of all ranks. ``part`` is the dim along
    which they are concatenated, ``"whole"`` to return that of the first rank, or the reduction ``"sum"``, ``"max"`` or
    ``"min"``.
    """
    if isinstance(part, int):
        return torch.cat(column, part)
    if part == "whole":
        # Every rank has the whole result.
        return column[0]
    if part == "sum":
        total = column[0]
        for term in column[1:]:
            total = total + term
        return total
    return torch.stack(column).amax(0) if part == "max" else torch.stack(column).amin(0)
