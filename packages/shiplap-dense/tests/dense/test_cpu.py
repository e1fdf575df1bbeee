"""Shapes and layouts of the dense ops on the CPU against references in float64, through compiled code."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import shiplap_dense as dense
from shiplap_dense import cpu, ops
from shiplap_testing.paths import REPOSITORY


def test_functional_forms_are_pytorchs():
    a, b, bias = torch.randn(2, 5, 7), torch.randn(7, 6), torch.randn(6)
    torch.testing.assert_close(dense.matmul(a, b, bias), a @ b + bias)
    torch.testing.assert_close(dense.matmul(a, a.mT, torch.ones(5)), a @ a.mT + 1)
    w = torch.randint(-127, 128, (6, 7), dtype=torch.int8)
    torch.testing.assert_close(dense.matmul_int8(a, w, bias), a @ w.to(a.dtype).mT * bias)
    x, filters = torch.randn(2, 3, 9, 8), torch.randn(4, 3, 3, 2)
    out = dense.conv2d(x, filters, None, 2, (1, 0), (1, 2))
    torch.testing.assert_close(out, torch.nn.functional.conv2d(x, filters, None, 2, (1, 0), (1, 2)))
    assert out.is_contiguous(memory_format=torch.channels_last)
    rows, each, ends = torch.randn(6, 7), torch.randn(2, 7, 5), torch.tensor([2, 5], dtype=torch.int32)
    want = torch.cat([rows[:2] @ each[0], rows[2:5] @ each[1], torch.zeros(1, 5)])
    torch.testing.assert_close(dense.grouped_matmul(rows, each, ends), want)


@pytest.mark.parametrize(
    ("a", "b"), [((2, 0, 5), (2, 5, 3)), ((2, 4, 5), (2, 5, 0)), ((2, 3, 4, 0), (2, 3, 0, 5)), ((0, 3, 0), (0, 7))]
)
def test_products_of_empty_tensors_are_pytorchs(a, b):
    left, right = (torch.ones(size, requires_grad=True) for size in (a, b))
    got, want = dense.matmul(left, right), left @ right
    torch.testing.assert_close(got, want)
    gradients = (torch.autograd.grad(of.sum(), (left, right)) for of in (got, want))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("k", [0, 64])
def test_a_product_with_a_bias_is_the_linear_layer_of_pytorch(k):
    """Where no template wins, the graph has the call that the user would have written: one call, rounded once."""
    a, weight, bias = (torch.randn(s).bfloat16() for s in ((5, k), (48, k), (48,)))
    expected = torch.nn.functional.linear(a, weight, bias)
    torch.testing.assert_close(ops.mm.reference(a, weight.t(), bias), expected, rtol=0, atol=0)


class Copies(TorchDispatchMode):
    """Collects the shapes of tensors that are cloned."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["mm", "bmm", "int8_mm"])
def test_a_backward_does_not_copy_a_transposed_weight(name):
    a, weight, scale = (torch.randn(s, requires_grad=True) for s in ((6, 5), (7, 5), (7,)))
    of = {
        "mm": lambda: ops.mm(a, weight.t()),
        "bmm": lambda: ops.bmm(a[None], weight.t()[None]),
        "int8_mm": lambda: ops.int8_mm(a, torch.ones(5, 7, dtype=torch.int8).t(), scale),
    }[name]
    out = of()
    with Copies() as copies:
        out.backward(torch.ones_like(out))
    assert copies.shapes == []


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 100, 193, 5000])
def test_a_block_of_rows_holds_whole_registers(rows):
    """Blocks taller than the call waste scratch only; those of the default cover small calls at once."""
    sizes = {"m": rows, "n": 64, "k": 64}
    for config in (*cpu._rows_configs(sizes), *cpu._panel_configs(sizes), *cpu._product_configs(sizes)):
        assert config["BN"] % 32 == 0  # two AVX-512 registers
        assert config["BM"] * config["BN"] * 4 <= 1 << 18  # a tile lies on the stack


def test_dtypes_and_empty_sizes_are_refused_with_a_reason():
    floats = {"a": torch.float32, "weight": torch.int8, "out": torch.float32}
    assert cpu._accepts_float_dtypes({"m": 1, "k": 4}, floats, {}) is True
    assert cpu._accepts_float_dtypes({"m": 0, "k": 4}, floats, {}) == "an empty size"
    assert (
        cpu._accepts_float_dtypes({"m": 1}, floats | {"a": torch.float16}, {})
        == "torch.float16 is neither float32 nor bfloat16"
    )
    assert cpu._few_rows({"m": 9}, floats, {}) == "more than 8 rows"
    assert [t.name for t in ops.int8_mm.templates["cpu"]] == ["int8_rows", "int8_panels"]


def test_the_design_note_repeats_the_recorded_table():
    spec = importlib.util.spec_from_file_location("dense_cpu", REPOSITORY / "benchmarks" / "dense_cpu.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules["dense_cpu"] = benchmark  # dataclasses look there
    spec.loader.exec_module(benchmark)
    page = (REPOSITORY / "docs/design/0007-dense-cpu.md").read_text(encoding="utf-8")
    recorded = json.loads((REPOSITORY / "benchmarks/results/dense_cpu.json").read_text(encoding="utf-8"))
    shown = page.split("<!-- dense_cpu -->\n")[1].split("<!-- /dense_cpu -->")[0]
    assert shown == benchmark.table(recorded)


def test_traced_products_take_other_sizes() -> None:
    a, b = torch.randn(2, 5, 4), torch.randn(4, 3)
    traced = make_fx(lambda a, b: dense.matmul(a, b), tracing_mode="symbolic")(a, b)
    assert traced(torch.randn(3, 7, 4), b).shape == (3, 7, 3)
