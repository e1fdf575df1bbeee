"""Attacks through what a user is handed and names himself: wheels, texts for a terminal, sources of candidates."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from contextlib import redirect_stdout

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.cli import console
from shiplap.errors import ShiplapNotice
from shiplap.packaging import WheelRequest, package
from shiplap.packaging import wheel as wheels
from shiplap.sandbox.source_scan import MAX_SOURCE_BYTES, find_suspicious_names
from shiplap.tuning.recorded_calls import record
from shiplap_testing.support import fails

INFO = "mylib-1.0.dist-info"
RIGHT = {"mylib/__init__.py": b"", f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n", f"{INFO}/RECORD": b""}


def packed(path, files, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return bytearray(path.read_bytes())


@pytest.fixture
def wheel(tmp_path):
    return tmp_path / "mylib-1.0-py3-none-any.whl"


def encrypted(data):
    """Every entry says that it is."""
    for mark, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        where = data.find(mark)
        while where >= 0:
            data[where + at] |= 1
            where = data.find(mark, where + 4)
    return data


def of_another_kind(data, kind):
    """Every entry says that it is compressed in this way."""
    for mark, at in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        where = data.find(mark)
        while where >= 0:
            struct.pack_into("<H", data, where + at, kind)
            where = data.find(mark, where + 4)
    return data


DAMAGE = {
    "encrypted": encrypted,
    "an unknown compression": lambda data: of_another_kind(data, 99),
    "not what it says, deflate": lambda data: of_another_kind(data, zipfile.ZIP_DEFLATED),
    "not what it says, bzip2": lambda data: of_another_kind(data, zipfile.ZIP_BZIP2),
    "not what it says, lzma": lambda data: of_another_kind(data, zipfile.ZIP_LZMA),
    "cut short": lambda data: data[: len(data) // 2],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_archive_is_an_error_of_the_catalogue(wheel, name):
    """zipfile raised RuntimeError, NotImplementedError, zlib.error and EOFError of its own."""
    wheel.write_bytes(DAMAGE[name](packed(wheel, {**RIGHT, "mylib/data": b"a" * 500})))
    with fails("SL310"):
        package(WheelRequest(wheel))


CONTENTS = {
    "names of no form": {f"{INFO}/entry_points.txt": b"no section\n"},
    "a section twice": {f"{INFO}/entry_points.txt": b"[shiplap.families]\na = x\n[shiplap.families]\na = y\n"},
    "not UTF-8": {f"{INFO}/entry_points.txt": b"\xff\xfe"},
    "a file that is a folder": {"mylib": b"", "mylib/__init__.py": b""},
    "a path upwards": {"mylib/../../x.py": b""},
    "an absolute path": {"/tmp/x.py": b""},
}


@pytest.mark.parametrize("name", CONTENTS)
def test_hostile_content_of_a_wheel_is_an_error_of_the_catalogue(wheel, name):
    packed(wheel, {**RIGHT, **CONTENTS[name]})
    with fails("SL310"):
        package(WheelRequest(wheel))


def test_names_are_not_filled_in_from_elsewhere(wheel, tmp_path):
    """configparser replaced %(name)s, and raised an error of its own where there was none."""
    packed(wheel, {**RIGHT, f"{INFO}/entry_points.txt": b"[shiplap.families]\na = %(missing)s\n"})
    with fails("SL601", "%(missing)s"):
        package(WheelRequest(wheel))


def test_a_wheel_that_unpacks_to_too_much_is_refused_before(wheel, monkeypatch):
    packed(wheel, {**RIGHT, "mylib/zeros": b"\0" * (1 << 20)}, zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(wheels, "LIMIT", 1 << 19)
    with fails("SL310", got="more than 524288 bytes"):
        package(WheelRequest(wheel))
    monkeypatch.setattr(wheels, "LIMIT", 1 << 32)
    monkeypatch.setattr(wheels, "FILES", 3)
    with fails("SL310", got="more than 3 files"):
        package(WheelRequest(wheel))


def test_a_wheel_that_is_a_fifo_hangs_nobody(wheel):
    os.mkfifo(wheel)
    with fails("SL310", "no regular file"):
        package(WheelRequest(wheel))


def test_the_wheel_is_not_written_through_a_link(tmp_path):
    """Its temporary name can be guessed: whoever can write the folder would choose what is overwritten."""
    victim, target = tmp_path / "victim", tmp_path / "new-1.0-py3-none-any.whl"
    victim.write_text("mine")
    target.with_name(f".{target.name}.{os.getpid()}").symlink_to(victim)
    folder = tmp_path / "unpacked"
    for name, content in RIGHT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    wheels._write_wheel(target, folder, {name: zipfile.ZipInfo(name) for name in RIGHT}, "py3-none-any")
    assert victim.read_text() == "mine"
    assert sorted(zipfile.ZipFile(target).namelist()) == sorted(RIGHT)


@pytest.mark.parametrize("epoch", ["", "abc", "-1", "0", str(1 << 70), "1e9", "\u0663"])
def test_a_time_that_no_archive_can_state_is_moved_into_its_range(monkeypatch, epoch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
    assert 1980 <= wheels._zip_entry("a").date_time[0] <= 2107


# --- terminals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["\x1b[2J", "\x1b]0;title\x07", "\x9b2J", "a\u202eb", "over\rwritten", "\x08\x08"])
def test_texts_of_a_file_do_not_control_the_terminal(text):
    output = io.StringIO()
    with redirect_stdout(output):
        console.out().print(f"findings of {text}", markup=False)
    assert output.getvalue().startswith("findings of ")
    assert not set(output.getvalue()) & set("\x1b\x07\x08\r\x9b\u202e")


def test_an_error_does_not_control_the_terminal(capsys):
    from shiplap.errors import error

    console.show_error(error("SL602", where="\x1b[2J", got="a\x1b]0;x\x07", expected="a file"))
    assert not set(capsys.readouterr().err) & set("\x1b\x07")


def test_calls_are_not_recorded_into_a_fifo(tmp_path, ns):
    """Without a reader, the call that was to be recorded waited for one."""

    @sl.op(f"{ns}::double")
    def double(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return 2 * x

    os.mkfifo(tmp_path / "calls")
    reader = os.open(tmp_path / "calls", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.warns(ShiplapNotice, match="it is no regular file"), record(tmp_path / "calls"):
        double(torch.ones(3))
    os.close(reader)
    os.mkfifo(tmp_path / "unread")
    with pytest.warns(ShiplapNotice, match="calls cannot be recorded"), record(tmp_path / "unread"):
        double(torch.ones(4))


# --- the judge --------------------------------------------------------------------------------------------------------


def test_a_candidate_too_long_to_be_looked_through_is_said(tmp_path):
    """It counted as one without a suspicious name."""
    source = tmp_path / "candidate.py"
    source.write_text("import sys\nsys._getframe()\n" + "#" * MAX_SOURCE_BYTES)
    assert find_suspicious_names(str(source)) == [f"more than {MAX_SOURCE_BYTES} bytes, which is not scanned"]
    source.write_text("import sys\nsys._getframe()\n")
    assert "looks at the callers" in find_suspicious_names(str(source))[0]
