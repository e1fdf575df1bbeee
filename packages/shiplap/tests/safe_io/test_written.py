"""What the user names for writing is written, but never through a link of another user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from shiplap import safe_io
from shiplap.cli import console
from shiplap.errors import ShiplapError, ShiplapNotice, error, notice
from shiplap.render.console import escape_json, make_console
from shiplap.render.statement import write_statement
from shiplap.tuning.recorded_calls import CallRecorder

STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play both users")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that everybody can write, as /tmp is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def plant(link: Path, target: Path) -> None:
    link.symlink_to(target)
    os.lchown(link, STRANGER, STRANGER)


@needs_root
@pytest.mark.parametrize("owned_by", ["everybody", "stranger"])
def test_a_link_of_a_stranger_is_not_written_through(shared: Path, tmp_path: Path, owned_by: str) -> None:
    mine = tmp_path / "mine"
    mine.write_text("kept")
    if owned_by == "stranger":
        os.chown(shared, STRANGER, STRANGER)
        shared.chmod(0o755)
    plant(shared / "page.html", mine)
    with pytest.raises(ShiplapError) as e:
        console.write_text(shared / "page.html", "replaced")
    assert (e.value.id, e.value.got) == ("SL602", f"a link that belongs to another user (uid {STRANGER})")
    with pytest.raises(ShiplapError):
        console.require_file(shared / "page.html")
    assert mine.read_text() == "kept"
    plant(shared / "folder", tmp_path)
    with pytest.raises(safe_io.Distrusted):
        safe_io.write_text(shared / "folder" / "mine", "replaced")
    assert mine.read_text() == "kept"


@needs_root
def test_calls_are_not_recorded_through_a_link_of_a_stranger(shared: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("kept")
    plant(shared / "calls", mine)
    with pytest.warns(match="calls cannot be recorded in .*: a link that belongs to another user"):
        CallRecorder(shared / "calls")._append([])
    assert mine.read_text() == "kept"


@needs_root
def test_a_file_of_a_stranger_in_a_shared_folder_is_not_written(shared: Path) -> None:
    path = shared / "page.html"
    path.write_text("theirs")
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(safe_io.Distrusted, match="belongs to another user"):
        safe_io.write_text(path, "mine")
    assert path.read_text() == "theirs"


def test_what_is_one_s_own_is_written(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "page").symlink_to("other")
    for path in (shared / "new", tmp_path / "link" / "page", tmp_path / "real" / "page"):
        safe_io.write_text(path, "first, and longer")
        safe_io.write_text(path, "text")
        assert path.read_text() == "text"
    assert (tmp_path / "real" / "other").read_text() == "text"
    os.close(safe_io.open_for_writing(tmp_path / "link" / "page", append=True))
    assert (tmp_path / "real" / "other").read_text() == "text"
    safe_io.write_text("/dev/null", "gone")


@pytest.mark.long
def test_stdout_and_pipes_are_written_and_a_fifo_without_a_reader_is_an_error(tmp_path: Path) -> None:
    code = "from shiplap import safe_io; [safe_io.write_text(p, p) for p in ('/dev/stdout', '/proc/self/fd/2')]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("/dev/stdout", "/proc/self/fd/2")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="No such device"):
        safe_io.open_for_writing(tmp_path / "fifo")
    for path in ("", tmp_path / "..", "a\0b", tmp_path / "no" / "file", tmp_path):
        with pytest.raises(OSError):  # noqa: PT011
            safe_io.open_for_writing(path)


def test_nothing_prints_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    bad = "\x1b]0;title\x07 \x9b2J \u202e"
    make_console().print(bad, markup=False)
    console.echo(bad)
    console.emit_json({"text": bad})
    printed = capsys.readouterr().out
    assert not set(printed) & set("\x1b\x07\x9b\u202e")
    assert escape_json('"\x9b"') == '"\\u009b"'


def test_python_prints_no_commands_of_foreign_texts_in_errors_and_notices() -> None:
    """It prints an error that nobody handles, and a warning, without a console of ours."""
    bad = "\x1b]0;title\x07 \x9b2J \u202e ##vso[task.setvariable variable=PATH]x"
    failed = error("SL613", where=bad, got=bad)
    with pytest.warns(ShiplapNotice) as warned:
        notice(f"test_written: {bad}", bad)
    for text in (str(failed), "".join(traceback.format_exception(failed)), str(warned[0].message)):
        assert not set(text) & set("\x1b\x07\x9b\u202e")
        assert "##vso[" not in text
    assert failed.got == bad


def test_nothing_prints_commands_for_the_job_of_a_ci_service(capsys: pytest.CaptureFixture[str]) -> None:
    """GitHub reads such a command at the start of a line, where a long text may go on; others read it anywhere."""
    bad = ["::add-mask::x", "  ::error file=a.py::wrong", "::Stop-Commands::word", "a ##vso[task.setvariable]x"]
    for text in (*bad, "##[error]x", "##teamcity[x]", "a" * 79 + " ::error::b", "a" * 80 + "::error::b"):
        make_console().print(text, markup=False)
        console.echo(text)
    console.echo("ns::op ns::error::op std::set-like ## Heading")
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop() == "ns::op ns::error::op std::set-like ## Heading"
    assert [line for line in lines if line.lstrip().startswith("::")] == []
    assert [line for line in lines if "##[" in line or "##vso[" in line or "##teamcity[" in line] == []
    assert any(": :error::b" in line for line in lines)


def test_a_name_that_is_no_text_can_be_printed_and_written(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A byte of it may be a command of a terminal, and no stream in UTF-8 takes it."""
    name = os.fsdecode(b"k\xff\x9b31m.py")
    json_text = json.dumps([name], ensure_ascii=False)
    console.echo(name)
    make_console().print(name)
    console.emit_json([name])
    printed = capfdbinary.readouterr().out
    assert b"\xff" not in printed
    assert b"\x9b" not in printed
    assert json.loads(printed.decode().partition("\n")[2].partition("\n")[2]) == [name]
    safe_io.write_text(tmp_path / "page", json_text)
    safe_io.append_text(tmp_path / "page", "\n" + json_text)
    assert [json.loads(line) for line in (tmp_path / "page").read_text().splitlines()] == [[name], [name]]
    write_statement(tmp_path / "statement", {name: "0" * 64}, "urn:of", {"what": name})
    assert json.loads((tmp_path / "statement").read_text())["subject"][0]["name"] == name
