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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library

from shiplap import compat
from shiplap.codegen.native import Native, native_source, unfit
from shiplap.errors import ShiplapError, error, notice
from shiplap.impl.build import LIBRARY, detached, distrust, sealed
from shiplap.impl.build import build as compile_into
from shiplap.impl.library import load_symbol, locate
from shiplap.op import Op, launch, registry
from shiplap.op.schema import schema
from shiplap.settings import settings

if TYPE_CHECKING:
    from shiplap.impl.cabi import BoundKernel

__all__ = ["HOT", "build", "consider", "library_for", "state"]

HOT = 32  # calls that the Python binding serves before a compiler is started
INCLUDE = Path(__file__).parents[1] / "include"
FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020b000000000000")

_lock = threading.RLock()
_open: dict[Path, ctypes.CDLL] = {}
_building: dict[str, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class _Plan:
    """The ops of one kernel library as one translation unit, and where its binary is or will be."""

    ops: tuple[Op, ...]
    kernels: Path
    source: str
    command: tuple[str, ...]
    root: Path

    @property
    def digest(self) -> str:
        """All that the binary depends on; of the compiler its path, size and age, so that asking costs no process."""
        compiler = Path(self.command[0]).resolve()
        about = compiler.stat()
        headers = [path.read_text() for path in sorted((INCLUDE / "shiplap").glob("*.h"))]
        parts = [self.source, *headers, *self.command, f"{compiler} {about.st_size} {about.st_mtime_ns}",
                 torch.__version__]  # fmt: skip
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
# On 2.11 an error of the Python path, to which native code defers, arrives without its text (H200 machine, 2026-11-21).
MIN_TORCH = (2, 13)


def _torch_release() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _advance(run: BoundKernel) -> str:
    """One step; why there will be no native binding, or empty."""
    if not settings().native:
        return OFF
    if run.calls > HOT and run.digest in _building:
        return _collect(run)
    op = registry.find(run.spec.name)
    if op is None or not _only(op, run):
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
    if op is None or not _only(op, run):
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
    if op.native is not None:
        return "native", str(op.native.library)
    if not settings().native:
        return "python", OFF
    if run is None:
        return "python", "no C ABI kernel"
    try:
        plan = _plan(op)
        there = sealed(plan.root / plan.digest)
    except (ShiplapError, OSError) as e:
        return "python", _reason(e)
    if there and not run.why:
        return "native", f"{plan.root / plan.digest / LIBRARY}, attached at the first call"
    return "python", run.why or f"built in the background from call {HOT} on"


# --- plans ----------------------------------------------------------------------------------------------------------


def _plan(op: Op) -> _Plan:
    """Everything about the library that ``op`` shares with the other ops of its kernel library; compiles nothing."""
    run = _single(op)
    if run is None:
        raise error("SL404", where=op.spec.name, got="no kernel, several, or one that asks supports=",
                    expected="one C ABI kernel on the CPU", fix="use dtypes= instead of supports=")  # fmt: skip
    own = _native(op, run)
    if reason := unfit(own):
        raise error("SL404", where=op.spec.name, got=reason, expected="sizes and dtypes that C++ can check in one go",
                    fix="none needed: the Python binding serves it")  # fmt: skip
    file = locate(run.source.library)
    found = [(o, _native(o, r)) for o in registry.ops() if (r := _single(o)) is not None and _home(r) == file]
    group = [(o, n) for o, n in found if not unfit(n) and _loads(o)]
    root = Path(settings().cache_dir) / "native"
    if problem := distrust(root.parent) or distrust(root):
        raise error("SL406", where=op.spec.name, got=problem, expected="a directory of mode 700 that you own")
    ops = tuple(o for o, _ in group)
    return _Plan(ops, file, native_source([n for _, n in group]), _command(op), root)


def _command(op: Op) -> tuple[str, ...]:
    if _torch_release() < MIN_TORCH:
        raise error("SL405", where=op.spec.name, got=f"torch {torch.__version__}", expected="torch 2.13 or newer",
                    fix="nothing to do: the Python binding serves")  # fmt: skip
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        raise error("SL405", where=op.spec.name, got=f"no {os.environ.get('CXX') or 'c++'} on the PATH",
                    expected="a C++20 compiler")  # fmt: skip
    home = Path(torch.__file__).parent
    include = ("-I", str(INCLUDE), "-isystem", str(home / "include"))
    return (compiler, *FLAGS, *include, f"-L{home / 'lib'}", "-ltorch_cpu", "-ldl")


def _single(op: Op) -> BoundKernel | None:
    """The C ABI kernel of ``op`` if it is all there is on the CPU and no Python has to be asked about it."""
    kernels = op.kernels.get("cpu", [])
    run: Any = kernels[0].run if len(kernels) == 1 and kernels[0].supports is None else None
    return run if hasattr(run, "why") else None


def _only(op: Op, run: BoundKernel) -> bool:
    return _single(op) is run


def _native(op: Op, run: BoundKernel) -> Native:
    names = (op.spec.opname, *([f"{op.spec.opname}__raw"] if op.raw is not op.overload else []))
    dtypes = op.kernels["cpu"][0].dtypes
    return Native(op.spec, run.source.symbol, names, "cpu", run.workspace, run.source.strided, dtypes)


def _home(run: BoundKernel) -> Path | None:
    try:
        return locate(run.source.library)
    except ShiplapError:
        return None


def _loads(op: Op) -> bool:
    """Whether the kernel is there and was built for this declaration; its own call says so if not."""
    run = _single(op)
    try:
        return run is not None and bool(load_symbol(run.source.library, run.source.symbol, run.signature))
    except ShiplapError:
        return False


# --- attaching ------------------------------------------------------------------------------------------------------


@dataclass
class Attached:
    """A live registration: the op's schema must not go before it has been released."""

    library: Path
    binding: ctypes.CDLL
    index: int
    python: Library
    run: BoundKernel

    def release(self) -> None:
        """Unregister; the library stays loaded, for a call may be inside. The next calls may attach again."""
        self.binding.shiplap_detach(ctypes.c_uint64(self.index))
        compat.destroy_library(self.python)
        self.run.calls = 0


def _attach(plan: _Plan, digest: str) -> None:
    """Register the native code of every op of the plan that has none yet."""
    path = plan.root / digest / LIBRARY
    binding = _load(path)
    for index, op in enumerate(plan.ops):
        run = _single(op)
        if op.native is not None or run is None:
            continue
        python = _python_op(op)
        refused = binding.shiplap_attach(ctypes.c_uint64(index), os.fsencode(plan.kernels))
        if refused:
            compat.destroy_library(python)
            raise error("SL405", where=op.spec.name, got=refused.decode(errors="replace"), expected="a registration")
        op.native = Attached(path, binding, index, python, run)
        run.calls, run.why = -1, ""


def _load(path: Path) -> ctypes.CDLL:
    """The library, opened once in this process; it learns what workspaces are filled with, now and later."""
    if path not in _open:
        try:
            binding = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        except OSError as e:
            raise error("SL405", where=str(path), got=str(e), expected="a library that the loader accepts") from None
        binding.shiplap_attach.restype = ctypes.c_char_p
        launch.on_poison(lambda byte: binding.shiplap_poison(ctypes.c_int(-1 if byte is None else byte)))
        _open[path] = binding
    return _open[path]


def _python_op(op: Op) -> Library:
    """``<op>__python``: what native code calls for arguments it does not take."""
    name, library = f"{op.spec.opname}__python", Library(op.spec.namespace, "FRAGMENT")
    library.define(schema(op.spec, name))
    library.impl(name, op.execute, "CompositeExplicitAutograd")
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    return library


def _build_failed(said: str) -> str:
    return _reason(error("SL405", where="", got=said, expected=""))


def _reason(e: Exception) -> str:
    return f"{e.id}: {e.what}, {e.got}" if isinstance(e, ShiplapError) else f"{type(e).__name__}: {e}"
