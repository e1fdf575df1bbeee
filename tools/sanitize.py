"""Run kernels, generated bindings and device C++ under the address and undefined-behaviour sanitizers.

``sanitize.py [PART ...] [-- PYTEST ARGUMENT ...]``, with ``CXX`` for another compiler than ``c++``: GCC or Clang. The
parts are ``kernels``, ``bindings`` and ``device``, by default all three. Python and torch are not instrumented, so the
sanitizer's runtime is loaded before them; a report ends the process that it is about, and with it the run.
``sanitize.py storm [-- SECONDS]`` is the storm of threads (nox -s storm) in the same surroundings.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shiplap_headers import cmake_dir
from shiplap_testing.paths import REPOSITORY

# Tests by what they run. Of the kernels, those whose values are compared; compiled graphs and reports add nothing here.
_SPARSE3D = ("abi", "attacks", "grid_sample", "hash", "kinds", "maps", "ops", "parts", "pooling", "postprocess")
_SLIDESPARSE = ("formats", "isa", "linear", "products", "quantise")
_BIND = ("c/test_align", "c/test_declaration", "c/test_out", "native/test_binding", "native/test_choice_table")
PARTS = {
    "kernels": [
        *(f"packages/shiplap-sparse3d/tests/sparse3d/test_{name}.py" for name in (*_SPARSE3D, "serialize")),
        *(f"packages/shiplap-slidesparse/tests/slidesparse/test_{name}.py" for name in _SLIDESPARSE),
        "tests/families/test_hostile.py",
    ],
    "bindings": [
        *(f"packages/shiplap/tests/kernels/{name}.py" for name in _BIND),
        "packages/shiplap/tests/codegen/test_native.py",
        "packages/shiplap/tests/codegen/test_agreement.py",
        "packages/shiplap/tests/safe_io/test_doors.py",
        "packages/shiplap/tests/safe_io/test_lifetimes.py",
    ],
    "device": ["packages/shiplap-backend/tests/backend/runtime"],
}
SANITIZE = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g1")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler, and what its sanitizers want.

    Attributes:
        call: the program, with what ``CXX`` has behind it.
        flags: for compiling and linking.
        preload: the libraries that have to be in the process before Python. The C++ library is one of them, or the
            first exception thrown in torch aborts because the sanitizer found no __cxa_throw when it started.
    """

    call: tuple[str, ...]
    flags: tuple[str, ...]
    preload: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Of its folder."""
        return Path(self.call[-1]).name


def compiler(asked: str) -> Compiler:
    """The compiler that ``CXX`` asks for. ``SystemExit`` if it has no sanitizers that a library can use."""
    call = tuple(shlex.split(asked))
    version = subprocess.run([*call, "--version"], capture_output=True, text=True, check=True).stdout
    clang = "clang" in version
    flags = (*SANITIZE, *(("-shared-libsan",) if clang else ()))
    wanted = ["libclang_rt.asan-x86_64.so"] if clang else ["libasan.so", "libubsan.so"]
    libraries = [Path(_asked_of(call, f"-print-file-name={name}")) for name in [*wanted, "libstdc++.so.6"]]
    missing = [path.name for path in libraries if not path.is_absolute()]
    if missing:
        sys.exit(f"{asked} has no {', '.join(missing)}: install its sanitizers")
    return Compiler(call, flags, tuple(libraries))


def _asked_of(call: Sequence[str], option: str) -> str:
    return subprocess.run([*call, option], capture_output=True, text=True, check=True).stdout.strip()


def wrapper(cxx: Compiler, folder: Path) -> Path:
    """A program that calls the compiler with the sanitizers: what ``CXX`` is for bindings and devices."""
    program = folder / "cxx"
    words = shlex.join(["env", "-u", "LD_PRELOAD", *cxx.call])
    program.write_text(f'#!/bin/sh\nexec {words} "$@" {shlex.join(cxx.flags)}\n', encoding="utf-8")
    program.chmod(0o755)
    return program


def libraries(cxx: Compiler, folder: Path) -> Path:
    """The kernel libraries of every family, built with the sanitizers: a folder for ``SHIPLAP_LIBRARY_PATH``."""
    made = folder / "lib"
    made.mkdir(exist_ok=True)
    for family in sorted(p.parent for p in (REPOSITORY / "packages").glob("*/CMakeLists.txt")):
        build = folder / family.name
        linked = "" if "-shared-libsan" not in cxx.flags else "-shared-libsan"
        options = {
            "SHIPLAP_SANITIZE": "ON",
            "CMAKE_CXX_COMPILER": cxx.call[-1],
            "CMAKE_MODULE_PATH": cmake_dir(),
            "CMAKE_SHARED_LINKER_FLAGS": linked,
            "CMAKE_EXE_LINKER_FLAGS": linked,
        }
        given = [f"-D{name}={value}" for name, value in options.items()]
        scripts = str(Path(sys.executable).parent)
        environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"}
        for command in (["-S", family, "-B", build, "-G", "Ninja", *given], ["--build", build]):
            subprocess.run(["cmake", *map(str, command)], env=environment, check=True, stdout=subprocess.DEVNULL)
        for library in (build / "lib").glob("*.so"):
            shutil.copy2(library, made)
    return made


def environment(cxx: Compiler, folder: Path, *, kernels: bool = True) -> dict[str, str]:
    """What the tests run in: everything that is compiled meanwhile is instrumented, and every report is an end."""
    cache = folder / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(map(str, cxx.preload)),
        # A call that asks for 2**62 bytes is an error of the call; what torch keeps until the end is no leak of ours.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TBB_ENABLE_SANITIZERS": "1",  # or OpenVINO's threads load a library in a way that the sanitizer refuses
        "CXX": str(wrapper(cxx, folder)),
        "SHIPLAP_CACHE_DIR": str(cache),
        **({"SHIPLAP_LIBRARY_PATH": str(libraries(cxx, folder))} if kernels else {}),
    }


def run(part: str, folder: Path, env: dict[str, str], arguments: Sequence[str]) -> int:
    """Run the tests of a part on two processes, and say what they took. --capture=sys: the report of a sanitizer goes
    to file descriptor 2 and the process ends; pytest would keep it.
    """
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    call = ["-m", "pytest", "-q", "--capture=sys", "-o", f"cache_dir={folder / 'pytest'}", "-m", "not long and not gpu"]
    spread = ["-n", "2", "--dist", "loadfile"]
    status = subprocess.run([sys.executable, *call, *spread, *PARTS[part], *arguments], env=env, check=False).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{part}: status {status}, {time.monotonic() - started:.0f} s, {cpu:.0f} s of CPU", flush=True)
    return status


def storm(folder: Path, env: dict[str, str], seconds: str) -> int:
    """Sixteen threads that call one op while it is declared again, attached, tuned and cleared."""
    place = folder / "storm"
    place.mkdir(mode=0o700, exist_ok=True)
    program = "packages/shiplap/tests/safe_io/storm.py"
    call = [sys.executable, program, "everything", seconds, "16", str(place)]
    return subprocess.run(
        call, env={**env, "SHIPLAP_NATIVE": "1", "SHIPLAP_STORM_CC": env["CXX"]}, check=False
    ).returncode


def main(*arguments: str) -> int:
    """Build and run what was asked for; the worst status."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parts, rest = arguments[:at] or tuple(PARTS), arguments[at + 1 :]
    os.chdir(REPOSITORY)
    cxx = compiler(os.environ.get("CXX", "c++"))
    folder = REPOSITORY / "build" / "sanitize" / cxx.name / "-".join(parts)  # several runs may go on side by side
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if parts == ("storm",):
        return storm(folder, environment(cxx, folder, kernels=False), rest[0] if rest else "600")
    env = environment(cxx, folder, kernels="kernels" in parts)
    print(f"built with {' '.join(cxx.call)} in {time.monotonic() - started:.0f} s", flush=True)
    return max(run(part, folder, env, rest) for part in parts)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
