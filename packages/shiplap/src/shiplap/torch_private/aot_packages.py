"""AOTInductor: graphs compiled into packages that run without Python."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch


def is_packaging() -> bool:
    """Return whether a package is being made right now. Imports nothing."""
    inductor = sys.modules.get("torch._inductor.virtualized")
    return inductor is not None and bool(inductor.V.aot_compilation)


def compile_package(program: torch.export.ExportedProgram, path: Path, options: Mapping[str, object]) -> None:
    """Compile an exported program into an AOTInductor package."""
    import torch._inductor as inductor

    inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=dict(options))
