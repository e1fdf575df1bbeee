"""What is compiled to bind an op natively: the C ABI kernels that share a library, as one translation unit."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shiplap.bind.artefacts import folder
from shiplap.bind.library import load_symbol, locate
from shiplap.codegen.native import Native, native_source, unfit
from shiplap.compat.library import numbered
from shiplap.op.schema import below
from shiplap.errors import ShiplapError, error
from shiplap.op import Op, registry
from shiplap.op.native import NativeForm
from shiplap.op.out import has_out
from shiplap_headers import include_dir

__all__ = ["FLAGS", "INCLUDE", "Entry", "Plan", "bound", "cache", "compiler", "digest", "make_plan", "serves"]

DEVICES = ("cpu", "cuda")  # device types for which there is native code
INCLUDE = include_dir()
# Sizes wrap around where they overflow, as -fwrapv has it: else a compiler leaves out the look at a divisor of 0.
WRAP = "-fwrapv"
FLAGS = (
    *("-O2", WRAP, "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden"),
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
)


@dataclass(frozen=True)
class Entry:
    """One C ABI kernel: of which op, for which device type, in which library."""

    op: Op
    device: str
    form: NativeForm
    native: Native
    kernels: Path


@dataclass(frozen=True)
class Plan:
    """The ops that share kernel libraries as one translation unit, and where its binary is or will be."""

    entries: tuple[Entry, ...]
    source: str
    command: tuple[str, ...]
    root: Path

    @property
    def digest(self) -> str:
        return digest(self.source, self.command, torch.__version__)


def digest(source: str, command: Sequence[str], version: str) -> str:
    """All that a binary depends on; of the compiler its path, size and age, so that asking costs no process."""
    tools = [path.resolve() for path in map(Path, command[:2]) if path.is_absolute()]
    known = [f"{tool} {tool.stat().st_size} {tool.stat().st_mtime_ns}" for tool in tools]
    headers = [path.read_text() for path in sorted((INCLUDE / "shiplap").glob("*.h"))]
    parts = [source, *headers, *command, *known, version]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def make_plan(op: Op) -> Plan:
    """Everything about the library that ``op`` shares with the other ops of its kernel libraries; compiles nothing."""
    forms = _forms(op)
    if not forms:
        raise error(
            "SL404",
            where=op.spec.name,
            got="no kernel, several, or one that asks supports=",
            expected="one C ABI kernel on the CPU or on CUDA",
            fix="use dtypes= instead of supports=",
        )
    reasons = [unfit(_native(op, device, form)) for device, form in forms.items()]
    if all(reasons):
        raise error(
            "SL404",
            where=op.spec.name,
            got=reasons[0],
            expected="sizes and dtypes that C++ can check in one go",
            fix="keep the Python binding, which handles this kernel, or declare sizes and dtypes that C++ can check",
        )
    for form in forms.values():
        locate(form.library)
    entries = _related(op, [e for o in registry.ops() for e in _entries(o)])
    return Plan(tuple(entries), native_source([e.native for e in entries]), _command(op), cache(op))


def cache(op: Op) -> Path:
    """The directory of what is built. SL406 if others could put code there."""
    return folder(op.spec.name)


def compiler(op: Op) -> tuple[str, ...]:
    """The C++ compiler as a call: its path, and what ``CXX`` has behind it (``ccache g++``). SL405 if there is none."""
    command = os.environ.get("CXX", "").strip() or "c++"
    program = shutil.which(command)  # a path may have blanks
    if program is not None:
        return (program,)
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    paths = [shutil.which(word) for word in words[:2] if not word.startswith("-")]
    if not words or not paths or None in paths:
        raise error("SL405", where=op.spec.name, got=f"no {command} on the PATH", expected="a C++20 compiler")
    return tuple([str(path) for path in paths] + words[len(paths) :])


def _command(op: Op) -> tuple[str, ...]:
    home = Path(torch.__file__).parent
    include = ("-I", str(INCLUDE), "-isystem", str(home / "include"))
    return (*compiler(op), *FLAGS, *include, f"-L{home / 'lib'}", "-ltorch_cpu", "-ldl")


def bound(op: Op, device: str) -> tuple[Native, NativeForm]:
    """The one C ABI kernel of ``op`` on ``device`` and what is generated for it. SL404 if there are others or none."""
    form = _forms(op).get(device)
    if form is None:
        raise error(
            "SL404",
            where=op.spec.name,
            got="no kernel, several, or one that asks supports=",
            expected=f"one C ABI kernel on {device}",
            fix="use dtypes= instead of supports=",
        )
    return _native(op, device, form), form


def _forms(op: Op) -> dict[str, NativeForm]:
    """By device type the C ABI kernel of ``op``, where it is all there is and no Python has to be asked about it."""
    forms: dict[str, NativeForm] = {}
    for device in DEVICES:
        kernels = op.own(device)
        if len(kernels) == 1 and kernels[0].supports is None and kernels[0].native is not None:
            forms[device] = kernels[0].native
    return forms


def serves(op: Op, form: NativeForm) -> bool:
    """Whether ``form`` is still all that ``op`` has on a device type."""
    return any(form is other for other in _forms(op).values())


def _native(op: Op, device: str, form: NativeForm) -> Native:
    names = [op.spec.opname, *([below(op.spec.opname)] if op.raw is not op.overload else [])]
    (kernel,) = op.own(device)
    return Native(
        op.spec,
        form.symbol,
        tuple([numbered(name, op.edition) for name in names]),
        device,
        kernel.workspace,
        form.strided,
        kernel.dtypes,
        has_out(op.spec),
        kernel.space,
        op.rule,
        form.align,
        op.edition,
    )


def _entries(op: Op) -> list[Entry]:
    """What of ``op`` can be bound natively: fit, its kernel there and built for this declaration."""
    entries = []
    for device, form in _forms(op).items():
        try:
            file, native = locate(form.library), _native(op, device, form)
            if not unfit(native) and load_symbol(form.library, form.symbol, form.signature):
                entries.append(Entry(op, device, form, native, file))
        except ShiplapError:  # its own call says what is wrong
            continue
    return entries


def _related(op: Op, entries: list[Entry]) -> list[Entry]:
    """Those that share a kernel library with ``op``, or with an op that does: they make one translation unit."""
    ops, files = {op.spec.name}, set[Path]()
    while True:
        more = {e.kernels for e in entries if e.op.spec.name in ops}
        ops |= {e.op.spec.name for e in entries if e.kernels in more}
        if more == files:
            return [e for e in entries if e.op.spec.name in ops]
        files = more
