"""Find the writable memory of a shared library in its ELF sections and symbols."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

# What compilers and runtimes put there themselves, and who it belongs to. Nothing else is set aside.
RUNTIME_SYMBOLS = {
    "__dso_handle": "C runtime",
    "__TMC_END__": "C runtime",
    "completed.*": "C runtime",
    "__bss_start": "linker",
    "_edata": "linker",
    "_end": "linker",
    "_GLOBAL_OFFSET_TABLE_": "linker",
    "DW.ref.*": "C++ exceptions",
    "__cpu_model": "CPU detection of libgcc",
    "__cpu_features2": "CPU detection of libgcc",
    "_ZGV*": "guard of a C++ static, listed under its own name",
    "_ZStL8__ioinit": "iostream start-up",
    "__gcov*": "coverage counters",
    "__asan*": "sanitizer",
    "__odr_asan*": "sanitizer",
    "*.LASAN*": "sanitizer",
    "__*san_*": "sanitizer",
    "__sancov*": "sanitizer",
    "__llvm_*": "coverage counters",
}
STATIC_RUNTIME_PREFIXES = (  # a static libstdc++: its own namespaces
    "_ZNSt",
    "_ZNKSt",
    "_ZNSs",
    "_ZNSb",
    "_ZSt",
    "_ZZNSt",
    "_ZN10__cxxabiv1",
    "_ZZN10__cxxabiv1",
    "_ZN9__gnu_cxx",
    "_ZZN9__gnu_cxx",
    "_ZN14__gnu_internal",
)
# Sections in which a compiler for GPUs puts device code and its registration → the runtime that reads them.
OFFLOAD_SECTIONS = {
    ".nv_fatbin": "CUDA runtime",
    ".nvFatBinSegment": "CUDA runtime",
    ".hip_fatbin": "HIP runtime",
    ".hipFatBinSegment": "HIP runtime",
}
# Namespaces of the header libraries that come with these compilers. Templates in them keep caches of attributes of
# devices and names for profilers, of which each library gets a copy. Each of these headers puts its code into a
# namespace with its version, which tells it from a namespace of an author with the same name. CUB and Thrust may be
# wrapped in a namespace of the author's.
VENDOR_NAMESPACES = {
    r"(\w+::)*cub::CUB_\d+\w*": "CUB",
    r"(\w+::)*thrust::THRUST_\d+\w*": "Thrust",
    r"cuda::(std|(\w+::)*__\w+)": "libcu++",
    r"nvtx3::v\d+": "NVTX",
    r"hipcub::HIPCUB_\d+\w*": "hipCUB",
    r"rocprim::ROCPRIM_\d+\w*": "rocPRIM",
}
# Variables without a namespace of the vendor's headers: of the profiler, of which CUB includes a copy, the tables of
# the generators of random numbers, of which each library that includes the header gets a copy, used or not, and what
# nvcc writes to register several files that it links for the device (-rdc=true), one pointer for each file.
VENDOR_C_VARIABLES = {
    "NVTX": re.compile(r"nvtxGlobals_v\d+|InitializeInjectionNvtx\d*_fnptr"),
    "cuRAND": re.compile(
        r"(_ZL\d+)?(precalc_xorwow_(offset_)?matrix(_host)?|mrg32k3aM[12]((Sub)?Seq)?(Host)?|__cr_lgamma_table)"
    ),
    "nvcc's linker": re.compile(
        r"_ZL\d+__cudaPrelinkedFatbins|_ZZL\d+__cudaRegisterLinkedBinary\w+E\d+__callback_array"
    ),
}
# The start of the name of a variable of C++ in a namespace, or of the function whose static it is.
NESTED_NAME = re.compile(r"_Z+N[rVKRO]*")
# A name that C++ reserves for the compiler: of the variable itself, or of the function whose static it is.
RESERVED_NAME = re.compile(r"(_ZZ?L?\d+)?__(?!_*$)\w+")
REGISTRATION_BYTES = 16  # a handle or a flag of a registration: a larger static is a buffer, whatever its name
# The names of a vendor's static library: its own name, and a digest in place of each symbol.
VENDOR_STATIC = re.compile(r"lib(\w+?)_static_[0-9a-f]{32,}")
LINKED_RUNTIME_NAME = "C++ runtime, linked in"
EMPTY_SECTION_BYTES = {".data": 16, ".bss": 16}  # what an empty library has, with its alignment


@dataclass(frozen=True)
class WritableSymbol:
    """A variable in writable memory, with its name and its size in bytes. ``kind`` is ``"global"`` if the process has
    one copy, and ``"thread-local"`` if each thread has its own.
    """

    name: str
    size: int
    kind: str

    def __str__(self) -> str:
        """Return ``name (size bytes, kind)``."""
        return f"{self.name} ({self.size} bytes, {self.kind})"


@dataclass(frozen=True)
class LibraryState:
    """The variables in the writable memory of a library, in groups.

    Attributes:
        symbols: the library's own variables, which are certainly state.
        runtime: variables of a language runtime, each with the name of that runtime.
        nameless: (section, bytes) of the sections with variables that have no symbol, because the library was stripped.
        linked_in: whether a C++ runtime is part of the library. Nameless and local variables may then be the runtime's.
        declared: globals that the library admits, each with its reason. Thread-local variables are never among them.
    """

    symbols: tuple[WritableSymbol, ...] = ()
    runtime: tuple[str, ...] = ()
    nameless: tuple[tuple[str, int], ...] = ()
    linked_in: bool = False
    declared: tuple[str, ...] = ()


KEEPS_SYMBOL = (
    "shiplap_keeps"  # an exported const char[] with a line "name: reason" for each global that a library admits
)


def read_library_state(library: Path) -> LibraryState:
    """Return the global and thread-local variables in the writable memory of the shared ``library``. Raise
    ``ValueError`` if the file has no readable ELF symbol table.
    """
    return _read_cached(library, library.stat().st_mtime_ns)


def compilers_of_library(library: Path) -> tuple[str, ...]:
    """Return the strings by which compilers have identified themselves in the ``.comment`` section of ``library``,
    sorted. The tuple is empty if that section was stripped or the file is not an ELF file.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with library.open("rb") as file:
            section = ELFFile(file).get_section_by_name(".comment")
            text = section.data().decode(errors="replace") if section is not None else ""
    except (ELFError, OSError):
        return ()
    return tuple(sorted({part.strip() for part in text.split("\0") if part.strip()}))


@cache
def _read_cached(library: Path, changed: int) -> LibraryState:
    """Return the variables in the writable memory of ``library``, read from its ELF symbols. Raise ``ValueError`` if
    there is no readable symbol table. ``changed`` is the time of the file's last change. It is not read, but is a part
    of the cache's key.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with library.open("rb") as file:
            elf = ELFFile(file)
            tables = [elf.get_section_by_name(name) for name in (".symtab", ".dynsym")]
            table = next(t for t in tables if t is not None)
            symbols = _separate_admitted(_read_symbols(elf, table), _read_constant(elf, table, KEEPS_SYMBOL))
            return replace(symbols, nameless=_unnamed_bytes(elf, symbols)) if tables[0] is None else symbols
    except (ELFError, StopIteration) as e:
        raise ValueError(f"{library.name} has no readable ELF symbol table: {e}") from None


def _kind_of_section(name: str) -> str:
    """Return ``"thread-local"`` or ``"global"`` for the name of a writable ELF section, and an empty string for another
    section. ``.data.rel.ro`` is not writable, since only the loader writes to it.
    """
    if name.startswith((".tbss", ".tdata")):
        return "thread-local"
    return "global" if name.startswith((".data", ".bss")) and not name.startswith(".data.rel.ro") else ""


def _read_symbols(elf: Any, table: Any) -> LibraryState:
    """Return the writable variables in ``table``, a symbol table of the file ``elf``. Those that compilers or runtimes
    added are listed apart from those of the library.
    """
    admitted: dict[WritableSymbol, bool] = {}  # → whether it is local to a source file
    runtime: dict[str, None] = {}
    linked_in = False
    offload = next((owner for name, owner in OFFLOAD_SECTIONS.items() if elf.get_section_by_name(name)), "")
    for entry in table.iter_symbols():
        index, kind = entry["st_shndx"], entry["st_info"]["type"]
        if isinstance(index, str) or kind not in ("STT_OBJECT", "STT_TLS", "STT_COMMON", "STT_NOTYPE", "STT_LOOS"):
            continue  # undefined, absolute, functions, sections, file names
        where = _kind_of_section(elf.get_section(index).name)
        if not where or (kind == "STT_NOTYPE" and not entry["st_size"]):
            continue
        owner = _owner_of_symbol(entry.name) or _vendor_of_symbol(entry.name, entry["st_size"], offload)
        if owner:
            runtime[f"{entry.name} ({owner})"] = None
            linked_in = linked_in or owner == LINKED_RUNTIME_NAME
        else:
            admitted[WritableSymbol(entry.name, entry["st_size"], where)] = entry["st_info"]["bind"] == "STB_LOCAL"
    # A local symbol may be one of the linked runtime.
    certain = [s for s, local in admitted.items() if not (linked_in and local)]
    return LibraryState(tuple(sorted(certain, key=lambda s: (s.kind, s.name))), tuple(sorted(runtime)), (), linked_in)


def _read_constant(elf: Any, table: Any, name: str) -> str:
    """Return the value of the constant string with the symbol ``name`` in ``table``, a symbol table of the ELF file
    ``elf``. Return an empty string if there is no such symbol.
    """
    for entry in table.get_symbol_by_name(name) or ():
        section = elf.get_section(entry["st_shndx"]) if not isinstance(entry["st_shndx"], str) else None
        if section is not None and not _kind_of_section(section.name):
            start = entry["st_value"] - section["sh_addr"]
            data: bytes = section.data()
            return data[start : start + entry["st_size"]].rstrip(b"\0").decode(errors="replace")
    return ""


def _separate_admitted(state: LibraryState, text: str) -> LibraryState:
    """Return a copy of ``state`` with the globals that the library admits moved from ``symbols`` to ``declared``.

    ``text`` is a constant string in the library. Each of its lines ``symbol: reason`` says why a variable is harmless.
    """
    reasons = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    admitted = [s for s in state.symbols if s.kind == "global" and s.name in reasons]
    others = tuple(s for s in state.symbols if s not in admitted)
    return replace(state, symbols=others, declared=tuple(f"{s.name} ({reasons[s.name]})" for s in admitted))


def _owner_of_symbol(name: str) -> str:
    """Return the name of the compiler or runtime that adds a symbol called ``name`` to libraries. Return an empty
    string if the variable is the library's own.
    """
    known = next((why for pattern, why in RUNTIME_SYMBOLS.items() if fnmatch.fnmatchcase(name, pattern)), "")
    return known or (LINKED_RUNTIME_NAME if name.startswith(STATIC_RUNTIME_PREFIXES) else "")


def _vendor_of_symbol(name: str, size: int, offload: str) -> str:
    """Return the name of the runtime or header library of a GPU's vendor to which a symbol belongs, or an empty string
    for a symbol of the library itself.

    ``offload`` is the runtime with which the library's device code is registered, or an empty string. ``size`` is the
    symbol's size in bytes. A variable of the device's code has a copy on the host under the author's name, and this
    copy counts as the library's own.
    """
    if archive := VENDOR_STATIC.fullmatch(name):
        return f"{archive[1]}, linked in"
    if offload and (header := _vendor_header_of_symbol(name)):
        return header
    return offload if offload and size <= REGISTRATION_BYTES and RESERVED_NAME.fullmatch(name) else ""


def _vendor_header_of_symbol(name: str) -> str:
    """Return the name of the vendor's header library that defines a variable called ``name``, such as ``"CUB"``. Return
    an empty string if none does. For a name with namespaces these decide.
    """
    if header := next((owner for owner, names in VENDOR_C_VARIABLES.items() if names.fullmatch(name)), ""):
        return header
    path = "::".join(_namespaces_of_symbol(name))
    return next((owner for pattern, owner in VENDOR_NAMESPACES.items() if re.match(rf"{pattern}(::|$)", path)), "")


def _namespaces_of_symbol(name: str) -> list[str]:
    """Return the names of the namespaces and classes around a variable of C++ with the mangled name ``name``, or around
    the function whose static it is, from the outermost one on. The variable's own name, or the function's, may be the
    last one. The list is empty for a variable outside of all namespaces.
    """
    names: list[str] = []
    start = NESTED_NAME.match(name)
    at = start.end() if start else len(name)
    while length := re.compile(r"\d+").match(name, at):
        at = length.end() + int(length[0])
        names.append(name[length.end() : at])
    return names


def _unnamed_bytes(elf: Any, state: LibraryState) -> tuple[tuple[str, int], ...]:
    """Return (name, size in bytes) of each writable section of the stripped library ``elf`` that holds variables
    without a name. Such a section is larger than the C runtime's own data and the exported variables in ``state``
    together.
    """
    exported = sum(s.size for s in state.symbols)
    sizes = [(s.name, s["sh_size"]) for s in elf.iter_sections() if _kind_of_section(s.name)]
    return tuple((name, size) for name, size in sizes if size > EMPTY_SECTION_BYTES.get(name, 0) + exported)
