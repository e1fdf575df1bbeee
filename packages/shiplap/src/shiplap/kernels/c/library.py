"""Find and load kernel libraries: by path, once, never at import."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

from shiplap.errors import error
from shiplap.settings import settings


def locate(path: str | os.PathLike[str]) -> Path:
    """The file to load: ``SHIPLAP_LIBRARY_PATH`` first, then ``path`` itself. SL401 when neither is there."""
    wanted = Path(path)
    candidates = [Path(settings().library_path) / wanted.name] if settings().library_path else []
    candidates.append(wanted)
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    raise error("SL401", where=str(wanted.name), got="no such file", expected=" or ".join(map(str, candidates)))


@cache
def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as e:
        raise error("SL401", where=str(path), got=str(e), expected="a library that the loader accepts") from None


def load_symbol(path: str | os.PathLike[str], symbol: str, signature: str) -> Any:
    """The C function ``symbol``. SL402 if absent, SL403 if the library was built for another declaration."""
    file = locate(path)
    library = _open(file)
    try:
        function = getattr(library, symbol)
    except AttributeError:
        raise error("SL402", where=f"{file.name}: {symbol}", got="no such symbol", expected=symbol) from None
    stamp = getattr(library, f"{symbol}_signature", None)  # a library of someone else has none: nothing to compare
    if stamp is not None:
        stamp.restype = ctypes.c_char_p
        stamped = stamp().decode()
        if stamped != signature:
            raise error("SL403", where=f"{file.name}: {symbol}", got=stamped, expected=signature)
    function.restype = ctypes.c_int
    return function
