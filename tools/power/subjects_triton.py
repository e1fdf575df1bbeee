"""Kernels in Triton with their launchers, run by its interpreter on the CPU."""

from __future__ import annotations

from subjects import Subject

__all__ = ["SUBJECTS"]

SUBJECTS = (
    Subject(
        "triton_mm",
        '@sl.op("NS::mm")\ndef op(a: Float32[Tensor, "m k"], b: Float32[Tensor, "k n"]) -> Float32[Tensor, "m n"]:\n'
        "    return a @ b\n",
        """
@triton.jit
def product(a, b, out, M, N, K, sa, sk, sb, sn, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    program = tl.program_id(0)
    down = tl.cdiv(M, BLOCK)
    across = tl.cdiv(N, BLOCK)
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    tile_m = first + program % (GROUP * across) % height
    tile_n = program % (GROUP * across) // height
    rows = tile_m * BLOCK + tl.arange(0, BLOCK)
    columns = tile_n * BLOCK + tl.arange(0, BLOCK)
    steps = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        place = start + steps
        left = (rows[:, None] < M) & (place[None, :] < K)
        right = (place[:, None] < K) & (columns[None, :] < N)
        x = tl.load(a + rows[:, None] * sa + place[None, :] * sk, mask=left, other=0.0)
        y = tl.load(b + place[:, None] * sb + columns[None, :] * sn, mask=right, other=0.0)
        total += tl.dot(x, y, input_precision="ieee")
    tl.store(out + rows[:, None] * N + columns[None, :], total, mask=(rows[:, None] < M) & (columns[None, :] < N))


def kernel(a, b):
    (m, k), n = a.shape, b.shape[1]
    out = torch.zeros(m, n)
    if m and n and k:
        grid = (-(-m // 32) * -(-n // 32),)
        product[grid](a, b, out, m, n, k, *a.stride(), *b.stride(), BLOCK=32, GROUP=2)
    return out
""",
        language="triton",
    ),
    Subject(
        "triton_layer_norm",
        '@sl.op("NS::layer_norm", requires=("c >= 1", "c <= 4096"))\ndef op(x: Float32[Tensor, "n c"], '
        'w: Float32[Tensor, "c"], eps: float = 1e-3) -> Float32[Tensor, "n c"]:\n'
        "    y = x - x.mean(1, keepdim=True)\n"
        "    return y * torch.rsqrt(y.square().mean(1, keepdim=True) + eps) * w\n",
        """
@triton.jit
def norm(x, w, out, stride, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        total += tl.load(x + row * stride + start + lanes, mask=start + lanes < columns, other=0.0)
    mean = tl.sum(total, axis=0) / columns
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        value = tl.load(x + row * stride + start + lanes, mask=start + lanes < columns, other=0.0)
        centred = tl.where(start + lanes < columns, value - mean, 0.0)
        squares += centred * centred
    scale = 1 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)
    for start in range(0, columns, BLOCK):
        inside = start + lanes < columns
        value = tl.load(x + row * stride + start + lanes, mask=inside, other=0.0)
        weight = tl.load(w + start + lanes, mask=inside, other=0.0)
        tl.store(out + row * columns + start + lanes, (value - mean) * scale * weight, mask=inside)


def kernel(x, w, eps):
    x = x.contiguous()
    out = torch.empty_like(x)
    if len(x):
        norm[(len(x),)](x, w.contiguous(), out, x.stride(0), x.shape[1], eps, BLOCK=64)
    return out
""",
        language="triton",
    ),
    Subject(
        "triton_softmax",
        '@sl.op("NS::softmax", requires=("c >= 1",))\ndef op(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n c"]:\n'
        "    return torch.softmax(x, 1)\n",
        """
@triton.jit
def rows_of(x, out, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    lanes = tl.arange(0, BLOCK)[None, :]
    top = tl.full([ROWS, 1], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    for start in range(0, columns, BLOCK):
        inside = (row < rows) & (start + lanes < columns)
        value = tl.load(x + row * columns + start + lanes, mask=inside, other=-float("inf"))
        new = tl.maximum(top, tl.max(value, axis=1)[:, None])
        total = total * tl.exp(top - new) + tl.sum(tl.exp(value - new), axis=1)[:, None]
        top = new
    for start in range(0, columns, BLOCK):
        inside = (row < rows) & (start + lanes < columns)
        value = tl.load(x + row * columns + start + lanes, mask=inside, other=0.0)
        tl.store(out + row * columns + start + lanes, tl.exp(value - top) / total, mask=inside)


def kernel(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    if len(x):
        rows_of[(-(-len(x) // 8),)](x, out, len(x), x.shape[1], ROWS=8, BLOCK=64)
    return out
""",
        language="triton",
    ),
    Subject(
        "triton_histogram",
        '@sl.op("NS::histogram", requires=("bins >= 1",))\ndef op(x: Float32[Tensor, "n"], index: Int64[Tensor, "n"], '
        'bins: int = 7) -> Float32[Tensor, "bins"]:\n'
        "    return x.new_zeros(bins).index_add(0, index % bins, x)\n",
        """
@triton.jit
def tally(x, index, out, n, bins, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    where = tl.load(index + place, mask=inside, other=0)
    tl.atomic_add(out + where, tl.load(x + place, mask=inside, other=0.0), mask=inside & (where < bins))


def kernel(x, index, bins):
    out = torch.zeros(bins)
    if len(x):
        tally[(-(-len(x) // 64),)](x.contiguous(), (index % bins).contiguous(), out, len(x), bins, BLOCK=64)
    return out
""",
        language="triton",
    ),
)
