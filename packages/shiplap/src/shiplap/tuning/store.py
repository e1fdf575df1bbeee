"""The store of choices: one readable JSON file per entry, written whole or not at all, and checked when it is read.

``put`` writes a new file, syncs it and renames it over the entry. Readers therefore read either the old or the new
entry, also after a kill or a power cut, and no lock is needed. A file names its key and a checksum of its content. A
file that is cut short, edited, or of another key counts as absent. File times are not compared.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shiplap import safe_io
from shiplap.errors import notice
from shiplap.kernels.native.build import keyed_seal
from shiplap.settings import settings
from shiplap.tuning.key import Key

FORMAT = "shiplap-choice/1"
LIMIT = 1 << 20  # bytes: no entry of ours comes near


@dataclass(frozen=True)
class StoredEntry:
    """A file of the store at ``path``, with its key and value. If the file cannot be used, ``problem`` says why, and
    ``value`` and perhaps ``key`` are None. Otherwise ``problem`` is an empty string.
    """

    path: Path
    key: Key | None = None
    value: Mapping[str, Any] | None = None
    problem: str = ""


def seal_entry(key: Key, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict that holds a choice under ``key``, as a file of the store or a table has it in JSON. It has the
    format, the key, the value and a checksum.
    """
    body = {"format": FORMAT, "key": key.as_dict(), "value": dict(value)}
    return {**body, "sha256": entry_checksum(body)}


def unseal_entry(content: Any) -> tuple[Key, Mapping[str, Any]]:
    """Return the key and the value in ``content``, which :func:`seal_entry` has made and which was stored as JSON.
    Raise ``ValueError`` with the reason if ``content`` has another format or a wrong checksum.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"not of format {FORMAT}")
    body = {name: content.get(name) for name in ("format", "key", "value")}
    if content.get("sha256") != entry_checksum(body):
        raise ValueError("its checksum does not fit")
    key, value = body["key"], body["value"]
    if not isinstance(key, dict) or not isinstance(value, dict) or not all(isinstance(v, str) for v in key.values()):
        raise ValueError("no key or no value")
    return Key.of(key), value


def entry_checksum(body: Mapping[str, Any]) -> str:
    """Return the SHA-256 digest of ``body``, the JSON content of an entry without its checksum. It does not depend on
    the order of keys.
    """
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class ChoiceStore:
    """The store of choices in the folder ``tuned`` of the cache, or in any other folder. Each choice is one file. If it
    cannot be written, it is measured again later.

    ``what`` names the stored things in notices. If ``keyed`` is true, each file has a seal (a digest made with a secret
    key of the user), and files without it are not used. If it is false, files have no seal.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None = None, what: str = "choices", *, keyed: bool = False
    ) -> None:
        """Open the store in the folder ``root``, by default that of tuned choices in the cache. ``what`` and ``keyed``
        have the meaning that the class docstring gives.
        """
        self.what, self.keyed = what, keyed
        self.root = Path(root) if root is not None else Path(settings().cache_dir).absolute() / "tuned"

    def path(self, key: Key) -> Path:
        """Return the path of the file for ``key``, whether or not it exists. The file lies in a folder for its op, and
        its name is the key's digest.
        """
        return self.root / _directory_of_op(key["op"]) / f"{key.digest}.json"

    def get(self, key: Key) -> Mapping[str, Any] | None:
        """Return the value stored under ``key``, or None if there is no file for it or the file cannot be used."""
        entry = self._read(self.path(key))
        return entry.value if entry is not None and entry.key == key else None

    def put(self, key: Key, value: Mapping[str, Any]) -> bool:
        """Write ``value`` under ``key``, in place of an earlier value. Return whether it was written. If it was not,
        for example because the disk is full, issue a notice and raise no error.
        """
        content = seal_entry(key, value)
        if self.keyed:
            content["seal"] = keyed_seal(content["sha256"])
        text = json.dumps(content, indent=1) + "\n"
        try:
            path = self.path(key)
            os.close(safe_io.open_folder(path.parent, create=True))
            safe_io.write_whole(path, text.encode(), private=True)
        except OSError as e:
            # The code is part of the notice's key: a full disk and a missing permission are each reported once.
            code = errno.errorcode.get(e.errno or 0, type(e).__name__)
            message = (
                f"{self.what} cannot be kept in {self.root} ({code}: {e.strerror or e}): they serve this process only"
            )
            notice(f"store {self.root} {code}", message)
            return False
        return True

    def remove(self, path: Path) -> bool:
        """Delete the file ``path`` of the store. Return whether it no longer exists. If its folder is a symbolic link,
        nothing is deleted.
        """
        try:
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            # In the opened folder, since the path may lead to another one by now.
            os.unlink(path.name, dir_fd=folder)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        finally:
            os.close(folder)
        return True

    def entries(self, op: str = "") -> Iterator[StoredEntry]:
        """Yield the entries of the op named ``op``, or of all ops if it is an empty string, sorted by path. A file that
        cannot be used gives an entry with a ``problem``.
        """
        for directory in self._directories(op):
            for path in sorted(directory.glob("*.json")):
                if (entry := self._read(path)) is not None:
                    yield entry

    def half_written_files(self) -> Iterator[Path]:
        """Yield the paths of temporary files that processes of this machine left behind when they were killed. Files of
        other machines cannot be checked and are left out.
        """
        for directory in self._directories(""):
            for path in sorted(directory.glob(".*.tmp")):
                # ``safe_io`` names such a file .stem@host~pid~number.tmp.
                host, _, pid = path.name[1:].rpartition(".tmp")[0].rpartition("@")[2].partition("~")
                if (
                    host == safe_io.host_name()
                    and pid.partition("~")[0].isdigit()
                    and not _process_runs(int(pid.partition("~")[0]))
                ):
                    yield path

    def _directories(self, op: str) -> list[Path]:
        """Return the sorted folders of the store, one for each op. If ``op`` is not empty, return only the folder of
        this op.

        Symbolic links are left out, because a deletion would follow them to files outside the store.
        """
        try:
            folders = sorted(d for d in self.root.iterdir() if d.is_dir() and not d.is_symlink())
        except OSError:
            return []
        return [d for d in folders if not op or d.name == _directory_of_op(op)]

    def _distrusted(self, path: Path, e: safe_io.Distrusted) -> StoredEntry:
        """Return an entry whose ``problem`` is the error ``e``. The file ``path`` of the store may have been written by
        another user. A notice names the untrusted file or folder, once for each.
        """
        why = f"cannot be trusted: {safe_io.unsafe_reason(e)}"
        notice(
            f"store {e.filename}",
            f"{self.what} in {self.root} are not used: {why}; remove it, or what others wrote there",
        )
        return StoredEntry(path, problem=why)

    def _read(self, path: Path) -> StoredEntry | None:
        """Return the entry in the file ``path`` of the store, or None if the file does not exist. A file that cannot be
        used gives an entry with a ``problem``.
        """
        for attempt in range(3):
            try:
                raw = safe_io.read_file(path, LIMIT)
            except FileNotFoundError:
                return None
            except safe_io.Distrusted as e:
                return self._distrusted(path, e)
            except OSError as e:
                if e.errno == errno.ESTALE and attempt < 2:  # NFS: the file was replaced on another machine
                    continue
                return StoredEntry(path, problem=f"cannot be read: {e.strerror or e}")
            break
        try:
            content: Any = safe_io.parse_json(raw)
            key, value = unseal_entry(content)
        except ValueError as e:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            return StoredEntry(path, problem=f"damaged: {str(e)[:120]}")
        # A copied or renamed file has a valid checksum, but belongs to another call.
        if path != self.path(key):
            return StoredEntry(path, key, problem="its key belongs to another file name")
        # As bytes, since ``compare_digest`` refuses text beyond ASCII, which an altered file can hold.
        seal = str(content.get("seal")).encode()
        if self.keyed and not hmac.compare_digest(seal, keyed_seal(content["sha256"]).encode()):
            return StoredEntry(path, key, problem="its seal is not of this user")
        return StoredEntry(path, key, value)


def _directory_of_op(op: str) -> str:
    """Return the name of the folder for choices of the op named ``op``. Characters that file names should not have are
    replaced by ``.``.
    """
    return "".join(c if c.isalnum() or c in "_-" else "." for c in op).strip(".") or "-"


def _process_runs(pid: int) -> bool:
    """Return whether a process with this id exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
