"""The platform tag of a wheel with libraries, as far as the libraries show it: ``manylinux_2_28_x86_64``."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import IO

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

# What pyelftools raises for a file that is cut short or holds other bytes.
DAMAGED = (ELFError, ValueError, KeyError, IndexError, AttributeError, UnicodeDecodeError, TypeError, OverflowError)
# Libraries that every Linux with the C library of a manylinux tag has, and those of torch.
COMMON = re.compile(
    r"(libc|libm|libdl|libpthread|librt|libstdc\+\+|libgcc_s|libgomp|ld-linux[\w-]*|libtorch(_\w+)?|libc10(_\w+)?)\.so"
)
# The C++ library (GLIBCXX_3.4.N) of the first distributions with a C library (GLIBC_2.M), as PEP 600's users have it.
CXX = ((19, 17), (22, 24), (24, 28), (28, 31), (29, 34), (30, 35), (33, 39))


def platform_tag(libraries: Iterable[Path]) -> tuple[str, str]:
    """Return the platform tag of a wheel with ``libraries``, and the reason why package indexes refuse it.

    The tag is the oldest manylinux tag that provides all that the libraries need, and the reason is empty. If a library
    needs something else or cannot be read, the tag is ``linux_<machine>``, which package indexes refuse.
    """
    minor = 17  # manylinux_2_17 is manylinux2014
    for path in libraries:
        try:
            with path.open("rb") as file:
                needed, versions = read_requirements(file)
        except (OSError, *DAMAGED) as e:
            return f"linux_{platform.machine()}", f"{_printable_name(path.name)} cannot be read: {e}"
        others = [name for name in needed if not COMMON.match(name)]
        if others:
            return (
                f"linux_{platform.machine()}",
                f"{_printable_name(path.name)} needs {', '.join(map(_printable_name, others))}",
            )
        try:
            minor = max([minor, *map(_glibc_minor, versions)])
        except ValueError as e:
            return f"linux_{platform.machine()}", f"{_printable_name(path.name)} needs {_printable_name(str(e))}"
    return f"manylinux_2_{minor}_{platform.machine()}", ""


def read_requirements(library: IO[bytes]) -> tuple[list[str], list[str]]:
    """Return two lists of strings about an ELF file. The first has the names of the libraries that it needs. The second
    has the symbol versions that it needs of them, such as ``GLIBC_2.28``.
    """
    needed, versions = list[str](), list[str]()
    for section in ELFFile(library).iter_sections():
        if isinstance(section, DynamicSection):
            needed += [vars(tag)["needed"] for tag in section.iter_tags("DT_NEEDED")]
        elif isinstance(section, GNUVerNeedSection):
            versions += [each.name for _, listed in section.iter_versions() for each in listed]
    return needed, versions


def shares_cxx_runtime(library: bytes) -> bool:
    """Return whether the ELF library with this content loads a C++ runtime, instead of containing one. Return False for
    a damaged file.
    """
    try:
        needed, _ = read_requirements(BytesIO(library))
    except DAMAGED:
        return False  # the load, in a process of its own, tells what is wrong
    return any(name.startswith(("libstdc++.", "libc++.")) for name in needed)


def _printable_name(name: str) -> str:
    """Return a name from a wheel for printing. If it contains characters that control a terminal, they are escaped."""
    return name if name.isprintable() else ascii(name)


def _glibc_minor(version: str) -> int:
    """Return the minor version M of the C library 2.M that comes with a symbol version such as ``GLIBCXX_3.4.30``.
    Return 0 for another symbol.

    Raise ``ValueError`` for a newer version of the C++ library than is known.
    """
    if match := re.match(r"GLIBC_2\.(\d+)", version):
        return int(match[1])
    if match := re.match(r"GLIBCXX_3\.4\.(\d+)", version):
        # The first distribution whose C++ library has this version decides the C library.
        known = [minor for newest, minor in CXX if int(match[1]) <= newest]
        if not known:
            raise ValueError(version)
        return known[0]
    return 0
