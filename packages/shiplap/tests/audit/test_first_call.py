"""An op that computes its first result in a process before it is ready: later calls are right."""

import pytest
import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl

M = Float32[Tensor, "n c"]


@pytest.mark.parametrize("factors", [(0, 2), (2, 2), (3, 3)], ids=["late", "right", "always wrong"])
def test_determinism_names_a_first_call_that_alone_was_wrong(ns: str, factors: tuple[int, int]) -> None:
    calls: list[Tensor] = []

    @sl.op(f"{ns}::started")
    def started(x: M) -> M:
        return x * 2

    @started.kernel("cpu")
    def _(x: Tensor, *, out: Tensor) -> None:
        torch.mul(x, factors[bool(calls)], out=out)
        calls.append(x)

    (finding,) = sl.audit(started, checks=["determinism"], seed=0).findings
    late = factors == (0, 2)
    assert ("the first call in a process: " in finding.evidence) == late
    assert finding.fix.startswith("initialise before") == late
    assert finding.verdict == ("fail" if late else "ok")
