"""Compile tiny C kernel libraries against generated headers."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from shiplap.dispatch import Op
from shiplap.kernels.c.header import header_text
from shiplap_headers import include_dir
from shiplap_testing.paths import REPOSITORY

INCLUDE = include_dir()
SUFFIX = {"cc": "c", "nvcc": "cu"}
SETTLED = REPOSITORY / "build" / "test-libraries"


def compile_c(
    folder: Path,
    name: str,
    ops: dict[str, Op],
    body: str,
    *,
    compiler: str = "cc",
    configs: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """Compile the C source code ``body`` to ``lib<name>.so`` in ``folder`` and return the path of the library. Raise
    ``CompileError`` if the compiler fails. A C or C++ compiler also fails on warnings.

    The source includes the C header that shiplap generates for ``ops``, a dict from names of C functions to the ops
    that they compute. ``configs`` has, by name of a C function, the names of its compile-time values, for which the
    header defines indices. ``compiler`` is a C compiler, a C++ compiler, or ``nvcc``, which compiles for the GPU of
    this machine.
    """
    text = header_text({symbol: op.spec for symbol, op in ops.items()}, name, configs)
    (folder / f"{name}.h").write_text(text)
    source = folder / f"{name}.{SUFFIX.get(compiler, 'cpp')}"
    source.write_text(f'#include "{name}.h"\n#include <stdio.h>\n#include <string.h>\nSL_SIGNATURES\n{body}')
    library = folder / f"lib{name}.so"
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-O1", "-fPIC"]
    command = [compiler, *warnings, "-shared"]
    if compiler == "nvcc":
        command = ["nvcc", "-O2", "-std=c++17", "-arch=native", "-Xcompiler", "-fPIC", "-shared"]
    done = subprocess.run(
        [*command, f"-I{INCLUDE}", "-o", library, source], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CompileError(done.stderr)
    return library


def settled(library: Path) -> Path:
    """Copy the shared library ``library`` to a folder that is named by its content, and return the path of the copy.

    The path is the same in each run of the tests. Generated C++ names the path of its library, so that what was
    compiled of it in an earlier run is found again (compile_cache.py).
    """
    place = SETTLED / hashlib.sha256(library.read_bytes()).hexdigest()[:32] / library.name
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_name(f"{place.name}.{os.getpid()}")
    shutil.copy(library, new)
    new.replace(place)  # another worker may do the same now
    return place


class CompileError(Exception):
    """The error that a compiler failed. Its text is the output of the compiler."""
