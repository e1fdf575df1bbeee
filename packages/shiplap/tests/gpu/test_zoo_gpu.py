"""The zoo of CUDA graphs, on a GPU: every bad op is flagged with the right words, no sound one is."""

from __future__ import annotations

import pytest
import torch

from shiplap.audit import audit
from shiplap_testing.zoo import gpu

SEED = 20261121
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


NEEDING_TWO = [pytest.mark.whole_device, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")]


@pytest.mark.parametrize(
    "specimen",
    [pytest.param(s, marks=NEEDING_TWO if s.name in gpu.TWO_DEVICES else []) for s in gpu.BAD],
    ids=str,
)
def test_a_bad_op_is_flagged(specimen):
    messages = []
    for check in sorted(specimen.flagged_by):
        (finding,) = audit(specimen.op, checks=[check], seed=SEED, device="cuda")
        print(f"\n{specimen.name}: {finding.verdict}: {finding.evidence}\n  fix: {finding.fix}")
        assert finding.verdict == "fail", finding.evidence
        assert finding.fix
        messages.append(finding.evidence)
    assert gpu.EVIDENCE[specimen.name] in " ".join(messages)


@pytest.mark.parametrize("specimen", gpu.GOOD, ids=str)
def test_a_sound_op_is_captured_and_replayed(specimen):
    graph, trees = audit(specimen.op, checks=["cuda_graph", "cudagraph_trees"], seed=SEED, device="cuda")
    print(f"\n{specimen.name}: {graph.verdict}: {graph.evidence}\n  {trees.verdict}: {trees.evidence}")
    assert graph.verdict == "ok", graph.evidence
    assert "graph of" in graph.evidence
    assert "a warm call: " in graph.evidence
    assert trees.verdict in ("ok", "skip"), trees.evidence
    assert trees.verdict == "ok" or "mutates its arguments" in trees.evidence


def test_failed_captures_leave_torch_as_it_was():
    """All the bad ops have run: random numbers, the allocator and a capture of torch's own still work."""
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.randn(4, device="cuda").isfinite().all()
    graph, x = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
    with torch.cuda.graph(graph):
        y = x + torch.rand(4, device="cuda")
    x.fill_(10)
    graph.replay()
    assert (y >= 10).all()
    torch.cuda.empty_cache()
