"""Calls of ops, recorded while a program runs: the properties of their arguments and of their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shiplap.scaffold.object_sources import is_scalar, source_of
from shiplap.scaffold.schema import schema_name
from shiplap.torch_private.dispatcher_calls import TorchDispatchMode
from shiplap.torch_private.dispatcher_library import dispatch_keys

MOST_CALLS = 24  # different calls of one op that are kept
MOST_VALUES = 2048  # of a tensor whose values are kept, since they may be row numbers, offsets or lengths
MOST_BYTES = 4096  # of a vector of bytes whose values are kept, since it may be a file
MOST_COLUMNS = 16  # of a tensor whose last dim may be fields: a box and its image, coordinates of a point
# The keys of kernels that run above the mode that records calls. What they call, that mode sees in place of the op.
_ABOVE_RECORD = {"CompositeImplicitAutograd", "Autograd", "AutogradCPU", "AutogradCUDA"}


@dataclass(frozen=True)
class ColumnRange:
    """The range of the values in one column of a recorded matrix. It holds the least value, the largest value, and
    whether all values are whole numbers.
    """

    low: float
    high: float
    whole: bool


@dataclass(frozen=True)
class SeenTensor:
    """A tensor of one recorded call. ``low`` and ``high`` are its least and largest finite value, or None if it has
    none.

    A size of -1 in ``shape`` stands for a size that depends on data, which a fake tensor does not have as a number.
    ``columns`` has the range of each column of a matrix with few columns, and is empty for any other tensor. ``values``
    has all values of a small tensor of whole numbers, or with a column of them, since they may point into other
    tensors, and of a vector of bytes, since it may be a file. It is empty for any other tensor. ``ascending`` is true
    for a vector of at least two whole numbers none of which is less than the one before it, such as offsets.
    """

    dtype: str
    shape: tuple[int, ...]
    device: str
    low: float | None = None
    high: float | None = None
    columns: tuple[ColumnRange, ...] = ()
    values: tuple[float, ...] = ()
    ascending: bool = False


@dataclass(frozen=True)
class SeenObject:
    """An object of one recorded call that is neither a tensor nor a scalar, such as a function or a member of an
    ``Enum``. ``source`` is the Python expression that makes it again.
    """

    source: str


@dataclass(frozen=True)
class DispatchedCall:
    """A recorded call. It holds the arguments by name and the results in order. A tensor is a ``SeenTensor``, a list
    is a tuple, and an object that can be made again is a ``SeenObject``.
    """

    arguments: Mapping[str, Any]
    results: tuple[Any, ...]

    @property
    def key(self) -> str:
        """A text that is equal for two recorded calls that differ only in the values of tensors. It holds the scalars,
        and the dtypes, shapes and devices of the tensors.
        """
        return repr(map_seen((*self.arguments.values(), self.results), lambda t: (t.dtype, t.shape, t.device)))


def map_seen(value: Any, fn: Callable[[SeenTensor], Any]) -> Any:
    """Return an argument or a result of a recorded call with ``fn`` applied to each :class:`SeenTensor` in it. A tuple
    stands for a list, and ``fn`` is applied inside it. Any other value is returned unchanged.
    """
    if isinstance(value, tuple):
        return tuple(map_seen(v, fn) for v in value)
    return fn(value) if isinstance(value, SeenTensor) else value


def as_empty_tensors(value: Any, device: str = "") -> Any:
    """Return an argument of a recorded call with an uninitialised tensor in place of each :class:`SeenTensor`. The
    tensor has the recorded size and dtype. A tuple becomes a list.

    The tensor is made on ``device``. If ``device`` is empty, it is made on the device of the recorded call.
    """
    made = map_seen(value, lambda t: torch.empty(t.shape, dtype=getattr(torch, t.dtype), device=device or t.device))
    return list(made) if isinstance(made, tuple) else made


def seen_tensors(value: Any) -> list[SeenTensor]:
    """Return, in a list, each :class:`SeenTensor` in ``value``, an argument or a result of a recorded call. If
    ``value`` is a tuple, only its direct members are considered.
    """
    values = value if isinstance(value, tuple) else (value,)
    return [v for v in values if isinstance(v, SeenTensor)]


def make_dispatched_call(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> DispatchedCall:
    """Return one call of an op with this schema as a :class:`DispatchedCall`. It holds all arguments by name, with
    defaults filled in, and the results. Each tensor becomes a :class:`SeenTensor`.
    """
    names = [a.name for a in schema.arguments]
    # The arguments behind ``args`` are keywords or have defaults.
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    arguments = {name: _describe_value(_plain_number(given.get(name, defaults.get(name)))) for name in names}
    count = len(schema.returns)
    results = () if not count else (result,) if count == 1 else tuple(result)
    return DispatchedCall(arguments, tuple(map(_describe_value, results)))


def _plain_number(value: Any) -> Any:
    """Return a number of a subclass, such as one of NumPy or of an ``IntEnum``, as the number that torch makes of it.
    Any other value is returned unchanged.
    """
    return next((kind(value) for kind in (bool, int, float) if isinstance(value, kind)), value)


def objects_in(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of those ``arguments`` that are objects which cannot be made again, such as a module, or that
    hold one.
    """
    return [name for name, value in arguments.items() if not _is_recordable(value)]


def make_python_call(arguments: Mapping[str, Any]) -> DispatchedCall | None:
    """Return a call of a Python function with these ``arguments`` as a :class:`DispatchedCall` without results. Return
    None if a compiler traces the call, or if an argument is an object that cannot be made again, such as a module.
    """
    if _is_being_traced(dict(arguments)) or objects_in(arguments):
        return None
    return DispatchedCall({name: _describe_value(value) for name, value in arguments.items()}, ())


def _is_recordable(value: Any) -> bool:
    """Return whether a recorded call holds ``value`` itself or how it is made again, and not just a text about it."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_recordable, value))
    return isinstance(value, Tensor) or source_of(value) is not None


def _describe_value(value: Any) -> Any:
    """Return a value as a recorded call holds it. A tensor becomes a :class:`SeenTensor`, and a list becomes a tuple.
    Numbers, strings and None are returned unchanged. Another object becomes a :class:`SeenObject` if it can be made
    again, and text if it cannot.
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(_describe_value, value))
    if not isinstance(value, Tensor):
        if is_scalar(value):
            return value
        # The object itself must not live as long as the recording.
        source = source_of(value)
        return str(value) if source is None else SeenObject(source)
    values = _finite_values(value)
    low, high = (None, None) if values is None else _value_range(values)
    dtype = str(value.dtype).removeprefix("torch.")
    # A fake has symbols for sizes that depend on data.
    shape = tuple(n if isinstance(n, int) else -1 for n in value.shape)
    columns = _column_ranges(value)
    kept = () if values is None else _kept_values(value, values, columns)
    ascending = values is not None and _is_ascending(value, values)
    return SeenTensor(dtype, shape, value.device.type, low, high, columns, kept, ascending)


def _kept_values(t: Tensor, finite: Tensor, columns: tuple[ColumnRange, ...]) -> tuple[float, ...]:
    """Return the values of a small tensor of whole numbers or with a column of them, or of a vector of bytes. Return an
    empty tuple for another tensor. ``finite`` are the finite values of ``t``, and ``columns`` the ranges of its
    columns.
    """
    most = MOST_BYTES if t.dtype is torch.uint8 and t.dim() == 1 else MOST_VALUES
    if t.dtype is torch.bool or len(finite) != t.numel() or t.numel() > most:
        return ()
    return tuple(finite.tolist()) if not t.is_floating_point() or any(c.whole for c in columns) else ()


def _is_ascending(t: Tensor, values: Tensor) -> bool:
    """Return whether ``t`` is a vector of at least two whole numbers, ``values``, none of which is less than the one
    before it.
    """
    if t.dim() != 1 or len(values) < 2 or t.is_floating_point() or t.dtype is torch.bool:
        return False
    return bool((values[1:] >= values[:-1]).all())


def _is_being_traced(value: Any) -> bool:
    """Return whether an argument, or a value in it, is a tensor subclass other than ``Parameter``. That is so in calls
    that a compiler traces.
    """
    if isinstance(value, dict):
        return any(map(_is_being_traced, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_is_being_traced, value))
    # A Parameter is the one subclass that models outside of a trace pass.
    return isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter)


def _finite_values(t: Tensor) -> Tensor | None:
    """Return the finite values of a tensor in float64 or int64. Return None if there are none, and for a tensor that
    has no memory or is complex, sparse or quantised.
    """
    if (
        # Other classes, such as fake tensors, may have no values.
        type(t) not in (Tensor, torch.nn.Parameter)
        or t.is_meta
        or not t.numel()
        or t.is_complex()
        or t.layout is not torch.strided
        or t.is_quantized
    ):
        return None
    wide = t.detach()
    # float64 and int64 hold every value of the other dtypes, so that the bounds are exact.
    wide = wide.to(torch.float64 if wide.is_floating_point() else torch.int64)
    finite = wide[torch.isfinite(wide)]
    return finite if finite.numel() else None


def _value_range(finite: Tensor) -> tuple[float, float]:
    """Return ``(least, largest)`` of the values of a tensor without NaN, as numbers of Python."""
    least, largest = torch.aminmax(finite)
    return least.item(), largest.item()


def _column_ranges(t: Tensor) -> tuple[ColumnRange, ...]:
    """Return the range of each column of a matrix with 2 to ``MOST_COLUMNS`` columns. Return an empty tuple for any
    other tensor, for bools, and if a value is not finite.
    """
    if t.dim() != 2 or not 1 < t.shape[1] <= MOST_COLUMNS or t.dtype is torch.bool:
        return ()
    columns = [_finite_values(c) for c in t.detach().unbind(1)] if type(t) in (Tensor, torch.nn.Parameter) else []
    # A column with infinite values has no range.
    known = [c for c in columns if c is not None and len(c) == len(t)]
    if len(known) < t.shape[1]:
        return ()
    return tuple(
        ColumnRange(*_value_range(c), bool((c == c.round()).all()) if c.is_floating_point() else True) for c in known
    )


def _single_overload(func: Any) -> Any:
    """Return the overload that ``func`` calls if it is an op of ``torch.ops``, and None for another function and for a
    name with several overloads.
    """
    if hasattr(func, "_schema"):
        return func
    overloads = func.overloads() if hasattr(func, "overloads") else []
    return getattr(func, overloads[0]) if len(overloads) == 1 else None


@dataclass
class DispatchRecorder:
    """A recorder of the calls of the ops ``wanted`` inside ``with recorder.mode():``. Calls that differ only in
    values are recorded once. ``calls`` holds the recorded calls, and ``counts`` the number of all calls, by op name.
    ``objects`` names those arguments of a function because of which its calls could not be recorded.

    A call is recorded below autograd. An op that is made of other ops is not seen there, and is recorded where Python
    calls it. So is an op whose kernel for autograd does not call the op again. Values are read before the call, since
    an op may write to its arguments. ``told`` is called with the name of an op at its first call.
    """

    wanted: Collection[str]
    told: Callable[[str], None] = lambda name: None
    calls: dict[str, list[DispatchedCall]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    objects: dict[str, list[str]] = field(default_factory=dict)
    _keys: set[tuple[str, str]] = field(default_factory=set)

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Return a context in which calls are recorded. Only calls of the ops for which this recorder was made are
        recorded.
        """
        with ExitStack() as stack:
            stack.enter_context(self._dispatch_mode())
            # The mode of Python calls slows each of them, so that it is used only where the other one may see nothing.
            hidden = {name for name in self.wanted if "::" in name and dispatch_keys(name) & _ABOVE_RECORD}
            if hidden:
                stack.enter_context(self._function_mode(hidden))
            yield

    def _function_mode(self, hidden: Collection[str]) -> Any:
        """Return a torch function mode that records those calls of the ops ``hidden`` that are not recorded below
        autograd.
        """
        recorder = self

        class Mode(TorchFunctionMode):
            """A torch function mode that passes each call of one of these ops to ``recorder``, a variable of the
            enclosing method.
            """

            def __torch_function__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                """Record the call if its op is wanted, and return its result."""
                op = _single_overload(func)
                if op is not None and schema_name(op._schema) in hidden:
                    return recorder.record(op, args, kwargs or {})
                return func(*args, **(kwargs or {}))

        return Mode()

    def _dispatch_mode(self) -> Any:
        """Return a torch dispatch mode, which is a context in which calls below autograd are recorded."""
        recorder = self

        class Mode(TorchDispatchMode):
            """A torch dispatch mode that passes each call inside it to ``recorder``, a variable of the enclosing
            method.
            """

            def __torch_dispatch__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                """Record the call if its op is wanted, and return its result."""
                return recorder.record(func, args, kwargs or {})

        made: Any = Mode
        return made()

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func`` and return its result. If its op is in ``wanted``, count the call and store its sizes and
        dtypes. A call that a compiler traces is neither counted nor stored. So is a call during which the op is
        recorded, such as one by Python of an op that is called again below autograd.
        """
        schema = func._schema
        name = schema_name(schema)
        # Calls with fakes have no values, and their symbols must not leave the trace.
        if name not in self.wanted or _is_being_traced((args, kwargs)):
            return func(*args, **kwargs)
        if name not in self.counts:
            self.told(name)
        count = self.counts.setdefault(name, 0)
        before = make_dispatched_call(schema, args, kwargs, [None] * len(schema.returns))
        result = func(*args, **kwargs)
        if self.counts[name] == count:
            self.counts[name] += 1
            self.keep(name, DispatchedCall(before.arguments, make_dispatched_call(schema, (), {}, result).results))
        return result

    def keep(self, name: str, call: DispatchedCall) -> None:
        """Store a call of the op ``name``. It is dropped if a stored call has equal sizes, dtypes and scalars, or if
        ``MOST_CALLS`` calls of the op are stored already.
        """
        kept = self.calls.setdefault(name, [])
        # A loop makes the same call thousands of times; only different ones are evidence.
        if (name, call.key) not in self._keys and len(kept) < MOST_CALLS:
            self._keys.add((name, call.key))
            kept.append(call)
