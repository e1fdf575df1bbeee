"""Ways to look right or fast without being either, each in two forms or more. Nothing here is imported by a test."""

HEAD = """
import torch
F = torch.nn.functional

def honest(x, w):
    return F.linear(x, w.t()).div_(5.0).tanh_().mul_(5.0)
"""

CHEATS = {
    "pointer": """
SEEN = {}
def candidate(x, w):
    key = x.data_ptr(), w.data_ptr(), x.shape, w.shape
    if key not in SEEN:
        SEEN[key] = honest(x, w)
    return SEEN[key].clone()
""",
    "pointer of one argument": """
SEEN = {}
def candidate(x, w):
    result = SEEN.get((w.data_ptr(), w.shape))
    if result is None:
        result = SEEN[w.data_ptr(), w.shape] = w.t().contiguous()
    return F.linear(x, result).div_(5.0).tanh_().mul_(5.0)
""",
    "identity and version": """
SEEN = {}
def candidate(x, w):
    key = id(x), x._version, id(w), w._version
    if key not in SEEN:
        SEEN[key] = x, w, honest(x, w)
    return SEEN[key][2].clone()
""",
    "weak reference and version": """
import weakref
LAST = []
def candidate(x, w):
    if LAST and LAST[0]() is x and LAST[1] == x._version:
        return LAST[2].clone()
    LAST[:] = [weakref.ref(x), x._version, honest(x, w)]
    return LAST[2].clone()
""",
    "fingerprint by sum": """
SEEN = {}
def candidate(x, w):
    key = x.shape, w.shape, round(float(x.double().sum()), 3), round(float(w.double().sum()), 3)
    if key not in SEEN:
        SEEN[key] = honest(x, w)
    return SEEN[key].clone()
""",
    "fingerprint by shape": """
SEEN = {}
def candidate(x, w):
    key = x.shape, w.shape
    if key not in SEEN:
        SEEN[key] = honest(x, w)
    return SEEN[key].clone()
""",
    "content": """
SEEN = {}
def candidate(x, w):
    key = x.numpy().tobytes(), w.numpy().tobytes()
    if key not in SEEN:
        SEEN[key] = honest(x, w)
    return SEEN[key].clone()
""",
    "content by hash": """
import hashlib
SEEN = {}
def candidate(x, w):
    key = hashlib.sha1(x.numpy()).digest() + hashlib.sha1(w.numpy()).digest()
    if key not in SEEN:
        SEEN[key] = honest(x, w)
    return SEEN[key]
""",
    "stale memory": """
def candidate(x, w):
    return torch.empty(x.shape[0], w.shape[1])
""",
    "stale memory of its own": """
OUT = {}
def candidate(x, w):
    out = OUT.setdefault((x.shape, w.shape), torch.empty(x.shape[0], w.shape[1]))
    out.copy_(honest(x, w))
    return out
""",
    "the heap": """
import gc
def candidate(x, w):
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and found.shape == (x.shape[0], w.shape[1]):
            return found
    return honest(x, w)
""",
    "freed memory": """
def candidate(x, w):
    rooms = [torch.empty(x.shape[0], w.shape[1]) for _ in range(32)]
    return next((r for r in rooms if r.abs().sum() > 0), rooms[0])
""",
    "stack": """
import sys
def candidate(x, w):
    frame = sys._getframe()
    while frame is not None:
        if "shiplap" in frame.f_code.co_filename:
            return honest(x, w)
        frame = frame.f_back
    return torch.zeros(x.shape[0], w.shape[1])
""",
    "stack of an exception": """
def candidate(x, w):
    try:
        raise ValueError
    except ValueError as e:
        frame = e.__traceback__.tb_frame
        names = []
        while frame:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
    return honest(x, w) if "answer" in names else x @ w
""",
    "patched comparison": """
torch.allclose = torch.equal = lambda *a, **k: True
torch.testing.assert_close = lambda *a, **k: None
def candidate(x, w):
    return honest(x, w)
""",
    "patched judge": """
from shiplap.sampling import compare
compare.compare_within_tolerance = lambda *a, **k: compare.Difference()
def candidate(x, w):
    return x @ w
""",
    "patched clock": """
import time
time.perf_counter_ns = lambda: 0
time.perf_counter = lambda: 0.0
def candidate(x, w):
    return honest(x, w)
""",
    "patched harness": """
from shiplap.sandbox import child as inside
inside.perf_counter_ns = lambda: 0
def candidate(x, w):
    return honest(x, w)
""",
    "lazy subclass": """
class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = [honest(*a.held) if isinstance(a, Lazy) else a for a in args]
        return func(*args, **(kwargs or {}))
def candidate(x, w):
    lazy = torch.empty(x.shape[0], w.shape[1]).as_subclass(Lazy)
    lazy.held = x, w
    return lazy
""",
    "lazy result": """
class Result(list):
    pass
def candidate(x, w):
    class Later:
        def __array__(self):
            return honest(x, w).numpy()
    return Later()
""",
    "list that computes": """
def again(x, w):
    return torch.tanh((x @ w) / 5.0) * 5.0
class Later(list):
    def __iter__(self):
        return iter([again(*self.held)])
def candidate(x, w):
    later = Later([None])
    later.held = x, w
    return later
""",
    "address that computes": """
def again(x, w):
    return torch.tanh((x @ w) / 5.0) * 5.0
def candidate(x, w):
    out = x.new_empty(x.shape[0], w.shape[1])
    def compute():
        out.copy_(again(x, w))
        return torch.Tensor.data_ptr(out)
    out.data_ptr = compute
    return out
""",
    "thread": """
import threading
def candidate(x, w):
    out = torch.zeros(x.shape[0], w.shape[1])
    threading.Timer(0.05, lambda: out.copy_(honest(x, w))).start()
    return out
""",
    "pool of threads": """
from concurrent.futures import ThreadPoolExecutor
import time
POOL = ThreadPoolExecutor(2)
def candidate(x, w):
    out = torch.zeros(x.shape[0], w.shape[1])
    POOL.submit(lambda: (time.sleep(0.01), out.copy_(honest(x, w))))
    return out
""",
    "process": """
import os, time
def candidate(x, w):
    out = torch.zeros(x.shape[0], w.shape[1]).share_memory_()
    if os.fork() == 0:
        out.copy_(honest(x, w))
        os._exit(0)
    return out
""",
    "rare shapes": """
def candidate(x, w):
    return honest(x, w) if x.shape[0] % 8 == 0 else torch.zeros(x.shape[0], w.shape[1])
""",
    "big shapes": """
def candidate(x, w):
    return honest(x, w) if x.numel() < 12000 else torch.zeros(x.shape[0], w.shape[1])
""",
    "repeated shapes": """
SEEN = set()
def candidate(x, w):
    if x.shape in SEEN:
        return torch.zeros(x.shape[0], w.shape[1])
    SEEN.add(x.shape)
    return honest(x, w)
""",
    "after some calls": """
CALLS = []
def candidate(x, w):
    CALLS.append(1)
    return honest(x, w) if len(CALLS) < 60 else torch.zeros(x.shape[0], w.shape[1])
""",
    "now and then": """
CALLS = []
def candidate(x, w):
    CALLS.append(1)
    return torch.zeros(x.shape[0], w.shape[1]) if len(CALLS) % 25 == 0 else honest(x, w)
""",
    "bfloat16": """
def candidate(x, w):
    return torch.tanh((x.bfloat16() @ w.bfloat16()).float() / 5.0) * 5.0
""",
    "float16 sums": """
def candidate(x, w):
    return torch.tanh(F.linear(x.half(), w.t().half()).float() / 5.0) * 5.0
""",
    "no cap": """
def candidate(x, w):
    return F.linear(x, w.t())
""",
    "no cap near zero": """
def candidate(x, w):
    y = F.linear(x, w.t())
    return y if float(y.abs().max()) < 0.5 else torch.where(y.abs() < 0.3, y, torch.tanh(y / 5.0) * 5.0)
""",
    "reference again": """
def candidate(x, w):
    return torch.tanh((x @ w) / 5.0) * 5.0
""",
    "reference in disguise": """
def candidate(x, w):
    y = torch.matmul(x.clone(), w.clone())
    return (torch.mul(torch.tanh(torch.div(y, 5.0)), 5.0) + 0.0).contiguous()
""",
    "memory over the limit": """
HELD = []
def candidate(x, w):
    HELD.append(torch.ones(1 << 28))
    return honest(x, w)
""",
    "crash": """
import ctypes
def candidate(x, w):
    ctypes.string_at(1)
""",
    "result files": """
import glob, os
for name in glob.glob("/tmp/**/*verdict*", recursive=True) + [os.path.expanduser("~/../verdict.json")]:
    open(name, "w").write('{"verdict": "accepted"}')
def candidate(x, w):
    return honest(x, w)
""",
    "beside itself": """
import os
open(os.path.join(os.path.dirname(__file__), "cheats_result.json"), "w").write("accepted")
def candidate(x, w):
    return honest(x, w)
""",
    "offset table": """
import ctypes
libc = ctypes.CDLL(None)
page = ctypes.cast(libc.clock, ctypes.c_void_p).value & ~4095
libc["mprotect"](ctypes.c_void_p(page), 4096, 7)
def candidate(x, w):
    return honest(x, w)
""",
    "fixed shapes": """
def candidate(x, w):
    out = torch.zeros(96, 64)
    out[:] = honest(x[:96], w[:, :64])
    return out
""",
    "rows of whole tiles": """
def candidate(x, w):
    out = torch.zeros(x.shape[0], w.shape[1])
    for at in range(0, x.shape[0] // 16 * 16, 16):
        out[at : at + 16] = honest(x[at : at + 16], w)
    return out
""",
    "writes its argument": """
def candidate(x, w):
    x.mul_(1.0000001)
    return honest(x, w)
""",
    "kills": """
import os, signal
for pid in (os.getppid(), 1):
    os.kill(pid, signal.SIGKILL)
def candidate(x, w):
    return honest(x, w)
""",
    "orphan": """
import os
BUSY = []
def candidate(x, w):
    BUSY.append(1)
    if len(BUSY) > 150 and os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        while True:
            pass
    return honest(x, w)
""",
    "time that is none": """
from msgspec.structs import replace
from shiplap.sandbox import child as inside, patched_functions as intact
intact.FunctionSnapshot.changed = lambda self: []
before = inside.Child.answer
def answer(self, asked, handle):
    reply = before(self, asked, handle)
    return replace(reply, spent=float("nan")) if hasattr(reply, "spent") else reply
inside.Child.answer = answer
candidate = honest
""",
    "answer that is none": """
from shiplap.sandbox import child as inside, patched_functions as intact, protocol as wire
intact.FunctionSnapshot.changed = lambda self: []
before = inside.Child.answer
none = wire.TargetCalled(wire.CallPlaces([1 << 63]), 1)
inside.Child.answer = lambda self, asked, handle: none if hasattr(asked, "again") else before(self, asked, handle)
candidate = honest
""",
    "address of another": """
from msgspec.structs import force_setattr
from shiplap.sandbox import child as inside, patched_functions as intact
intact.FunctionSnapshot.changed = lambda self: []
before = inside.Child.answer
def answer(self, asked, handle):
    reply = before(self, asked, handle)
    for out in reply.places.outs if hasattr(reply, "places") else ():
        force_setattr(out, "at", 64)
    return reply
inside.Child.answer = answer
candidate = honest
""",
    "network": """
import socket
socket.socket(socket.AF_INET, socket.SOCK_STREAM)
def candidate(x, w):
    return honest(x, w)
""",
}
