"""The linear cross entropy against torch's own in float64, with its gradients, in every option and in chunks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shiplap as sl
import shiplap_dense as dense
from shiplap_dense import losses
from shiplap_testing.forked import interpreted

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smooth": {"label_smoothing": 0.2, "ignore_index": 3},
    "capped": {"softcap": 2.0},
    "squares": {"lse_square_scale": 0.1},
    "all": {"label_smoothing": 0.1, "softcap": 1.5, "lse_square_scale": 0.05, "reduction": "none"},
}


def drawn(n: int = 300, v: int = 17, h: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(s, generator=rng) for s in ((n, h), (v, h), (v,)))
    target = torch.randint(0, v, (n,), generator=rng)
    target[::5] = -100
    return [hidden.to(dtype), weight.to(dtype), target, bias.to(dtype)]


def by_torch(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """The same loss in float64, as a model would write it."""
    logits = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    cap, square = options.pop("softcap", None), options.pop("lse_square_scale", 0.0)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    reduction, ignored = options.pop("reduction", "mean"), options.get("ignore_index", -100)
    each = F.cross_entropy(logits, target, reduction="none", **options)
    each = each + (square * logits.logsumexp(1) ** 2).masked_fill(target == ignored, 0)
    if reduction == "none":
        return each
    return each.sum() if reduction == "sum" else each.sum() / (target != ignored).sum()


def gradients(loss: Tensor, given: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype, device=loss.device).view(loss.shape)
    return torch.autograd.grad((loss * weights).sum(), given)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_losses_and_gradients_are_those_of_torch(name, with_bias):
    hidden, weight, target, bias = drawn()
    if name == "smooth":
        target[::5] = 3
    leaves = [t.requires_grad_() for t in ((hidden, weight, bias) if with_bias else (hidden, weight))]
    given = (hidden, weight, target, bias if with_bias else None)
    made, wanted = dense.linear_cross_entropy(*given, **OPTIONS[name]), by_torch(*given, **OPTIONS[name])
    assert made.dtype == torch.float32
    torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=1e-5)
    for got, expected in zip(gradients(made, leaves), gradients(wanted, leaves), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wide", [None, torch.float32])
def test_chunks_add_up_to_the_whole_in_16_bits(wide):
    n, v, h = 700, 600, 16
    assert losses.chunk_rows(n, v, h) == 128
    hidden, weight, target, bias = drawn(n, v, h, torch.bfloat16)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    made = dense.linear_cross_entropy(hidden, weight, target, bias, accum_dtype=wide)
    wanted = by_torch(hidden, weight, target, bias)
    torch.testing.assert_close(made.double(), wanted, rtol=2e-3, atol=0)
    for got, expected in zip(gradients(made, leaves), gradients(wanted, leaves), strict=True):
        assert (got - expected).norm() / expected.norm() < (0.01 if wide else 0.02)


def test_a_chunk_has_the_memory_of_the_hidden_states():
    assert losses.chunk_rows(16384, 131072, 4096) == 640
    assert losses.chunk_rows(10**6, 10, 16) == 10**6
    assert losses.chunk_rows(5, 10**6, 4) == 5
    assert losses.chunk_rows(0, 10, 4) == 1


def test_gradients_that_nobody_asks_for_are_not_computed():
    hidden, weight, target, bias = drawn(100)
    hidden.requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dense.linear_cross_entropy(hidden, weight, target, bias).backward()
    seen = [e.name for e in profile.events() if e.name in ("aten::mm", "aten::addmm")]
    assert len(seen) == 2
    assert weight.grad is None
    assert bias.grad is None


def test_a_kept_graph_gives_the_same_gradients_again():
    hidden, weight, target, _ = drawn()
    weight.requires_grad_()
    loss = dense.linear_cross_entropy(hidden, weight, target) * 3
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0].clone()
    second = torch.autograd.grad(loss, weight, retain_graph=True)[0].clone()
    third = torch.autograd.grad(loss, weight)[0]
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, third, rtol=0, atol=0)


def test_the_last_backward_reuses_the_memory_of_the_gradients():
    hidden, weight, target, _ = drawn()
    made = losses.linear_cross_entropy_with_gradients(hidden, weight.requires_grad_(), target)
    before = made[2].clone()
    (gradient,) = torch.autograd.grad(2 * made[0], weight)
    assert gradient.data_ptr() == made[2].data_ptr()
    torch.testing.assert_close(gradient, 2 * before, rtol=0, atol=0)


def test_the_gradient_of_a_leaf_is_the_memory_that_the_forward_wrote():
    hidden, weight, target, _ = drawn()
    loss, _, gradient, _ = losses.linear_cross_entropy_with_gradients(hidden, weight.requires_grad_(), target)
    address = gradient.data_ptr()
    del gradient
    (loss * 2).backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() == address


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused_by_name(reduction):
    hidden, weight, target, _ = drawn(6)
    weight.requires_grad_()
    loss = dense.linear_cross_entropy(hidden, weight, target, reduction=reduction).sum()

    def differentiate_twice() -> None:
        torch.autograd.grad(loss, weight, create_graph=True)[0].sum().backward()

    with pytest.raises(sl.ShiplapError, match=r"SL313.*\n.*dense::linear_cross_entropy"):
        differentiate_twice()


def test_targets_that_are_no_classes_are_refused():
    hidden, weight, target, _ = drawn()
    target[7] = 17
    with pytest.raises(sl.ShiplapError, match=r"SL211.*\n.*target.*\n.*target 17 of 17 classes"):
        dense.linear_cross_entropy(hidden, weight, target)


def test_rows_are_empty_or_all_ignored():
    hidden, weight, target, bias = drawn(4)
    weight.requires_grad_()
    none = dense.linear_cross_entropy(hidden, weight, torch.full_like(target, -100), bias)
    assert none.isnan()
    assert not torch.autograd.grad(none, weight)[0].any()
    for trained in (weight, weight.detach()):
        assert dense.linear_cross_entropy(hidden[:0], trained, target[:0], bias).isnan()
    empty = dense.linear_cross_entropy(hidden[:0], weight, target[:0], bias, reduction="sum")
    assert empty == 0
    assert not torch.autograd.grad(empty, weight)[0].any()
    assert dense.linear_cross_entropy(hidden[:0], weight, target[:0], reduction="none").shape == (0,)


def test_leading_dims_autocast_float64_and_float16():
    hidden, weight, target, _ = drawn(12)
    weight.requires_grad_()
    each = dense.linear_cross_entropy(hidden.view(3, 4, 8), weight, target.view(3, 4), reduction="none")
    torch.testing.assert_close(each.view(-1), dense.linear_cross_entropy(hidden, weight, target, reduction="none"))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            loss = dense.linear_cross_entropy(hidden, weight, target)
        wanted = by_torch(hidden.to(dtype), weight.to(dtype), target, None)
        torch.testing.assert_close(loss.double(), wanted, rtol=5e-3, atol=0)
        assert torch.autograd.grad(loss, weight)[0].dtype == torch.float32
    doubled = dense.linear_cross_entropy(hidden.double(), weight.double(), target)
    torch.testing.assert_close(doubled.double(), by_torch(hidden, weight, target, None), rtol=1e-6, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(dense.linear_cross_entropy(hidden.double(), weight.double(), target), doubled)


def test_targets_of_another_shape_are_refused():
    hidden, weight, target, _ = drawn(12)
    with pytest.raises(sl.ShiplapError, match=r"SL202.*\n.*target"):
        dense.linear_cross_entropy(hidden.view(3, 4, 8), weight, target.view(4, 3))


def test_compiled_training_is_one_graph_and_equal():
    hidden, weight, target, bias = drawn(40)

    def step(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return dense.linear_cross_entropy(hidden * 2, weight, target, bias, label_smoothing=0.1) / 4

    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    eager = torch.autograd.grad(step(*leaves), leaves)
    made = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    for got, expected in zip(made, eager, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("argument", "value", "id"), [("reduction", "max", "SL208"), ("accum_dtype", torch.float64, "SL204")]
)
def test_options_that_do_not_exist_are_refused(argument, value, id):
    hidden, weight, target, _ = drawn(4)
    with pytest.raises(sl.ShiplapError, match=id):
        dense.linear_cross_entropy(hidden, weight, target, **{argument: value})


def test_the_triton_pass_computes_the_same(tmp_path):
    pytest.importorskip("triton")
    script = Path(__file__).with_name("loss_cases.py")
    done = interpreted("-P", "-W", "ignore", script, env={**os.environ, "SHIPLAP_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert len(rows) == len(OPTIONS) + 4
    for name, row in rows.items():
        assert row.get("error", 0) < (2e-2 if "bfloat16" in name else 1e-5), row
    assert rows["no class"] == {"name": "no class", "id": "SL211", "nan": [False, False, True, False, False, False]}
    assert rows["scaled"]["values"] == [0, 2, 4, 6, 8]
