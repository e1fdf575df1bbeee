"""Arithmetic, comparison, and the functions of torch that a ``SparseTensor`` takes: those that work on each row alone.

The result lies on the same voxels. Operands are numbers, tensors that broadcast against the features, and sparse
tensors on the same voxels. Activations and norms of ``torch.nn`` call such functions, so they work in
``torch.nn.Sequential``.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from shiplap import ShiplapError
from shiplap.plugin_api import error
from shiplap_sparse3d import row_norms
from shiplap_sparse3d.sums import SummableTensor

_UNARY = (
    "abs neg positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sign sgn relu sigmoid tanh sin "
    "cos tan atan sinh cosh erf erfc floor ceil round trunc frac isnan isinf isfinite logical_not bitwise_not clamp "
    "clip clamp_min clamp_max nan_to_num clone detach zeros_like ones_like full_like empty_like rand_like randn_like"
)
_BINARY = (
    "add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow maximum minimum atan2 hypot "
    "eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor isclose "
    "where lerp addcmul addcdiv"
)
_OPERATORS = (
    "add sub mul truediv floordiv mod pow and or xor radd rsub rmul rtruediv rfloordiv rmod rpow rand ror rxor "
    "eq ne lt le gt ge"
)
_OF_NN = (
    "relu relu6 elu selu celu leaky_relu prelu rrelu gelu silu mish sigmoid tanh logsigmoid softplus softsign "
    "tanhshrink hardshrink softshrink hardtanh hardsigmoid hardswish threshold dropout alpha_dropout "
    "feature_alpha_dropout linear layer_norm rms_norm batch_norm group_norm"
)
_ALONG_CHANNELS = "softmax log_softmax softmin normalize glu cumsum cumprod"
_OTHERS = (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool, numbers.Number)


def _named_functions(homes: Sequence[Any], names: str) -> frozenset[Any]:
    """Return the frozenset of the attributes with the given ``names`` of all modules or classes in ``homes``.

    ``names`` is a string of attribute names separated by blanks. A name that an element of ``homes`` lacks is skipped
    for that element.
    """
    return frozenset(getattr(home, name) for home in homes for name in names.split() if hasattr(home, name))


_ALONG = _named_functions((torch, Tensor, functional), _ALONG_CHANNELS)
_JOINS = _named_functions((torch,), "cat concat concatenate")
_PRODUCTS = _named_functions((torch, Tensor), "matmul mm __matmul__")
_POINTWISE = (
    _named_functions((torch, Tensor), f"{_UNARY} {_BINARY}")
    | _named_functions((functional,), _OF_NN)
    | frozenset(getattr(Tensor, f"__{name}__") for name in _OPERATORS.split() if hasattr(Tensor, f"__{name}__"))
)


# Methods of tensors that are functions of Python, each with its operation and whether its operands are swapped. Dynamo
# passes them as other objects, which are in no set, and all of which have one name since torch 2.15. ``is`` finds them.
_WRITTEN_IN_PYTHON: tuple[tuple[Any, Callable[..., Any], bool], ...] = (
    *((getattr(Tensor, f"__{name}__"), getattr(operator, name), False) for name in ("pow", "floordiv")),
    *(
        (getattr(Tensor, f"__r{name}__"), getattr(operator, name), True)
        for name in ("sub", "truediv", "floordiv", "mod", "pow")
    ),
)


def _operator(func: Callable[..., Any], sign: str, *, swapped: bool = False) -> Any:
    """Return a method of two operands for :class:`Arithmetic`, such as ``__sub__``.

    The method returns ``func(features, other)`` as a sparse tensor, or ``func(other, features)`` if ``swapped`` is
    true. ``sign`` is the symbol of the operation in errors.
    """

    def method(self: Arithmetic, other: Any) -> Any:
        """Return ``func`` of the features of ``self`` and of ``other`` as a sparse tensor on the voxels of ``self``.

        ``other`` is a number, a tensor or a sparse tensor, and comes first if ``swapped`` is true. Return
        ``NotImplemented`` if ``other`` has another type. ``func`` and ``swapped`` are arguments of ``_operator``.
        """
        return self._apply_binary(func, other, sign, swapped=swapped)

    return method


class Arithmetic(SummableTensor):
    """The base class of sparse tensors that gives them the operators and functions of ``torch.Tensor``. Each of them is
    computed on the features ``feats [n, c]`` and returns a sparse tensor on the same voxels.

    ``row_functions`` is the set of the functions of torch that may be applied to a sparse tensor. ``row_operators`` are
    those of them that are written in Python. Dynamo passes these as other objects than torch does.
    """

    feats: Tensor
    row_functions: ClassVar[frozenset[Any]] = _POINTWISE | _ALONG | _JOINS | _PRODUCTS
    row_operators: ClassVar[tuple[Any, ...]] = tuple(method for method, _, _ in _WRITTEN_IN_PYTHON)

    def replace(self, feats: Tensor) -> Any:
        """Return a sparse tensor with the features ``feats [n, c]`` on the voxels of this tensor. Subclasses implement
        this method.
        """
        raise NotImplementedError

    def check_same(self, other: Arithmetic, where: str) -> None:
        """Raise ``SL202`` unless ``other`` is on the voxels of this tensor. Otherwise rows with the same number would
        belong to different voxels. ``where`` names the operation in the error. Subclasses implement this method.
        """
        raise NotImplementedError

    @classmethod
    def rows_under(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return ``func(*args, **kwargs)`` with the features in place of each sparse tensor, as a sparse tensor on the
        same voxels.

        ``func`` is a function of torch that works on each row alone. torch calls this method if at least one argument
        is a sparse tensor. Raise ``SL202`` if the sparse tensors are on different voxels or tensors do not broadcast.
        Raise ``SL209`` if the arguments make ``func`` mix rows.
        """
        name = getattr(func, "__name__", "function")
        if func in _JOINS:
            args = [*args[0], *args[1:]] if args else [*kwargs["tensors"]]
        first: Arithmetic = next(value for value in [*args, *kwargs.values()] if isinstance(value, Arithmetic))
        if func in _ALONG or func in _JOINS or func in _PRODUCTS:
            return first._apply_along_channels(func, name, args, kwargs)
        rows = [_rows_of(value, first, name) for value in args]
        named = {key: _rows_of(value, first, name) for key, value in kwargs.items()}
        if torch.compiler.is_compiling() and len(args) == 2 and not kwargs:
            for method, written, reflected in _WRITTEN_IN_PYTHON:
                if func is method:
                    return first.replace(written(rows[1], rows[0]) if reflected else written(*rows))
        if func is functional.batch_norm:
            if named.get("training", len(args) > 5 and args[5]):
                first.check_statistics()
            if torch.compiler.is_compiling():  # torch's own asks how many rows there are
                keep = first.is_voxel
                named |= {"input": rows[0]} if rows else {}
                return first.replace(row_norms.functional_batch_norm(named.pop("input"), keep, *rows[1:], **named))
        if func is functional.group_norm and torch.compiler.is_compiling():
            named |= {"input": rows[0]} if rows else {}
            return first.replace(row_norms.functional_group_norm(named.pop("input"), *rows[1:], **named))
        return first._apply_to_rows(func, rows, named, name)

    def _apply_along_channels(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return ``func(*args, **kwargs)`` of the features as a sparse tensor on the same voxels. ``func`` is a
        softmax, a concatenation or another function along a dimension, or a matrix product.

        ``name`` is the name of ``func`` in the error. Raise ``SL209`` if the dimension is not that of the channels, or
        if the product is not ``x @ weight``.
        """
        if func in _PRODUCTS:
            if torch.compiler.is_compiling() and not isinstance(args[0], Arithmetic):
                args = args[::-1]  # Dynamo (2.13) passes ``x @ weight`` as ``weight @ x``, which nothing else may be
            if len(args) == 2 and not isinstance(args[1], Arithmetic) and args[1].dim() == 2:
                return self.replace(self.feats @ args[1])
            raise _mixed_rows_error(name, "a sparse tensor times something else", "x @ weight, [channels, n]")
        dims = [kwargs.get("dim", kwargs.get("axis"))] + [value for value in args if type(value) is int]
        known = [dim for dim in dims if dim is not None]
        if func is functional.normalize:  # its first number is the order of the norm
            known = [kwargs.get("dim", args[2] if len(args) > 2 else 1)]
        default = -1 if func is functional.glu else 0 if func in _JOINS else None
        dim = known[0] if known else default
        if dim not in (1, -1):
            raise _mixed_rows_error(name, f"dim={dim}, along the voxels", "dim=1, along the channels")
        if func not in _JOINS:
            named = {key: _rows_of(v, self, name) for key, v in kwargs.items()}
            return self.replace(func(*[_rows_of(v, self, name) for v in args], **named))
        parts = [value for value in args if type(value) is not int]
        return self.replace(torch.cat([_rows_of(part, self, name) for part in parts], 1))

    def _apply_to_rows(self, func: Any, rows: Sequence[Any], named: Mapping[str, Any], name: str) -> Any:
        """Return ``func(*rows, **named)`` as a sparse tensor on the voxels of this tensor. ``name`` is the name of
        ``func`` in the error.

        Raise ``SL202`` if the operands do not broadcast, or if the result does not have one row for each voxel. In a
        graph this is not checked.
        """
        if torch.compiler.is_compiling():
            return self.replace(func(*rows, **named))
        try:
            out = func(*rows, **named)
        except RuntimeError as wrong:
            shapes = [tuple(value.shape) for value in (*rows, *named.values()) if isinstance(value, Tensor)]
            # torch has no error class of its own for operands that do not broadcast.
            if "must match the size" not in str(wrong):
                raise
            raise self._broadcast_error(name, shapes) from wrong
        if out.dim() != 2 or out.shape[0] != self.feats.shape[0]:
            raise self._broadcast_error(name, [tuple(value.shape) for value in rows if isinstance(value, Tensor)])
        return self.replace(out)

    def _broadcast_error(self, name: str, shapes: Sequence[tuple[int, ...]]) -> ShiplapError:
        """Return the error ``SL202`` for operands of ``shapes`` that do not broadcast against the features. ``name``
        names the operation in the error.
        """
        n, c = self.feats.shape
        return error(
            "SL202",
            where=f"SparseTensor, {name}",
            got=f"tensors {', '.join(map(str, shapes))}",
            expected=f"one that broadcasts to [{n}, {c}]",
            fix="pass one value for each voxel as [n, 1], or one for each channel as [c]",
        )

    @property
    def is_voxel(self) -> Tensor:
        """The mask ``bool [n, 1]`` that is True for voxels and False for rows of padding."""
        raise NotImplementedError

    def check_statistics(self) -> None:
        """Raise ``SL208`` if this tensor may have rows of padding. A batch norm of torch would include them in its
        statistics. Subclasses implement this method.
        """
        raise NotImplementedError

    def plus(self, other: Any) -> Any:
        """Return ``self + other`` as a sparse tensor, or ``NotImplemented`` if ``other`` has an unsupported type."""
        return self._apply_binary(torch.add, other, "+")

    def _apply_binary(self, func: Callable[..., Tensor], other: Any, sign: str, *, swapped: bool = False) -> Any:
        """Return ``func(features, other)`` as a sparse tensor on the voxels of this tensor, or ``func(other,
        features)`` if ``swapped`` is true. Return ``NotImplemented`` if ``other`` has an unsupported type. ``sign`` is
        the symbol of the operation in errors.
        """
        if not isinstance(other, (Arithmetic, Tensor, *_OTHERS)):
            return NotImplemented
        rows = _rows_of(other, self, sign)
        return self._apply_to_rows(func, [rows, self.feats] if swapped else [self.feats, rows], {}, sign)

    __add__ = __radd__ = plus
    __sub__, __rsub__ = _operator(operator.sub, "-"), _operator(operator.sub, "-", swapped=True)
    __mul__ = __rmul__ = _operator(operator.mul, "*")
    __truediv__, __rtruediv__ = _operator(operator.truediv, "/"), _operator(operator.truediv, "/", swapped=True)
    __floordiv__, __rfloordiv__ = _operator(operator.floordiv, "//"), _operator(operator.floordiv, "//", swapped=True)
    __mod__, __rmod__ = _operator(operator.mod, "%"), _operator(operator.mod, "%", swapped=True)
    __pow__, __rpow__ = _operator(operator.pow, "**"), _operator(operator.pow, "**", swapped=True)
    __and__ = __rand__ = _operator(operator.and_, "&")
    __or__ = __ror__ = _operator(operator.or_, "|")
    __xor__ = __rxor__ = _operator(operator.xor, "^")

    def __matmul__(self, weight: Tensor) -> Any:
        """Return the features times ``weight [channels, k]`` on the same voxels."""
        return self.rows_under(torch.matmul, (self, weight), {})

    def __neg__(self) -> Any:
        """Return the negated features on the same voxels."""
        return self.replace(-self.feats)

    def __abs__(self) -> Any:
        """Return the absolute values of the features on the same voxels."""
        return self.replace(self.feats.abs())

    def __invert__(self) -> Any:
        """Return the inverted features on the same voxels. They must be booleans or integers."""
        return self.replace(~self.feats)

    # As of a torch.Tensor: a comparison is one of features, and the hash is that of the object.

    __eq__, __ne__ = _operator(operator.eq, "=="), _operator(operator.ne, "!=")
    __lt__, __le__ = _operator(operator.lt, "<"), _operator(operator.le, "<=")
    __gt__, __ge__ = _operator(operator.gt, ">"), _operator(operator.ge, ">=")
    __hash__ = object.__hash__
    __array_ufunc__ = None  # a number of NumPy as the first operand leaves the operation to us

    def __bool__(self) -> bool:
        """Raise ``SL209``, since a sparse tensor has no single truth value."""
        raise error(
            "SL209",
            where=f"bool({type(self).__name__})",
            got="a sparse tensor",
            expected="one truth value",
            fix="write x.feats.any() or x.feats.all(), or len(x) > 0",
        )


def _rows_of(value: Any, first: Arithmetic, sign: str) -> Any:
    """Return the features of ``value`` if it is a sparse tensor, and any other value unchanged. Raise ``SL202`` if
    ``value`` is a sparse tensor on other voxels than ``first``. ``sign`` names the operation in the error.
    """
    if not isinstance(value, Arithmetic):
        return value
    if value is not first:
        first.check_same(value, sign)
    return value.feats


def _mixed_rows_error(name: str, got: str, expected: str) -> ShiplapError:
    """Return the error ``SL209`` for the function ``torch.<name>``, which would mix rows of a sparse tensor. In the
    error's text, ``got`` describes the call that was made, and ``expected`` a call that works instead.
    """
    fix = f"write x.replace(torch.{name}(x.feats, ...)) if rows are to be mixed"
    return error("SL209", where=f"torch.{name} of a SparseTensor", got=got, expected=expected, fix=fix)


def _tensor_method(name: str) -> Any:
    """Return a method for sparse tensors that applies the method ``name`` of ``torch.Tensor`` to the features. It
    returns a sparse tensor on the same voxels.
    """
    func = getattr(Tensor, name)

    def method(self: Arithmetic, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the method ``name`` (argument of ``_tensor_method``) of ``torch.Tensor`` for the
        features, as a sparse tensor on the same voxels.
        """
        return self.rows_under(func, (self, *args), kwargs)

    method.__name__, method.__doc__ = name, f"As ``torch.Tensor.{name}``, of the features."
    return method


for _name in f"{_UNARY} {_BINARY} {_ALONG_CHANNELS} matmul".split():
    if hasattr(Tensor, _name) and not hasattr(Arithmetic, _name):
        setattr(Arithmetic, _name, _tensor_method(_name))
