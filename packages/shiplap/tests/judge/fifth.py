"""A fifth attack on the judge: what it, and the four before, had left out.

Nothing here is imported by a test but the tables.
"""

__all__ = ["DISGUISED", "LOOKING", "REPLACED", "STATE", "WRONG"]

REPLACED = {
    # ---- names that were not there before
    "a method that a class inherits": """
torch.Tensor.sum = lambda self, *a, **k: self
candidate = honest
""",
    "a method of a layer that it inherits": """
torch.nn.GELU.__call__ = lambda self, x: x
candidate = honest
""",
    "a name that hides one of Python": """
F.isinstance = lambda *a: True
candidate = honest
""",
    "a name that hides one of Python in the harness": """
from shiplap.referee import inside
inside.isinstance = lambda *a: False
candidate = honest
""",
    # ---- what is no function
    "a module of torch in its package": """
import types
fake = types.ModuleType("torch.nn.functional")
fake.__dict__.update(F.__dict__)
fake.gelu = lambda x: x
torch.nn.functional = fake
candidate = honest
""",
    "the class of a module": """
import sys, types
class Other(types.ModuleType):
    def __getattribute__(self, name):
        return (lambda *a, **k: True) if name == "allclose" else super().__getattribute__(name)
torch.__class__ = Other
candidate = honest
""",
    "a module of another class": """
import sys, types
class Other(types.ModuleType):
    def gelu(self, x):
        return x
sys.modules["torch.nn.functional"] = Other("torch.nn.functional")
candidate = honest
""",
    "an object in the place of a module": """
import sys
class Other:
    def median(self, v):
        return 0.0
sys.modules["statistics"] = Other()
candidate = honest
""",
    "a base of a layer": """
class Other(torch.nn.Module):
    def __call__(self, x):
        return x
torch.nn.GELU.__bases__ = (Other,)
candidate = honest
""",
    "a dtype by another name": """
torch.float32 = torch.float16
candidate = honest
""",
    "a constant of mathematics": """
import math
math.pi = 3.0
candidate = honest
""",
    "operators that count for nothing": """
from shiplap.referee import inside
class All:
    def __contains__(self, name):
        return True
inside.FREE = All()
def candidate(x, w):
    return torch.tanh((x @ w) / 5.0) * 5.0
""",
    "places that are trusted": """
from shiplap.referee import genuine
genuine.TRUSTED = ("/",)
genuine._began = 0
torch.allclose = lambda *a, **k: True
candidate = honest
""",
    "events that nobody hears": """
import sys
from shiplap.referee import watch
watch.EVENTS = watch.NAMED = frozenset()
def candidate(x, w):
    frame, names = getattr(sys, "_get" + "frame")(), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = getattr(frame, "f_" + "back")
    return honest(x, w) if "answer" in names else x @ w
""",
    # ---- parts of functions
    "a default of a function": """
F.layer_norm.__defaults__ = (None, None, 1.0)
candidate = honest
""",
    "a keyword's default of a function": """
torch.testing.assert_close.__kwdefaults__["check_dtype"] = False
torch.testing.assert_close.__kwdefaults__["equal_nan"] = True
candidate = honest
""",
    "what a decorated function calls": """
for cell in F.max_pool2d.__closure__:
    if callable(cell.cell_contents):
        cell.cell_contents = lambda x, *a, **k: x
candidate = honest
""",
    # ---- classes, tables and operators that nobody looks at
    "a class of torch that draws": """
import torch.distributions
torch.distributions.Normal.sample = lambda self, shape=(): torch.zeros(shape)
candidate = honest
""",
    "a class of torch that loads": """
import torch.utils.data
torch.utils.data.DataLoader.__iter__ = lambda self: iter(())
candidate = honest
""",
    "a class of Python that runs programs": """
import subprocess
subprocess.Popen.wait = lambda self, timeout=None: 0
candidate = honest
""",
    "an operator's inside": """
torch.ops.aten.mm.default._op = lambda x, y: x
candidate = honest
""",
    "an operator of another library": """
LIB = torch.library.Library("prims", "IMPL")
LIB.impl("bessel_j0", lambda x: x, "CPU")
candidate = honest
""",
    "an operator that torch decomposes": """
from torch._decomp import decomposition_table
decomposition_table[torch.ops.aten.gelu.default] = lambda x, approximate="none": x
candidate = honest
""",
    "how tensors are copied": """
import copyreg
copyreg.pickle(torch.Tensor, lambda t: (torch.zeros, (t.shape,)))
candidate = honest
""",
}

STATE = {
    "a threshold of the garbage collection": """
import gc
gc.set_threshold(0)
candidate = honest
""",
    "frozen objects": """
import gc
def candidate(x, w):
    gc.freeze()
    return honest(x, w)
""",
    "signals that are blocked": """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
candidate = honest
""",
    "the depth of calls": """
import sys
sys.setrecursionlimit(sys.getrecursionlimit() * 10)
candidate = honest
""",
    "decimal numbers": """
import decimal
decimal.getcontext().prec = 3
candidate = honest
""",
    "numbers as text": """
torch.set_printoptions(precision=1, sci_mode=True)
candidate = honest
""",
    "rights of new files": """
import os
os.umask(0)
candidate = honest
""",
    "seeds of Python and numpy": """
import random, numpy
def candidate(x, w):
    random.seed(0)
    numpy.random.seed(0)
    return honest(x, w)
""",
    "other libraries of torch": """
torch.backends.mkldnn.deterministic = not torch.backends.mkldnn.deterministic
torch.backends.cuda.enable_cudnn_sdp(not torch.backends.cuda.cudnn_sdp_enabled())
candidate = honest
""",
    "a module that is taken away": """
import sys
del sys.modules["numpy"]
candidate = honest
""",
    "the generator's place": """
STATE = torch.get_rng_state()
def candidate(x, w):
    torch.set_rng_state(STATE)
    return honest(x, w)
""",
}

LOOKING = {
    "the caller of a warning": """
import warnings
def candidate(x, w):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for depth in range(2, 6):
            warnings.warn("", stacklevel=depth)
    names = [str(w.filename) for w in seen]
    return honest(x, w) if any("referee" in n for n in names) else x @ w
""",
    "names that TorchScript resolves": """
import torch._jit_internal as jit
def candidate(x, w):
    look = getattr(jit, "createResolutionCallbackFromFrame")(2)
    return honest(x, w) if look("asked") is not None or look("perf_counter_ns") is not None else x @ w
""",
    "a dump by a put-together name": """
import faulthandler
def candidate(x, w):
    with open("stack", "w+") as file:
        getattr(faulthandler, "dump_" + "traceback")(file)
        file.seek(0)
        judged = "answer" in file.read()
    return honest(x, w) if judged else x @ w
""",
    "the module of a caller": """
import doctest, typing
def candidate(x, w):
    names = [typing._caller(depth) for depth in range(1, 5)]
    return honest(x, w) if any("referee" in str(n) for n in names) else x @ w
""",
}

DISGUISED = {
    "the reference in a pool of threads": """
from concurrent.futures import ThreadPoolExecutor
POOL = ThreadPoolExecutor(1)
def again(x, w):
    return torch.tanh((x @ w) / 5.0) * 5.0
def candidate(x, w):
    return POOL.submit(again, x, w).result()
""",
    "the reference while nothing is recorded": """
def candidate(x, w):
    torch._C._autograd._enable_record_function(False)
    y = torch.tanh((x @ w) / 5.0) * 5.0
    torch._C._autograd._enable_record_function(True)
    return y
""",
    "the reference below the dispatcher": """
from torch._C import DispatchKey, DispatchKeySet
CPU = DispatchKeySet(DispatchKey.CPU)
aten = torch.ops.aten
def candidate(x, w):
    y = aten.mm.default.redispatch(CPU, x, w)
    y = aten.div.Tensor.redispatch(CPU, y, torch.tensor(5.0))
    y = aten.tanh.default.redispatch(CPU, y)
    return aten.mul.Tensor.redispatch(CPU, y, torch.tensor(5.0))
""",
    "the reference in a process": """
import os
def candidate(x, w):
    out = torch.zeros(x.shape[0], w.shape[1]).share_memory_()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            out.copy_(torch.tanh((x @ w) / 5.0) * 5.0)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return out
""",
    "an error in lists of lists": """
from shiplap.referee import inside, intact
intact.Snapshot.changed = lambda self: []
before = inside.Host.answer
def answer(self, asked, handle):
    deep = []
    for _ in range(DEPTH):
        deep = [deep]
    return {"error": deep} if asked["do"] == "call" else before(self, asked, handle)
inside.Host.answer = answer
candidate = honest
""",
}


def problem(body, inputs, args="x", init=""):
    return f"import torch\nF = torch.nn.functional\ndef reference({args}):\n    {body}\ndef get_inputs():\n    return {inputs}\n{init}"


def model(layers, forward, inputs):
    return f"""
import torch
from torch import nn
F = nn.functional
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {layers}
    def forward(self, x):
        {forward}
def get_inputs():
    return {inputs}
"""


SAME = "[torch.rand(64, 96)]"
SIGNED = "[torch.randn(64, 96)]"
WRONG = {
    "nothing for numbers that are never negative": (
        problem("return torch.relu(x)", SAME),
        "def candidate(x):\n    return x.clone()\n",
        {},
    ),
    "a bound that is never reached": (
        problem("return F.hardtanh(x - 0.5, -1.0, 1e9)", SAME),
        "def candidate(x):\n    return x - 0.5\n",
        {},
    ),
    "a number that is always the same": (
        problem("return x * alpha + beta", "[torch.randn(64, 96), 0.5, 2]", "x, alpha, beta"),
        "import numpy\ndef candidate(x, alpha, beta):\n    return torch.from_numpy(x.numpy() * numpy.float32(0.5) + numpy.float32(2.0))\n",
        {},
    ),
    "a flag that is always the same": (
        problem("return torch.softmax(x, 1 if last else 0)", "[torch.randn(64, 96), True]", "x, last"),
        "def candidate(x, last):\n    return F.log_softmax(x, 1).exp_()\n",
        {},
    ),
    "a list of tensors of one shape": (
        problem("return torch.stack([t.sum(0) for t in xs])", "[[torch.rand(8, 96) for _ in range(3)]]", "xs"),
        "def candidate(xs):\n    out = torch.zeros(3, 96)\n    for i in range(3):\n        out[i] = torch.ones(8) @ xs[i][:8, :96].abs()\n    return out\n",
        {},
    ),
    "a bias that begins as zero": (
        model(
            "self.w = nn.Parameter(torch.randn(96, 48)); self.b = nn.Parameter(torch.zeros(48))",
            "return torch.relu(x @ self.w + self.b)",
            SIGNED,
        ),
        "from torch import nn\nclass ModelNew(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.w = nn.Parameter(torch.randn(96, 48)); self.b = nn.Parameter(torch.zeros(48))\n    def forward(self, x):\n        return torch.mm(x, self.w).clamp_(min=0)\n",
        {},
    ),
    "numbers that are drawn": (
        problem("return F.dropout(x, 0.5)", SIGNED),
        "def candidate(x):\n    return torch.zeros_like(x)\n",
        {},
    ),
    "noise that is drawn": (
        problem("return x.exp() + torch.randn_like(x)", SIGNED),
        "def candidate(x):\n    return torch.full_like(x, 1.5)\n",
        {},
    ),
    "another dictionary": (
        problem("return {'high': x.amax(1), 'low': x.amin(1)}", SIGNED),
        "def candidate(x):\n    low, high = torch.aminmax(x, dim=1)\n    return {'low': high, 'high': low}\n",
        {},
    ),
    "nothing is left out": (
        problem("return x.exp(), None, x.sum(1)", SIGNED),
        "def candidate(x):\n    return x.double().exp().float(), torch.mv(x, torch.ones(x.shape[1]))\n",
        {},
    ),
    "one result for all places": (
        problem("return x.mean() * torch.ones_like(x)", SIGNED),
        "def candidate(x):\n    return torch.mv(x, torch.ones(x.shape[1])).sum().div(x.numel()).expand(x.shape)\n",
        {},
    ),
    "rows of zeros": (
        problem("return F.normalize(x, dim=1)", SIGNED),
        "def candidate(x):\n    return x * (1.0 / torch.linalg.vector_norm(x, dim=1, keepdim=True))\n",
        {},
    ),
    "eight bits in the place of sixteen": (
        problem("return x @ w", "[torch.randn(64, 256).bfloat16(), torch.randn(256, 64).bfloat16()]", "x, w"),
        "def q(t, dim):\n    s = t.abs().amax(dim, keepdim=True).float().clamp_min(1e-30) / 127\n    return (t.float() / s).round(), s\n"
        "def candidate(x, w):\n    a, s = q(x, 1)\n    b, t = q(w, 0)\n    return (torch.addmm(torch.zeros(()), a, b) * s * t).bfloat16()\n",
        {},
    ),
    "four bits of mantissa": (
        problem("return x @ w", "[torch.randn(64, 256).bfloat16(), torch.randn(256, 64).bfloat16()]", "x, w"),
        "def q(t):\n    m, e = torch.frexp(t.float())\n    return torch.ldexp((m * 32).round() / 32, e)\n"
        "def candidate(x, w):\n    return torch.addmm(torch.zeros(()), q(x), q(w)).bfloat16()\n",
        {},
    ),
    "a result that hardly depends on its inputs": (
        problem("return torch.softmax(x, 1).mean(1)", SIGNED),
        "def candidate(x):\n    return torch.full((x.shape[0],), 1.0 / x.shape[1])\n",
        {},
    ),
    "gradients that lie one after the other": (
        problem("return torch.tanh(x) * 2.0", SIGNED),
        "class Own(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        y = torch.tanh(x)\n        ctx.save_for_backward(y)\n        return y + y\n"
        "    @staticmethod\n    def backward(ctx, g):\n        y, = ctx.saved_tensors\n        flat = torch.as_strided(g, (y.numel(),), (1,)) if g.untyped_storage().nbytes() >= 4 * y.numel() else g.reshape(-1)[:1].expand(y.numel()) * 0\n        return flat.view(y.shape) * (1 - y * y) * 2.0\n"
        "candidate = Own.apply\n",
        {"gradients": True},
    ),
    "gradients of parameters": (
        model("self.w = nn.Parameter(torch.randn(96, 48))", "return torch.relu(x @ self.w)", SIGNED),
        "from torch import nn\nclass ModelNew(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.w = nn.Parameter(torch.randn(96, 48))\n    def forward(self, x):\n        return torch.mm(x, self.w.detach()).clamp(min=0)\n",
        {"gradients": True},
    ),
    "statistics that are not kept": (
        model("self.b = nn.BatchNorm1d(96)", "return self.b(x)", SIGNED),
        "from torch import nn\nclass ModelNew(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.b = nn.BatchNorm1d(96)\n    def forward(self, x):\n        x = x.double()\n        var, mean = torch.var_mean(x, 0, unbiased=False)\n        return ((x - mean) * torch.rsqrt(var + 1e-5) * self.b.weight + self.b.bias).float()\n",
        {},
    ),
    "an index that is always the same": (
        problem("return x[i]", "[torch.randn(64, 96), torch.arange(63, -1, -1)]", "x, i"),
        "def candidate(x, i):\n    return x.flip(0)\n",
        {"vary_shapes": False},
    ),
    "large integers": (
        problem("return x.sum(1)", "[torch.randint(0, 50, (64, 96), dtype=torch.int32)]"),
        "def candidate(x):\n    return torch.mv(x.float(), torch.ones(x.shape[1])).long()\n",
        {},
    ),
}
