"""The shipped rewrites: each proven, and what keeps them from matching."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from shiplap.rewrite import Match, NearMiss
from shiplap.rewrite.shipped import attention, conv_norm, no_ops, rms_norm, rotary
from shiplap_dense.rewrites import conv_norm_dense, int8_linear, linear_activation, norm_linear
from shiplap_sparse3d.rewrites import conv_norm_sparse3d
from shiplap_testing.effort import sampled
from tests.rewrite.specimens import near, outcomes
from tests.sparse3d.nets import UNet, padded

ACTIVATIONS, NORMS = linear_activation(), norm_linear()[1:]
SAMPLE = (
    no_ops,
    attention[0],
    rms_norm,
    rotary,
    conv_norm,
    conv_norm_dense,
    conv_norm_sparse3d,
    int8_linear()[0],
    ACTIVATIONS[0],
    NORMS[2],
)
REST = (*int8_linear()[1:], *ACTIVATIONS[1:], *NORMS[:2])


def proven(made: Any) -> None:
    verdicts = {f.check: f.verdict for f in made.findings}
    assert verdicts["fires"] == verdicts["outputs"] == verdicts["strides"] == verdicts["aliasing"] == "ok", (
        made.findings
    )
    assert "fail" not in verdicts.values()


@pytest.mark.parametrize("made", sampled(SAMPLE, 2), ids=lambda r: r.name)
def test_it_is_proven(made: Any) -> None:
    proven(made)


@pytest.mark.slow
@pytest.mark.skipif("SHIPLAP_TEST_MODELS" not in os.environ, reason="a minute: SHIPLAP_TEST_MODELS=1 proves them here")
@pytest.mark.parametrize("made", REST, ids=lambda r: r.name)
def test_the_others_are_proven(made: Any) -> None:
    proven(made)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, keep: bool = False) -> Any:
    weights = F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.5 + mask, dim=-1)
    out = torch.matmul(weights, v)
    return (out, weights) if keep else out


def shapes(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(s) for s in sizes]


QKV = ((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4), (2, 1, 5, 5))


def test_attention_whose_weights_are_wanted_stays() -> None:
    miss = near(attention[0], lambda *a: attend(*a, keep=True), *shapes(*QKV))
    assert (miss.rewrite, miss.obstacle) == ("attention", "user")
    assert "the graph returns it" in miss.reason


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5
    return torch.matmul(F.softmax(scores if mask is None else scores + mask, dim=-1), v)


def on_cuda(dtype: torch.dtype, *sizes: tuple[int, ...]) -> list[Tensor]:
    with FakeTensorMode():
        return [torch.empty(s, dtype=dtype, device="cuda") for s in sizes]


@pytest.mark.parametrize(
    ("dtype", "head", "masked", "stopped"),
    [
        (torch.bfloat16, (64, 64), True, ""),
        (torch.float16, (256, 256), False, ""),
        (torch.float16, (128, 64), True, ""),
        (torch.bfloat16, (1024, 1024), False, "these are of 1024 and 1024"),
        (torch.bfloat16, (256, 256), True, "these are of 256 and 256"),
        (torch.bfloat16, (256, 128), False, "these are of 256 and 128"),
        (torch.float32, (64, 64), False, "these are torch.float32, 64, 64"),
        (torch.bfloat16, (64, 60), False, "these are torch.bfloat16, 64, 60"),
        (torch.float64, (64, 64), False, "these are torch.float64, 64, 64"),
    ],
)
def test_attention_on_gpus_needs_a_fused_kernel(dtype: torch.dtype, head: Any, masked: bool, stopped: str) -> None:
    e, d = head
    args = on_cuda(dtype, (2, 3, 5, e), (2, 3, 5, e), (2, 3, 5, d), *([(2, 1, 5, 5)] if masked else []))
    (outcome,) = outcomes(attention[0], plain, *args)
    if not stopped:
        assert isinstance(outcome, Match), outcome
        return
    assert isinstance(outcome, NearMiss)
    assert (outcome.obstacle, outcome.rewrite) == ("cost", "attention")
    assert stopped in outcome.reason
    assert "function" not in outcome.reason


def test_attention_of_any_head_is_placed_on_the_cpu() -> None:
    (outcome,) = outcomes(attention[0], plain, *shapes((2, 3, 5, 300), (2, 3, 5, 300), (2, 3, 5, 7)))
    assert isinstance(outcome, Match)


@pytest.mark.parametrize(("rows", "device", "placed"), [(256, "cuda", True), (257, "cuda", False), (257, "cpu", True)])
def test_weights_of_8_bits_pay_on_gpus_for_few_rows(rows: int, device: str, placed: bool) -> None:
    def fn(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, weight.to(torch.bfloat16) * scale)

    with FakeTensorMode():
        x, scale = (torch.empty(s, dtype=torch.bfloat16, device=device) for s in ((1, rows, 8), (6, 1)))
        weight = torch.empty(6, 8, dtype=torch.int8, device=device)
    (declined, forced) = (r[1] for r in (int8_linear(), int8_linear(always=True)))
    (outcome,) = outcomes(declined, fn, x, weight, scale)
    assert isinstance(outcome, Match) == placed
    if isinstance(outcome, NearMiss):
        assert (outcome.obstacle, outcome.reason.partition(":")[0]) == ("cost", "more than 256 rows")
        assert isinstance(outcomes(forced, fn, x, weight, scale)[0], Match)


def test_a_layer_norm_written_out_is_told_from_an_rms_norm() -> None:
    def cohere(x: Tensor, weight: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        spread = (x - mean).pow(2).mean(-1, keepdim=True)
        return weight * ((x - mean) * torch.rsqrt(spread + 1e-5))

    miss = near(rms_norm, cohere, *shapes((3, 8), (8,)))
    assert (miss.obstacle, miss.reason.partition(",")[0]) == (
        "cost",
        "the mean is subtracted first: this is a layer norm",
    )
    other = near(rms_norm, lambda x, y: y * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5), *shapes((3, 8), (3, 8)))
    assert other.obstacle == "operator"


def test_dropout_that_drops_stays() -> None:
    assert outcomes(no_ops, lambda x: F.dropout(x.sin(), 0.3, True).cos(), torch.randn(3)) == []
    (match,) = outcomes(no_ops, lambda x: F.dropout(x.sin(), 0.3, False).cos(), torch.randn(3))
    assert isinstance(match, Match)


def test_a_convolution_that_somebody_else_reads_keeps_its_norm() -> None:
    def fn(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        y = F.conv2d(x, w)
        return F.batch_norm(y, mean, var) + y

    args = [torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4), torch.rand(4)]
    miss = near(conv_norm, fn, *args)
    assert miss.obstacle == "user"
    assert "conv2d) is read by" in miss.reason


def test_a_norm_in_training_stays() -> None:
    def fn(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(F.conv2d(x, w), mean.clone(), var.clone(), training=True)

    miss = near(conv_norm, fn, *shapes((2, 3, 5, 5), (4, 3, 3, 3), (4,), (4,)))
    reason = "the norm takes the statistics of the batch: the model is in training"
    assert (miss.obstacle, miss.reason) == ("constant", reason)


def test_weights_that_are_no_constants_are_not_folded_unasked() -> None:
    def fn(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(F.conv2d(x, w), mean, var)

    args = [torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4), torch.rand(4)]
    miss = near(conv_norm, fn, *args)
    assert miss.obstacle == "cost"
    assert "float32[4, 3, 3, 3]" in miss.reason
    assert "is no constant" in miss.reason


def test_frozen_parameters_are_folded() -> None:
    """As ``torch._inductor.config.freezing = True`` makes it: parameters are attributes of the graph."""
    import torch._inductor.config as config

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    results: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        results.extend(conv_norm.apply(gm.graph))
        gm.recompile()
        return gm.forward

    x = torch.randn(2, 3, 5, 5)
    with torch.no_grad(), config.patch(freezing=True):
        got = torch.compile(model, backend=backend)(x)
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-5)
    assert [type(f) for f in results] == [Match]


def test_layers_of_a_gpu_are_declined_on_the_cpu() -> None:
    miss = near(ACTIVATIONS[0], lambda x, w, b: F.gelu(F.linear(x, w, b)), *shapes((3, 4), (5, 4), (5,)))
    assert miss.obstacle == "cost"
    assert "library's is faster" in miss.reason


@pytest.mark.long
def test_norms_of_a_sparse_unet_are_folded_where_its_weights_are_constants() -> None:
    """``sparse3d.BatchNorm`` writes itself out in compiled code: all three of a U-Net with strides and a skip."""
    import torch._inductor.config as config

    torch.manual_seed(0)
    model, args = UNet().eval(), padded(60)
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm1d)):
        norm.running_mean.normal_()  # type: ignore[union-attr]
        norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    results: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        results[:] = conv_norm_sparse3d.apply(gm.graph)
        gm.graph.lint()
        gm.recompile()
        return gm.forward

    with torch.no_grad():
        with config.patch(freezing=True):
            got = torch.compile(model, backend=backend, fullgraph=True)(*args)
        assert [type(f) for f in results] == [Match] * 3
        assert results[0].operators[:3] == ("sparse3d::conv", ".to", "sub")
        torch.testing.assert_close(got, model(*args), rtol=1e-4, atol=1e-5)
        torch.compile(lambda *given: model(*given), backend=backend, fullgraph=True)(*args)
    assert {(f.obstacle, f.reason.partition(" is ")[2][:11]) for f in results} == {("cost", "no constant")}


def test_a_convolution_of_our_own_pays_on_gpus_where_it_is_of_one_pixel() -> None:
    def pays(size: int, device: str) -> Any:
        return conv_norm_dense.pays({"weight": torch.empty(8, 4, size, size, device=device)})  # type: ignore[misc]

    assert pays(1, "meta") is True  # as on any device but the CPU
    assert pays(3, "meta") == "weights of [3, 3]: the library's convolution is as fast as the template"
    assert "the template is no faster" in pays(1, "cpu")
