"""Run compiled Triton code without a GPU: Inductor renders and fuses as for one, Triton's interpreter executes.

Imported first in a process of its own, since Triton reads ``TRITON_INTERPRET`` once. bf16 products are wrong in the
interpreter (it multiplies the bit patterns), so bf16 is refused here, never trusted.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.config as inductor
import torch._inductor.runtime.triton_heuristics as heuristics
import triton.language as tl
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from triton.runtime.driver import driver

from shiplap_testing.hopper import Target

LAUNCHES: list[str] = []  # names of the kernels run since the last clear()
MUTATE: list[Callable[[str], str] | None] = [None]  # a planted bug: source of a template kernel -> source


class _Libdevice:
    def __getattr__(self, name: str) -> Any:
        function = getattr(tl.math, name, None) or getattr(tl, name, None)
        if function is None:
            raise NotImplementedError(f"libdevice.{name} cannot be interpreted")
        return function


class _Kernel:
    """What Inductor's decorators return: launched as theirs, but interpreted."""

    def __init__(self, kind: str, fn: Any, meta: dict[str, Any]) -> None:
        self.kind, self.fn, self.meta, self.inductor_meta = kind, fn, meta, {}
        self.with_bandwidth_info, self.launchers = False, [SimpleNamespace(n_regs=None)]
        fn.fn.__globals__["libdevice"] = _Libdevice()

    def precompile(self, *args: Any, **kwargs: Any) -> None:
        pass

    def run(self, *args: Any, stream: Any = None, benchmark_run: bool = False, **kwargs: Any) -> None:
        if any(isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 for a in args):
            raise NotImplementedError("bf16 is wrong in Triton's interpreter")
        if not benchmark_run:
            LAUNCHES.append(self.fn.fn.__name__)
        if self.kind == "template":  # the last three arguments are the grid
            self.fn[tuple(int(g) for g in args[-3:])](*args[:-3])
            return
        names = [n for n, kind in self.meta["signature"].items() if kind != "constexpr"]
        numel = {n: v for n, v in zip(names, args, strict=False) if n.endswith("numel")}
        blocks = {b: 32 for b in ("XBLOCK", "YBLOCK", "R0_BLOCK") if b in self.fn.arg_names}
        grid = [-(-int(numel[f"{axis}numel"]) // 32) if f"{axis}numel" in numel else 1 for axis in "xyz"]
        self.fn[tuple(grid)](*args, **blocks)


def _decorator(kind: str) -> Callable[..., Any]:
    def factory(*args: Any, **kwargs: Any) -> Callable[[Any], _Kernel]:
        return lambda fn: _Kernel(kind, fn, kwargs.get("triton_meta", {}))

    return factory


def _load(self: AsyncCompile, name: str, source: str, device_str: str = "cuda", **kwargs: Any) -> _Kernel:
    if MUTATE[0] is not None and "_tem_" in name:
        source = MUTATE[0](source)
    kernel: _Kernel = getattr(PyCodeCache.load(source), name)
    return kernel


driver.set_active(Target())
inductor.cpu_backend = "triton"
inductor.compile_threads = 1
inductor.force_disable_caches = True
for _kind in ("template", "pointwise", "reduction", "persistent_reduction"):
    setattr(heuristics, _kind, _decorator(_kind))
AsyncCompile.triton = _load  # type: ignore[assignment]


def run(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> tuple[list[torch.Tensor], float, list[str]]:
    """Compile and run ``fn``: outputs, worst error relative to the largest value of eager, kernels launched."""
    torch._dynamo.reset()
    want = fn(*args)
    LAUNCHES.clear()  # of eager; proofs are not among them
    got = torch.compile(fn, dynamic=dynamic, fullgraph=True)(*args)
    want, got = ([v] if isinstance(v, torch.Tensor) else list(v) for v in (want, got))
    pairs = zip(got, want, strict=True)
    errors = [_error(g.double(), w.double()) for g, w in pairs]
    return got, max(errors), list(LAUNCHES)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30)) if got.numel() else 0.0
