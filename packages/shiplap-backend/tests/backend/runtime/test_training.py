"""Autograd, optimisers, autocast and torch.compile on the device, against the CPU."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shiplap import torch_private
from shiplap_testing.effort import sampled


def trained(model: torch.nn.Module, x: torch.Tensor, make: Callable[..., Any], steps: int = 3) -> list[torch.Tensor]:
    optimiser = make(model.parameters())
    for _ in range(steps):
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize(
    "make",
    sampled(
        [
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.AdamW(p, lr=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        ],
        1,
    ),
    ids=["sgd", "adamw", "adamw foreach"],
)
def test_training_is_the_cpus(dev: Any, device: str, make: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    x = torch.randn(7, 5)
    on = copy.deepcopy(model).to(device)
    for got, want in zip(trained(on, x.to(device), make), trained(model, x, make), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert dev.counters()["aten::mm.out"]["native"] > 0


def test_gradients_through_fallback_and_views(dev: Any, device: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x.t()[1:].erfinv() * x[0, 0]
        y = torch.cat([y, y.flip(0)]).cumsum(0)
        return (y.sort(dim=0).values[1:] @ x).sum()

    x = torch.rand(4, 4) * 0.5
    (want,) = torch.autograd.grad(loss(x.requires_grad_()), x)
    d = x.detach().to(device).requires_grad_()
    (got,) = torch.autograd.grad(loss(d), d)
    torch.testing.assert_close(got.cpu(), want)


def test_gradcheck(dev: Any, device: str) -> None:
    x = torch.rand(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    w = torch.rand(4, 2, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: torch.relu(x @ w).sin(), (x, w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dev: Any, device: str, dtype: torch.dtype) -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    x, y = a.to(device), b.to(device)
    with torch.autocast(device, dtype=dtype):
        product = x @ y
        assert product.dtype == dtype  # lower precision
        assert torch.softmax(product, -1).dtype == torch.float32  # float32
        assert (product + x).dtype == torch.float32  # torch's own promotion
        assert torch.cat([product, x]).dtype == torch.float32  # widest
        assert (x.double() @ y.double()).dtype == torch.float64  # never narrowed
        with torch.autocast(device, enabled=False):
            assert (x @ y).dtype == torch.float32
    assert (x @ y).dtype == torch.float32
    torch.testing.assert_close(product.float().cpu(), a @ b, rtol=0.05, atol=0.05)


def test_export(dev: Any, device: str) -> None:
    """A model on the device is exported, decomposed, saved and loaded, and computes there what it did."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Dropout(), torch.nn.Linear(8, 3))
    model, x = torch.nn.Sequential(*layers).to(device).eval(), torch.randn(4, 5).to(device)
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: rows},))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    more = torch.randn(9, 5).to(device)
    for program in (exported, exported.run_decompositions(), torch.export.load(file)):
        dev.reset_counters()
        got = program.module()(more)
        assert got.device.type == device
        torch.testing.assert_close(got.cpu(), model(more).cpu())
        assert dev.counters()["aten::addmm.out"]["native"] > 0


def test_amp_training_with_a_scaler(dev: Any, device: str) -> None:
    model = torch.nn.Linear(4, 2).to(device)
    before = model.weight.detach().cpu().clone()
    # The default scale of 65,536 lets gradients of half precision overflow for half of all weights: no step then.
    optimiser, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(device, init_scale=256.0)
    with torch.autocast(device, dtype=torch.float16):
        loss = model(torch.ones(3, 4, device=device)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimiser)
    scaler.update()
    assert not torch.equal(model.weight.detach().cpu(), before)
    assert model.weight.isfinite().all()


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param("eager", None, id="eager"),
        pytest.param("aot_eager", None, id="aot_eager", marks=pytest.mark.long),
        *sampled(
            [
                pytest.param(
                    "inductor",
                    {"fallback_by_default": True},
                    id="inductor, every op on the device",
                    marks=pytest.mark.capability("Inductor on a generated device"),
                ),
                pytest.param("inductor", None, id="inductor, its own loops on the host", marks=pytest.mark.slow),
            ],
            1,
        ),
    ],
)
def test_torch_compile(request: pytest.FixtureRequest, dev: Any, device: str, backend: str, options: Any) -> None:
    if backend == "inductor":
        request.getfixturevalue("of_shared_memory")
    torch_private.reset_compiler()
    torch.manual_seed(0)
    # An embedding, since loops that read by index check it: the CPU's words for that differ from other devices'.
    layers = (
        torch.nn.Embedding(11, 5),
        torch.nn.Linear(5, 7),
        torch.nn.ReLU(),
        torch.nn.LayerNorm(7),
        torch.nn.Linear(7, 3),
        torch.nn.Softmax(-1),
    )
    model = torch.nn.Sequential(*layers).to(device)
    x = torch.tensor([3, 10, 0, 3], device=device)
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    compiled = torch.compile(model, backend=backend, fullgraph=True, **({"options": options} if options else {}))
    dev.reset_counters()
    got = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu())
    counts = dev.counters()
    assert counts["aten::mm.out"]["native"] > 0  # products stay on the device
    assert ("aten::relu" in counts) == (options is not None or backend != "inductor")
    torch_private.reset_compiler()
