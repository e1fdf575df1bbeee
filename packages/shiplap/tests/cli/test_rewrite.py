"""``shiplap rewrite``: matches, near misses and measurements as text, JSON and HTML; exit statuses for CI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = ("rewrite", "examples/rewrite.py", "--with", "examples/rewrite.py")


@pytest.mark.docs
def test_the_page_shows_what_is_printed(run: Any) -> None:
    done = run(*EXAMPLE, "--dry-run")
    assert done.exit_code == 0, done.output
    page = Path("docs/rewrite.md").read_text(encoding="utf-8")
    assert f"$ shiplap {' '.join(EXAMPLE)} --dry-run\n{done.stdout}```" in page


@pytest.mark.long
def test_measured_as_json_and_as_a_page(run: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run(*EXAMPLE, "--json", "--html", page)
    assert done.exit_code == 0, done.output
    parsed = json.loads(done.stdout)
    assert parsed["summary"] == "1 match, 0 near misses in 1 graph"
    (match,) = parsed["matches"]
    assert (match["operators"], match["saving"]["nodes"]) == (["linear", "silu", "linear", "mul"], -3)
    assert parsed["measured"]["error"] < 1e-5
    assert parsed["measured"]["kernels"][0] > 0
    assert [step["rewrite"] for step in parsed["measured"]["steps"]] == ["one_product"]
    assert "+linear_3: float32[2, 8, 256] = linear(y, cat)" in parsed["differences"][0]["text"]
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == 2
    assert " kernels, " in html
    assert 'class="marked"><title>cat</title>' in html
    assert "http" not in html.replace('xmlns="http://www.w3.org/2000/svg"', "")


MODEL = """
import torch, shiplap as sl
def pattern(x): return torch.relu(x) + {constant}
def other(x): return torch.where(x > 0, x, 0) + {constant}
made = sl.rewrite(pattern, other, name="made", samples=lambda: [(torch.randn(3),)])
def model(x): return torch.relu(x) + 2.0
def example_inputs(): return torch.randn(4)
"""


FIX = "; make the constant a float argument of the pattern, or write a pattern with this one"


def test_exit_status_1_where_nothing_matched(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "unmatched.py"
    file.write_text(MODEL.format(constant="1.0"))
    done = run("rewrite", file, "--with", f"{file}:made", "--dry-run")
    assert done.exit_code == 1, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "made (pre-grad): 0 matched, 1 near"
    assert lines[1] == f"  constant at {file}:6: add has other=2.0, the pattern 1.0 (2 of 2 nodes fit)" + FIX


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{file}:nothing"], "SL501: no function or model has this name"),
        (["{file}", "--inputs", "none"], "fix      define the function, or name another one with --inputs"),
        (["{file}:netwrok"], "expected did you mean 'network'?"),
        (["{file}", "--inputs", "none"], "SL613"),
        (["{file}", "--with", "{file}:other"], "SL501: no rewrite has this name"),
        (["missing.py"], "SL501"),
    ],
)
def test_exit_status_2(run: Any, tmp_path: Path, arguments: list[str], expected: str) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL.format(constant="2.0") + "\nnetwork = torch.nn.Linear(3, 4)\n")
    done = run("rewrite", *(a.format(file=file) for a in arguments), "--dry-run")
    assert done.exit_code == 2
    assert expected in done.stderr


def test_a_page_that_cannot_be_written_is_said_before_the_work(run: Any, tmp_path: Path) -> None:
    done = run("rewrite", "nowhere.py", "--html", tmp_path / "absent" / "page.html")
    assert done.exit_code == 2
    assert "SL602: the file cannot be written" in done.stderr


@pytest.mark.long
def test_inputs_by_name(run: Any, tmp_path: Path) -> None:
    """Models of transformers take their inputs by name: example_inputs() returns a dict."""
    source = (
        "import torch\n"
        "def model(q, *, keys, values):\n"
        "    return (q @ keys.transpose(-1, -2) / 3).softmax(-1) @ values\n"
        "def example_inputs():\n"
        "    return {n: torch.randn(2, 3, 5, 8) for n in ('q', 'keys', 'values')}\n"
    )
    (tmp_path / "named.py").write_text(source)
    (tmp_path / "just.py").write_text("from shiplap.rewrite.shipped.attention import attention\nonly = attention[0]\n")
    done = run("rewrite", str(tmp_path / "named.py"), "--with", str(tmp_path / "just.py"), "--dry-run")
    assert done.exit_code == 0, done.output
    assert "attention (pre-grad): 1 matched" in done.output


PASSES = """
import torch, shiplap as sl
def pattern(x): return torch.relu(x) + 1.0
def same(x): return torch.where(x > 0, x, 0) + 1.0
def other(x): return torch.relu(x) + 2.0
def listed(): return [(torch.randn(3),)]
right = sl.rewrite(pattern, same, samples=listed)
behind = sl.rewrite(pattern, same, name="behind", level="post-grad", samples=listed)
wrong = sl.rewrite(pattern, other, samples=listed)
unknown = sl.rewrite(pattern, same, name="unknown")
"""


def test_a_file_of_rewrites_is_proven_check_by_check(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "passes.py"
    file.write_text(PASSES)
    done = run("rewrite", "--test", file)
    assert done.exit_code == 1, done.output
    for text in ("same (pre-grad): proven", "behind (post-grad): proven", "other (pre-grad): REFUSED"):
        assert text in done.stdout
    assert "  outputs: the same before and after (" in done.stdout
    assert "  gradients: autograd has run before this level" in done.stdout
    assert "  outputs: " in done.stdout.partition("other (pre-grad)")[2]
    assert "correct the replacement: it computes something else" in done.stdout
    assert "  traced: SL805: neither annotations nor samples" in done.stdout
    assert run("rewrite", "--test", f"{file}:right").exit_code == 0
    parsed = json.loads(run("rewrite", "--test", f"{file}:wrong", "--json").stdout)
    assert [proof["proven"] for proof in parsed["proofs"]] == [False]


def test_a_file_without_rewrites_has_nothing_to_prove(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "empty.py"
    file.write_text("")
    done = run("rewrite", "--test", file)
    assert done.exit_code == 2
    assert "there is no rewrite to prove" in done.output
