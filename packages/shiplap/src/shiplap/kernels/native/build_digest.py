"""What a library must be made from, and with, to bind an op natively: the digests by which it is chosen.

Nothing here names who built it: another compiler, another computer and another release of torch make a library that
serves as well, as long as sources, headers, flags and machine type are the same. The flags say which stable ABI the
code keeps to; every release of torch from that one on has it.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterable
from functools import cache

import torch

from shiplap.codegen.native import Native, native_source
from shiplap_headers import include_dir

INCLUDE = include_dir()
TORCH = (2, 11), (3, 0)  # releases of torch with the stable ABI that the code keeps to: from the first, below the last
# Sizes wrap around where they overflow, as -fwrapv has it: else a compiler leaves out the look at a divisor of 0.
WRAP = "-fwrapv"
FLAGS = (
    *("-O2", WRAP, "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden"),
    f"-DTORCH_TARGET_VERSION=0x{TORCH[0][0]:02x}{TORCH[0][1]:02x}000000000000",
)


def digest(source: str, flags: Iterable[str], runtime: str = "") -> str:
    """The name of a library: of its source, our headers, the flags, the machine type, and a ``runtime`` it needs."""
    parts = [source, *_headers(), *flags, machine(), runtime]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def needs(native: Native) -> str:
    """The same for one op, whatever other ops lie in the library."""
    return digest(native_source([native]), FLAGS)


def machine() -> str:
    """What machine code is for: ``linux-x86_64``."""
    return f"{sys.platform}-{platform.machine()}"


def takes_torch(version: str = torch.__version__) -> bool:
    """Whether this release of torch has the stable ABI that the code keeps to."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return TORCH[0] <= (major, minor) < TORCH[1]


@cache
def _headers() -> tuple[str, ...]:
    return tuple([path.read_text() for path in sorted((INCLUDE / "shiplap").glob("*.h"))])
