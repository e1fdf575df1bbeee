"""Calls as recipes: an argument is the Python text that builds it, so that a finding's script builds it again."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shiplap.audit.installed import tensors
from shiplap.scaffold.calls import DispatchedCall, SeenObject, SeenTensor, map_seen
from shiplap.scaffold.schema import SchemaForm


@dataclass(frozen=True)
class TensorRecipe:
    """The description of a tensor by its dtype, its shape, the seed of its random values and their range (``low`` to
    ``high``). If ``low`` and ``high`` are both 0, floating-point values are normally distributed. If ``last`` is not
    None, the tensor holds ascending offsets up to ``last``. ``values`` has all values of a recorded tensor, or is
    empty. ``columns`` has, of each column of a recorded matrix, the least value, the largest value and whether all
    values are whole numbers, or is empty. ``source`` is a Python expression that builds the tensor, as by a call of an
    op, or is empty. ``device`` is the type of the device on which the tensor is.
    """

    dtype: str
    shape: tuple[int, ...]
    seed: int
    low: float = 0.0
    high: float = 0.0
    last: int | None = None
    values: tuple[float, ...] = ()
    source: str = ""
    device: str = "cpu"
    columns: tuple[tuple[float, float, bool], ...] = ()

    def reshaped(self, shape: tuple[int, ...]) -> TensorRecipe:
        """Return a recipe of another shape. Values that were made for the present shape are dropped. Offsets are a
        vector.
        """
        last = self.last if len(shape) == 1 else None
        return self if shape == self.shape else replace(self, shape=shape, last=last, values=(), source="")

    def cut_off(self, size: int) -> TensorRecipe:
        """Return a recipe of the first ``size`` elements of a vector, whose values stay."""
        source = f"{self}[:{size}]" if self.source or not self.values else ""
        return replace(self, shape=(size,), values=self.values[:size], source=source)

    def filled_with(self, number: int) -> TensorRecipe:
        """Return a recipe of a tensor of the same shape, all values of which are ``number``."""
        return replace(self, low=number, high=number, last=None, values=(), source="", columns=())

    def with_column_of(self, place: int, number: int) -> TensorRecipe:
        """Return a recipe of a matrix whose column ``place`` has the value ``number`` in each row."""
        columns = (*self.columns[:place], (number, number, True), *self.columns[place + 1 :])
        return replace(self, values=(), source="", columns=columns)

    def largest_whole_numbers(self) -> list[float]:
        """Return the largest value of the tensor if its whole numbers may be indices, and that of each of its columns
        of whole numbers. Return an empty list for a tensor without elements.

        Numbers of one byte are mostly data, such as quantized weights or images. They may be indices, such as those of
        a code book, if there are so few that their values were recorded, and none is less than -1.
        """
        if not math.prod(self.shape):
            return []
        found = [high for _, high, whole in self.columns if whole]
        whole = self.dtype.startswith(("int", "uint"))
        data = self.dtype in ("int8", "uint8") and (not self.values or self.low < -1)
        return [*found, max(self.high, self.last or 0)] if whole and not data else found

    def __str__(self) -> str:
        """Return the Python expression that builds the tensor."""
        if self.source:
            return self.source
        return self._host_text() + ("" if self.device == "cpu" else f".to({self.device!r})")

    def _host_text(self) -> str:
        """Return the Python expression that builds the tensor in the memory of the CPU."""
        if self.values:
            return f"torch.tensor({list(self.values)}, dtype=torch.{self.dtype}).view({self.shape})"
        if self.last is not None:
            return f"offsets({self.seed}, torch.{self.dtype}, {self.shape}, {self.last})"
        if self.columns and len(self.shape) == 2 and self.shape[1] == len(self.columns):
            return f"matrix({self.seed}, torch.{self.dtype}, {self.shape[0]}, {list(self.columns)})"
        bounds = f", {self.low!r}, {self.high!r}" if (self.low, self.high) != (0.0, 0.0) else ""
        return f"tensor({self.seed}, torch.{self.dtype}, {self.shape}{bounds})"


ArgumentRecipe = Any  # a TensorRecipe, a tuple of them or of scalars, a SeenObject, or a scalar


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
                return value.reshaped(tuple(map(resized, value.shape)))
            return other if type(value) is int and value == size else value

        return replace(self, arguments={n: resized(v) for n, v in self.arguments.items()})


def evaluate(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return a dict of new arguments by name. Each is the value of its Python expression in ``texts``."""
    names = {"torch": torch, "inf": float("inf"), "nan": float("nan"), **vars(tensors)}
    names["import_module"] = importlib.import_module
    return {name: eval(text, names) for name, text in texts.items()}  # texts that this package has written


@dataclass(frozen=True)
class TakenCall:
    """A call that the op ``op`` has taken. ``results`` are the dtypes and shapes of the tensors that it returned. They
    are ``steady`` if an equal call returns the same values.
    """

    op: str
    call: CallRecipe
    results: tuple[tuple[str, tuple[int, ...]], ...] = ()
    steady: bool = True

    @property
    def device(self) -> str:
        """The type of the device of the first tensor of the call that is not on the CPU, or ``cpu``."""
        return next((t.device for _, t in self.call.tensors() if t.device != "cpu"), "cpu")

    def result_recipes(self) -> list[TensorRecipe]:
        """Return a recipe of each result. That of an op makes the call again. That of a function, which is not in
        ``torch.ops``, and that of a call whose results are not steady draw other values of the same dtype and shape.
        """
        if "::" not in self.op or not self.steady:
            return [TensorRecipe(dtype, shape, 0, device=self.device) for dtype, shape in self.results]
        texts = ", ".join(f"{n!r}: {text}" for n, text in self.call.texts().items())
        return [
            TensorRecipe(dtype, shape, 0, source=f"result({self.op!r}, {{{texts}}}, {number})", device=self.device)
            for number, (dtype, shape) in enumerate(self.results)
        ]


def recipe_from_text(text: str) -> CallRecipe:
    """Return the call of which ``text`` is the ``repr``, which a child process has sent."""
    names = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}
    classes = {c.__name__: c for c in (CallRecipe, TensorRecipe, SeenObject)}
    made: CallRecipe = eval(text, {**names, **classes})  # our own text
    return made


def _text_of(value: ArgumentRecipe, wrap: str) -> str:
    """Return the Python expression that builds an argument. If ``wrap`` is not empty, each tensor is wrapped in a call
    of the function with this name.
    """
    if isinstance(value, tuple):
        return "[" + ", ".join(_text_of(v, wrap) for v in value) + "]"
    if isinstance(value, TensorRecipe):
        return f"{wrap}({value})" if wrap else str(value)
    if isinstance(value, SeenObject):
        return value.source
    return f"torch.device({str(value)!r})" if isinstance(value, torch.device) else repr(value)


def recipe_of_call(call: DispatchedCall, seed: int) -> CallRecipe:
    """Return a recipe of a recorded call, from which similar arguments can be made. It has the recorded sizes, dtypes
    and scalars.

    The values are new, drawn from ``seed`` within the recorded ranges, but for small tensors of whole numbers. Whole
    numbers that ascend from 0 do so again, since they may be offsets.
    """

    def recipe(seen: SeenTensor) -> TensorRecipe:
        """Return the recipe of one recorded tensor, with its dtype, its shape and the range of its values, and with
        ``seed``.
        """
        whole = not seen.dtype.startswith(("float", "bfloat", "complex"))
        low, high = seen.low or 0.0, seen.high or 0.0
        high = high if high > low or whole else math.nextafter(low, math.inf)
        last = int(high) if seen.ascending and low == 0 else None
        columns = tuple((c.low, c.high, c.whole) for c in seen.columns)
        return TensorRecipe(seen.dtype, seen.shape, seed, low, high, last, seen.values, "", seen.device, columns)

    return CallRecipe({n: map_seen(v, recipe) for n, v in call.arguments.items()}, "recorded")


def malformed_calls(call: CallRecipe, form: SchemaForm) -> Iterator[tuple[str, CallRecipe]]:
    """Yield ``(description, call)`` for calls whose arguments do not fit each other. In each call, one tensor of floats
    is NaN, one integer tensor or one column of whole numbers holds a number far out of range, one vector of bytes is
    cut off, as a file may be, or one tensor has a single row. Those that keep all shapes come first, since they are
    the least malformed.
    """
    values = [(f.name, v) for f in form.arguments if isinstance(v := call.arguments.get(f.name), TensorRecipe)]
    tensors = [(name, t) for name, t in values if t.shape]
    for name, t in tensors:
        if t.dtype in ("float64", "float32", "float16", "bfloat16"):
            # A coordinate that is NaN becomes an arbitrary place where it is converted to an integer.
            text = f"torch.full({t.shape}, nan, dtype=torch.{t.dtype}, device={t.device!r})"
            yield f"{name} = nan", call.with_argument(name, replace(t, source=text))
    for name, t in tensors:
        # Far outside of each tensor, yet within 32 bits. A power of two times a size may wrap around to zero there.
        for edge in (10**9, -(10**9)):
            if t.dtype in ("int64", "int32"):
                yield f"{name} = {edge}", call.with_argument(name, t.filled_with(edge))
            for place in [n for n, (*_, whole) in enumerate(t.columns) if whole]:
                made = call.with_argument(name, t.with_column_of(place, edge))
                yield f"column {place} of {name} = {edge}", made
    for name, t in tensors:
        if t.dtype == "uint8" and len(t.shape) == 1:
            for size in sorted({t.shape[0] * part // 8 for part in range(1, 8)} | {t.shape[0] - 1}):
                if 0 < size < t.shape[0]:
                    yield f"{name} is cut off after {size} bytes", call.with_argument(name, t.cut_off(size))
    for name, t in tensors:
        if t.shape[0] > 1:
            yield f"{name} has one row", call.with_argument(name, t.reshaped((1, *t.shape[1:])))
