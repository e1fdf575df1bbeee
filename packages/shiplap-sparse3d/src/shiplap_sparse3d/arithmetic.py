"""Arithmetic, comparison, and the functions of torch that a ``SparseTensor`` takes: those that work on each row alone.

The result lies on the same voxels. Operands are numbers, tensors that broadcast against the features, and sparse
tensors on the same voxels. Activations and norms of ``torch.nn`` call such functions, so they work in
``torch.nn.Sequential``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from shiplap.plugin_api import error
from shiplap_sparse3d.sums import SummableTensor

_UNARY = (
    "abs neg exp expm1 log log1p sqrt rsqrt square reciprocal sign relu sigmoid tanh erf sin cos floor ceil round "
    "isnan isinf isfinite logical_not clamp clip clamp_min clamp_max nan_to_num"
)
_BINARY = (
    "add sub mul div true_divide floor_divide remainder pow maximum minimum fmod "
    "eq ne lt le gt ge logical_and logical_or logical_xor"
)
_OPERATORS = "add sub mul truediv radd rsub rmul rtruediv eq ne lt le gt ge"
_OF_NN = (
    "relu relu6 elu selu celu leaky_relu prelu rrelu gelu silu mish sigmoid tanh logsigmoid softplus softsign "
    "tanhshrink hardshrink softshrink hardtanh hardsigmoid hardswish threshold dropout alpha_dropout "
    "feature_alpha_dropout linear layer_norm rms_norm batch_norm"
)


def _list_row_functions() -> frozenset[Any]:
    names: list[tuple[Any, str]] = [(torch, n) for n in (_UNARY + " " + _BINARY).split()]
    names += [(Tensor, n) for n in (_UNARY + " " + _BINARY).split()]
    names += [(functional, n) for n in _OF_NN.split()]
    names += [(Tensor, f"__{n}__") for n in _OPERATORS.split()]
    return frozenset(getattr(home, name) for home, name in names if hasattr(home, name))


class Arithmetic(SummableTensor):
    """The operators of a sparse tensor whose ``feats`` are ``[n, c]``."""

    feats: Tensor
    row_functions: ClassVar[frozenset[Any]] = _list_row_functions()

    def replace(self, feats: Tensor) -> Any:
        """Other features on the same voxels."""
        raise NotImplementedError

    def check_same(self, other: Arithmetic, where: str) -> None:
        """Raise SL202 for a tensor on other voxels: rows of the two mean different places."""
        raise NotImplementedError

    @classmethod
    def rows_under(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``func`` of the features; torch calls it for arguments of which one is a sparse tensor at least."""
        given = [*args, *kwargs.values()]
        first: Arithmetic = next(value for value in given if isinstance(value, Arithmetic))
        if func is functional.batch_norm and kwargs.get("training", len(args) > 5 and args[5]):
            first.check_statistics()
        name = getattr(func, "__name__", "function")
        rows = [_rows_of(value, first, name) for value in args]
        named = {key: _rows_of(value, first, name) for key, value in kwargs.items()}
        return first.replace(func(*rows, **named))

    def check_statistics(self) -> None:
        """Raise SL208 where a batch norm of torch would learn from rows that are no voxels."""
        raise NotImplementedError

    def plus(self, other: Any) -> Any:
        """``self + other``."""
        return self._binary(torch.add, other, "+")

    def _binary(self, func: Callable[..., Tensor], other: Any, sign: str) -> Any:
        if not isinstance(other, (Arithmetic, Tensor, int, float, bool, complex, torch.SymInt, torch.SymFloat)):
            return NotImplemented
        rows = _rows_of(other, self, sign)
        return self.replace(func(self.feats, rows))

    __add__ = __radd__ = plus

    def __sub__(self, other: Any) -> Any:
        return self._binary(torch.sub, other, "-")

    def __rsub__(self, other: Any) -> Any:
        return self._binary(_swapped_sub, other, "-")

    def __mul__(self, other: Any) -> Any:
        return self._binary(torch.mul, other, "*")

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._binary(torch.div, other, "/")

    def __rtruediv__(self, other: Any) -> Any:
        return self._binary(_swapped_div, other, "/")

    def __pow__(self, other: Any) -> Any:
        return self._binary(torch.pow, other, "**")

    def __neg__(self) -> Any:
        return self.replace(-self.feats)

    def __abs__(self) -> Any:
        return self.replace(self.feats.abs())

    def __invert__(self) -> Any:
        return self.replace(~self.feats)

    # As of a torch.Tensor: a comparison is one of features, and the hash is that of the object.

    def __eq__(self, other: object) -> Any:
        return self._binary(torch.eq, other, "==")

    def __ne__(self, other: object) -> Any:
        return self._binary(torch.ne, other, "!=")

    __hash__ = object.__hash__

    def __lt__(self, other: Any) -> Any:
        return self._binary(torch.lt, other, "<")

    def __le__(self, other: Any) -> Any:
        return self._binary(torch.le, other, "<=")

    def __gt__(self, other: Any) -> Any:
        return self._binary(torch.gt, other, ">")

    def __ge__(self, other: Any) -> Any:
        return self._binary(torch.ge, other, ">=")

    def __bool__(self) -> bool:
        raise error(
            "SL209",
            where=f"bool({type(self).__name__})",
            got="a sparse tensor",
            expected="one truth value",
            fix="write x.feats.any() or x.feats.all(), or len(x) > 0",
        )


def _swapped_sub(rows: Tensor, other: Any) -> Tensor:
    return other - rows


def _swapped_div(rows: Tensor, other: Any) -> Tensor:
    return other / rows


def _rows_of(value: Any, first: Arithmetic, sign: str) -> Any:
    """The features of a sparse tensor on the voxels of ``first``; any other value as it is."""
    if not isinstance(value, Arithmetic):
        return value
    if value is not first:
        first.check_same(value, sign)
    return value.feats
