"""What holds for every verb: help with examples and exit codes, errors as text, tracebacks on request only."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import warnings
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Any

import pytest
import typer

from shiplap import cli
from shiplap.cli import console, families
from shiplap.cli.app import app
from shiplap_testing.effort import sampled
from shiplap_testing.forked import WITH_VERBS, python

# The files that look like verbs, read as text: the command line itself finds them by importing them.
VERBS = sorted(path.stem for path in Path(cli.__file__).parent.glob("*.py") if "\nEPILOG = " in path.read_text())
FIX = (
    "pass a file that declares ops, module:op such as mylib.ops:scale, "
    "or the name of a declared op such as mylib::scale"
)
OTHERS = tuple(e.name for e in entry_points(group="shiplap.verbs"))  # their tests are their own


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_examples_and_exit_codes(run: Any, verb: str) -> None:
    text = run(verb, "--help").stdout
    assert len(re.findall(rf"^ +shiplap {verb}\b", text, re.MULTILINE)) >= 2
    assert re.search(r"Exit status:\n +0 ", text)
    assert "--json" in text
    assert max(map(len, text.splitlines())) <= 100


def test_verbs_that_exist(run: Any) -> None:
    commands = run("--help").stdout.split("Commands:")[1].split("Exit status")[0]
    listed = re.findall(r"^  ([\w-]+) ", commands, re.MULTILINE)
    assert sorted(listed) == sorted({*VERBS, *OTHERS})
    assert {"audit", "doctor", "env", "tune"} <= set(listed)


def test_version(process: Any) -> None:
    from shiplap import __version__

    done = process("--version")
    assert (done.returncode, done.stdout) == (0, f"shiplap {__version__}\n")


def test_the_version_alone_imports_neither_torch_nor_shiplap() -> None:
    program = (
        "import sys, shiplap_console; sys.argv = ['shiplap', '--version']; shiplap_console.main(); "
        "print(sorted({'torch', 'shiplap', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"shiplap {version('shiplap')}\n[]\n"


def test_a_shell_can_complete_verbs(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_SHIPLAP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "shiplap jud")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
        app(prog_name="shiplap")
    assert shown.getvalue().split() == ["judge"]


def test_no_verb_shows_help(run: Any) -> None:
    result = run()
    assert result.exit_code == 2
    assert "Commands:" in result.output


def test_unknown_verb(run: Any) -> None:
    result = run("audi", "x")
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert lines[:3] == ["SL614: shiplap has no command of this name", "  where    shiplap", "  got      audi"]
    assert lines[3].startswith("  expected did you mean 'audit'? One of audit, ")


def test_a_verb_of_a_distribution_that_is_not_installed(run: Any) -> None:
    result = run("paint", "--quick")
    assert result.exit_code == 2
    assert "expected One of audit, " in result.stderr
    assert (
        "fix      use a command that 'shiplap --help' lists. If the command belongs to another package, install"
        in result.stderr
    )


def test_a_verb_that_cannot_be_imported_or_has_a_name_of_ours_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One package must not take away all verbs, nor put another program in the place of one."""
    named = {"judge": "shiplap.cli.env", "broken": "no_such_module", "formless": "shiplap.cli.console"}
    others = [EntryPoint(name, value, "shiplap.verbs") for name, value in {**named, "more": "shiplap.cli.env"}.items()]
    monkeypatch.setattr(families, "_installed_entry_points", lambda group: others)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert [name for name, _ in families.installed_verbs(VERBS)] == ["more"]
    said = [str(w.message).partition(":")[0] for w in given]
    assert said == [f"the verb {name} of {value} is left out" for name, value in named.items()]


def test_errors_are_text_on_stderr(process: Any) -> None:
    done = process("header", "packages/shiplap/tests/cli/target.py")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "SL501: the file does not exist",
        "  where    packages/shiplap/tests/cli/target.py",
        "  got      packages/shiplap/tests/cli/target.py",
        "  expected did you mean 'packages/shiplap/tests/cli/targets.py'?",
        f"  fix      {FIX}",
    ]


def test_with_json_an_error_is_a_value_on_stdout_as_well(run: Any) -> None:
    result = run("header", "nowhere.py", "--json")
    assert result.exit_code == 2
    reported = json.loads(result.stdout)["error"]
    assert list(reported) == ["id", "what", "where", "got", "expected", "fix"]
    assert (reported["id"], reported["what"], reported["where"]) == ("SL501", "the file does not exist", "nowhere.py")
    assert reported["fix"] == FIX
    assert result.stderr.startswith("SL501: the file does not exist")
    assert run("header", "nowhere.py").stdout == run("header", "nowhere.py", "--", "--json").stdout == ""


def test_with_json_a_wrong_option_is_a_value_on_stdout_as_well(run: Any) -> None:
    result = run("header", "--nope", "--json")
    assert result.exit_code == 2
    reported = json.loads(result.stdout)["error"]
    assert reported["id"] is None
    assert "--nope" in reported["what"]
    assert "--nope" in result.stderr


def test_an_error_after_the_value_adds_no_second_one(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(value: Any) -> None:
        emit(value)
        raise RuntimeError("too late")

    emit = console.emit_json
    monkeypatch.setattr(console, "emit_json", told)
    result = run("env", "--json")
    assert result.exit_code == 2
    assert "torch" in result.stdout
    json.loads(result.stdout)
    assert "unexpected RuntimeError: too late" in result.stderr


@pytest.mark.long
def test_traceback_on_request(process: Any) -> None:
    done = process("--traceback", "header", "packages/shiplap/tests/cli/target.py")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "SL501" in done.stderr


def test_a_defect_is_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shiplap.cli import env

    def broken() -> None:
        raise ZeroDivisionError("by [bold]zero")

    monkeypatch.setattr(env, "environment_report", broken)
    result = run("env")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0] == "unexpected ZeroDivisionError: by [bold]zero"
    assert "Traceback" not in result.output


@pytest.mark.parametrize("more", sampled([(), ("--json",)], 1), ids=["text", "json"])
def test_a_closed_pipe_ends_a_verb_quietly(more: tuple[str, ...]) -> None:
    done = python("-c", CLOSED, "header", "--include", *more, imported=WITH_VERBS)
    assert done.returncode == 128 + signal.SIGPIPE  # what a shell reports for `yes | true`
    assert "Broken pipe" not in done.stderr


def test_a_terminal_of_no_columns_shows_all(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert "DeclarationError" in run("explain", "SL101").stdout


def test_a_broken_pipe_to_a_child_is_a_defect(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shiplap.cli import env

    def broken() -> None:
        raise BrokenPipeError("the child has ended")

    monkeypatch.setattr(env, "environment_report", broken)
    result = run("env")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0] == "unexpected BrokenPipeError: the child has ended"


@pytest.mark.parametrize("command", ["audit nowhere:op", "rewrite nowhere.py", "slidesparse report nowhere.py"])
def test_a_page_stays_until_there_is_another(run, tmp_path, command):
    page = tmp_path / "page.html"
    page.write_text("the one before")
    assert run(*command.split(), "--html", page).exit_code == 2
    assert page.read_text() == "the one before"


NO_ROOM = [
    "SL602: the output cannot be written",
    "  where    stdout",
    "  got      No space left on device",
]
CLOSED = """
import os, runpy, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
sys.argv = ["shiplap", *sys.argv[1:]]
runpy.run_module("shiplap.cli", run_name="__main__", alter_sys=True)
"""
FULL = """
import os, runpy, sys
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
sys.argv = ["shiplap", *sys.argv[1:]]
runpy.run_module("shiplap.cli", run_name="__main__", alter_sys=True)
"""


@pytest.mark.long
def test_a_full_disk_is_no_defect() -> None:
    """Nor when Python ends, and writes what is left."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "shiplap.cli", "header", "--include"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[:3] == NO_ROOM


@pytest.mark.long
def test_a_full_disk_is_no_defect_for_json() -> None:
    done = python("-c", FULL, "header", "--include", "--json", imported=WITH_VERBS)
    assert done.returncode == 2
    assert done.stderr.splitlines()[:3] == NO_ROOM


def statuses_of(verb: Any) -> list[str]:
    """Return the exit statuses that the help of a verb lists."""
    return re.findall(r"^ *(\d+) ", (verb.epilog or "").partition("Exit status:")[2], re.MULTILINE)


def test_the_statuses_of_verbs_are_those_that_the_help_of_all_verbs_names() -> None:
    command: Any = typer.main.get_command(app)
    shared = command.epilog or ""
    incomplete = re.search(r"incomplete \((.*)\)", shared)
    assert incomplete is not None
    own = {name: verb for name, verb in command.commands.items() if name in VERBS}
    assert all(set(statuses_of(verb)) <= {"0", "1", "2", "3"} for verb in own.values())
    assert {name for name, verb in own.items() if "3" in statuses_of(verb)} == set(incomplete[1].split(", "))
