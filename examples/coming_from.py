"""The forms of a custom op in torch, as declarations: python examples/coming_from.py"""

# --8<-- [start:imports]
import torch
from jaxtyping import Float, Float32
from torch import Tensor

import shiplap as sl

# --8<-- [end:imports]


# --8<-- [start:custom_op]
@torch.library.custom_op("before::gated", mutates_args=())
def gated_before(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


@gated_before.register_fake
def _(x, gate):
    return torch.empty_like(x)


def save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def gated_gradients(ctx, grad):
    x, gate = ctx.saved_tensors
    s = torch.sigmoid(gate)
    return grad * s, grad * x * s * (1 - s)


gated_before.register_autograd(gated_gradients, setup_context=save_inputs)
# --8<-- [end:custom_op]


# --8<-- [start:declared_op]
@sl.op("after::gated")
def gated(x: Float[Tensor, "n c"], gate: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x * torch.sigmoid(gate)  # the reference, and the fake implementation


@gated.kernel("cpu")
def _(x, gate, *, out):
    torch.mul(x, torch.sigmoid(gate), out=out)


@gated.backward
def _(grad, saved, needs):
    s = torch.sigmoid(saved.gate)
    return {"x": grad * s, "gate": grad * saved.x * s * (1 - s)}


# --8<-- [end:declared_op]


# --8<-- [start:function]
class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bound):
        ctx.save_for_backward(x)
        ctx.bound = bound
        return x.clamp(-bound, bound)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= ctx.bound), None


# --8<-- [end:function]


# --8<-- [start:declared_function]
@sl.op("after::clip")
def clip(x: Float[Tensor, "*shape"], bound: float) -> Float[Tensor, "*shape"]:
    return x.clamp(-bound, bound)


@clip.backward
def _(grad, saved, needs):
    return {"x": grad * (saved.x.abs() <= saved.bound)}


# --8<-- [end:declared_function]


# --8<-- [start:declared_source]
@sl.op("after::doubled")
def doubled(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    return x * 2


DOUBLE = """
int doubled_cpu(const sl_context*, const DLTensor* x, DLTensor* out) {
  const float* from = static_cast<const float*>(x->data);
  float* to = static_cast<float*>(out->data);
  for (int64_t i = 0; i < x->shape[0]; i++) to[i] = 2 * from[i];
  return SL_OK;
}
"""
doubled.kernel("cpu", sl.source(symbol="doubled_cpu", code=DOUBLE, language="c++"))
# --8<-- [end:declared_source]


# --8<-- [start:adopted]
@sl.adopt("before::gated")
def gated_adopted(
    x: Float[Tensor, "n c"], gate: Float[Tensor, "n c"]
) -> Float[Tensor, "n c"]:
    return x * torch.sigmoid(gate)


# --8<-- [end:adopted]


# --8<-- [start:taken]
@sl.adopt("before::gated", into="taken::gated")
def gated_taken(
    x: Float[Tensor, "n c"], gate: Float[Tensor, "n c"]
) -> Float[Tensor, "n c"]:
    return x * torch.sigmoid(gate)


@sl.adopt(Clip, into="taken::clip")
def clip_taken(x: Float[Tensor, "*shape"], bound: float) -> Float[Tensor, "*shape"]:
    return x.clamp(-bound, bound)


# --8<-- [end:taken]


def compare(before, after, *arguments) -> None:
    """Compare values, gradients and compiled calls of both forms."""
    results = []
    for call in (before, after, torch.compile(after, fullgraph=True)):
        given = [
            a.clone().requires_grad_() if isinstance(a, Tensor) else a
            for a in arguments
        ]
        out = call(*given)
        out.square().sum().backward()
        results.append((out, *(a.grad for a in given if isinstance(a, Tensor))))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def main() -> None:
    x, gate = torch.randn(6, 5), torch.randn(6, 5)
    compare(gated_before, gated, x, gate)
    compare(Clip.apply, clip, x, 0.5)
    compare(gated_before, gated_taken, x, gate)
    compare(Clip.apply, clip_taken, x, 0.5)
    print(gated_taken.adoption)
    doubled.build()
    torch.testing.assert_close(doubled(x[0]), 2 * x[0])
    print("each declaration computes what the form before it computed")


if __name__ == "__main__":
    main()
