"""What the doctor advises removes the break: each remedy is applied, and the program examined again."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap import torch_private

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_a_mask_in_one_op_with_a_bound(ns: str) -> None:
    @sl.op(f"{ns}::select", bounds={"m": "n"})
    def select(x: Float[Tensor, "n c"], keep: Bool[Tensor, "n"]) -> Float[Tensor, "m c"]:
        return x[keep]

    x = torch.randn(6, 2)
    assert [b.cause for b in sl.doctor(lambda x: x[x[:, 0] > 0] * 2, x).breaks] == ["shape"]
    with torch_private.data_dependent_sizes():
        assert sl.doctor(lambda x: select(x, x[:, 0] > 0) * 2, x).ok


def test_an_item_that_is_a_size(ns: str) -> None:
    @sl.op(f"{ns}::take", bounds={"m": "n"})
    def take(x: Float[Tensor, "n c"], count: Int64[Tensor, ""]) -> Float[Tensor, "m c"]:
        return x[: int(count)].clone()

    x, count = torch.randn(6, 2), torch.tensor(4)
    assert [b.cause for b in sl.doctor(lambda x, n: x[: n.item()] * 2, x, count).breaks] == ["item"]
    with torch_private.data_dependent_sizes():
        assert sl.doctor(lambda x, n: take(x, n) * 2, x, count).ok


def test_an_item_that_is_a_value() -> None:
    x = torch.randn(6)
    assert [b.cause for b in sl.doctor(lambda x: x * x.sum().item(), x).breaks] == ["item"]
    assert sl.doctor(lambda x: x * x.sum(), x).ok


def test_a_branch() -> None:
    x = torch.randn(6)
    assert {b.cause for b in sl.doctor(lambda x: x + 1 if x.sum() > 0 else x - 1, x).breaks} == {"branch"}
    assert sl.doctor(lambda x: torch.where(x.sum() > 0, x + 1, x - 1), x).ok


def test_a_compiled_function_of_another_package(ns: str) -> None:
    from scipy.ndimage import uniform_filter1d

    def foreign(x: Tensor) -> Tensor:
        return torch.from_numpy(uniform_filter1d(x.numpy(), 3)) * 2

    @sl.op(f"{ns}::smooth")
    def smooth(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        padded = torch.cat([x[:1], x, x[-1:]])
        return padded.unfold(0, 3, 1).mean(-1)

    @smooth.kernel("cpu", name="scipy.ndimage.uniform_filter1d")
    def _(x: Tensor) -> Tensor:
        return torch.from_numpy(uniform_filter1d(x.numpy(), 3))

    x = torch.randn(8)
    assert sl.doctor(foreign, x).breaks
    assert sl.doctor(lambda x: smooth(x) * 2, x).ok
    torch.testing.assert_close(smooth(x) * 2, foreign(x))


def test_output_for_a_person() -> None:
    def silent(x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            print("shape", x.shape)
        return x + 1

    assert sl.doctor(silent, torch.randn(6)).ok
