"""Honest candidates for the problem of ``test_cheats.py`` that do what cheats do as well."""

WAYS = {
    "code in C for each shape": '''
import ctypes, functools, os, subprocess, tempfile
SOURCE = """
#include <math.h>
void run(const float *x, const float *w, float *o, long n) {
    for (long i = 0; i < n; i++) {
        double sums[M];
        for (int j = 0; j < M; j++) sums[j] = 0;
        for (int k = 0; k < K; k++) for (int j = 0; j < M; j++) sums[j] += (double)x[i * K + k] * w[k * M + j];
        for (int j = 0; j < M; j++) o[i * M + j] = tanhf((float)sums[j] / 5.0f) * 5.0f;
    }
}
"""
@functools.lru_cache(maxsize=None)
def built(k, m):
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "k.c")
    with open(path, "w") as file:
        file.write(SOURCE)
    flags = ["-O2", "-shared", "-fPIC", f"-DK={k}", f"-DM={m}"]
    subprocess.run(["gcc", *flags, "-o", path + ".so", path, "-lm"], check=True)
    return ctypes.CDLL(path + ".so").run
def candidate(x, w):
    x, w, out = x.contiguous(), w.contiguous(), torch.empty(x.shape[0], w.shape[1])
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, w, out)]
    built(x.shape[1], w.shape[1])(*pointers, ctypes.c_long(x.shape[0]))
    return out
''',
    "lazy and with a workspace": """
class Kernel:
    def __init__(self):
        self.room = None
    def __call__(self, x, w):
        wanted = x.shape[0] * w.shape[1]
        if self.room is None or self.room.numel() < wanted:
            self.room = torch.empty(wanted)
        room = self.room[:wanted].view(x.shape[0], w.shape[1])
        torch.mm(x, w, out=room)
        room.div_(5.0).tanh_()
        return room * 5.0
candidate = Kernel()
""",
    "a pool of threads": """
from concurrent.futures import ThreadPoolExecutor
POOL = None
def part(x, w, out):
    torch.mm(x, w, out=out).div_(5.0).tanh_().mul_(5.0)
def candidate(x, w):
    global POOL
    POOL = POOL or ThreadPoolExecutor(2)
    out = torch.empty(x.shape[0], w.shape[1])
    list(POOL.map(lambda pair: part(pair[0], w, pair[1]), zip(x.split(32), out.split(32))))
    return out
""",
    "compiled inside": """
@torch.compile(dynamic=True)
def capped(y):
    return torch.tanh(y / 5.0) * 5.0
def candidate(x, w):
    return capped(F.linear(x, w.t()))
""",
    "sums in parts": """
def candidate(x, w):
    half = x.shape[1] // 2
    return torch.addmm(x[:, half:] @ w[half:], x[:, :half], w[:half]).div_(5.0).tanh_().mul_(5.0)
""",
    "TorchScript": """
@torch.jit.script
def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.linear(x, w.t()) * 0.2
    return torch.tanh(y) * 5.0
def candidate(x, w):
    return run(x, w)
""",
    "decorated": """
import contextlib, dataclasses, enum, functools, logging, typing, warnings
from collections import namedtuple
LOGGER = logging.getLogger("it")
Plan = namedtuple("Plan", "rows columns")
class Way(enum.Enum):
    FAST = 1
@dataclasses.dataclass(frozen=True)
class Config:
    way: Way = Way.FAST
    plan: typing.Optional[Plan] = None
@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
@functools.lru_cache(maxsize=None)
def planned(n, m):
    LOGGER.info("plan for %d", n)
    return Config(plan=Plan(n, m))
@torch.no_grad()
def candidate(x, w):
    plan = planned(x.shape[0], w.shape[1]).plan
    with quiet(), torch.autocast("cpu", enabled=False):
        return honest(x, w).view(plan.rows, plan.columns)
""",
    "an operator of its own": """
LIBRARY = torch.library.Library("honest_it", "DEF")
LIBRARY.define("capped(Tensor x, Tensor w) -> Tensor")
LIBRARY.impl("capped", lambda x, w: honest(x, w), "CompositeExplicitAutograd")
def candidate(x, w):
    return torch.ops.honest_it.capped(x, w)
""",
    "a function with a gradient": """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return honest(x, w)
    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError
def candidate(x, w):
    return Own.apply(x, w)
""",
    "mapped over rows": """
def candidate(x, w):
    return torch.vmap(lambda row: torch.mv(w.t(), row).mul(0.2).tanh().mul(5.0))(x)
""",
    "flags put back": """
import os, gc, atexit
os.environ.setdefault("HONEST_IT", "1")
atexit.register(lambda: None)
def candidate(x, w):
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    gc.collect()
    try:
        return honest(x, w)
    finally:
        torch.set_num_threads(before[0])
""",
    "memory of its own that grows": """
PLANS = {}
def candidate(x, w):
    key = x.shape, w.shape
    if key not in PLANS:
        PLANS[key] = torch.empty(x.shape[0], w.shape[1]), torch.empty(1 << 20)
    room = PLANS[key][0]
    torch.mm(x, w, out=room)
    return torch.tanh(room.mul_(0.2)) * 5.0
""",
    "vectors of numpy": """
import numpy
def candidate(x, w):
    with numpy.errstate(all="ignore"):
        y = numpy.einsum("ik,kj->ij", x.numpy().astype(numpy.float64), w.numpy().astype(numpy.float64), optimize=True)
        return torch.from_numpy((numpy.tanh(y / 5) * 5).astype(numpy.float32))
""",
}
