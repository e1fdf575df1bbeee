"""How a script is examined: written to a directory of its own and run as a user would run it."""

from __future__ import annotations

import runpy
import sys
import textwrap
from pathlib import Path

from shiplap import torch_private
from shiplap.doctor import Break, Diagnosis, diagnose_command, doctor

RUN = """
compiled = torch.compile(f, backend="eager")
compiled(torch.arange(1.0, 5.0))
"""


def write(directory: Path, source: str) -> Path:
    path = directory / "program.py"
    path.write_text(textwrap.dedent(source).strip() + "\n")
    return path


def run(directory: Path, source: str, *arguments: str) -> Diagnosis:
    """The diagnosis of ``python program.py``."""
    return diagnose_command([sys.executable, str(write(directory, source)), *arguments])


def here(script: Path) -> Diagnosis:
    """The diagnosis of the same program in this process, which has imported torch and forgets what it compiled."""
    torch_private.reset_compiler()
    diagnosis = doctor(lambda: runpy.run_path(str(script), run_name="__main__"))
    torch_private.reset_compiler()
    assert not diagnosis.error
    return diagnosis


def lines(diagnosis: Diagnosis) -> set[tuple[str, str, str]]:
    """``(end of the file's path, text of the line, cause)`` of every break."""
    return {(name(b), b.place.code, b.cause) for b in diagnosis.breaks}


def name(b: Break) -> str:
    return b.place.short.rpartition(":")[0] if b.place.package else Path(b.place.file).name
