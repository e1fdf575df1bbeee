"""The second attack on the judge, its other half.

What is left behind in the process, calls under another name, work where nobody looks: candidates as in ``attacks.py``.
"""

INSIDE = {
    # ---- what a kernel leaves behind for its caller
    "default dtype": """
def candidate(x, w):
    torch.set_default_dtype(torch.float64)
    return honest(x, w)
""",
    "precision of products": """
torch.set_float32_matmul_precision("medium")
def candidate(x, w):
    return honest(x, w)
""",
    "autocast left on": """
CONTEXT = torch.autocast("cpu", dtype=torch.bfloat16)
def candidate(x, w):
    y = honest(x, w)
    if not torch.is_autocast_enabled("cpu"):
        CONTEXT.__enter__()
    return y
""",
    "gradients left on": """
def candidate(x, w):
    y = honest(x, w)
    torch.set_grad_enabled(True)
    torch._C._set_grad_enabled(True)
    torch.use_deterministic_algorithms(True)
    return y
""",
    "a mode left on": """
class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
MODE = []
def candidate(x, w):
    if not MODE:
        MODE.append(Mode())
        MODE[0].__enter__()
    return honest(x, w)
""",
    "a dispatch mode left on": """
from torch.utils._python_dispatch import TorchDispatchMode
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
Mode().__enter__()
def candidate(x, w):
    return honest(x, w)
""",
    "a tracer left on": """
import sys
def candidate(x, w):
    sys.setprofile(lambda *args: None)
    return honest(x, w)
""",
    "a signal handler left on": """
import signal
def candidate(x, w):
    signal.signal(signal.SIGALRM, lambda *args: None)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    return honest(x, w)
""",
    # ---- who calls, in disguise
    "frames by a put-together name": """
import sys
def candidate(x, w):
    frame = getattr(sys, "_get" + "frame")()
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = getattr(frame, "f_" + "back")
    return honest(x, w) if "answer" in names else x @ w
""",
    "frames by the logger": """
import logging
LOGGER = logging.Logger("l")
def candidate(x, w):
    names = [LOGGER.findCaller(False, depth)[2] for depth in range(1, 5)]
    return honest(x, w) if "answer" in names else x @ w
""",
    "frames of a generator": """
def candidate(x, w):
    def inner():
        frame = getattr(generator, "gi_" + "frame")
        names = []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = getattr(frame, "f_" + "back")
        yield names
    generator = inner()
    return honest(x, w) if "answer" in next(generator) else x @ w
""",
    "frames by the C API": """
import ctypes
look = getattr(ctypes.pythonapi, "PyEval_Get" + "Frame")
look.restype = ctypes.py_object
def candidate(x, w):
    return honest(x, w) if look() is not None else x @ w
""",
    "the heap by a put-together name": """
import gc
def candidate(x, w):
    shape = x.shape[0], w.shape[1]
    found = [o for o in getattr(gc, "get_" + "objects")() if type(o) is torch.Tensor and o.shape == shape]
    return honest(x, w) if len(found) < 99 else found[0]
""",
    # ---- the reference again
    "the reference with one dim more": """
def candidate(x, w):
    return (torch.tanh((x[None] @ w) / 5.0) * 5.0)[0]
""",
    "the reference in parts": """
def candidate(x, w):
    return torch.cat([torch.tanh((part @ w) / 5.0) * 5.0 for part in x.split(24)])
""",
    "the reference but for the profiler": """
def candidate(x, w):
    if torch._C._autograd._profiler_enabled():
        return x + 1
    return torch.tanh((x @ w) / 5.0) * 5.0
""",
    "the reference from its file": """
import importlib
candidate = importlib.import_module("problem").reference
""",
    # ---- work after the clock, or after the list of operators
    "mapping that computes": """
def again(x, w):
    return torch.tanh((x @ w) / 5.0) * 5.0
class Later(dict):
    def values(self):
        return [again(*self["held"][0])]
def candidate(x, w):
    return Later(held=[(x, w)])
""",
    "strides that compute": """
def again(x, w):
    return torch.tanh((x @ w) / 5.0) * 5.0
def candidate(x, w):
    out = x.new_empty(x.shape[0], w.shape[1])
    def compute():
        out.copy_(again(x, w))
        return torch.Tensor.stride(out)
    out.stride = compute
    return out
""",
    "finalizer of an argument": """
def again(x, w):
    return torch.tanh((x @ w) / 5.0) * 5.0
import weakref
def candidate(x, w):
    out, same = x.new_empty(x.shape[0], w.shape[1]), x.detach()
    weakref.finalize(x, lambda: out.copy_(again(same, w)))
    return out
""",
    "finalizer in a circle": """
def again(x, w):
    return torch.tanh((x @ w) / 5.0) * 5.0
def candidate(x, w):
    out = x.new_empty(x.shape[0], w.shape[1])
    class Later:
        def __del__(self):
            out.copy_(again(x, w))
    later = Later()
    later.me = later
    return out
""",
    "finalizer of the last result": """
def again(x, w):
    return torch.tanh((x @ w) / 5.0) * 5.0
LAST = []
class Later(list):
    def __del__(self):
        if LAST:
            x, w, out = LAST.pop()
            out.copy_(again(x, w))
def candidate(x, w):
    out = x.new_empty(x.shape[0], w.shape[1])
    LAST[:] = [(x, w, out)]
    return Later([out])
""",
    # ---- the judge's time
    "slow where many calls are": """
import time
CALLS = []
def candidate(x, w):
    CALLS.append(1)
    if len(CALLS) > 22 and x.shape[0] < 60:
        time.sleep(1.5)
    return honest(x, w) if len(CALLS) < 130 else honest(x, w) * 2
""",
    "slow at last": """
import time
CALLS = []
def candidate(x, w):
    CALLS.append(1)
    if len(CALLS) > 10:
        time.sleep(20)
    return honest(x, w)
""",
}
