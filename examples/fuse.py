"""A kernel as a template: Inductor puts what follows it inside.

Run: python examples/fuse.py
"""

# --8<-- [start:declare]
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl


@sl.op("fused::scaled_mm")
def scaled_mm(
    a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], scale: Float[Tensor, "n"]
) -> Float[Tensor, "m n"]:
    """``a @ b``, each column times its scale."""
    return (a @ b) * scale


scaled_mm.template(
    "cpu", "scaled_mm.cpp.jinja", configs=[{"BM": 16, "BN": 64}, {"BM": 4, "BN": 256}]
)
# --8<-- [end:declare]


# --8<-- [start:layer]
def layer(a, b, scale, bias):
    return torch.nn.functional.gelu(scaled_mm(a, b, scale) + bias)


def example_inputs():
    return torch.randn(100, 64), torch.randn(64, 300), torch.rand(300), torch.randn(300)


# --8<-- [end:layer]


def mean(a, b, scale, bias):
    return layer(a, b, scale, bias).mean(1)


if __name__ == "__main__":
    # --8<-- [start:explain]
    found = sl.explain(layer, *example_inputs())
    # the product, the addition and the activation are one kernel
    (kernel,) = found.kernels
    # template ('fused::scaled_mm', 'aten.add', 'aten.gelu')
    print(kernel.kind, kernel.operators)
    print(kernel.fusion_choices[0].chosen)  # scaled_mm(BM=16, BN=64)
    # --8<-- [end:explain]
    inputs = example_inputs()
    torch.testing.assert_close(torch.compile(layer)(*inputs), layer(*inputs))
    (template, after) = sl.explain(mean, *example_inputs()).kernels
    print("not inside:", template.unfused[0].operators, template.unfused[0].meaning)
