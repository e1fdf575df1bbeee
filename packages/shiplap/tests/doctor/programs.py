"""How a script is examined: written to a directory of its own and run as a user would run it."""

from __future__ import annotations

import runpy
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

from shiplap import torch_private
from shiplap.doctor import Break, Diagnosis, diagnose_command, doctor
from shiplap.doctor.edits import Case, Editor
from shiplap.doctor.scratch import apply_edits

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


class CountingBackend:
    """A backend of ``torch.compile`` that counts the graphs with operations and runs them as they are."""

    def __init__(self) -> None:
        self.frame_count = 0

    def __call__(self, gm: torch.fx.GraphModule, _: Any) -> Any:
        self.frame_count += 1
        return gm.forward


def proposals(
    folder: Path, source: str, editor: Editor, subject: str = "", text: str = "", function: str = "f", cause: str = ""
) -> list[str]:
    """The program after each alternative of an editor; the entry is at the line with the comment HERE."""
    source = textwrap.dedent(source).lstrip()
    (folder / "program.py").write_text(source)
    line = next((n for n, t in enumerate(source.splitlines(), 1) if "# HERE" in t), 1)
    case = Case(folder, "program.py", "program.py", line, function, subject, text, cause=cause)
    changed = (apply_edits({}, folder, edit) for edit in editor(case))
    return [texts["program.py"] for texts in changed if texts]
