"""``shiplap backend`` as a user runs it, on the device that the session built."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from shiplap.cli.app import app
from shiplap_backend import audit, coverage
from shiplap_backend.project import Project
from shiplap_testing.forked import python
from tests.backend import described

pytest.importorskip("openvino")


def run(*arguments: object, status: int = 0) -> Any:
    """Stdout as JSON where ``--json`` was asked for, else (stdout, stderr)."""
    done = CliRunner().invoke(app, ["backend", *map(str, arguments)])
    assert done.exit_code == status, (done.stdout, done.stderr, done.exception)
    return json.loads(done.stdout) if "--json" in arguments and status != 2 else (done.stdout, done.stderr)


def test_new_gen_twice(tmp_path: Path) -> None:
    where = tmp_path / "p"
    assert run("new", "mydevice", "--runtime", "openvino", "--dir", where, "--json")["device"] == "mydevice"
    described.write(where, "  exp.out: {template: unary, graph: Exp(self)}\n")
    first = run("gen", where, "--json")
    assert first["registered"] == 1
    assert "bodies.h" in first["touched"]
    assert run("gen", where, "--json")["touched"] == []
    out, err = run("gen", tmp_path, status=2)
    assert "SL905" in err
    assert out == ""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that was never generated."""
    where = tmp_path_factory.mktemp("fresh") / "p"
    run("new", "neverbuilt", "--runtime", "openvino", "--dir", where)
    return where


def bad_input(where: Path, broken: Path) -> dict[str, tuple[list[object], str]]:
    """What a stranger may type → id and words of the answer."""
    file = broken / "backend.toml"
    return {
        "no directory": (["gen", where / "nothing"], "SL905|no backend.toml"),
        "a file": (["coverage", where / "ops.yaml"], "SL905|no backend.toml"),
        "settings": (["gen", broken], f"SL905|{file}:3|units 0|1 to 256"),
        "not generated": (["diff", where], "SL904|the schema lock does not exist|schema.lock"),
        "no lock": (["diff", where / "nothing"], "SL904|no such file"),
        "not built": (["audit", where], f"SL905|not built|shiplap backend build {where}"),
        "program without device": (["coverage", where, "--model", file], "SL905|not built"),
        "name that is a keyword": (["new", "class", "--runtime", "openvino"], "SL905|'class'"),
        "name of another device": (["new", "xla", "--runtime", "openvino"], "SL905|'xla'"),
        "place that is a file": (
            ["new", "fine", "--runtime", "openvino", "--dir", file / "x"],
            "SL905|Not a directory",
        ),
        "runtime": (["functions", "openvin"], "SL907|did you mean 'openvino'?"),
    }


def test_bad_input_is_answered(fresh: Path, tmp_path: Path) -> None:
    """Each with an id and what to do; none with the name of a Python exception."""
    (tmp_path / "backend.toml").write_text('device = "x"\nruntime = "openvino"\nunits = 0\n')
    for name, (arguments, words) in bad_input(fresh, tmp_path).items():
        out, err = run(*arguments, status=2)
        assert all(word in err for word in words.split("|")), (name, err)
        assert "fix " in err, (name, err)
        assert "unexpected" not in err, (name, err)
        assert out == "", (name, out)


@pytest.mark.parametrize(
    ("option", "got"),
    [
        (["--dtypes", "f31"], "'f31'; did you mean 'f32'?"),
        (["--match", "("], "unterminated subpattern"),
        (["--match", "no such operator"], "no operator matches"),
        (["--models", "--match", "no such model"], "no model matches"),
        (["--models", "--ops", "gpt-2"], "'gpt-2'; did you mean 'gpt2'?"),
        (["--models", "--dtypes", "f32,bf16"], "f32, in which models are compared"),
        (["--ops", "softmxa"], "did you mean 'softmax'?"),
        (["--ops", "relu"], "'relu'; did you mean 'nn.functional.relu'?"),
    ],
)
def test_audit_knows_what_it_can_be_asked(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, option: list[str], got: str
) -> None:
    from shiplap_backend import audit, project

    monkeypatch.setattr(project, "require_built", lambda _: None)
    monkeypatch.setattr(audit, "operator_names", lambda _: ["add", "softmax", "real", "nn.functional.relu"])
    _, err = run("audit", fresh, *option, status=2)
    assert "SL613" in err
    assert got in err


@pytest.mark.long
def test_a_build_that_is_right_compiles_nothing(project: Project) -> None:
    library = project.package / "_C.so"
    before = library.stat().st_mtime_ns
    report = run("build", project.root, "--accept-drift", "--json")
    assert report["build_seconds"] < 10
    assert library.stat().st_mtime_ns == before


def test_coverage_names_what_is_native(project: Project, tmp_path: Path) -> None:
    report = run("coverage", project.root, "--html", tmp_path / "c.html", "--json")
    assert {"add.out", "add.Tensor", "add_.Tensor", "mm", "relu", "relu_", "empty_strided"} <= set(report["native"])
    assert "cos.out" not in report["native"]
    assert report["reasons"]["cos.out"] == "no entry in the metadata"
    assert report["reasons"]["linalg_qr.out"] == "opset 15 has no factorisations"
    assert report["counts"]["native"] == len(report["native"])
    page = (tmp_path / "c.html").read_text()
    assert "<td>add.out<td>native" in page
    assert "http" not in page


def test_the_message_of_a_traceback_is_all_of_it() -> None:
    from shiplap_backend.coverage import _final_exception

    frames = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f(x)\n    ^^^^\n'
    assert _final_exception(frames + "SL1: two\n  lines\n") == "SL1: two\n  lines"
    assert _final_exception(frames.replace("    f(x)\n    ^^^^\n", "") + "KeyError: 1") == "KeyError: 1"
    assert _final_exception("Aborted") == "Aborted"


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that the verb starts find torch imported already."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return python(*command[1:], cwd=Path.cwd())

    monkeypatch.setattr(coverage, "subprocess", SimpleNamespace(run=run))


SCRIPT = """
import torch
x = torch.ones(3, 3, device="openvino")
(x @ x).relu().{more}
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("more", "status"), [pytest.param("erfc()", 0, marks=pytest.mark.long), ("sum(); torch.pdist(x)", 1)]
)
def test_coverage_of_a_program(project: Project, tmp_path: Path, more: str, status: int) -> None:
    """On the CPU for a stated reason, and a gap."""
    script = tmp_path / "model.py"
    script.write_text(SCRIPT.replace("{more}", more))
    report = run("coverage", project.root, "--model", script, "--json", status=status)
    called = {n["op"]: n for n in report["called"]}
    assert called["aten::mm.out"]["native"] == 1
    gaps = [n["op"] for n in report["called"] if n["fallback"] and not n["expected"]]
    assert ("aten::_pdist_forward" in gaps) == (status == 1)


@pytest.mark.long
def test_a_program_that_fails_says_how(project: Project, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('no weights\\n  and no bias')")
    _, err = run("coverage", project.root, "--model", tmp_path / "broken.py", status=2)
    assert "ValueError: no weights" in err
    assert "and no bias" in err
    _, err = run("coverage", project.root, "--model", tmp_path / "none.py", status=2)
    assert "no such file" in err


def test_audit_reports_what_the_sweep_found(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep itself: tests/backend/test_opinfo.py."""
    verdicts = [
        audit.SweepVerdict("add", "f32", "native", 3),
        audit.SweepVerdict("mm", "f32", "fail", 3, why="1 for 2"),
    ]
    monkeypatch.setattr(audit, "run_sweep", lambda *a, **k: [v for v in verdicts if v.op in a[1]])
    monkeypatch.setattr(audit, "operator_names", lambda project: ["add", "mm"])
    report = run("audit", project.root, "--match", "a", "--json")
    assert report["counts"]["f32"]["native"] == len(report["verdicts"]) == 1
    out, _ = run("audit", project.root, "--ops", "add,mm", status=1)
    assert out.split("\n")[:2] == ["f32  native 1  fail 1", "fail  mm  f32  1 for 2"]
    _, err = run("audit", project.root, "--match", "nothing", status=2)
    assert "no operator matches 'nothing'" in err


def test_audit_reports_every_model(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are right: what a model left to the CPU is in the JSON."""
    from shiplap_backend import project

    asked: list[dict[str, Any]] = []
    verdicts = [
        audit.SweepVerdict("gpt2", "f32", "native", 1),
        audit.SweepVerdict("vit-tiny", "f32", "left", 0, why="needs timm"),
    ]

    def swept(*arguments: Any, **options: Any) -> list[audit.SweepVerdict]:
        asked.append(options)
        return verdicts

    monkeypatch.setattr(project, "require_built", lambda _: None)
    monkeypatch.setattr(audit, "run_sweep", swept)
    out, _ = run("audit", fresh, "--models", "--ops", "gpt2,vit-tiny")
    assert out.splitlines()[:3] == ["f32  native 1  left 1", "native  gpt2  f32", "left  vit-tiny  f32  needs timm"]
    assert asked[0]["models"] is True
    assert [v["op"] for v in run("audit", fresh, "--models", "--json")["verdicts"]] == ["gpt2", "vit-tiny"]
    verdicts[0] = audit.SweepVerdict(
        "gpt2", "f32", "fail", 1, why="result 0 is 1.0e-03 from float64, the CPU's 1.0e-07"
    )
    run("audit", fresh, "--models", status=1)


def test_diff_of_locks(project: Project, tmp_path: Path) -> None:
    assert run("diff", project.root, "--json")["changes"] == []
    old = json.loads(project.lock.read_text())
    old["torch"], old["schemas"]["relu"] = "2.12.0", "relu(Tensor x) -> Tensor"
    (tmp_path / "old.lock").write_text(json.dumps(old))
    report = run("diff", tmp_path / "old.lock", "--json", status=1)
    assert [c["name"] for c in report["changes"]] == ["relu"]
    out, _ = run("diff", tmp_path / "old.lock", project.root, status=1)
    assert "changed relu\n  - relu(Tensor x) -> Tensor\n  + relu(Tensor self) -> Tensor" in out


def test_functions_of_the_vendor() -> None:
    assert run("functions", "openvino", "softplus", "--json") == {"SoftPlus": ["SoftPlus(arg)"]}
    out, _ = run("functions", "openvino", "all_are")
    assert out == "all_are(values, what)  // Whether each value is `what`.\n"
    run("functions", "openvino", "nothing of that name", status=1)
    _, err = run("functions", "openvin", status=2)
    assert "did you mean 'openvino'" in err
