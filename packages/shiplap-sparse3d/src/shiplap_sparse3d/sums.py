"""Sums ``x + tensor`` and checkpoints of sparse tensors in compiled graphs, and the errors of other torch functions.

Dynamo treats a sum with a tensor as one of two tensors, unless the other operand refuses. It calls
``__torch_function__`` then, as eager PyTorch does, so the sparse tensors implement that. ``torch.utils.checkpoint``
reaches the same method, and receives sparse tensors as references of its function, like modules, and not as arguments.
Any other function is for the features alone, and the error says how to write that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.compiler import is_compiling
from torch.overrides import resolve_name
from torch.utils.checkpoint import checkpoint

from shiplap import ShiplapError
from shiplap.plugin_api import error
from shiplap.plugin_api.compiling import checkpoints_keep_objects

__all__ = ["SummableTensor"]

_SUMS = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.__iadd__)


class SummableTensor:
    """The base of sparse tensors that can be used in sums and checkpoints. ``row_functions`` are the other functions of
    torch that a class accepts. ``row_operators`` are those that Dynamo passes as other objects than torch does.

    Any further function of torch raises ``SL209``. The error shows a call that works in its place, written with the
    three strings ``spelled``.
    """

    spelled: ClassVar[tuple[str, str, str]]  # a call that replaces the features, they, and the container of modules
    row_functions: ClassVar[frozenset[Any]] = frozenset()  # functions of torch that work on each row of features alone

    row_operators: ClassVar[tuple[Any, ...]] = ()  # those that Dynamo passes as other objects

    @classmethod
    def rows_under(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return ``func(*args, **kwargs)`` with the features in place of sparse tensors, as a sparse tensor on the same
        voxels. ``func`` works on each row of features alone. Subclasses implement this method.
        """
        raise NotImplementedError

    def plus(self, other: Any) -> Any:
        """Return this tensor plus ``other``, added row by row, or ``NotImplemented`` if ``other`` has an unsupported
        type. Subclasses implement this method.
        """
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of torch's function ``func`` for arguments with sparse tensors. PyTorch and Dynamo call
        this method. Functions that treat each row alone, and sums of two tensors, are computed on the features.

        For any other function, return ``NotImplemented`` while Dynamo traces, and if another operand may handle the
        call. Otherwise raise ``SL209``.
        """
        if func is checkpoint:  # only Dynamo asks
            return _checkpoint_function(func, args, kwargs) if checkpoints_keep_objects() else NotImplemented
        # Identities first: Dynamo guards on a set that it thinks has no such function.
        for method in cls.row_operators:
            if func is method:
                return cls.rows_under(func, args, kwargs or {})
        if func in cls.row_functions:
            return cls.rows_under(func, args, kwargs or {})
        # ``torch.add`` with ``alpha`` or ``out`` is no plain sum.
        if func not in _SUMS or kwargs or len(args) != 2:
            if is_compiling() or not _is_only_handler(func, types):
                return NotImplemented
            raise _refused_function_error(func, types[0], args)
        first, second = args
        return first.plus(second) if isinstance(first, SummableTensor) else second.plus(first)


def _is_only_handler(func: Callable[..., Any], types: Sequence[type]) -> bool:
    """Return whether no other class can handle the call of ``func``, whose arguments have the ``types`` with
    ``__torch_function__``. For an operator the result is False, since Python tries the other operand. Otherwise all
    types must be sparse tensors.
    """
    operator = getattr(torch.Tensor, getattr(func, "__name__", ""), None) is func
    return not operator and all(issubclass(t, SummableTensor) for t in types)


def _refused_function_error(func: Callable[..., Any], kind: type[SummableTensor], args: Sequence[Any]) -> ShiplapError:
    """Return the error ``SL209`` of ``func``, a function of torch that does not accept sparse tensors of the class
    ``kind``.
    """
    name, (replace, features, container) = resolve_name(func) or func.__name__, kind.spelled
    given = features if args and isinstance(args[0], SummableTensor) else f"[{features}, ...]"
    more = ", ..." if len(args) > 1 else ""
    return error(
        "SL209",
        where=name,
        got=f"a {kind.__name__}",
        expected="a tensor, such as its features",
        fix=f"write {replace}({name}({given}{more})), or {container} in place of torch.nn.Sequential",
    )


def _checkpoint_function(checkpoint: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return ``checkpoint(function, ...)`` for the function ``args[0]``. Its positional arguments, and the sparse
    tensors among the keyword arguments, are bound to the function first, since Dynamo does not accept sparse tensors as
    arguments. The other keyword arguments are passed to ``checkpoint``.
    """
    function, *given = args
    sparse = {name: value for name, value in kwargs.items() if isinstance(value, SummableTensor)}
    others = {name: value for name, value in kwargs.items() if not isinstance(value, SummableTensor)}
    return checkpoint(lambda **more: function(*given, **sparse, **more), **others)
