"""A fifth attack on the judge, by somebody who has its source: what it had left out of its comparisons.

Each is a candidate for the problem of ``test_cheats.py``. Nothing here is imported by a test.
"""

REPLACED = {
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
    "a constant of mathematics": """
import math
math.pi = 3.0
candidate = honest
""",
    "operators that count for nothing": """
from shiplap.sandbox import child as inside
class All:
    def __contains__(self, name):
        return True
inside.FREE = All()
def candidate(x, w):
    return torch.tanh((x @ w) / 5.0) * 5.0
""",
    "places that are trusted": """
from shiplap.sandbox import trusted_code as genuine
genuine.TRUSTED = ("/",)
genuine._began = 0
torch.allclose = lambda *a, **k: True
candidate = honest
""",
    "events that nobody hears": """
import sys
from shiplap.sandbox import interpreter_state as watch
watch.EVENTS = watch.NAMED = frozenset()
def candidate(x, w):
    frame, names = getattr(sys, "_get" + "frame")(), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = getattr(frame, "f_" + "back")
    return honest(x, w) if "answer" in names else x @ w
""",
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
    "a module that is taken away": """
import sys
del sys.modules["torch.nn.functional"]
candidate = honest
""",
}
"""What is in the place of something that everybody uses; the head of ``cheats.py`` stands before each."""

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
    "the generator's place": """
STATE = torch.get_rng_state()
def candidate(x, w):
    torch.set_rng_state(STATE)
    return honest(x, w)
""",
}
"""What is left changed for the caller."""

HIDDEN = {
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
    return honest(x, w) if any("sandbox" in str(n) for n in names) else x @ w
""",
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
}
"""Who looks at callers through somebody else, and who runs the reference where nobody looks."""
