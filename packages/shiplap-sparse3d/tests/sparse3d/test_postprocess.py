"""The two steps of masked implicit GEMM: against loops, and against the convolution that they serve."""

from __future__ import annotations

import pytest
import torch

import shiplap as sl
import shiplap_sparse3d as sparse3d
from tests.sparse3d.scenes import scene

BLOCKS = (1, 2, 32, 64, 1000)


def table_of(n: int, v: int, density: float = 0.4) -> torch.Tensor:
    entries = torch.randint(0, max(1, n), (n, v), dtype=torch.int32)
    return entries.masked_fill(torch.rand(n, v) >= density, -1)


def gray_rank(code: int) -> int:
    rank = 0
    while code:
        rank, code = rank ^ code, code >> 1
    return rank


@pytest.mark.parametrize("v", [0, 1, 27, 32])
@pytest.mark.parametrize("n", [0, 1, 2, 200])
def test_codes_order_and_pairs(n, v):
    table = table_of(n, v)
    codes, order, inputs, outputs, ends = sparse3d.masked_gemm_signals(table)
    for got, want in zip(
        (codes, order, inputs, outputs, ends), sparse3d.masked_gemm_signals.reference(table), strict=True
    ):
        assert torch.equal(got, want)
    rows = table.tolist()
    bits = [sum(1 << tap for tap, entry in enumerate(row) if entry >= 0) for row in rows]
    assert [c % 2**32 for c in codes.tolist()] == bits
    assert order.tolist() == sorted(range(n), key=lambda row: (gray_rank(bits[row]), row))
    pairs = [[(row[tap], j) for j, row in enumerate(rows) if row[tap] >= 0] for tap in range(v)]
    for tap in range(v):
        mine = slice(int(ends[tap]), int(ends[tap + 1]))
        assert list(zip(inputs[mine].tolist(), outputs[mine].tolist(), strict=True)) == pairs[tap]
    assert (inputs[int(ends[v]) :] == -1).all()
    assert (outputs[int(ends[v]) :] == -1).all()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("n", [0, 1, 63, 200])
def test_taps_of_each_block(n, block):
    codes, order, *_ = sparse3d.masked_gemm_signals(table_of(n, 32, 0.05))
    taps, ends = sparse3d.masked_gemm_kernels(codes, order, block)
    for got, want in zip((taps, ends), sparse3d.masked_gemm_kernels.reference(codes, order, block), strict=True):
        assert torch.equal(got, want)
    for i in range(-(-n // block)):
        union = 0
        for code in codes[order[i * block : (i + 1) * block]].tolist():
            union |= code % 2**32
        assert taps[int(ends[i]) : int(ends[i + 1])].tolist() == [t for t in range(32) if union >> t & 1]
    assert (taps[int(ends[-1]) :] == -1).all()


def test_they_are_what_the_convolution_and_its_weight_gradient_sum_over():
    x = scene(150, (7, 7, 7), 4)
    table = x.geometry.subm(3).table.contiguous()
    codes, order, inputs, outputs, ends = sparse3d.masked_gemm_signals(table)
    weight, grad = torch.randn(3, 27, 4).double(), torch.randn(150, 3).double()
    by_pairs = torch.stack(
        [
            grad[outputs[a:b].long()].T @ x.feats[inputs[a:b].long()]
            for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ],
        1,
    )
    torch.testing.assert_close(by_pairs, sparse3d.conv_weight_grad(grad, x.feats, table))
    taps, seg = sparse3d.masked_gemm_kernels(codes, order, 32)
    out = torch.zeros(150, 3).double()
    for i in range(len(seg) - 1):
        rows = order[32 * i : 32 * i + 32]
        for tap in taps[seg[i] : seg[i + 1]].tolist():
            entries = table[rows, tap]
            hit = entries >= 0
            out[rows[hit]] += x.feats[entries[hit].long()] @ weight[:, tap].T
    torch.testing.assert_close(out, sparse3d.conv(x.feats, weight, table))


def test_refused():
    with pytest.raises(sl.ShiplapError, match="SL208"):
        sparse3d.masked_gemm_signals(torch.zeros(3, 33, dtype=torch.int32))
    codes = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(sl.ShiplapError, match="SL208"):
        sparse3d.masked_gemm_kernels(codes, torch.arange(3), 0)
    for bad in (-1, 3):
        for run in (sparse3d.masked_gemm_kernels, sparse3d.masked_gemm_kernels.reference):
            with pytest.raises(sl.ShiplapError, match=r"SL211(.|\n)*sorted_index\[1\]"):
                run(codes, torch.tensor([0, bad, 1]), 2)


def test_any_negative_entry_is_a_miss():
    table = torch.tensor([[-5, 0], [1, -(2**31)]], dtype=torch.int32)
    assert sparse3d.masked_gemm_signals(table)[0].tolist() == [2, 1]
