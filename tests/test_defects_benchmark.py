"""The public benchmark of defects (``benchmarks/defects``): its cases and its runner, with quick checkers."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

import shiplap as sl

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "defects"


@pytest.fixture(scope="module")
def cases():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks.defects.cases import load_cases

        yield load_cases()


def test_each_case_has_a_report_and_two_ops_of_one_declaration(cases):
    assert len(cases) >= 60
    text = "\n".join(path.read_text() for path in sorted((FOLDER / "cases").glob("*.py")))
    for name, case in cases.items():
        owner, number = re.fullmatch(r"([\w.-]+/[\w.-]+)#(\d+)", case.report).groups()
        assert re.search(rf"# https://github.com/{owner}/(issues|pull)/{number}\n", text), f"{name} links no report"
        assert case.defect
        assert case.broken is not case.sound
        assert case.broken.reference.__code__ == case.sound.reference.__code__
        assert str(case.broken.spec.args) == str(case.sound.spec.args)
    assert len({case.report for case in cases.values()}) == len(cases), "a report stands for one case"


def _report_all_broken(op, seed):
    """Return what a checker says that tells broken ops by their namespace."""
    return op.spec.name.startswith("defects::"), [f"seed {seed}"]


def _run(monkeypatch, capsys, *arguments):
    from benchmarks.defects import __main__ as runner

    monkeypatch.setitem(runner.TOOLS, "none", _report_all_broken)
    monkeypatch.setattr(sys, "argv", ["defects", "--tool", "none", *map(str, arguments)])
    runner.main()
    return capsys.readouterr().out


def test_the_runner_counts_defects_and_twins_and_continues(cases, monkeypatch, capsys, tmp_path):
    file = tmp_path / "results.json"
    only = "--only", "relu,layer_norm", "--seeds", 0, 1, "--json", file
    assert "2 of 2 defects found, 0 of 4 checks of twins flagged, 0 unanswered" in _run(monkeypatch, capsys, *only)
    rows = json.loads(file.read_text())
    assert [(r["case"], r["kind"], r["seed"]) for r in rows][:3] == [
        ("layer_norm", "broken", 0),
        ("relu", "broken", 0),
        ("layer_norm", "sound", 0),
    ]
    rows[0]["found"], rows[-1]["found"] = False, True  # results that are there are kept
    file.write_text(json.dumps(rows))
    out = _run(monkeypatch, capsys, *only)
    assert "1 of 2 defects found, 1 of 4 checks of twins flagged" in out
    assert "missed: layer_norm" in out
    assert "flagged: relu (seed 1)" in out


def test_an_op_that_ends_its_process_is_found_and_a_checker_that_fails_gives_no_answer(cases):
    from benchmarks.defects.tools import in_child

    assert in_child(lambda op, seed: os._exit(3))(cases["relu"].broken, 0) == (True, ["the process ended with 3"])
    found, evidence = in_child(lambda op, seed: 1 // 0)(cases["relu"].broken, 0)
    assert found is None
    assert "ZeroDivisionError" in evidence[0]


def test_the_planted_defects_are_cases_too(cases):
    from benchmarks.defects.planted import load_planted

    planted = load_planted()
    assert len(planted) >= 300
    case = planted["product over the first 256 columns"]
    assert case.report in ("seen", "held_out", "later")
    assert case.defect
    assert isinstance(case.op("broken"), sl.Op)
    assert isinstance(case.op("sound"), sl.Op)


@pytest.mark.parametrize(("name", "found"), [("causal_attention", True), ("nll_mean", False)])
def test_a_unit_test_finds_what_ordinary_inputs_show(cases, name, found):
    from benchmarks.defects.tools import run_assert_close

    assert run_assert_close(cases[name].broken, 0)[0] is found
    assert run_assert_close(cases[name].sound, 0) == (False, [])
