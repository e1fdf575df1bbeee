"""The rows of ``triton_train_gpu.py``: one product of two vectors and its gradient, launched in several ways."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import overhead_gpu as shared
import triton_host_gpu as host

import shiplap as sl
from shiplap.kernels.native import binding

SIZE, BLOCK = 1024, 1024
DRY = "--dry-run" in sys.argv
DEVICE = "cpu" if DRY else "cuda"
Function = Callable[[Tensor, Tensor], Tensor]


@triton.jit
def mul_kernel(x_ptr, y_ptr, out_ptr, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=inside) * tl.load(y_ptr + at, mask=inside), mask=inside)


def declared(namespace: str, *, as_op: bool) -> tuple[sl.Op, sl.Op]:
    """``x * y`` and its gradient by ``x``, both one launch."""

    @sl.op(f"{namespace}::mul")
    def mul(x: Float32[Tensor, "n"], y: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x * y

    @sl.op(f"{namespace}::mul_x", outputs=("grad_x",))
    def mul_x(grad: Float32[Tensor, "n"], y: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return grad * y

    constants = {"SIZE": BLOCK}
    mul.kernel("cuda", sl.triton(mul_kernel, grid="cdiv(n, SIZE)", constants=constants))
    names = {"x_ptr": "grad", "out_ptr": "grad_x"}
    mul_x.kernel("cuda", sl.triton(mul_kernel, grid="cdiv(n, SIZE)", constants=constants, arguments=names))
    if as_op:
        mul.backward(mul_x)
    else:
        mul.backward(lambda grad, saved, needs: {"x": mul_x(grad, saved.y), "y": None}, saves=("y",))
    return mul, mul_x


def bound(namespace: str, *, as_op: bool) -> sl.Op:
    """The same, launched by generated C++."""
    mul, mul_x = declared(namespace, as_op=as_op)
    for op in () if DRY else (mul, mul_x):
        binding.build(op)
        kind, why = binding.state(op, "cuda")
        if kind != "native":
            raise shared.Missing(why)
    return mul


def sl_triton(folder: Path) -> Function:
    """The gradient declared as an op."""
    return bound("bench_train", as_op=True)


def sl_triton_function(folder: Path) -> Function:
    """Control: the gradient declared as a function that calls the op."""
    return bound("bench_train_function", as_op=False)


def sl_triton_python(folder: Path) -> Function:
    """Control: launched by Python."""
    mul, mul_x = declared("bench_train_python", as_op=True)
    x = torch.ones(SIZE, device=DEVICE)
    os.environ["SHIPLAP_NATIVE"] = "0"
    mul(x, x), mul_x(x, x)
    del os.environ["SHIPLAP_NATIVE"]
    return mul


def launch(kernel: Any, x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernel[shared.blocks(x.numel())](x, y, out, x.numel(), SIZE=BLOCK)
    return out


def triton_op(folder: Path) -> Function:
    """Peer: ``torch.library.triton_op`` with ``register_autograd``, the gradient one more such op."""
    wrapped: Any = torch.library.wrap_triton

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return launch(wrapped(mul_kernel), x, y)

    def backward_kernel(grad: Tensor, y: Tensor) -> Tensor:
        return launch(wrapped(mul_kernel), grad, y)

    mul = torch.library.triton_op("bench_train_library::mul", forward, mutates_args=())
    mul_x = torch.library.triton_op("bench_train_library::mul_x", backward_kernel, mutates_args=())

    def set_up(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return mul_x(grad, ctx.saved_tensors[0]), None

    mul.register_autograd(backward, setup_context=set_up)
    return mul


def recorded(name: str, multiply: Function) -> Function:
    """``multiply`` for forward and backward in an ``autograd.Function`` as PyTorch's tutorial writes it."""

    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return multiply(x, y)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return multiply(grad, ctx.saved_tensors[0]), None

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), members)
    apply: Function = function.apply
    return apply


def autograd_function(folder: Path) -> Function:
    """Peer: around Triton's own launch, without an op."""
    return recorded("Plain", lambda x, y: launch(mul_kernel, x, y))


def hand_written(folder: Path) -> Function:
    """Peer: around a C++ op that launches what Triton has compiled for this call, and nothing else."""
    library = host.compile_hand_written(folder)
    torch.ops.load_library(library)
    x = torch.empty(SIZE, device="cuda")
    compiled = mul_kernel[shared.blocks(SIZE)](x, x, torch.empty_like(x), SIZE, SIZE=BLOCK)
    threads, size = 32 * compiled.metadata.num_warps, compiled.metadata.shared
    ctypes.CDLL(str(library)).set_kernel(ctypes.c_void_p(compiled.function), threads, size)
    return recorded("Hand", torch.ops.bench_triton_hand.add.default)


ROWS: dict[str, Callable[[Path], Function]] = {
    "hand_written": hand_written,
    "sl_triton": sl_triton,
    "sl_triton_function": sl_triton_function,
    "sl_triton_python": sl_triton_python,
    "triton_op": triton_op,
    "autograd_function": autograd_function,
}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """``x``, which requires a gradient, ``y`` and the gradient of the output."""
    x, y, grad = (torch.randn(SIZE, device=DEVICE) for _ in range(3))
    return x.requires_grad_(), y, grad


def both(function: Function, x: Tensor, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The result and the gradient by ``x``."""
    out = function(x, y)
    return out, torch.autograd.grad(out, x, grad)[0]
