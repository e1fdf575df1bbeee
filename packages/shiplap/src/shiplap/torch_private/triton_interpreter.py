"""Run the Triton code that Inductor generates with Triton's interpreter, in a process of its own.

Inductor renders, fuses and launches as for a GPU. Its decorators and its loader of sources are replaced for the rest of
the process, and only :func:`start` does that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch

launches: list[str] = []  # names of the kernels that have run
edit: list[Callable[[str], str] | None] = [None]  # source of a template's kernel → source: a defect to be found

BLOCK = 32  # of generated pointwise kernels and reductions: the interpreter runs each block by itself


class _Libdevice:
    """``libdevice`` of a GPU, with those functions that Triton's language has."""

    def __getattr__(self, name: str) -> Any:
        import triton.language as tl

        function = getattr(tl.math, name, None) or getattr(tl, name, None)
        if function is None:
            raise NotImplementedError(f"libdevice.{name} cannot be interpreted")
        return function


class InterpretedKernel:
    """The result of Inductor's decorators, launched in the same way but interpreted."""

    def __init__(self, kind: str, fn: Any, meta: dict[str, Any]) -> None:
        self.kind, self.fn, self.meta = kind, fn, meta
        self.inductor_meta: dict[str, Any] = {}
        self.with_bandwidth_info, self.launchers = False, [SimpleNamespace(n_regs=None)]
        fn.fn.__globals__["libdevice"] = _Libdevice()

    def precompile(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: an interpreted kernel is not compiled."""

    def run(self, *args: Any, stream: Any = None, benchmark_run: bool = False, **kwargs: Any) -> None:
        """Launch the kernel once. bfloat16 is refused: the interpreter multiplies its bit patterns."""
        if any(isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 for a in args):
            raise NotImplementedError("bf16 is wrong in Triton's interpreter")
        # Launches that only measure are no launches of the program.
        if not benchmark_run:
            launches.append(self.fn.fn.__name__)
        if self.kind == "template":  # the last three arguments are the grid
            self.fn[tuple(int(g) for g in args[-3:])](*args[:-3])
            return
        if self.kind == "user_autotune":  # so are they here, and numbers that Triton specialises on are passed, too
            constants = [n for n, p in signature(self.fn.fn).parameters.items() if "constexpr" in str(p.annotation)]
            names = [n for n in self.meta["signature"] if n not in constants]
            given = dict(zip(names, args[:-3], strict=True)) | {n: self.meta["constants"][n] for n in constants}
            self.fn[tuple(int(g) for g in args[-3:])](**given)
            return
        names = [n for n, kind in self.meta["signature"].items() if kind != "constexpr"]
        numel = {n: v for n, v in zip(names, args, strict=False) if n.endswith("numel")}
        blocks = {b: BLOCK for b in ("XBLOCK", "YBLOCK", "R0_BLOCK") if b in self.fn.arg_names}
        grid = [-(-int(numel[f"{axis}numel"]) // BLOCK) if f"{axis}numel" in numel else 1 for axis in "xyz"]
        self.fn[tuple(grid)](*args, **blocks)


def _make_decorator(kind: str) -> Callable[..., Any]:
    def factory(*args: Any, **kwargs: Any) -> Callable[[Any], InterpretedKernel]:
        return lambda fn: InterpretedKernel(kind, fn, kwargs.get("triton_meta", {}))

    return factory


def _load_interpreted(self: Any, name: str, source: str, device_str: str = "cuda", **kwargs: Any) -> InterpretedKernel:
    from torch._inductor.codecache import PyCodeCache

    change = edit[0]
    if change is not None and "_tem_" in name:
        source = change(source)
    kernel: InterpretedKernel = getattr(PyCodeCache.load(source), name)
    return kernel


class InterpreterTarget:
    """The driver that Triton queries before it launches."""

    is_active = classmethod(lambda cls: True)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def imported_before() -> bool:
    """Return whether Triton is imported already without interpretation, as its own functions are decorated by then."""
    return "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"


def start_interpreter() -> None:
    """Make this process interpret Triton code, and Inductor generate Triton code for the CPU."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch._inductor.config as inductor
    import torch._inductor.runtime.triton_heuristics as heuristics
    from torch._inductor.async_compile import AsyncCompile
    from triton.runtime.driver import driver

    active: Any = driver
    active.set_active(InterpreterTarget())
    config: Any = inductor
    # Worker processes would not have these replacements, so everything is compiled in this process.
    config.cpu_backend, config.compile_threads, config.force_disable_caches = "triton", 1, True
    for kind in ("template", "pointwise", "reduction", "persistent_reduction", "user_autotune"):
        setattr(heuristics, kind, _make_decorator(kind))
    compiler: Any = AsyncCompile
    compiler.triton = _load_interpreted
