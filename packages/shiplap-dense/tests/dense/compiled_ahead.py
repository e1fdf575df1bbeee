"""Compiles a template's configs for Hopper as ``sl.tune`` does, without a GPU, in threads. Run by test_direct.py.

``python compiled_ahead.py N``: the first N of them.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from triton.runtime.jit import JITFunction

from shiplap.tuning.candidate import kernel_candidates
from shiplap_testing import hopper
from tests.dense import direct_ops
from tests.dense.direct_ops import gathered

compiled: list[str] = []
do_compile = JITFunction._do_compile


def counted(self: Any, key: Any, *rest: Any) -> Any:
    compiled.append(str(key))
    return do_compile(self, key, *rest)


hopper.pretend()
JITFunction._do_compile = counted
direct_ops.attach("cpu")

generator = torch.Generator().manual_seed(0)
sizes = {"n": 100, "m": 100, "k": 3, "g": 1, "ci": 16, "co": 16, "reflect": False, "scale": 1.0, "after": "nothing"}
args = gathered.sampler(generator, sizes, torch.float16, torch.device("cpu"))
call = gathered.bind(args)
listed = [c for c in kernel_candidates(gathered, "cpu", call.env)[1:] if not c.bound.refuses(call)]
listed = listed[: int(sys.argv[1])]
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda candidate: candidate.precompile(args), listed))
ahead = len(compiled)
binaries = [len(kernel.asm["cubin"]) for kernel in hopper.compiled(listed[0].bound)]


def at_launch(args: tuple[Any, ...]) -> int:
    """How many kernels a launch of each candidate compiles."""
    before = len(compiled)
    for candidate in listed:
        with suppress(AttributeError):  # Triton has no device to load them on
            candidate.prepare(args)()
    return len(compiled) - before


other = gathered.sampler(generator, {**sizes, "m": 96}, torch.float16, torch.device("cpu"))  # a multiple of 16
print(
    json.dumps(
        {
            "candidates": len(listed),
            "ahead": ahead,
            "binaries": binaries,
            "at launch": at_launch(args),
            "of another size": at_launch(other),
        }
    )
)
