"""The kernels of eight_kernels.py with torch.library.custom_op, and the lines of both.

Run: python examples/eight_plain.py

Beside shape inference, gradient and launch, the declarations of eight_kernels.py give
argument checks, an audit, jvp and a C header. These here give none of them.
"""

from __future__ import annotations

import io
import os
import tokenize

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HERE = Path(__file__).resolve().parent


# --8<-- [start:rope]
@torch.library.custom_op("eight_plain::rope", mutates_args=())
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    library = ctypes.CDLL(str(HERE / "build" / "librope_plain.so"))
    out = torch.empty_like(x)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, cos, sin, out)]
    library.rope(*pointers, *(ctypes.c_int64(n) for n in x.shape))
    return out


@rope.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x)


def rope_keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def rope_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, cos, sin = ctx.saved_tensors
    (a, b), (p, q) = x.chunk(2, -1), grad.chunk(2, -1)
    return rope(grad, cos, -sin), (p * a + q * b).sum(1), (q * a - p * b).sum(1)


rope.register_autograd(rope_backward, setup_context=rope_keep)
# --8<-- [end:rope]


# --8<-- [start:squash]
@torch.library.custom_op("eight_plain::squash", mutates_args=())
def squash(x: Tensor) -> Tensor:
    import squash_ext

    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    squash_ext.squash(x.data_ptr(), out.data_ptr(), x.numel())
    return out


@squash.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def squash_keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def squash_backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad / (1 + x.abs()).square()


squash.register_autograd(squash_backward, setup_context=squash_keep)
# --8<-- [end:squash]


# --8<-- [start:swish]
@triton.jit
def swish_kernel(x, out, numel_x, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < numel_x)
    tl.store(out + at, value / (1 + tl.exp(-value)), mask=at < numel_x)


@triton.jit
def swish_grad_kernel(grad, x, out, numel_x, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value, upper = (
        tl.load(x + at, mask=at < numel_x),
        tl.load(grad + at, mask=at < numel_x),
    )
    gate = 1 / (1 + tl.exp(-value))
    tl.store(out + at, upper * gate * (1 + value * (1 - gate)), mask=at < numel_x)


@torch.library.custom_op("eight_plain::swish", mutates_args=())
def swish(x: Tensor) -> Tensor:
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    swish_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


@swish.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("eight_plain::swish_grad", mutates_args=())
def swish_grad(grad: Tensor, x: Tensor) -> Tensor:
    grad, x, out = (
        grad.contiguous(),
        x.contiguous(),
        torch.empty_like(x, memory_format=torch.contiguous_format),
    )
    swish_grad_kernel[(triton.cdiv(x.numel(), 64),)](grad, x, out, x.numel(), BLOCK=64)
    return out


@swish_grad.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def swish_keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def swish_backward(ctx: Any, grad: Tensor) -> Tensor:
    return swish_grad(grad, *ctx.saved_tensors)


def swish_grad_backward(ctx: Any, upper: Tensor) -> tuple[Tensor, Tensor]:
    grad, x = ctx.saved_tensors
    gate = x.sigmoid()
    return swish_grad(upper, x), upper * grad * gate * (1 - gate) * (
        2 + x * (1 - 2 * gate)
    )


swish.register_autograd(swish_backward, setup_context=swish_keep)
swish_grad.register_autograd(swish_grad_backward, setup_context=swish_keep)
# --8<-- [end:swish]


# --8<-- [start:cache]
@torch.library.custom_op("eight_plain::write_", mutates_args=("caches", "scale"))
def write_(
    caches: Sequence[Tensor], scale: Tensor | None, rows: Tensor, slots: Tensor
) -> None:
    for cache in caches:
        cache[slots] = rows
    if scale is not None:
        scale[slots] = rows.abs().amax((1, 2))


# --8<-- [end:cache]


# --8<-- [start:plan]
PLANS: dict[int, Tensor] = {}


def make_plan(size: int) -> int:
    handle = len(PLANS) + 1
    PLANS[handle] = torch.cos(
        torch.arange(size)[:, None]
        * (torch.arange(size) + 0.5)
        * torch.pi
        / max(size, 1)
    )
    return handle


@torch.library.custom_op("eight_plain::transform", mutates_args=())
def transform(x: Tensor, plan: int) -> Tensor:
    return x @ PLANS[plan].to(x).T


@transform.register_fake
def _(x: Tensor, plan: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def transform_keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.plan = inputs[1]


def transform_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad @ PLANS[ctx.plan].to(grad), None


transform.register_autograd(transform_backward, setup_context=transform_keep)
# --8<-- [end:plan]


def counted(file: str) -> dict[str, int]:
    """Logical lines of code between the markers of a file, by the names of the markers.
    Samples belong to the audit."""
    lines: dict[str, int] = {}
    inside, sampling = "", False
    text = (HERE / file).read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    ends = {token.start[0] for token in tokens if token.type == tokenize.NEWLINE}
    for number, line in enumerate(text.splitlines(), 1):
        mark = line.strip().removeprefix("# --8<-- [").rstrip("]")
        if line.startswith("# --8<--"):
            kind, _, name = mark.partition(":")
            inside, sampling = (name if kind == "start" else ""), False
        elif inside and line.strip() and not line.strip().startswith("#"):
            starts = not line.startswith((" ", ")"))
            sampling = line.endswith(".samples") or (
                sampling and not (starts and not line.startswith("def _(rng"))
            )
            lines[inside] = lines.get(inside, 0) + (number in ends and not sampling)
    return lines


def main() -> None:
    ours, theirs = counted("eight_kernels.py"), counted(os.path.basename(__file__))
    for name in theirs:
        print(f"{name}: {ours[name]} lines, with custom_op {theirs[name]}")
    x = torch.randn(3, 6, requires_grad=True)
    torch.testing.assert_close(swish(x), x * x.sigmoid())
    plan = make_plan(6)
    transform(x, plan).sum().backward()
    write_([torch.zeros(4, 1, 2)], torch.zeros(4), torch.ones(2, 1, 2), torch.arange(2))


if __name__ == "__main__":
    main()
