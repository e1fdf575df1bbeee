"""Containers of tensors that torch looks into: pytrees, and the walkers of ``torch.distributed``.

``register_constant`` is for classes that hold no tensors: a graph takes their objects as constants, and the text of
those that it computes. ``leaves`` returns
the tensors and values inside an object, in order. Objects of the classes that are passed to it are not taken apart.

Torch supports tuples, lists and dicts. An object of any other class is one leaf: ``DistributedDataParallel`` finds no
tensor in such a result of a module, and with ``static_graph=True`` it trains wrongly, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shiplap.torch_private.graph_objects import leaves, register_constant, register_node, show_fields

__all__ = ["leaves", "register_constant", "register_container"]


def register_container(
    cls: type,
    take: Callable[[Any], tuple[Sequence[Any], Any]],
    make: Callable[[Sequence[Any], Any], Any],
    *,
    fields: Sequence[str] = (),
    dump: Callable[[Any], Any] = lambda rest: rest,
    load: Callable[[Any], Any] = lambda rest: rest,
) -> None:
    """Register ``cls`` with torch's pytrees, so that torch finds the tensors inside of its objects.

    The class becomes a pytree node of ``torch.utils``. ``DistributedDataParallel``, ``fully_shard``,
    ``torch.utils.checkpoint`` and ``torch.export`` then accept its objects.

    Args:
        cls: the class to register.
        take: a function that returns the children of an object and its other data, which describe the object without
            its children. Torch compares the other data of two objects with ``==``, for example to decide whether two
            inputs have one structure.
        make: the inverse of ``take``. torch may pass any values as children, so ``make`` must not check them.
        fields: the attributes to show to code of torch that handles dataclasses instead of pytrees. The constructor of
            ``cls`` must accept them as keywords. By default there are none.
        dump, load: functions that convert the other data to a value that JSON can represent, and back.
            ``torch.export.save`` uses them. By default the other data themselves are such a value.
    """
    register_node(cls, take, make, dump=dump, load=load)
    if fields:
        show_fields(cls, fields)
