"""The folder of a sandboxed process: the environment variables that name it, and the file into which it prints."""

from __future__ import annotations

import fcntl
import io
import os
import tempfile

from shiplap.errors import error


def require_text_path(folder: str) -> None:
    """Raise ``SL617`` if the path of the temporary folder ``folder`` is not encoded in UTF-8: no message to a sandboxed
    process can have it.
    """
    try:
        folder.encode()
    except UnicodeEncodeError:
        what, expected = "the path of the temporary folder is not encoded in UTF-8", "a path whose bytes are UTF-8"
        fix = "set TMPDIR to a folder of another name"
        raise error("SL617", where="TMPDIR", what=what, got=ascii(folder), expected=expected, fix=fix) from None


def scratch_environment(scratch: str) -> dict[str, str]:
    """Return the environment variables by which programs and libraries put their files into the folder ``scratch``."""
    places = {"TMPDIR": scratch, "HOME": scratch, "TRITON_CACHE_DIR": f"{scratch}/triton"}
    places |= {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor", "SHIPLAP_CACHE_DIR": f"{scratch}/shiplap"}
    # Programs look for their folders by these names before they look in HOME.
    places |= {f"XDG_{kind}_HOME": f"{scratch}/{kind.lower()}" for kind in ("CACHE", "CONFIG", "DATA", "STATE")}
    return places | {"TORCH_EXTENSIONS_DIR": f"{scratch}/extensions", "TMP": scratch, "TEMP": scratch}


def open_unnamed_file(folder: str) -> io.FileIO:
    """Return a new file in ``folder`` for the output of a process, opened for appending. The file is unlinked, so that
    no other file can replace it.
    """
    handle, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_APPEND)
    return io.FileIO(handle, "r+")  # unlike a number, it can be closed by two threads


def read_last_line(output: io.FileIO) -> str:
    """Return the last line that is not blank of the last 2,000 bytes of the file ``output``. Return an empty string if
    there is none or another thread has closed the file.
    """
    try:
        handle = output.fileno()
        text = os.pread(handle, 2000, max(0, os.fstat(handle).st_size - 2000)).decode(errors="replace")
    except (OSError, ValueError):
        return ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
