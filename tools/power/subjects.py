"""Kernels of the usual kinds, as text: what mutants are made of. Each has a reference that no mutant touches."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SUBJECTS", "Subject"]

HEAD = """
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor
import shiplap as sl
"""


@dataclass(frozen=True)
class Subject:
    """``declaration`` declares ``op``; ``kernel`` and ``backward`` are functions of these names, to be mutated.

    The kernel is in Python, in Triton (with its launcher ``kernel``), or a function of this name in C or CUDA C++.
    """

    name: str
    declaration: str
    kernel: str
    backward: str = ""
    language: str = "python"
    strided: tuple[str, ...] = ()
    workspace: str = ""
    device: str = "cpu"

    @property
    def compiled(self) -> bool:
        """Whether a compiler makes a library of the kernel."""
        return self.language in ("c", "cuda")

    def module(self, kernel: str, backward: str, namespace: str) -> str:
        """The whole file, with these versions of the two functions; without the kernel, if that is to be compiled."""
        bound = "op.backward(backward)\n" if backward else ""
        if not self.compiled:
            bound += f"op.kernel('{self.device}', kernel)\n"
        head = HEAD + ("import triton\nimport triton.language as tl\n" if self.language == "triton" else "")
        code = "" if self.compiled else kernel
        return "\n".join([head, self.declaration.replace("NS", namespace), code, backward, bound])


SUBJECTS = (
    Subject(
        "rms_norm",
        '@sl.op("NS::rms_norm")\ndef op(x: Float[Tensor, "n c"], w: Float[Tensor, "c"], eps: float = 1e-6) '
        '-> Float[Tensor, "n c"]:\n    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w\n',
        "def kernel(x, w, eps):\n    s = x.float() if x.itemsize < 4 else x\n"
        "    r = (s * s).sum(-1, keepdim=True) / max(1, x.shape[1])\n"
        "    return (s * torch.rsqrt(r + eps) * w).to(x.dtype)\n",
    ),
    Subject(
        "tiled_mm",
        '@sl.op("NS::mm")\ndef op(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:\n'
        "    return a @ b\n",
        "def kernel(a, b):\n    m, k = a.shape\n    n = b.shape[1]\n"
        "    out = torch.zeros(m, n, dtype=torch.float64)\n"
        "    for i in range(0, m, 64):\n        for j in range(0, k, 32):\n"
        "            out[i : i + 64] += (a[i : i + 64, j : j + 32] @ b[j : j + 32]).double()\n"
        "    return out.to(a.dtype)\n",
        "def backward(grad, saved, needs):\n    return {'a': grad @ saved.b.T if needs.a else None,\n"
        "            'b': saved.a.T @ grad if needs.b else None}\n",
    ),
    Subject(
        "softmax",
        '@sl.op("NS::softmax", requires=("c >= 1",))\ndef op(x: Float[Tensor, "n c"], scale: float = 1.0) '
        '-> Float[Tensor, "n c"]:\n    return torch.softmax(x * scale, -1)\n',
        "def kernel(x, scale):\n    s = x.float() * scale if x.itemsize < 4 else x * scale\n"
        "    e = torch.exp(s - s.amax(-1, keepdim=True))\n    return (e / e.sum(-1, keepdim=True)).to(x.dtype)\n",
        "def backward(grad, saved, needs):\n    y = torch.softmax(saved.x * saved.scale, -1)\n"
        "    return {'x': (grad - (grad * y).sum(-1, keepdim=True)) * y * saved.scale}\n",
    ),
    Subject(
        "gather_sum",
        '@sl.op("NS::gather_sum")\ndef op(x: Float[Tensor, "n c"], index: Int64[Tensor, "k"]) -> Float[Tensor, "c"]:\n'
        "    return x[index].sum(0)\n",
        "def kernel(x, index):\n    acc = torch.zeros(x.shape[1], dtype=torch.float64)\n"
        "    for start in range(0, len(index), 128):\n"
        "        acc = acc + x[index[start : start + 128]].double().sum(0)\n    return acc.to(x.dtype)\n",
    ),
    Subject(
        "huber",
        '@sl.op("NS::huber")\ndef op(x: Float[Tensor, "n"], y: Float[Tensor, "n"], delta: float = 1.5) '
        '-> Float[Tensor, "n"]:\n    d = (x - y).abs()\n'
        "    return torch.where(d < delta, 0.5 * d * d, delta * (d - 0.5 * delta))\n",
        "def kernel(x, y, delta):\n    d = x - y\n    a = d.abs()\n"
        "    return torch.where(a < delta, d * d * 0.5, (a - delta * 0.5) * delta)\n",
        "def backward(grad, saved, needs):\n    d = saved.x - saved.y\n"
        "    g = torch.where(d.abs() < saved.delta, d, saved.delta * d.sign()) * grad\n"
        "    return {'x': g if needs.x else None, 'y': -g if needs.y else None}\n",
    ),
)
