"""The assembler with which Triton compiles: torch's own from the first kernel on, as it is part of Triton's cache key.

Inductor selects torch's assembler when it compiles a kernel. A process that launched kernels before any graph compiled
these with Triton's own assembler, and the next process, which began with a graph, compiled all of them again: 7 s of
the first call of a SpUNet (H200, torch 2.11, Triton 3.6, November 2026).
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch

_CHOSEN = "TRITON_PTXAS_PATH"


@cache
def use_torch_assembler() -> None:
    """Select torch's own assembler, by the variable and the rule of Inductor, unless the user has selected one.

    Called before Triton compiles a kernel of ours. Inductor's own function is not called: importing its module takes
    longer than an eager program needs to start.
    """
    if torch.version.cuda is None or _CHOSEN in os.environ:
        return
    # Wheels of torch for CUDA contain the assembler. A build from source need not.
    assembler = Path(torch.__file__).absolute().parent / "bin" / "ptxas"
    if assembler.is_file() and os.access(assembler, os.X_OK):
        os.environ[_CHOSEN] = str(assembler)
