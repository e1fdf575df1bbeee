"""Convolutions whose launches C++ makes again: values, gradients, other addresses, streams, graphs, threads, memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import shiplap_sparse3d as sparse3d
from shiplap.dispatch import tuned_choices
from shiplap.kernels.triton import replay
from shiplap_sparse3d import ops
from shiplap_testing.support import triton_files_entered

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}


@pytest.fixture(scope="module", autouse=True)
def built():
    replay.build_replay_library(ops.conv)
    assert replay.replay_state_text() == "native"


def shell(n: int, edge: int = 24) -> sparse3d.Plan:
    cells = torch.randperm(edge**3)[:n]
    coords = torch.stack([cells * 0, cells // edge**2, cells // edge % edge, cells % edge], 1).int().cuda()
    return sparse3d.Geometry(coords, edge, 1).subm(3)


def arguments(plan: sparse3d.Plan, channels: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Fresh ones, whose addresses are others."""
    feats = torch.randn(plan.rows, channels, device="cuda").to(dtype)
    weight = (torch.randn(channels, 27, channels, device="cuda") / (13 * channels) ** 0.5).to(dtype)
    return feats, weight, torch.randn(channels, device="cuda").to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    scale = want.abs().max().clamp_min(1e-3)
    torch.testing.assert_close(got.double() / scale, want / scale, rtol=tolerance, atol=tolerance)


def reference(plan: sparse3d.Plan, *args: torch.Tensor) -> torch.Tensor:
    doubles = [t.detach().double() for t in args]
    return ops.conv.reference(*doubles[:2], plan.table, *doubles[2:], plan.order, plan.masks)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("n", "channels"), [(1, 16), (190, 40), (192, 1024), (2000, 256), (9000, 64)])
def test_values_at_other_addresses(n, channels, dtype):
    plan = shell(n)
    kept = []
    for _ in range(4):
        args = arguments(plan, channels, dtype)
        kept.append((args, plan.conv(*args)))
    for args, got in kept:
        close(got, reference(plan, *args))
    args = arguments(plan, channels, dtype)
    # Whatever forgets prepared calls, such as a new choice, lets one of them be recorded again.
    assert [] in [triton_files_entered(lambda: plan.conv(*args)) for _ in range(2)]
    assert torch.equal(plan.conv(*args), plan.conv(*args))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("strided", [False, True])
def test_gradients_at_other_addresses(strided, groups):
    edge = 24
    cells = torch.randperm(edge**3)[:700]
    coords = torch.stack([cells * 0, cells // edge**2, cells // edge % edge, cells % edge], 1).int().cuda()
    geometry = sparse3d.Geometry(coords, edge, 1)
    plan = geometry.strided(3, 2, 1).plan if strided else geometry.subm(3)
    for _ in range(4):
        feats = torch.randn(700, 128, device="cuda", requires_grad=True)
        weight = (torch.randn(64, 27, 128 // groups, device="cuda") / 40).requires_grad_()
        bias = torch.randn(64, device="cuda", requires_grad=True)
        out = plan.conv(feats, weight, bias, groups, tf32=False)
        grad = torch.randn_like(out)
        out.backward(grad)
        doubles = [t.detach().double().requires_grad_() for t in (feats, weight, bias)]
        want = ops.conv.reference(
            *doubles[:2], plan.table, doubles[2], plan.order, plan.masks, None, None, None, groups
        )
        want.backward(grad.double())
        for got, exact in zip((feats, weight, bias), doubles, strict=True):
            close(got.grad, exact.grad)


def test_streams_and_graphs():
    plan = shell(500)
    args = arguments(plan, 128, torch.float16)
    for _ in range(3):
        plan.conv(*args)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        args[0].mul_(2)
        got = plan.conv(*args)
    stream.synchronize()
    close(got, reference(plan, *args))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = plan.conv(*args)
    for _ in range(2):
        args[0].copy_(torch.randn_like(args[0]))
        graph.replay()
        close(got, reference(plan, *args))


def test_threads():
    plan = shell(800)

    def work(_: int) -> bool:
        args = arguments(plan, 64, torch.float16)
        return all(torch.equal(plan.conv(*args), plan.conv(*args)) for _ in range(50))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_a_recording_holds_no_memory():
    plan = shell(900)
    args = arguments(plan, 256, torch.float16)
    for _ in range(3):
        plan.conv(*args)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    tuned_choices.forget_derived_choices()
    for _ in range(3):
        plan.conv(*args)
    assert torch.cuda.memory_allocated() == before
