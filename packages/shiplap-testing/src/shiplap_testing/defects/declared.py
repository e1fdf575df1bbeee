"""Declarations that several defects share: each declares its op in the namespace that it is given."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.witness import wide

V = Float[Tensor, "n"]
M = Float[Tensor, "n c"]


def matmul(ns: str) -> sl.Op:
    @sl.op(f"{ns}::mm")
    def mm(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
        return a @ b

    return mm


def softmax(ns: str) -> sl.Op:
    @sl.op(f"{ns}::softmax")
    def softmax(x: M) -> M:
        return torch.softmax(x, 1)

    return softmax


def scaled(ns: str) -> sl.Op:
    @sl.op(f"{ns}::scaled")
    def scaled(x: M, scale: float = 2.0) -> M:
        return x * scale

    return scaled


def added(ns: str) -> sl.Op:
    @sl.op(f"{ns}::added")
    def added(x: M, y: M) -> M:
        return x + y

    return added


def product(ns: str) -> sl.Op:
    @sl.op(f"{ns}::product")
    def product(x: M, y: M) -> M:
        return x * y

    return product


def doubled(ns: str) -> sl.Op:
    @sl.op(f"{ns}::doubled")
    def doubled(x: M) -> M:
        return x * 2

    return doubled


def relu(ns: str) -> sl.Op:
    @sl.op(f"{ns}::relu")
    def relu(x: M) -> M:
        return torch.relu(x)

    return relu


def row_max(ns: str) -> sl.Op:
    @sl.op(f"{ns}::row_max", requires="c >= 1")
    def row_max(x: M) -> V:
        return x.amax(1)

    return row_max


def row_sum(ns: str) -> sl.Op:
    @sl.op(f"{ns}::row_sum")
    def row_sum(x: M) -> V:
        return x.sum(1)

    return row_sum


def column_sum(ns):
    @sl.op(f"{ns}::column_sum")
    def column_sum(x: M) -> Float[Tensor, "c"]:
        return x.sum(0)

    return column_sum


def rms_norm(ns: str) -> sl.Op:
    @sl.op(f"{ns}::rms_norm", requires="c >= 1")
    def rms_norm(x: M, eps: float = 1e-6) -> M:
        y = wide(x)
        return (y * torch.rsqrt(y.square().mean(1, keepdim=True) + eps)).to(x.dtype)

    return rms_norm


def ordered(ns: str) -> sl.Op:
    @sl.op(f"{ns}::ordered")
    def ordered(x: V) -> V:
        return x.sort().values

    return ordered


def attention(ns: str) -> sl.Op:
    @sl.op(f"{ns}::attention", requires=("n >= 1", "d >= 1"))
    def attention(q: Float[Tensor, "m d"], k: Float[Tensor, "n d"], v: Float[Tensor, "n e"]) -> Float[Tensor, "m e"]:
        return torch.softmax(q @ k.T * q.shape[1] ** -0.5, 1) @ v

    return attention


def gather(ns: str) -> sl.Op:
    @sl.op(f"{ns}::gather")
    def gather(x: M, index: Int64[Tensor, "m"]) -> Float[Tensor, "m c"]:
        return torch.cat([x, x.new_zeros(1, x.shape[1])])[index]  # -1 is the last row, which is zero

    @gather.samples
    def _(rng, sizes, dtype, device):
        x = torch.randn(sizes["n"], sizes["c"], generator=rng).to(device, dtype)
        return x, torch.randint(-1, sizes["n"], (sizes["m"],), generator=rng).to(device)

    return gather


def scatter(ns: str) -> sl.Op:
    @sl.op(f"{ns}::scatter", requires="bins >= 1")
    def scatter(x: M, index: Int64[Tensor, "n"], bins: int = 5) -> Float[Tensor, "bins c"]:
        return x.new_zeros(bins, x.shape[1]).index_add(0, index % bins, x)

    return scatter


def masked_mean(ns: str) -> sl.Op:
    @sl.op(f"{ns}::masked_mean")
    def masked_mean(x: M, mask: Bool[Tensor, "n c"]) -> V:
        return torch.where(mask, x, 0).sum(1) / mask.sum(1).clamp_min(1)

    return masked_mean


def update(ns: str) -> sl.Op:
    @sl.op(f"{ns}::update", mutates=["table"])
    def update(table: M, x: M) -> None:
        table.add_(x)

    return update


def add_to(table, x):
    table.add_(x)


def distinct(ns: str) -> sl.Op:
    @sl.op(f"{ns}::distinct", bounds={"m": "n"})
    def distinct(x: Int64[Tensor, "n"]) -> Int64[Tensor, "m"]:
        return torch.unique(x)

    return distinct
