"""Containers of tensors that torch looks into: pytrees, and the walkers of ``torch.distributed``.

Torch knows tuples, lists and dicts. An object of any other class is one leaf to it: ``DistributedDataParallel`` finds
no tensor in what such a module returns, and with ``static_graph=True`` it trains wrongly, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shiplap.compat.trees import register_node, show_fields

__all__ = ["register_container"]


def register_container(
    cls: type,
    take: Callable[[Any], tuple[Sequence[Any], Any]],
    make: Callable[[Sequence[Any], Any], Any],
    *,
    fields: Sequence[str] = (),
    dump: Callable[[Any], Any] = lambda rest: rest,
    load: Callable[[Any], Any] = lambda rest: rest,
) -> None:
    """Let torch look into objects of ``cls``: ``torch.utils`` pytrees, ``DistributedDataParallel``, ``fully_shard``,
    ``torch.utils.checkpoint`` and ``torch.export``.

    Args:
        take: an object → its children in order, and the rest of it. The rest is compared with ``==``: objects of one
            kind have equal rests.
        make: the inverse of ``take``. The children may be anything, so ``make`` must not check them.
        fields: the attributes that walkers of dataclasses look at. The constructor of ``cls`` takes them as keywords. A
            field that is of no registered and no built-in container is passed on as it is.
        dump, load: the rest → what JSON can hold, and back, for ``torch.export.save``.
    """
    register_node(cls, take, make, dump=dump, load=load)
    if fields:
        show_fields(cls, fields)
