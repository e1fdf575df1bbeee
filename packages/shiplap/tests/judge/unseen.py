"""A third attack on the judge, by somebody who has its source and the list of the two before.

Each is a candidate for the problem of ``test_cheats.py``. Nothing here is imported by a test.
"""

from tests.judge.attacks import HARNESS

UNSEEN = {
    # ---- what a kernel leaves behind for its caller
    "an operator of torch in its own way": """
LIBRARY = torch.library.Library("aten", "IMPL")
LIBRARY.impl("cosh", lambda x: x.exp().add_(x.neg().exp()).div_(2), "CPU")
candidate = honest
""",
    "an operator of torch for autograd": """
LIBRARY = torch.library.Library("aten", "IMPL")
def candidate(x, w):
    if not hasattr(candidate, "done"):
        candidate.done = True
        LIBRARY.impl("cosh", lambda x: x.clone(), "AutogradCPU")
    return honest(x, w)
""",
    "precision by the new names": """
torch.backends.mkldnn.matmul.fp32_precision = "bf16"
candidate = honest
""",
    "a flag of cuDNN": """
def candidate(x, w):
    torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.benchmark = True
    return honest(x, w)
""",
    "a seed": """
def candidate(x, w):
    torch.manual_seed(0)
    return honest(x, w)
""",
    "no collection of garbage": """
import gc
gc.disable()
candidate = honest
""",
    "a callback of the garbage collection": """
import gc
gc.callbacks.append(lambda phase, info: None)
candidate = honest
""",
    # ---- functions that are not what they were
    "code in the place of code": """
F.softmax.__code__ = (lambda *args, **kwargs: args[0]).__code__
candidate = honest
""",
    "a method of a class of torch": """
from torch.autograd import profiler
profiler.profile.__exit__ = lambda self, *rest: setattr(self, "function_events", [])
def candidate(x, w):
    return torch.tanh((x @ w) / 5.0) * 5.0
""",
    "the clock of a device": """
torch.cuda.Event.elapsed_time = lambda self, end: 0.002
candidate = honest
""",
    "a property of a class of torch": """
torch.cuda.Stream.query = property(lambda self: (lambda: True))
candidate = honest
""",
    "where files lie": """
import os, posixpath, sys
posixpath.realpath = lambda path, **rest: os.__file__
def candidate(x, w):
    frame = getattr(sys, "_get" + "frame")(1)
    return honest(x, w) if frame.f_code.co_name else x @ w
""",
    # ---- who calls
    "the stack in a file": """
import faulthandler
def candidate(x, w):
    with open("stack", "w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        judged = "answer" in file.read()
    return honest(x, w) if judged else x @ w
""",
    "where memory was taken": """
import tracemalloc
tracemalloc.start(25)
def candidate(x, w):
    seen = str(tracemalloc.get_object_traceback([0] * 99))
    return honest(x, w) if "inside" in seen or seen else x @ w
""",
    "a traceback of torch": """
from torch.utils._traceback import CapturedTraceback
def candidate(x, w):
    names = [frame.name for frame in CapturedTraceback.extract().summary()]
    return honest(x, w) if "answer" in names else x @ w
""",
    # ---- answers that harm whoever reads them
    "operators in lists of lists": HARNESS
    + """
def answer(self, asked, handle):
    reply = before(self, asked, handle)
    if asked["do"] == "ops":
        deep = []
        for _ in range(900):
            deep = [deep]
        reply["ops"] = [["aten::mm", deep], [deep, []], ["aten::tanh", [[10 ** 4000] * 60]]]
    return reply
inside.Child.answer = answer
candidate = honest
""",
    "names in lists of lists": HARNESS
    + """
def answer(self, asked, handle):
    deep = []
    for _ in range(900):
        deep = [deep]
    return {"changed": [deep], "threads": 0} if asked["do"] == "intact" else before(self, asked, handle)
inside.Child.answer = answer
candidate = honest
""",
    "addresses that are none": HARNESS
    + """
VALUES = iter([1e308, -(1 << 70), 1 << 200, "7", None, [], True])
def answer(self, asked, handle):
    reply = before(self, asked, handle)
    for out in reply.get("outs", []):
        out["tensor"]["at"] = next(VALUES, 64)
    return reply
inside.Child.answer = answer
candidate = honest
""",
    "markup": """
def candidate(x, w):
    raise ValueError("[bold green]it.py: accepted[/bold green] [/] <script>alert(1)</script>")
""",
    # ---- precision
    "sixteen bits in two parts": """
def candidate(x, w):
    a, b = x.half(), (x - x.half().float()).half()
    c, d = w.half(), (w - w.half().float()).half()
    y = (a @ c).float() + (a @ d).float() + (b @ c).float()
    return torch.tanh(y / 5.0) * 5.0
""",
    "a biased result": """
def candidate(x, w):
    return honest(x, w).mul_(1.0 + 2e-5)
""",
    "the last summand": """
def candidate(x, w):
    return honest(x[:, :-1].contiguous(), w[:-1].contiguous()) if x.shape[1] > 1 else honest(x, w)
""",
    "small summands": """
def candidate(x, w):
    return honest(torch.where(x.abs() < x.abs().amax(1, keepdim=True) * 1e-3, 0, x), w)
""",
    # ---- the judge's own files and names
    "a secret of the environment": """
import os
raise ValueError(os.environ.get("SHIPLAP_TEST_TOKEN", "no such variable"))
""",
    "a monitor of calls": """
import sys
if hasattr(sys, "monitoring"):
    sys.monitoring.use_tool_id(3, "it")
    sys.monitoring.register_callback(3, sys.monitoring.events.PY_START, lambda code, at: None)
else:
    sys.setprofile(lambda *args: None)
candidate = honest
""",
    "the judge's memory": """
import os
open(f"/proc/{os.getppid()}/mem", "rb").read(1)
candidate = honest
""",
    "the judge's environment": """
import os
raise ValueError(open(f"/proc/{os.getppid()}/environ").read()[:100])
""",
}
"""Name → source; the head of ``cheats.py`` stands before each."""

BACKWARD = {
    "right on the first shape": """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return honest(x, w)
    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        inner = grad * (1.0 - torch.tanh((x @ w) / 5.0) ** 2)
        scale = 1.0 if x.shape == (96, 128) and w.shape == (128, 64) else 1.01
        return inner @ w.t() * scale, x.t() @ inner
candidate = Own.apply
""",
    "remembered by shape": """
SEEN = {}
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return honest(x, w)
    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        if (x.shape, w.shape) not in SEEN:
            inner = grad * (1.0 - torch.tanh((x @ w) / 5.0) ** 2)
            SEEN[x.shape, w.shape] = inner @ w.t(), x.t() @ inner
        return SEEN[x.shape, w.shape]
candidate = Own.apply
""",
}
"""The same, with wrong gradients."""
