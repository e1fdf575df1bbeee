"""A plain Triton kernel, launched by C++, compiled for a GPU that is not here.

Run: python examples/triton_kernel.py
"""

# --8<-- [start:declare]
import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import shiplap as sl


@triton.jit
def scale_kernel(x, out, m, stride_x_0, stride_x_1, factor, BLOCK: tl.constexpr):
    row, at = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64),
    )
    value = tl.load(x + row * stride_x_0 + at * stride_x_1, mask=at < m)
    tl.store(out + row * m + at, value * factor, mask=at < m)


@sl.op("launches::scale")
def scale(x: Float[Tensor, "n m"], factor: float) -> Float[Tensor, "n m"]:
    """``x * factor``."""
    return x * factor


scale.kernel(
    "cuda",
    sl.triton(
        scale_kernel,
        grid=("n", "cdiv(m, BLOCK)"),
        configs=[{"BLOCK": 256, "num_warps": 4}, {"BLOCK": 1024, "num_warps": 8}],
    ),
)
# --8<-- [end:declare]


# --8<-- [start:backward]
@sl.op("launches::scale_x", outputs=("grad_x",))
def scale_x(grad: Float[Tensor, "n m"], factor: float) -> Float[Tensor, "n m"]:
    """The gradient of ``scale`` by ``x``."""
    return grad * factor


scale_x.kernel(
    "cuda",
    sl.triton(
        scale_kernel,
        grid=("n", "cdiv(m, BLOCK)"),
        arguments={
            "x": "grad",
            "out": "grad_x",
            "stride_x_0": "stride_grad_0",
            "stride_x_1": "stride_grad_1",
        },
        constants={"BLOCK": 256},
    ),
)
scale.backward(scale_x)
# --8<-- [end:backward]


def ahead() -> None:
    # --8<-- [start:ahead]
    from shiplap.kernels.triton import compile_ahead

    compile_ahead(scale, [(torch.empty(8, 1000), 2.0)], architectures=(90,))
    # --8<-- [end:ahead]


if __name__ == "__main__":
    ahead()
    x = torch.randn(4, 6)
    # the reference, or Triton's interpreter: there is no GPU
    assert torch.equal(scale(x, 2.0), x * 2)
    (gradient,) = torch.autograd.grad(scale(x.requires_grad_(), 2.0).sum(), x)
    assert torch.equal(gradient, torch.full_like(x, 2))
    print("compiled for a device that need not be here")
