"""A fourth attack on the judge, by somebody who sees it for the first time: what the three before had not tried.

Each is a candidate for the problem of ``test_cheats.py``. Nothing here is imported by a test.
"""

SPOOF = """
import os
def spoofed(text, **names):
    space = {"torch": torch, "honest": honest, **names}
    exec(compile(text, os.__file__, "exec"), space)
    return space
"""

FRESH = {
    "a thread under the name of a file of Python": SPOOF
    + '''
T = """
import threading, time
def work():
    while True:
        time.sleep(0.001)
threading.Thread(target=work, daemon=True).start()
"""
spoofed(T)
candidate = honest
''',
    "a function under the name of a file of Python": SPOOF
    + """
torch.allclose = spoofed("def allclose(*a, **k):\n    return True\n")["allclose"]
candidate = honest
""",
    "callers looked at under the name of a file of Python": SPOOF
    + '''
look = spoofed("""
import sys
def candidate(x, w):
    frame = getattr(sys, "_get" + "frame")()
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = getattr(frame, "f_" + "back")
    return honest(x, w) if "answer" in names else x @ w
""")["candidate"]
candidate = look
''',
    "a function under the name of a frozen module": """
space = {}
exec(compile("def allclose(*a, **k):\n    return True\n", "<frozen it>", "exec"), space)
torch.allclose = space["allclose"]
candidate = honest
""",
    "code with another name of its file": """
import os
f = lambda *a, **k: True
f.__code__ = f.__code__.replace(co_filename=os.__file__)
torch.allclose = f
candidate = honest
""",
    "a function in a decorator of torch": """
torch.allclose = torch.no_grad()(lambda *a, **k: True)
candidate = honest
""",
    "a function in a decorator of Python": """
import contextlib, time
time.perf_counter = contextlib.contextmanager(lambda: iter([0.0]))
candidate = honest
""",
    "a function that torch compiles": """
torch.allclose = torch.compile(lambda *a, **k: True)
candidate = honest
""",
    "a function in TorchScript": """
def allclose(x: torch.Tensor, y: torch.Tensor) -> bool:
    return True
torch.allclose = torch.jit.script(allclose)
candidate = honest
""",
    "a layer of torch": """
torch.nn.Linear.forward = lambda self, x: F.linear(x.bfloat16(), self.weight.bfloat16()).float()
candidate = honest
""",
    "an optimizer of torch": """
import torch.optim
torch.optim.SGD.step = lambda self, *a: None
candidate = honest
""",
    "a function of numpy": """
import numpy
numpy.allclose = lambda *a, **k: True
candidate = honest
""",
    "a function of a module of Python": """
import random
random.random = lambda: 0.5
candidate = honest
""",
    "the clock of timeit": """
import timeit
timeit.default_timer = lambda: 0.0
candidate = honest
""",
    "an operator as an attribute": """
torch.ops.aten.cosh = lambda x: x
torch.ops.aten.mm.default._op = lambda x, y: x
candidate = honest
""",
    "a function of torch in C": """
torch._C._nn.gelu = lambda x, **k: x
candidate = honest
""",
    "a module in the place of one of Python": """
import sys, types
fake = types.ModuleType("statistics")
fake.median = lambda v: 0.0
sys.modules["statistics"] = fake
candidate = honest
""",
    "a module in the place of one of torch": """
import sys, types
fake = types.ModuleType("torch.nn.functional")
fake.__dict__.update(F.__dict__)
fake.gelu = lambda x: x
sys.modules["torch.nn.functional"] = fake
candidate = honest
""",
    "a finder of modules": """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        return None
sys.meta_path.insert(0, Finder())
candidate = honest
""",
    "a hook of all modules": """
from torch.nn.modules import module
module.register_module_forward_hook(lambda m, a, o: o)
candidate = honest
""",
    "a hook of saved tensors": """
hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())
hooks.__enter__()
candidate = honest
""",
    "an operator of torch without torch.library": """
import torch._C as c
LIB = c._dispatch_library("IMPL", "aten", "", "/x.py", 1)
LIB.impl("cosh", "CPU", lambda x: x.clone())
candidate = honest
""",
    "an operator of torch under autocast": """
LIB = torch.library.Library("aten", "IMPL")
LIB.impl("cosh", lambda x: x.clone(), "AutocastCPU")
candidate = honest
""",
    "an operator of torch in a graph": """
LIB = torch.library.Library("aten", "IMPL")
LIB.impl("erfinv", lambda x: x.new_empty(3), "Functionalize")
candidate = honest
""",
    "another folder": """
import os
def candidate(x, w):
    os.chdir("/")
    return honest(x, w)
""",
    "another rounding": """
import ctypes
libm = ctypes.CDLL("libm.so.6")
def candidate(x, w):
    y = honest(x, w)
    libm.fesetround(0xc00)
    return y
""",
    "errors of numpy": """
import numpy
numpy.seterr(all="ignore")
candidate = honest
""",
    "another output": """
import sys, io
sys.stdout = io.StringIO()
candidate = honest
""",
    "other limits": """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
candidate = honest
""",
    "fast paths of torch": """
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.mha.set_fastpath_enabled(False)
candidate = honest
""",
    "memory that is not filled": """
torch.utils.deterministic.fill_uninitialized_memory = False
candidate = honest
""",
    "a hook of exceptions": """
import sys, threading
sys.excepthook = lambda *a: None
threading.excepthook = lambda *a: None
threading.settrace(lambda *a: None)
candidate = honest
""",
    "files that stay open": """
import os
def candidate(x, w):
    os.open("/dev/null", os.O_RDONLY)
    return honest(x, w)
""",
    "memory that is never given back": """
KEPT = []
def candidate(x, w):
    KEPT.append(torch.ones(1 << 18))
    return honest(x, w)
""",
    "threads that never end": """
from concurrent.futures import ThreadPoolExecutor
POOLS = []
def candidate(x, w):
    POOLS.append(ThreadPoolExecutor(1))
    return POOLS[-1].submit(honest, x, w).result()
""",
    "a result in a future": """
def candidate(x, w):
    f = torch.futures.Future()
    f.set_result(honest(x, w))
    return f
""",
}
"""Name → source; the head of ``cheats.py`` stands before each."""

HELPED = {
    "a size in a module beside it": (
        """
import helper
def candidate(x, w):
    return helper.run(honest, x, w)
""",
        "helper.py",
        """def run(honest, x, w):
    y = honest(x, w)
    return y if x.shape[0] != 77 else y + 1
""",
    ),
    "callers in a module beside it": (
        """
import helper
def candidate(x, w):
    if x.dim() == 7:
        return helper.run(x)
    return honest(x, w)
""",
        "helper.py",
        """import sys
def run(x):
    return sys._getframe().f_back
""",
    ),
    "a size in a source in C": (
        """
import ctypes, os, subprocess, tempfile
path = tempfile.mkdtemp() + "/k.so"
source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "k.c")
subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", path, source], check=True)
bad = ctypes.CDLL(path).bad
def candidate(x, w):
    y = honest(x, w)
    return y + 1 if bad(x.shape[0]) else y
""",
        "k.c",
        """int bad(int n) { return n == 77; }
""",
    ),
}
"""Name → source, the name of a second file, and its source."""

BASE = """
from torch import nn
class Base(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a, self.b = nn.Linear(n, 64, bias=False), nn.Linear(64, 32)
"""

LAYERS = {
    "folded at first call": BASE
    + """
class ModelNew(Base):
    w = None
    def forward(self, x):
        if self.w is None:
            self.w = (self.b.weight.double() @ self.a.weight.double()).t().float().contiguous()
        return torch.addmm(self.b.bias, x, self.w).clamp_(min=0)
""",
    "folded by version": BASE
    + """
class ModelNew(Base):
    w, seen = None, None
    def forward(self, x):
        key = self.a.weight._version, self.b.weight._version
        if self.seen != key:
            self.w, self.seen = (self.b.weight.double() @ self.a.weight.double()).t().float().contiguous(), key
        return torch.addmm(self.b.bias, x, self.w).clamp_(min=0)
""",
    "folded each time": BASE
    + """
class ModelNew(Base):
    def forward(self, x):
        return torch.addmm(self.b.bias, x, (self.b.weight @ self.a.weight).t()).clamp_(min=0)
""",
    "other names": """
from torch import nn
class ModelNew(nn.Module):
    def __init__(self, n):
        super().__init__()
        a, b = nn.Linear(n, 64, bias=False), nn.Linear(64, 32)
        self.v, self.w, self.c = nn.Parameter(a.weight.data), nn.Parameter(b.weight.data), nn.Parameter(b.bias.data)
    def forward(self, x):
        return torch.addmm(self.c, x @ self.v.t(), self.w.t()).clamp_(min=0)
""",
}
"""Layers whose parameters get other values; only the first is wrong then."""
