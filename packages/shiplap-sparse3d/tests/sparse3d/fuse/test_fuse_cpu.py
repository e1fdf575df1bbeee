"""The sparse convolution as a C++ template: its neighbours inside, any number of voxels, both directions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shiplap_sparse3d as sparse3d
from shiplap.inductor import fusion_choices, switches
from shiplap_testing.fused import check, counted, same
from tests.sparse3d.scenes import scene

pytestmark = pytest.mark.usefixtures("fresh_graphs")

OP = sparse3d.conv
INSIDE = {"only": "conv("}  # not the default: nothing is measured here


def case(rows: int, ci: int, co: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Features, weight, table, bias, scale, shift and what a block adds."""
    x = scene(rows, (9, 9, 9), ci, dtype=dtype)
    table = x.geometry.subm(3).table
    shapes = (co, 27, ci), (co,), (co,), (co,), (rows, co)
    weight, bias, scale, shift, residual = (torch.randn(shape).to(dtype) for shape in shapes)
    return x.feats, weight, table, bias, scale, shift, residual


def block(feats, weight, table, bias, scale, shift, residual):
    """Convolution, batch norm in eval, residual, activation and a cast."""
    y = sparse3d.conv(feats, weight, table, bias) * scale + shift + residual
    return torch.relu(y).to(torch.float64)


def test_a_block_is_one_kernel_for_any_number_of_voxels():
    with switches(OP, **INSIDE):
        compiled = check(block, *case(300, 20, 35), dynamic=True)
        assert counted() == (1, 1)
        assert fusion_choices("sparse3d::conv")[-1].chosen == "conv(BM=256, BN=64)"
        for rows in (7, 256, 700):
            same(compiled, block, case(rows, 20, 35), 2e-6)
        args = case(300, 20, 35)
        args[2][170, 5] = 300
        with pytest.raises(RuntimeError, match=r"SL211[\s\S]*a table entry outside \[-1, 300\)"):
            compiled(*args)
        assert counted() == (1, 1)


@pytest.mark.long
def test_bfloat16_and_columns_that_are_whole_tiles():
    def graph(feats, weight, table, bias, scale, shift, residual):
        y = sparse3d.conv(feats, weight, table, bias)
        return y, torch.relu(y * scale + shift + residual)

    with switches(OP, **INSIDE):
        check(graph, *case(400, 33, 64, torch.bfloat16), tolerance=8e-3)
    assert counted() == (1, 1)


@pytest.mark.long
def test_training_has_a_template_in_each_direction():
    feats, weight, table, bias, *_ = case(200, 8, 12)

    def loss(feats, weight, bias):
        return torch.relu(sparse3d.conv(feats, weight, table, bias, symmetric=True)).square().sum()

    gradients = []
    for fn in (loss, torch.compile(loss, fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (feats, weight, bias)]
        with torch.enable_grad(), switches(OP, **INSIDE):
            gradients.append(torch.autograd.grad(fn(*leaves), leaves))
    for got, want in zip(gradients[1], gradients[0], strict=True):
        assert float((got - want).norm()) <= 1e-5 * float(want.norm())
    assert counted()[0] == 2
    assert [d.chosen.split("(")[0] for d in fusion_choices("sparse3d::conv")[-2:]] == ["conv", "conv"]


@pytest.mark.long
def test_a_bad_table_is_an_error_and_not_a_crash():
    def graph(feats, weight, table):
        return torch.relu(sparse3d.conv(feats, weight, table))

    feats, weight, table, *_ = case(300, 16, 16)
    with switches(OP, **INSIDE):
        compiled = check(graph, feats, weight, table)
        for entry in (-2, 300, 2**31 - 1, -(2**31)):
            bad = table.clone()
            bad[170, 5] = entry
            with pytest.raises(RuntimeError, match=r"SL211[\s\S]*a table entry outside \[-1, 300\)"):
                compiled(feats, weight, bad)
    assert counted() == (1, 1)


def test_what_the_template_does_not_take_and_the_default_is_the_kernel():
    feats, weight, table, bias, *_ = case(60, 8, 8)
    order = torch.arange(60, dtype=torch.int32)[None]
    masks = torch.full((1, 1), 2**27 - 1, dtype=torch.int32)
    refused = {
        "2 groups of channels": lambda: sparse3d.conv(feats, weight[:, :, :4], table, groups=2),
        "a sorted table: those are for GPUs": lambda: sparse3d.conv(feats, weight, table, None, order, masks),
        "torch.float64 is neither float32 nor bfloat16": lambda: sparse3d.conv(feats.double(), weight.double(), table),
        "m = 0": lambda: sparse3d.conv(feats, weight, table[:0]),
    }

    def graph():
        return [call() + 1 for call in refused.values()], sparse3d.conv(feats, weight, table, bias) + 1

    torch.testing.assert_close(torch.compile(graph, fullgraph=True, dynamic=False)(), graph())
    *others, default = fusion_choices("sparse3d::conv")[-5:]
    assert [made.chosen for made in (*others, default)] == ["reference"] * 5
    assert [[v.detail for v in made.verdicts] for made in others] == [[reason] for reason in refused]
    assert default.reason == "templates are chosen by measurement only: mode='max-autotune'"
    assert counted() == (0, 0)
