"""The twelfth attack: counts of calls in other forms than a number that grows, and candidates that are wrong for
values, memory, modes or gradients that no earlier attack tried.

An entry has the source of a reference and that of a candidate that must not be accepted. Nothing here is imported by a
test but these texts.
"""

from tests.judge.eleventh import ROW, ROW_HONEST, _row, _when
from tests.judge.tenth import HONEST, PRODUCT, _function

WRONG_NOW = "    return honest(x, w) * 0\n"


def _counted(state: str, step: str, test: str) -> tuple[str, str]:
    """Return the product, and a candidate of it that makes ``step`` in each call and is wrong while ``test`` holds.
    ``state`` stands in front of it.
    """
    return PRODUCT, HONEST + f"{state}\ndef candidate(x, w):\n    {step}\n    if {test}: return honest(x, w) * 0\n" + (
        "    return honest(x, w)\n"
    )


WAYS = """
import itertools
WAYS = itertools.chain([honest] * 20000, itertools.repeat(lambda x, w: honest(x, w) * 0))
"""
COUNTS = {
    "a list that is added to": _counted("MADE = []", "global MADE; MADE += [0]", "len(MADE) > 20000"),
    "one less a minus": _counted("N = 0", "global N; N -= -1", "N > 20000"),
    "the length of a text": _counted("N = 0", "global N; N += len('a')", "N > 20000"),
    "a sum of itself": _counted("N = 0", "global N; N = sum((N, 1))", "N > 20000"),
    "the larger and one": _counted("N = 0", "global N; N = max(N, 0) + x.dim() - 1", "N > 20000"),
    "two at once": _counted("N, M = 0, 0", "global N, M; N, M = N + 1, 0", "N > 20000"),
    "in an expression": _counted("N = 0", "global N; (N := N + 1)", "N > 20000"),
    "shifted": _counted("N = 1", "global N; N = (N << 1) | 1", "N >> 20000"),
    "a tensor in place": _counted("N = torch.zeros(())", "N.add_(1)", "N > 20000"),
    "a tensor and its item": _counted("N = torch.zeros(1)", "N.add_(1)", "int(N.item()) // 20000"),
    "an attribute of the function": _counted(
        "", "setattr(candidate, 'n', getattr(candidate, 'n', 0) + 1)", "candidate.n > 20000"
    ),
    "a name of the module": _counted("N = 0", "globals()['N'] = globals()['N'] + 1", "N > 20000"),
    "a variable of the environment": _counted(
        "import os\nos.environ['N'] = '0'",
        "os.environ['N'] = str(int(os.environ['N']) + 1)",
        "int(os.environ['N']) > 20000",
    ),
    "a default of an argument": (
        PRODUCT,
        HONEST
        + "def candidate(x, w, *, n=[0]):\n    n[0] = n[0] + x.dim()\n    return honest(x, w) * (n[0] < 50000)\n",
    ),
    "an index that ends": (
        PRODUCT,
        HONEST
        + "LEFT, AT = bytes(20000), [0]\ndef candidate(x, w):\n    AT[0] += x.dim() // 2\n    try: LEFT[AT[0]]\n"
        + "    except IndexError: return honest(x, w) * 0\n    return honest(x, w)\n",
    ),
    "a list that is used up": (
        PRODUCT,
        HONEST
        + "LEFT = [0] * 20000\ndef candidate(x, w):\n    try: LEFT.pop()\n"
        + "    except IndexError: return honest(x, w) * 0\n    return honest(x, w)\n",
    ),
    "a file that grows": _counted("import os", "open('n', 'ab').write(b'1')", "os.path.getsize('n') > 20000"),
    "a file with a number": _counted(
        "from pathlib import Path\nN = Path('n')\nN.write_text('0')",
        "N.write_text(str(int(N.read_text()) + 1))",
        "int(N.read_text()) > 20000",
    ),
    "the status of a file": _counted("import os", "open('n', 'ab').write(b'1')", "os.stat('n').st_size > 20000"),
    "the time that a process has used": _counted("import resource", "pass", "resource.getrusage(0).ru_utime > 900"),
    "the times of the system": _counted("import os", "pass", "os.times()[4] % 977.0 > 976.5"),
    "an address by chance": _counted("", "pass", "x.data_ptr() % 64007 == 5"),
    "an entry for each call": _counted("MADE = {}", "MADE[len(MADE)] = 0", "len(MADE) > 20000"),
    "one of two functions": (
        PRODUCT,
        HONEST
        + "N = [0]\nWAYS = [honest, lambda x, w: honest(x, w) * 0]\ndef candidate(x, w):\n    N[0] += 1\n"
        + "    return WAYS[N[0] // 20000](x, w)\n",
    ),
    "a far element of a list": _counted("MADE = []", "MADE.append(0)", "MADE[20000:]"),
    "a list that has an element": (
        PRODUCT,
        HONEST
        + "MADE = []\ndef candidate(x, w):\n    MADE.append(0)\n    try: MADE[20000]\n"
        + "    except IndexError: return honest(x, w)\n    return honest(x, w) * 0\n",
    ),
    "a sum of a list": _counted("MADE = []", "MADE.append(1)", "sum(MADE) > 20000"),
    "a way from an iterator": (
        PRODUCT,
        HONEST + WAYS + "def candidate(x, w): return next(WAYS)(x, w)\n",
    ),
    "a way that is taken first": (
        PRODUCT,
        HONEST + WAYS + "def candidate(x, w):\n    way = next(WAYS)\n    return way(x, w)\n",
    ),
    "a choice": _counted("import random", "pass", "random.choice(range(100000)) == 7"),
    "a rare truth": _counted("", "pass", "torch.bernoulli(torch.tensor(1e-5))"),
    "one number of many": _counted("", "pass", "torch.rand(64).max().item() > 0.9999999"),
    "what new memory holds": _counted("", "pass", "torch.empty(1).item() == 3.0"),
}
VALUES = {
    "a row that is all equal": (ROW, _row("x.shape[1] > 1 and bool((x == x[:, :1]).all(1).any())")),
    "rows that repeat": (ROW, _row("x.shape[0] > 1 and bool((x[0] == x[1]).all())")),
    "one exact zero": (ROW, _row("bool((x == 0).any())")),
    "subnormal numbers": (ROW, _row("bool(((x != 0) & (x.abs() < 1.2e-38)).any())")),
    "sorted rows": (ROW, _row("x.shape[1] > 1 and bool((x[:, 1:] >= x[:, :-1]).all())")),
    "whole numbers": (ROW, _row("bool((x == x.round()).all())")),
}
PRECISION = {
    "halves of the digits": (PRODUCT, HONEST + "def candidate(x, w): return honest(x.bfloat16().float(), w)\n"),
    "half of the sum": (
        ROW,
        "def candidate(x): return torch.tanh(x) * 2 + x.half().sum(1, keepdim=True).float()\n",
    ),
    "a polynomial": (
        ROW,
        "def candidate(x):\n    c = x.clamp(-4, 4)\n    t = c * (27 + c * c) / (27 + 9 * c * c)\n"
        "    return t.clamp(-1, 1) * 2 + x.sum(1, keepdim=True)\n",
    ),
    "a mean of some": (
        ROW,
        "def candidate(x):\n    half = x[:, ::2].sum(1, keepdim=True) * (x.shape[1] / max(1, x[:, ::2].shape[1]))\n"
        "    return torch.tanh(x) * 2 + half\n",
    ),
}
MODES = {
    "wrong under autocast": (PRODUCT, _when("torch.is_autocast_enabled('cpu')")),
    "wrong on a parameter": (PRODUCT, _when("isinstance(w, nn.Parameter)")),
    "wrong on what an operator has made": (PRODUCT, _when("w.grad_fn is not None")),
    "wrong on what is no view": (PRODUCT, _when("not w._is_view()")),
    "wrong on one tensor for two arguments": (
        "def reference(x, y): return torch.sigmoid(x) * 2 + y\n"
        "def get_inputs(): return [torch.randn(8, 9), torch.randn(8, 9)]\n",
        "def candidate(x, y): return torch.add(y, x.sigmoid(), alpha=3 if x is y else 2)\n",
    ),
    "wrong for many rows": (ROW, _row("x.shape[0] > torch.iinfo(torch.int16).max // 20")),
    "wrong while it is traced": (PRODUCT, _when("torch.compiler.is_compiling()")),
    "wrong in a second thread of its own": (
        PRODUCT,
        HONEST
        + "import threading\nDONE = []\ndef candidate(x, w):\n    out = torch.zeros(x.shape[0], w.shape[1])\n"
        + "    t = threading.Thread(target=lambda: out.copy_(honest(x, w)))\n    t.start()\n    t.join(0.0005)\n"
        + "    return out\n",
    ),
}
GRADIENTS = {
    "a gradient without one of its arguments": (
        PRODUCT,
        _function(forward="honest(x, w)", backward="return g @ w.t(), None"),
    ),
    "a second gradient of zeros": (
        PRODUCT,
        _function(forward="honest(x, w)", backward="return (g @ w.t()).detach(), (x.t() @ g).detach()"),
    ),
    "a gradient that is scaled": (
        PRODUCT,
        _function(forward="honest(x, w)", backward="return g @ w.t() * 1.0001, x.t() @ g"),
    ),
}
RESULTS = {
    "a result that is a view of a kept one": (
        PRODUCT,
        HONEST
        + "ROOM = {}\ndef candidate(x, w):\n    room = ROOM.setdefault(w.shape[1], torch.empty(4096, w.shape[1]))\n"
        + "    return room[: x.shape[0]].copy_(honest(x, w)) if x.shape[0] <= 4096 else honest(x, w)\n",
    ),
    "a result that expands": (ROW, ROW_HONEST + "def candidate(x): return honest(x)[:, :1].expand(-1, x.shape[1])\n"),
    "a result in the argument": (ROW, ROW_HONEST + "def candidate(x): return x.copy_(honest(x))\n"),
    "a result of another dtype": (ROW, ROW_HONEST + "def candidate(x): return honest(x.double())\n"),
    "a shape of its own": (ROW, ROW_HONEST + "def candidate(x): return honest(x)[None]\n"),
}
WRONG = {**COUNTS, **VALUES, **PRECISION, **MODES, **GRADIENTS, **RESULTS}

SOUND = {  # honest candidates that keep state beside their results
    "a buffer that moves": (
        PRODUCT,
        HONEST
        + """
class Kept:
    def __init__(self): self.four = torch.full((), 4.0)
KEPT = Kept()
def candidate(x, w):
    KEPT.four = KEPT.four.to(x.device)
    if KEPT.four.device != x.device: raise RuntimeError('no device')
    return F.linear(x, w.t()).div_(KEPT.four).tanh_()
""",
    ),
    "a plan for each shape": (
        PRODUCT,
        HONEST
        + """
PLANS, HITS = {}, {'n': 0}
def plan(key):
    if key not in PLANS:
        PLANS[key] = max(1, key[0] // 8)
    else:
        HITS['n'] += 1
    return PLANS[key]
def candidate(x, w):
    return torch.cat([honest(part, w) for part in x.split(plan((x.shape[0], w.shape[1])))])
def report(): print('hits:', HITS['n'])
""",
    ),
    "room that is used again": (
        PRODUCT,
        HONEST
        + """
ROOM = {}
def candidate(x, w):
    key = x.shape[0], w.shape[1]
    if key not in ROOM or ROOM[key].device != x.device:
        ROOM[key] = x.new_empty(key)
    total = ROOM[key]
    total.zero_()
    total.addmm_(x, w)
    return torch.tanh(total / 4)
""",
    ),
}
