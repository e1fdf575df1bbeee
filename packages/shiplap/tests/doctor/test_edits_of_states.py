"""Numbers of the program are updated outside of the graph only where nothing in it uses them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shiplap.doctor.edits_of_states import prepare_in_front, update_in_front, update_later
from tests.doctor.programs import CountingBackend, proposals

PLATEAU = """
    import torch
    state = {"rate": 0.5, "best": 9.0, "bad": 0}
    @torch.compile(backend=count)
    def f(x, metric):
        if metric < state["best"]:  # HERE
            state["best"] = metric
        else:
            state["bad"] += 1
        return x * state["rate"]
"""


def loaded(text: str, monkeypatch: pytest.MonkeyPatch, count: CountingBackend) -> dict[str, Any]:
    """The names of the module that the source code ``text`` makes, compiled by ``count``."""
    module = ModuleType("edited")
    module.__dict__["count"] = count
    # The compiler imports the module of a function that it traces.
    monkeypatch.setitem(sys.modules, "edited", module)
    exec(text, vars(module))
    return vars(module)


def test_numbers_are_updated_in_front_of_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = proposals(tmp_path, PLATEAU, update_in_front, "metric", "", "f", "value")
    assert "def update_f(metric):" in text
    count = CountingBackend()
    ran = loaded(text, monkeypatch, count)
    for metric in (5.0, 6.0, 4.0, 4.5, 3.0):
        torch.testing.assert_close(ran["f"](torch.ones(2), metric), torch.full((2,), 0.5))
    assert ran["state"] == {"rate": 0.5, "best": 3.0, "bad": 2}
    assert count.frame_count == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x * state", "y = x + 1\n        return y * state"),  # behind it: the update is still the beginning
        ("if metric", "x = x + 1\n        if metric"),
        ('state["best"] = metric', 'state["best"] = check(metric)'),
        ('state["best"] = metric', "best = metric"),
        ('state["bad"] += 1', "x.add_(1)"),
    ],
)
def test_only_the_beginning_of_a_function_moves(tmp_path: Path, old: str, new: str) -> None:
    found = proposals(tmp_path, PLATEAU.replace(old, new), update_in_front, "metric", "", "f", "value")
    assert len(found) == ("y = x + 1" in new)


BEST = """
    import torch
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.best, self.improved = 9.0, 0
        def forward(self, x):
            loss = x.square().mean()
            value = loss.item()  # HERE
            if value < self.best:
                self.best = value
                self.improved += 1
            return loss
    net = Net()
    run = torch.compile(net, backend=count)
"""


def test_numbers_are_updated_behind_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = proposals(tmp_path, BEST, update_later, "loss.item", "", "forward", "item")
    assert "def update_forward_later(loss):\n    value = loss.item()  # HERE\n    if value < net.best:" in text
    count = CountingBackend()
    ran = loaded(text, monkeypatch, count)
    for scale in (2.0, 3.0, 1.0, 0.5):
        x = torch.full((3,), scale, requires_grad=True)
        ran["run"](x).backward()
    assert (ran["net"].best, ran["net"].improved) == (0.25, 3)
    assert count.frame_count == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return loss", "return loss * self.best"),  # it is read
        ("return loss", "return loss, value"),
        ("run =", "class Other(Net): pass\n    run ="),  # there may be several objects
        ("self.improved += 1", "return loss"),
        ("self.improved += 1", "self.best = self.draw()"),
        ("run =", "def best_of(n):\n        return n.best\n    run ="),
    ],
)
def test_numbers_that_something_else_uses_stay(tmp_path: Path, old: str, new: str) -> None:
    source = BEST.replace(old, new)
    assert source != BEST
    assert proposals(tmp_path, source, update_later, "loss.item", "", "forward", "item") == []


SPANS = """
    import numpy as np
    import torch
    rng = np.random.default_rng(0)
    @torch.compile(backend=count)
    def f(x, size=2):
        mask = np.zeros(x.shape[0], dtype=bool)
        for start in rng.choice(x.shape[0] - size, 2, replace=False):  # HERE
            mask[start : start + size] = True
        y = torch.where(torch.from_numpy(mask), 0.0, x)
        return y * 2
"""


def test_draws_for_sizes_are_made_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SPANS.replace(", size=2", "").replace("size", "2")
    text, _ = proposals(tmp_path, source, prepare_in_front, "rng.choice", "", "f", "system")
    assert "def prepare_f(x):" in text
    assert "(mask,) = prepared" in text
    count = CountingBackend()
    f = loaded(text, monkeypatch, count)["f"]
    for _ in range(3):
        assert 2 <= int((f(torch.ones(9)) == 0).sum()) <= 4
    assert count.frame_count == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),  # a size that may be missing
        ("mask = np.zeros", "if x.shape[0] > 3:\n            mask = np.zeros"),  # it may be missing
        ("mask = np.zeros", "x = x + 1\n        mask = np.zeros"),
        ("mask = np.zeros", "self.mask = np.zeros"),
        ("mask[start : start + 2]", "x[start : start + 2]"),
        ("x.shape[0] - 2", "int(x.sum())"),
        ("mask = np.zeros", "start = time.time()\n        mask = np.zeros"),  # it would include a compilation
    ],
)
def test_what_uses_a_tensor_or_a_clock_stays(tmp_path: Path, old: str, new: str) -> None:
    source = SPANS.replace(", size=2", "").replace("size", "2").replace(old, new) if old else SPANS
    assert proposals(tmp_path, source, prepare_in_front, "rng.choice", "", "f", "system") == []
