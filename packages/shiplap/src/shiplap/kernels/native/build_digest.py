"""The digests of native bindings, by which a library is chosen for an op.

A digest covers sources, headers, flags and the machine type. It covers neither the compiler, the computer nor the
release of torch, since libraries that differ only in these are interchangeable. The flags name the stable ABI of torch
that the code uses, and every later release of torch has it.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterable
from functools import cache

import torch

from shiplap.codegen.native import NativeOp, native_source
from shiplap_headers import include_dir

INCLUDE = include_dir()
TORCH = (2, 11), (3, 0)  # releases of torch with the stable ABI that the code keeps to: from the first, below the last
# Sizes wrap around where they overflow, as -fwrapv has it: else a compiler leaves out the look at a divisor of 0.
WRAP = "-fwrapv"
FLAGS = (
    *("-O2", WRAP, "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden"),
    f"-DTORCH_TARGET_VERSION=0x{TORCH[0][0]:02x}{TORCH[0][1]:02x}000000000000",
)


def library_name_digest(source: str, flags: Iterable[str], runtime: str = "") -> str:
    """Return the digest that names a library in the cache, as 32 hexadecimal digits. It covers the source, Shiplap's
    headers, the compiler's flags, the machine type and ``runtime``. The latter is any further string, such as the
    version of the runtime that the library needs.
    """
    parts = [source, *_headers_digest(), *flags, machine_type(), runtime]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def op_build_digest(native: NativeOp) -> str:
    """Return the digest of one op's generated code, 32 hexadecimal digits that do not depend on other ops in its
    library. It identifies the op's code in a packaged library.
    """
    # As if the op was alone in a library, so that a program may import a part of a package.
    return library_name_digest(native_source([native]), FLAGS)


def machine_type() -> str:
    """Return the platform for which machine code is compiled, such as ``linux-x86_64``."""
    return f"{sys.platform}-{platform.machine()}"


def takes_torch(version: str = torch.__version__) -> bool:
    """Return whether the torch release ``version`` has the stable ABI that the generated code uses. Releases from 2.11
    on and below 3.0 have it.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    return TORCH[0] <= (major, minor) < TORCH[1]


@cache
def _headers_digest() -> tuple[str, ...]:
    """Return the contents of Shiplap's C headers, sorted by file name."""
    return tuple([path.read_text() for path in sorted((INCLUDE / "shiplap").glob("*.h"))])
