"""``shiplap explain``: a function by file or module, as text and JSON, with exit statuses for CI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shiplap.errors import CATALOGUE


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))


@pytest.mark.long
def test_a_function_of_a_file(run: Any) -> None:
    done = run("explain", "examples/fuse.py:layer")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].endswith("  template")
    assert lines[1] == "  inside   fused::scaled_mm, aten.add, aten.gelu"
    assert lines[2].startswith("  from     examples/fuse.py:")
    assert lines[-1] == "1 kernel in 1 graph: 1 template"


@pytest.mark.docs
def test_the_page_shows_what_is_printed(run: Any) -> None:
    shown = run("explain", "examples/fuse.py:mean").stdout
    assert f"$ shiplap explain examples/fuse.py:mean\n{shown}```" in Path("docs/fuse.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("id", ["SL202", "sl820"])  # of the core, and of a family
def test_the_id_of_an_error_is_explained(run: Any, id: str) -> None:
    done = run("explain", id)
    entry = CATALOGUE[id.upper()]
    builtin = {"SL202": "ArgumentError, also a ValueError", "SL820": "SurveyError, also a RuntimeError"}[entry.id]
    lines = f"{entry.id}: {entry.title}", f"  class    {builtin}", f"  cause    {entry.why}", f"  fix      {entry.fix}"
    assert (done.exit_code, done.stdout.splitlines()) == (0, [*lines, f"  page     docs/errors.md#{entry.id}"])
    told = json.loads(run("explain", id, "--json").stdout)
    assert (told["id"], told["cause"], told["page"]) == (entry.id, entry.why, f"docs/errors.md#{entry.id}")
    assert f"<span id='{entry.id}'>" in Path("docs/errors.md").read_text(encoding="utf-8")


def test_an_id_that_no_error_has(run: Any) -> None:
    done = run("explain", "SL999")
    assert done.exit_code == 2
    assert "SL613" in done.stderr
    assert "  got      SL999\n" in done.stderr


def test_json_is_one_value_with_the_code_on_request(run: Any) -> None:
    parsed = json.loads(run("explain", "examples/fuse.py:mean", "--json", "--source").stdout)
    assert parsed["summary"] == "2 kernels in 1 graph: 1 template, 1 generated"
    assert parsed["kernels"][0]["unfused"][0]["side"] == "after"
    assert parsed["facts"]["function"] == "examples/fuse.py:mean"
    assert parsed["kernels"][0]["name"] in parsed["source"][0]


def test_exit_status_1_where_a_template_is_wrong(run: Any, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "wrong.cpp.jinja").write_text(Path("examples/scaled_mm.cpp.jinja").read_text().replace("k < K", LESS))
    result = run("explain", f"{tmp_path}/wrong.py:call", "--inputs", "given")
    assert result.exit_code == 1, result.output
    assert "  wrong    wrong(BM=16, BN=64): result 0: " in result.stdout
    assert "  chosen   reference: no template is proven for this call\n" in result.stdout


LESS = "k < K - 1"
WRONG = """
import torch
from jaxtyping import Float
from torch import Tensor
import shiplap as sl

@sl.op("wrong::mm")
def mm(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], scale: Float[Tensor, "n"]) -> Float[Tensor, "m n"]:
    return (a @ b) * scale

mm.template("cpu", "wrong.cpp.jinja", configs=[{"BM": 16, "BN": 64}])

def call(*args):
    return mm(*args) + 1

def given():
    return torch.randn(20, 30), torch.randn(30, 70), torch.rand(70)
"""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("examples/fuse.py", "SL501: no function or model has this name"),
        ("examples/fuse.py:leyer", "expected did you mean 'layer'?"),
        ("examples/fuse.py", "got      no name, and no 'model' in it"),
        ("examples/none.py:layer", "SL501: the file does not exist"),
        ("tests.cli.targets:nothing", "SL501: no function or model has this name"),
        ("torch.nn:ReLU", "got      ReLU is a class, of which there is no instance"),
        ("examples/first_op.py:rms_norm", "SL613: the arguments do not fit the command"),
    ],
)
def test_what_cannot_be_explained(run: Any, function: str, says: str) -> None:
    result = run("explain", function)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
