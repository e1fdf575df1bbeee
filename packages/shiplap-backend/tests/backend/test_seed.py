# ruff: noqa: E501 (a case a line)
"""The lists of torch-spyre's README, item by item: what its generator could not do, on a device of ours.

docs/backend.md has a row for each, with the name of its test.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shiplap.torch_private.aten_operators import aten_declarations
from shiplap_testing.effort import sampled
from shiplap_testing.paths import REPOSITORY
from tests.backend import described
from tests.backend.equality import check, native

pytest.importorskip("openvino")

x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
rows, label = torch.randn(5, 7), torch.tensor([0, 6, 3, -100, 2])

# What its templates had no place for: a call, its tensors, and the overload that must have run on the device.
UNSUPPORTED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), (x,), "avg_pool2d.out"),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), (x,), "clamp.out"),
    "convolution": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (x, w), "convolution_overrideable"),
    "nll_loss": (lambda x, y: F.nll_loss(x.log_softmax(1), y), (rows, label), "nll_loss_forward.output"),
    "where": (lambda c, x: torch.where(c, x, 0.0), (rows > 0, rows), "where.self"),
    "addmm": (lambda b, a: torch.addmm(b, a, a.t(), beta=0.5, alpha=2), (torch.randn(5), rows), "addmm.out"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_ops_are_native(dev: Any, device: str, name: str) -> None:
    fn, tensors, overload = UNSUPPORTED[name]
    check(device, fn, *tensors)
    assert native(dev, overload) == 1


@pytest.mark.parametrize("call", [lambda x: x[:, 1:3], lambda x: x.select(1, 2), lambda x: x[..., ::2].add(1)])
def test_select_and_slice_are_views(device: str, call: Callable[[Tensor], Tensor]) -> None:
    check(device, call, rows)
    on = rows.to(device)
    assert on.select(1, 2).data_ptr() == on.data_ptr() + 2 * on.element_size()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: x[i],
        lambda x, i: x[:, i],
        lambda x, i: x[i, i],
        lambda x, i: x[x > 0],
        lambda x, i: x.index_put((i,), torch.zeros((), device=x.device)),
    ],
)
def test_index(device: str, call: Callable[[Tensor, Tensor], Tensor]) -> None:
    check(device, call, rows, torch.tensor([1, 4, -1]))


@pytest.mark.parametrize(
    "call",
    [
        lambda d: torch.arange(7, device=d),
        lambda d: torch.arange(1.0, 3.0, 0.25, device=d),
        lambda d: torch.arange(5, 0, -2, device=d, dtype=torch.int32),
        lambda d: torch.arange(0, device=d),
        lambda d: torch.zeros(2, 3, device=d),
        lambda d: torch.zeros((), dtype=torch.bool, device=d),
        lambda d: torch.ones(2, 0, device=d),
        lambda d: torch.ones(3, dtype=torch.bfloat16, device=d),
        lambda d: torch.full((2, 2), 7, device=d),
        lambda d: torch.eye(3, 2, device=d),
    ],
)
def test_ops_whose_first_argument_is_no_tensor(device: str, call: Callable[[str], Tensor]) -> None:
    got, want = call(device), call("cpu")
    assert (got.device.type, got.dtype, got.shape, got.stride()) == (device, want.dtype, want.shape, want.stride())
    assert torch.equal(got.cpu(), want)


def test_arange_and_fill_are_native(dev: Any, device: str) -> None:
    torch.arange(7.0, device=device)
    torch.ones(3, device=device)
    assert native(dev, "arange.start_out") == native(dev, "fill_.Scalar") == 1


# The modes by which its metadata says an output's sizes; tests/backend/ops.yaml uses them where ATen has no structured meta.
MODES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], str]] = {
    "matmul": (torch._int_mm, (torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)), "_int_mm"),
    "reduce": (lambda x: torch.logsumexp(x, (0, 2)), (torch.randn(2, 3, 4),), "logsumexp"),
    "reduce, keepdim": (lambda x: torch.logsumexp(x, -1, keepdim=True), (rows,), "logsumexp"),
    "transpose": (lambda x: torch.transpose_copy(x, 0, -1), (rows,), "transpose_copy.int"),
    "concat": (lambda a, b: torch.concatenate((a, b, a), -2), (rows, torch.randn(1, 7)), "concatenate"),
    "infer": (F.hardswish, (rows.t(),), "hardswish"),
}


@pytest.mark.usefixtures("subset")
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_shape(dev: Any, device: str, mode: str) -> None:
    fn, tensors, overload = MODES[mode]
    check(device, fn, *tensors)
    assert native(dev, overload) == 1


# An argument, the expression it is in, and the C++ that the vendor gets.
CUMSUM = "  cumsum.out: {template: reduction, dtypes: float, graph: GRAPH, shape_only: [dtype]}\n"
POOL = (
    "  avg_pool2d.out: {template: structured, guard: {'divisor_override is None': divisor}, "
    'graph: "AvgPool(self, stride, padding, padding, kernel_size, not count_include_pad, '
    "'CEIL' if ceil_mode else 'FLOOR', 'EXPLICIT')\"}\n"
)
TAKEN = {
    "an int for a node of indices": (
        CUMSUM.replace("GRAPH", "'CumSum(self, dim)'"),
        "constant(at::Scalar(dim), at::kLong)",
    ),
    "an int for an int": (CUMSUM.replace("GRAPH", "'Softmax(self, dim)'"), "Softmax(n_self, dim)"),
    "an int for an operand": (CUMSUM.replace("GRAPH", "self * dim"), "constant(at::Scalar(dim), compute)"),
    "ints for a shape": (POOL, "to<ov::Strides>(stride), to<ov::Shape>(padding)"),
    "a bool for an enum": (POOL, "(ceil_mode ? ov::op::RoundingType::CEIL : ov::op::RoundingType::FLOOR)"),
    "ints for a node of indices": (
        "  roll: {template: functional, graph: 'Roll(self, shifts, dims)', output: {result: {mode: bypass}}}\n",
        "constant(shifts), constant(dims)",
    ),
    "a Scalar for an operand": (
        "  fill_.Scalar: {template: inplace, graph: 'full(sizes(self), value)'}\n",
        "call.scalar(value, compute)",
    ),
}


@pytest.mark.parametrize("what", sampled(TAKEN, 3))
def test_an_int_is_what_the_vendor_takes(tmp_path: Path, what: str) -> None:
    ops, cpp = TAKEN[what]
    assert cpp in described.body(tmp_path, ops)


def test_reductions_are_one_graph(dev: Any, device: str) -> None:
    """They were decomposed by hand, as their compiler failed on the fused form."""
    dev.cache_clear()
    check(device, lambda x: x.sum((0, 2), keepdim=True), torch.randn(2, 3, 4))
    check(device, lambda b, a: torch.addmm(b, a, a.t()), torch.randn(5), rows)
    assert dev.cache_info()["misses"] == 2


def test_four_dims_of_which_the_last_is_longest(device: str) -> None:
    """Making such a tensor raised."""
    long = torch.randn(2, 3, 4, 9)
    check(device, lambda x: x.relu() + x.sum(2, keepdim=True), long)
    check(device, lambda x: x.softmax(-2), long)


def test_split_by_a_tensor_is_as_on_cuda(device: str) -> None:
    """torch reads the indices on the host and wants them there, whatever the device."""
    check(device, lambda x: torch.tensor_split(x, torch.tensor([1, 3])), rows)
    with pytest.raises(RuntimeError, match="tensor_indices_or_sections to be on cpu, but it's on openvino"):
        torch.tensor_split(rows.to(device), torch.tensor([1, 3], device=device))


def test_names_of_dims_are_gone() -> None:
    """Its generator skipped overloads with names of dims; torch has none since 2.13, and metadata cannot use them before."""
    named = [d.name for d in aten_declarations().values() if any("Dimname" in a.type for a in d.arguments)]
    assert not named or torch.__version__ < "2.13"


def test_every_row_of_the_page_names_a_test_that_exists() -> None:
    page = (REPOSITORY / "docs" / "backend.md").read_text(encoding="utf-8")
    table = page.partition("## torch-spyre's generator, item by item")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    defined = {
        name
        for file in Path(__file__).parent.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(lines) > 30
    for line in lines:
        named = re.findall(r"`(test_\w+)`", line)
        assert named, f"no test: {line}"
        assert set(named) <= defined, f"no such test: {line}"
