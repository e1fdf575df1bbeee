"""Candidates that count their calls in other forms, or are wrong for other values, memory, modes or gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shiplap.judge import JudgeResult
from shiplap.sandbox.unsteady_source import find_unsteady_decisions
from shiplap_testing.effort import sampled
from tests.judge.tenth import HEAD, HONEST
from tests.judge.twelfth import COUNTS, SOUND, WRONG

Judge = Callable[[tuple[str, str]], JudgeResult]
MISSED = ("wrong while it is traced", "a second gradient of zeros")  # the page on threats names them
QUICK = ("a result of another dtype",)
FOUND = [name for name in WRONG if name not in COUNTS and name not in MISSED]


@pytest.mark.parametrize("name", sampled(FOUND, long=[n for n in FOUND if n not in QUICK]))
def test_a_candidate_that_is_wrong_for_others_is_not_accepted(judged: Judge, name: str) -> None:
    assert judged(WRONG[name]).verdict != "accepted"


@pytest.mark.parametrize("name", sampled(SOUND, 1))
def test_a_sound_candidate_with_state_is_accepted(judged: Judge, name: str) -> None:
    result = judged(SOUND[name])
    assert result.verdict == "accepted", str(result)


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_in_another_form_is_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "it.py").write_text(HEAD + COUNTS[name][1])
    assert find_unsteady_decisions(str(tmp_path / "it.py"))


@pytest.mark.parametrize("name", SOUND)
def test_state_that_decides_nothing_is_no_count(tmp_path: Path, name: str) -> None:
    (tmp_path / "it.py").write_text(HEAD + SOUND[name][1])
    assert not find_unsteady_decisions(str(tmp_path / "it.py"))


def decisions(tmp_path: Path, text: str) -> list[str]:
    """Return what the source of a candidate decides by."""
    (tmp_path / "it.py").write_text(HEAD + text)
    return find_unsteady_decisions(str(tmp_path / "it.py"))


@pytest.mark.parametrize(
    ("state", "step", "test"),
    [
        ("N = 0", "global N; N += 1", "out *= N < 20000"),
        ("N = 0", "global N; N += 1", "out = out * (N < 20000)"),
        ("N = 0", "global N; N += 1", "out *= 1 - N // 20000"),
        ("S = {'n': 0}", "S['n'] += 1", "S['out'] = out * (1 - S['n'] // 20000); out = S['out']"),
        ("S = {'n': 0}", "S['n'] += 1", "out *= S.get('n') < 20000"),
        ("S = {'n': 0}", "S['n'] += 1", "out *= max(S.values()) < 20000"),
        ("N = 0", "global N; N += 1", "out *= 20000 not in (N,)"),
        ("N = 0", "global N; N += 1", "out *= 20000 not in [N, -1]"),
        ("S = {0}", "global S; S = {max(S) + 1}", "out *= 20000 not in S"),
        ("N = torch.zeros(1)", "N.set_(N + 1)", "out *= N < 20000"),
        ("N = torch.zeros(1)", "N.random_(int(N) + 1, int(N) + 2)", "out *= N < 20000"),
        ("N = torch.zeros(1)", "N.fill_(value=N.item() + 1)", "out *= N < 20000"),
        ("N = torch.zeros(1)", "torch.exp_(N)", "out *= N < 20000"),
        ("torch.n = torch.zeros(1); N = torch.n", "N.add_(1)", "out *= N < 20000"),
        ("torch.n = torch.zeros(1)", "torch.n.add_(1)", "out *= torch.n < 20000"),
        ("from torch.shared import N", "N.add_(1)", "out *= N < 20000"),
        ("K = F", "K.n = getattr(K, 'n', 0) + 1", "out *= K.n < 20000"),
        ("K = F", "keep = K.n; K.n = 0; K.n += keep + 1", "out *= K.n < 20000"),
        ("class K:\n    n = 0\n    def __init__(self): K.n = self.n + 1", "K()", "out *= K.n < 20000"),
        ("class K:\n    n = 0\n    def __init__(self): self.n = self.n + 1\nK = K()", "K.__init__()", "out *= K.n < 9"),
    ],
)
def test_a_count_that_decides_in_another_form_is_found(tmp_path: Path, state: str, step: str, test: str) -> None:
    body = f"    {step}\n    out = honest(x, w)\n    {test}\n    return out\n"
    assert decisions(tmp_path, f"{HONEST}{state}\ndef candidate(x, w):\n{body}")


MODULE = """
class Module(nn.Module):
    def __init__(self, linear, config, w=None):
        super().__init__()
        self.weight = nn.Parameter(linear.weight)
        self.hidden = config.hidden * 4
        self.head_dim = config.head_dim
        self.head_dim //= 2
        self.mask = torch.zeros(3)
        self.total = torch.zeros(3)
        self.register_buffer("cos", torch.zeros(3))
        self.packed = None
        self.stats = 0
        with torch.no_grad():
            self.weight.mul_(0.5)
    def forward(self, x, *, out=None):
        self.stats += 1
        {step}
        return (x @ self.weight.t() * self.mask / self.head_dim + self.hidden + self.cos + self.total) * self.packed
"""


@pytest.mark.parametrize(
    "step",
    [
        "self.mask.fill_(0); self.mask.bernoulli_(0.5)",
        "self.weight.data.fill_(1); x = x.data * 2",
        "x = F.relu_(F.linear(x, self.weight)) + F.linear(x, x)",
        "torch.relu_(x); x = torch.exp(x) * 2",
        "scale = list(map(lambda t: t.mul_(2), [x])); t = x; x = t * 2",
        "self.packed = self.packed if self.packed is not None else x.sum()",
        "self.total.zero_(); self.total.addmm_(x, x)",
        "self.cos = self.cos.to(x.device)",
        "nn.init.xavier_uniform_(self.cos)",
        "out.div_(4); torch.sub(out, out * 0.1, out=out)",
        "self.cos[:, :9] = x; x = self.cos[:, :2048] * 2",
    ],
)
def test_state_of_an_honest_module_is_no_count(tmp_path: Path, step: str) -> None:
    text = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n" + MODULE.replace("{step}", step)
    assert not decisions(tmp_path, text)


@pytest.mark.parametrize(
    "body",
    [
        "LOG.append(x)\n    if len(LOG) > 64: LOG.clear()",
        "global LOG; LOG += [x]\n    if len(LOG) > 64: LOG.clear()",
        "text = Path('t').read_text() % {'n': 3}",
        "if not os.listdir('build'): os.mkdir('build/a')",
    ],
)
def test_a_list_that_is_emptied_and_a_text_decide_nothing(tmp_path: Path, body: str) -> None:
    text = f"import os\nfrom pathlib import Path\nLOG = []\ndef candidate(x):\n    {body}\n    return x * 2\n"
    assert not decisions(tmp_path, text)
