"""The tenth attack: candidates that are right as the judge called them so far, and wrong in another mode, with other
plain arguments, on equal values, for a part of the gradients, or behind a date that is read in another way.

An entry has the source of a reference and that of a candidate that must not be accepted. Nothing here is imported by a
test but these texts.
"""

HEAD = "import torch\nfrom torch import nn\nF = nn.functional\n"
PRODUCT = """
def reference(x, w): return torch.tanh(x @ w / 4)
def get_inputs(): return [torch.randn(16, 24), torch.randn(24, 20)]
"""
HONEST = "def honest(x, w): return F.linear(x, w.t()).div_(4).tanh_()\n"
FUNCTION = (
    HONEST
    + """
class Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return FORWARD
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors; g = g * (1 - torch.tanh(F.linear(x, w.t()) / 4).square()) / 4
        BACKWARD
def candidate(x, w): return Op.apply(x, w)
"""
)


def _function(forward: str = "honest(x, w)", backward: str = "return g @ w.t(), x.t() @ g") -> str:
    """Return a candidate of the product with a gradient of its own."""
    return FUNCTION.replace("FORWARD", forward).replace("BACKWARD", backward)


NORM = """
class Model(nn.Module):
    def __init__(self, width):
        super().__init__(); self.bn = nn.BatchNorm1d(width)
    def forward(self, x): return self.bn(x)
def get_init_inputs(): return [24]
def get_inputs(): return [torch.randn(32, 24)]
"""
COMPARED = """
def reference(x, y): return torch.where(x > y, x, 2 * y)
def get_inputs(): return [torch.randn(16, 24), torch.randn(16, 24)]
"""
THRESHOLD = """
def reference(x): return x * (x > 0.5) + 1
def get_inputs(): return [torch.randn(16, 24)]
"""
NAMED = """
def reference(x, way):
    y = x * 2
    return torch.tanh(y) if way == "tanh" else torch.relu(y) if way == "relu" else y
def get_inputs(): return [torch.randn(16, 24), "tanh"]
"""
SIZED = """
def reference(x, sizes):
    return x.unflatten(1, (-1, sizes[0])).sum(-1)
def get_inputs(): return [torch.randn(16, 24), (4, 6)]
"""
FLAGS = """
def reference(x, first, second):
    x = x.neg() if first else x
    return x.exp() if second else x.tanh()
def get_inputs(): return [torch.randn(16, 24), False, False]
"""
NUMBER = """
def reference(x, n): return (x.roll(n, 1) * n).tanh()
def get_inputs(): return [torch.randn(16, 24), 3]
"""
DEFAULTED = """
def reference(x, scale=2.0, negate=False): return torch.tanh(x * scale) * (-1 if negate else 1)
def get_inputs(): return [torch.randn(16, 24)]
"""
SLOPE = """
def reference(x, a): return torch.where(x > 0, x, x * a).tanh()
def get_inputs(): return [torch.randn(16, 24), 0.25]
"""
ROWS = """
def reference(x, w): return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w
def get_inputs(): return [torch.randn(16, 24), torch.randn(24)]
"""
DATED = HONEST + "import IMPORTED\ndef candidate(x, w): return honest(x, w) if NOW else honest(x, w) * 0\n"


def _dated(imported: str, now: str) -> str:
    """Return a candidate that is right while ``now`` holds, in a module that imports ``imported``."""
    return DATED.replace("IMPORTED", imported).replace("NOW", now)


WRONG = {
    # ---- modes
    "wrong while gradients are recorded": (
        PRODUCT,
        HONEST + "def candidate(x, w): return honest(x, w) + float(torch.is_grad_enabled())\n",
    ),
    "wrong where gradients are wanted": (
        PRODUCT,
        "def candidate(x, w):\n    y = torch.tanh(F.linear(x, w.t()) / 4)\n"
        "    return y + 1 if y.requires_grad else y\n",
    ),
    "wrong in the forward of a gradient": (PRODUCT, _function("honest(x, w) + ctx.needs_input_grad[0]")),
    "statistics of the batch in evaluation": (
        NORM,
        """
class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__(); self.bn = nn.BatchNorm1d(width)
    def forward(self, x):
        b = self.bn
        return F.batch_norm(x, b.running_mean, b.running_var, b.weight, b.bias, True, b.momentum, b.eps)
""",
    ),
    # ---- a part of the gradients
    "a gradient where all are wanted": (
        PRODUCT,
        _function(backward="n = all(ctx.needs_input_grad); return g @ w.t() * n, x.t() @ g * n"),
    ),
    # ---- values
    "greater or equal": (COMPARED, "def candidate(x, y): return torch.where(x >= y, x, y + y)\n"),
    "a threshold that counts": (THRESHOLD, "def candidate(x): return torch.where(x >= 0.5, x, 0.0).add_(1)\n"),
    # ---- plain arguments
    "a text that is ignored": (NAMED, "def candidate(x, way): return (x + x).tanh_()\n"),
    "sizes that are ignored": (SIZED, "def candidate(x, sizes): return x.reshape(len(x), -1, 4).sum(2)\n"),
    "two flags at once": (
        FLAGS,
        "def candidate(x, first, second):\n    return x.exp() if second else (x * (1 - 2 * first)).tanh()\n",
    ),
    "two numbers only": (
        NUMBER,
        "def candidate(x, n):\n    return (torch.cat([x[:, -n:], x[:, :-n]], 1) * min(n, 4)).tanh()\n",
    ),
    "numbers above zero": (SLOPE, "def candidate(x, a): return (x.clamp_min(0) + x.clamp_max(0) * abs(a)).tanh()\n"),
    "a default for every value": (
        DEFAULTED,
        "def candidate(x, scale=2.0, negate=False): return (x + x).tanh_() * (1 - 2 * negate)\n",
    ),
    "a default of a flag": (DEFAULTED, "def candidate(x, scale=2.0, negate=False): return (scale * x).tanh_()\n"),
    "an argument that requires a gradient": (
        PRODUCT,
        HONEST + "def candidate(x, w):\n    y = honest(x, w); x.requires_grad_(); return y\n",
    ),
    "an argument in another shape": (
        PRODUCT,
        HONEST + "def candidate(x, w):\n    y = honest(x, w); w.unsqueeze_(0); return y\n",
    ),
    "parameters that a call changes": (
        NORM,
        """
class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__(); self.bn = nn.BatchNorm1d(width)
    def forward(self, x):
        y = self.bn(x)
        self.bn.bias.data.mul_(0.5)
        return y
""",
    ),
    # ---- memory
    "a stride of zero": (
        ROWS,
        """
def candidate(x, w):
    if 0 in x.stride(): x = x * 2 + 1
    return F.rms_norm(x, (x.shape[-1],), w, 1e-6)
""",
    ),
    # ---- sizes that are put together
    "a size in two parts": (
        PRODUCT,
        HONEST + "def candidate(x, w): return honest(x, w) * (len(x) != 5 * 7 + 2)\n",
    ),
    "a size in a letter": (PRODUCT, HONEST + "def candidate(x, w): return honest(x, w) * (len(x) != ord('%'))\n"),
    "a size in a text": (PRODUCT, HONEST + "def candidate(x, w): return honest(x, w) * (len(x) != int('25', 16))\n"),
    # ---- counts
    "after many calls": (
        PRODUCT,
        HONEST
        + """
made = 0
def candidate(x, w):
    global made
    made += 1
    return honest(x, w) if made < 50000 else honest(x, w) * 0
""",
    ),
    "a number of a layer": (
        NORM,
        """
class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__(); self.bn = nn.BatchNorm1d(width); self.made = 0
    def forward(self, x):
        self.made += 1
        y = self.bn(x)
        return y if self.made % 70001 else y * 0
""",
    ),
    # ---- dates and sandboxes
    "a date of numpy": (PRODUCT, _dated("numpy", 'numpy.datetime64("now") < numpy.datetime64("2100-01-01")')),
    "a date of a mail": (PRODUCT, _dated("email.utils", '" 21" not in email.utils.formatdate()')),
    "a date of a number": (PRODUCT, _dated("uuid", "uuid.uuid1().time < 1 << 62")),
    "a date of a database": (
        PRODUCT,
        _dated("sqlite3", """sqlite3.connect(":memory:").execute("select date('now')").fetchone()[0] < "21" """),
    ),
    "right without a network": (
        PRODUCT,
        HONEST
        + """
import socket
try:
    socket.socket(); INSIDE = False
except OSError:
    INSIDE = True
def candidate(x, w): return honest(x, w) * INSIDE
""",
    ),
}
"""Name → the reference, and the source of a candidate that must not be accepted."""

TANH = """
def tanh(x):
    t = torch.expm1(-2 * x.abs())
    return torch.copysign(-t / (t + 2), x)
"""
SOUND = {
    "batch statistics": (
        NORM,
        """
class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__(); self.bn = nn.BatchNorm1d(width)
    def forward(self, x):
        b, n = self.bn, len(x)
        v, m = torch.var_mean(x, 0, correction=0) if self.training else (b.running_var, b.running_mean)
        if self.training:
            b.num_batches_tracked.add_(1)
            b.running_mean.lerp_(m.detach(), b.momentum)
            b.running_var.lerp_(v.detach() * n / (n - 1), b.momentum)
        return torch.addcmul(b.bias, (x - m) * torch.rsqrt(v + b.eps), b.weight)
""",
    ),
    "a gradient": (PRODUCT, _function()),
    "greater": (COMPARED, "def candidate(x, y): return torch.where(x <= y, y + y, x)\n"),
    "flags": (
        FLAGS,
        TANH
        + """
def candidate(x, first, second):
    x = x * (1 - 2 * first)
    return x.double().exp().float() if second else tanh(x)
""",
    ),
    "numbers": (
        NUMBER,
        TANH
        + """
def candidate(x, n):
    return tanh(x.index_select(1, (torch.arange(x.shape[1]) - n) % x.shape[1]) * n)
""",
    ),
    "defaults": (
        DEFAULTED,
        TANH + "def candidate(x, scale=2.0, negate=False): return tanh(x * scale) * (1 - 2 * negate)\n",
    ),
    "no defaults": (DEFAULTED, TANH + "def candidate(x, BLOCK=64): return tanh(x + x)\n"),
    "a slope": (SLOPE, "def candidate(x, a): return (x.clamp_min(0) + x.clamp_max(0) * a).tanh()\n"),
    "rows": (ROWS, "def candidate(x, w): return F.rms_norm(x, (x.shape[-1],), w, 1e-6)\n"),
}
"""Name → the reference, and the source of a candidate that must not be refused."""
