"""Arguments that a function must leave as they are: those that ``mutates=`` does not list, and the others' memory.

Torch counts the writes to each tensor. The counts are compared before and after the first calls of a kernel or a
reference, so that a write which the declaration does not list is an error, with or without an audit. Later calls are
not slowed down. Writes past torch, by a pointer, have no count: the audit compares values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor

from shiplap.declare.spec import Arg, OpSpec
from shiplap.declare.values import Args, Value
from shiplap.dispatch.outputs import tensors_of
from shiplap.errors import error
from shiplap.torch_private.mark_mutated import counting_writes, version_of

T = TypeVar("T")
CALLS = 64  # that are looked at
_audited: ContextVar[bool] = ContextVar("shiplap_audited", default=False)


@contextmanager
def writes_are_audited() -> Iterator[None]:
    """Within this context nothing is compared here: an audit compares the values of all arguments itself."""
    token = _audited.set(True)
    try:
        yield
    finally:
        _audited.reset(token)


class UnchangedArguments:
    """The arguments of calls of one function of an op, compared before and after its first calls.

    Attributes:
        left: the number of calls that will be looked at.
    """

    def __init__(self, spec: OpSpec, function: str) -> None:
        self.spec, self.where, self.left = spec, f"{spec.name}, {function}", CALLS
        self._tensors = [(i, a) for i, a in enumerate(spec.args) if a.tensor is not None]

    def during(self, args: Args, call: Callable[[], T], outs: Sequence[Value] = ()) -> T:
        """The result of ``call()``, which writes to ``outs``. SL316 where it wrote to an argument that it must not.

        Views of one memory share one count: an argument beside something that is written to is not looked at.
        """
        if _audited.get():
            return call()
        self.left -= 1
        written = [args[i] for i, arg in self._tensors if arg.mutated]
        shared = {_memory(t) for t in tensors_of([*written, *outs])}
        before = [_facts(arg, args[i], shared) for i, arg in self._tensors]
        with counting_writes():
            result = call()
        for (i, arg), was in zip(self._tensors, before, strict=True):
            if _facts(arg, args[i], shared) != was:
                raise self._changed(arg)
        return result

    def _changed(self, arg: Arg) -> Exception:
        if arg.mutated:
            got = f"set_() or resize_() of {arg.name!r}, which has other memory or another shape now"
            fix = f"write the values into it, {arg.name}.copy_(...), or return a new tensor"
            expected = f"a write to the memory of {arg.name!r} as it was given"
            return error("SL316", where=self.where, got=got, expected=expected, fix=fix)
        if not self.spec.mutated:
            fix = f"write to a copy, {arg.name}.clone(), or declare the write: mutates=({arg.name!r},)"
        else:
            fix = f"write to a copy, {arg.name}.clone(), or add {arg.name!r} to mutates="
        got = f"a write to the argument {arg.name!r}"
        listed = ", ".join(self.spec.mutated) or "no argument"
        return error("SL316", where=self.where, got=got, expected=f"writes to {listed}", fix=fix)


def _facts(arg: Arg, value: object, shared: Collection[int]) -> object:
    """A value that differs before and after a write, or, of what may be written to, a change of memory or shape."""
    if isinstance(value, (list, tuple)):
        return [_facts(arg, v, shared) for v in value]
    if not isinstance(value, Tensor):
        return None
    if arg.mutated:
        return value.data_ptr(), value.shape
    return 0 if _memory(value) in shared else version_of(value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
