"""Honest candidates of unusual styles, for the problem of ``test_cheats.py``. Nothing here is imported by a test."""

STYLES = {
    "C++ through load_inline": '''
from torch.utils.cpp_extension import load_inline
SOURCE = """
#include <torch/extension.h>
at::Tensor run(at::Tensor x, at::Tensor w) {
    at::NoGradGuard guard;  // what is written by pointer is not in a recorded gradient
    auto y = at::mm(x, w);
    auto* p = y.data_ptr<float>();
    for (int64_t i = 0; i < y.numel(); i++) p[i] = std::tanh(p[i] / 5.0f) * 5.0f;
    return y;
}
"""
MODULE = load_inline("honest_it", SOURCE, functions=["run"], extra_cflags=["-O1"])
def candidate(x, w):
    return MODULE.run(x, w)
''',
    "a lookup table made when it is imported": """
TABLE = torch.tanh(torch.arange(-(1 << 16), (1 << 16) + 1, dtype=torch.float64) / (1 << 13))
def candidate(x, w):
    y = (F.linear(x, w.t()).double() / 5.0).clamp(-7.9, 7.9)
    place = (y * (1 << 13)).round()
    t = TABLE[place.long() + (1 << 16)]
    d = y - place / (1 << 13)
    s = 1 - t * t
    return ((t + s * d - t * s * d * d).mul_(5.0)).float()
""",
    "scratch memory that is allocated once": """
class Kernel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("room", torch.empty(1 << 16), persistent=False)
    def forward(self, x, w):
        wanted = x.shape[0] * w.shape[1]
        if self.room.numel() < wanted:
            self.room = torch.empty(wanted)
        y = torch.mm(x, w, out=self.room[:wanted].view(x.shape[0], w.shape[1]))
        return y.mul_(0.2).tanh_().mul(5.0)
candidate = Kernel()
""",
    "a module with buffers that are no parameters": """
class Kernel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cap", torch.tensor(5.0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    def forward(self, x, w):
        self.calls += 1
        return F.linear(x, w.t()).div_(self.cap).tanh_().mul_(self.cap)
candidate = Kernel()
""",
    "functional transforms": """
from torch.func import functional_call, vmap
cap = vmap(vmap(lambda v: (v * 0.2).tanh() * 5.0))
def candidate(x, w):
    return cap(torch.einsum("ik,kj->ij", x, w))
""",
    "gradients that are compiled": """
import contextlib
def capped(y):
    return (y * 0.2).tanh() * 5.0
FAST = torch.compile(capped, dynamic=True)
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return FAST(torch.mm(x, w))
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            y = torch.mm(x, w).requires_grad_()
            (inner,) = torch.autograd.grad(capped(y), y, g)
        return inner @ w.t(), x.t() @ inner
def candidate(x, w):
    return Own.apply(x, w)
""",
    "views of numpy": """
import numpy
from numpy.lib.stride_tricks import as_strided
def candidate(x, w):
    a, b = x.numpy(), w.numpy()
    out = numpy.empty((a.shape[0], b.shape[1]), numpy.float32)
    rows = as_strided(a, (a.shape[0], 1, a.shape[1]), (a.strides[0], 0, a.strides[1]))
    numpy.matmul(rows, b, out=out[:, None, :])
    numpy.tanh(out / 5, out=out)
    return torch.from_numpy(out * 5)
""",
    "ctypes with a callback of its own": """
import ctypes
libm = ctypes.CDLL("libm.so.6")
libm.tanh.restype, libm.tanh.argtypes = ctypes.c_double, [ctypes.c_double]
def candidate(x, w):
    y = torch.mm(x, w)
    if y.numel() > 20000:
        return torch.mul(torch.tanh_(y / 5.0), 5.0)
    flat = [libm.tanh(v / 5.0) * 5.0 for v in y.double().flatten().tolist()]
    return torch.tensor(flat, dtype=torch.float64).float().view(y.shape)
""",
    "a graph of torch.fx": """
import torch.fx
class Net(torch.nn.Module):
    def forward(self, x, w):
        return torch.tanh(torch.nn.functional.linear(x, w.t()) * 0.2) * 5.0
NET = torch.fx.symbolic_trace(Net())
def candidate(x, w):
    return NET(x, w)
""",
    "an op with torch.library.custom_op": """
@torch.library.custom_op("honest_styles::capped", mutates_args=())
def capped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return honest(x, w)
@capped.register_fake
def _(x, w):
    return x.new_empty(x.shape[0], w.shape[1])
def candidate(x, w):
    return torch.ops.honest_styles.capped(x, w)
""",
    "a subclass of a tensor inside": """
class Tagged(torch.Tensor):
    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data)
def candidate(x, w):
    y = honest(x.as_subclass(Tagged), w)
    return y.as_subclass(torch.Tensor)
""",
    "closures, partials and single dispatch": """
import functools
@functools.singledispatch
def product(x, w):
    raise TypeError
@product.register
def _(x: torch.Tensor, w):
    return torch.addmm(torch.zeros(()), x, w)
def capped(y, *, cap=5.0):
    return y.div_(cap).tanh_().mul_(cap)
def composed(f, g):
    return lambda *args: f(g(*args))
candidate = composed(functools.partial(capped, cap=5.0), product)
""",
    "seeds and warnings when it is imported": """
import random, sys, warnings
random.seed(7)
torch.manual_seed(7)
SIGNS = torch.randint(0, 2, (64,)) * 2.0 - 1.0
def candidate(x, w):
    warnings.warn("slow", stacklevel=2)
    turned = SIGNS.repeat(-(-x.shape[1] // 64))[: x.shape[1]]
    return honest(x * turned, w * turned[:, None])
""",
    "random projections": """
import numpy
def candidate(x, w):
    order = numpy.random.permutation(x.shape[1])
    return honest(x[:, order], w[order])
""",
}
