"""Forty honest kernels: functions of torch, compiled functions, Triton's tutorials for a CPU, C, and numpy.

Each is ``(inputs, reference, candidate)`` as source: a list of arguments, the body of ``reference(...)`` and that of
``candidate(...)``, both with the arguments ``x, y, z`` as far as there are inputs.
"""

C = """
import ctypes, os, subprocess, tempfile
folder = tempfile.mkdtemp()
path = os.path.join(folder, "k.c")
open(path, "w").write(SOURCE)
subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", path + ".so", path, "-lm"], check=True)
run = ctypes.CDLL(path + ".so").run
def pointer(t):
    if not t.is_contiguous():
        raise ValueError("contiguous arguments are required")
    return ctypes.c_void_p(t.data_ptr())
"""

R = "torch.randn"
HONEST = {
    # ---- functions of torch that compute the same otherwise
    "relu": (f"{R}(64, 96)", "torch.relu(x)", "torch.where(x > 0, x, 0.0)"),
    "gelu": (
        f"{R}(64, 96)",
        "0.5 * x * (1 + torch.erf(x / 2 ** 0.5))",
        "F.gelu(x)",
    ),
    "silu": (f"{R}(64, 96)", "x / (1 + torch.exp(-x))", "F.silu(x)"),
    "softplus": (f"{R}(64, 96)", "F.softplus(x)", "torch.logaddexp(x, torch.zeros(()))"),
    "mish": (f"{R}(64, 96)", "x * torch.tanh(torch.log1p(torch.exp(x)))", "F.mish(x)"),
    "log softmax": (f"{R}(32, 200)", "x - torch.logsumexp(x, 1, keepdim=True)", "F.log_softmax(x, 1)"),
    "mean of squares": (f"{R}(64, 128)", "(x * x).mean(1)", "torch.linalg.vector_norm(x, dim=1).square() / x.shape[1]"),
    "linear": (
        f"{R}(64, 96), {R}(96, 48), {R}(48)",
        "x @ y + z",
        "torch.addmm(z, x, y)",
    ),
    "batched product": (
        f"{R}(4, 24, 32), {R}(4, 32, 16)",
        "torch.bmm(x, y)",
        "(x.unsqueeze(3) * y.unsqueeze(1)).sum(2)",
    ),
    "outer product": (f"{R}(64), {R}(96)", "torch.outer(x, y)", "x.unsqueeze(1) * y.unsqueeze(0)"),
    "distance": (
        f"{R}(48, 16), {R}(32, 16)",
        "((x[:, None] - y[None]) ** 2).sum(2)",
        "torch.cdist(x.double(), y.double()).square().float()",
    ),
    "convolution": (
        f"{R}(2, 4, 12, 12), {R}(6, 4, 3, 3)",
        "F.conv2d(x, y, padding=1)",
        "(y.flatten(1) @ F.unfold(x, 3, padding=1)).view(x.shape[0], y.shape[0], x.shape[2], x.shape[3])",
    ),
    "pooling": (f"{R}(2, 4, 16, 16)", "F.avg_pool2d(x, 2)", "x.unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5))"),
    "cumulative sum": (f"{R}(32, 64)", "torch.cumsum(x, 1)", "x @ torch.ones(x.shape[1], x.shape[1]).triu()"),
    "sorted": (f"{R}(32, 65)", "torch.sort(x, 1).values", "x.topk(x.shape[1], 1, largest=False).values"),
    "gather of rows": (
        f"{R}(64, 32), torch.randint(0, 40, (50,))",
        "x[y]",
        "torch.index_select(x, 0, y)",
    ),
    "attention": (
        f"{R}(2, 24, 16), {R}(2, 24, 16), {R}(2, 24, 16)",
        "torch.softmax(x @ y.mT / 4.0, -1) @ z",
        "F.scaled_dot_product_attention(x, y, z, scale=0.25)",
    ),
    "layer norm": (
        f"{R}(64, 96), {R}(96), {R}(96)",
        "(x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt() * y + z",
        "F.layer_norm(x, (x.shape[1],), y, z, 1e-5)",
    ),
    "rms norm": (
        f"{R}(64, 96), {R}(96)",
        "x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6) * y",
        "F.rms_norm(x, (x.shape[1],), y, 1e-6)",
    ),
    "two results": (
        f"{R}(48, 64)",
        "x.amax(1), x.amin(1)",
        "tuple(v.contiguous() for v in torch.aminmax(x, dim=1))[::-1]",
    ),
    # ---- Triton's tutorials, block by block
    "vector add in blocks": (
        f"{R}(1000), {R}(1000)",
        "x + y",
        """
    out = torch.empty_like(x)
    for at in range(0, x.shape[0], 128):
        torch.sub(x[at : at + 128], y[at : at + 128], alpha=-1, out=out[at : at + 128])
    return out""",
    ),
    "fused softmax in rows": (
        f"{R}(37, 150)",
        "torch.softmax(x, 1)",
        """
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        torch.exp(x[row] - x[row].amax(), out=out[row])
        out[row] /= out[row].sum()
    return out""",
    ),
    "matrix product in tiles": (
        f"{R}(70, 96), {R}(96, 45)",
        "x @ y",
        """
    out = torch.zeros(x.shape[0], y.shape[1])
    for i in range(0, x.shape[0], 32):
        for j in range(0, y.shape[1], 32):
            for k in range(0, x.shape[1], 32):
                out[i : i + 32, j : j + 32] += x[i : i + 32, k : k + 32] @ y[k : k + 32, j : j + 32]
    return out""",
    ),
    "dropout by a mask": (
        f"{R}(900), torch.randint(0, 2, (900,))",
        "x * y.to(x.dtype) * 2.0",
        "torch.where(y.ne(0), x + x, 0.0) if int(y.max()) < 2 else x * y * 2",
    ),
    "layer norm by Welford": (
        f"{R}(40, 72), {R}(72), {R}(72)",
        "F.layer_norm(x, (x.shape[1],), y, z)",
        """
    mean, square, wide = torch.zeros(x.shape[0], dtype=torch.float64), torch.zeros(x.shape[0]), x.double()
    square = square.double()
    for n in range(x.shape[1]):
        delta = wide[:, n] - mean
        mean = mean + delta / (n + 1)
        square = square + delta * (wide[:, n] - mean)
    scale = torch.rsqrt(square / x.shape[1] + 1e-5)
    return ((wide - mean[:, None]) * scale[:, None]).float() * y + z""",
    ),
    "attention with an online softmax": (
        f"{R}(40, 16), {R}(56, 16), {R}(56, 16)",
        "torch.softmax(x @ y.t() / 4.0, -1) @ z",
        """
    most = torch.full((x.shape[0], 1), float("-inf"))
    total, out = torch.zeros(x.shape[0], 1), torch.zeros(x.shape[0], z.shape[1])
    for at in range(0, y.shape[0], 16):
        scores = x @ y[at : at + 16].t() * 0.25
        now = torch.maximum(most, scores.amax(1, keepdim=True))
        weights, kept = torch.exp(scores - now), torch.exp(most - now)
        total = total * kept + weights.sum(1, keepdim=True)
        out = out * kept + weights @ z[at : at + 16]
        most = now
    return out / total""",
    ),
    "grouped products": (
        f"{R}(3, 20, 24), {R}(3, 24, 18)",
        "torch.bmm(x, y)",
        "return torch.stack([a @ b for a, b in zip(x, y)])",
    ),
    "persistent product": (
        f"{R}(64, 80), {R}(80, 64)",
        "x @ y",
        """
    out, tiles = torch.empty(x.shape[0], y.shape[1]), -(-x.shape[0] // 16)
    for program in range(3):
        for tile in range(program, tiles, 3):
            torch.mm(x[tile * 16 : tile * 16 + 16], y, out=out[tile * 16 : tile * 16 + 16])
    return out""",
    ),
    "block scaled product": (
        f"torch.randint(-8, 8, (48, 64)), torch.rand(48, 1) + 0.5, {R}(64, 32)",
        "(x.to(torch.float32) * y) @ z",
        "(x.float() @ z) * y",
    ),
    # ---- compiled
    "compiled chain": (
        f"{R}(64, 96)",
        "torch.sin(x) * torch.cos(x) + x",
        "return chain(x)",
    ),
    "compiled normalisation": (
        f"{R}(64, 96), {R}(96)",
        "x / x.abs().amax(1, keepdim=True) * y",
        "return scaled(x, y)",
    ),
    # ---- C
    "saxpy in C": (f"{R}(1000), {R}(1000)", "2.5 * x + y", "C"),
    "row sums in C": (f"{R}(40, 130)", "x.sum(1)", "C"),
    "relu in C": (f"{R}(40, 130)", "torch.relu(x)", "C"),
    "softmax in C": (f"{R}(30, 70)", "torch.softmax(x, 1)", "C"),
    # ---- numpy
    "numpy softmax": (
        f"{R}(48, 64)",
        "torch.softmax(x, 1)",
        """
    e = numpy.exp(x.numpy() - x.numpy().max(1, keepdims=True))
    return torch.from_numpy(e / e.sum(1, keepdims=True))""",
    ),
    "numpy product": (f"{R}(48, 64), {R}(64, 40)", "x @ y", "torch.from_numpy(x.numpy() @ y.numpy())"),
    "numpy threads": (
        f"{R}(64, 64)",
        "torch.exp(x) - 1",
        """
    out = torch.empty_like(x)
    parts = [(a.numpy(), b.numpy()) for a, b in zip(x.split(16), out.split(16))]
    list(POOL.map(lambda p: numpy.expm1(p[0], out=p[1]), parts))
    return out""",
    ),
    "a constant kept": (
        f"{R}(48, 64)",
        "x * torch.linspace(0, 1, x.shape[1])",
        "x.mul(ramp(x.shape[1]))",
    ),
    "one result for many": (
        f"{R}(3000)",
        "x.double().square().sum().sqrt().float()",
        "torch.linalg.vector_norm(x.double()).float()",
    ),
}

HEAD = {
    "compiled chain": "@torch.compile\ndef chain(x):\n    return torch.addcmul(x, x.sin(), x.cos())\n",
    "compiled normalisation": "@torch.compile\ndef scaled(x, y):\n    return x * (y / x.abs().amax(1, keepdim=True))\n",
    "numpy threads": "from concurrent.futures import ThreadPoolExecutor\nPOOL = ThreadPoolExecutor(2)\n",
    "a constant kept": "import functools\n@functools.cache\ndef ramp(n):\n"
    "    return torch.from_numpy(numpy.linspace(0, 1, n, dtype=numpy.float32))\n",
}

SOURCES = {
    "saxpy in C": (
        "void run(const float *x, const float *y, float *o, long n)"
        " { for (long i = 0; i < n; i++) o[i] = 2.5f * x[i] + y[i]; }",
        "out = torch.empty_like(x); run(pointer(x), pointer(y), pointer(out), ctypes.c_long(x.numel())); return out",
    ),
    "row sums in C": (
        "void run(const float *x, float *o, long n, long c) { for (long i = 0; i < n; i++) { double s = 0;"
        " for (long j = 0; j < c; j++) s += x[i * c + j]; o[i] = s; } }",
        "out = torch.empty(x.shape[0]); run(pointer(x), pointer(out), *map(ctypes.c_long, x.shape)); return out",
    ),
    "relu in C": (
        "void run(const float *x, float *o, long n) { for (long i = 0; i < n; i++) o[i] = x[i] > 0 ? x[i] : 0; }",
        "out = torch.empty_like(x); run(pointer(x), pointer(out), ctypes.c_long(x.numel())); return out",
    ),
    "softmax in C": (
        "#include <math.h>\n"
        "void run(const float *x, float *o, long n, long c) { for (long i = 0; i < n; i++, x += c, o += c) {"
        " float m = x[0]; double s = 0; for (long j = 1; j < c; j++) m = x[j] > m ? x[j] : m;"
        " for (long j = 0; j < c; j++) s += o[j] = expf(x[j] - m); for (long j = 0; j < c; j++) o[j] /= s; } }",
        "out = torch.empty_like(x); run(pointer(x), pointer(out), *map(ctypes.c_long, x.shape)); return out",
    ),
}
START = "import numpy\nimport torch\nF = torch.nn.functional\n"


def reference_of(name: str) -> str:
    """The source of the trusted file."""
    inputs, body, _ = HONEST[name]
    return f"{START}def reference({names(name)}):\n    return {body}\ndef get_inputs():\n    return [{inputs}]\n"


def candidate_of(name: str) -> str:
    """The source of the candidate's file."""
    body = HONEST[name][2]
    head = START + HEAD.get(name, "")
    if body == "C":
        source, body = SOURCES[name]
        head += f"SOURCE = {source!r}\n{C}"
    elif "return" not in body:
        body = f"return {body}"
    return f"{head}def candidate({names(name)}):\n    {body.strip()}\n"


def names(name: str) -> str:
    """``x, y`` for two inputs."""
    inputs = HONEST[name][0]
    depth, count = 0, 1
    for letter in inputs:
        depth += (letter in "([") - (letter in ")]")
        count += letter == "," and depth == 0
    return ", ".join("xyz"[:count])
