"""How many files of ours a judgement runs through: those with a function that is called between request and verdict."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import shiplap
from shiplap_testing.forked import WITH_VERBS, python

SOURCE = Path(shiplap.__file__).parent
# In each process of the judgement: the judge's own marks from the request on, a launcher when its imports are over. A
# locked process may write to memory that is mapped already, and to no file.
MARKS = """
import mmap, os, sys, threading
from pathlib import Path

files = {str(p): i for i, p in enumerate(sorted(Path(os.environ["MARKED_SOURCE"]).rglob("*.py")))}
with open(os.environ["MARKED_FILE"], "r+b") as file:
    marks = mmap.mmap(file.fileno(), len(files))
serving = []

def mark(frame, event, arg):
    code = frame.f_code
    if event != "call" or code.co_filename not in files:
        return
    if code.co_name == "serve_forks":
        serving.append(True)
    if serving and code.co_flags & 2:  # a function, and no body of a class or of a module
        marks[files[code.co_filename]] = 1

def begin():
    sys.setprofile(mark)
    threading.setprofile(mark)

if sys.argv[:1] == ["-c"]:  # a launcher
    begin()
"""
REFERENCE = """
import torch

def reference(x):
    return torch.relu(x) * 2

def get_inputs():
    return [torch.randn(12, 16)]
"""
PROGRAM = """
import shiplap as sl
from shiplap.judge import engine
import marking
marking.serving.append(True)
marking.begin()
print(sl.judge("ref.py:reference", "candidate.py:candidate", seconds=120, rounds=5).verdict)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the judge needs Linux")
def test_a_judgement_passes_few_files(tmp_path: Path) -> None:
    (tmp_path / "ref.py").write_text(REFERENCE)
    (tmp_path / "candidate.py").write_text("def candidate(x):\n    return x.clamp_min(0).mul_(2)\n")
    (tmp_path / "marking.py").write_text(MARKS)
    (tmp_path / "sitecustomize.py").write_text("import os\nif 'MARKED_FILE' in os.environ:\n    import marking\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    files = sorted(SOURCE.rglob("*.py"))
    (tmp_path / "marks").write_bytes(bytes(len(files)))
    env = {**os.environ, "MARKED_FILE": str(tmp_path / "marks"), "MARKED_SOURCE": str(SOURCE)}
    done = python(tmp_path / "program.py", cwd=tmp_path, env=env, imported=WITH_VERBS)
    assert done.stdout == "accepted\n", done.stderr
    marked = (tmp_path / "marks").read_bytes()
    passed = [str(f.relative_to(SOURCE)) for f, mark in zip(files, marked, strict=True) if mark]
    assert {"judge/engine.py", "sandbox/launcher.py", "sandbox/child.py", "sandbox/landlock.py"} <= set(passed)
    assert len(passed) <= 74, passed
