"""Triton compiles for Hopper on a machine without a GPU, up to the launch. For programs of their own only."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

from shiplap.torch_private.triton_internals import InterpreterTarget

OBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def pretend() -> None:
    """Make this process compile Triton kernels for Hopper from now on, as if it had such a GPU. Kernels can be compiled
    but not launched.
    """
    from shiplap.kernels.triton import template_kernel

    driver.set_active(InterpreterTarget())
    # Nothing is launched: these answers only decide what is compiled.
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    torch.cuda.get_device_properties = lambda *device: SimpleNamespace(multi_processor_count=132)
    template_kernel.is_current_device = lambda device: True  # type: ignore[assignment]


def compiled(run: Any) -> list[Any]:
    """Return a list of the binaries that Triton has compiled of the kernels of a template, which is kernel source code
    that shiplap compiles for several configs.

    ``run`` is an object whose attribute ``jitted`` is a mapping with the launchers of these kernels as values.
    """
    kernels = [launcher.kernel for launcher in run.jitted.values()]
    return [binaries for kernel in kernels for binaries in kernel.device_caches[0][0].values()]


def resources(kernel: Any) -> dict[str, int]:
    """Return the resources that the compiled ``kernel`` uses, as a dict.

    ``registers`` is the number of registers of a thread. ``stack`` is the number of bytes of a thread's stack, to which
    registers spill. ``shared`` is the number of bytes of shared memory of a program.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.check_output([OBJDUMP, "-res-usage", file.name], text=True)
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match is not None, text
    return {"registers": int(match[1]), "stack": int(match[2]), "shared": kernel.metadata.shared}
