"""The cache folder of compiled bindings. A library is loaded through the descriptor by which it was checked."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hmac
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shiplap import safe_io
from shiplap.errors import error, notice
from shiplap.kernels.native.build import KEYED_SEAL, LIBRARY, SEAL, keyed_seal, seal_text, user_key
from shiplap.settings import settings

CACHE_CAPACITY_BYTES = 1 << 30  # bytes that compiled bindings may take before the oldest go
STALE_AFTER_S = 86400.0  # seconds after which what nobody finished is rubbish

_loaded_libraries: dict[Path, ctypes.CDLL] = {}


def cache_folder(op: str) -> Path:
    """Return the folder of compiled bindings, which is created if it is missing. Raise ``SL406``, with the op's name,
    if other users could write to it or if it cannot be created.
    """
    root = cache_root()
    try:
        os.close(safe_io.open_folder(root.parent, safe_io.OWN, create=True))
        os.close(safe_io.open_folder(root, safe_io.OWN, create=True))
    except OSError as e:
        raise _untrusted_cache_error(op, e) from None
    return root


def cache_root() -> Path:
    """Return the folder of compiled bindings below the configured cache folder. It need not exist."""
    return Path(settings().cache_dir).absolute() / "native"


def is_library_present(place: Path, op: str, rule: safe_io.OwnershipRule = safe_io.CODE) -> bool:
    """Return whether the folder ``place`` has a complete library with valid seals (checksums). Raise ``SL406``, with
    the name ``op``, if a user whom ``rule`` excludes could have written it.
    """
    try:
        os.close(_open_checked_library(place, rule))
    except safe_io.Distrusted as e:
        raise _untrusted_cache_error(op, e) from None
    # Missing or damaged: it is built again.
    except OSError:
        return False
    return True


def load_library(place: Path, op: str, rule: safe_io.OwnershipRule = safe_io.CODE) -> ctypes.CDLL:
    """Return the native library in the folder ``place``, loaded once in a process. It is loaded through the file
    descriptor by which its owner and its seals (checksums) were checked.

    ``rule`` states which owners are accepted. Raise ``SL405`` or ``SL406``, with the name ``op``, if a check fails. The
    descriptor stays open, because the loader identifies a library by its name ``/proc/self/fd/<n>``. That name must not
    refer to another file later.
    """
    path = place / LIBRARY
    if path in _loaded_libraries:
        return _loaded_libraries[path]
    try:
        handle = _open_checked_library(place, rule)
    except safe_io.Distrusted as e:
        raise _untrusted_cache_error(op, e) from None
    except OSError as e:
        raise error(
            "SL405", where=str(path), got=safe_io.unsafe_reason(e), expected="a library as it was built"
        ) from None
    # By descriptor: the checked file is opened, whatever lies under the path by now.
    name = f"/proc/self/fd/{handle}"
    try:
        library = ctypes.CDLL(name if os.path.exists(name) else str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as e:
        os.close(handle)
        raise error("SL405", where=str(path), got=str(e), expected="a library that the loader accepts") from None
    if place.parent == cache_root():
        with contextlib.suppress(OSError):
            os.utime(place)  # used now: others are evicted before it
    _loaded_libraries[path] = library
    return library


def find_library(place: Path, op: str) -> ctypes.CDLL | None:
    """Return the library in the folder ``place``, loaded once in a process. Return None if the folder has no library
    with valid seals. Raise the errors of :func:`load_library`.
    """
    there = place / LIBRARY in _loaded_libraries or is_library_present(place, op)
    return load_library(place, op) if there else None


def _open_checked_library(place: Path, rule: safe_io.OwnershipRule = safe_io.CODE) -> int:
    """Return a descriptor of the library in ``place`` after checking the owners of its files and its seals (checksums).
    ``rule`` states which owners are accepted. Raise ``OSError`` if a check fails. It is ``safe_io.Distrusted`` if a
    user whom ``rule`` excludes could have written a file.
    """
    handle = safe_io.open_file(place / LIBRARY, rule)
    try:
        with os.fdopen(handle, "rb", closefd=False) as file:
            seal = seal_text(place.name, file)
        if safe_io.read_file(place / SEAL, 4096, rule) != seal.encode():
            raise OSError(0, "its seal does not fit", str(place))
        # A package has no keyed seal: it was built by somebody else.
        if rule == safe_io.CODE:
            _check_keyed_seal(place, seal)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _check_keyed_seal(place: Path, seal: str) -> None:
    """Check the keyed seal (an HMAC) of the library in ``place``, which proves that this user built the library.
    ``seal`` is the checksum of the library. If the keyed seal is missing or wrong, issue a notice and raise
    ``OSError``.
    """
    _, unkept = user_key()
    if unkept:
        notice(
            "seal key",
            f"compiled bindings are built anew in each process: the secret of their seals cannot be kept ({unkept}); "
            "set HOME or XDG_DATA_HOME to a folder that only you can write",
        )
    try:
        keyed = safe_io.read_file(place / KEYED_SEAL, 4096)
    except FileNotFoundError:
        keyed = b""
    # ``compare_digest`` takes the same time for every wrong seal, so that its time reveals nothing about the right one.
    if not hmac.compare_digest(keyed, keyed_seal(seal).encode()):
        if not unkept:
            notice(
                f"foreign cache {place.parent}",
                f"bindings in {place.parent} are built anew: this user has not compiled them, or has a new secret",
            )
        raise OSError(errno.EPERM, "its seal is not of this user", str(place))


def _untrusted_cache_error(op: str, e: OSError) -> Exception:
    """Return the error ``SL406`` for a cache that could not be opened because of ``e``. If others could have written a
    file or folder of the cache, the error says that it must be removed.
    """
    got, expected = safe_io.unsafe_reason(e), "a directory of mode 700 that you own"
    fix = "set SHIPLAP_CACHE_DIR to a directory that you own, below directories that only you can write"
    if not isinstance(e, safe_io.Distrusted):
        return error("SL406", where=op, what="the cache directory cannot be used", got=got, expected=expected, fix=fix)
    if e.strerror == safe_io.NO_REGULAR_FILE:
        what, fix = "a file of the cache cannot be used", f"remove {e.filename}"
        return error("SL406", where=op, what=what, got=got, expected="a file as it was built", fix=fix)
    fix = f"remove {e.filename} with all it holds, since others may have put code there; or {fix}"
    return error("SL406", where=op, got=got, expected=expected, fix=fix)


# --- what lies there --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Artefact:
    """A compiled library in the cache.

    Attributes:
        path: its folder.
        size: its size in bytes.
        used: the time of its last use, in seconds since the epoch.
    """

    path: Path
    size: int
    used: float


def cached_artefacts(root: Path) -> list[Artefact]:
    """Return all compiled libraries in the cache folder ``root``, sorted by the time of their last use. The one that
    was used last comes last.
    """
    kept = [path for path in _listed_folders(root) if not path.name.startswith(".") and path.suffix != ".lock"]
    listed = [Artefact(path, _folder_size(path), _last_use_time(path)) for path in kept]
    return sorted(listed, key=lambda a: (a.used, a.path.name))


def artefact_problem(artefact: Artefact) -> str:
    """Return the reason why the library ``artefact`` in the cache will not be loaded, or an empty string if it can be
    loaded.
    """
    try:
        os.close(_open_checked_library(artefact.path))
    except OSError as e:
        return safe_io.unsafe_reason(e)
    return ""


def stale_build_files(root: Path) -> Iterator[Path]:
    """Yield the paths in ``root`` that killed builders left more than a day ago. They are folders of unfinished builds,
    and lock files without a library.
    """
    for path in _listed_folders(root):
        left = path.name.startswith(".") or (path.suffix == ".lock" and not (root / path.stem).exists())
        if left and time.time() - _last_use_time(path) > STALE_AFTER_S:
            yield path


def evict_artefacts(root: Path, cap: int = CACHE_CAPACITY_BYTES) -> list[Path]:
    """Remove the least recently used libraries in ``root`` until those that are left take at most ``cap`` bytes. Return
    the removed paths.
    """
    listed, gone = cached_artefacts(root), []
    total = sum(a.size for a in listed)
    for each in listed:
        if total <= cap:
            break
        if remove_artefact(each.path):
            total -= each.size
            gone.append(each.path)
    return gone


def remove_artefact(path: Path) -> bool:
    """Remove the folder ``path`` of a compiled library. A file or symbolic link at that path is removed, too. Return
    whether the path is gone. Loaded libraries keep working.
    """
    try:
        # A symbolic link is removed itself, and not the directory behind it.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return not os.path.lexists(path)


def _listed_folders(root: Path) -> list[Path]:
    """Return the paths in ``root``, sorted, or an empty list if the folder cannot be read."""
    try:
        return sorted(root.iterdir())
    # There is no cache before the first build.
    except OSError:
        return []


def _folder_size(path: Path) -> int:
    """Return the size in bytes of a file, or of all files directly in a folder. Return 0 if the path cannot be read."""
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            return path.lstat().st_size
        return sum(file.lstat().st_size for file in path.iterdir())
    except OSError:
        return 0


def _last_use_time(path: Path) -> float:
    """Return the time of the last change of ``path`` in seconds since the epoch, or 0 if the path does not exist. The
    path of a symbolic link is that of the link itself.
    """
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
