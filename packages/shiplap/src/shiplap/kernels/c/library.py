"""Kernel libraries, found by path and loaded once, never at import."""

from __future__ import annotations

import ctypes
import os
import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from shiplap.declare.code_files import file_digest
from shiplap.declare.native_interface import NativeForm
from shiplap.dispatch.op import Op
from shiplap.dispatch.registry import command_target, declared_op_list
from shiplap.errors import ShiplapError, error
from shiplap.settings import settings


class CompiledLibrary(Protocol):
    """The interface of a kernel library that Shiplap compiles from sources. Code that builds or opens libraries calls
    only these methods and attributes.
    """

    @property
    def prototype(self) -> str:
        """The declared prototype of the library's function, on one line of C."""

    def locate(self) -> Path:
        """Return the library's file. Raise ``SL420`` if it is not compiled."""

    def compile(self) -> Path:
        """Compile the library unless it is compiled already. Return its file. Raise ``SL421`` to ``SL423`` if it cannot
        be compiled.
        """


MODULE_TO_IMPORT = (
    "The command imports what declares the op. If that is a script, first move the declaration and its kernel to a "
    "module that does not call the op"
)
source_libraries: dict[Path, CompiledLibrary] = {}  # by the path that the kernel form names


def locate_library(path: str | os.PathLike[str]) -> Path:
    """Return the file of the library ``path``.

    If ``path`` stands for a library of ``sl.source``, return the compiled library. Otherwise look for the name of
    ``path`` in the folder that the environment variable ``SHIPLAP_LIBRARY_PATH`` names, and then for ``path``. Return
    the first file that exists, with symbolic links resolved. Raise ``SL401`` if there is none, or ``SL420`` if a
    library of ``sl.source`` is not compiled.
    """
    wanted = Path(path)
    if (compiled := source_libraries.get(wanted)) is not None:
        return compiled.locate()
    candidates = [Path(settings().library_path) / wanted.name] if settings().library_path else []
    candidates.append(wanted)
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    fix = (
        "correct the path in sl.cabi(...), build the library at that path, or set SHIPLAP_LIBRARY_PATH to the folder "
        f"that has {wanted.name}"
    )
    expected = " or ".join(map(str, candidates))
    raise error("SL401", where=str(wanted.name), got="no such file", expected=expected, fix=fix)


def library_digest(path: str | os.PathLike[str]) -> str:
    """Return the digest of the content of the library that :func:`locate_library` finds, or an empty string if it finds
    none.
    """
    try:
        return file_digest(locate_library(path))
    except ShiplapError:
        return ""


@cache
def _open_library(path: Path) -> ctypes.CDLL:
    """Return the library ``path``, opened with ctypes once per process. Raise ``SL401`` if the loader refuses it."""
    try:
        # RTLD_LOCAL: two libraries may define one name. RTLD_NOW: a missing symbol shows at once.
        return ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as e:
        expected, fix = "a library that the loader accepts", _fix_of_loader_error(path, str(e))
        raise error("SL401", where=str(path), got=str(e), expected=expected, fix=fix) from None


def _fix_of_loader_error(path: Path, message: str) -> str:
    """Return the fix for the loader's ``message`` about the library ``path``."""
    absent = re.match(r"([^\s:]+): cannot open shared object file", message)
    if absent is not None and absent[1] != str(path):
        return (
            f"{path.name} is linked with {absent[1]}, which the loader does not find. Link {path.name} with "
            f"-Wl,-rpath,FOLDER, where FOLDER is the folder of {absent[1]} (in sl.source, this is an item of flags=), "
            "or add that folder to the environment variable LD_LIBRARY_PATH before Python starts"
        )
    # The loader may name the version of the symbol after a comma.
    undefined = re.search(r"undefined symbol: ([^\s,]+)", message)
    if undefined is not None:
        return (
            f"add the source that defines {demangled(undefined[1])}, or link {path.name} with the library that defines "
            "it (in sl.source, name the library in libraries=)"
        )
    if re.search(r"version `[^']+' not found", message):
        return f"build {path.name} again on this system, or on one with an older C library"
    return f"build {path.name} again for this machine and operating system"


def load_symbol(form: NativeForm) -> Any:
    """Return the C function of ``form``, which names the library and the function of a kernel. Check that the library
    was built for the declaration.

    Raises:
        LibraryError: ``SL401`` or ``SL402`` if the library or the function is missing. ``SL403`` if the library was
            built for another declaration. ``SL403`` also if it does not state for which one, unless
            ``form.without_signature`` is true.
    """
    file, symbol = locate_library(form.library), form.symbol
    library = _open_library(file)
    try:
        function = getattr(library, symbol)
    except AttributeError:
        raise _missing_symbol_error(form.library, file, symbol) from None
    where, stamp = f"{file.name}: {symbol}", getattr(library, f"{symbol}_signature", None)
    if stamp is not None:
        # The default, int, would cut the address of the text.
        stamp.restype = ctypes.c_char_p
        stamped = stamp().decode()
        if stamped != form.signature:
            raise _other_declaration_error(form, where, stamped)
    elif not form.without_signature:
        raise error(
            "SL403",
            what="the library does not say for which declaration it was built",
            where=where,
            got=f"no function {symbol}_signature",
            expected=f"{symbol}_signature, which SL_SIGNATURES of the header defines",
            fix=(
                f"write the header with: {_header_command(form)}. {MODULE_TO_IMPORT}. Include the header in one source "
                f"file of the library, and write the line SL_SIGNATURES once below the #include. Give {symbol} its "
                "prototype in the header, and build again. If you cannot build the library, compare its parameters "
                "with the header, and pass sl.cabi(..., without_signature=True): then nothing checks them"
            ),
        )
    function.restype = ctypes.c_int
    return function


def _op_with_signature(signature: str) -> str:
    """Return the name of the declared op with a C kernel whose prototype has the digest ``signature``. Return an empty
    string if this process has no such op.
    """
    return next((op.spec.name for op in declared_op_list() if any(f.signature == signature for f in _forms(op))), "")


def _forms(op: Op) -> list[NativeForm]:
    """Return the C functions behind the kernels of ``op``."""
    return [k.native for kernels in op.kernels.values() for k in kernels if k.native is not None]


def _header_command(form: NativeForm) -> str:
    """Return the command that writes the header with the prototype of ``form``."""
    return f"shiplap header {command_target(_op_with_signature(form.signature))} -o mylib.h"


def _other_declaration_error(form: NativeForm, where: str, stamped: str) -> ShiplapError:
    """Return the error ``SL403`` for a library that was built for the declaration with the digest ``stamped``, and not
    for that of ``form``.
    """
    built, wanted = _op_with_signature(stamped), _op_with_signature(form.signature)
    got = f"{stamped}, the signature of {built}" if built else f"{stamped}, which no C kernel of a declared op has"
    expected = f"{form.signature}, the signature of {wanted}" if wanted else form.signature
    fix = (
        f"bind {form.symbol} to {built}, or name the function of {wanted} in sl.cabi(...)"
        if built and wanted and built != wanted
        else f"if {form.symbol} was written for an earlier form of this op, write the header again with: "
        f"{_header_command(form)}. {MODULE_TO_IMPORT}. Correct the function where its prototype in the header has "
        "changed, and build the library again. If it belongs to another op, name the function of this op in "
        "sl.cabi(...)"
    )
    return error("SL403", where=where, got=got, expected=expected, fix=fix)


def _defined_functions(file: Path, table: str) -> list[str]:
    """Return the names of the functions that the library ``file`` defines, as the linker knows them, sorted. ``table``
    is the section that lists them: ``.dynsym`` has those that a program can look up, and ``.symtab`` all of them. The
    list is empty if the file cannot be read as an ELF file.
    """
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    try:
        with file.open("rb") as opened:
            section = ELFFile(opened).get_section_by_name(table)
            symbols = list(section.iter_symbols()) if isinstance(section, SymbolTableSection) else []
            return sorted(
                s.name for s in symbols if s["st_info"]["type"] == "STT_FUNC" and s["st_shndx"] != "SHN_UNDEF"
            )
    except Exception:  # a damaged file makes the reader raise errors of many kinds
        return []


def demangled(name: str) -> str:
    """Return the C++ function that the linker knows as ``name``, with its parameters, such as ``mine::f(int)``. Return
    ``name`` itself if it is no such name, or if the C++ library is not there.
    """
    if not name.startswith("_Z"):
        return name  # a C function named f would be read as the type float
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return name
    status = ctypes.c_int()
    library.__cxa_demangle.restype = ctypes.c_void_p
    address = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if not address:
        return name
    text = ctypes.string_at(address).decode(errors="replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(address))
    return text


def _missing_symbol_error(library: Path, file: Path, symbol: str) -> ShiplapError:
    """Return the error ``SL402`` for the library ``file`` without the function ``symbol``. ``library`` is the path that
    the kernel declares, by which a library of ``sl.source`` is known. Its fix is then the edit of the source, and the
    expected prototype is shown if the library has a C++ function of that name with other parameters.
    """
    fix, got, expected = "", "no such symbol", symbol
    if library in source_libraries:
        declared = source_libraries[library].prototype
        functions = [demangled(name) for name in _defined_functions(file, ".symtab") if name.startswith("_Z")]
        within = next((f for f in functions if f"::{symbol}(" in f), "")
        if f"_Z{len(symbol)}{symbol}P".encode() in file.read_bytes():
            got, expected = f"a C++ function {symbol} with other parameters", declared
            fix = (
                f"add an adapter to the sources: a function of another name, such as {symbol}_kernel, with the "
                f"parameters under 'expected', which calls {symbol}. Pass its name as symbol= of sl.source, and build "
                f"the op again. If {symbol} is to be the kernel itself, give it these parameters"
            )
        elif within:
            got, expected = f"the C++ function {within}", declared
            namespace = within.partition(f"::{symbol}(")[0]
            # The anonymous namespace has no name by which a function in it could be called beside another one.
            beside = (
                f", or define {symbol} outside of it with the prototype under 'expected' and call "
                f"{namespace}::{symbol} there"
            )
            fix = f"move {symbol} out of its namespace{beside * ('(' not in namespace)}, and build the op again"
        else:
            expected = declared
            fix = (
                f"define {symbol} in the source as an ordinary function, which is neither static nor a template, with "
                "the prototype under 'expected', or pass the name of the function as symbol= of sl.source, and build "
                "the op again"
            )
    # Names with an underscore are those of the runtime and of C++, and signatures are no kernels.
    elif names := [n for n in _defined_functions(file, ".dynsym") if n[0] != "_" and not n.endswith("_signature")]:
        near = get_close_matches(symbol, names, 3) or names[:5]
        expected = f"a function of the library, such as {', '.join(near)}"
    return error("SL402", where=f"{file.name}: {symbol}", got=got, expected=expected, fix=fix)
