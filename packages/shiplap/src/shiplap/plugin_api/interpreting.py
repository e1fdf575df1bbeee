"""Triton kernels and templates without a GPU: Triton's interpreter runs the launches that Inductor would make on one.

``interpret()`` is the first call of a process of its own. After it ``run_interpreted(fn, *args)`` compiles ``fn``, runs
the generated kernels on CPU tensors, and compares them with eager torch. It returns an ``Interpreted``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiplap.errors import error
from shiplap.torch_private import reset_compiler, triton_internals

__all__ = ["Interpreted", "interpret", "run_interpreted"]


@dataclass(frozen=True)
class Interpreted:
    """The result of one run of a compiled function in Triton's interpreter.

    Attributes:
        results: the tensors that the compiled function returned.
        error: the largest difference from eager torch, relative to the largest value of its tensor.
        kernels: the names of the launched kernels, in order. Those of templates contain ``_tem_``.
    """

    results: tuple[Tensor, ...]
    error: float
    kernels: tuple[str, ...]


def interpret(edit: Callable[[str], str] | None = None) -> None:
    """Switch this process to Triton's interpreter. Call this function before anything imports Triton, in a separate
    process.

    ``@triton.jit`` functions that ``sl.triton`` binds for ``"cuda"`` then serve calls with CPU tensors, also of
    ``sl.audit``. Templates bound for ``"cpu"`` are lowered as for a GPU, with their fused neighbours. Inductor's
    launches are replaced until the process ends.

    Args:
        edit: a function from the source code of a template's kernel to the code that runs in its place. A test can thus
            plant a defect. By default the code is unchanged.

    Raises:
        ShiplapError: ``SL603`` if Triton has been imported without ``TRITON_INTERPRET=1``.
    """
    if triton_internals.imported_before():
        raise error(
            "SL603",
            where="interpret()",
            what="Triton has been imported already, to compile for a GPU",
            got="triton among the imported modules",
            expected="interpret() before the first import of Triton, or TRITON_INTERPRET=1",
            fix="call interpret() at the top of a script of its own, or set TRITON_INTERPRET=1 for the process",
        )
    triton_internals.edit[0] = edit
    triton_internals.start_interpreter()


def run_interpreted(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> Interpreted:
    """Compile ``fn`` into one graph and run it on ``args`` with Triton's interpreter. Return its results, their largest
    difference from eager torch, and the names of the kernels. ``args`` are CPU tensors of other dtypes than bfloat16.
    If ``dynamic`` is true, sizes are compiled as symbols, and otherwise as constants.

    Raises:
        NotImplementedError: a kernel gets bfloat16, which Triton's interpreter multiplies wrongly, or calls a function
            that it does not have.
    """
    reset_compiler()
    # Before the compilation, whose launches alone are counted.
    want = _tensors(fn(*args))
    triton_internals.launches.clear()  # of eager; proofs are not among them
    got = _tensors(torch.compile(fn, dynamic=dynamic, fullgraph=True)(*args))
    errors = [_error(g.double(), w.double()) for g, w in zip(got, want, strict=True)]
    return Interpreted(got, max(errors, default=0.0), tuple(triton_internals.launches))


def _tensors(result: Any) -> tuple[Tensor, ...]:
    """Return a tuple of the tensors in ``result``, which is one tensor or a sequence of tensors."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _error(got: Tensor, want: Tensor) -> float:
    """Return the largest absolute difference between ``got`` and ``want``, relative to the largest absolute value of
    ``want``. Return infinity if the shapes differ, and 0 if there are no elements.
    """
    if got.shape != want.shape:
        return float("inf")
    # Not divided by 0 where all wanted values are 0.
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30)) if got.numel() else 0.0
