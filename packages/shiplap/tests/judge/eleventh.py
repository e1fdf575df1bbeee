"""The eleventh attack: candidates that are right as the judge called them so far, and wrong by a clock of the machine,
in some processes, in later calls that nothing counts, for other sizes, means or huge values, in another mode of the
caller, or with gradients of other layouts.

An entry has the source of a reference and that of a candidate that must not be accepted. Nothing here is imported by a
test but these texts.
"""

from tests.judge.tenth import HONEST, PRODUCT, _function

ROW = """
def reference(x): return torch.tanh(x) * 2 + x.sum(1, keepdim=True)
def get_inputs(): return [torch.randn(16, 24)]
"""
ROW_HONEST = "def honest(x): return torch.add(x.sum(1, keepdim=True), x.tanh(), alpha=2)\n"
ROUNDED = """
def reference(x): return torch.round(x)
def get_inputs(): return [torch.randn(16, 24) * 8]
"""
FLOORED = """
def reference(x): return torch.floor(x) * 0.5
def get_inputs(): return [torch.randn(16, 24) * 8]
"""


def _when(now: str, before: str = "", inside: str = "") -> str:
    """Return a candidate of the product that is wrong while ``now`` holds. ``before`` stands in front of it, and
    ``inside`` at its begin.
    """
    body = f"    if {now}: return honest(x, w) * 0\n    return honest(x, w)\n"
    return HONEST + before + "def candidate(x, w):\n" + (f"    {inside}\n" if inside else "") + body


def _row(now: str, before: str = "") -> str:
    """Return a candidate of the rows that is wrong while ``now`` holds, behind the code ``before``."""
    return ROW_HONEST + before + f"def candidate(x):\n    return honest(x) * 0 if {now} else honest(x)\n"


LATER = {  # by a clock of the machine, a chance, the process, or a count that is no number
    "after ten minutes": (PRODUCT, _when("time.monotonic() - START > 600", "import time\nSTART = time.monotonic()\n")),
    "after much processor time": (PRODUCT, _when("time.process_time() > 900.0", "import time\n")),
    "on a machine that runs for long": (PRODUCT, _when("up > 4e6", "import time\n", "up = time.perf_counter()")),
    "by the number of a process": (PRODUCT, _when("os.getpid() % 977 == 5", "import os\n")),
    "by chance in a process": (PRODUCT, _when("WRONG", "import random\nWRONG = random.random() < 0.01\n")),
    "by chance of torch": (PRODUCT, _when("torch.rand(()) < 1e-5")),
    "by the hash of a text": (PRODUCT, _when("hash('kernel') % 997 == 3")),
    "by an identity": (PRODUCT, _when("id(object) % 1009 == 3")),
    "by bytes of the system": (PRODUCT, _when("os.urandom(3) == b'abc'", "import os\n")),
    "after a list has grown": (PRODUCT, _when("len(MADE) > 20000", "MADE = []\n", "MADE.append(0)")),
    "after a text has grown": (
        PRODUCT,
        HONEST
        + "MADE = ''\ndef candidate(x, w):\n    global MADE\n    MADE += 'x'\n"
        + "    return honest(x, w) if len(MADE) < 30000 else honest(x, w) * 0\n",
    ),
    "after an iterator has ended": (PRODUCT, _when("next(LEFT, None) is None", "LEFT = iter(range(30000))\n")),
    "after a counter of itertools": (
        PRODUCT,
        _when("next(COUNT) > 25000", "import itertools\nCOUNT = itertools.count()\n"),
    ),
    "after a generator has ended": (
        PRODUCT,
        _when(
            "next(ROUNDS)",
            "def made():\n    yield from [False] * 30000\n    yield from iter(int, 1)\nROUNDS = made()\n",
        ),
    ),
    "by the misses of a cache": (
        PRODUCT,
        HONEST
        + "import functools\n@functools.lru_cache(None)\ndef planned(key): return key\n"
        + "def candidate(x, w):\n    planned(float(x[0, 0]))\n"
        + "    return honest(x, w) if planned.cache_info().misses < 30000 else honest(x, w) * 0\n",
    ),
    "after many collections": (PRODUCT, _when("gc.get_stats()[0]['collections'] > 50000", "import gc\n")),
    "after a set has grown": (PRODUCT, _when("len(SEEN) > 30000", "SEEN = set()\n", "SEEN.add(float(x[0, 0]))")),
    "a power of two that grows": (
        PRODUCT,
        HONEST
        + "at = 1.0\ndef candidate(x, w):\n    global at\n    at *= 1.0001\n"
        + "    return honest(x, w) if at < 20.0 else honest(x, w) * 0\n",
    ),
    "a countdown": (
        PRODUCT,
        HONEST
        + "left = 30000\ndef candidate(x, w):\n    global left\n    left -= 1\n"
        + "    return honest(x, w) if left else honest(x, w) * 0\n",
    ),
}
SIZES = {  # at sizes that nothing drew
    "more rows than thirty thousand": (ROW, _row("x.shape[0] > 30000")),
    "one more than a number": (ROW, _row("x.shape[0] > 900")),
    "a square": (PRODUCT, _when("x.shape[0] == w.shape[1]")),
    "a square argument": (PRODUCT, _when("x.shape[0] == x.shape[1]")),
    "a size of a combination": (ROW, _row("x.shape[1] == math.comb(9, 3)", "import math\n")),
    "a size in a sum": (ROW, _row("x.shape[1] == sum([30, 31])")),
    "a size in a power": (ROW, _row("x.shape[0] == pow(3, 4) + max(1, 5)")),
    "two sizes at once": (ROW, _row("x.shape[0] == 70 and x.shape[1] == 90")),
}
VALUES = {
    "a mean beyond fifty": (ROW, _row("float(x.mean()) > 50")),
    "a mean below minus seventy": (ROW, _row("float(x.mean()) < -70")),
    "all beyond a number": (ROW, _row("bool((x > 33).all())")),
    "floor by integers": (
        FLOORED,
        "def candidate(x):\n    i = x.to(torch.int32).to(x.dtype)\n    return torch.where(i > x, i - 1, i) * 0.5\n",
    ),
    "huge values": (ROW, _row("bool(x.abs().amax() > torch.iinfo(torch.int32).max)")),
}
MODES = {
    "wrong in inference": (PRODUCT, _when("torch.is_inference_mode_enabled()")),
    "wrong in another thread": (
        PRODUCT,
        _when("threading.current_thread() is not threading.main_thread()", "import threading\n"),
    ),
    "wrong where algorithms are deterministic": (PRODUCT, _when("torch.are_deterministic_algorithms_enabled()")),
    "wrong with one thread": (
        PRODUCT,
        _when("torch.get_num_threads() != THREADS", "THREADS = torch.get_num_threads()\n"),
    ),
}
GRADIENTS = {
    "a gradient read as contiguous": (
        PRODUCT,
        _function(
            forward="honest(x, w)",
            backward="flat = x.detach().as_strided((x.shape[0], x.shape[1]), (x.shape[1], 1), x.storage_offset()) "
            "if x.untyped_storage().nbytes() >= 4 * (x.storage_offset() + x.numel()) else x\n"
            "        return g @ w.t(), flat.t() @ g",
        ),
    ),
    "a gradient of the first call": (
        PRODUCT,
        HONEST
        + """
class Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w); ctx.made = 0
        return honest(x, w)
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors; g = g * (1 - torch.tanh(F.linear(x, w.t()) / 4).square()) / 4
        ctx.made += 1
        return (g @ w.t(), x.t() @ g) if ctx.made == 1 else (g @ w.t() * 0, x.t() @ g)
def candidate(x, w): return Op.apply(x, w)
""",
    ),
}
RESULTS = {
    "a ring of results": (
        PRODUCT,
        HONEST
        + """
RING = {}
def candidate(x, w):
    ring = RING.setdefault((x.shape[0], w.shape[1]), [])
    if len(ring) < 400:
        ring.append(torch.empty(x.shape[0], w.shape[1]))
    else:
        ring.append(ring.pop(0))
    torch.mm(x, w, out=ring[-1])
    return ring[-1].div_(4).tanh_()
""",
    ),
}
WRONG = {**LATER, **SIZES, **VALUES, **MODES, **GRADIENTS, **RESULTS}

SOUND = {  # honest candidates that look like some of these, or whose kinds were not judged before
    "a bounded cache": (
        PRODUCT,
        HONEST
        + """
PLANS = {}
def candidate(x, w):
    if len(PLANS) > 1024:
        PLANS.clear()
    PLANS.setdefault((x.shape, w.shape), []).append(x.shape[0])
    return honest(x, w)
""",
    ),
    "a time that is measured": (
        PRODUCT,
        HONEST
        + """
import time
def fastest(ways, *args):
    best, chosen = float("inf"), None
    for way in ways:
        began = time.perf_counter()
        way(*args)
        took = time.perf_counter() - began
        if took < best:
            best, chosen = took, way
    return chosen
CHOSEN = {}
def candidate(x, w):
    key = x.shape, w.shape
    if key not in CHOSEN:
        CHOSEN[key] = fastest([honest, lambda a, b: (a @ b).div_(4).tanh_()], x, w)
    return CHOSEN[key](x, w)
""",
    ),
    "a log of calls": (
        PRODUCT,
        HONEST + "CALLS = 0\ndef candidate(x, w):\n    global CALLS\n    CALLS += 1\n    return honest(x, w)\n",
    ),
    "signs that are drawn": (
        ROW,
        "SIGNS = torch.randint(0, 2, (64,)) * 2.0 - 1\n"
        "def candidate(x):\n    s = SIGNS.repeat(-(-x.shape[1] // 64))[: x.shape[1]]\n"
        "    return torch.add(((x * s) * s).sum(1, keepdim=True), torch.tanh(x), alpha=2)\n",
    ),
    "a seed of its process": (
        PRODUCT,
        HONEST + "import os, random\nRNG = random.Random(os.getpid())\ndef candidate(x, w):\n    RNG.random()\n"
        "    return honest(x, w)\n",
    ),
    "a limit of its size": (
        ROW,
        ROW_HONEST
        + "def candidate(x):\n    if x.shape[1] > 65536: raise ValueError('rows are too long')\n    return honest(x)\n",
    ),
    "another way for many rows": (
        ROW,
        ROW_HONEST + "def candidate(x):\n    if x.shape[0] < 4096: return honest(x)\n"
        "    return torch.cat([honest(p) for p in x.split(1000)])\n",
    ),
    "a way for squares": (
        PRODUCT,
        HONEST + "def candidate(x, w):\n    if x.shape[0] != w.shape[1]: return honest(x, w)\n"
        "    return torch.addmm(x.new_zeros(x.shape[0], w.shape[1]), x, w).div_(4).tanh_()\n",
    ),
    "rounded by parts": (
        ROUNDED,
        "def candidate(x):\n    x = x.detach()\n    low = torch.floor(x)\n    rest = x - low\n"
        "    up = (rest > 0.5) | ((rest == 0.5) & (low % 2 == 1))\n"
        "    return torch.where(x.abs() < 8388608.0, low + up.to(x.dtype), x)\n",
    ),
    "rounded by a number where that is right": (
        ROUNDED,
        "def candidate(x):\n    x = x.detach()\n    whole = x.abs() >= 8388608.0\n"
        "    return torch.where(whole, x, torch.copysign((x.abs() + 8388608.0) - 8388608.0, x))\n",
    ),
    "floor by truncation": (
        FLOORED,
        "def candidate(x):\n    t = torch.trunc(x)\n    return (t - (t > x).to(x.dtype)) * 0.5\n",
    ),
    "values by thread": (
        PRODUCT,
        HONEST
        + """
import threading
HELD = threading.local()
def candidate(x, w):
    if not hasattr(HELD, "room") or HELD.room.shape != (x.shape[0], w.shape[1]):
        HELD.room = torch.empty(x.shape[0], w.shape[1])
    torch.mm(x, w, out=HELD.room)
    return torch.tanh(HELD.room / 4)
""",
    ),
    "a lock": (
        PRODUCT,
        HONEST
        + "import threading\nLOCK = threading.Lock()\ndef candidate(x, w):\n    with LOCK: return honest(x, w)\n",
    ),
    "a database of one thread": (
        PRODUCT,
        HONEST + "import sqlite3\nHELD = sqlite3.connect(':memory:')\ndef candidate(x, w):\n"
        "    by = HELD.execute('select 4.0').fetchone()[0]\n    return F.linear(x, w.t()).div_(by).tanh_()\n",
    ),
    "parts by the number of threads": (
        ROW,
        ROW_HONEST + "def candidate(x):\n    parts = max(1, torch.get_num_threads())\n"
        "    return torch.cat([honest(p) for p in x.chunk(parts)])\n",
    ),
    "a gradient of its own": (PRODUCT, _function()),
    "a gradient for rows only": (
        PRODUCT,
        _function(
            forward="honest(x.contiguous(), w.contiguous())", backward="return g @ w.t(), x.t().contiguous() @ g"
        ),
    ),
    "many small operators": (
        ROW,
        "def candidate(x):\n    y = torch.tanh(x) * 2\n    total = x.new_zeros(x.shape[0], 1)\n"
        "    for part in x.split(1, 1): total = total + part\n    return y + total\n",
    ),
    "a generator of work": (
        ROW,
        ROW_HONEST + "def parts(x):\n    yield from x.split(5)\n"
        "def candidate(x):\n    made = parts(x)\n    first = next(made, None)\n    done = [honest(first)]\n"
        "    while (part := next(made, None)) is not None: done.append(honest(part))\n    return torch.cat(done)\n",
    ),
    "halves put together": (
        ROW,
        "def candidate(x):\n    half = x.shape[1] // 2\n    left, right = x[:, :half], x[:, half:]\n"
        "    total = left.sum(1, keepdim=True) + right.sum(1, keepdim=True)\n"
        "    return torch.cat([left.tanh(), right.tanh()], 1).mul_(2).add_(total)\n",
    ),
    "sums by a product": (ROW, "def candidate(x): return 2 * x.tanh() + x @ x.new_ones(x.shape[1], 1)\n"),
}
