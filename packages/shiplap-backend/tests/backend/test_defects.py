"""Each defect of torch-spyre's generator (docs/backend.md lists them), shown not to be ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shiplap.torch_private.torchgen_declarations import aten_declarations
from shiplap_backend import BackendError
from tests.backend import described
from tests.backend.equality import check, native

pytest.importorskip("openvino")


def test_1_only_owed_overloads_or_primaries_are_registered(tmp_path: Path) -> None:
    """The filter was off: a composite op can be taken over, on purpose, but a delegate of a structured group cannot."""
    with pytest.raises(BackendError, match=r"its group's primary overload, 'add.out'"):
        described.made(tmp_path, "  add.Tensor: {template: binary, graph: self + other * alpha}\n")


def test_2_declarations_are_joined_by_name() -> None:
    for name, d in aten_declarations().items():
        assert d.schema.partition("(")[0] == name


def test_4_entries_are_by_overload(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="SL901"):
        described.made(tmp_path, "  Reshape: {template: custom}\n")


@pytest.mark.parametrize("alpha", [1, 2.5, 0, -1])
def test_5_alpha_is_not_dropped(dev: Any, device: str, alpha: float) -> None:
    check(device, lambda a, b: torch.add(a, b, alpha=alpha), torch.randn(3, 4), torch.randn(3, 4))
    assert native(dev, "add.out") == 1


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
@pytest.mark.usefixtures("of_openvino")
def test_5_rounding_mode_is_mapped_or_falls_back(dev: Any, device: str, mode: str | None) -> None:
    check(
        device,
        lambda a, b: torch.div(a, b, rounding_mode=mode),
        torch.tensor([7.0, -7.0, 1.0]),
        torch.tensor([2.0, 2.0, 0.1]),
    )
    counts = dev.counters()["aten::div.out_mode"]
    assert counts["native"] == (mode is None)
    assert bool(counts["fallback"]) == (mode is not None)


def test_5_padding_idx_is_not_overwritten(device: str) -> None:
    def grad(weight: Tensor, index: Tensor) -> Tensor:
        weight = weight.detach().requires_grad_()
        torch.nn.functional.embedding(index, weight, padding_idx=2).sum().backward()
        assert weight.grad is not None
        return weight.grad

    check(device, grad, torch.randn(5, 3), torch.tensor([0, 2, 4]))


def test_6_broadcasting(device: str) -> None:
    check(device, torch.add, torch.randn(3, 1), torch.randn(2, 3, 5))
    check(device, torch.add, torch.randn(0, 3), torch.randn(1, 3))


@pytest.mark.parametrize(
    "other", [2.5, torch.tensor([1.5]), torch.tensor([1], dtype=torch.uint8), torch.tensor([True])]
)
def test_6_promotion(device: str, other: Any) -> None:
    check(device, torch.add, torch.arange(3, dtype=torch.int32), other)


def test_6_comparisons_return_bool(dev: Any, device: str) -> None:
    check(device, torch.gt, torch.tensor([1.0, float("nan")]), torch.tensor([0.0, 0.0]))
    assert native(dev, "gt.Tensor_out") == 1


def test_6_narrow_integers_wrap(device: str) -> None:
    check(device, torch.add, torch.tensor([200], dtype=torch.uint8), torch.tensor([100], dtype=torch.uint8))
    check(device, torch.mul, torch.tensor([100], dtype=torch.int8), torch.tensor([3], dtype=torch.int8))
    check(device, torch.add, torch.tensor([True]), torch.tensor([True]))
    # -1 is no uint8, and becomes 255 before anything is compared
    check(device, torch.gt, torch.tensor([1, 255], dtype=torch.uint8), torch.tensor(-1, dtype=torch.int8))


@pytest.mark.usefixtures("of_openvino")
def test_7_the_key_holds_shapes_dtypes_and_attributes(dev: Any, device: str) -> None:
    dev.cache_clear()
    check(device, torch.mm, torch.randn(3, 5), torch.randn(5, 7))
    check(device, torch.mm, torch.randn(3, 9), torch.randn(9, 7))
    check(device, torch.mm, torch.randn(3, 9).bfloat16(), torch.ones(9, 7).bfloat16())
    assert dev.cache_info()["misses"] == 3
    for dim in (0, 1):
        check(device, lambda x, dim=dim: x.softmax(dim), torch.randn(4, 4))
    assert dev.cache_info()["misses"] == 5


def test_7_a_scalar_is_no_new_graph(dev: Any, device: str) -> None:
    dev.cache_clear()
    for alpha in (0.5, 0.25, 3.0):
        check(device, lambda a, b, alpha=alpha: torch.add(a, b, alpha=alpha), torch.randn(3), torch.randn(3))
    assert (dev.cache_info()["misses"], dev.cache_info()["hits"]) == (1, 2)


@pytest.mark.usefixtures("of_openvino")
def test_8_every_output_has_its_own_sizes_and_strides(dev: Any, device: str) -> None:
    norm = torch.nn.functional.layer_norm
    check(device, lambda x, w: torch.native_layer_norm(x, [4], w, None, 1e-5), torch.randn(2, 3, 4), torch.randn(4))
    assert native(dev, "native_layer_norm") == 1
    check(device, lambda x: norm(x, [3, 4]), torch.randn(2, 3, 4))


@pytest.mark.usefixtures("of_openvino")
def test_8_shapes_by_the_meta_kernel(dev: Any, device: str) -> None:
    """tests/backend/ops.yaml says `mode: infer` for hardswish: strides are inferred too, not sizes in their place."""
    for x in (
        torch.randn(2, 3, 4),
        torch.randn(4, 3).t(),
        torch.randn(2, 6)[:, ::2],
        torch.randn(0, 3),
        torch.randn(()),
    ):
        check(device, torch.nn.functional.hardswish, x)
    assert native(dev, "hardswish") >= 4


def test_9_out_overloads_are_known_by_kind() -> None:
    assert aten_declarations()["gelu_backward.grad_input"].kind == "out"


@pytest.mark.parametrize("shape", [(0,), (7,), (2, 3)])
def test_10_out_is_resized(device: str, shape: tuple[int, ...]) -> None:
    def into(x: Tensor) -> Tensor:
        out = torch.empty(0, device=x.device) if shape != (2, 3) else torch.empty(shape, device=x.device)
        torch.sum(x, dim=2, out=out)
        return out

    check(device, into, torch.randn(2, 3, 4))


def test_10_out_of_another_dtype_is_refused_as_on_the_cpu(device: str) -> None:
    out = torch.empty(2, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(torch.ones(2, device=device), 1.5, out=out)


@pytest.mark.usefixtures("of_openvino")
def test_10_all_outputs_are_returned(dev: Any, device: str) -> None:
    check(device, lambda x: torch.max(x, dim=1), torch.randn(3, 4))
    check(
        device, lambda x: torch.max(x, dim=1, keepdim=True), torch.tensor([[1.0, float("nan"), 2.0], [5.0, 5.0, 1.0]])
    )
    assert native(dev, "max.dim_max") == 2


def test_10_devices_are_checked(device: str) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.mm(torch.ones(2, 2, device=device), torch.ones(2, 2))


def test_11_no_action_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="template 'fallback'"):
        described.made(tmp_path, "  exp.out: {template: fallback}\n")


def test_12_symbolic_sizes_arrive_as_plain_ones(tmp_path: Path) -> None:
    text = described.body(
        tmp_path, "  tril.out: {template: structured, graph: self, guard: {diagonal == 0: diagonal}}\n"
    )
    assert "int64_t diagonal" in text
    assert not [line for line in text.splitlines() if "SymInt" in line and not line.startswith("//")]


def test_13_one_registration_each(tmp_path: Path) -> None:
    text = described.body(
        tmp_path, "  relu: {template: functional, graph: Relu(self), output: {result: {mode: bypass}}}\n"
    )
    names = [line for line in text.splitlines() if "m.impl(" in line]
    assert len(names) == len(set(names)) == 2


def test_14_layer_norm_and_dropout_are_no_stubs(device: str) -> None:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        torch.manual_seed(0)
        torch.nn.functional.layer_norm(x, [4], w).square().sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        return x.grad, w.grad

    check(device, step, torch.randn(3, 4), torch.randn(4))
    x = torch.ones(1000, device=device, requires_grad=True)
    y = torch.nn.functional.dropout(x, 0.5)
    assert sorted(y.detach().cpu().unique().tolist()) == [0.0, 2.0]
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), y.detach().cpu())


def test_an_empty_sum_and_a_product_without_terms(device: str) -> None:
    check(device, torch.mm, torch.randn(3, 0), torch.randn(0, 7))
    check(device, lambda x: x.sum(1), torch.randn(3, 0))


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:], lambda x: x[:1].expand(4, 6)])
def test_views_go_in_and_come_out(device: str, view: Callable[[Tensor], Tensor]) -> None:
    check(device, lambda x: view(x) + view(x), torch.randn(4, 6))
    check(device, lambda x: view(x).relu(), torch.randn(4, 6))
    check(device, lambda x: view(x.clone()).mul_(2), torch.randn(4, 6)) if view(torch.ones(4, 6)).stride(0) else None
    check(device, lambda x: view(x).mm(view(x).t()), torch.randn(4, 6))


@pytest.mark.usefixtures("of_openvino")
def test_int32_is_compared_exactly(dev: Any, device: str) -> None:
    """OpenVINO's plugin compares int32 in float32, where 2^24 + 1 is 2^24: the metadata keeps int32 out."""
    big = torch.tensor([2**24 + 1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    check(device, torch.gt, big, torch.tensor([2**24, 2**31 - 2, -(2**31) + 1], dtype=torch.int32))
    assert dev.counters()["aten::gt.Tensor_out"]["fallback"] == {"dtype: Int": 1}
    check(device, torch.add, big, torch.ones(3, dtype=torch.int32))
    assert native(dev, "add.out") == 1


@pytest.mark.usefixtures("of_openvino")
def test_long_sums_keep_their_digits(dev: Any, device: str) -> None:
    x = torch.randn(300_001)
    for got in (x.to(device).sum(), x.reshape(-1, 1).to(device).sum(0)):
        assert abs(got.cpu().double() - x.double().sum()) < 1e-3
    assert native(dev, "sum.IntList_out") == 2
