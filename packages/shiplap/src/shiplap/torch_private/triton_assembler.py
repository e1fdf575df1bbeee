"""Which assembler Triton compiles with: torch's own from the first kernel on, as the key of Triton's cache names it.

Inductor puts the assembler that torch brings into force once it compiles a kernel. A process that launched kernels
before any graph had compiled these with Triton's own assembler, and the next process, which began with a graph,
compiled all of them again: 7 s of the first call of a SpUNet (H200, torch 2.11, Triton 3.6, November 2026).
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch

_CHOSEN = "TRITON_PTXAS_PATH"


@cache
def use_torchs() -> None:
    """Put torch's own assembler into force, by the variable and the rule that Inductor has, unless one is chosen.

    Called before Triton compiles a kernel of ours. Inductor's own function is not called: importing what it lies in
    takes longer than an eager program needs to start.
    """
    if torch.version.cuda is None or _CHOSEN in os.environ:
        return
    assembler = Path(torch.__file__).absolute().parent / "bin" / "ptxas"
    if assembler.is_file() and os.access(assembler, os.X_OK):
        os.environ[_CHOSEN] = str(assembler)
