"""A fifth attack on the judge: candidates that are right for the values, numbers and containers that were tried.

Each has a reference of its own: its source, that of the candidate, and options of ``sl.judge``. Nothing here is
imported by a test.
"""

HEAD = "import torch\nfrom torch import nn\nF = nn.functional\n"

WRONG = {
    "nothing for numbers that are never negative": (
        """
def reference(x):
    return torch.relu(x)
def get_inputs():
    return [torch.rand(64, 96)]
""",
        """
def candidate(x):
    return x.clone()
""",
        {},
    ),
    "a bound that is never reached": (
        """
def reference(x):
    return F.hardtanh(x - 0.5, -1.0, 1e9)
def get_inputs():
    return [torch.rand(64, 96)]
""",
        """
def candidate(x):
    return x - 0.5
""",
        {},
    ),
    "a number that is always the same": (
        """
def reference(x, alpha, beta):
    return x * alpha + beta
def get_inputs():
    return [torch.randn(64, 96), 0.5, 2]
""",
        """
import numpy
def candidate(x, alpha, beta):
    return torch.from_numpy(x.numpy() * numpy.float32(0.5) + numpy.float32(2.0))
""",
        {},
    ),
    "a flag that is always the same": (
        """
def reference(x, last):
    return torch.softmax(x, 1 if last else 0)
def get_inputs():
    return [torch.randn(64, 96), True]
""",
        """
def candidate(x, last):
    return F.log_softmax(x, 1).exp_()
""",
        {},
    ),
    "a list of tensors of one shape": (
        """
def reference(xs):
    return torch.stack([t.sum(0) for t in xs])
def get_inputs():
    return [[torch.rand(8, 96) for _ in range(3)]]
""",
        """
def candidate(xs):
    out = torch.zeros(3, 96)
    for i in range(3):
        out[i] = torch.ones(8) @ xs[i][:8, :96].abs()
    return out
""",
        {},
    ),
    "a bias that begins as zero": (
        """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(96, 48))
        self.b = nn.Parameter(torch.zeros(48))
    def forward(self, x):
        return torch.relu(x @ self.w + self.b)
def get_inputs():
    return [torch.randn(64, 96)]
""",
        """
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(96, 48))
        self.b = nn.Parameter(torch.zeros(48))
    def forward(self, x):
        return torch.mm(x, self.w).clamp_(min=0)
""",
        {},
    ),
    "numbers that are drawn": (
        """
def reference(x):
    return F.dropout(x, 0.5)
def get_inputs():
    return [torch.randn(64, 96)]
""",
        """
def candidate(x):
    return torch.zeros_like(x)
""",
        {},
    ),
    "another dictionary": (
        """
def reference(x):
    return {'high': x.amax(1), 'low': x.amin(1)}
def get_inputs():
    return [torch.randn(64, 96)]
""",
        """
def candidate(x):
    low, high = torch.aminmax(x, dim=1)
    return {'low': high, 'high': low}
""",
        {},
    ),
    "nothing is left out": (
        """
def reference(x):
    return x.exp(), None, x.sum(1)
def get_inputs():
    return [torch.randn(64, 96)]
""",
        """
def candidate(x):
    return x.double().exp().float(), torch.mv(x, torch.ones(x.shape[1]))
""",
        {},
    ),
    "one result for all places": (
        """
def reference(x):
    return x.mean() * torch.ones_like(x)
def get_inputs():
    return [torch.randn(64, 96)]
""",
        """
def candidate(x):
    return torch.mv(x, torch.ones(x.shape[1])).sum().div(x.numel()).expand(x.shape)
""",
        {},
    ),
    "rows of zeros": (
        """
def reference(x):
    return F.normalize(x, dim=1)
def get_inputs():
    return [torch.randn(64, 96)]
""",
        """
def candidate(x):
    return x * (1.0 / torch.linalg.vector_norm(x, dim=1, keepdim=True))
""",
        {},
    ),
    "a result that hardly depends on its inputs": (
        """
def reference(x):
    return torch.softmax(x, 1).mean(1)
def get_inputs():
    return [torch.randn(64, 96)]
""",
        """
def candidate(x):
    return torch.full((x.shape[0],), 1.0 / x.shape[1])
""",
        {},
    ),
    "gradients that lie one after the other": (
        """
def reference(x):
    return torch.tanh(x) * 2.0
def get_inputs():
    return [torch.randn(64, 96)]
""",
        """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y + y
    @staticmethod
    def backward(ctx, g):
        y, = ctx.saved_tensors
        rows = g if g.stride() == (y.shape[1], 1) else torch.zeros_like(y)
        return rows * (1 - y * y) * 2.0
candidate = Own.apply
""",
        {"gradients": True},
    ),
    "gradients of parameters": (
        """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(96, 48))
    def forward(self, x):
        return torch.relu(x @ self.w)
def get_inputs():
    return [torch.randn(64, 96)]
""",
        """
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(96, 48))
    def forward(self, x):
        return torch.mm(x, self.w.detach()).clamp(min=0)
""",
        {"gradients": True},
    ),
    "statistics that are not kept": (
        """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.BatchNorm1d(96)
    def forward(self, x):
        return self.b(x)
def get_inputs():
    return [torch.randn(64, 96)]
""",
        """
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.BatchNorm1d(96)
    def forward(self, x):
        x = x.double()
        var, mean = torch.var_mean(x, 0, unbiased=False)
        return ((x - mean) * torch.rsqrt(var + 1e-5) * self.b.weight + self.b.bias).float()
""",
        {},
    ),
    "an index that is always the same": (
        """
def reference(x, i):
    return x[i]
def get_inputs():
    return [torch.randn(64, 96), torch.arange(63, -1, -1)]
""",
        """
def candidate(x, i):
    return x.flip(0)
""",
        {"vary_shapes": False},
    ),
    "large integers": (
        """
def reference(x):
    return x.sum(1)
def get_inputs():
    return [torch.randint(0, 50, (64, 96), dtype=torch.int32)]
""",
        """
def candidate(x):
    return torch.mv(x.float(), torch.ones(x.shape[1])).long()
""",
        {},
    ),
}
"""Name → source of the reference, source of the candidate, options."""
