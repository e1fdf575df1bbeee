"""An op with kernels in C++ and CUDA C++ that Shiplap compiles: python examples/source_kernel.py"""

# --8<-- [start:declare]
import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl


@sl.op("source_kernel::rms_norm")
def rms_norm(
    x: Float32[Tensor, "n c"],
    weight: Float32[Tensor, "c"],
    eps: float = 1e-6,
) -> Float32[Tensor, "n c"]:
    """Scale each row to a root mean square of one, then each column by ``weight``."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


rms_norm.kernel("cpu", sl.source("source_kernel.cpp", "rms_norm_cpu"))
rms_norm.kernel("cuda", sl.source("source_kernel.cu", "rms_norm_cuda"))
# --8<-- [end:declare]


def main() -> None:
    # --8<-- [start:build]
    rms_norm.build()  # or, in a shell: shiplap build examples/source_kernel.py
    # --8<-- [end:build]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, weight = torch.randn(64, 96, device=device), torch.rand(96, device=device)
    compiled = torch.compile(lambda x, w: rms_norm(x, w).relu(), fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), rms_norm.reference(x, weight).relu())
    print(f"the kernel in {'CUDA C++' if device == 'cuda' else 'C++'} agrees with the reference, eager and compiled")


if __name__ == "__main__":
    main()
