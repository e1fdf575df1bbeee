"""Compile a generated project with ninja: one object a translation unit, linked into one extension module."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from shiplap.codegen import render_source
from shiplap.plugin_api import error
from shiplap.plugin_api.exporting import shares_cxx_runtime
from shiplap_backend.generate import write_generated
from shiplap_backend.project import Project
from shiplap_backend.runtime import COMMON

# Of so many files each reads torch's headers for itself: on GCC 12 it takes 19 s of processor time to compile them
# beforehand, and saves 6 s a file.
_FEW = 3

CORE = COMMON / "csrc" / "all.cpp"

# Generated code is glue that runs once a call: -O2 buys nothing there and costs a third of the compile time.
_FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS", "-DTORCH_EXTENSION_NAME=_C", "-w"]


def build_extension(
    project: Project, *, jobs: int | None = None, tell: Callable[[str], object] = str, together: bool = False
) -> Path:
    """Compile changed files of a generated project and link ``_C.so`` into its package. Return the path of ``_C.so``.

    ``jobs`` is the number of compilers that run at a time. If it is None, ninja chooses it. ``tell`` is called after
    each compiled file with a string such as ``3/21 files``. If ``together`` is true, the generated wrappers and the
    device core, the C++ that all devices share, form one translation unit. Otherwise each file is one. For few ops on
    one CPU core this takes a third less work, but nothing runs in parallel.

    The manifest, a file with the versions that the library was built for, is written after the library. An interrupted
    build can thus not claim that an older library fits this torch. Raise ``SL906`` if the compilation fails (with the
    first error), if ninja is not installed, or if the compiler has linked another C++ runtime than torch's.
    """
    directory = project.root / "build"
    directory.mkdir(exist_ok=True)
    target = project.package / "_C.so"
    ninja = _render_ninja_file(project, target, together)
    path = directory / "build.ninja"
    if not path.is_file() or path.read_text(encoding="utf-8") != ninja:
        path.write_text(ninja, encoding="utf-8")
    command = [_find_ninja(), "-C", str(directory), *(["-j", str(jobs)] if jobs else [])]
    try:
        status, printed = _run_ninja(command, tell)
    except FileNotFoundError:
        raise error(
            "SL906",
            where=str(directory),
            got="no program 'ninja'",
            expected="ninja, which runs the compiler",
            fix="install it: pip install ninja",
        ) from None
    if status:
        raise error(
            "SL906",
            where=str(directory),
            got=_first_error(printed),
            expected="a build without errors",
        )
    if not shares_cxx_runtime(target.read_bytes()):
        raise error(
            "SL906",
            where=str(target),
            got=f"a library into which {os.environ.get('CXX', 'g++')} has linked the C++ runtime",
            expected="a library that uses the C++ runtime of torch, libstdc++.so; with two of them a process may end",
            fix="set CXX to another compiler, such as CXX=/usr/bin/g++, and build again",
        )
    write_generated(
        project.package, {"_manifest.json": (project.generated / "manifest.json").read_text(encoding="utf-8")}
    )
    return target


def _run_ninja(command: list[str], tell: Callable[[str], object]) -> tuple[int, str]:
    """Run ninja by ``command``, and return its exit status and its output.

    ``tell`` is called with a string such as ``3/21 files`` after each compiled file.
    """
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            printed.append(line)
            if m := re.match(r"\[(\d+/\d+)\] ", line):
                tell(f"{m[1]} files")
    return process.returncode, "".join(printed)


def _find_ninja() -> str:
    """Return the path of this Python environment's ninja.

    If the environment has none, return the name ``ninja``, for which the shell's search path is used.
    """
    own = Path(sysconfig.get_path("scripts")) / "ninja"
    return str(own) if own.is_file() else "ninja"


def _render_ninja_file(project: Project, target: Path, together: bool = False) -> str:
    """Return the content of the file ``build.ninja`` of ``project``, which compiles its sources and links ``target``.

    If ``together`` is true, the generated wrappers and the device core, the C++ that all devices share, are compiled as
    one file. Otherwise each file is compiled on its own.
    """
    from torch.utils.cpp_extension import include_paths, library_paths

    ours = [*project.runtime.include_dirs, project.generated.resolve()]
    kineto = [f"{path}/kineto" for path in include_paths()[:1]]  # its headers include each other by name alone
    system = [*include_paths(), *kineto, sysconfig.get_path("include"), *project.runtime.system_dirs()]
    libraries = library_paths()
    wrappers, sources = [*project.generated.glob("*.cpp")], [*project.bodies.glob("*.cpp"), *project.runtime.units]
    if together:
        wrappers, sources = [], [_write_joint_unit(project, wrappers), *(p for p in sources if p != CORE)]
    generated = _object_files(wrappers)
    return render_source(
        "build.ninja.jinja",
        package="shiplap_backend",
        compiler=os.environ.get("CXX", "g++"),
        c_compiler=os.environ.get("CC", "gcc"),
        flags=_quote_words([*_FLAGS, *project.runtime.flags]),
        includes=_quote_words([*(f"-I{i}" for i in ours), *(word for i in system for word in ("-isystem", str(i)))]),
        link=_quote_words(
            [*(word for d in libraries for word in (f"-L{d}", f"-Wl,-rpath,{d}")), *project.runtime.link_args()]
        ),
        prefix=_escape_path(str(COMMON / "include" / "shiplap_backend" / "wrappers.h")),
        generated=generated,
        shared=len(generated) > _FEW,
        others=_object_files(p for p in sources if p.suffix != ".c"),
        plain=_object_files(p for p in sources if p.suffix == ".c"),
        target=_escape_path(str(target.resolve())),
        abi=int(torch.compiled_with_cxx11_abi()),
    )


def _write_joint_unit(project: Project, wrappers: Iterable[Path]) -> Path:
    """Write one C++ file that includes the generated files ``wrappers`` and the device core, and return its path.

    The core is the C++ that all devices share. It is included last, because its own names would hide functions that the
    wrappers call. The file is a part of ``project``.
    """
    unit = project.root / "build" / "together.cpp"
    parts = [COMMON / "include" / "shiplap_backend" / "wrappers.h", *sorted(wrappers), CORE]
    text = "".join(f'#include "{part.resolve()}"\n' for part in parts)
    # An unchanged file keeps its time stamp, so that ninja does not compile it again.
    if not unit.is_file() or unit.read_text(encoding="utf-8") != text:
        unit.write_text(text, encoding="utf-8")
    return unit


def _object_files(sources: Iterable[Path]) -> list[tuple[str, str]]:
    """Return a pair of object file and source file for each C or C++ file in ``sources``, sorted by source.

    The paths are escaped for ninja.
    """
    return [
        (f"{_escape_path(p.stem)}{'-c' * (p.suffix == '.c')}.o", _escape_path(str(p.resolve())))
        for p in sorted(sources)
    ]


def _quote_words(arguments: Iterable[str]) -> str:
    """Return ``arguments`` as one string, quoted for the shell and escaped for the value of a ninja variable."""
    # A dollar sign begins a variable in ninja, also inside quotes.
    return shlex.join(arguments).replace("$", "$$")


def _escape_path(path: str) -> str:
    """Return ``path`` escaped for a list of files in ninja.

    Ninja quotes the paths of such a list for the shell itself.
    """
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _first_error(output: str) -> str:
    """Return up to 12 lines of the compiler's ``output`` as one string, from the first line with an error on.

    If no line names an error, the last 12 lines are returned. The whole output can have thousands of lines about
    templates.
    """
    lines = output.splitlines()
    first = next(
        (i for i, line in enumerate(lines) if "error:" in line or "undefined reference" in line),
        # Without a known error pattern, the last lines are the most likely to name the problem.
        max(0, len(lines) - 12),
    )
    return "\n".join(lines[first : first + 12])
