"""A declared op from the first line to the audit: python examples/first_op.py"""

# --8<-- [start:declare]
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl


@sl.op("first::rms_norm")
def rms_norm(
    x: Float[Tensor, "n c"], weight: Float[Tensor, "c"], eps: float = 1e-6
) -> Float[Tensor, "n c"]:
    """Scale rows of ``x`` to a root mean square of one, then columns by ``weight``."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


# --8<-- [end:declare]


# --8<-- [start:kernel]
@rms_norm.kernel("cpu", name="in_place")
def _(x, weight, eps, *, out):  # `out` arrives allocated; the kernel fills it
    scale = (
        torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        .div_(max(x.shape[1], 1) ** 0.5)
        .square_()
        .add_(eps)
        .rsqrt_()
    )
    torch.mul(x, scale, out=out).mul_(weight)


# --8<-- [end:kernel]


# --8<-- [start:backward]
@rms_norm.backward
def _(grad, saved, needs):
    scale = torch.rsqrt(saved.x.square().mean(-1, keepdim=True) + saved.eps)
    normal = saved.x * scale
    result = {}
    if needs.x:
        inner = grad * saved.weight
        result["x"] = scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    if needs.weight:
        result["weight"] = (grad * normal).sum(0)
    return result


# --8<-- [end:backward]


def compile_it() -> None:
    # --8<-- [start:compile]
    @torch.compile(fullgraph=True)  # one graph, or an error: no silent break
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.silu(rms_norm(x, weight))

    x, weight = (
        torch.randn(64, 96, requires_grad=True),
        torch.ones(96, requires_grad=True),
    )
    block(x, weight).sum().backward()
    # --8<-- [end:compile]
    compiled, x.grad = x.grad, None
    torch.nn.functional.silu(rms_norm.reference(x, weight)).sum().backward()
    torch.testing.assert_close(compiled, x.grad)
    print("compiled into one graph; its gradient is the reference's")


def audit_it() -> None:
    # --8<-- [start:audit]
    # seconds; the default of 300 is enough on an idle machine
    report = sl.audit(rms_norm, budget=600)
    print(report)
    assert report.proven
    # --8<-- [end:audit]


if __name__ == "__main__":
    compile_it()
    audit_it()
