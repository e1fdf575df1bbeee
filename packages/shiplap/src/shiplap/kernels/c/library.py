"""Kernel libraries, found by path and loaded once, never at import."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from shiplap.declare.code_files import file_digest
from shiplap.declare.native_interface import NativeForm
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
        raise error("SL401", where=str(path), got=str(e), expected="a library that the loader accepts") from None


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
            raise error("SL403", where=where, got=stamped, expected=form.signature)
    elif not form.without_signature:
        raise error(
            "SL403",
            what="the library does not say for which declaration it was built",
            where=where,
            got=f"no function {symbol}_signature",
            expected=f"{symbol}_signature, which SL_SIGNATURES of the header defines",
            fix=(
                "write the header with: shiplap header mylib.ops -o mylib.h, where mylib.ops is the module of the op. "
                "Include it in one source file of the library, write SL_SIGNATURES below it, and build again. If you "
                "cannot build the library, compare its parameters with the header, and pass sl.cabi(..., "
                "without_signature=True): then nothing checks them"
            ),
        )
    function.restype = ctypes.c_int
    return function


def _missing_symbol_error(library: Path, file: Path, symbol: str) -> ShiplapError:
    """Return the error ``SL402`` for the library ``file`` without the function ``symbol``. ``library`` is the path that
    the kernel declares, by which a library of ``sl.source`` is known. Its fix is then the edit of the source, and the
    expected prototype is shown if the library has a C++ function of that name with other parameters.
    """
    fix, got, expected = "", "no such symbol", symbol
    if library in source_libraries:
        # As C++ encodes a function of this name with a pointer as its first parameter.
        if f"_Z{len(symbol)}{symbol}P".encode() in file.read_bytes():
            got = f"a C++ function {symbol} with other parameters"
            expected = source_libraries[library].prototype
        fix = (
            f"define {symbol} in the source with the prototype that shiplap header prints, or pass the name of the "
            "function as symbol= of sl.source, and build the op again"
        )
    return error("SL402", where=f"{file.name}: {symbol}", got=got, expected=expected, fix=fix)
