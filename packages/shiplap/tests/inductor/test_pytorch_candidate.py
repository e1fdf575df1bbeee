"""A template that is PyTorch code: verified like a kernel, tuned and fused by Inductor as the user's own code is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shiplap.dispatch import tuned_choices
from shiplap.inductor import fusion_choices, select_candidate, switches
from shiplap.inductor.pytorch_candidate import TracedCandidate
from shiplap.torch_private import inductor_lowering
from shiplap.tuning import bench
from shiplap.tuning.measure import Timing
from tests.inductor.targets import product, slow_mm


def wrong(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return a @ b


def of_another_place(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    raise RuntimeError("not on this device")


@pytest.fixture(autouse=True)
def fresh(fresh_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "shiplap"))
    monkeypatch.setattr(select_candidate, "_isolation", None)
    before = list(slow_mm.templates["cpu"])
    with inductor_lowering.without_graph_caches():
        yield
    slow_mm.templates["cpu"] = before
    tuned_choices.forget_derived_choices()


def compiled(**options: Any) -> Any:
    """A layer compiled and compared with eager; the decision that was made."""
    args = torch.randn(20, 24), torch.randn(24, 16), torch.randn(16)

    def layer(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return torch.relu(slow_mm(a, b, bias))

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, **options)(*args), layer(*args))
    return fusion_choices("fusetest::slow_mm")[-1]


def test_it_is_used_when_it_is_proven():
    made = compiled()
    assert (made.chosen, [v.status for v in made.verdicts]) == ("product", ["ok"])
    with switches(slow_mm, fusion=False):
        assert compiled().chosen == "product"


def test_it_is_measured_as_inductor_tunes_it(monkeypatch):
    """Where the fallback is far slower, and Inductor's choice for a library's call takes part all the same."""
    tuned: list[bool] = []
    plain = TracedCandidate.node

    def node(self: TracedCandidate, fusion: bool = True) -> Any:
        tuned.append(inductor_lowering.is_autotuning())
        return plain(self, fusion)

    def race(runs: dict[int, Any], *_: Any) -> dict[int, Timing]:
        """The fallback, first, is twice as slow, tuned or not."""
        return {i: Timing(*([1e-3 if i == 1 else 2e-3] * 3), samples=9, finished=True) for i in runs}

    monkeypatch.setattr(TracedCandidate, "node", node)
    monkeypatch.setattr(select_candidate, "race_runs", race)
    monkeypatch.setattr(bench, "race_runs", race)
    made = compiled(mode="max-autotune-no-cudagraphs")
    assert made.chosen == "product", made
    assert "fallback 2 ms" in made.reason
    assert tuned == [True, True]  # in the trial, and in the graph


@pytest.mark.parametrize(
    ("product_seconds", "launch", "chosen"),
    [(1e-3, 2e-3, "reference"), (1e-3, 1e-5, "product"), (1e-3, None, "product"), (2.01e-3, 0.0, "reference")],
    ids=["dear launch", "cheap launch", "captured", "slower on the device"],
)
def test_a_launch_counts_where_the_host_makes_it(monkeypatch, product_seconds, launch, chosen):
    """The fallback takes 2 ms on the device and is launched in 0.1 ms. A CUDA graph needs no launch of each kernel."""

    def race(runs: dict[int, Any], *_: Any) -> dict[int, Timing]:
        return {i: Timing(*([product_seconds if i == 1 else 2e-3] * 3), samples=9, finished=True) for i in runs}

    def launches(runs: dict[int, Any], wait: Any) -> dict[int, float]:
        return {i: launch if i == 1 else 1e-4 for i in runs}

    monkeypatch.setattr(select_candidate, "race_runs", race)
    monkeypatch.setattr(bench, "race_runs", race)
    monkeypatch.setattr(select_candidate, "launch_seconds", launches)
    monkeypatch.setattr(select_candidate, "_wait_for_launches", lambda device: None if launch is None else int)
    assert compiled(mode="max-autotune-no-cudagraphs").chosen == chosen


@pytest.mark.parametrize(("function", "status"), [(wrong, "wrong"), (of_another_place, "broken")])
def test_what_is_not_proven_is_not_used(function, status):
    slow_mm.templates["cpu"] = []
    slow_mm.template("cpu", function)
    with pytest.warns(UserWarning, match=f"{function.__name__} is {status} and is not used"):
        assert compiled().chosen == "reference"


def test_it_serves_no_eager_call_and_is_listed_by_its_name():
    assert [t.name for t in slow_mm.templates["cpu"]] == [product.__name__]
    assert not slow_mm.kernels.get("cpu")
