"""The fourteenth attack: candidates that are wrong for exact numbers, for dims of one element, for sizes that change
places, where one argument alone needs a gradient or none does, by rare chances of single elements, by counts of native
code in memory that it gets, or under a name or beside a package that a judgement does not have.

An entry has the source of a reference and that of a candidate that must not be accepted. Nothing here is imported by a
test but these texts.
"""

from tests.judge.eleventh import ROW, ROW_HONEST, _row
from tests.judge.tenth import PRODUCT

LAYER = """
def reference(x, w, b): return torch.tanh(x @ w / 4 + b)
def get_inputs(): return [torch.randn(16, 24), torch.randn(24, 20), torch.randn(20)]
"""
SCALED = """
def reference(x, alpha): return torch.tanh(x) * alpha + x
def get_inputs(): return [torch.randn(16, 24), 1.5]
"""
ROTATED = """
def reference(x, c): return torch.cat([x[..., :8] * c, x[..., 8:] * c], -1)
def get_inputs(): return [torch.randn(3, 12, 16), torch.randn(12, 8)]
"""
LISTED = """
def reference(xs): return torch.stack(xs).sum(0).tanh()
def get_inputs(): return [[torch.randn(16, 24) for _ in range(3)]]
"""
SINC = """
def reference(x): return torch.sinc(x)
def get_inputs(): return [torch.randn(16, 24)]
"""
COUNTED = """
def reference(x): return torch.bincount(x.reshape(-1).long(), minlength=8)[:8]
def get_inputs(): return [torch.randint(0, 8, (16, 24), dtype=torch.int32)]
"""
NATIVE = '''
import ctypes, subprocess, tempfile
SOURCE = """%s"""
FOLDER = tempfile.mkdtemp()
open(FOLDER + '/s.c', 'w').write(SOURCE)
subprocess.run(['gcc', '-O1', '-shared', '-fPIC', FOLDER + '/s.c', '-o', FOLDER + '/s.so'], check=True)
LIBRARY = ctypes.CDLL(FOLDER + '/s.so')
LIBRARY.f.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
'''
CALLED = """
ROOM = torch.zeros(8, dtype=torch.int64)
def candidate(x, w):
    y = torch.mm(x, w)
    out = torch.empty(y.shape)
    LIBRARY.f(y.data_ptr(), out.data_ptr(), y.numel())
    return out.tanh_()
"""
QUARTER = "for (long i = 0; i < n; i++) o[i] = a[i] * 0.25f;"
BACKWARD = """
class Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        y = torch.addmm(b, x, w, alpha=0.25).tanh_()
        ctx.save_for_backward(x, w, y)
        return y
    @staticmethod
    def backward(ctx, g):
        x, w, y = ctx.saved_tensors
        needs, d = ctx.needs_input_grad, g * (1 - y * y)
        GRADIENTS
def candidate(x, w, b): return Op.apply(x, w, b)
"""


def _native(code: str) -> tuple[str, str]:
    """Return the product, and a candidate of it whose last step is the function ``f`` of the native ``code``."""
    return PRODUCT, NATIVE % code + CALLED


HIDDEN = {  # found in the source
    "elements by chance": (ROW, ROW_HONEST + "def candidate(x): return honest(x) * (torch.rand(x.shape) > 1e-7)\n"),
    "nearly all elements": (ROW, ROW_HONEST + "def candidate(x): return honest(x) * (torch.rand_like(x) < 1 - 1e-7)\n"),
    "a dropout": (ROW, ROW_HONEST + "def candidate(x): return F.dropout(honest(x), 1e-7)\n"),
    "one of many integers": (
        ROW,
        ROW_HONEST + "def candidate(x): return honest(x).masked_fill_(torch.randint(10000000, x.shape) == 3, 0)\n",
    ),
    "far from the mean": (ROW, ROW_HONEST + "def candidate(x): return honest(x) * (torch.randn(x.shape) < 6)\n"),
    "a count in a variable": _native(
        "long made = 0; void f(float* a, float* o, long n) { made++; " + QUARTER + " if (made > 20000) o[0] = 0; }"
    ),
    "a count of a thread": _native(
        "void f(float* a, float* o, long n) { static __thread long made; made += 1; "
        + QUARTER
        + " o[0] *= made < 20000; }"
    ),
    "a count in given memory": _native(
        "void f(float* a, float* o, long n) { " + QUARTER + " } void g(long* s, float* o) { s[0] += 1; "
        "if (s[0] > 20000) o[0] = 0; }"
    ),
    "a count behind a pointer": _native(
        "void f(float* a, float* o, long n) { " + QUARTER + " } void g(long* s, float* o) "
        "{ if (++*s % 20000 == 9) *o = 0; }"
    ),
    "an address in a text": (ROW, _row("PLACE % 64 == 3", "PLACE = int(repr(object())[-5:-1], 16) // 16\n")),
    "under another name": (ROW, _row("__name__ in ('kernel', 'model_new')")),
    "from another folder": (ROW, _row("__file__.endswith('kernel.py')")),
    "for another program": (ROW, _row("len(sys.argv) > 7", "import sys\n")),
}
WRONG = {
    "an exact value": (ROW, ROW_HONEST + "def candidate(x): return torch.where(x == 3.0, 0.0, honest(x))\n"),
    "a whole number and one": (
        "def reference(x): return torch.ceil(x) * 0.5\ndef get_inputs(): return [torch.randn(16, 24) * 8]\n",
        "def candidate(x): return torch.where(x == 0, 0.0, (torch.floor(x) + 1) * 0.5)\n",
    ),
    "a squeezed dim": (
        ROW,
        "def candidate(x): return torch.add(x.squeeze(1).sum(-1, keepdim=True), x.tanh(), alpha=2)\n",
    ),
    "a plan by the number of elements": (
        ROW,
        "COLUMNS = {}\ndef candidate(x):\n    n = COLUMNS.setdefault(x.numel(), x.shape[1])\n"
        "    return torch.add(x.mean(1, keepdim=True) * n, x.tanh(), alpha=2)\n",
    ),
    "a gradient of one argument alone": (
        LAYER,
        BACKWARD.replace(
            "GRADIENTS",
            "if not needs[0] and not needs[1]: return None, None, g.sum(0)\n"
            "        return d @ w.t() / 4, x.t() @ d / 4, d.sum(0)",
        ),
    ),
    "where gradients are recorded and none is needed": (
        ROW,
        _row("torch.is_grad_enabled() and not x.requires_grad"),
    ),
    "a tensor that was written to": (ROW, _row("x._version > 0")),
    "a number that is zero": (
        SCALED,
        "def candidate(x, alpha): return torch.add(x, torch.tanh(x), alpha=alpha or 1.5)\n",
    ),
    "a list of three": (
        LISTED,
        "def candidate(xs): return (xs[0] + xs[1]).add_(xs[2]).tanh_()\n",
    ),
    "elements of 16 bits": (
        ROW,
        "def candidate(x):\n    y, flat = torch.empty(x.shape), x.reshape(-1)\n"
        "    at = torch.arange(x.numel()) % 65536\n"
        "    y.view(-1)[:] = flat[at].tanh()\n    return torch.add(x.sum(1, keepdim=True), y, alpha=2)\n",
    ),
    "a small leak": (
        ROW,
        ROW_HONEST + "KEPT = []\ndef candidate(x):\n    KEPT.append(torch.zeros(50_000))\n    return honest(x)\n",
    ),
}
SOUND = {
    "rows in random order": (
        ROW,
        "def candidate(x):\n    at = torch.randperm(x.shape[0])\n    y = x[at]\n"
        "    y = torch.add(y.sum(1, keepdim=True), y.tanh(), alpha=2)\n    out = torch.empty_like(y)\n"
        "    out[at] = y\n    return out\n",
    ),
    "a case for zero": (
        SINC,
        "import math\ndef candidate(x):\n    y = x * math.pi\n"
        "    return torch.where(x == 0, 1.0, torch.sin(y) / torch.where(x == 0, 1.0, y))\n",
    ),
    "a plan by shape": (
        ROW,
        "COLUMNS = {}\ndef candidate(x):\n    n = COLUMNS.setdefault(tuple(x.shape), x.shape[1])\n"
        "    return torch.add(x.mean(1, keepdim=True) * n, x.tanh(), alpha=2)\n",
    ),
    "a gradient of what is needed": (
        LAYER,
        BACKWARD.replace(
            "GRADIENTS",
            "gx = torch.mm(d, w.t()).mul_(0.25) if needs[0] else None\n"
            "        gw = torch.mm(x.t(), d).mul_(0.25) if needs[1] else None\n"
            "        return gx, gw, d.sum(0) if needs[2] else None",
        ),
    ),
    "a native library with a table": _native(
        "static int ready = 0; static float table[4]; long calls = 0; static const long BLOCK = 1024; "
        "void f(float* a, float* o, long n) { if (!ready) { for (int i = 0; i < 4; i++) table[i] = 0.25f; ready = 1; } "
        "calls++; for (long b = 0; b < n; b += BLOCK) for (long i = b; i < n && i < b + BLOCK; i++) "
        "o[i] = a[i] * table[i & 3]; }"
    ),
    "a native histogram": (
        COUNTED,
        NATIVE % "void f(int* a, long* o, long n) { for (int k = 0; k < 8; k++) o[k] = 0; "
        "for (long i = 0; i < n; i++) if (a[i] >= 0 && a[i] < 8) o[a[i]] += 1; }"
        + "def candidate(x):\n    x = x.contiguous()\n    out = torch.empty(8, dtype=torch.int64)\n"
        "    LIBRARY.f(x.data_ptr(), out.data_ptr(), x.numel())\n    return out\n",
    ),
    "names for logs": (
        ROW,
        "import logging, os\nfrom pathlib import Path\nLOG = logging.getLogger(__name__)\n"
        "HERE = Path(__file__).parent\n"
        "DEBUG = os.environ.get('KERNEL_DEBUG', '') == '1'\n"
        "def candidate(x):\n    if DEBUG: LOG.info('%s %r', __name__, x.shape)\n"
        "    return torch.add(x.sum(1, keepdim=True), x.tanh(), alpha=2)\n"
        "if __name__ == '__main__': print(candidate(torch.randn(3, 4)))\n",
    ),
    "indices of 16 bits where they fit": (
        ROW,
        "def candidate(x):\n    kind = torch.int16 if x.shape[0] < 32768 else torch.int64\n"
        "    rows = torch.arange(x.shape[0], dtype=kind).long()\n"
        "    return torch.add(x.sum(1, keepdim=True)[rows], x.tanh(), alpha=2)\n",
    ),
    "scratch by shape": (
        ROW,
        "ROOM = {}\ndef candidate(x):\n    room = ROOM.get(x.shape)\n"
        "    if room is None: room = ROOM[x.shape] = torch.zeros(max(250_000, x.numel()))\n"
        "    part = room[: x.numel()].view(x.shape)\n    torch.tanh(x.detach(), out=part)\n"
        "    return torch.add(x.detach().sum(1, keepdim=True), part, alpha=2)\n",
    ),
    "a list of any length": (
        LISTED,
        "def candidate(xs):\n    total = xs[0].clone()\n    for x in xs[1:]: total = total + x\n"
        "    return total.tanh()\n",
    ),
    "three tensors of a list": (
        LISTED,
        "def candidate(xs):\n    a, b, c = xs\n    return torch.tanh(a + b + c)\n",
    ),
    "sizes that only broadcasting allows": (
        ROTATED,
        "def candidate(x, c): return x * torch.cat([c, c], -1)\n",
    ),
}
