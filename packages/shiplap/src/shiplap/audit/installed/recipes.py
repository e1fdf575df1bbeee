"""Calls as recipes: an argument is the Python text that builds it, so that a finding's script builds it again."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shiplap.audit.installed import tensors
from shiplap.dtypes import DTYPES, preferred
from shiplap.scaffold.calls import DispatchedCall, SeenTensor, map_seen
from shiplap.scaffold.schema import SchemaField, SchemaForm

# Schemas state no meaning of an argument, so its name has to suggest the values.
_INDICES = re.compile(r"ind(ex|ices)?s?\b|idx|segment|label|row|col|bag|perm|ids?\b|roi_ix|table", re.IGNORECASE)
_OFFSETS = re.compile(r"offset|cumsum|indptr|splits|cu_seq", re.IGNORECASE)
_LENGTHS = re.compile(r"length|count|batch_size_per|repeats", re.IGNORECASE)
_MASKS = re.compile(r"mask|is_|has_", re.IGNORECASE)
_DTYPES = preferred()
# As torch's C++ names them in errors, such as Long.
_NAMED_DTYPES = {row.aten.removeprefix("k").lower(): row.name for row in DTYPES.values() if row.aten}
_SCALARS: dict[str, tuple[Any, ...]] = {
    "int": (1, 2, 0, 4, 8, 3, 32, 64, 128),
    "SymInt": (1, 2, 4, 6, 8, 0, 3, 32, 64),
    "float": (1.0, 0.5, 0.0, 0.1),
    "bool": (False, True),
    "Scalar": (1, 2, 0.5),
    "str": ("", "mean", "sum", "none"),
    "ScalarType": tuple(DTYPES[name].torch for name in _DTYPES),
    "Device": (torch.device("cpu"),),
    "Layout": (torch.strided,),
    "MemoryFormat": (torch.contiguous_format,),
}


@dataclass(frozen=True)
class TensorRecipe:
    """The description of a tensor by its dtype, its shape, the seed of its random values and their range (``low`` to
    ``high``). If ``low`` and ``high`` are both 0, floating-point values are normally distributed. If ``last`` is not
    None, the tensor holds ascending offsets up to ``last``. ``values`` has all values of a recorded tensor, or is
    empty.
    """

    dtype: str
    shape: tuple[int, ...]
    seed: int
    low: float = 0.0
    high: float = 0.0
    last: int | None = None
    values: tuple[float, ...] = ()

    def __str__(self) -> str:
        """Return the Python expression that builds the tensor."""
        if self.values:
            return f"torch.tensor({list(self.values)}, dtype=torch.{self.dtype}).view({self.shape})"
        if self.last is not None:
            return f"offsets({self.seed}, torch.{self.dtype}, {self.shape}, {self.last})"
        bounds = f", {self.low!r}, {self.high!r}" if (self.low, self.high) != (0.0, 0.0) else ""
        return f"tensor({self.seed}, torch.{self.dtype}, {self.shape}{bounds})"


ArgumentRecipe = Any  # a TensorRecipe, a tuple of them or of scalars, or a scalar


@dataclass(frozen=True)
class CallRecipe:
    """The descriptions of the arguments of a call, by name. ``origin`` says whether the call was recorded from a
    program or found by a search.
    """

    arguments: Mapping[str, ArgumentRecipe]
    origin: str = "found by a search"

    def texts(self, wrap: str = "") -> dict[str, str]:
        """Return a dict from the name of each argument to the Python expression that builds it. If ``wrap`` is not
        empty, each tensor is wrapped in a call of the function with this name.
        """
        return {name: _text_of(value, wrap) for name, value in self.arguments.items()}

    def with_argument(self, name: str, value: ArgumentRecipe) -> CallRecipe:
        """Return a copy of the call with ``value`` as the argument ``name``."""
        return replace(self, arguments={**self.arguments, name: value})

    def tensors(self) -> Iterator[tuple[str, TensorRecipe]]:
        """Yield ``(argument name, recipe)`` for each tensor of the call, including those in lists."""
        for name, value in self.arguments.items():
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, TensorRecipe):
                    yield name, one

    def with_size(self, size: int, other: int) -> CallRecipe:
        """Return a copy of the call with ``other`` in place of ``size`` in the shapes of its tensors and in its int
        arguments.
        """

        def resized(value: ArgumentRecipe) -> ArgumentRecipe:
            """Return the argument ``value`` with ``other`` in place of ``size`` in shapes and ints."""
            if isinstance(value, tuple):
                return tuple(map(resized, value))
            if isinstance(value, TensorRecipe):
                shape = tuple(map(resized, value.shape))
                return value if shape == value.shape else replace(value, shape=shape, values=())
            return other if type(value) is int and value == size else value

        return replace(self, arguments={n: resized(v) for n, v in self.arguments.items()})


def evaluate(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return a dict of new arguments by name. Each is the value of its Python expression in ``texts``."""
    names = {"torch": torch, "inf": float("inf"), "nan": float("nan"), **vars(tensors)}
    return {name: eval(text, names) for name, text in texts.items()}  # texts that this package has written


def _text_of(value: ArgumentRecipe, wrap: str) -> str:
    """Return the Python expression that builds an argument. If ``wrap`` is not empty, each tensor is wrapped in a call
    of the function with this name.
    """
    if isinstance(value, tuple):
        return "[" + ", ".join(_text_of(v, wrap) for v in value) + "]"
    if isinstance(value, TensorRecipe):
        return f"{wrap}({value})" if wrap else str(value)
    return f"torch.device({str(value)!r})" if isinstance(value, torch.device) else repr(value)


def recipe_of_call(call: DispatchedCall, seed: int) -> CallRecipe:
    """Return a recipe of a recorded call, from which similar arguments can be made. It has the recorded sizes, dtypes
    and scalars.

    The values are new, drawn from ``seed`` within the recorded ranges, but for small tensors of whole numbers.
    """

    def recipe(seen: SeenTensor) -> TensorRecipe:
        """Return the recipe of one recorded tensor, with its dtype, its shape and the range of its values, and with
        ``seed``.
        """
        whole = not seen.dtype.startswith(("float", "bfloat", "complex"))
        low, high = seen.low or 0.0, seen.high or 0.0
        high = high if high > low or whole else low + 1e-9
        return TensorRecipe(seen.dtype, seen.shape, seed, low, high, values=seen.values)

    return CallRecipe({n: map_seen(v, recipe) for n, v in call.arguments.items()}, "recorded")


class CallDraws:
    """A source of random calls of an op. Names and types of arguments in its schema determine what is drawn. Messages
    of exceptions of the op give hints for later draws.
    """

    def __init__(self, form: SchemaForm, seed: int) -> None:
        """Prepare to draw calls of an op with the schema ``form``. Equal seeds give equal calls."""
        # The op's name is part of the seed, so that its calls do not depend on which ops are audited.
        self.form, self.random = form, random.Random(f"{form.name} {seed}")
        # What refusals have named: texts in quotes, dtypes and numbers.
        self.words: list[str] = []
        self.dtypes: list[str] = []
        self.numbers: list[int] = []

    def first(self) -> CallRecipe:
        """Return a random call in which tensors have one number of dims and one size. Scalars with defaults have these,
        and optional arguments are None.
        """
        rank, size = self.random.choice((2, 1, 3, 4, 2, 1)), self.random.choice((6, 4, 8))
        return CallRecipe({a.name: self._argument(a, rank, size) for a in self.form.arguments})

    def changed(self, call: CallRecipe) -> CallRecipe:
        """Return a copy of the call with one or two arguments changed at random."""
        for _ in range(self.random.choice((1, 1, 2))):
            field = self.random.choice(self.form.arguments)
            call = call.with_argument(field.name, self._change(field, call))
        return call

    def hint(self, refusal: str) -> None:
        """Store the quoted words, the dtypes and the numbers in ``refusal``, the message of an exception of the op, as
        values to try in later draws.
        """
        self.words += [w for w in re.findall(r"['\"](\w[\w.-]{0,30})['\"]", refusal) if w not in self.words]
        named = [_NAMED_DTYPES.get(w.lower(), w.lower()) for w in re.findall(r"[A-Za-z]+\d*", refusal)]
        self.dtypes += [d for d in named if d in _DTYPES and d not in self.dtypes]
        self.numbers += [n for w in re.findall(r"\b\d{1,4}\b", refusal) if (n := int(w)) not in self.numbers]

    def _change(self, field: SchemaField, call: CallRecipe) -> ArgumentRecipe:
        """Return another value for the argument ``field`` of ``call``. It is newly drawn, or is the present tensor or
        list with a change.
        """
        value = call.arguments[field.name]
        if not field.tensor or value is None or (field.optional and self.random.random() < 0.2):
            return self._argument(field, self.random.choice((1, 2, 3, 4)), self._size(call), given=True)
        if isinstance(value, tuple):
            count = self.random.choice((len(value), 1, 2, 3))
            one = value[0] if value else self._tensor(field, 2, 6)
            one = self._changed_tensor(field, one, call) if isinstance(one, TensorRecipe) else one
            return tuple(replace(one, seed=self.random.randrange(1000)) for _ in range(count))
        return self._changed_tensor(field, value, call)

    def _changed_tensor(self, field: SchemaField, t: TensorRecipe, call: CallRecipe) -> TensorRecipe:
        """Return a recipe like ``t``, the tensor of the argument ``field``, with one property changed at random.

        The property is the dtype, the number of dims, a size or the values. The shape may also become that of another
        tensor of ``call``.
        """
        kind = self.random.choice(("dtype", "rank", "size", "size", "like", "values"))
        if kind == "dtype":
            dtype = self.random.choice(self.dtypes if self.dtypes and self.random.random() < 0.6 else _DTYPES)
            return replace(self._tensor(field, len(t.shape), 6, dtype), shape=t.shape)
        if kind == "rank":
            return replace(t, shape=tuple(self._size(call) for _ in range(self.random.randrange(5))))
        if kind == "size" and t.shape:
            axis = self.random.randrange(len(t.shape))
            return replace(t, shape=(*t.shape[:axis], self._size(call), *t.shape[axis + 1 :]))
        others = [o for n, o in call.tensors() if n != field.name]
        if kind == "like" and others:
            other = self.random.choice(others)
            return replace(t, shape=other.shape, dtype=self.random.choice((t.dtype, other.dtype)))
        high = self.random.choice((1.0, 2.0, 4.0, 0.0))
        last = self._size(call) if t.last is not None else None
        return replace(t, seed=self.random.randrange(1000), low=0.0, high=high, last=last)

    def _size(self, call: CallRecipe) -> int:
        """Return a random size to try. It occurs in the call, is larger or smaller by one than such a size, equals a
        small int argument, or is one of some common sizes.
        """
        used = [n for _, t in call.tensors() for n in t.shape]
        ints = [v for v in call.arguments.values() if type(v) is int and 0 < v <= 64]
        near = [n + d for n in used for d in (1, -1) if n + d > 0]
        return self.random.choice((*used, *used, *near, *ints, 1, 2, 3, 4, 5, 6, 8, 16))

    def _argument(self, field: SchemaField, rank: int, size: int, given: bool = False) -> ArgumentRecipe:
        """Return a random value for the argument ``field`` of the schema, as a scalar, a recipe of a tensor, a tuple of
        these, or None.

        A tuple has as many members as the schema demands. Tensors have ``rank`` dims of size ``size``. If ``given`` is
        false, an optional argument is None, and an argument with a default has this default. If ``given`` is true, an
        optional argument is None in three of ten calls, and no default is used.
        """
        if field.optional and not (given and self.random.random() < 0.7):
            return None
        if field.default is not None and not given:
            value = field.default_value
            return tuple(value) if isinstance(value, list) else value
        element, bracket, length = field.kind.rstrip("?").replace("?", "").partition("[")
        count = int(length.rstrip("]") or 0) or self.random.choice((1, 2, 3)) if bracket else 0
        made = [self._one(field, element, rank, size) for _ in range(max(count, 1))]
        return tuple(made) if bracket else made[0]

    def _one(self, field: SchemaField, element: str, rank: int, size: int) -> ArgumentRecipe:
        """Return one random value of the schema type ``element``. For ``Tensor`` it is a recipe with ``rank`` dims of
        size ``size``. For another type it is a common scalar, or a word or number that an exception of the op has
        named.
        """
        if element == "Tensor":
            return self._tensor(field, rank, size)
        choices = _SCALARS.get(element, (None,))
        named: dict[str, list[Any]] = {"str": [*self.words], "int": self.numbers[-12:], "SymInt": self.numbers[-12:]}
        more = named.get(element, [])
        return self.random.choice((*choices, *more))

    def _tensor(self, field: SchemaField, rank: int, size: int, dtype: str = "") -> TensorRecipe:
        """Return the recipe of a tensor whose dtype, shape and range of values follow from the name of the argument.

        A name such as ``offsets`` gives ascending integers, for example. Other names give floats in ``rank`` dims of
        size ``size``. If ``dtype`` is not empty, it replaces the dtype.
        """
        seed, name = self.random.randrange(1000), field.name
        if _OFFSETS.search(name):
            return TensorRecipe(dtype or "int64", (size + 1,), seed, last=size)
        if _LENGTHS.search(name):
            return TensorRecipe(dtype or "int64", (size,), seed, 1.0, 1.0)
        if _INDICES.search(name):
            return TensorRecipe(dtype or "int64", (size,) * max(min(rank, 2), 1), seed, 0.0, 2.0)
        if _MASKS.search(name):
            return TensorRecipe(dtype or "bool", (size,) * rank, seed)
        return TensorRecipe(dtype or "float32", (size,) * rank, seed, *_range_of(dtype))


def _range_of(dtype: str) -> tuple[float, float]:
    """Return the range ``(low, high)`` from which values of this dtype are drawn. It is ``(0, 2)`` for integers, since
    they may be indices. It is ``(0, 0)`` for other dtypes, which stands for a normal distribution.
    """
    return (0.0, 2.0) if dtype.startswith(("int", "uint")) else (0.0, 0.0)


def malformed_calls(call: CallRecipe, form: SchemaForm) -> Iterator[tuple[str, CallRecipe]]:
    """Yield ``(description, call)`` for calls whose arguments do not fit each other. In each call, one integer tensor
    holds a number far out of range, or one tensor has a single row.
    """
    fields: Sequence[SchemaField] = form.arguments
    for field in fields:
        value = call.arguments.get(field.name)
        if not isinstance(value, TensorRecipe) or not value.shape:
            continue
        if value.dtype in ("int64", "int32"):
            # Far outside of each tensor, yet within 32 bits.
            for edge in (2**30, -(2**30)):
                yield (
                    f"{field.name} = {edge}",
                    call.with_argument(field.name, replace(value, low=edge, high=edge, last=None, values=())),
                )
        if value.shape[0] > 1:
            yield (
                f"{field.name} has one row",
                call.with_argument(field.name, replace(value, shape=(1, *value.shape[1:]), values=())),
            )
