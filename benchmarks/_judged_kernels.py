"""Kernels that right candidates of the judge's benchmark use: written for it, of libraries, and compiled by torch.

An entry of a table has the arguments of the reference, the source of its inputs, the source of its result, and the
source of the candidate. The kernels of ``LIGER`` need the package liger-kernel, which is imported by the candidate.
"""

from _judged_cuda import NORM_IN_CUDA, SQUARED_IN_CUDA, SQUARED_INLINE, TURNED_IN_CUDA

ADD = """
@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)

def candidate(x, y):
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    add[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
    return out
"""
SOFTMAX = """
@triton.jit
def softmax(x, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * cols + at, at < cols, float("-inf"))
    e = tl.exp(row - tl.max(row, 0))
    tl.store(out + tl.program_id(0) * cols + at, e / tl.sum(e, 0), at < cols)

def candidate(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    softmax[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""
NORM = """
@triton.jit
def norm(x, w, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * cols + at, at < cols, 0.0)
    scale = tl.rsqrt(tl.sum(row * row, 0) / cols + 1e-6)
    tl.store(out + tl.program_id(0) * cols + at, row * scale * tl.load(w + at, at < cols, 0.0), at < cols)

def candidate(x, w):
    x, w = x.contiguous(), w.contiguous()
    out = torch.empty_like(x)
    norm[(x.shape[0],)](x, w, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""
PRODUCT = """
@triton.jit
def product(x, w, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + rows[:, None] * K + k, (rows[:, None] < M) & (k < K), 0.0)
        b = tl.load(w + k[:, None] * N + cols, (k[:, None] < K) & (cols < N), 0.0)
        total += tl.dot(a, b, input_precision="ieee")
    y = libdevice.tanh(total / 5.0)  # 2 * sigmoid(2 * x) - 1 has no digits left near zero
    tl.store(out + rows[:, None] * N + cols, 5.0 * y, (rows[:, None] < M) & (cols < N))

def candidate(x, w):
    x, w = x.contiguous(), w.contiguous()
    out = torch.empty(x.shape[0], w.shape[1], device=x.device)
    grid = triton.cdiv(x.shape[0], 64), triton.cdiv(w.shape[1], 64)
    product[grid](x, w, out, x.shape[0], w.shape[1], x.shape[1], BM=64, BN=64, BK=32)
    return out
"""
GELU = """
@triton.jit
def gelu(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n)
    tl.store(out + at, 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476)), at < n)

def candidate(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    gelu[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
    return out
"""
SUM = """
@triton.jit
def row_sum(x, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + tl.program_id(0) * cols + at, at < cols, 0.0), 0))

def candidate(x):
    x = x.contiguous()
    out = torch.empty(x.shape[0], device=x.device)
    row_sum[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""
LAYER = """
@triton.jit
def layer(x, w, b, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * cols + at, at < cols, 0.0)
    centred = tl.where(at < cols, row - tl.sum(row, 0) / cols, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / cols + 1e-5)
    y = centred * scale * tl.load(w + at, at < cols, 0.0) + tl.load(b + at, at < cols, 0.0)
    tl.store(out + tl.program_id(0) * cols + at, y, at < cols)

def candidate(x, w, b):
    x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
    out = torch.empty_like(x)
    layer[(x.shape[0],)](x, w, b, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""
GATED = """
@triton.jit
def gated(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n)
    tl.store(out + at, v / (1.0 + tl.exp(-v)) * tl.load(y + at, at < n), at < n)

def candidate(x, y):
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    gated[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
    return out
"""
CAP = "torch.tanh((x @ w) / 5.0) * 5.0"
PAIR = "torch.randn(1 << 22, device=D), torch.randn(1 << 22, device=D)"
HONEST = {  # arguments, inputs, reference, candidate
    "add": ("x, y", PAIR, "x + y", ADD),
    "softmax": ("x", "torch.randn(4096, 1000, device=D)", "torch.softmax(x, 1)", SOFTMAX),
    "rms norm": (
        "x, w",
        "torch.randn(4096, 1024, device=D), torch.randn(1024, device=D)",
        "x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6) * w",
        NORM,
    ),
    "capped product": ("x, w", "torch.randn(512, 256) / 4, torch.randn(256, 512) / 4", CAP, PRODUCT),
    "gelu": ("x", "torch.randn(1 << 22, device=D)", "x * 0.5 * (1 + torch.erf(x * 0.7071067811865476))", GELU),
    "row sum": ("x", "torch.randn(8192, 1024, device=D)", "x.sum(1)", SUM),
    "layer norm": (
        "x, w, b",
        "torch.randn(4096, 1024, device=D), torch.randn(1024, device=D), torch.randn(1024, device=D)",
        "torch.nn.functional.layer_norm(x, (x.shape[1],), w, b)",
        LAYER,
    ),
    "gated": ("x, y", PAIR, "torch.nn.functional.silu(x) * y", GATED),
    "larger product": ("x, w", "torch.randn(1024, 1024) / 8, torch.randn(1024, 1024) / 8", CAP, PRODUCT),
}
SWIGLU = """
@triton.jit
def swiglu(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n).to(tl.float32)
    tl.store(out + at, v / (1.0 + tl.exp(-v)) * tl.load(y + at, at < n).to(tl.float32), at < n)

def candidate(x, y):
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        swiglu[(triton.cdiv(x.numel(), 2048),)](x, y, out, x.numel(), BLOCK=2048, num_warps=8)
    return out
"""
NORM_OF_ROWS = """
@triton.jit
def norm(x, w, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    start = tl.program_id(0).to(tl.int64) * cols
    row = tl.load(x + start + at, at < cols, 0.0)
    scale = tl.rsqrt(tl.sum(row * row, 0) / cols + 1e-6)
    tl.store(out + start + at, row * scale * tl.load(w + at, at < cols, 0.0), at < cols)

def candidate(x, w):
    x, w = x.contiguous(), w.contiguous()
    out = torch.empty_like(x)
    norm[(x.shape[0],)](x, w, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
    return out
"""
SOFTMAX_OF_ROWS = """
@triton.jit
def softmax(x, out, cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    start = tl.program_id(0).to(tl.int64) * cols
    row = tl.load(x + start + at, at < cols, float("-inf"))
    e = tl.exp(row - tl.max(row, 0))
    tl.store(out + start + at, e / tl.sum(e, 0), at < cols)

def candidate(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    softmax[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
    return out
"""
COMPILED_NORM = """
@torch.compile(dynamic=True)
def candidate(x, w):
    return x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6) * w
"""
COMPILED_GELU = """
@torch.compile(dynamic=True)
def candidate(x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
"""
LARGE = "torch.randn(4096, 4096), torch.rand(4096) + 0.5"
WIDE = "torch.randn(4096, 11008), torch.randn(4096, 11008)"
RMS = "x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6) * w"
TANH = "0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))"
EXPS = "(x - x.amax(1, True)).exp() / (x - x.amax(1, True)).exp().sum(1, True)"
REAL = {  # kernels at sizes of language models
    "real rms norm": ("x, w", LARGE, RMS, NORM_OF_ROWS),
    "real softmax": ("x", "torch.randn(8192, 4096)", EXPS, SOFTMAX_OF_ROWS),
    "real swiglu": ("x, y", WIDE, "x * torch.sigmoid(x) * y", SWIGLU),
    "real swiglu in bfloat16": (
        "x, y",
        "*(torch.randn(4096, 11008, dtype=torch.bfloat16) for _ in range(2)),",
        "torch.nn.functional.silu(x) * y",
        SWIGLU,
    ),
    "real compiled rms norm": ("x, w", LARGE, RMS, COMPILED_NORM),
    "real compiled gelu": ("x", "torch.randn(4096, 4096)", TANH, COMPILED_GELU),
    "real squared relu in CUDA C++": (
        "x",
        "torch.randn(4096, 8192)",
        "torch.relu(x) ** 2",
        SQUARED_IN_CUDA,
    ),
}

LIGER_OP = """
from liger_kernel.ops.{module} import {function}
def candidate({args}):
    return {function}.apply({passed})
"""


def _liger(module: str, function: str, args: str, passed: str = "") -> str:
    """Return the source of a candidate that calls a function of Liger with ``passed`` for its arguments ``args``."""
    return LIGER_OP.format(module=module, function=function, args=args, passed=passed or args)


ROWS = "torch.randn(4096, 4096), torch.rand(4096) + 0.5"
ROWS_AND_BIAS = f"{ROWS}, torch.randn(4096)"
ROWS_IN_16_BITS = "torch.randn(4096, 4096).bfloat16(), (torch.rand(4096) + 0.5).bfloat16()"
RMS_OF_GEMMA = "x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6) * (1 + w)"
RMS_IN_FLOAT = "(x.float() * torch.rsqrt((x.float() ** 2).mean(1, keepdim=True) + 1e-6)).to(x.dtype) * w"
POLY = (
    "(lambda n, a, b, c: a * n(x**3) + b * n(x * x) + c * n(x) + d)(lambda u: " + RMS[:-4].replace("x", "u") + ", *w)"
)
ADDED = "(lambda s: (s * torch.rsqrt((s * s).mean(1, keepdim=True) + 1e-6) * w, s))(x + r)"
LIGER = {
    "liger rms norm": (
        "x, w",
        ROWS,
        RMS,
        _liger("rms_norm", "LigerRMSNormFunction", "x, w", "x, w, 1e-6, 0.0, 'llama', False"),
    ),
    "liger rms norm in bfloat16": (
        "x, w",
        ROWS_IN_16_BITS,
        RMS_IN_FLOAT,
        _liger("rms_norm", "LigerRMSNormFunction", "x, w", "x, w, 1e-6, 0.0, 'llama', False"),
    ),
    "liger rms norm of Gemma": (
        "x, w",
        "torch.randn(4096, 4096), torch.randn(4096) / 4",
        RMS_OF_GEMMA,
        _liger("rms_norm", "LigerRMSNormFunction", "x, w", "x, w, 1e-6, 1.0, 'gemma', False"),
    ),
    "liger layer norm": (
        "x, w, b",
        ROWS_AND_BIAS,
        "torch.nn.functional.layer_norm(x, (x.shape[1],), w, b)",
        _liger("layer_norm", "LigerLayerNormFunction", "x, w, b", "x, w, b, 1e-5"),
    ),
    "liger softmax": ("x", "torch.randn(8192, 4096)", EXPS, _liger("softmax", "LigerSoftmaxFunction", "x")),
    "liger swiglu": (
        "x, y",
        WIDE,
        "torch.nn.functional.silu(x) * y",
        _liger("swiglu", "LigerSiLUMulFunction", "x, y"),
    ),
    "liger geglu": (
        "x, y",
        WIDE,
        "torch.nn.functional.gelu(x, approximate='tanh') * y",
        _liger("geglu", "LigerGELUMulFunction", "x, y"),
    ),
    "liger squared relu": (
        "x",
        "torch.randn(4096, 8192)",
        "torch.relu(x) ** 2",
        _liger("relu_squared", "LigerReLUSquaredFunction", "x"),
    ),
    "liger dynamic tanh": (
        "x, a, w, b",
        "torch.randn(4096, 4096), torch.rand(1) + 0.5, torch.rand(4096) + 0.5, torch.randn(4096)",
        "w * torch.tanh(a * x) + b",
        _liger("dyt", "LigerDyTFunction", "x, a, w, b"),
    ),
    "liger poly norm": (
        "x, w, d",
        "torch.randn(4096, 4096), torch.rand(3) + 0.5, torch.randn(())",
        POLY,
        _liger("poly_norm", "LigerPolyNormFunction", "x, w, d", "x, w, d, 1e-6"),
    ),
    "liger added rms norm": (
        "x, r, w",
        "torch.randn(4096, 4096), torch.randn(4096, 4096), torch.rand(4096) + 0.5",
        ADDED,
        _liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", "x, r, w", "x, r, w, 1e-6, 0.0, 'llama', False"),
    ),
}
HALF_PRODUCT = """
@triton.jit
def product(x, w, out, M, N, K, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = tl.program_id(0) // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_n)
    rows = (group * GROUP + inside % height) * BM + tl.arange(0, BM)
    cols = inside // height * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + rows[:, None] * K + k, (rows[:, None] < M) & (k < K), 0.0)
        b = tl.load(w + k[:, None] * N + cols, (k[:, None] < K) & (cols < N), 0.0)
        total = tl.dot(a, b, total)
    at = rows[:, None] * N + cols
    tl.store(out + at, tl.where(total > 0, total, 0.01 * total).to(tl.float16), (rows[:, None] < M) & (cols < N))

def candidate(x, w):
    x, w = x.contiguous(), w.contiguous()
    M, N, K = x.shape[0], w.shape[1], x.shape[1]
    out = torch.empty(M, N, device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, 128) * triton.cdiv(N, 128),)
    product[grid](x, w, out, M, N, K, GROUP=8, BM=128, BN=128, BK=64, num_warps=8, num_stages=3)
    return out
"""
ATTENTION = """
@triton.jit
def attend(q, k, v, out, scale, M, N, D, E, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    head, rows = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    query = tl.load(q + head * M * D + rows[:, None] * D + d, (rows[:, None] < M) & (d < D), 0.0)
    top, sums = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, BE), tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        key = tl.load(k + head * N * D + n * D + d[:, None], (n < N) & (d[:, None] < D), 0.0)
        value = tl.load(v + head * N * E + n[:, None] * E + e, (n[:, None] < N) & (e < E), 0.0)
        score = tl.where(n < N, tl.dot(query, key) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight, shrink = tl.exp(score - higher[:, None]), tl.exp(top - higher)
        sums = sums * shrink + tl.sum(weight, 1)
        total = tl.dot(weight.to(value.dtype), value, total * shrink[:, None])
        top = higher
    at = head * M * E + rows[:, None] * E + e
    tl.store(out + at, (total / sums[:, None]).to(out.dtype.element_ty), (rows[:, None] < M) & (e < E))

def candidate(q, k, v):
    outer = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (t.expand(*outer, *t.shape[-2:]).contiguous() for t in (q, k, v))
    (M, D), (N, E) = q.shape[-2:], v.shape[-2:]
    out = torch.empty(*outer, M, E, device=q.device, dtype=q.dtype)
    heads = q.numel() // max(1, M * D)
    blocks = [max(16, triton.next_power_of_2(n)) for n in (D, E)]
    attend[(triton.cdiv(M, 64), heads)](q, k, v, out, 0.125, M, N, D, E, BM=64, BN=64, BD=blocks[0], BE=blocks[1])
    return out
"""
LOG_SOFTMAX = """
@triton.jit
def log_softmax(x, out, cols, BLOCK: tl.constexpr):
    at, start = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64) * cols
    row = tl.load(x + start + at, at < cols, float("-inf"))
    row -= tl.max(row, 0)
    tl.store(out + start + at, row - tl.log(tl.sum(tl.exp(row), 0)), at < cols)

def candidate(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    log_softmax[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
    return out
"""
RUNNING_SUM = """
@triton.jit
def add(a, b):
    return a + b

@triton.jit
def running_sum(x, out, cols, BLOCK: tl.constexpr):
    at, start = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64) * cols
    row = tl.load(x + start + at, at < cols, 0.0)
    tl.store(out + start + at, tl.associative_scan(row, 0, add), at < cols)

def candidate(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    running_sum[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""
ROW_MAXIMUM = """
@triton.jit
def row_maximum(x, out, cols, BLOCK: tl.constexpr):
    start, top = tl.program_id(0).to(tl.int64) * cols, tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, cols, BLOCK):
        at = first + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(x + start + at, at < cols, float("-inf")))
    tl.store(out + tl.program_id(0), tl.max(top, 0))

def candidate(x):
    x = x.contiguous()
    out = torch.empty(x.shape[0], device=x.device)
    row_maximum[(x.shape[0],)](x, out, x.shape[1], BLOCK=1024)
    return out
"""
LOOKUP = """
@triton.jit
def lookup(table, ids, out, width, BLOCK: tl.constexpr):
    row, at = tl.load(ids + tl.program_id(0)), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * width + at
    tl.store(out + place, tl.load(table + row * width + at, at < width), at < width)

def candidate(table, ids):
    table, ids = table.contiguous(), ids.contiguous()
    out = torch.empty(*ids.shape, table.shape[1], device=table.device, dtype=table.dtype)
    if out.numel():
        lookup[(ids.numel(), triton.cdiv(table.shape[1], 1024))](table, ids, out, table.shape[1], BLOCK=1024)
    return out
"""
LOWER = """
@triton.jit
def lower(x, out, rows, cols, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row.to(tl.int64) * cols + at
    kept = at <= row % rows
    tl.store(out + place, tl.where(kept, tl.load(x + place, (at < cols) & kept, 0.0), 0.0), at < cols)

def candidate(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    lower[(x.shape[0], triton.cdiv(x.shape[1], 1024))](x, out, x.shape[0], x.shape[1], BLOCK=1024)
    return out
"""
SCALED = "torch.softmax((q @ k.transpose(-1, -2)) * 0.125, -1) @ v"
HEADS = "*(torch.randn(4, 16, 1024, 64).half() for _ in range(3)),"
LIBRARY = {  # in the manner of tutorials and of libraries of Triton kernels
    "half product with an activation": (
        "x, w",
        "(torch.randn(2048, 2048) / 8).half(), (torch.randn(2048, 2048) / 8).half()",
        "torch.nn.functional.leaky_relu(x @ w, 0.01)",
        HALF_PRODUCT,
    ),
    "attention": ("q, k, v", HEADS, SCALED, ATTENTION),
    "log softmax": ("x", "torch.randn(8192, 4096)", "torch.log_softmax(x, 1)", LOG_SOFTMAX),
    "running sum": ("x", "torch.randn(8192, 2048)", "torch.cumsum(x, 1)", RUNNING_SUM),
    "row maximum": ("x", "torch.randn(8192, 8192)", "x.amax(1)", ROW_MAXIMUM),
    "lookup": (
        "table, ids",
        "torch.randn(32000, 1024), torch.randint(0, 32000, (8192,))",
        "table[ids]",
        LOOKUP,
    ),
    "lower triangle": ("x", "torch.randn(8192, 8192)", "torch.tril(x)", LOWER),
}


def _compiled(args: str, body: str) -> str:
    """Return the source of a candidate whose result is ``body``, compiled by torch for sizes that change."""
    return f"\n@torch.compile(dynamic=True)\ndef candidate({args}):\n    return {body}\n"


ROPED = "torch.cat([x[..., :64] * c - x[..., 64:] * s, x[..., 64:] * c + x[..., :64] * s], -1)"
TURNED = "x * torch.cat([c, c], -1) + torch.cat([-x[..., 64:], x[..., :64]], -1) * torch.cat([s, s], -1)"
COMPILED = {
    "compiled swiglu in bfloat16": (
        "x, y",
        "torch.randn(4096, 11008).bfloat16(), torch.randn(4096, 11008).bfloat16()",
        "torch.nn.functional.silu(x) * y",
        _compiled("x, y", "(x.float() * torch.sigmoid(x.float()) * y.float()).to(x.dtype)"),
    ),
    "compiled added layer norm": (
        "x, r, w, b",
        "torch.randn(4096, 4096), torch.randn(4096, 4096), torch.rand(4096) + 0.5, torch.randn(4096)",
        "torch.nn.functional.layer_norm(x + r, (x.shape[1],), w, b)",
        _compiled(
            "x, r, w, b",
            "((x + r) - (x + r).mean(1, True)) * ((x + r).var(1, correction=0, keepdim=True) + 1e-5) ** -0.5 * w + b",
        ),
    ),
    "compiled log of a sum": (
        "x",
        "torch.randn(8192, 8192)",
        "torch.logsumexp(x, 1)",
        _compiled("x", "(x - x.amax(1, True)).exp().sum(1).log() + x.amax(1)"),
    ),
    "compiled rotation": (
        "x, c, s",
        "torch.randn(4, 32, 2048, 128), torch.randn(2048, 64), torch.randn(2048, 64)",
        ROPED,
        _compiled("x, c, s", TURNED),
    ),
}
CUDA = {
    "rms norm in CUDA C++": ("x, w", ROWS, RMS, NORM_IN_CUDA),
    "turned rows in CUDA C++": (
        "x",
        "torch.randn(8192, 4096)",
        "(2 * x + 1).t().contiguous()",
        TURNED_IN_CUDA,
    ),
}
KERNELS = HONEST | REAL | LIGER | LIBRARY | COMPILED | CUDA
SLOW_TO_COMPILE = {
    "squared relu with headers of torch": ("x", "torch.randn(4096, 8192)", "torch.relu(x) ** 2", SQUARED_INLINE),
}
"""Headers of torch take a compiler half a minute, as long as the whole judgement of another kernel may take."""
WRONG = {
    "liger group norm": (
        "x, w, b",
        "torch.randn(32, 64, 4096), torch.rand(64) + 0.5, torch.randn(64)",
        "torch.nn.functional.group_norm(x, 8, w, b)",
        _liger("group_norm", "LigerGroupNormFunction", "x, w, b", "x, w, b, x.shape[1], 8, 1e-5"),
    ),
}
"""A kernel of others that is wrong: as the variance it takes the mean of the squares less the square of the mean, of
which nothing is left where the mean is large. The results are then off, or NaN.
"""
