"""cuda_graph, as far as it goes without a GPU; the rest is in tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap import torch_private
from shiplap.audit import capture
from shiplap.audit.check import Observation
from shiplap.audit.checks import cuda_graph
from shiplap.torch_private.dynamo import cudagraph_inputs, cudagraph_skips
from shiplap_testing.zoo import gpu
from tests.audit.common import look
from tests.audit.test_memory import double

# --8<-- [start:cuda_graph]
_workspace: dict[torch.device, Tensor] = {}


@sl.op("audit_graph::grows")
def grows(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2


@grows.kernel("cuda")
def _(x, *, out):
    if x.device not in _workspace or _workspace[x.device].numel() < len(x):
        # an older graph still writes to the last one
        _workspace[x.device] = torch.empty(len(x), device=x.device)
    torch.mul(_workspace[x.device][: len(x)].copy_(x), 2, out=out)


# --8<-- [end:cuda_graph]


def test_cuda_graph_is_skipped_elsewhere_and_says_so():
    finding = look(double, "cuda_graph")
    assert finding.verdict == "skip"
    assert "device='cuda'" in finding.evidence


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_graph_fires():
    (finding,) = sl.audit(grows, checks=["cuda_graph"], device="cuda", seed=1)
    assert finding.verdict == "fail", finding.evidence


def test_a_data_dependent_size_is_a_reason_to_stay_out_of_graphs():
    @sl.op("audit_graph::positive", bounds={"m": "n"})
    def positive(x: Float[Tensor, "n"]) -> Int64[Tensor, "m"]:
        return (x > 0).nonzero()[:, 0]

    tagged = cuda_graph.observe_uncapturable(positive)
    assert tagged is not None
    assert "its size m depends on data; use the capacity form" in tagged.skip
    untagged = cuda_graph.observe_uncapturable(gpu.faults.nonzero)
    assert untagged is not None
    assert "not tagged cudagraph_unsafe" in untagged.problem
    assert "capacity form" in untagged.fix
    assert cuda_graph.observe_uncapturable(double) is None


def test_a_tag_keeps_an_op_out():
    library = torch.library.Library("audit_graph_raw", "DEF")
    library.define("waits(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))

    @sl.adopt("audit_graph_raw::waits")
    def waits(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    observation = cuda_graph.observe_uncapturable(waits)
    assert observation is not None
    assert "tagged cudagraph_unsafe" in observation.skip


@sl.op("audit_graph::waits", tags=torch.Tag.cudagraph_unsafe)
def waits(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2


@waits.kernel("cuda")
def _(x, *, out):
    torch.mul(x, 2 if bool(x.isfinite().all()) else 0, out=out)


def test_a_declared_tag_keeps_an_op_out():
    unsafe = torch.Tag.cudagraph_unsafe
    assert unsafe in waits.overload.tags
    assert unsafe in waits.below_autograd.tags
    assert unsafe in waits.variant.overload.tags
    assert unsafe not in double.overload.tags
    observation = cuda_graph.observe_uncapturable(waits)
    assert observation is not None
    assert "tagged cudagraph_unsafe" in observation.skip


@pytest.mark.parametrize("wrong", ["", "_observe_side_stream", "_observe_two_streams"])
def test_an_op_with_the_tag_is_called_without_a_graph(wrong, monkeypatch):
    """The tag is no excuse for work on another stream."""
    called = []

    def stand_in(name):
        return lambda trial: called.append(name) or Observation("wrong values" if name == wrong else "")

    for name in [name for name in vars(cuda_graph) if name.startswith("_observe_")]:
        monkeypatch.setattr(cuda_graph, name, stand_in(name))
    monkeypatch.setattr(cuda_graph._GraphTrial, "of", lambda op, case: None)
    observation = cuda_graph.observe_cuda_graph(waits, SimpleNamespace(device="cuda:0"))
    eager = ["_observe_eager", "_observe_side_stream", "_observe_two_streams", "_observe_other_device"]
    assert called == eager[: eager.index(wrong) + 1 if wrong else None]
    assert (observation.problem, "tagged" in observation.skip) == (("wrong values", False) if wrong else ("", True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_op_with_the_tag_runs_between_two_cuda_graphs():
    torch_private.reset_compiler()
    compiled = torch.compile(lambda x: waits(x.sin() * 3).cos() + 1, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        x = torch.randn(64, device="cuda")
        torch.testing.assert_close(compiled(x), (x.sin() * 6).cos() + 1)
    assert (cudagraph_skips(), cudagraph_inputs() > 0) == (0, True)
    (finding,) = sl.audit(waits, checks=["cuda_graph"], device="cuda", seed=1)
    assert (finding.verdict, "tagged cudagraph_unsafe" in finding.evidence) == ("skip", True), finding.evidence


def test_free_blocks_are_covered_by_requests_that_find_them(monkeypatch):
    """Torch serves up to 1 MiB from small segments, so a larger free block there takes several requests."""

    def segment(kind, *blocks, pool=(0, 0), device=0, stream=7):
        states = [{"size": size, "state": state} for size, state in blocks]
        return {"device": device, "stream": stream, "segment_type": kind, "segment_pool_id": pool, "blocks": states}

    mib = 1 << 20
    segments = [
        segment("small", (512, "active_allocated"), (2 * mib - 512, "inactive")),
        segment("large", (20 * mib, "inactive"), stream=0),
        segment("small", (2 * mib, "inactive"), pool=(0, 1)),
        segment("small", (2 * mib, "inactive"), device=1),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert capture._free_blocks(torch.device("cuda")) == [(20 * mib, 0), (mib, 7), (mib - 512, 7)]
    monkeypatch.setattr(capture, "MOST_POISONED_BYTES", 2 * mib)  # the small ones first
    assert capture._free_blocks(torch.device("cuda")) == [(mib, 7), (mib - 512, 7)]


def test_the_zoo_of_graphs_is_complete():
    assert {s.name for s in gpu.BAD} == set(gpu.EVIDENCE)
    assert len(gpu.BAD) >= 18
    elsewhere = {"atomics in any order", "weights copied into a staging buffer", "result on the host"}
    assert all("cuda_graph" in s.flagged_by or s.name in elsewhere for s in gpu.BAD)
