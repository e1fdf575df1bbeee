"""Open a file or folder through descriptors, and refuse it if another user could have written it. Write files: at paths
that the user names, and files that are replaced whole or not at all.

Each step opens one name relative to the descriptor of the folder before it and never follows a link by itself. The
checked object is therefore the opened one, and nothing can be exchanged in between. A symbolic link on the way is
checked like a file, then its target is walked in turn. Nothing here blocks: only regular files are opened, a FIFO or a
device is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO

NO_REGULAR_FILE = "it is no regular file"
LINKS = 40  # symbolic links on one way, as in Linux
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Distrusted(OSError):
    """The error for a path that another user could have written. ``filename`` is the unsafe part of the path and
    ``strerror`` is the reason.
    """


@dataclass(frozen=True)
class OwnershipRule:
    """The users who may own and write a file and the folders above it.

    Attributes:
        owned: whether the owner has to be this user or root. Otherwise the owner may be any user, except in a folder
            that is sticky and open to all.
        group: whether the group may write, too.
        private: whether the last component has to belong to this user. Root is not accepted.
        everybody: whether users who are neither the owner nor in the group may write, too. Symbolic links in the path
            are checked nevertheless.
    """

    owned: bool = True
    group: bool = False
    private: bool = False
    everybody: bool = False


CODE = OwnershipRule()  # files that are loaded as code, and files of our cache
OWN = OwnershipRule(private=True)  # a folder that we make and fill
NAMED = OwnershipRule(owned=False, group=True)  # paths that the user, or the user's program, has named
OUTPUT = OwnershipRule(owned=False, group=True, everybody=True)  # folders of files that are written, and never read


def open_folder(path: str | os.PathLike[str], rule: OwnershipRule = CODE, *, create: bool = False) -> int:
    """Return a descriptor of the folder ``path`` if ``rule`` accepts the folder and every folder above it.

    If ``create`` is true, a missing folder is made with mode 700. Otherwise it is an error.

    Raises:
        Distrusted: another user could have written a part of the path.
        OSError: the path does not exist or is not a folder.
    """
    return _open_checked(path, rule, folder=True, create=create)


def open_file(path: str | os.PathLike[str], rule: OwnershipRule = CODE) -> int:
    """Return a descriptor for reading the regular file ``path``. Raise the errors of :func:`open_folder`."""
    return _open_checked(path, rule, folder=False)


def read_file(path: str | os.PathLike[str], limit: int, rule: OwnershipRule = CODE) -> bytes:
    """Return the content of the regular file ``path`` if ``rule`` accepts the file and the folders above it.

    Raise ``OSError`` with ``EFBIG`` if the content is longer than ``limit`` bytes. Raise the errors of
    :func:`open_folder`, too.
    """
    handle = open_file(path, rule)
    # One byte more than the limit is read: the size in the status of a file may change before the file is read.
    with os.fdopen(handle, "rb") as file:
        content = file.read(min(limit, os.fstat(handle).st_size) + 1)  # the memory is allocated at once
        while len(content) <= limit and (more := file.read(1 << 16)):  # it grows, or states no size
            content += more
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it is longer than {limit} bytes", os.fspath(path))
    return content


def check_content(path: str | os.PathLike[str], rule: OwnershipRule = CODE) -> None:
    """Raise ``Distrusted`` if the folder ``path``, in which this program will work, or a folder inside it holds a
    link, a FIFO or a device.

    Another user could have put one there before ``rule`` excluded that user. Work in the folder would then write to the
    target of the link, or wait for ever. Only users who may write the folder can add one later.

    Raises:
        Distrusted: a folder holds such an object, which the error names, or ``rule`` refuses a folder.
        OSError: the path does not exist or is not a folder.
    """
    handle = open_folder(path, rule)
    try:
        _check_below(handle, Path(path), rule, os.fstat(handle))
    finally:
        os.close(handle)


def _check_below(folder: int, at: Path, rule: OwnershipRule, above: os.stat_result) -> None:
    """Raise ``Distrusted`` if another user could change a folder below the open folder ``folder``.

    ``rule`` gives the owners and modes that are accepted. Raise ``Distrusted`` also for anything in these folders that
    is neither a regular file nor a folder. ``at`` is the path of ``folder``, and ``above`` is its status.
    """
    for name in os.listdir(folder):
        about = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(about.st_mode):
            inner = os.open(name, _FOLDER, dir_fd=folder)
            try:
                _check_below(
                    inner, at / name, rule, _check_ownership(os.fstat(inner), at / name, rule, above, last=True)
                )
            finally:
                os.close(inner)
        elif not stat.S_ISREG(about.st_mode):
            raise Distrusted(errno.EPERM, NO_REGULAR_FILE, str(at / name))


def unsafe_reason(e: Exception) -> str:
    """Return on one line why a path could not be opened safely. The line begins with the unsafe part of the path if
    ``e`` holds one.
    """
    if isinstance(e, OSError) and e.filename is not None:
        return f"{os.fsdecode(e.filename)}: {e.strerror}"
    return str(e)


def _open_checked(path: str | os.PathLike[str], rule: OwnershipRule, *, folder: bool, create: bool = False) -> int:
    """Return a descriptor of ``path``, opened one name at a time from the root.

    The path must name a folder if ``folder`` is true, and otherwise a regular file. If ``create`` is true, a missing
    folder is made. Otherwise it is an error. Raise ``Distrusted`` if ``rule`` does not accept the owner or the mode of
    a part of the path. Raise ``OSError`` if a part cannot be opened.
    """
    text = os.fspath(path)
    if not text or "\0" in text:
        raise OSError(errno.EINVAL, "an empty path or one with a NUL", text.replace("\0", "\\0"))
    # The walk begins at the root, as a folder above the working folder may belong to another user.
    start = text if os.path.isabs(text) else os.path.join(os.getcwd(), text)
    names = [n for n in start.split("/") if n not in ("", ".")]
    here, at, links = os.open("/", _FOLDER), Path("/"), 0
    try:
        above = _check_ownership(os.fstat(here), at, rule, None, last=folder and not names)
        while names:
            name, last = names[0], len(names) == 1
            target = _followed_link(here, name, at, rule, above)
            if target is not None:
                links += 1
                if links > LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
                # The target of a link is walked name by name as well.
                names = [*(n for n in target.split("/") if n not in ("", ".")), *names[1:]]
                if target.startswith("/"):
                    here, at = _open_and_close(here, "/", _FOLDER), Path("/")
                    above = os.fstat(here)
                continue
            here, at = _open_component(here, name, at, as_folder=folder or not last, create=create), at / name
            above = _check_ownership(os.fstat(here), at, rule, above, last=last, regular=last and not folder)
            names = names[1:]
    except BaseException:
        os.close(here)
        raise
    return here


def _followed_link(here: int, name: str, at: Path, rule: OwnershipRule, above: os.stat_result) -> str | None:
    """Return the target of ``name`` in the open folder ``here`` if it is a symbolic link, else None.

    Raise ``Distrusted`` for a link of another user if ``rule`` excludes such links or if all users may write in the
    folder. ``above`` is the status of the folder. ``at`` is its path, for the error.
    """
    try:
        target = os.readlink(name, dir_fd=here)
    except OSError:
        return None  # no link, or no such name: opening it raises the error
    about = os.stat(name, dir_fd=here, follow_symlinks=False)
    # A link that this user or root made leads where they meant it to.
    if about.st_uid not in (os.geteuid(), 0) and (rule.owned or rule.everybody or _open_to_all(above)):
        raise Distrusted(errno.EPERM, f"a link that belongs to another user (uid {about.st_uid})", str(at / name))
    return target


def _open_component(here: int, name: str, at: Path, *, as_folder: bool, create: bool) -> int:
    """Return a descriptor of ``name`` in the open folder ``here``, which is then closed.

    ``name`` must be a folder if ``as_folder`` is true, and otherwise a file, which is opened for reading. If ``create``
    is true, a missing folder is made with mode 700. Raise ``OSError`` with the path below ``at`` if the name cannot be
    opened.
    """
    if as_folder and create:
        try:
            # The folder is opened and checked after this in any case, so that it does not matter who has made it.
            os.mkdir(name, 0o700, dir_fd=here)
        except FileExistsError:
            pass
        except OSError as e:
            if not _name_exists(here, name):
                raise OSError(e.errno, e.strerror, str(at / name)) from None
    try:
        return _open_and_close(here, name, _FOLDER if as_folder else _FILE)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(at / name)) from None


def _open_and_close(here: int, name: str, flags: int) -> int:
    """Return a descriptor of ``name`` in the folder ``here``, opened with ``flags``. The descriptor ``here`` is then
    closed.
    """
    descriptor = os.open(name, flags, dir_fd=here)
    os.close(here)
    return descriptor


def _name_exists(here: int, name: str) -> bool:
    """Return whether the open folder ``here`` has a file, folder or link called ``name``. A link counts even if its
    target is missing.
    """
    try:
        os.stat(name, dir_fd=here, follow_symlinks=False)
    except OSError:
        return False
    return True


def _open_to_all(about: os.stat_result) -> bool:
    """Return whether the status ``about`` of a file or folder allows all users to write it."""
    return bool(about.st_mode & stat.S_IWOTH)


def _check_ownership(
    about: os.stat_result,
    at: Path,
    rule: OwnershipRule,
    above: os.stat_result | None,
    *,
    last: bool,
    regular: bool = False,
) -> os.stat_result:
    """Return the status ``about`` of the object at the path ``at`` if ``rule`` accepts its owner and its mode.

    Raise ``Distrusted`` otherwise. ``above`` is the status of the folder that holds the object, None for the root.
    ``last`` states whether the object is the last component of the checked path. If ``regular`` is true, only a
    regular file is accepted. Otherwise any kind of object is.
    """
    me, mode = os.geteuid(), stat.S_IMODE(about.st_mode)
    # Reading a FIFO or a device could wait for ever.
    if regular and not stat.S_ISREG(about.st_mode):
        raise Distrusted(errno.EPERM, NO_REGULAR_FILE, str(at))
    shared = above is not None and _open_to_all(above)  # and sticky, or it had been refused
    mine = (me,) if last and rule.private else (me, 0)
    if about.st_uid not in mine and (rule.owned or shared):
        raise Distrusted(errno.EPERM, f"it belongs to another user (uid {about.st_uid})", str(at))
    writers = (0 if rule.everybody else stat.S_IWOTH) | (0 if rule.group else stat.S_IWGRP)
    sticky = not last and bool(mode & stat.S_ISVTX)  # others may add files to it, but not replace ours
    if mode & writers and not sticky:
        why = f"it can be written by others (mode {mode:o}); what it holds may be theirs"
        raise Distrusted(errno.EPERM, why, str(at))
    return about


def open_for_writing(path: str | os.PathLike[str], *, append: bool = False) -> int:
    """Return a descriptor for writing the file ``path``, which the user has named. A missing file is created.

    An existing file is emptied if ``append`` is false. If it is true, what is written is appended. The path may also
    name a device, a pipe, or a file that the user's own program has open, such as ``/dev/stdout``. This function never
    waits, so a FIFO without a reader is an error.

    Raises:
        Distrusted: the path contains a link of another user, or the file belongs to another user and lies in a folder
            that everybody can write.
        OSError: the file cannot be opened.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    here, name, at, above = _open_parent(os.fspath(path))
    try:
        process_own = os.fstat(here).st_dev == os.stat("/proc").st_dev if os.path.isdir("/proc") else False
        if process_own:  # links of this file system are no texts, and lead to what a process has open
            flags &= ~(os.O_NOFOLLOW | os.O_CREAT)
        handle = os.open(name, flags | (os.O_APPEND if append else 0), 0o666, dir_fd=here)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(at)) from None
    finally:
        os.close(here)
    try:
        about = os.fstat(handle)
        if _open_to_all(above) and about.st_uid not in (os.geteuid(), 0) and not process_own:
            raise Distrusted(errno.EPERM, f"it belongs to another user (uid {about.st_uid})", str(at))
        # Emptied only after the check: O_TRUNC would empty the file of another user.
        if stat.S_ISREG(about.st_mode) and not append:
            os.ftruncate(handle, 0)
        # Opened without blocking because of FIFOs; writes to a pipe shall wait.
        os.set_blocking(handle, True)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _open_parent(path: str) -> tuple[int, str, Path, os.stat_result]:
    """Open the folder in which the file ``path`` is to be written. Return (descriptor of the folder, name of the file,
    its path, status of the folder).

    If ``path`` is a link, the result is that of its target. Links are followed if they belong to this user or to root,
    or lie in a folder to which only their owner can write.
    """
    for _ in range(LINKS):
        folder, name = os.path.split(path)
        if not name or "\0" in path or name in (".", ".."):
            raise OSError(errno.EINVAL, "no name of a file", path.replace("\0", "\\0"))
        here = _open_checked(folder or ".", OUTPUT, folder=True)
        try:
            about = os.fstat(here)
            target = None
            if not os.path.isdir("/proc") or about.st_dev != os.stat("/proc").st_dev:
                target = _followed_link(here, name, Path(folder), OUTPUT, about)
        except BaseException:
            os.close(here)
            raise
        if target is None:
            return here, name, Path(path), about
        os.close(here)
        path = os.path.join(folder, target)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


_numbers = count()


def encode_text(text: str) -> bytes:
    """Return ``text`` as UTF-8, with the escape of JSON and of Python for what UTF-8 does not have. The name of a file
    in another encoding holds such letters.
    """
    return text.encode(errors="backslashreplace")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8 to ``path``. An existing file is emptied first. Raise the errors of
    ``open_for_writing``.
    """
    write_bytes(path, encode_text(text))


def append_text(path: str | os.PathLike[str], text: str) -> None:
    """Append ``text`` as UTF-8 to ``path`` in one write. A missing file is created. Raise the errors of
    ``open_for_writing``.
    """
    with os.fdopen(open_for_writing(path, append=True), "ab") as file:
        # One write to a file opened for appending: lines of several processes do not mix.
        file.write(encode_text(text))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write ``content`` to ``path``. An existing file is emptied first. Raise the errors of ``open_for_writing``."""
    with os.fdopen(open_for_writing(path), "wb") as file:
        file.write(content)


def write_whole(path: Path, content: bytes, *, private: bool = False, lasting: bool = True) -> None:
    """Write ``content`` to ``path``. At any time the file holds either all of its old content or all of the new one.

    Raise ``OSError`` if writing fails. Users outside of the file's group cannot write to the file, whatever the umask
    is, since this package refuses to read a file that they can write. The umask decides about the group. If ``private``
    is true, no other user can read or write the file.

    If ``lasting`` is false, the file is not synced to disk. It then outlives the process, but a loss of power may leave
    it missing, empty or old.
    """
    with _replace_when_done(path, 0o600 if private else 0o664, lasting) as file:
        file.write(content)


def copy_whole(source: Path, target: Path) -> None:
    """Copy the file ``source`` to ``target``. At any time ``target`` holds either its old content or all of the new
    one. A process that has the old file open keeps it.
    """
    with source.open("rb") as read, _replace_when_done(target, 0o664, lasting=False) as file:
        shutil.copyfileobj(read, file)


@contextlib.contextmanager
def _replace_when_done(path: Path, mode: int, lasting: bool) -> Iterator[IO[bytes]]:
    """Enter a context that gives a new file of the mode ``mode`` for writing. At the end of the context, the file
    replaces ``path`` by a rename. After an error, the new file is removed. If ``lasting`` is true, the file and the
    rename are synced to disk, so that they survive a loss of power. Otherwise they are not synced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name holds machine and process, so that a later clean-up can tell whether the writer still runs.
    temporary = path.parent / f".{path.stem[:16]}@{host_name()}~{os.getpid()}~{next(_numbers)}.tmp"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            yield file
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if lasting:
        _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Sync a folder to disk, so that a rename in it survives a loss of power. Do nothing on a network file system that
    does not support this.
    """
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def host_name() -> str:
    """Return the name of this machine for use in file names. Each character that is neither a letter nor a digit is
    replaced by ``-``.
    """
    return "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40]
