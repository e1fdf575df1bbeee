"""Kernels that library authors have, each declared, audited, compiled and exported.

Run: python examples/language.py

Beside each of them is the same op with ``torch.library.custom_op``, which has no
argument checks, no audit and no refusal of a gradient that is missing. The script
counts the lines of both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

import shiplap as sl


# --8<-- [start:nms]
@sl.op("kernels::nms", bounds={"m": "n"})
def nms(
    boxes: Float32[Tensor, "n 4"], scores: Float32[Tensor, "n"], threshold: float
) -> Int64[Tensor, "m"]:
    """The boxes that overlap no better one by more than threshold, best first."""
    order, kept = scores.argsort(descending=True, stable=True).tolist(), list[int]()
    for i in order:
        if all(_overlap(boxes[i], boxes[j]) <= threshold for j in kept):
            kept.append(i)
    return torch.tensor(kept, dtype=torch.int64, device=boxes.device)


# --8<-- [end:nms]


def _overlap(a: Tensor, b: Tensor) -> float:
    size = (
        (torch.minimum(a[2:], b[2:]) - torch.maximum(a[:2], b[:2])).clamp_min(0).prod()
    )
    return float(size / ((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod() - size))


@torch.library.custom_op("kernels::nms_plain", mutates_args=())
def nms_plain(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    order, kept = scores.argsort(descending=True, stable=True).tolist(), list[int]()
    for i in order:
        if all(_overlap(boxes[i], boxes[j]) <= threshold for j in kept):
            kept.append(i)
    return torch.tensor(kept, dtype=torch.int64, device=boxes.device)


@nms_plain.register_fake
def nms_plain_fake(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return boxes.new_empty((size,), dtype=torch.int64)


# --8<-- [start:cache]
@sl.op("kernels::write_", mutates="cache", aliases="cache")
def write_(
    cache: Float[Tensor, "blocks size heads d"],
    rows: Float[Tensor, "n heads d"],
    slots: Int64[Tensor, "n"],
) -> Float[Tensor, "blocks size heads d"]:
    """Write each row to its slot of a paged cache, in place, and return the cache."""
    cache.flatten(0, 1)[slots] = rows
    return cache


@write_.samples
def _(
    rng: torch.Generator,
    sizes: dict[str, int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, ...]:
    blocks, size, n = (
        sizes["blocks"],
        sizes["size"],
        min(sizes["n"], sizes["blocks"] * sizes["size"]),
    )
    shape = sizes["heads"], sizes["d"]
    cache, rows = (
        torch.randn(*k, *shape, generator=rng, dtype=dtype).to(device)
        for k in ((blocks, size), (n,))
    )
    return cache, rows, torch.randperm(blocks * size, generator=rng)[:n].to(device)


# --8<-- [end:cache]


# which cannot return the cache
@torch.library.custom_op("kernels::write_plain", mutates_args=("cache",))
def write_plain(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    cache.view(-1, *cache.shape[2:])[slots] = rows


# --8<-- [start:step]
@sl.op("kernels::step", mutates=("params", "moments"))
def step(
    params: list[Float32[Tensor, "..."]],
    moments: list[Float32[Tensor, "..."]],
    grads: list[Float32[Tensor, "..."]],
    rate: float = 1e-3,
) -> None:
    """One step of gradient descent with momentum for all parameters."""
    for p, m, g in zip(params, moments, grads, strict=True):
        p.sub_(m.mul_(0.9).add_(g), alpha=rate)


# --8<-- [end:step]


@torch.library.custom_op("kernels::step_plain", mutates_args=("params", "moments"))
def step_plain(
    params: Sequence[Tensor],
    moments: Sequence[Tensor],
    grads: Sequence[Tensor],
    rate: float,
) -> None:
    for p, m, g in zip(params, moments, grads, strict=True):
        p.sub_(m.mul_(0.9).add_(g), alpha=rate)


# --8<-- [start:dropout]
@sl.op("kernels::dropout", outputs=("out", "kept"))
def dropout(
    x: Float[Tensor, "*n"], seed: Int64[Tensor, ""], p: float
) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """x with a share of p of its elements dropped, as the seed says, and the factor of
    each element."""
    noise = (
        torch.arange(x.numel(), device=x.device).view(x.shape) * 2654435761
        + seed * 40503
    )
    kept = ((noise % 65536) / 65536 >= p).to(x.dtype) / (1 - p)
    return x * kept, kept


@dropout.backward
def _(grads: tuple[Tensor, Tensor], saved: Any, needs: Any) -> dict[str, Tensor | None]:
    return {"x": grads[0] * saved.kept}


# --8<-- [end:dropout]


@torch.library.custom_op("kernels::dropout_plain", mutates_args=())
def dropout_plain(x: Tensor, seed: Tensor, p: float) -> tuple[Tensor, Tensor]:
    noise = (
        torch.arange(x.numel(), device=x.device).view(x.shape) * 2654435761
        + seed * 40503
    )
    kept = ((noise % 65536) / 65536 >= p).to(x.dtype) / (1 - p)
    return x * kept, kept


@dropout_plain.register_fake
def dropout_plain_fake(x: Tensor, seed: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def dropout_plain_keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])


def dropout_plain_backward(
    ctx: Any, grad: Tensor, _: Tensor
) -> tuple[Tensor, None, None]:
    (kept,) = ctx.saved_tensors
    return grad * kept, None, None


dropout_plain.register_autograd(
    dropout_plain_backward, setup_context=dropout_plain_keep
)


# --8<-- [start:split]
@sl.op("kernels::unpack")
def unpack(
    packed: Float[Tensor, "n d"], lengths: list[int]
) -> list[Float[Tensor, "m d"]]:
    """The sequences of a packed batch, each with memory of its own."""
    return [t.clone() for t in packed.split(lengths)]


@unpack.backward
def _(grads: list[Tensor], saved: Any, needs: Any) -> dict[str, Tensor]:
    return {"packed": torch.cat(grads)}


@unpack.samples
def _(
    rng: torch.Generator,
    sizes: dict[str, int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Any, ...]:
    n = sizes["n"]
    return torch.randn(n, sizes["d"], generator=rng, dtype=dtype).to(device), [
        n // 3,
        n - n // 3,
    ]


# --8<-- [end:split]


@torch.library.custom_op("kernels::unpack_plain", mutates_args=())
def unpack_plain(packed: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return [t.clone() for t in packed.split(lengths)]


@unpack_plain.register_fake
def unpack_plain_fake(packed: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return [packed.new_empty((length, packed.shape[1])) for length in lengths]


class Model(torch.nn.Module):
    """A function as a module, which is what torch.export takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def calls() -> dict[
    str, tuple[sl.Op, Callable[..., Any], tuple[Any, ...], tuple[str, ...]]
]:
    """By name: the op, a function that calls it, its arguments, and the parts of the
    plain op."""
    boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.9], [3, 3, 4, 4]])
    write = torch.zeros(2, 4, 1, 3), torch.ones(2, 1, 3), torch.tensor([1, 6])
    tensors = [torch.ones(3), torch.ones(2, 2)]
    lists = (
        [t.clone() for t in tensors],
        [torch.zeros_like(t) for t in tensors],
        tensors,
    )
    return {
        "nms": (
            nms,
            lambda b, s: nms(b, s, 0.5) + 0,
            (boxes, torch.tensor([0.9, 0.8, 0.7])),
            ("", "_fake"),
        ),
        "write": (write_, lambda c, r, s: write_(c, r, s).sum(), write, ("",)),
        "step": (step, lambda p, m, g: (step(p, m, g), p[0] + m[0])[1], lists, ("",)),
        "dropout": (
            dropout,
            lambda x, seed: dropout(x, seed, 0.25)[0],
            (torch.ones(40), torch.tensor(7)),
            ("", "_fake", "_keep", "_backward"),
        ),
        "unpack": (
            unpack,
            lambda x: unpack(x, [2, 3])[1] * 2,
            (torch.ones(5, 2),),
            ("", "_fake"),
        ),
    }


def copied(value: Any) -> Any:
    return [v.clone() for v in value] if isinstance(value, list) else value.clone()


def lines(function: Callable[..., Any]) -> int:
    return sum(1 for line in inspect.getsource(function).splitlines() if line.strip())


def declared_lines(op: sl.Op) -> int:
    """Of the declaration and the gradient: samples belong to the audit, which the plain
    op does not have."""
    return lines(op.reference) + (lines(op.gradient.fn) if op.gradient else 0)


def main() -> None:
    for name, (op, call, args, parts) in calls().items():
        report = sl.audit(op, checks=("numerics", "fake", "schema"), seed=0)
        assert report.proven, str(report)
        wanted = call(*map(copied, args))
        compiled = torch.compile(
            call, fullgraph=True, dynamic=True, backend="aot_eager"
        )(*map(copied, args))
        exported = torch.export.export(Model(call), tuple(map(copied, args))).module()(
            *map(copied, args)
        )
        same = torch.equal(compiled, wanted) and torch.equal(exported, wanted)
        plain = sum(lines(_function(f"{name}_plain{part}")) for part in parts) + (
            name == "dropout"
        )
        ours = declared_lines(op)
        state = "audited, compiled, exported" if same else "WRONG"
        print(f"{name}: {state}; {ours} lines, with custom_op {plain}")


def _function(name: str) -> Callable[..., Any]:
    made = globals()[name]
    function: Callable[..., Any] = getattr(made, "_init_fn", made)
    return function


if __name__ == "__main__":
    main()
