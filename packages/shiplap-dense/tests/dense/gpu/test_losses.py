"""The linear cross entropy on a real GPU: values, gradients, memory, graphs, and the audit."""

from __future__ import annotations

import pytest
import torch

import shiplap as sl
import shiplap_dense as dense
from shiplap_dense import losses
from tests.dense.test_losses import OPTIONS, by_torch, drawn, gradients

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_losses_and_gradients_are_those_of_torch(name, dtype):
    hidden, weight, target, bias = (t.cuda() for t in drawn(700, 9001, 64, dtype))
    target[::5] = OPTIONS[name].get("ignore_index", -100)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    made = dense.linear_cross_entropy(hidden, weight, target, bias, **OPTIONS[name])
    wanted = by_torch(hidden, weight, target, bias, **OPTIONS[name])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    if dtype == torch.float16 and "reduction" not in OPTIONS[name]:  # scaled, as in training: else gradients underflow
        made, wanted = made * 4096, wanted * 4096
    pairs = zip((made, *gradients(made, leaves)), (wanted, *gradients(wanted, leaves)), strict=True)
    for got, expected in pairs:
        assert (got.double() - expected.double()).norm() / expected.double().norm() < tolerance


def test_the_memory_is_that_of_the_gradients_and_a_chunk():
    n, v, h = 4096, 32768, 1024
    hidden, weight, target = (t.cuda() for t in drawn(n, v, h, torch.bfloat16)[:3])
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = torch.autograd.grad(dense.linear_cross_entropy(hidden, weight, target), leaves)
        peak = torch.cuda.max_memory_allocated() - before
        del made
    chunk = losses.chunk_rows(n, v, h) * v * 2
    assert peak < 1.1 * (2 * (n + v) * h + chunk) + (1 << 20)


def test_targets_that_are_no_classes_are_reported_by_the_next_launch():
    hidden, weight, target = (t.cuda() for t in drawn(8)[:3])
    target[2] = 17
    assert dense.linear_cross_entropy(hidden, weight, target).isnan()
    with pytest.raises(sl.ShiplapError, match="SL211"):  # of this call, or of a later chunk of the call before
        dense.linear_cross_entropy(hidden, weight, target)


def test_a_training_step_is_captured_in_a_graph():
    hidden, weight, target = (t.cuda() for t in drawn(256, 512, 64, torch.bfloat16)[:3])
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def step():
        loss = dense.linear_cross_entropy(hidden, weight, target) * 0.5
        return loss, *torch.autograd.grad(loss, leaves)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        graph.replay()
    for got, wanted in zip(captured, step(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_the_audit():
    checks = ["numerics", "edges", "determinism", "fresh", "gradient"]
    for finding in sl.audit(losses.linear_cross_entropy_with_gradients, checks=checks, device="cuda", budget=40):
        assert finding.verdict != "fail", finding
