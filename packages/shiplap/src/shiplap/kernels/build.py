"""Builds on request. They compile the native binding of an op, and the launcher of its Triton templates."""

from __future__ import annotations

from pathlib import Path

import torch

from shiplap.dispatch import Op
from shiplap.errors import ShiplapError
from shiplap.kernels.c.library import source_libraries
from shiplap.kernels.native import binding
from shiplap.kernels.triton import replay


def compile_sources(op: Op) -> None:
    """Compile the C, C++ and CUDA libraries of the ``sl.source`` kernels of ``op``, unless they are in the cache.

    Raise ``SL421`` to ``SL423`` if a library cannot be compiled. A missing nvcc is no error for a CUDA library if the
    machine has no GPU and the op has kernels for another device type. That library is left out.
    """
    forms = {d: [k.native for k in kernels if k.native is not None] for d, kernels in op.kernels.items()}
    for device, natives in forms.items():
        for library in [source_libraries[form.library] for form in natives if form.library in source_libraries]:
            try:
                library.compile()
            except ShiplapError as e:
                # SL423 is a missing compiler: without a GPU nobody needs the CUDA kernel here.
                if e.id != "SL423" or device != "cuda" or torch.cuda.is_available() or len(op.kernels) < 2:
                    raise


def build_op(op: Op) -> Path | None:
    """Build or find the compiled code of ``op`` and attach it, so that calls run without Python. The code consists of
    source libraries, the native binding, and the launcher of templates.

    Return the library of the native binding, or None for an op that has only Triton templates.

    Raises:
        LibraryError: ``SL404`` for kernels that only Python can run. ``SL405`` or ``SL406`` if a library cannot be
            built. ``SL421`` to ``SL423`` if the sources of a kernel cannot be compiled.
    """
    compile_sources(op)
    has_templates = any(k.template is not None for k in op.kernels.get("cuda", ())) and torch.cuda.is_available()
    # Templates have no binding of their own: C++ only repeats their launches.
    if has_templates and replay.is_replay_wanted():
        replay.build_replay_library(op)
    has_native = any(k.native is not None for kernels in op.kernels.values() for k in kernels)
    return binding.build(op) if has_native or not has_templates else None
