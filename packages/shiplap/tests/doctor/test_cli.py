"""``shiplap doctor``: exit statuses, one JSON value, a self-contained page, text that names line and remedy."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shiplap.doctor import Diagnosis, SourcePlace, diagnose_trace
from shiplap.doctor.trace import EventTrace, read_trace_files
from shiplap.render.html import render_html
from tests.doctor.programs import write

SCRIPT = """
    import sys, torch, zlib

    def f(x):
        zlib.crc32(b"<b>")  # <script>
        return x + 1

    print("hello", *sys.argv[1:])
    torch.compile(f, backend="eager")(torch.ones(3))
    torch.compile(f, backend="eager")(torch.ones(3, dtype=torch.float64))
"""


def run(*arguments: str) -> Any:
    """In this process; the program itself is one of its own all the same."""
    from shiplap.cli.app import app

    return CliRunner().invoke(app, ["doctor", *arguments])


def page_of(diagnosis: Diagnosis) -> str:
    return render_html("diagnosis.html.jinja", title="shiplap doctor", facts={}, found=diagnosis)


@pytest.mark.long
def test_text_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    write(tmp_path, SCRIPT)
    monkeypatch.chdir(tmp_path)
    done = run("--html", "doctor.html", "--", sys.executable, "program.py", "--json")
    assert done.exit_code == 0, done.stderr
    assert capfd.readouterr().out == "hello --json\n"
    assert "1. program.py:4  zlib.crc32" in done.stdout
    assert re.search(r"^  > +4      zlib\.crc32", done.stdout, re.MULTILINE)
    assert "  fix      declare the call with @sl.op" in done.stdout
    assert '@unfinished("zlib::crc32"' in done.stdout
    assert "recompiled: program.py:3  f" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 graph break, 1 recompile in 2 compiled functions")
    page = (tmp_path / "doctor.html").read_text()
    assert "zlib.crc32(b&#34;&lt;b&gt;&#34;)  # &lt;script&gt;" in page
    assert not re.search(r"(?:src|href)=\"http|<script|<link", page)


@pytest.mark.long
def test_json_is_one_value_and_the_program_prints_to_stderr(tmp_path: Path, capfd: Any) -> None:
    script = write(tmp_path, SCRIPT)
    done = run("--json", "--fail-on-break", "--", sys.executable, str(script))
    assert done.exit_code == 1
    printed = capfd.readouterr()
    assert (printed.out, "hello" in printed.err) == ("", True)
    parsed = json.loads(done.stdout)
    assert parsed.keys() == {"facts", "ok", "summary", *Diagnosis.__dataclass_fields__}
    (b,) = parsed["breaks"]
    assert {k: b[k] for k in ("cause", "call", "registry", "graphs", "times", "skipped")} == {
        "cause": "foreign",
        "call": "zlib.crc32",
        "registry": "GB0007",
        "graphs": 1,
        "times": 1,
        "skipped": False,
    }
    assert b["place"]["line"] == 4
    assert parsed["recompiles"][0]["cause"] == "dtype"


def test_a_program_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Diagnosis("program", compiled=1, exit_code=3)  # tests/doctor/test_examine: a program leaves its status
    monkeypatch.setattr(import_module("shiplap.doctor"), "diagnose_command", lambda command, stdout: failed)
    done = run("--", "program")
    assert done.exit_code == 1
    assert "the program ended with exit status 3" in done.stdout


def test_a_program_that_compiles_nothing() -> None:
    done = run("--json", "--", sys.executable, "-c", "raise SystemExit(5)")
    assert (done.exit_code, json.loads(done.stdout)["error"]["id"]) == (2, "SL702")
    assert done.stderr.startswith("SL702: nothing was compiled\n")
    assert "no compiled function was called; the program failed with exit status 5" in done.stderr
    assert "fix      correct the error that the program shows above" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Missing argument"),
        (("--", "/no/such/program"), "SL701: the program cannot be started"),
        (("--html", "no/such/directory.html", "--", "true"), "SL602: the file cannot be written"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], says: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert says in done.stderr


# --- traces and views that need no program ------------------------------------------------------------------------

TRACE = """\
V1121 04:31:57.297000 100 torch/x.py:1] {"dynamo_start": {}, "frame_id": 0, "frame_compile_id": 0, "attempt": 0}
V1121 04:31:57 100 t.py:2] {"artifact": {"name": "dynamo_graph_break_reason"}, "frame_id": 0, "frame_compile_id": 0}
\tGraph break in user code at /gone/model.py:12
\tGraph Break Reason: Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):
\t
\tsomething new in the next torch
\t  Explanation: Nobody knows.
\t  Hint: Wait.
\t
\tUser code traceback:
\t  File "/gone/model.py", line 12, in forward
\t    y = f(x)
V1121 04:31:58.000000 100 torch/x.py:3] {"compilation_metrics": {"compile_id": "0/0", "co_name": "forw"""


def test_a_trace_cut_off_in_the_middle_of_an_unknown_break(tmp_path: Path) -> None:
    (tmp_path / "dedicated_log_torch_trace_x.log").write_text(TRACE)
    diagnosis = diagnose_trace(read_trace_files(tmp_path), "a run")
    (b,) = diagnosis.breaks
    assert (str(b.place), b.cause, b.registry, b.reason) == (
        "/gone/model.py:12",
        "other",
        "",
        "something new in the next torch",
    )
    assert (b.explanation, b.hints) == ("Nobody knows.", ("Wait.",))
    assert b.place.around() == []
    assert "Nobody knows." in page_of(diagnosis)


def test_an_empty_trace() -> None:
    diagnosis = diagnose_trace(EventTrace(), "a run")
    assert diagnosis == Diagnosis("a run")
    assert "nothing was compiled" in page_of(diagnosis)


@pytest.mark.parametrize(
    ("file", "package", "shown"),
    [
        ("/x/site-packages/pkg/sub/m.py", "pkg", "pkg/sub/m.py:3"),
        ("/elsewhere/m.py", "", "/elsewhere/m.py:3"),
    ],
)
def test_places_are_as_short_as_they_stay_findable(file: str, package: str, shown: str) -> None:
    assert SourcePlace(file, 3, package=package).shown == shown
