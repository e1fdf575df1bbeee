"""Six kernels in CUDA C++: plain, CUB, tensor cores, several launches, several
architectures, and a library of two files.

Run: python examples/cuda_kernels.py
"""

import torch
from jaxtyping import Float, Float16, Float32, Int32, Int64
from torch import Tensor

import shiplap as sl


# --8<-- [start:dtypes]
@sl.op("cuda_kernels::bias_gelu")
def bias_gelu(
    x: Float[Tensor, "n c"], bias: Float[Tensor, "c"]
) -> Float[Tensor, "n c"]:
    """gelu(x + bias), in one floating-point dtype."""
    return torch.nn.functional.gelu(x + bias)


bias_gelu.kernel(
    "cuda",
    sl.source("cuda/bias_gelu.cu", "bias_gelu"),
    dtypes=("float32", "float16", "bfloat16"),
)
# --8<-- [end:dtypes]


# --8<-- [start:cub]
@sl.op("cuda_kernels::prefix_sums")
def prefix_sums(x: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
    """The sum of all elements up to each element."""
    return x.cumsum(0)


prefix_sums.kernel(
    "cuda", sl.source("cuda/prefix_sums.cu", "prefix_sums"), workspace="n+65536"
)
# --8<-- [end:cub]


@sl.op("cuda_kernels::half_matmul")
def half_matmul(
    a: Float16[Tensor, "m k"], b: Float16[Tensor, "k n"]
) -> Float16[Tensor, "m n"]:
    """a @ b, with sums in float32."""
    return a @ b


half_matmul.kernel("cuda", sl.source("cuda/half_matmul.cu", "half_matmul"))


# --8<-- [start:workspace]
@sl.op("cuda_kernels::unit_norm")
def unit_norm(x: Float32[Tensor, "n"], eps: float = 1e-12) -> Float32[Tensor, "n"]:
    """x divided by its Euclidean norm, or by eps if the norm is smaller."""
    return x / torch.linalg.vector_norm(x).clamp_min(eps)


unit_norm.kernel("cuda", sl.source("cuda/unit_norm.cu", "unit_norm"), workspace="129*4")
# --8<-- [end:workspace]


# --8<-- [start:architectures]
@sl.op("cuda_kernels::row_max", requires="c > 0")
def row_max(x: Int32[Tensor, "n c"]) -> Int32[Tensor, "n"]:
    """The largest number of each row."""
    return x.amax(1)


row_max.kernel(
    "cuda",
    sl.source("cuda/row_max.cu", "row_max", architectures=["75", "80", "90"]),
)
# --8<-- [end:architectures]


# --8<-- [start:files]
@sl.op("cuda_kernels::lookup")
def lookup(
    table: Float32[Tensor, "e c"], rows: Int64[Tensor, "n"]
) -> Float32[Tensor, "n c"]:
    """The rows of a table, with zeros for a number that is no row."""
    known = (rows >= 0) & (rows < table.shape[0])
    padded = torch.cat([table, table.new_zeros(1, table.shape[1])])
    return padded[torch.where(known, rows, table.shape[0])]


lookup.kernel("cuda", sl.source(["cuda/lookup.cpp", "cuda/lookup_kernel.cu"], "lookup"))
# --8<-- [end:files]

OPS = (bias_gelu, prefix_sums, half_matmul, unit_norm, row_max, lookup)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        for op in OPS:
            op.build()
    x = torch.randn(33, 65, device=device)
    i = torch.randint(-9, 9, (33, 65), device=device)
    for op, args in (
        (bias_gelu, (x, x[0])),
        (prefix_sums, (i[0],)),
        (half_matmul, (x.half(), x.half().t())),
        (unit_norm, (x[0],)),
        (row_max, (i.int(),)),
        (lookup, (x, i[:, 0])),
    ):
        torch.testing.assert_close(op(*args), op.reference(*args))
    by = "six kernels in CUDA C++ agree" if device == "cuda" else "no GPU: six agree"
    print(f"{by} with their references")


if __name__ == "__main__":
    main()
