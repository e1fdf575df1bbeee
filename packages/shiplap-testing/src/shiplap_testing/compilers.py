"""C++ compilers that do not optimise and link quickly, first on the ``PATH`` of ``make test``.

A third of the processor time of the suite went into compilers that made code fast which a test calls a few times:
bindings, kernels of Inductor, generated devices. With ``SHIPLAP_TEST_UNOPTIMIZED=1`` a program stands before each C++
compiler that adds ``-O0``, and finds the headers of all bindings and of all kernels of Inductor compiled already. Where
there is gold, it links: 0.04 s for a kernel of Inductor and not 0.2 s (two busy cores, 2026-11-27). The binding of 29
ops takes 3 s of processor time and not 15, that of one op 1.5 s and not 3, and a kernel that is compiled without a
binding 0.8 s and not 2.8 (two shared cores, GCC 12, 2026-11-26; linked as usual). What was compiled in an earlier run
is kept in ``build/test-compilers`` (compile_cache.py). Without the variable, as in
``nox -s long`` and where one file is run, all is compiled as it is for users; so is what names its compiler by a path.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from shiplap_testing.folder import numbered
from shiplap_testing.paths import REPOSITORY
from shiplap_testing.private import header_call

ASKED = "SHIPLAP_TEST_UNOPTIMIZED"
FOLDER = "SHIPLAP_TEST_COMPILERS"  # it is on the path already: workers and programs of tests inherit it
NAMES = ("c++", "g++", "clang++")
HEADER = "shiplap/native.h"
KERNELS = "torch/csrc/inductor/cpp_prefix.h"
KEEPS = str(Path(__file__).with_name("compile_cache.py"))
KEPT = REPOSITORY / "build" / "test-compilers"  # what was compiled before, by its content
CONSTANT = ["/usr", *(os.path.realpath(place) for place in (sys.prefix, sys.base_prefix))]
USED = REPOSITORY / "build" / "test-caches"  # a folder for each run that goes on
DAYS = 7  # after which what no run has used is removed
# Their keys do not tell a library from one that is optimised: those of the user are neither read nor written.
CACHES = ("SHIPLAP_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def path() -> str:
    """Return the value of the environment variable ``PATH`` for tests.

    If ``SHIPLAP_TEST_UNOPTIMIZED`` is 1, it begins with a new folder of compilers that do not optimise, and the caches
    of the run lie beside it. All of them are removed when this process ends, or by a later run if this process is
    killed. Otherwise, or if there is such a folder already, it is the present value.
    """
    given = os.environ.get("PATH", os.defpath)
    if os.environ.get(ASKED) != "1" or os.environ.get(FOLDER):
        return given
    _remove_unused()
    # Inductor's code of a packaged model names its cache, so that the compiler's results are found again only where the
    # next run has the same path.
    run = numbered(USED)
    folder = run / "compilers"
    for header in (HEADER, KERNELS):
        # GCC looks for a compiled header beside where the header would be.
        (folder / "include" / header).parent.mkdir(parents=True)
    more = "-O0 -fuse-ld=gold" if shutil.which("ld.gold") else "-O0"
    for name in NAMES:
        if real := shutil.which(name):
            program = folder / name
            keeping = [sys.executable, "-I", "-S", KEEPS, str(KEPT), real, _constant()]
            call = shlex.join([*keeping, "-I", str(folder / "include")])
            program.write_text(f'#!/bin/sh\nexec {call} "$@" {more}\n', encoding="utf-8")
            program.chmod(0o755)
    os.environ[FOLDER] = str(folder)
    for name in CACHES:
        cache = run / name.lower()
        cache.mkdir(mode=0o700)
        os.environ[name] = str(cache)
    return f"{folder}{os.pathsep}{given}"


def _constant() -> str:
    """Return the folders whose content counts as unchanging as one string, joined by ``os.pathsep``. They are the
    folders of the system, of installed packages and of torch, which is found without an import.
    """
    torch = importlib.util.find_spec("torch")
    places = [os.path.realpath(place) for place in torch.submodule_search_locations or ()] if torch else []
    return os.pathsep.join([*CONSTANT, *places])


def _remove_unused() -> None:
    """Remove compiled files that no run has used for ``DAYS`` days from the cache of compiler results, with their lists
    of dependencies and warnings.
    """
    for file in KEPT.glob("*/*"):
        with contextlib.suppress(OSError):  # another run removes it as well
            if not file.suffix and time.time() - file.stat().st_mtime > DAYS * 86400:
                for each in (file, *file.parent.glob(f"{file.name}.*")):
                    each.unlink()


def headers() -> subprocess.Popen[bytes] | None:
    """Start to compile the C++ header of bindings, and return the process. Return None if the compilers of
    :func:`path`, which do not optimise, are not in use.

    GCC uses the compiled header as soon as it exists, in calls with the same flags.
    """
    if not _in_use():
        return None
    import torch

    from shiplap.kernels.native.build_digest import FLAGS, INCLUDE

    # A header that is compiled in advance is not linked.
    flags = [flag for flag in FLAGS if flag != "-shared"]
    include = ["-I", str(INCLUDE), "-isystem", str(Path(torch.__file__).parent / "include")]
    return _start_compilation(["g++", *flags, *include, "-x", "c++-header", str(INCLUDE / HEADER)], HEADER)


def kernels() -> subprocess.Popen[bytes] | None:
    """Start to compile the header of Inductor's kernels, and return the process. Return None if the compilers of
    :func:`path`, which do not optimise, are not in use.
    """
    if not _in_use():
        return None
    return _start_compilation(header_call(KERNELS), KERNELS)


def _in_use() -> bool:
    """Return whether the ``PATH`` begins with compilers that do not optimise, and ``g++`` exists.

    :func:`path` creates these compilers.
    """
    return bool(os.environ.get(FOLDER)) and shutil.which("g++") is not None


def _start_compilation(call: list[str], header: str) -> subprocess.Popen[bytes]:
    """Start a process that compiles ``header`` by the command ``call`` to a ``.gch`` file, and return the process.

    The file gets its name only when it is complete, so that no compiler reads an incomplete one.
    """
    made = os.path.join(os.environ[FOLDER], "include", f"{header}.gch")
    # Moved when it is complete: a compiler that runs meanwhile must not read half of it.
    program = f"{shlex.join([*call, '-o', f'{made}.new'])} && {shlex.join(['mv', f'{made}.new', made])}"
    return subprocess.Popen(["sh", "-c", program], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
