"""Checks that a function leaves unlisted arguments unchanged, and does not move those that ``mutates=`` lists.

Torch counts the writes to each tensor. The counts are compared before and after the first calls of a kernel or a
reference. A write that the declaration does not list is therefore an error, with or without an audit. Later calls are
not slowed down. Writes by a pointer are not counted by torch. For these, the audit compares values.

Arguments that ``mutates=`` lists must not be moved in memory. Their addresses, shapes and strides are compared in every
call, because a call that moves an argument has not written to the caller's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from shiplap.declare.spec import Arg, OpSpec
from shiplap.declare.values import Args, Value
from shiplap.dispatch.outputs import tensors_in_arguments
from shiplap.errors import error
from shiplap.torch_private.dispatcher_library import counting_writes, version_of

T = TypeVar("T")
# Tensors that are written to, each with the name of its argument, its address, shape and strides.
Places: TypeAlias = list[tuple[str, Tensor, int, torch.Size, tuple[int, ...]]]
CHECKED_CALLS = 64  # that are looked at
# A context variable, so that an audit in one thread does not switch the check off in others.
_writes_audited: ContextVar[bool] = ContextVar("shiplap_audited", default=False)


@contextmanager
def writes_are_audited() -> Iterator[None]:
    """Enter a context in which :class:`UnchangedArguments` compares nothing. An audit compares the values of all
    arguments itself.
    """
    token = _writes_audited.set(True)
    try:
        yield
    finally:
        _writes_audited.reset(token)


class UnchangedArguments:
    """A check that the first calls of a reference or a kernel write to no argument but the declared ones.

    Attributes:
        left: the number of calls that are still to be checked.
    """

    def __init__(self, spec: OpSpec, function: str) -> None:
        """Prepare to check the first calls of ``function``, a name for errors such as ``"reference"``, on arguments of
        the op.
        """
        self.spec, self.where, self.left = spec, f"{spec.name}, {function}", CHECKED_CALLS
        self._tensors = [(i, a) for i, a in enumerate(spec.args) if a.tensor is not None and not a.mutated]
        self._written = [i for i, a in enumerate(spec.args) if a.mutated]

    def during(self, args: Args, call: Callable[[], T], outs: Sequence[Value] = ()) -> T:
        """Return the result of ``call()``, which may write to ``outs`` and to the arguments in the declared
        ``mutates=``. Raise ``SL316`` if it has also written to another argument. An argument that shares memory with a
        tensor that may be written to is not compared.
        """
        if _writes_audited.get():
            return call()
        # Only the first calls are checked, since the comparison takes time in each call.
        self.left -= 1
        written = [args[i] for i in self._written]
        # A write to an output also counts as one to each view of its memory.
        shared = {_storage_address(t) for t in tensors_in_arguments([*written, *outs])}
        before = [_versions(args[i], shared) for i, _ in self._tensors]
        with counting_writes():
            result = call()
        for (i, arg), was in zip(self._tensors, before, strict=True):
            if _versions(args[i], shared) != was:
                raise self._changed(arg)
        return result

    def _changed(self, arg: Arg) -> Exception:
        """Return the error ``SL316`` for a write to ``arg``, which the declaration does not list in ``mutates=``."""
        if not self.spec.mutated:
            fix = f"write to a copy, {arg.name}.clone(), or declare the write: mutates=({arg.name!r},)"
        else:
            fix = f"write to a copy, {arg.name}.clone(), or add {arg.name!r} to mutates="
        got = f"a write to the argument {arg.name!r}"
        listed = ", ".join(self.spec.mutated) or "no argument"
        return error("SL316", where=self.where, got=got, expected=f"writes to {listed}", fix=fix)


def _versions(value: object, shared: Collection[int]) -> object:
    """Return the number of writes that torch has counted for a tensor, or 0 if its storage address is in ``shared``.
    For a list, return a list of such numbers. Return None for any other value.
    """
    if isinstance(value, (list, tuple)):
        return [_versions(v, shared) for v in value]
    if not isinstance(value, Tensor):
        return None
    return 0 if _storage_address(value) in shared else version_of(value)


def _storage_address(tensor: Tensor) -> int:
    """Return the address of the tensor's storage. Views of one tensor have the same storage."""
    return tensor.untyped_storage().data_ptr()


def places_of(spec: OpSpec, args: Args) -> Places:
    """Return ``(name, tensor, address, shape, strides)`` for each argument that the op writes to, in a list.
    :func:`require_places` compares them after a call.
    """
    return places_of_tensors((a.name, v) for a, v in zip(spec.args, args, strict=True) if a.mutated)


def places_of_tensors(values: Iterable[tuple[str, Value]]) -> Places:
    """Return ``(name, tensor, address, shape, strides)`` for each tensor among the named ``values``, in a list. Tensors
    in lists are included under the name of the list.
    """
    written = [(name, t) for name, value in values for t in tensors_in_arguments((value,))]
    return [(name, t, t.data_ptr(), t.shape, t.stride()) for name, t in written]


def require_places(where: str, places: Places, what: str = "a mutated argument") -> None:
    """Raise ``SL316`` if the address, shape or strides of a tensor in ``places`` have changed since :func:`places_of`
    stored them. Its memory was then replaced instead of written to. ``what`` names the tensor in the error.
    """
    for name, t, address, shape, strides in places:
        if t.data_ptr() != address or t.shape != shape or t.stride() != strides:
            now = f"shape {tuple(t.shape)}, strides {tuple(t.stride())}" + ", elsewhere" * (t.data_ptr() != address)
            raise error(
                "SL316",
                what=f"{what} was given other memory or another shape",
                where=where,
                got=f"{name!r} with {now}",
                expected=f"shape {tuple(shape)}, strides {strides}, where it was",
                fix=f"write the values into {name} with copy_(), not by set_(), resize_() or an assignment to .data",
            )
