"""The memory layout of a replacement's results. It is kept if no reader can notice the difference, and restored
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.walk import as_list, run_call
from shiplap.torch_private import graph_nodes as fx
from shiplap.torch_private import same_storage
from shiplap.torch_private.symbolic_sizes import condition_holds

# Calls whose result does not depend on the layout of their input, except for its own layout.
LAYOUT_OPERATORS = frozenset(
    {"transpose", "permute", "mT", "swapaxes", "contiguous", "reshape", "view", "flatten", "unflatten", "unsqueeze"}
)


def same_strides(new: Tensor, old: Tensor) -> bool:
    """Return whether two tensors of one shape have the same strides. Strides of dims with at most one element do not
    count.
    """
    return _relevant_strides(new) == _relevant_strides(old)


def _relevant_strides(t: Tensor) -> list[Any]:
    """Return the strides of the dims that have more than one element, or a symbolic number of elements."""
    return [s for s, n in zip(t.stride(), t.shape, strict=True) if not (isinstance(n, int) and n <= 1)]


def shares_storage(made: Any, given: Iterable[Any]) -> bool:
    """Return whether ``made`` shares the storage of one of the tensors in ``given``. ``made`` is one result or a list
    of results. Values that are not strided tensors are ignored.
    """
    own = [t for t in as_list(made) if _is_strided_tensor(t)]
    theirs = [t for t in given if _is_strided_tensor(t)]
    return any(same_storage(a, b) for a in own for b in theirs)


def _is_strided_tensor(held: Any) -> bool:
    """Return whether a value is a tensor with strides, which a sparse tensor is not."""
    return isinstance(held, Tensor) and held.layout == torch.strided


def restore_layouts(fn: Callable[..., Any], wanted: Sequence[Tensor | None]) -> Callable[..., list[Any]]:
    """Return a function that calls ``fn`` and returns its results as a list. ``wanted`` holds a tensor or None for each
    result. A result is copied so that its dims lie in memory in the order of that tensor's dims. If there is None, it
    is not copied.
    """

    def laid_out(*args: Any) -> list[Any]:
        """Return the results of ``fn(*args)`` as a list. Each result is copied to the dim order of the tensor at its
        position in ``wanted``. If that is None, the result is not copied.
        """
        results = fn(*args)
        flat = as_list(results)
        return [
            r if old is None or not isinstance(r, Tensor) else _copy_to_layout(r, old)
            for r, old in zip(flat, wanted, strict=True)
        ]

    return laid_out


def _copy_to_layout(new: Tensor, old: Tensor) -> Tensor:
    """Return ``new`` with its dims in memory in the order of those of ``old``. It is a copy unless ``new`` has that
    layout already.
    """
    order = dims_by_stride(old)
    if order == list(range(new.dim())):
        return new.contiguous()
    return new.permute(order).contiguous().permute([order.index(d) for d in range(new.dim())])


def dims_by_stride(t: Tensor) -> list[int]:
    """Return the positions of a tensor's dims in the order of their strides, from the largest to the smallest. Dims of
    equal strides keep their order.
    """
    # Insertion sort keeps the order of dims with equal strides.
    order = list(range(t.dim()))
    for i in range(1, t.dim()):  # strides may be symbols, which cannot be hashed but compared
        at = i
        while at and condition_holds(t.stride(order[at - 1]) < t.stride(order[at]), may_guard=True):
            order[at - 1], order[at] = order[at], order[at - 1]
            at -= 1
    return order


def readers_with_new_layout(old: Node, new: Tensor) -> list[tuple[Node, Any]] | None:
    """Return the readers of ``old`` whose layout changes if ``old`` is laid out in memory as ``new``, each paired with
    its new fake value. Return None if a reader would see the difference, or if a value has several readers.

    The only reader of ``old`` is followed, then the only reader of its result, and so on. The list ends before the
    first reader whose own layout does not change. For example, a chain of views that ends in a copy hides the
    difference, as in ``attended.transpose(1, 2).reshape(b, l, -1)``.
    """
    readers, moved = list(old.users), list[tuple[Node, Any]]()
    # Several readers would each need the check, and a reader that computes writes its result as it likes.
    if len(readers) != 1 or _called_name(readers[0]) not in LAYOUT_OPERATORS:
        return None
    reader = readers[0]
    held = fx.node_value(reader)
    try:
        # Fake values are computed in the mode of the graph, which owns its symbols.
        with held.fake_mode:
            made = run_call(reader, lambda n: new if n is old else fx.node_value(n))
    except Exception:  # a view that this layout does not admit
        return None
    if not isinstance(made, Tensor) or tuple(made.shape) != tuple(held.shape):
        return None
    # A copy or a view back: nobody behind it sees a difference.
    if same_strides(made, held):
        return moved
    further = readers_with_new_layout(reader, made)
    return None if further is None else [(reader, made), *further]


def _called_name(node: Node) -> str:
    """Return the name of the function or method that ``node`` calls, or an empty string if it calls none."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""
