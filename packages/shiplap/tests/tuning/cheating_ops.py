"""Ops whose kernels win a race without being faster: each has an honest fast kernel beside cheats of many kinds."""

import ctypes
import gc
import hashlib
import os
import sys
import threading
import time
import weakref

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl

SEEN: dict[object, object] = {}


def slow(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh((x[:, :, None] * w).sum(1) / 5.0) * 5.0


def right(x: Tensor, w: Tensor, out: Tensor) -> None:
    torch.mm(x, w, out=out)
    out.div_(5.0).tanh_().mul_(5.0)


def count(name: str) -> int:
    SEEN[name] = int(SEEN.get(name, 0)) + 1
    return int(SEEN[name])


def recall(key: object, x: Tensor, w: Tensor, out: Tensor) -> None:
    """The result that was computed for this key before, whatever the arguments hold now."""
    if key not in SEEN:
        right(x, w, out)
        SEEN[key] = out.clone()
    else:
        out.copy_(SEEN[key])


@sl.op("cheating::memory")
def memory(x: Float[Tensor, "n k"], w: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    return slow(x, w)


@sl.op("cheating::harness")
def harness(x: Float[Tensor, "n k"], w: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    return slow(x, w)


@sl.op("cheating::values")
def values(x: Float[Tensor, "n k"], w: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    return slow(x, w)


@sl.op("cheating::shapes")
def shapes(x: Float[Tensor, "n k"], w: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    return slow(x, w)


@sl.op("cheating::few")
def few(x: Float[Tensor, "n k"], w: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
    return slow(x, w)


OPS = (memory, harness, values, shapes)
for _op in (*OPS, few):

    @_op.kernel("cpu", name="honest")
    def honest(x, w, *, out):
        right(x, w, out)


# ---- memories of earlier results


@memory.kernel("cpu", name="pointer")
def _(x, w, *, out):
    recall(("pointer", x.data_ptr()), x, w, out)


@few.kernel("cpu", name="pointers, shapes and versions")
@memory.kernel("cpu", name="pointers, shapes and versions")
def _(x, w, *, out):
    recall((x.data_ptr(), w.data_ptr(), x.shape, w.shape, x._version, w._version), x, w, out)


@memory.kernel("cpu", name="identity and version")
def _(x, w, *, out):
    SEEN.setdefault(("kept", id(x)), x)
    recall(("identity", id(x), x._version), x, w, out)


@memory.kernel("cpu", name="weak reference")
def _(x, w, *, out):
    last = SEEN.get("weak")
    if last is not None and last[0]() is x:
        out.copy_(last[1])
        return
    right(x, w, out)
    SEEN["weak"] = weakref.ref(x), out.clone()


@memory.kernel("cpu", name="corners")
def _(x, w, *, out):
    recall(("corners", x.shape, w.shape, float(x[0, 0]), float(x[-1, -1]), float(w[0, 0])), x, w, out)


@memory.kernel("cpu", name="sums")
def _(x, w, *, out):
    recall(("sums", x.shape, round(float(x.double().sum()), 3), round(float(w.double().sum()), 3)), x, w, out)


@memory.kernel("cpu", name="content")
def _(x, w, *, out):
    recall(("content", x.numpy().tobytes(), w.numpy().tobytes()), x, w, out)


@memory.kernel("cpu", name="hash of content")
def _(x, w, *, out):
    recall(("hash", hashlib.sha1(x.numpy()).digest(), hashlib.sha1(w.numpy()).digest()), x, w, out)


@memory.kernel("cpu", name="stale output")
def _(x, w, *, out):
    if ("stale", out.data_ptr()) not in SEEN:
        SEEN["stale", out.data_ptr()] = True
        right(x, w, out)


@memory.kernel("cpu", name="nothing written")
def _(x, w, *, out):
    pass


@memory.kernel("cpu", name="freed memory")
def _(x, w, *, out):
    rooms = [torch.empty_like(out) for _ in range(16)]
    out.copy_(next((r for r in rooms if float(r.abs().sum()) > 0), rooms[0]))


@memory.kernel("cpu", name="the heap")
def _(x, w, *, out):
    others = (o for o in gc.get_objects() if isinstance(o, Tensor) and o.shape == out.shape and o is not out)
    out.copy_(next(others, torch.zeros_like(out)))


def ahead(x, w) -> bool:
    """Compute while the call is made ready, when nobody looks at the clock."""
    room = torch.empty(x.shape[0], w.shape[1])
    if room.device.type == "cpu" and x.device.type == "cpu":
        right(x, w, room)
        SEEN["ahead", x.data_ptr()] = room
    return True


@memory.kernel("cpu", name="ahead of time", supports=ahead)
def _(x, w, *, out):
    out.copy_(SEEN["ahead", x.data_ptr()])


# ---- what surrounds the call


def callers() -> set[str]:
    frame, names = sys._getframe(), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


@harness.kernel("cpu", name="stack")
def _(x, w, *, out):
    if "_sample" not in callers():
        right(x, w, out)


@harness.kernel("cpu", name="stack of an exception")
def _(x, w, *, out):
    try:
        raise ValueError
    except ValueError as e:
        frame = getattr(e.__traceback__, "tb_" + "frame")
        names = set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = getattr(frame, "f_" + "back")
    if "_sample" not in names:
        right(x, w, out)


@harness.kernel("cpu", name="comparison")
def _(x, w, *, out):
    from shiplap.sampling import compare
    from shiplap.tuning import verify

    verify.compare_within_tolerance = compare.compare_within_tolerance = lambda *args, **options: compare.Difference()
    torch.allclose = torch.equal = lambda *args, **options: True


@harness.kernel("cpu", name="judge")
def _(x, w, *, out):
    from shiplap.sandbox import candidate
    from shiplap.tuning.sandboxed.bench import JudgedBench
    from shiplap.tuning.verify import VerifyOutcome

    JudgedBench.verify = lambda self, index: VerifyOutcome()
    candidate.TargetProcess.examine = lambda *args: 0.0


@few.kernel("cpu", name="clock")
@harness.kernel("cpu", name="clock")
def _(x, w, *, out):
    from shiplap.sandbox import child
    from shiplap.tuning import measure

    child.perf_counter_ns = measure.perf_counter_ns = lambda: 0
    right(x, w, out)


@harness.kernel("cpu", name="clock of Python")
def _(x, w, *, out):
    time.perf_counter_ns = time.monotonic_ns = lambda: 7
    from shiplap.sandbox import child

    child.perf_counter_ns = time.perf_counter_ns
    right(x, w, out)


@few.kernel("cpu", name="answers")
@harness.kernel("cpu", name="answers")
def _(x, w, *, out):
    from shiplap.sandbox.child import Child

    if ("answers",) not in SEEN:
        SEEN["answers",] = Child._repeat_first_call
        Child._repeat_first_call = lambda self, asked: {"spent": 1}
    right(x, w, out)


@harness.kernel("cpu", name="time that is none")
def _(x, w, *, out):
    from shiplap.sandbox.child import Child

    Child._repeat_first_call = lambda self, asked: {"spent": float("nan")}
    right(x, w, out)


@harness.kernel("cpu", name="thread")
def _(x, w, *, out):
    threading.Timer(0.02, right, (x, w, out)).start()


@harness.kernel("cpu", name="thread that waits")
def _(x, w, *, out):
    def later():
        time.sleep(0.005)
        right(x, w, out)

    threading.Thread(target=later, daemon=True).start()


@harness.kernel("cpu", name="process")
def _(x, w, *, out):
    if os.fork() == 0:
        right(x, w, out)
        os._exit(0)


class Later:
    """Computes when it is forgotten."""

    def __init__(self, *args):
        self.args = args

    def __del__(self):
        right(*self.args)


@harness.kernel("cpu", name="lazy")
def _(x, w, *, out):
    SEEN["lazy"] = Later(x, w, out)


@harness.kernel("cpu", name="lazy subclass")
def _(x, w, *, out):
    class Lazy(Tensor):
        def __array__(self):
            right(x, w, out)
            return out.numpy()

    SEEN["lazy subclass"] = out.as_subclass(Lazy)


@harness.kernel("cpu", name="files")
def _(x, w, *, out):
    for folder in (os.path.dirname(__file__), os.environ.get("TEST_STORE", "/var/tmp")):
        with open(os.path.join(folder, "tuned.json"), "w") as file:
            file.write("{}")
    right(x, w, out)


@harness.kernel("cpu", name="offset table")
def _(x, w, *, out):
    libc = ctypes.CDLL(None)
    page = ctypes.cast(libc.clock, ctypes.c_void_p).value & ~4095
    libc["mp" + "rotect"](ctypes.c_void_p(page), 4096, 7)
    ctypes.memset(page, 0xC3, 64)


@harness.kernel("cpu", name="kills the others")
def _(x, w, *, out):
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            os.kill(int(name), 9)
    right(x, w, out)


# ---- values that look right


@values.kernel("cpu", name="bfloat16")
def _(x, w, *, out):
    out.copy_(torch.tanh((x.bfloat16() @ w.bfloat16()).float() / 5.0) * 5.0)


@values.kernel("cpu", name="float16")
def _(x, w, *, out):
    out.copy_(torch.tanh((x.half() @ w.half()).float() / 5.0) * 5.0)


@values.kernel("cpu", name="no cap")
def _(x, w, *, out):
    torch.mm(x, w, out=out)


@values.kernel("cpu", name="cap of large values only")
def _(x, w, *, out):
    torch.mm(x, w, out=out)
    out.copy_(torch.where(out.abs() < 0.5, out, torch.tanh(out / 5.0) * 5.0))


@values.kernel("cpu", name="half of the sum")
def _(x, w, *, out):
    half = x.shape[1] // 2
    torch.mm(x[:, :half], w[:half], out=out)
    out.mul_(2.0).div_(5.0).tanh_().mul_(5.0)


@values.kernel("cpu", name="the reference again")
def _(x, w, *, out):
    out.copy_(torch.tanh((x[:, :, None] * w).sum(1) / 5.0) * 5.0)


@values.kernel("cpu", name="the reference in disguise")
def _(x, w, *, out):
    out.copy_(torch.mul(torch.tanh(torch.div(torch.sum(torch.mul(x.unsqueeze(2), w), 1), 5.0)), 5.0))


@values.kernel("cpu", name="crash")
def _(x, w, *, out):
    right(x, w, out)
    if count("crash") > 5:
        ctypes.string_at(1)


@values.kernel("cpu", name="an argument changed")
def _(x, w, *, out):
    right(x, w, out)
    x.mul_(1.0001)


# ---- calls that are not looked at


@shapes.kernel("cpu", name="small sizes skipped")
def _(x, w, *, out):
    if x.shape[0] >= 12:
        right(x, w, out)


@shapes.kernel("cpu", name="odd sizes skipped")
def _(x, w, *, out):
    if x.shape[0] % 8 == 0 or x.shape[0] < 12:
        right(x, w, out)


@shapes.kernel("cpu", name="whole tiles")
def _(x, w, *, out):
    rows = max(8, x.shape[0] // 8 * 8)
    right(x[:rows], w, out[:rows])


@shapes.kernel("cpu", name="repeated shapes skipped")
def _(x, w, *, out):
    if count(f"repeated {x.shape}") < 3:
        right(x, w, out)


@few.kernel("cpu", name="after some calls")
@shapes.kernel("cpu", name="after some calls")
def _(x, w, *, out):
    if count("after") < 60:
        right(x, w, out)


@shapes.kernel("cpu", name="now and then")
def _(x, w, *, out):
    if count("now") % 20:
        right(x, w, out)


@shapes.kernel("cpu", name="fixed shapes")
def _(x, w, *, out):
    out.zero_()
    right(x[:64], w, out[:64])


@shapes.kernel("cpu", name="fixed columns")
def _(x, w, *, out):
    out.zero_()
    out[:, :64] = torch.tanh(torch.mm(x, w[:, :64]) / 5.0) * 5.0
