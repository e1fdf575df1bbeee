"""``shiplap audit``: findings in three forms, and an exit status that CI can rely on."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

OPS = "packages/shiplap/tests/cli/targets.py"
QUICK = ("--check", "numerics", "--check", "fresh")
BROKEN = "examples/adopt_foreign_op.py"
AUDIT = import_module("shiplap.audit")  # the package: sl.audit, an attribute of the same name, is the function


def test_good_ops_leave_status_0(run: Any) -> None:
    result = run("audit", OPS, *QUICK)
    assert result.exit_code == 0, result.output
    assert "cli_targets::scale" in result.stdout
    assert "cli_targets::shift" in result.stdout
    assert "0 failed, 0 incomplete, 4 ok, 0 do not apply" in result.stdout
    assert "noisy" not in result.stdout


def test_the_command_plans_with_as_many_seconds_as_the_function(run: Any) -> None:
    """The command names the number itself: it loads no audit before it runs one."""
    assert f"[default: {AUDIT.DEFAULT_BUDGET_SECONDS}]" in run("audit", "--help").stdout


def test_a_failure_leaves_status_1_and_its_fix(process: Any) -> None:
    done = process("audit", BROKEN, "--check", "fresh", "--seed", "3")
    assert done.returncode == 1, done.stderr
    assert "shares memory with the next call's output" in done.stdout
    assert "seed 3" in done.stdout
    assert "fix" in done.stdout


@pytest.mark.long
def test_json_is_all_of_stdout(process: Any) -> None:
    done = process("audit", f"{OPS}:scale", *QUICK, "--seed", "5", "--json")
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout)
    assert [(f["check"], f["verdict"]) for f in parsed["findings"]] == [("numerics", "ok"), ("fresh", "ok")]
    assert parsed["facts"]["seed"] == "5"
    assert parsed["facts"]["target"] == f"{OPS}:scale"
    assert "noisy" in done.stderr  # what the module printed is not lost


def test_json_keeps_the_exit_status(run: Any) -> None:
    result = run("audit", BROKEN, "--check", "fresh", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["findings"][0]["verdict"] == "fail"


def test_html(run: Any, tmp_path: Path) -> None:
    result = run("audit", BROKEN, "--check", "fresh", "--html", tmp_path / "audit.html")
    assert result.exit_code == 1
    page = (tmp_path / "audit.html").read_text()
    assert "foreign::row_softmax" in page
    assert "http://" not in page


@pytest.mark.long
def test_cost_is_measured_on_request(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AUDIT, "measure_cost", card)
    assert json.loads(run("audit", OPS, *QUICK, "--json").stdout)["costs"] == []
    costs = json.loads(run("audit", OPS, *QUICK, "--json", "--cost").stdout)["costs"]
    assert [(c["subject"], c["raw_ns"]) for c in costs] == [("cli_targets::scale", 1.0), ("cli_targets::shift", 1.0)]
    assert "ns per call" in run("audit", OPS, *QUICK, "--cost").stdout


def test_several_targets_each_op_once(run: Any) -> None:
    result = run("audit", OPS, f"{OPS}:shift", "examples/data_dependent.py", "--check", "schema", "--json")
    subjects = [f["subject"] for f in json.loads(result.stdout)["findings"]]
    assert subjects == ["cli_targets::scale", "cli_targets::shift", "data_dependent::distinct"]


def test_an_op_without_samples_fails_and_the_others_are_audited(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shiplap.errors import error

    audit = AUDIT.audit

    def refuse(op: Any, **keywords: Any) -> Any:
        if op.spec.opname == "scale":
            raise error("SL502", where=op.spec.name, got="no size fits")
        return audit(op, **keywords)

    monkeypatch.setattr(AUDIT, "audit", refuse)
    result = run("audit", OPS, "--check", "schema", "--json")
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)["findings"]
    assert (first["check"], first["verdict"]) == ("samples", "fail")
    assert first["evidence"] == "SL502: no samples can be generated: no size fits"
    assert (second["subject"], second["verdict"]) == ("cli_targets::shift", "ok")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_shows_the_checks_until_then(run: Any, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Limits of time, as of CI, end a command by a signal, after minutes of work."""
    audit = AUDIT.audit

    def ended(op: Any, **keywords: Any) -> Any:
        report = audit(op, **keywords)
        if op.spec.name == "cli_targets::shift":
            os.kill(os.getpid(), number)
        return report

    monkeypatch.setattr(AUDIT, "audit", ended)
    before = signal.getsignal(signal.SIGTERM)
    result = run("audit", OPS, *QUICK)
    assert signal.getsignal(signal.SIGTERM) is before
    assert result.exit_code == 3, result.output
    assert "ended by a signal: the report shows the checks until then" in result.stderr
    assert "cli_targets::shift" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("jobs", [1, 2])
def test_checks_that_had_ended_before_a_signal_are_shown(
    run: Any, monkeypatch: pytest.MonkeyPatch, number: int, jobs: int
) -> None:
    """The table said of all checks that they were not run, and with several jobs nothing was printed."""
    audit = AUDIT.audit

    def interrupted(op: Any, progress: Any, **keywords: Any) -> Any:
        def report(finding: Any) -> None:
            progress(finding)
            if finding.check == "schema":
                os.kill(os.getpid(), number)

        return audit(op, progress=report, **keywords)

    monkeypatch.setattr(AUDIT, "audit", interrupted)
    chosen = ("--check", "schema", "--check", "numerics", "--check", "edges")
    result = run("audit", OPS, *chosen, "--jobs", str(jobs), "--json", "--no-cost")
    assert result.exit_code == 3, result.output
    found = [(f["check"], f["verdict"]) for f in json.loads(result.stdout)["findings"]]
    assert ("schema", "ok") in found
    assert ("edges", "incomplete") in found
    assert {v["verdict"] for v in json.loads(result.stdout)["verdicts"].values()} == {"incomplete"}


def test_a_second_signal_ends_the_threads_of_an_audit(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children could begin again while threads still ran, so that a thread audited its op to the end."""
    from shiplap.audit import child_process

    audit, stopped = AUDIT.audit, []

    def waiting(op: Any, **keywords: Any) -> Any:
        if op.spec.name == "cli_targets::shift":
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)
        else:
            time.sleep(1.0)
        stopped.append(child_process._stopped)
        return audit(op, **keywords)

    monkeypatch.setattr(AUDIT, "audit", waiting)
    result = run("audit", OPS, *QUICK, "--jobs", "2")
    assert result.exit_code == 3, result.output
    assert stopped
    assert all(stopped)
    assert not child_process._stopped


def test_unknown_check_lists_the_known(run: Any) -> None:
    from shiplap.audit import CHECKS

    result = run("audit", OPS, "--check", "frsh")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-5:-3] == ["SL503: no check has this name", "  where    audit(checks=...)"]
    assert f"expected did you mean 'fresh'? One of {', '.join(CHECKS)}" in result.stderr


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("absent.py", "the file does not exist"),
        ("packages/shiplap/tests/cli/test_app.py", "the target declares no op"),
        (f"{OPS}:scael", "did you mean 'scale'?"),
    ],
)
def test_wrong_targets(run: Any, target: str, expected: str) -> None:
    result = run("audit", target)
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in result.stderr


def test_unwritable_report_is_refused_before_the_work(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AUDIT, "audit", lambda *a, **k: pytest.fail("the audit was run"))
    for option in ("--html", "--statement"):
        result = run("audit", OPS, option, tmp_path / "absent" / "x")
        assert result.exit_code == 2
        assert "SL602: the file cannot be written" in result.stderr


def test_unavailable_device(run: Any) -> None:
    result = run("audit", OPS, "--device", "nowhere")
    assert result.exit_code == 2
    assert "SL605: the device is not available" in result.stderr


def test_progress_is_for_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from shiplap.tuning import engine

    for terminal, quiet in ((True, False), (True, True), (False, False)):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal, raising=False)
        monkeypatch.setattr(engine, "make_console", lambda stderr: Console(stderr=True, force_terminal=True))
        with engine.tuning_progress(False if quiet else None) as report:
            report("a::b fake", 1, 1)
        shown = capsys.readouterr()
        assert shown.out == ""
        assert bool(shown.err) == (terminal and not quiet)


def test_each_finding_is_a_step_of_the_progress_which_json_asks_not_to_see(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shiplap.tuning import engine

    wanted, steps = list[bool | None](), list[tuple[str, int, int]]()

    def progress(asked: bool | None) -> Any:
        wanted.append(asked)
        return nullcontext(lambda *step: steps.append(step))

    monkeypatch.setattr(engine, "tuning_progress", progress)
    for options in ((), ("--json",)):
        assert run("audit", f"{OPS}:scale", *QUICK, *options).exit_code == 0
    assert wanted == [None, False]
    assert steps == [("cli_targets::scale numerics", 1, 2), ("cli_targets::scale fresh", 2, 2)] * 2


def card(op: Any, **keywords: Any) -> Any:
    return AUDIT.CostCard(op.spec.name, "cpu", "x", "native", 1.0, 2.0, 3.0, None, ())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards at once, and where all checks are asked for a quick one of them."""
    monkeypatch.setattr(AUDIT, "measure_cost", card)
    audit = AUDIT.audit
    monkeypatch.setattr(AUDIT, "audit", lambda op, checks, **rest: audit(op, checks=checks or ["fresh"], **rest))


@pytest.mark.long
def test_every_report_has_the_cost_card(run: Any, measured: None, tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    full = ("audit", f"{OPS}:scale", "--html", page)
    assert "native" in run(*full).stdout
    assert "native" in page.read_text()
    assert json.loads(run(*full, "--json").stdout)["costs"][0]["eager_ns"] == 2.0
    for why in (("--no-cost",), QUICK):
        text = run(*full, *why).stdout
        assert "ns per call, smallest sample: not measured: only some checks were asked for, or --no-cost" in text
        assert "not measured" in page.read_text()
        assert "not measured" in json.loads(run(*full, *why, "--json").stdout)["no_costs"]


def test_a_statement_of_all_ops_is_written(run: Any, measured: None, tmp_path: Path) -> None:
    file = tmp_path / "audit.json"
    result = run("audit", OPS, *QUICK, "--cost", "--seed", "7", "--statement", file)
    assert result.exit_code == 0, result.output
    assert f"wrote {file}" in result.stderr
    written = json.loads(file.read_text())
    assert [s["name"] for s in written["subject"]] == ["cli_targets::scale", "cli_targets::shift"]
    predicate = written["predicate"]
    assert predicate["verdicts"]["cli_targets::scale"]["verdict"] == "proven"
    assert (predicate["facts"]["seed"], len(predicate["costs"])) == ("7", 2)
    assert predicate["ops"]["cli_targets::shift"]["samples"]["numerics"]["samples"] > 1


def test_a_sanitizer_without_a_gpu_is_skipped_and_an_unknown_tool_refused(run: Any) -> None:
    result = run("audit", f"{OPS}:scale", "--check", "fresh", "--sanitizer", "memcheck", "--json")
    assert result.exit_code == 0, result.output
    parsed = json.loads(result.stdout)["findings"]
    assert [(f["check"], f["verdict"]) for f in parsed] == [("fresh", "ok"), ("sanitizer", "skip")]
    assert "device='cuda'" in parsed[1]["evidence"]
    result = run("audit", f"{OPS}:scale", "--sanitizer", "mumcheck")
    assert result.exit_code == 2
    assert "SL503" in result.stderr


def test_an_op_that_cannot_be_called_is_still_reported(run: Any, tmp_path: Path, ns: str) -> None:
    file = tmp_path / "raises.py"
    file.write_text(
        "import shiplap as sl\nfrom jaxtyping import Float\nfrom torch import Tensor\n\n"
        f"@sl.op('{ns}::raises')\n"
        "def raises(x: Float[Tensor, 'n']) -> Float[Tensor, 'n']:\n    return x + 1\n\n"
        "@raises.kernel('cpu')\n"
        "def _(x, *, out):\n    raise RuntimeError('no such <device>')\n"
    )
    page = tmp_path / "page.html"
    result = run("audit", str(file), "--check", "numerics", "--cost", "--json", "--html", str(page))
    assert result.exit_code == 1, result.output
    parsed = json.loads(result.stdout)
    assert "no such <device>" in parsed["findings"][0]["evidence"]
    assert parsed["no_costs"] == f"{ns}::raises: RuntimeError: no such <device>"
    assert "no such &lt;device&gt;" in page.read_text()
    assert "no such <device>" not in page.read_text()
