"""The attachment of compiled bindings. A library is opened, and its functions are registered for the ops of a plan."""

from __future__ import annotations

import copy
import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

from shiplap.declare.native_interface import NativeBinding, NativeEntrance
from shiplap.declare.schema import schema_text
from shiplap.declare.values import Result, Value
from shiplap.dispatch import Op, launch, registry, tuned_choices
from shiplap.dispatch.out import out_variant_name, out_variant_schema
from shiplap.errors import ShiplapError, error, notice
from shiplap.kernels.native.build import LIBRARY
from shiplap.kernels.native.build_plan import LibraryPlan, NativeKernelEntry, form_is_native
from shiplap.kernels.native.cache import load_library
from shiplap.kernels.native.choice_table import choice_rows
from shiplap.kernels.native.gradient_recorder import record_in_cpp
from shiplap.torch_private.dispatcher_library import Registrations

_opened_libraries: dict[Path, ctypes.CDLL] = {}
_native_entrances: dict[tuple[str, int], OpEntrance] = {}  # by the name and the edition of an op


class OpEntrance(NativeEntrance):
    """The torch registration of one op's native code. It is made when the first library is attached, and kept.

    Torch's dispatcher keeps pointers to functions of the first library. When a later library is attached, these
    functions call the code of that library.

    Attributes:
        bindings: the libraries that have run calls of the op.
        first: by device type, the library whose functions torch calls, and the number of the op in it.
        raised: the last error of Python on each thread.
    """

    def __init__(self, op: Op) -> None:
        """Define the torch ops through which native code of ``op`` calls Python. No library runs the op yet."""
        self.bindings: list[ctypes.CDLL] = []
        self.first: dict[str, tuple[ctypes.CDLL, ctypes.c_uint64]] = {}
        self.raised = threading.local()
        self._define(op)

    def _define(self, op: Op) -> None:
        """Define the torch op ``<op>__python``, which runs the op in Python. If the op has an out-variant, define such
        a torch op for the out-variant, too. Native code calls them for arguments that it does not support.
        """
        python = Registrations(op.spec.namespace, op.edition)
        name = f"{op.spec.stem}__python"
        names: dict[str, tuple[str, Callable[..., Result]]] = {name: (schema_text(op.spec, name), op.execute)}
        if op.variant is not None:
            name = f"{out_variant_name(op.spec)}__python"
            names[name] = out_variant_schema(op.spec, name), op.variant.execute
        for name, (declared, execute) in names.items():
            python.define(declared)
            python.implement(name, self._with_error_text(execute))
            # Native code is below autograd when it calls this op.
            python.skip_autograd(name)

    def _with_error_text(self, execute: Callable[..., Result]) -> Callable[..., Result]:
        """Return a function that calls ``execute`` and returns its result. If ``execute`` raises an error, the function
        stores the error and sends its message to the native code before it raises the error again.

        Torch 2.11 drops the message of an exception on the way from Python to native code. The caller of the native
        code finds the stored error by :meth:`refusal`.
        """

        def run(*args: Value, **kwargs: Value) -> Result:
            """Return the result of ``execute``. If it raises an error, store the error for this thread, send its
            message to every attached library, and raise it again.
            """
            try:
                return execute(*args, **kwargs)
            except Exception as e:
                # A copy, since frames hold tensors. What a call inside this one refused comes through native code.
                self.raised.error = copy.copy(e) if isinstance(e, ShiplapError) else self.refusal(e)
                for binding in self.bindings:
                    binding.shiplap_set_error(_exception_text(e).encode(errors="replace"))
                raise

        return run

    def lead_calls_to(self, device: str, binding: ctypes.CDLL, index: ctypes.c_uint64, kernels: Path) -> str:
        """Make calls of the op on ``device`` run its generated C++ in the library ``binding``. ``index`` is the number
        of the op there, and ``kernels`` the file of the kernel library that the C++ calls. Return the reason if torch
        refuses that, else an empty string.
        """
        if binding not in self.bindings:
            self.bindings = [*self.bindings, binding]
        first = self.first.get(device)
        # Torch's table is written once in a process; later libraries are reached from the entries there.
        look = binding.shiplap_attach if first is None else binding.shiplap_find
        refused: bytes = look(index, os.fsencode(kernels))
        if not refused and first is None:
            self.first[device] = binding, index
        elif not refused and first is not None:
            first[0].shiplap_lead(first[1], ctypes.c_void_p(binding.shiplap_code(index)))
        return refused.decode(errors="replace")

    def release(self, device: str) -> None:
        """Make calls of the op on the device type ``device`` run in Python again."""
        binding, index = self.first[device]
        binding.shiplap_lead(index, None)

    def refusal(self, cause: Exception) -> ShiplapError | None:
        """Return the ``ShiplapError`` behind ``cause``, an exception in which torch passed on only the message of that
        error. Native code or Python raised the error. Return None if ``cause`` contains no such message.
        """
        message = str(cause)
        python: ShiplapError | None = getattr(self.raised, "error", None)
        # The record of an earlier error does not count: its text has to occur in this exception.
        if python is not None and _exception_text(python) in message:
            return python
        for binding in self.bindings:
            raw = map(binding.shiplap_refusal, range(7))
            *parts, text = map(bytes.decode, raw, repeat("utf-8"), repeat("replace"))
            if text and text in message:
                id, what, where, got, expected, fix = parts
                return error(id, what=what, where=where, got=got, expected=expected, fix=fix)
        return None


@dataclass
class AttachedBinding(NativeBinding):
    """The native code that runs the calls of ``op``.

    ``binding`` is the library that was opened from the file ``library``. ``parts`` maps numbers in that library to the
    op's kernels on one device type each. ``entrance`` is the registration with torch. ``recorder`` is the library that
    records calls for autograd and the address of the op's data in it, or None if Python records.
    """

    op: Op
    library: Path
    binding: ctypes.CDLL
    parts: dict[int, NativeKernelEntry]
    entrance: OpEntrance
    recorder: tuple[ctypes.CDLL, int] | None = None

    @property
    def records(self) -> bool:
        """Whether C++ records the op's calls for autograd. Otherwise Python does."""
        return self.recorder is not None

    @property
    def devices(self) -> tuple[str, ...]:
        """The device types on which native code runs the op."""
        return tuple(e.device for e in self.parts.values())

    def release(self) -> None:
        """Make calls of the op run in Python again. A running call continues, since nothing is unregistered or
        unloaded.
        """
        for entry in self.parts.values():
            self.entrance.release(entry.device)
            for form in entry.forms:
                # The kernels may have changed, so that another library may serve them.
                form.resume()
        if self.recorder is not None:
            library, route = self.recorder
            library.shiplap_record(route, None)

    def start_recording(self) -> None:
        """Let C++ record the op's calls for autograd from now on. Do nothing if C++ cannot record the op's gradient, or
        if the ops that compute the gradient have no native code.
        """
        gradient = self.op.gradient
        if self.recorder is not None or gradient is None:
            return
        if all(isinstance(part.op, Op) and part.op.native is not None for part in gradient.ops):
            self.recorder = record_in_cpp(self.op)
            # The short path of a call is chosen anew, now that C++ records.
            if self.recorder is not None:
                self.op.install_fast_path()

    def update_choices(self) -> None:
        """Send the choices that tuning has made for the op to the native code, in place of those sent earlier. A choice
        is a kernel and its config for given sizes and dtypes.
        """
        tables = _choice_tables(self.op, self.parts.values())
        for index, entry in self.parts.items():
            _send_choices(self.binding, index, *tables[entry.device])


def _choice_tables(op: Op, entries: Iterable[NativeKernelEntry]) -> dict[str, tuple[list[list[int]], bool]]:
    """Return a mapping from each device type of ``entries``, the kernels of ``op``, to a pair of a table and a flag.

    The table holds the tuned choices of ``op`` as rows of integers, as ``choice_rows`` returns them. The flag is true
    if calls that fit no row must go to Python because the choices are frozen.
    """
    return {
        e.device: (
            choice_rows(op, e.device),
            # Python gives the notice, or in strict mode the error, of a call that a frozen table lacks.
            bool(tuned_choices.frozen) and tuned_choices.has_tunable_kernels(op, e.device),
        )
        for e in entries
    }


def _send_choices(binding: ctypes.CDLL, index: int, table: list[list[int]], defer: bool) -> None:
    """Copy ``table``, the tuned choices as rows of integers, into the native code of op number ``index`` in the library
    ``binding``. If ``defer`` is true, calls that fit no row go to Python. If it is false, native code runs them by its
    default.

    The table has no choices for tensors that are not contiguous. If it has rows, native code passes calls with such
    tensors to Python.
    """
    flat = [number for row in table for number in row]
    array = (ctypes.c_int64 * max(1, len(flat)))(*flat)
    binding.shiplap_choose(ctypes.c_uint64(index), array, ctypes.c_uint64(len(table)), ctypes.c_int32(defer))


def attach_plan(plan: LibraryPlan) -> None:
    """Load the library of ``plan`` and let its native code run each op of the plan that has no native code yet. Then
    let C++ record the calls of all ops for autograd whose gradients it supports.
    """
    binding = _load_plan_library(plan)
    for op in dict.fromkeys(e.op for e in plan.entries.values()):
        if op.native is None:
            own = {i: e for i, e in plan.entries.items() if e.op is op}
            _attach_op(op, own, plan.place / LIBRARY, binding)
    # Only now are the ops of gradients in this library native, too.
    start_recording()


def start_recording() -> None:
    """Let C++ record the calls of all ops with native code for autograd, in place of Python. Ops whose gradients C++
    cannot record are left out.
    """
    for op in registry.declared_op_list():
        if op.gradient is not None and isinstance(op.native, AttachedBinding):
            op.native.start_recording()


def _attach_op(op: Op, entries: dict[int, NativeKernelEntry], path: Path, binding: ctypes.CDLL) -> None:
    """Let the native code in the library ``binding``, at ``path``, run ``op`` on the devices of ``entries``.
    ``entries`` maps numbers in the library to the kernels of the op on a device.

    Issue a notice for a device that torch refuses. Python continues to run the op there. Raise ``SL405`` if torch
    refuses all devices.
    """
    known = _native_entrances.get((op.spec.name, op.edition))
    entrance = op.entrance = _native_entrances[op.spec.name, op.edition] = known or OpEntrance(op)
    attached, why = AttachedBinding(op, path, binding, {}, entrance), ""
    tables = _choice_tables(op, entries.values())
    for index, entry in entries.items():
        entry.form.connect(binding)
        _send_choices(binding, index, *tables[entry.device])  # before the first call
        refused = entrance.lead_calls_to(entry.device, binding, ctypes.c_uint64(index), entry.kernels)
        # A reason settles the form, so that later calls do not count towards another build.
        for form in entry.forms:
            form.settle(refused)
        if not refused:
            attached.parts[index] = entry
            continue
        why = refused
        notice(f"native {entry.device} {why}", f"{op.spec.name} on {entry.device} stays with the Python binding: {why}")
    if not attached.parts:
        raise error("SL405", where=op.spec.name, got=why, expected="a registration")
    op.native = attached
    op.install_fast_path()
    attached.update_choices()
    if not all(form_is_native(op, entry.form) for entry in attached.parts.values()):  # declared again meanwhile
        op.drop_native()


def _load_plan_library(plan: LibraryPlan) -> ctypes.CDLL:
    """Return the library of ``plan``, opened once in this process. Raise ``SL405`` if it lacks functions of Shiplap."""
    path = plan.place / LIBRARY
    if path not in _opened_libraries:
        binding = load_library(plan.place, next(e.op.spec.name for e in plan.entries.values()), plan.rule)
        try:
            for function in (binding.shiplap_attach, binding.shiplap_find, binding.shiplap_refusal):
                function.restype = ctypes.c_char_p
            binding.shiplap_code.restype = ctypes.c_void_p
            binding.shiplap_choose.restype = binding.shiplap_lead.restype = binding.shiplap_poison.restype = None
        # A library of this name that something else has compiled.
        except AttributeError as e:
            expected, fix = "a library that Shiplap compiled", f"remove {plan.place}, and build the binding again"
            raise error("SL405", where=str(path), got=str(e), expected=expected, fix=fix) from None
        launch.add_poison_listener(lambda byte: binding.shiplap_poison(ctypes.c_int(-1 if byte is None else byte)))
        _opened_libraries[path] = binding
    return _opened_libraries[path]


def _exception_text(e: Exception) -> str:
    """Return the message of the exception ``e`` in valid UTF-8 without NUL characters, as C++ needs it. If ``e`` is no
    ``ShiplapError``, its type precedes the message.
    """
    text = str(e) if isinstance(e, ShiplapError) else f"{type(e).__name__}: {e}"
    return text.replace("\0", "").encode(errors="replace").decode()


def _send_all_choices() -> None:
    """Send the choices that tuning has made to the native code of all ops that have native code loaded. A choice is a
    kernel and its config for given sizes and dtypes.
    """
    for op in registry.declared_op_list():
        if op.native is not None:
            op.native.update_choices()


tuned_choices.listeners.append(_send_all_choices)
