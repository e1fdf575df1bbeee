"""Eight kernels from zero.

Run: python examples/eight_kernels.py

C, a pybind11 module, Triton forward and backward, non-maximum suppression, a paged
cache, dropout with a seed, a step of an optimiser over lists, and a plan behind a
handle. Each is audited, compiled with dynamic shapes, exported, and differentiated,
mapped and cast as far as it has a gradient, a batch or floats. Without a GPU, Triton's
interpreter runs the Triton kernels. Three of the ops are in language.py. The same with
``torch.library.custom_op``: eight_plain.py and language.py.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int64
from torch import Tensor

import shiplap as sl

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "build")]

import language
from language import dropout, nms, step


# --8<-- [start:rope]
@sl.op("eight::rope", requires="d % 2 == 0")
def rope(
    x: Float32[Tensor, "n h d"],
    cos: Float32[Tensor, "n d//2"],
    sin: Float32[Tensor, "n d//2"],
) -> Float32[Tensor, "n h d"]:
    """Turn the two halves of each row of x by the angles of its position."""
    a, b = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


rope.kernel("cpu", sl.cabi(HERE / "build" / "librope.so", "rope"))


@rope.backward
def _(grad: Tensor, saved: Any, needs: Any) -> dict[str, Tensor]:
    (a, b), (p, q) = saved.x.chunk(2, -1), grad.chunk(2, -1)
    return {
        "x": rope(grad, saved.cos, -saved.sin),
        "cos": (p * a + q * b).sum(1),
        "sin": (q * a - p * b).sum(1),
    }


# --8<-- [end:rope]


# --8<-- [start:squash]
@sl.op("eight::squash")
def squash(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """x / (1 + |x|)."""
    return x / (1 + x.abs())


@squash.kernel("cpu", dtypes="float32")
def _(x: Tensor, *, out: Tensor) -> None:
    import squash_ext

    squash_ext.squash(x.contiguous().data_ptr(), out.data_ptr(), x.numel())


@squash.backward
def _(grad: Tensor, saved: Any, needs: Any) -> dict[str, Tensor]:
    return {"x": grad / (1 + saved.x.abs()).square()}


# --8<-- [end:squash]


# --8<-- [start:swish]
@triton.jit
def swish_kernel(x, out, numel_x, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < numel_x)
    tl.store(out + at, value / (1 + tl.exp(-value)), mask=at < numel_x)


@triton.jit
def swish_grad_kernel(grad, x, out, numel_x, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value, upper = (
        tl.load(x + at, mask=at < numel_x),
        tl.load(grad + at, mask=at < numel_x),
    )
    gate = 1 / (1 + tl.exp(-value))
    tl.store(out + at, upper * gate * (1 + value * (1 - gate)), mask=at < numel_x)


@sl.op("eight::swish")
def swish(x: Float32[Tensor, "n m"]) -> Float32[Tensor, "n m"]:
    """x * sigmoid(x)."""
    return x * x.sigmoid()


@sl.op("eight::swish_grad")
def swish_grad(
    grad: Float32[Tensor, "n m"], x: Float32[Tensor, "n m"]
) -> Float32[Tensor, "n m"]:
    """The gradient of swish."""
    gate = x.sigmoid()
    return grad * gate * (1 + x * (1 - gate))


for op, kernel in ((swish, swish_kernel), (swish_grad, swish_grad_kernel)):
    op.kernel(
        "cuda", sl.triton(kernel, grid="cdiv(n * m, BLOCK)", constants={"BLOCK": 64})
    )


@swish.backward
def _(grad: Tensor, saved: Any, needs: Any) -> dict[str, Tensor]:
    return {"x": swish_grad(grad, saved.x)}


@swish_grad.backward
def _(upper: Tensor, saved: Any, needs: Any) -> dict[str, Tensor]:
    gate = saved.x.sigmoid()
    slope = gate * (1 - gate)
    return {
        "grad": swish_grad(upper, saved.x),
        "x": upper * saved.grad * slope * (2 + saved.x * (1 - 2 * gate)),
    }


# --8<-- [end:swish]


# --8<-- [start:cache]
@sl.op("eight::write_", mutates=("caches", "scale"))
def write_(
    caches: list[Float[Tensor, "slots heads d"]],
    scale: Float[Tensor, "slots"] | None,
    rows: Float[Tensor, "n heads d"],
    slots: Int64[Tensor, "n"],
) -> None:
    """Write rows to their slots of every cache, and their largest values to scale, if
    there is one."""
    for cache in caches:
        cache[slots] = rows
    if scale is not None:
        scale[slots] = rows.abs().amax((1, 2))


@write_.samples
def _(
    rng: torch.Generator,
    sizes: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Any, ...]:
    # the largest of no values is none
    count, shape = sizes["slots"], (sizes["heads"] + 1, sizes["d"] + 1)
    n = min(sizes["n"], count)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng).to(device, dtype)

    slots = torch.randperm(count, generator=rng)[:n].to(device)
    return (
        [drawn(count, *shape), drawn(count, *shape)],
        drawn(count),
        drawn(n, *shape),
        slots,
    )


# --8<-- [end:cache]


# --8<-- [start:plan]
PLANS: dict[int, Tensor] = {}  # what a library keeps behind its handles


def make_plan(size: int) -> int:
    """A plan for rows of this size; the handle is a number."""
    handle = len(PLANS) + 1
    PLANS[handle] = torch.cos(
        torch.arange(size)[:, None]
        * (torch.arange(size) + 0.5)
        * torch.pi
        / max(size, 1)
    )
    return handle


@sl.op("eight::transform", specialize="plan")
def transform(x: Float[Tensor, "n m"], plan: int) -> Float[Tensor, "n m"]:
    """The cosine transform of each row, by a plan for its size."""
    return x @ PLANS[plan].to(x).T


@sl.op("eight::transform_back", specialize="plan")
def transform_back(grad: Float[Tensor, "n m"], plan: int) -> Float[Tensor, "n m"]:
    """The gradient of transform. It is an op, since torch traces a backward, which then
    cannot read tensors of the library."""
    return grad @ PLANS[plan].to(grad)


@transform.backward
def _(grad: Tensor, saved: Any, needs: Any) -> dict[str, Tensor]:
    return {"x": transform_back(grad, saved.plan)}


@transform_back.backward
def _(upper: Tensor, saved: Any, needs: Any) -> dict[str, Tensor]:
    return {"grad": transform(upper, saved.plan)}


def draw_transform(
    rng: torch.Generator,
    sizes: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Any, ...]:
    plan = next(
        (h for h, table in PLANS.items() if len(table) == sizes["m"]), None
    ) or make_plan(sizes["m"])
    return torch.randn(sizes["n"], sizes["m"], generator=rng).to(device, dtype), plan


transform.samples(draw_transform)
transform_back.samples(draw_transform)


# --8<-- [end:plan]


@dataclass(frozen=True)
class Kernel:
    """How one op is tried. ``lacks`` says of what it does not have why: ``{"vmap": "it
    writes to its arguments"}``."""

    op: sl.Op
    call: Callable[..., Any]
    args: Callable[[int], tuple[Any, ...]]
    lacks: dict[str, str]


WRITES = dict.fromkeys(
    ("double backward", "vmap", "jvp", "autocast"), "it writes to its arguments"
)
BOXES = dict.fromkeys(("double backward", "jvp"), "its result is row numbers") | {
    "vmap": "each batch has another number of boxes",
    "autocast": "its boxes are float32",
}


def boxes(n: int) -> tuple[Tensor, Tensor]:
    corner = torch.rand(n, 2) * 10
    return torch.cat([corner, corner + torch.rand(n, 2) * 5], 1), torch.rand(n)


def kernels() -> dict[str, Kernel]:
    plans = {n: make_plan(6) for n in (5,)}
    return {
        "C": Kernel(
            rope,
            rope,
            lambda n: (torch.randn(n, 2, 6), torch.randn(n, 3), torch.randn(n, 3)),
            {},
        ),
        "pybind11": Kernel(squash, squash, lambda n: (torch.randn(n, 3),), {}),
        "Triton": Kernel(swish, swish, lambda n: (torch.randn(n, 7),), {}),
        "NMS": Kernel(nms, lambda b, s: nms(b, s, 0.5) + 0, boxes, BOXES),
        "paged cache": Kernel(
            write_,
            lambda c, s, r, at: (write_([c], s, r, at), c.sum() + s.sum())[1],
            lambda n: (
                torch.zeros(n + 4, 2, 3),
                torch.zeros(n + 4),
                torch.ones(n, 2, 3),
                torch.arange(n),
            ),
            WRITES,
        ),
        "dropout": Kernel(
            dropout,
            lambda x, seed: dropout(x, seed, 0.25)[0],
            lambda n: (torch.ones(n), torch.tensor(7)),
            {},
        ),
        "optimiser": Kernel(
            step,
            lambda p, m, g: (step([p], [m], [g]), p + m)[1],
            lambda n: (torch.ones(n), torch.zeros(n), torch.ones(n)),
            WRITES,
        ),
        "plan": Kernel(
            transform,
            lambda x: transform(x, plans[5]),
            lambda n: (torch.randn(n, 6),),
            {},
        ),
    }


def leaves(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the arguments, floats with a gradient."""
    return tuple(a.detach().clone().requires_grad_(a.is_floating_point()) for a in args)


def plain(kernel: Kernel) -> Callable[..., Any]:
    """The call with the reference in place of the op."""
    return (
        kernel.op.reference
        if kernel.call is kernel.op
        else references[kernel.op.spec.opname]
    )


references: dict[str, Callable[..., Any]] = {
    "dropout": lambda x, seed: dropout.reference(x, seed, 0.25)[0],
    "transform": lambda x: transform.reference(
        x, next(h for h, t in PLANS.items() if len(t) == 6)
    ),
}


def audited(kernel: Kernel) -> bool:
    return sl.audit(kernel.op, checks=("numerics", "fake", "schema"), seed=0).proven


def compiled(kernel: Kernel) -> bool:
    """One graph serves two sizes."""
    from shiplap.plugin_api.compiling import compile_counts, reset_compiler

    reset_compiler()
    function = torch.compile(
        kernel.call, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    same = [
        torch.equal(function(*copied(a)), kernel.call(*copied(a)))
        for a in (kernel.args(5), kernel.args(9))
    ]
    return all(same) and compile_counts().graphs == 1


def exported(kernel: Kernel) -> bool:
    """A program that was exported with one size runs another."""
    args, other = kernel.args(5), kernel.args(9)
    shapes = tuple({0: torch.export.Dim.AUTO} if a.dim() else None for a in args)
    program = torch.export.export(
        language.Model(kernel.call), copied(args), dynamic_shapes=(shapes,)
    )
    return torch.equal(program.module()(*copied(other)), kernel.call(*copied(other)))


def twice(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    """Gradients of gradients."""
    inputs = [a for a in args if a.requires_grad]
    first = torch.autograd.grad(
        function(*args).square().sum(), inputs, create_graph=True
    )
    second = torch.autograd.grad(
        sum(g.square().sum() for g in first), inputs, allow_unused=True
    )
    return [*first, *(g for g in second if g is not None)]


def double_backward(kernel: Kernel) -> bool:
    args = kernel.args(5)
    return close(twice(kernel.call, leaves(args)), twice(plain(kernel), leaves(args)))


def vmap(kernel: Kernel) -> bool:
    batch = [kernel.args(5) for _ in range(3)]
    stacked = [torch.stack(parts) for parts in zip(*batch, strict=True)]
    return close(
        [torch.vmap(kernel.call)(*stacked)],
        [torch.stack([kernel.call(*args) for args in batch])],
    )


def jvp(kernel: Kernel) -> bool:
    args = kernel.args(5)
    floats = [i for i, a in enumerate(args) if a.is_floating_point()]

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: function(
            *[given[floats.index(i)] if i in floats else a for i, a in enumerate(args)]
        )

    inputs = tuple(args[i] for i in floats)
    tangents = tuple(torch.ones_like(a) for a in inputs)
    return close(
        torch.func.jvp(of(kernel.call), inputs, tangents),
        torch.func.jvp(of(plain(kernel)), inputs, tangents),
    )


def autocast(kernel: Kernel) -> bool:
    args = kernel.args(5)
    with torch.autocast("cpu", torch.bfloat16):
        got = kernel.call(*args)
    return close([got.float()], [plain(kernel)(*args)], 2e-2)


def close(got: Any, want: Any, tolerance: float = 1e-5) -> bool:
    pairs = list(zip(got, want, strict=True))
    return all(torch.allclose(g, w, tolerance, tolerance) for g, w in pairs)


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.clone() for a in args)


WAYS: dict[str, Callable[[Kernel], bool]] = {
    "audited": audited,
    "compiled": compiled,
    "exported": exported,
    "double backward": double_backward,
    "vmap": vmap,
    "jvp": jvp,
    "autocast": autocast,
}


def build() -> None:
    """The header and the library of the C kernel, and the pybind11 module."""
    import importlib
    import subprocess
    import sysconfig

    from torch.utils.cpp_extension import include_paths

    def run(*command: object) -> str:
        return subprocess.run(
            [*map(str, command)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE,
        ).stdout

    (HERE / "build").mkdir(exist_ok=True)
    shiplap = (sys.executable, "-m", "shiplap.cli")
    run(*shiplap, "header", "eight_kernels.py:rope", "-o", "build/rope.h")
    include = run(*shiplap, "header", "--include").strip()
    run(
        "cc",
        "-O2",
        "-shared",
        "-fPIC",
        f"-I{include}",
        "-Ibuild",
        "rope.c",
        "-o",
        "build/librope.so",
    )
    paths = [f"-I{p}" for p in (*include_paths(), sysconfig.get_paths()["include"])]
    run(
        "g++",
        "-O1",
        "-shared",
        "-fPIC",
        "-std=c++17",
        *paths,
        "squash.cpp",
        "-o",
        "build/squash_ext.so",
    )
    importlib.invalidate_caches()  # the folder was not there when Python first looked


def main() -> None:
    build()
    for name, kernel in kernels().items():
        torch.manual_seed(0)
        words = [
            f"has no {way}: {kernel.lacks[way]}"
            if way in kernel.lacks
            else f"{way}: {'yes' if check(kernel) else 'WRONG'}"
            for way, check in WAYS.items()
        ]
        print(f"{name}: {'; '.join(words)}", flush=True)


if __name__ == "__main__":
    main()
