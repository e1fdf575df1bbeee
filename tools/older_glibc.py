"""Write a folder with a compiler whose programs run on systems with an older C and C++ library than this one.

Usage: ``older_glibc.py FOLDER``, and then ``CXX=FOLDER/c++``. It needs GCC, Linux and pyelftools, and no container.

A program records the version of each symbol that it takes from a library, and the linker takes the newest version there
is. The folder therefore has libraries for the linker alone, with the symbols and versions that manylinux_2_28 allows.
What the C++ library has got since then comes from GCC's own static library. Headers stay those of this system. The
linker refuses functions that the older C library lacks.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile

NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}  # of manylinux_2_28
MERGED = (2, 34)  # the C library that has taken these libraries in
PARTS = {"libdl.so.2": r"dl", "librt.so.1": r"aio_|lio_|mq_|shm_|timer_", "libpthread.so.0": r""}
# What inline code in headers reads: whether the process has one thread. 0 is right for any process.
ADDED = '__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n'


def version_number(name: str) -> tuple[str, tuple[int, ...]]:
    """The family and the numbers of a symbol version: ``GLIBC_2.2.5`` is ``("GLIBC", (2, 2, 5))``."""
    family, _, numbers = name.rpartition("_")
    return family, tuple(map(int, numbers.split("."))) if re.fullmatch(r"[\d.]+", numbers) else ()


def defined_symbols(library: Path) -> Iterator[tuple[str, int, str]]:
    """Each symbol that a library offers: its name, its size if it is data, else 0, and its version."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        names = {}
        for version, auxiliaries in elf.get_section_by_name(".gnu.version_d").iter_versions():
            names[version["vd_ndx"]] = next(auxiliaries).name
        versions = elf.get_section_by_name(".gnu.version")
        for i, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            number = versions.get_symbol(i)["ndx"]
            number = number & 0x7FFF if isinstance(number, int) else 0
            kind = symbol["st_info"]["type"]
            # The versions themselves stand in the table, too, as absolute symbols.
            if symbol["st_shndx"] not in ("SHN_UNDEF", "SHN_ABS") and kind != "STT_TLS" and number in names:
                yield symbol.name, symbol["st_size"] if kind == "STT_OBJECT" else 0, names[number]


def older_symbols(library: Path) -> dict[str, dict[str, tuple[str, int]]]:
    """By library of an older system: the version of each symbol that it has there, and its size if it is data."""
    offered: dict[str, list[tuple[tuple[int, ...], str, int]]] = defaultdict(list)
    for name, size, version in defined_symbols(library):
        family, numbers = version_number(version)
        if family in NEWEST and numbers:
            offered[name].append((numbers, version, size))
    found: dict[str, dict[str, tuple[str, int]]] = {library.name: {}}
    for name, versions in offered.items():
        family = version_number(versions[0][1])[0]
        old = [each for each in versions if each[0] <= NEWEST[family]]
        if not old:
            continue
        home = library.name
        if library.name == "libc.so.6" and any(numbers == MERGED for numbers, _, _ in versions):
            home = next(part for part, names in PARTS.items() if re.match(names, name))
        found.setdefault(home, {})[name] = max(old)[1:]
    return found


def write_library(folder: Path, name: str, symbols: dict[str, tuple[str, int]]) -> None:
    """Link a shared library that offers these symbols and contains nothing."""
    lines, versions = [".text"], defaultdict[str, list[str]](list)
    for symbol, (version, size) in sorted(symbols.items(), key=lambda pair: pair[1][1] > 0):
        if size:  # a program may copy it
            lines += [".data", f".type {symbol},@object", f".size {symbol},{size}", f".globl {symbol}"]
            lines += [f"{symbol}: .skip {size}"]
        else:
            lines += [f".type {symbol},@function", f".globl {symbol}", f"{symbol}: nop"]
        versions[version].append(symbol)
    script = [f"{version} {{ global: {'; '.join(names)}; }};" for version, names in sorted(versions.items())]
    source, nodes = folder / f"{name}.s", folder / f"{name}.versions"
    source.write_text("\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""]))
    nodes.write_text("\n".join(script))
    flags = ("-shared", "-nostdlib", f"-Wl,-soname,{name}", f"-Wl,--version-script={nodes}")
    subprocess.run(["gcc", *flags, "-o", folder / name, source], check=True)
    source.unlink()
    nodes.unlink()


def file_of(name: str) -> Path:
    """The file that GCC links for a library."""
    said = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    return Path(said.strip()).resolve()


def write_folder(folder: Path) -> Path:
    """Write the libraries and the compiler into a folder, and return the compiler."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for real in ("libc.so.6", "libm.so.6", "libstdc++.so.6"):
        library = file_of(real)
        for name, symbols in older_symbols(library).items():
            written.append(real if name == library.name else name)
            write_library(folder, written[-1], symbols)
    (folder / "added.c").write_text(ADDED)
    subprocess.run(["gcc", "-c", "-fPIC", "-o", folder / "added.o", folder / "added.c"], check=True)
    subprocess.run(["ar", "rcs", folder / "libadded.a", folder / "added.o"], check=True)
    parts = " ".join(str(folder / name) for name in PARTS if name in written)
    parts = f"AS_NEEDED({parts} {file_of('ld-linux-x86-64.so.2')})"
    scripts = {
        "libc.so": f"GROUP({folder}/libc.so.6 {file_of('libc_nonshared.a')} {folder}/libadded.a {parts})",
        "libm.so": f"GROUP({folder}/libm.so.6)",
        "libstdc++.so": f"GROUP({folder}/libstdc++.so.6 {file_of('libstdc++.a')})",
    }
    for name, text in scripts.items():
        (folder / name).write_text(text + "\n")
    compiler = folder / "c++"
    # Each symbol has to be found, but for those of libraries of this system, such as that of GCC. What came from static
    # libraries is not offered to others.
    flags = "-Wl,-z,defs,--allow-shlib-undefined,--exclude-libs,libstdc++.a:libadded.a"
    compiler.write_text(f'#!/bin/sh\nexec g++ -L"{folder}" {flags} "$@"\n')
    compiler.chmod(0o755)
    return compiler


def main() -> None:
    """Write the folder and print the compiler."""
    parser = argparse.ArgumentParser(description="Write a compiler for systems with an older C library.")
    parser.add_argument("folder", type=Path)
    print(write_folder(parser.parse_args().folder.resolve()))


if __name__ == "__main__":
    main()
