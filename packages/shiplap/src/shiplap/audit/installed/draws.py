"""Random calls of an op: names and types of its arguments, its refusals and other ops suggest what is drawn."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shiplap.audit.installed.recipes import ArgumentRecipe, CallRecipe, TakenCall, TensorRecipe
from shiplap.audit.installed.refusals import dtypes_in, numbers_in, ranks_in
from shiplap.dtypes import DTYPES, preferred
from shiplap.scaffold.schema import SchemaField, SchemaForm

# Schemas state no meaning of an argument, so the words of its name have to suggest the values.
_INDICES = re.compile(r"ind(ex|ices)?s?\b|idx|segment|label|row|col|bag|perm|\bids?\b|roi ix|table", re.IGNORECASE)
_OFFSETS = re.compile(r"offset|cumsum|indptr|splits|cu seq", re.IGNORECASE)
_LENGTHS = re.compile(r"length|count|batch size per|repeats", re.IGNORECASE)
_BOXES = re.compile(r"box|roi|coord|point|grid", re.IGNORECASE)
_PATHS = re.compile(r"path|file", re.IGNORECASE)
_MASKS = re.compile(r"mask|\bis |\bhas ", re.IGNORECASE)
_DTYPES = preferred()
_SCALARS: dict[str, tuple[Any, ...]] = {
    "int": (1, 2, 0, 4, 8, 3, 32, 64, 128),
    "SymInt": (1, 2, 4, 6, 8, 0, 3, 32, 64),
    "float": (1.0, 0.5, 0.0, 0.1),
    "bool": (False, True),
    "Scalar": (1, 2, 0.5),
    "str": ("", "mean", "sum", "none"),
    "ScalarType": tuple(DTYPES[name].torch for name in _DTYPES),
    "Layout": (torch.strided,),
    "MemoryFormat": (torch.contiguous_format,),
}
_MOST_SIBLINGS = 24  # calls of other ops from which calls of one op are made


def siblings_of(form: SchemaForm, calls: Sequence[TakenCall]) -> list[TakenCall]:
    """Return calls of ops like that of ``form``, at most 24: a third of its arguments have a name in common, or half of
    the words of its name do, as those of ``encode_png`` and ``decode_png``. Calls of other ops would take the time of
    draws that lead further. Those that have most in common come first.
    """
    own, words = {a.name for a in form.arguments}, _words_of(form.name)

    def names(c: TakenCall) -> int:
        """Return how many arguments the call ``c`` has in common with the op."""
        return len(own & {*c.call.arguments})

    def shared(c: TakenCall) -> int:
        """Return how many words the name of the op of ``c`` has in common with that of the op."""
        return len(words & _words_of(c.op))

    near = [c for c in calls if c.op != form.name]
    near = [c for c in near if 3 * names(c) >= max(len(own), 1) or 2 * shared(c) >= max(len(words), 1)]
    return sorted(near, key=lambda c: -names(c) - 2 * shared(c))[:_MOST_SIBLINGS]


def _words_of(name: str) -> set[str]:
    """Return the words of the name of an op, without its namespace."""
    parts = re.split(r"[_.]|(?<=[a-z])(?=[A-Z\d])", name.rpartition(":")[2])
    return {w.lower() for w in parts if len(w) > 2}


def _whole_numbers_in(value: ArgumentRecipe) -> tuple[int, ...]:
    """Return ``value`` if it is a list of whole numbers, or else an empty tuple."""
    return value if isinstance(value, tuple) and all(type(n) is int for n in value) else ()


class CallDraws:
    """A source of random calls of an op. Names and types of arguments in its schema determine what is drawn. Messages
    of exceptions of the op give hints for later draws.
    """

    def __init__(
        self,
        form: SchemaForm,
        seed: int,
        siblings: Sequence[TakenCall] = (),
        *,
        careful: bool = False,
        device: str = "cpu",
    ) -> None:
        """Prepare to draw calls of an op with the schema ``form``. Equal seeds give equal calls. ``siblings`` are calls
        that other ops of the package took, whose arguments and results are tried. If ``careful`` is true, values lie
        between 0 and 1 more often, since other values have ended the process. ``device`` is the type of the device on
        which tensors are.
        """
        self.siblings, self.careful, self.device = siblings_of(form, siblings), careful, device
        # The op's name is part of the seed, so that its calls do not depend on which ops are audited.
        self.form, self.random = form, random.Random(f"{form.name} {seed}")
        # What refusals have named: texts in quotes, dtypes and numbers.
        self.words: list[str] = []
        self.dtypes: list[str] = []
        self.numbers: list[int] = []
        self.ranks: list[int] = []

    def first(self) -> CallRecipe:
        """Return a random call in which tensors have one number of dims and one size, and lists one number of members.
        Scalars with defaults have these, and optional arguments are None.
        """
        if self.siblings and self.random.random() < 0.7:
            return self.from_sibling(self.random.choice(self.siblings))
        rank, size = self.random.choice((2, 1, 3, 4, 2, 1)), self.random.choice((6, 4, 8, 1, 2))
        mixed = self.random.random() < 0.3  # tensors of different numbers of dims
        count = self._count()
        return CallRecipe(
            {
                a.name: self._argument(a, self.random.choice((1, 2, 3, 4)) if mixed else rank, size, count)
                for a in self.form.arguments
            }
        )

    def from_sibling(self, taken: TakenCall) -> CallRecipe:
        """Return a call whose arguments are those of a call that another op took, where the names agree. A list has the
        tensors as members that the other op takes one by one, and a tensor the values of a list. Other tensors are
        results of that call or tensors of their shapes, as a backward takes them. Other whole numbers are the sizes of
        one tensor, in order.
        """
        given, results = taken.call.arguments, taken.result_recipes()
        tensors = [t for _, t in taken.call.tensors()] + results
        sizes = list(self.random.choice(tensors).shape) if tensors else []
        drawn: dict[str, ArgumentRecipe] = {}
        for a in self.form.arguments:
            tensor = isinstance(given.get(a.name), TensorRecipe)
            if a.name in given and tensor == (a.tensor and not a.many):
                drawn[a.name] = given[a.name]
            elif a.tensor and a.many and (members := self._members_of(a.name, taken.call)):
                drawn[a.name] = members
            elif a.tensor and not a.many and (numbers := _whole_numbers_in(given.get(a.name))):
                drawn[a.name] = TensorRecipe("int64", (len(numbers),), 0, values=numbers, device=self.device)
            elif a.tensor and not a.many and tensors and not (a.optional and self.random.random() < 0.5):
                made = self.random.choice(results or tensors) if self.random.random() < 0.7 else None
                like = made or self.random.choice(tensors)
                fresh = self._tensor(a, 1, 1, like.dtype if self.random.random() < 0.7 else "")
                drawn[a.name] = like if self.random.random() < 0.5 else replace(fresh, shape=like.shape, last=None)
            elif a.kind in ("int", "SymInt") and sizes and a.default is None:
                drawn[a.name] = sizes.pop(0)
            else:
                drawn[a.name] = self._argument(a, 2, 4)
        return CallRecipe(drawn)

    def _members_of(self, name: str, call: CallRecipe) -> tuple[TensorRecipe, ...]:
        """Return the tensors of ``call`` whose names have the words of the list ``name`` and are no arguments of this
        op, such as ``momentum_host`` and ``momentum_offsets`` for ``momentum``.
        """
        own, words = {a.name for a in self.form.arguments}, {*name.split("_")}
        parts = [n for n in call.arguments if n not in own and words <= {*n.split("_")}]
        return tuple(t for n in parts if isinstance(t := call.arguments[n], TensorRecipe))

    def changed(self, call: CallRecipe) -> CallRecipe:
        """Return a copy of the call with one or two arguments changed at random."""
        sizes = [n for _, t in call.tensors() for n in t.shape]
        if sizes and self.random.random() < 0.15:  # one size, wherever it occurs, so that tensors still fit each other
            return call.with_size(self.random.choice(sizes), self._size(call))
        if self.random.random() < 0.1:
            whole = self.random.random() < 0.4
            return self._with_one_whole_dtype(call) if whole else self._with_one_dtype(call)
        for _ in range(self.random.choice((1, 1, 2)) if self.form.arguments else 0):
            field = self.random.choice(self.form.arguments)
            call = call.with_argument(field.name, self._change(field, call))
        return call

    def _with_one_dtype(self, call: CallRecipe) -> CallRecipe:
        """Return a copy of the call in which all tensors of floats have one dtype, as most ops require."""
        dtype = self.random.choice(("float32", "float32", "float64", *self.dtypes))
        for a in self.form.arguments:
            t = call.arguments[a.name]
            if isinstance(t, TensorRecipe) and ("float" in t.dtype or t.dtype == "quint8"):
                call = call.with_argument(a.name, replace(t, dtype=dtype, source=""))
        return call

    def _with_one_whole_dtype(self, call: CallRecipe) -> CallRecipe:
        """Return a copy of the call in which all tensors of whole numbers have one dtype, as indices and offsets
        have.
        """
        dtype = self.random.choice(("int32", "int64"))
        for name, t in call.arguments.items():
            if isinstance(t, TensorRecipe) and t.dtype in ("int32", "int64"):
                call = call.with_argument(name, replace(t, dtype=dtype, source=""))
        return call

    def hint(self, refusal: str) -> None:
        """Store the quoted words, the dtypes and the numbers in ``refusal``, the message of an exception of the op, as
        values to try in later draws.
        """
        self.ranks += [n for n in ranks_in(refusal) if n]
        self.ranks += [len(w.split(",")) for w in re.findall(r"[\[(](\w+(?:, ?\w+){1,4})[\])]", refusal)][:1]
        if re.search("q_scale|quantized|not implemented for", refusal, re.IGNORECASE) and "quint8" not in self.dtypes:
            self.dtypes.append("quint8")
        self.words += [w for w in re.findall(r"['\"](\w[\w.-]{0,30})['\"]", refusal) if w not in self.words]
        self.dtypes += [d for d in dtypes_in(refusal) if d not in self.dtypes]
        self.numbers += [n for n in numbers_in(refusal) if n not in self.numbers]

    def _change(self, field: SchemaField, call: CallRecipe) -> ArgumentRecipe:
        """Return another value for the argument ``field`` of ``call``. It is newly drawn, or is the present tensor or
        list with a change.
        """
        value = call.arguments[field.name]
        tensors = value if isinstance(value, tuple) else (value,)
        kept = all(isinstance(v, TensorRecipe) for v in tensors) and (field.tensor or self.random.random() < 0.7)
        if not kept or value is None or (field.optional and self.random.random() < 0.2):
            return self._argument(field, self.random.choice((1, 2, 3, 4)), self._size(call), given=True)
        if isinstance(value, tuple):
            count = self.random.choice((len(value), 1, 2, 3, *self._counts()))
            one = value[0] if value else self._tensor(field, 2, 6)
            one = self._changed_tensor(field, one, call) if isinstance(one, TensorRecipe) else one
            return tuple(replace(one, seed=self.random.randrange(1000)) for _ in range(count))
        return self._changed_tensor(field, value, call)

    def _changed_tensor(self, field: SchemaField, t: TensorRecipe, call: CallRecipe) -> TensorRecipe:
        """Return a recipe like ``t``, the tensor of the argument ``field``, with one property changed at random.

        The property is the dtype, the number of dims, a size or the values. The shape may also become that of another
        tensor of ``call``.
        """
        kind = self.random.choice(("rank", "size", "size", "like", "values", "dtype"))
        if kind == "dtype":
            dtype = self.random.choice(self.dtypes if self.dtypes and self.random.random() < 0.6 else _DTYPES)
            return replace(self._tensor(field, len(t.shape), 6, dtype), shape=t.shape, last=None)
        if kind == "rank":
            rank = self.random.choice((*self.ranks[-6:], *range(5)))
            return t.reshaped(tuple(self._size(call) for _ in range(rank)))
        if kind == "size" and t.shape:
            axis = self.random.randrange(len(t.shape))
            return t.reshaped((*t.shape[:axis], self._size(call), *t.shape[axis + 1 :]))
        others = [o for n, o in call.tensors() if n != field.name]
        if kind == "like" and others:
            other = self.random.choice(others)
            return replace(t.reshaped(other.shape), dtype=self.random.choice((t.dtype, other.dtype)), source="")
        high = self.random.choice((1.0, 2.0, 4.0, 0.0))
        last = self._size(call) if t.last is not None else None
        return replace(t, seed=self.random.randrange(1000), low=0.0, high=high, last=last, source="", columns=())

    def _size(self, call: CallRecipe) -> int:
        """Return a random size to try. It occurs in the call, is larger or smaller by one than such a size, equals a
        small int argument, or is one of some common sizes.
        """
        used = [n for _, t in call.tensors() for n in t.shape]
        ints = [v for v in call.arguments.values() if type(v) is int and 0 < v <= 64]
        near = [n + d for n in used for d in (1, -1) if n + d > 0]
        named = [n for n in self.numbers[-6:] if 0 < n <= 128]
        return self.random.choice((*used, *used, *near, *ints, *named, *named, 1, 2, 3, 4, 5, 6, 8, 16))

    def _argument(
        self, field: SchemaField, rank: int, size: int, count: int = 0, *, given: bool = False
    ) -> ArgumentRecipe:
        """Return a random value for the argument ``field`` of the schema, as a scalar, a recipe of a tensor, a tuple of
        these, or None.

        A tuple has as many members as the schema demands, or else ``count``, or a random number of them if that is 0.
        Tensors have ``rank`` dims of size ``size``. If ``given`` is false, an optional argument is None, and an
        argument with a default has this default. If ``given`` is true, an optional argument is None in three of ten
        calls, and no default is used.
        """
        if field.optional and not (given and self.random.random() < 0.7):
            return None
        if field.default is not None and not given:
            value = field.default_value
            # A schema may say ``int mode=0.``, a default that its own type refuses.
            value = int(value) if isinstance(value, float) and field.kind in ("int", "SymInt") else value
            return tuple(value) if isinstance(value, list) else value
        return self._listed(field, field.kind.removesuffix("?"), rank, size, count)

    def _listed(self, field: SchemaField, kind: str, rank: int, size: int, count: int) -> ArgumentRecipe:
        """Return a random value of the schema type ``kind`` for the argument ``field``: a tuple for a list, whose
        members may be lists as well, and are mostly None if they may be. The rest is as in ``_argument``.
        """
        element, bracket, length = kind.rpartition("[")
        if not bracket:
            return self._one(field, kind.removesuffix("?"), rank, size)
        members = int(length.rstrip("]") or 0) or count or self._count()
        least = 0.7 if element.endswith("?") else 0.0
        return tuple(
            None if least and self.random.random() < least else self._listed(field, element, rank, size, count)
            for _ in range(members)
        )

    def _count(self) -> int:
        """Return a random number of members of a list."""
        return self.random.choice((1, 2, 3, *self._counts()))

    def _counts(self) -> list[int]:
        """Return numbers of members of a list to try: those that refusals have named lately, and one more, as the
        index of a member that is missing suggests.
        """
        return [n + more for n in self.numbers[-3:] for more in (0, 1) if 0 < n <= 16]

    def _one(self, field: SchemaField, element: str, rank: int, size: int) -> ArgumentRecipe:
        """Return one random value of the schema type ``element``. For ``Tensor`` it is a recipe with ``rank`` dims of
        size ``size``. For another type it is a common scalar, or a word or number that an exception of the op has
        named.
        """
        # The type of a function's parameter may be unknown.
        if element == "Any":
            element = self.random.choice(("Tensor", "Tensor", "Tensor", "int", "float", "bool"))
        if element == "Tensor":
            return self._tensor(field, rank, size)
        choices = (torch.device(self.device),) if element == "Device" else _SCALARS.get(element, (None,))
        named: dict[str, list[Any]] = {"str": [*self.words], "int": self.numbers[-12:], "SymInt": self.numbers[-12:]}
        more = named.get(element, [])
        if element == "str" and _PATHS.search(f"{self.form.name} {field.name}"):
            more = [*more, "/etc/os-release"]  # a small text file that every Linux has
        return self.random.choice((*choices, *more))

    def _tensor(self, field: SchemaField, rank: int, size: int, dtype: str = "") -> TensorRecipe:
        """Return the recipe of a tensor whose dtype, shape and range of values follow from the name of the argument.

        A name such as ``offsets`` gives ascending integers, for example. Other names give floats in ``rank`` dims of
        size ``size``. If ``dtype`` is not empty, it replaces the dtype.
        """
        seed, name = self.random.randrange(1000), field.name.replace("_", " ")
        if _OFFSETS.search(name):
            return TensorRecipe(dtype or "int64", (size + 1,), seed, last=size, device=self.device)
        if _LENGTHS.search(name):
            return TensorRecipe(dtype or "int64", (size,), seed, 1.0, 1.0, device=self.device)
        if _INDICES.search(name):
            high = float(min(2, max(size - 1, 0)))
            return TensorRecipe(dtype or "int64", (size,) * max(min(rank, 2), 1), seed, 0.0, high, device=self.device)
        if _MASKS.search(name):
            return TensorRecipe(dtype or "bool", (size,) * rank, seed, device=self.device)
        low, high = _range_of(dtype)
        # Where calls have crashed, floats may be numbers of images or places.
        if (low, high) == (0.0, 0.0) and self.random.random() < (0.5 if self.careful or _BOXES.search(name) else 0.1):
            low, high = 0.0, 1.0
        return TensorRecipe(dtype or "float32", (size,) * rank, seed, low, high, device=self.device)


def _range_of(dtype: str) -> tuple[float, float]:
    """Return the range ``(low, high)`` from which values of this dtype are drawn. It is ``(0, 2)`` for integers, since
    they may be indices. It is ``(0, 0)`` for other dtypes, which stands for a normal distribution.
    """
    return (0.0, 2.0) if dtype.startswith(("int", "uint")) else (0.0, 0.0)
