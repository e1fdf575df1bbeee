"""The native binding of C ABI kernels: built in the background, cached, attached beside the Python binding.

A kernel is served by Python (``cabi.py``) until a library is there. One that is in the cache is attached at the first
call. Else the ``HOT``-th call starts a compiler in a process of its own and a later call attaches what it built, so
nobody waits and a short script starts none. Whatever stands in the way becomes one notice, and Python goes on serving.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library

from shiplap import compat
from shiplap.bind import chosen
from shiplap.bind.build import LIBRARY, detached, distrust, sealed
from shiplap.bind.build import build as compile_into
from shiplap.bind.library import load_symbol, locate
from shiplap.codegen.native import Native, native_source, unfit
from shiplap.errors import ShiplapError, error, notice
from shiplap.op import Op, launch, registry
from shiplap.op.out import has_out, out_name, out_schema
from shiplap.op.schema import schema
from shiplap.settings import settings
from shiplap_headers import include_dir

if TYPE_CHECKING:
    from shiplap.bind.cabi import BoundKernel

__all__ = ["HOT", "INCLUDE", "bound", "build", "cache", "compiler", "consider", "digest", "library_for", "state"]

DEVICES = ("cpu", "cuda")  # device types for which there is native code
HOT = 32  # calls that the Python binding serves before a compiler is started
INCLUDE = include_dir()
FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020b000000000000")

_lock = threading.RLock()
_open: dict[Path, ctypes.CDLL] = {}
_building: dict[str, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class _Entry:
    """One C ABI kernel: of which op, for which device type, in which library."""

    op: Op
    device: str
    run: BoundKernel
    native: Native
    kernels: Path


@dataclass(frozen=True)
class _Plan:
    """The ops that share kernel libraries as one translation unit, and where its binary is or will be."""

    entries: tuple[_Entry, ...]
    source: str
    command: tuple[str, ...]
    root: Path

    @property
    def digest(self) -> str:
        return digest(self.source, self.command, torch.__version__)


def digest(source: str, command: Sequence[str], version: str) -> str:
    """All that a binary depends on; of the compiler its path, size and age, so that asking costs no process."""
    compiler = Path(command[0]).resolve()
    about = compiler.stat()
    headers = [path.read_text() for path in sorted((INCLUDE / "shiplap").glob("*.h"))]
    parts = [source, *headers, *command, f"{compiler} {about.st_size} {about.st_mtime_ns}", version]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


# --- what the Python binding asks at each call it serves ------------------------------------------------------------


def consider(run: BoundKernel) -> None:
    """Count a call served by Python; attach the native binding if it is there, start its build if the op is hot."""
    if torch.compiler.is_compiling():
        return
    run.calls += 1
    if 1 < run.calls < HOT or not _lock.acquire(blocking=False):  # another thread is at it
        return
    try:
        reason = _advance(run)
    except Exception as e:  # the call has been served: nothing that goes wrong here may undo that
        reason = _reason(e)
    finally:
        _lock.release()
    if reason:
        run.calls, run.why = -1, reason
        if reason != OFF:
            notice(f"native {reason}", f"{run.spec.name} stays with the Python binding: {reason}")


OFF = "SHIPLAP_NATIVE=0"


def _advance(run: BoundKernel) -> str:
    """One step; why there will be no native binding, or empty."""
    if not settings().native:
        return OFF
    if run.calls > HOT and run.digest in _building:
        return _collect(run)
    op = registry.find(run.spec.name)
    if op is None or not _serves(op, run):
        return f"several kernels of {run.spec.name} on one device" if op is not None and run.calls >= HOT else ""
    plan = _plan(op)
    run.digest = plan.digest
    if sealed(plan.root / run.digest):
        _attach(plan, run.digest)
    elif run.calls >= HOT and run.digest not in _building:
        _building[run.digest] = detached(plan.root, run.digest, plan.source, list(plan.command))
    return ""


def _collect(run: BoundKernel) -> str:
    child = _building[run.digest]
    if child.poll() is None:
        return ""
    assert child.stdout is not None
    said = "" if child.stdout.closed else child.stdout.read().decode(errors="replace")
    op = registry.find(run.spec.name)
    if op is None or not _serves(op, run):
        return ""
    plan = _plan(op)
    if not sealed(plan.root / run.digest):
        return _build_failed(said or f"the builder ended with status {child.returncode}")
    child.stdout.close()
    _attach(plan, run.digest)
    return ""


# --- on request -----------------------------------------------------------------------------------------------------


def build(op: Op) -> Path:
    """Build or find the native binding of ``op`` now, attach it, and return the library.

    Raises:
        LibraryError: SL404 for a declaration that Python has to serve, SL405 or SL406 when it cannot be built.
    """
    with _lock:
        plan = _plan(op)
        digest = plan.digest
        if problem := compile_into(plan.root, digest, plan.source, list(plan.command)):
            raise error("SL405", where=op.spec.name, got=problem, expected="a library")
        _attach(plan, digest)
        return plan.root / digest / LIBRARY


def library_for(op: Op) -> Path:
    """The library that binds ``op`` natively, built if need be; it needs torch and the kernel library, no Python."""
    return build(op)


def state(op: Op, device: str = "cpu") -> tuple[str, str]:
    """``("native" | "python", why)``: which binding serves the C ABI kernel of ``op``, as ``shiplap env`` shows it.

    A library in the cache counts as native: the first call attaches it.
    """
    run: Any = next((k.run for k in op.kernels.get(device, ()) if hasattr(k.run, "why")), None)
    attached: Any = op.native
    if attached is not None and device in attached.devices:
        return "native", str(attached.library)
    if not settings().native:
        return "python", OFF
    if run is None:
        return "python", "no C ABI kernel"
    try:
        plan = _plan(op)
        there = sealed(plan.root / plan.digest)
    except (ShiplapError, OSError) as e:
        return "python", _reason(e)
    if device not in [e.device for e in plan.entries if e.op is op]:
        return "python", run.why or "several kernels, or one that asks supports="
    if there and not run.why:
        return "native", f"{plan.root / plan.digest / LIBRARY}, attached at the first call"
    return "python", run.why or f"built in the background from call {HOT} on"


# --- plans ----------------------------------------------------------------------------------------------------------


def _plan(op: Op) -> _Plan:
    """Everything about the library that ``op`` shares with the other ops of its kernel libraries; compiles nothing."""
    runs = _runs(op)
    if not runs:
        raise error(
            "SL404",
            where=op.spec.name,
            got="no kernel, several, or one that asks supports=",
            expected="one C ABI kernel on the CPU or on CUDA",
            fix="use dtypes= instead of supports=",
        )
    reasons = [unfit(_native(op, device, run)) for device, run in runs.items()]
    if all(reasons):
        raise error(
            "SL404",
            where=op.spec.name,
            got=reasons[0],
            expected="sizes and dtypes that C++ can check in one go",
            fix="none needed: the Python binding serves it",
        )
    for run in runs.values():
        locate(run.source.library)
    entries = _related(op, [e for o in registry.ops() for e in _entries(o)])
    return _Plan(tuple(entries), native_source([e.native for e in entries]), _command(op), cache(op))


def cache(op: Op) -> Path:
    """The directory of what is built; SL406 if others could put code there."""
    root = Path(settings().cache_dir) / "native"
    if problem := distrust(root.parent) or distrust(root):
        raise error("SL406", where=op.spec.name, got=problem, expected="a directory of mode 700 that you own")
    return root


def compiler(op: Op) -> str:
    """Path of the C++ compiler; SL405 if there is none."""
    found = shutil.which(os.environ.get("CXX") or "c++")
    if found is None:
        raise error(
            "SL405",
            where=op.spec.name,
            got=f"no {os.environ.get('CXX') or 'c++'} on the PATH",
            expected="a C++20 compiler",
        )
    return found


def _command(op: Op) -> tuple[str, ...]:
    home = Path(torch.__file__).parent
    include = ("-I", str(INCLUDE), "-isystem", str(home / "include"))
    return (compiler(op), *FLAGS, *include, f"-L{home / 'lib'}", "-ltorch_cpu", "-ldl")


def bound(op: Op, device: str) -> tuple[Native, BoundKernel]:
    """The one C ABI kernel of ``op`` on ``device`` and what is generated for it; SL404 if there are others or none."""
    run = _runs(op).get(device)
    if run is None:
        raise error(
            "SL404",
            where=op.spec.name,
            got="no kernel, several, or one that asks supports=",
            expected=f"one C ABI kernel on {device}",
            fix="use dtypes= instead of supports=",
        )
    return _native(op, device, run), run


def _runs(op: Op) -> dict[str, BoundKernel]:
    """By device type the C ABI kernel of ``op``, where it is all there is and no Python has to be asked about it."""
    found: dict[str, BoundKernel] = {}
    for device in DEVICES:
        kernels = op.own(device)
        run: Any = kernels[0].run if len(kernels) == 1 and kernels[0].supports is None else None
        if hasattr(run, "why"):
            found[device] = run
    return found


def _serves(op: Op, run: BoundKernel) -> bool:
    return any(run is other for other in _runs(op).values())


def _native(op: Op, device: str, run: BoundKernel) -> Native:
    names = (op.spec.opname, *([f"{op.spec.opname}__raw"] if op.raw is not op.overload else []))
    return Native(
        op.spec,
        run.source.symbol,
        names,
        device,
        run.workspace,
        run.source.strided,
        op.kernels[device][0].dtypes,
        has_out(op.spec),
        op.kernels[device][0].space,
        op.rule,
        run.source.align,
    )


def _entries(op: Op) -> list[_Entry]:
    """What of ``op`` can be bound natively: fit, its kernel there and built for this declaration."""
    found = []
    for device, run in _runs(op).items():
        try:
            file, native = locate(run.source.library), _native(op, device, run)
            if not unfit(native) and load_symbol(run.source.library, run.source.symbol, run.signature):
                found.append(_Entry(op, device, run, native, file))
        except ShiplapError:  # its own call says what is wrong
            continue
    return found


def _related(op: Op, entries: list[_Entry]) -> list[_Entry]:
    """Those that share a kernel library with ``op``, or with an op that does: they make one translation unit."""
    ops, files = {op.spec.name}, set[Path]()
    while True:
        more = {e.kernels for e in entries if e.op.spec.name in ops}
        ops |= {e.op.spec.name for e in entries if e.kernels in more}
        if more == files:
            return [e for e in entries if e.op.spec.name in ops]
        files = more


# --- attaching ------------------------------------------------------------------------------------------------------


@dataclass
class Attached:
    """A live registration: the op's schema must not go before it has been released."""

    library: Path
    binding: ctypes.CDLL
    parts: dict[int, _Entry]
    python: Library

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(e.device for e in self.parts.values())

    def release(self) -> None:
        """Unregister; the library stays loaded, for a call may be inside. The next calls may attach again."""
        for index, entry in self.parts.items():
            self.binding.shiplap_detach(ctypes.c_uint64(index))
            entry.run.calls = 0
        compat.destroy_library(self.python)


def _attach(plan: _Plan, digest: str) -> None:
    """Register the native code of every op of the plan that has none yet."""
    path = plan.root / digest / LIBRARY
    binding = _load(path)
    for op in dict.fromkeys(e.op for e in plan.entries):
        if op.native is None:
            _attach_op(op, {i: e for i, e in enumerate(plan.entries) if e.op is op}, path, binding)


def _attach_op(op: Op, entries: dict[int, _Entry], path: Path, binding: ctypes.CDLL) -> None:
    """Register what of ``op`` this torch can have; the rest stays with Python and says so."""
    attached = Attached(path, binding, {}, _python_op(op, binding))
    why = ""
    for index, entry in entries.items():
        refused = binding.shiplap_attach(ctypes.c_uint64(index), os.fsencode(entry.kernels))
        if not refused:
            attached.parts[index] = entry
            entry.run.calls, entry.run.why = -1, ""
            continue
        why = refused.decode(errors="replace")
        entry.run.calls, entry.run.why = -1, why
        notice(f"native {entry.device} {why}", f"{op.spec.name} on {entry.device} stays with the Python binding: {why}")
    if attached.parts:
        op.native = attached
        chosen.push(op)
        return
    compat.destroy_library(attached.python)
    raise error("SL405", where=op.spec.name, got=why, expected="a registration")


def _load(path: Path) -> ctypes.CDLL:
    """The library, opened once in this process; it learns what workspaces are filled with, now and later."""
    if path not in _open:
        try:
            binding = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        except OSError as e:
            raise error("SL405", where=str(path), got=str(e), expected="a library that the loader accepts") from None
        binding.shiplap_attach.restype = ctypes.c_char_p
        binding.shiplap_choose.restype = None
        launch.on_poison(lambda byte: binding.shiplap_poison(ctypes.c_int(-1 if byte is None else byte)))
        _open[path] = binding
    return _open[path]


def _python_op(op: Op, binding: ctypes.CDLL) -> Library:
    """``<op>__python``: what native code calls for arguments it does not take; so for the out-variant."""
    library = Library(op.spec.namespace, "FRAGMENT")
    names = {f"{op.spec.opname}__python": (schema, op.execute)}
    if op.variant is not None:
        names[f"{out_name(op.spec)}__python"] = (out_schema, op.variant.execute)
    for name, (declared, execute) in names.items():
        library.define(declared(op.spec, name))
        library.impl(name, _telling(binding, execute), "CompositeExplicitAutograd")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    return library


def _telling(binding: ctypes.CDLL, execute: Callable[..., Any]) -> Callable[..., Any]:
    """``execute`` whose errors reach the native code with their text, which torch 2.11 drops between the two."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return execute(*args, **kwargs)
        except Exception as e:
            text = str(e) if isinstance(e, ShiplapError) else f"{type(e).__name__}: {e}"
            binding.shiplap_said(text.encode(errors="replace").replace(b"\0", b""))
            raise

    return run


def _build_failed(said: str) -> str:
    return _reason(error("SL405", where="", got=said, expected=""))


def _reason(e: Exception) -> str:
    return f"{e.id}: {e.what}, {e.got}" if isinstance(e, ShiplapError) else f"{type(e).__name__}: {e}"
