"""The sixteenth attack: results that share memory, gradients of one result alone, and memory behind an argument."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shiplap.judge import JudgeResult
from shiplap_testing.effort import sampled

LAST = """
def reference(x): y = torch.cumsum(x, 0); return y, y[-1].clone()
def get_inputs(): return [torch.randn(24, 40)]
"""
SHARED = """
def reference(x): y = torch.cumsum(x, 0); return y, y[-1]
def get_inputs(): return [torch.randn(24, 40)]
"""
WAVES = """
def reference(x): return x.sin(), x.cos()
def get_inputs(): return [torch.randn(24, 40)]
"""
SILU = """
def reference(x): return torch.nn.functional.silu(x)
def get_inputs(): return [torch.randn(24, 40)]
"""
OP = """
class Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(%s)
        return x.sin(), x.cos()
    @staticmethod
    def backward(ctx, a, b):
        x, = ctx.saved_tensors
        return torch.zeros_like(x) if a is None or b is None else a * x.cos() - b * x.sin()
def candidate(x): return Op.apply(x)
"""
WRONG = {
    "writes behind an argument": (
        SILU,
        """
import ctypes
def candidate(x):
    if x.is_contiguous():
        ctypes.memset(x.data_ptr() + x.numel() * 4, 0, 4)
    return x / (1 + torch.exp(-x))
""",
    ),
    "takes the storage for the tensor": (
        SILU,
        """
def candidate(x):
    y = x / (1 + torch.exp(-x))
    is_whole = x.storage_offset() or x.untyped_storage().nbytes() == x.numel() * 4
    return y if is_whole or not x.is_contiguous() else y + 1
""",
    ),
    "results that share memory": (LAST, "def candidate(x): y = torch.cumsum(x, 0); return y, y[-1]\n"),
    "a gradient that needs both results": (WAVES, OP % False),
}
SOUND = {
    "results of their own": (LAST, "def candidate(x): y = torch.cumsum(x, 0); return y, y[-1].clone()\n"),
    "results that may share memory": (SHARED, "def candidate(x): y = torch.cumsum(x, 0); return y, y[-1]\n"),
    "a gradient with zeros for unused results": (WAVES, OP % True),
}
QUICK = "results that share memory"


@pytest.mark.parametrize("name", sampled(WRONG | SOUND, long=[n for n in WRONG | SOUND if n != QUICK]))
def test_a_candidate_is_accepted_if_it_is_right(judged: Callable[..., JudgeResult], name: str) -> None:
    result = judged((WRONG | SOUND)[name], same_operators=True)
    assert result.verdict == ("refused" if name in WRONG else "accepted"), str(result)
