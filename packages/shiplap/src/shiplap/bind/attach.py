"""Attach a compiled binding: its library is opened, and its functions registered for the ops of a plan."""

from __future__ import annotations

import copy
import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shiplap.bind.artefacts import load
from shiplap.bind.build import LIBRARY
from shiplap.bind.choice_rows import rows
from shiplap.bind.plan import Entry, Plan
from shiplap.compat.library import Registrations
from shiplap.errors import ShiplapError, error, notice
from shiplap.op import Op, choices, launch, registry
from shiplap.op.native import NativeBinding
from shiplap.op.out import out_name, out_schema
from shiplap.op.schema import schema
from shiplap.op.values import Result, Value

__all__ = ["Attached", "attach"]

_open: dict[Path, ctypes.CDLL] = {}


@dataclass
class Attached(NativeBinding):
    """A live registration: the op's schema must not go before it has been released."""

    op: Op
    library: Path
    binding: ctypes.CDLL
    parts: dict[int, Entry]
    python: Registrations
    raised: threading.local

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(e.device for e in self.parts.values())

    def release(self) -> None:
        """Unregister. The library stays loaded, for a call may be inside. The next calls may attach again."""
        for index, entry in self.parts.items():
            self.binding.shiplap_detach(ctypes.c_uint64(index))
            entry.form.resume()
        self.python.forget()

    def refusal(self, cause: Exception) -> ShiplapError | None:
        """The error behind ``cause``: what this code, or Python in its place, refused last on this thread."""
        message = str(cause)
        python: ShiplapError | None = getattr(self.raised, "error", None)
        if python is not None and _text(python) in message:
            return python
        *parts, text = [str(self.binding.shiplap_refusal(i), "utf-8", "replace") for i in range(7)]
        if not text or text not in message:
            return None
        id, what, where, got, expected, fix = parts
        return error(id, what=what, where=where, got=got, expected=expected, fix=fix)

    def update_choices(self) -> None:
        """Tell the native code what is chosen now. What is no number, or not for contiguous tensors, stays with Python:
        calls with other layouts are handed over as long as there are choices."""
        for index, entry in self.parts.items():
            table = rows(self.op, entry.device)
            flat = [number for row in table for number in row]
            array = (ctypes.c_int64 * max(1, len(flat)))(*flat)
            defer = bool(choices.frozen) and choices.tunable(self.op, entry.device)
            count, asks = ctypes.c_uint64(len(table)), ctypes.c_int32(defer)
            self.binding.shiplap_choose(ctypes.c_uint64(index), array, count, asks)


def attach(plan: Plan, digest: str) -> None:
    """Register the native code of every op of the plan that has none yet."""
    path = plan.root / digest / LIBRARY
    binding = _load(plan, digest, path)
    for op in dict.fromkeys(e.op for e in plan.entries):
        if op.native is None:
            _attach_op(op, {i: e for i, e in enumerate(plan.entries) if e.op is op}, path, binding)


def _attach_op(op: Op, entries: dict[int, Entry], path: Path, binding: ctypes.CDLL) -> None:
    """Register what of ``op`` this torch can have. The rest stays with Python and says so."""
    raised = threading.local()
    attached = Attached(op, path, binding, {}, _python_op(op, binding, raised), raised)
    why = ""
    for index, entry in entries.items():
        refused = binding.shiplap_attach(ctypes.c_uint64(index), os.fsencode(entry.kernels))
        if not refused:
            attached.parts[index] = entry
            entry.form.settle()
            continue
        why = refused.decode(errors="replace")
        entry.form.settle(why)
        notice(f"native {entry.device} {why}", f"{op.spec.name} on {entry.device} stays with the Python binding: {why}")
    if attached.parts:
        op.native = attached
        attached.update_choices()
        return
    attached.python.forget()
    raise error("SL405", where=op.spec.name, got=why, expected="a registration")


def _load(plan: Plan, digest: str, path: Path) -> ctypes.CDLL:
    """The library, opened once in this process. It learns what workspaces are filled with, now and later."""
    if path not in _open:
        binding = load(plan.root, digest, plan.entries[0].op.spec.name)
        binding.shiplap_attach.restype = binding.shiplap_refusal.restype = ctypes.c_char_p
        binding.shiplap_choose.restype = None
        launch.on_poison(lambda byte: binding.shiplap_poison(ctypes.c_int(-1 if byte is None else byte)))
        _open[path] = binding
    return _open[path]


def _python_op(op: Op, binding: ctypes.CDLL, raised: threading.local) -> Registrations:
    """``<op>__python``: what native code calls for arguments it does not take; so for the out-variant."""
    python = Registrations(op.spec.namespace)
    names: dict[str, tuple[str, Callable[..., Result]]] = {}
    name = f"{op.spec.opname}__python"
    names[name] = schema(op.spec, name), op.execute
    if op.variant is not None:
        name = f"{out_name(op.spec)}__python"
        names[name] = out_schema(op.spec, name), op.variant.execute
    for name, (declared, execute) in names.items():
        python.define(declared)
        python.implement(name, _telling(binding, execute, raised))
        python.skip_autograd(name)
    return python


def _telling(binding: ctypes.CDLL, execute: Callable[..., Result], raised: threading.local) -> Callable[..., Result]:
    """``execute`` whose errors reach the native code with their text, which torch 2.11 drops between the two, and its
    caller as what they are."""

    def run(*args: Value, **kwargs: Value) -> Result:
        try:
            return execute(*args, **kwargs)
        except Exception as e:
            raised.error = copy.copy(e) if isinstance(e, ShiplapError) else None  # without frames, which hold tensors
            binding.shiplap_set_error(_text(e).encode(errors="replace"))
            raise

    return run


def _text(e: Exception) -> str:
    """An exception as C++ can carry it."""
    text = str(e) if isinstance(e, ShiplapError) else f"{type(e).__name__}: {e}"
    return text.replace("\0", "").encode(errors="replace").decode()


def _choose_all() -> None:
    for op in registry.ops():
        if op.native is not None:
            op.native.update_choices()


choices.listeners.append(_choose_all)
