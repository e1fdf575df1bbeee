"""More kernels in Python with their gradients."""

from __future__ import annotations

from subjects import Subject

__all__ = ["SUBJECTS"]

WIDE = "    wide = lambda t: t.float() if t.itemsize < 4 else t\n"

SUBJECTS = (
    Subject(
        "attention",
        '@sl.op("NS::attention", requires=("n >= 1", "d >= 1"))\ndef op(q: Float[Tensor, "m d"], '
        'k: Float[Tensor, "n d"], v: Float[Tensor, "n e"]) -> Float[Tensor, "m e"]:\n'
        "    return torch.softmax(q @ k.T * q.shape[1] ** -0.5, 1) @ v\n",
        f"def kernel(q, k, v):\n{WIDE}"
        "    scores = wide(q) @ wide(k).T / q.shape[1] ** 0.5\n"
        "    weights = torch.exp(scores - scores.amax(1, keepdim=True))\n"
        "    return (weights @ wide(v) / weights.sum(1, keepdim=True)).to(v.dtype)\n",
        "def backward(grad, saved, needs):\n    scale = saved.q.shape[1] ** -0.5\n"
        "    p = torch.softmax(saved.q @ saved.k.T * scale, 1)\n    dp = grad @ saved.v.T\n"
        "    ds = p * (dp - (dp * p).sum(1, keepdim=True)) * scale\n"
        "    return {'q': ds @ saved.k, 'k': ds.T @ saved.q, 'v': p.T @ grad}\n",
    ),
    Subject(
        "gated",
        '@sl.op("NS::gated")\ndef op(x: Float[Tensor, "n c"], gate: Float[Tensor, "n c"], bias: Float[Tensor, "c"]) '
        '-> Float[Tensor, "n c"]:\n    return F.silu(gate) * (x + bias)\n',
        f"def kernel(x, gate, bias):\n{WIDE}    g = wide(gate)\n"
        "    return (g * torch.sigmoid(g) * (wide(x) + wide(bias))).to(x.dtype)\n",
        "def backward(grad, saved, needs):\n    s = torch.sigmoid(saved.gate)\n    gx = grad * saved.gate * s\n"
        "    slope = s * (1 + saved.gate * (1 - s))\n"
        "    return {'x': gx, 'gate': grad * (saved.x + saved.bias) * slope, 'bias': gx.sum(0)}\n",
    ),
    Subject(
        "cross_entropy",
        '@sl.op("NS::cross_entropy", requires=("c >= 1",))\ndef op(x: Float[Tensor, "n c"], '
        'target: Int64[Tensor, "n"], smoothing: float = 0.1) -> Float[Tensor, "n"]:\n    y = F.log_softmax(x, 1)\n'
        "    picked = y.gather(1, (target % x.shape[1])[:, None])[:, 0]\n"
        "    return -(1 - smoothing) * picked - smoothing * y.mean(1)\n",
        f"def kernel(x, target, smoothing):\n{WIDE}    y = wide(x)\n"
        "    total = torch.logsumexp(y, 1)\n    picked = y[torch.arange(y.shape[0]), target % y.shape[1]]\n"
        "    return ((1 - smoothing) * (total - picked) + smoothing * (total - y.mean(1))).to(x.dtype)\n",
        "def backward(grad, saved, needs):\n    c = saved.x.shape[1]\n"
        "    hot = F.one_hot(saved.target % c, c).to(grad.dtype)\n"
        "    soft = hot * (1 - saved.smoothing) + saved.smoothing / c\n"
        "    return {'x': grad[:, None] * (torch.softmax(saved.x, 1) - soft)}\n",
    ),
    Subject(
        "rope",
        '@sl.op("NS::rope", requires=("d % 2 == 0",))\ndef op(x: Float[Tensor, "n d"], base: float = 100.0) '
        '-> Float[Tensor, "n d"]:\n    half = x.shape[1] // 2\n'
        "    y = x.double()\n    angle = torch.arange(x.shape[0])[:, None].double() * "
        "torch.tensor(base).double() ** (-torch.arange(half) / max(half, 1))\n"
        "    a, b = y[:, :half], y[:, half:]\n"
        "    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 1).to(x.dtype)\n",
        "def kernel(x, base):\n    n, d = x.shape\n    half = d // 2\n"
        "    angle = torch.arange(n, dtype=torch.float64)[:, None] * abs(base) ** "
        "(-torch.arange(half, dtype=torch.float64) / max(half, 1))\n"
        "    out = torch.empty(n, d, dtype=torch.float64)\n"
        "    out[:, :half] = x[:, :half] * angle.cos() - x[:, half:] * angle.sin()\n"
        "    out[:, half:] = x[:, half:] * angle.cos() + x[:, :half] * angle.sin()\n    return out.to(x.dtype)\n",
    ),
    Subject(
        "group_norm",
        '@sl.op("NS::group_norm", requires=("groups >= 1", "c % groups == 0", "c >= 1"))\n'
        'def op(x: Float[Tensor, "n c"], w: Float[Tensor, "c"], groups: int = 2, eps: float = 1e-4) '
        '-> Float[Tensor, "n c"]:\n    y = x.double().view(x.shape[0], groups, -1) if x.is_contiguous() else '
        "x.double().reshape(x.shape[0], groups, x.shape[1] // groups)\n"
        "    y = y - y.mean(2, keepdim=True)\n    y = y * torch.rsqrt(y.square().mean(2, keepdim=True) + eps)\n"
        "    return (y.reshape(x.shape) * w).to(x.dtype)\n".replace(
            "view(x.shape[0], groups, -1)", "reshape(x.shape[0], groups, x.shape[1] // groups)"
        ),
        "def kernel(x, w, groups, eps):\n    n, c = x.shape\n    size = c // groups\n"
        "    out = torch.empty(n, c, dtype=torch.float64)\n    for g in range(groups):\n"
        "        part = x[:, g * size : (g + 1) * size].double()\n        mean = part.sum(1, keepdim=True) / size\n"
        "        spread = (part - mean).square().sum(1, keepdim=True) / size\n"
        "        out[:, g * size : (g + 1) * size] = (part - mean) / (spread + eps).sqrt()\n"
        "    return (out * w).to(x.dtype)\n",
    ),
    Subject(
        "sliding",
        '@sl.op("NS::sliding", dims={"m": "(n - k) // step + 1"}, requires=("k >= 1", "k <= n", "step >= 1"))\n'
        'def op(x: Float[Tensor, "n c"], k: int = 2, step: int = 1) -> Float[Tensor, "m c"]:\n'
        "    return x.unfold(0, k, step).mean(2)\n",
        "def kernel(x, k, step):\n    m = (x.shape[0] - k) // step + 1\n"
        "    out = torch.zeros(m, x.shape[1], dtype=torch.float64)\n    for i in range(k):\n"
        "        out += x[i : i + (m - 1) * step + 1 : step].double()\n    return (out / k).to(x.dtype)\n",
        "def backward(grad, saved, needs):\n    g = torch.zeros_like(saved.x)\n    m = grad.shape[0]\n"
        "    for i in range(saved.k):\n"
        "        g[i : i + (m - 1) * saved.step + 1 : saved.step] += grad / saved.k\n    return {'x': g}\n",
    ),
    Subject(
        "segments",
        '@sl.op("NS::segments", requires=("bins >= 1",))\ndef op(x: Float[Tensor, "n c"], index: Int64[Tensor, "n"], '
        'bins: int = 4) -> Float[Tensor, "bins c"]:\n    place = index % bins\n'
        "    total = x.new_zeros(bins, x.shape[1]).double().index_add(0, place, x.double())\n"
        "    count = torch.zeros(bins, dtype=torch.float64).index_add(0, place, torch.ones(len(x)).double())\n"
        "    return (total / count.clamp_min(1)[:, None]).to(x.dtype)\n",
        "def kernel(x, index, bins):\n    place = index % bins\n    order = place.argsort(stable=True)\n"
        "    ends = torch.bincount(place, minlength=bins).cumsum(0)\n"
        "    out = torch.zeros(bins, x.shape[1], dtype=torch.float64)\n    start = 0\n"
        "    for b in range(bins):\n        end = int(ends[b])\n        if end > start:\n"
        "            out[b] = x[order[start:end]].double().sum(0) / (end - start)\n        start = end\n"
        "    return out.to(x.dtype)\n",
        "def backward(grad, saved, needs):\n    place = saved.index % saved.bins\n"
        "    count = torch.bincount(place, minlength=saved.bins).clamp_min(1)\n"
        "    return {'x': (grad / count[:, None])[place]}\n",
    ),
    Subject(
        "quantise",
        '@sl.op("NS::quantise", requires=("c >= 1",))\ndef op(x: Float32[Tensor, "n c"], zero: int = 0) '
        '-> Float32[Tensor, "n c"]:\n'
        "    step = x.abs().amax(1, keepdim=True).clamp_min(1e-6) / 127\n"
        "    return ((x / step).round() + zero).clamp(-128, 127) - zero\n",
        "def kernel(x, zero):\n    step = torch.maximum(x.amax(1), -x.amin(1)).clamp_min(1e-6)[:, None] / 127\n"
        "    q = torch.round(x / step) + zero\n    return torch.minimum(torch.maximum(q, torch.tensor(-128.0)), "
        "torch.tensor(127.0)) - zero\n",
    ),
)
