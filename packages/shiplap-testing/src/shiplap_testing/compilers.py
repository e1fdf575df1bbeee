"""C++ compilers that do not optimise, first on the ``PATH`` of ``make test``.

A third of the processor time of the suite went into compilers that made code fast which a test calls a few times:
bindings, kernels of Inductor, generated devices. With ``SHIPLAP_TEST_UNOPTIMIZED=1`` a program stands before each C++
compiler that adds ``-O0``, and finds the header of all bindings compiled already. The binding of 29 ops takes 3 s of
processor time and not 15, that of one op 1.5 s and not 3 (two shared cores, GCC 12, 2026-11-26). Without the variable,
as in ``nox -s long`` and where one file is run, all is compiled as it is for users; so is what names its compiler by a
path.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["FOLDER", "headers", "path"]

ASKED = "SHIPLAP_TEST_UNOPTIMIZED"
FOLDER = "SHIPLAP_TEST_COMPILERS"  # it is on the path already: workers and programs of tests inherit it
NAMES = ("c++", "g++", "clang++")
HEADER = "shiplap/native.h"
# Their keys do not tell a library from one that is optimised: those of the user are neither read nor written.
CACHES = ("SHIPLAP_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def path() -> str:
    """The ``PATH`` with a folder of such programs first, if that is asked for. The folder goes with this process.

    So do caches, which are in it.
    """
    given = os.environ.get("PATH", os.defpath)
    if os.environ.get(ASKED) != "1" or os.environ.get(FOLDER):
        return given
    folder = Path(tempfile.mkdtemp(prefix="shiplap-compilers-"))
    atexit.register(_remove, folder, os.getpid())
    (folder / "include" / HEADER).parent.mkdir(parents=True)
    for name in NAMES:
        if real := shutil.which(name):
            program = folder / name
            call = shlex.join([real, "-I", str(folder / "include")])
            program.write_text(f'#!/bin/sh\nexec {call} "$@" -O0\n', encoding="utf-8")
            program.chmod(0o755)
    os.environ[FOLDER] = str(folder)
    for name in CACHES:
        cache = folder / name.lower()
        cache.mkdir(mode=0o700)
        os.environ[name] = str(cache)
    return f"{folder}{os.pathsep}{given}"


def headers() -> subprocess.Popen[bytes] | None:
    """Begin to compile the header of bindings for the programs above: GCC looks for it in each folder of headers, takes
    it where the flags are the same, and does without it until it is there. None where they are not in use, or where
    another process has begun.
    """
    if not (folder := os.environ.get(FOLDER)) or shutil.which("g++") is None:
        return None
    try:
        Path(folder, "begun").touch(exist_ok=False)
    except FileExistsError:
        return None
    import torch

    from shiplap.bind.needs import FLAGS, INCLUDE

    made = Path(folder, "include", f"{HEADER}.gch")
    flags = [flag for flag in FLAGS if flag != "-shared"]
    include = ["-I", str(INCLUDE), "-isystem", str(Path(torch.__file__).parent / "include")]
    call = ["g++", *flags, *include, "-x", "c++-header", str(INCLUDE / HEADER), "-o", f"{made}.new"]
    program = f"{shlex.join(call)} && {shlex.join(['mv', f'{made}.new', str(made)])}"
    return subprocess.Popen(["sh", "-c", program], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a process that was forked from it
        shutil.rmtree(folder, ignore_errors=True)
