"""Ways to drop a part of a judgement: none leaves the word *accepted*. The audit's are in ``audit/test_dropped.py``."""

from __future__ import annotations

import errno
import os

import pytest

import shiplap as sl
from shiplap.judge import engine
from shiplap.sandbox.supervisor import Bounds, SandboxedProcess

START = "import torch\nfrom torch import nn\n"
REFERENCE = START + (
    "def reference(x): return torch.relu(x) * 2\ndef get_inputs(): return [torch.randn(16, 12)]\n"
    "def candidate(x): return torch.where(x > 0, x + x, x * 0)\n"
)
RIGHT = START + "def candidate(x): return torch.where(x > 0, x + x, x * 0)\n"


def lose_files(monkeypatch):
    """Let every locked process report that its files are not restricted, as on a kernel without Landlock."""
    begin = SandboxedProcess.__post_init__

    def unlocked(self):
        begin(self)
        self.missing["files"] = "Landlock: Function not implemented"

    monkeypatch.setattr(SandboxedProcess, "__post_init__", unlocked)


def lose(number):
    def lack(*args, **named):
        raise OSError(number, os.strerror(number))

    return lambda monkeypatch: monkeypatch.setattr(engine, "_start_target_process", lack)


# Name → the change of the machine, the options of the judge, whether both are one file, and what the verdict misses.
WAYS = {
    "one file for both": (None, {}, True, "separation"),
    "no Landlock": (lose_files, {}, False, "sandbox: files"),
    "no process": (lose(errno.EAGAIN), {}, False, "machine"),
    "no open file": (lose(errno.EMFILE), {}, False, "machine"),
    "a full disk": (lose(errno.ENOSPC), {}, False, "machine"),
    "a device out of reach": (None, {"device": "meta"}, False, "device"),
    "no time": (None, {"seconds": 0.01}, False, "time"),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_dropped_part_makes_the_verdict_incomplete(launcher, monkeypatch, tmp_path, name):
    change, options, together, missing = WAYS[name]
    problem, folder = tmp_path / "problem.py", tmp_path / "candidate"
    folder.mkdir()
    problem.write_text(REFERENCE)
    (folder / "it.py").write_text(RIGHT)
    if change is not None:
        change(monkeypatch)
    given = {"seconds": 60, "rounds": 5, "bounds": Bounds(), "timed": False, "launcher": launcher, **options}
    result = sl.judge(problem, problem if together else folder / "it.py", **given)
    assert result.verdict == "incomplete", str(result)
    assert missing in dict(result.missing), result.missing
