"""``deploy(ops, folder)`` writes ops as one library for processes without Shiplap, and without Python.

A model that AOTInductor has packaged calls its ops through torch's dispatcher. The library defines and implements them
when it is loaded. Python loads it by ``torch.ops.load_library(path)``, and C++ by ``dlopen(path, RTLD_NOW |
RTLD_GLOBAL)``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shiplap import safe_io
from shiplap.codegen.chosen import config_values
from shiplap.codegen.environment import render_source
from shiplap.codegen.native import NativeOp, native_source
from shiplap.dispatch import Op, tuned_choices
from shiplap.errors import error, writing
from shiplap.kernels.native.build import LIBRARY
from shiplap.kernels.native.build import build_once as compile_into
from shiplap.kernels.native.build_digest import FLAGS, library_name_digest
from shiplap.kernels.native.build_plan import (
    NativeKernelEntry,
    compile_command,
    extra_compiler_flags,
    library_cache_folder,
    make_plan,
)
from shiplap.kernels.native.cache import is_library_present
from shiplap.kernels.native.choice_table import packed_rows

DEPLOYED_LIBRARY_NAME = "libshiplap_ops.so"


def deploy(ops: Iterable[Op], folder: str | os.PathLike[str]) -> Path:
    """Write a library that defines ``ops`` for programs without Shiplap, and return its path.

    The kernel libraries are copied into the same folder. The new library looks for them beside itself, so you can move
    the folder as a whole. It also contains every other op that shares a kernel library with one of ``ops``.

    **Warning:** do not load the library in a process that imports the declarations. The ops are already defined there.

    Args:
        ops: declared ops with C ABI kernels.
        folder: the folder to write to. It is made if it does not exist.

    Raises:
        LibraryError: ``SL404`` for an op that C++ cannot bind. ``SL405`` or ``SL406`` if the library cannot be built.
            ``SL401`` to ``SL403`` for a kernel library that is missing, or that was built for another declaration.
        ShippingError: ``SL308`` if ``ops`` is empty, and for two kernel libraries with the same name.
        LaunchError: ``SL620`` for an op of ``sl.triton`` without compiled forms. ``compile_ahead`` compiles them.
        CommandError: ``SL602`` if ``folder`` cannot be written.
    """
    wanted = list(dict.fromkeys(ops))
    if not wanted:
        raise error("SL308", where=str(folder), got="no op", expected="declared ops", fix="pass the ops of the model")
    made = _make_deployed(wanted, folder)
    target = Path(folder)
    with writing(target, "the directory", "a writable directory"):
        target.mkdir(parents=True, exist_ok=True)
        for name, path in (*made.kernels.items(), (DEPLOYED_LIBRARY_NAME, made.library)):
            _replace_file(path, target / name)
    return target / DEPLOYED_LIBRARY_NAME


@dataclass(frozen=True)
class DeployedLibrary:
    """A library that defines ops, and the kernel libraries that it loads from its own folder.

    Attributes:
        library: the file of the library.
        kernels: the files of the kernel libraries, by their names in the folder.
        name: the name by which the loader identifies the library.
    """

    library: Path
    kernels: dict[str, Path]
    name: str = DEPLOYED_LIBRARY_NAME


def make_on_demand_library(ops: Iterable[Op], where: str) -> DeployedLibrary:
    """Return a library of ``ops`` for ``where``, the path of a package with a compiled model. It defines its ops only
    on request, so that a process which has an op already does not get it twice.

    The name of the library contains a digest of its content. No file name ends in ``.so``, because files of that ending
    in the package are compiled models. Raise the errors of :func:`deploy`.
    """
    # On demand: a process that has the declarations must not get a second definition.
    return _make_deployed(list(dict.fromkeys(ops)), where, on_demand=True)


def _make_deployed(wanted: Sequence[Op], where: str | os.PathLike[str], on_demand: bool = False) -> DeployedLibrary:
    """Return the compiled library of the ops ``wanted`` for programs without Shiplap, with the kernel libraries that it
    opens.

    If ``on_demand`` is true, the library defines its ops only on request, and otherwise when it is loaded. ``where`` is
    the target folder or package, for errors. Raise the errors of :func:`deploy`.
    """
    listed = [e for op in wanted for e in make_plan(op).entries.values()]
    each, asked = {(e.op.spec.name, e.device): e for e in listed}, {op.spec.name for op in wanted}
    # Ops that share a kernel library with one that is wanted come along: whose launches nobody compiled stay behind.
    entries = [e for e in each.values() if e.op.spec.name in asked or not e.form.missing()]
    for entry in entries:
        if lacking := entry.form.missing():
            raise error("SL620", where=entry.op.spec.name, got=lacking, expected="compiled forms of every launch")
    kernels, suffix = _deployed_names(entries, where), ".1" if on_demand else ""
    # alone=True: the library refuses what it would otherwise hand to Python.
    source = native_source([_packed_native(e) for e in entries], alone=True)
    source += render_source(
        "deploy.cpp.jinja",
        libraries=["" if e.form.generated else e.kernels.name + suffix for e in entries],
        names=[e.op.spec.name for e in entries],
        on_demand=on_demand,
    )
    name, flags = DEPLOYED_LIBRARY_NAME, tuple[str, ...]()
    if on_demand:
        parts = [source.encode(), *(path.read_bytes() for path in kernels.values())]
        # The loader knows libraries by name: other content needs another name.
        known = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]
        name = f"libshiplap_ops-{known}.so.1"
        flags = (f"-Wl,-soname,{name}",)
    root, place = (
        library_cache_folder(wanted[0]),
        library_name_digest(source, (*FLAGS, *extra_compiler_flags(), *flags)),
    )
    there = is_library_present(root / place, wanted[0].spec.name)
    if problem := "" if there else compile_into(root, place, source, [*compile_command(wanted[0]), *flags]):
        raise error("SL405", where=wanted[0].spec.name, got=problem, expected="a library")
    return DeployedLibrary(root / place / LIBRARY, {file + suffix: path for file, path in kernels.items()}, name)


def _packed_native(entry: NativeKernelEntry) -> NativeOp:
    """Return the data for generating the C++ of ``entry``, an op on one device type. They include all compiled GPU
    kernels (cubins) that this process has for the op. They also include the tuned choices, without those that need a
    cubin which does not exist.
    """
    # Choices are read lazily, and a deployed library cannot read them later.
    tuned_choices.ensure_choices_loaded()
    rows = packed_rows(entry.op, entry.device)
    if entry.form.generated:  # a config without a cubin would be an error where the default runs
        width = len(config_values(entry.native.space))
        rows = tuple(row for row in rows if entry.form.holds(row[len(row) - width :]))
    return replace(entry.native, source=entry.form.source(packed=True), rows=rows)


def _deployed_names(entries: Iterable[NativeKernelEntry], folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Return a mapping from file name in the deployed folder ``folder`` to the kernel library that is copied there.
    Raise ``SL308`` if two libraries have the same name, or if one has the name of the deployed library.
    """
    names: dict[str, Path] = {}
    for entry in entries:
        if entry.form.generated:
            # A generated function is compiled into the deployed library itself.
            continue
        other = names.setdefault(entry.kernels.name, entry.kernels)
        if other != entry.kernels or other.name == DEPLOYED_LIBRARY_NAME:
            raise error(
                "SL308",
                where=os.fspath(folder),
                got=f"{other} and {entry.kernels}" if other != entry.kernels else str(other),
                expected="kernel libraries of different names",
                fix="rename one of the libraries",
            )
    return names


def _replace_file(path: Path, target: Path) -> None:
    """Copy ``path`` to a new file and rename that file to ``target``. A process that has loaded the old ``target``
    keeps its content.
    """
    safe_io.copy_whole(path, target)
