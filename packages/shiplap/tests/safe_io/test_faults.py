"""Every call of the operating system fails once: what is written is the old state or the new one, never half of it.

A sample of the errors here; ``nox -s faults`` takes each error at each call.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.errors import ShiplapError, ShiplapNotice
from shiplap.kernels.native import cache as artefacts
from shiplap.kernels.native.build import LIBRARY, is_sealed_folder
from shiplap.kernels.native.build import build_once as compile_into
from shiplap.render.statement import write_statement
from shiplap.tuning.frozen_table import dump_table, read_frozen_table
from shiplap.tuning.key import Key
from shiplap.tuning.recorded_calls import read_calls, record
from shiplap.tuning.store import ChoiceStore
from shiplap_testing.choices import FIELDS, VALUE

ERRORS = [errno.ENOSPC, errno.EIO, errno.EINTR]
CALLS = [
    "open",
    "write",
    "fsync",
    "replace",
    "rename",
    "mkdir",
    "link",
    "unlink",
    "rmdir",
    "utime",
    "fstat",
    "ftruncate",
]
ALL = os.environ.get("SHIPLAP_TEST_FAULTS") == "all"


class Faults:
    """Counts the calls, and lets the one with number ``at`` fail with ``code``, once."""

    def __init__(self, at: int, code: int) -> None:
        self.at, self.code, self.count, self.hit, self.short = at, code, 0, "", False

    def due(self, name: str) -> bool:
        self.count += 1
        if self.count - 1 == self.at:
            self.hit = name
            return True
        return False

    def raised(self, path: object) -> OSError:
        named = [os.fspath(path)] if isinstance(path, (str, bytes, os.PathLike)) else []
        return OSError(self.code, os.strerror(self.code), *named)

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            patch.setattr(os, name, self.failing(name, getattr(os, name)))
        patch.setattr(io, "open", self.opening(io.open))

    def failing(self, name, call):
        def failing(*args, **kwargs):
            if not self.due(name):
                return call(*args, **kwargs)
            if name == "write" and not self.short:  # half of it is on the disk, and the rest will not go there
                self.short, self.at = True, self.count
                return call(args[0], args[1][: len(args[1]) // 2])
            raise self.raised(args[0] if args else None)

        return failing

    def opening(self, call):
        def opening(file, mode="r", *args, **kwargs):
            if self.due("io.open"):
                raise self.raised(file)
            opened = call(file, mode, *args, **kwargs)
            return Written(opened, self) if mode[0] in "wxa" else opened

        return opening


class Written:
    """A file of which a write may fail half way."""

    def __init__(self, file, faults: Faults) -> None:
        self.file, self.faults = file, faults

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, content):
        if self.faults.due("file.write"):
            self.file.write(content[: len(content) // 2])
            self.file.flush()
            raise self.faults.raised(None)
        return self.file.write(content)


KEY = Key.of(FIELDS)
OLD, NEW = VALUE, {**VALUE, "config": {"tile": 2}}


class StoreWork:
    """A choice of the store."""

    def __init__(self, folder: Path) -> None:
        self.store = ChoiceStore(folder / "cache" / "tuned")

    def old(self) -> None:
        assert self.store.put(KEY, OLD)

    def new(self) -> None:
        self.store.put(KEY, NEW)

    def state(self) -> str:
        assert all(not e.problem for e in self.store.entries())
        return {1: "old", 2: "new"}[self.store.get(KEY)["config"]["tile"]]


class FirstWork(StoreWork):
    """A choice where there is no folder yet."""

    def old(self) -> None:
        pass

    def state(self) -> str:
        return "old" if self.store.get(KEY) is None else super().state()


class TableWork:
    """A table, as ``freeze`` and ``cache export`` write it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "table.json"

    def old(self) -> None:
        dump_table(self.path, [(KEY, OLD)])

    def new(self) -> None:
        dump_table(self.path, [(KEY, NEW)])

    def state(self) -> str:
        ((_, value),) = read_frozen_table(self.path)
        return {1: "old", 2: "new"}[value["config"]["tile"]]


class FreezeWork(TableWork):
    """``sl.freeze`` of a store that has changed since."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        os.environ["SHIPLAP_CACHE_DIR"] = str(folder / "cache")
        self.op = _op()  # of this op alone: earlier tests may have left choices of theirs in the process

    def new(self) -> None:
        sl.freeze(self.path, [self.op])

    def state(self) -> str:
        return "old" if read_frozen_table(self.path) else "new"  # nothing of this machine is in the store


class StatementWork:
    """An in-toto statement."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "statement.json"

    def write(self, state: str) -> None:
        write_statement(self.path, {"op": "0" * 64}, "urn:faults", {"state": state, "rows": ["x" * 100] * 100})

    def old(self) -> None:
        self.write("old")

    def new(self) -> None:
        self.write("new")

    def state(self) -> str:
        return json.loads(self.path.read_text())["predicate"]["state"]


class BuildWork:
    """A compiled binding, by a compiler that copies its input."""

    def __init__(self, folder: Path) -> None:
        script = folder / "cxx"
        script.write_text('#!/bin/sh\ncp "$3" "$2"\n')
        script.chmod(0o700)
        self.root, self.command = folder / "cache" / "native", [str(script)]
        self.root.mkdir(parents=True, mode=0o700)
        self.root.parent.chmod(0o700)

    def old(self) -> None:
        pass

    def new(self) -> None:
        if problem := compile_into(self.root, "abc", "source", self.command, wait=1):
            raise OSError(0, problem, str(self.root))

    def state(self) -> str:
        if not (self.root / "abc").exists():
            return "old"
        assert is_sealed_folder(self.root / "abc")
        assert (self.root / "abc" / LIBRARY).read_text() == "source"
        return "new"


class EvictWork(BuildWork):
    """A compiled binding that is removed: what is left of it is not loaded."""

    def old(self) -> None:
        BuildWork.new(self)

    def new(self) -> None:
        artefacts.evict_artefacts(self.root, cap=0)

    def state(self) -> str:
        left = artefacts.cached_artefacts(self.root)
        whole = [a for a in left if not artefacts.artefact_problem(a)]
        return "old" if whole else "new"


class RecordWork:
    """Lines of a profile: one that could not be written spoils no other."""

    def __init__(self, folder: Path) -> None:
        self.path, self.op = folder / "calls", _op()

    def old(self) -> None:
        with record(self.path):
            self.op(torch.ones(3))

    def new(self) -> None:
        with record(self.path):
            self.op(torch.ones(5))

    def state(self) -> str:
        assert self.path.read_bytes().endswith(b"\n")
        return {1: "old", 2: "new"}[len(read_calls(self.path))]


@cache
def _op() -> sl.Op:
    @sl.op("faults::double")
    def double(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return 2 * x

    return double


WORKS = [StoreWork, FirstWork, TableWork, FreezeWork, StatementWork, BuildWork, EvictWork, RecordWork]


def attempt(work, at: int, code: int) -> tuple[Faults, BaseException | None]:
    """Carry out the change while one call fails, and say what was raised."""
    faults = Faults(at, code)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", ShiplapNotice)
        faults.patch(patch)
        try:
            work.new()
        except BaseException as e:
            return faults, e
    return faults, None


@pytest.mark.parametrize("kind", WORKS, ids=lambda kind: kind.__name__)
def test_one_failing_call_leaves_the_old_state_or_the_new_one(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))  # put back afterwards
    hits, at = set(), 0
    while True:
        done = False
        for code in ERRORS if ALL else [ERRORS[at % len(ERRORS)]]:
            folder = tmp_path / f"{at}-{code}"
            folder.mkdir(mode=0o700)
            work = kind(folder)
            work.old()
            faults, raised = attempt(work, at, code)
            if not faults.hit:
                done = True
                assert raised is None
                assert work.state() == "new"
                break
            hits.add(faults.hit)
            assert raised is None or isinstance(raised, (ShiplapError, OSError)), repr(raised)
            assert raised is None or str(tmp_path) in str(raised), f"{faults.hit} names no file: {raised!r}"
            assert work.state() in ("old", "new"), faults.hit
            work.new()
            assert work.state() == "new", f"after {faults.hit} it does not work again"
        if done:
            break
        at += 1
    assert at > 2, "no call was seen"
    assert hits & {"open", "io.open", "unlink", "rmdir"}


def test_a_full_disk_cuts_no_file_short(tmp_path):
    """A write that the kernel itself does by half: beyond the limit of a file's size."""
    resource = pytest.importorskip("resource")
    work = TableWork(tmp_path)
    work.old()
    size = work.path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
        with pytest.raises(ShiplapError, match="SL602"):
            work.new()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert work.state() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]
    assert stat.S_ISREG(work.path.stat().st_mode)
