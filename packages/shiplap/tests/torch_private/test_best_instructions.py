"""Before the first graph for the CPU, Inductor tries each set of vector instructions. Only the best is needed."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shiplap_testing.private import VECTORS

PROGRAM = """
from shiplap.torch_private.dynamo import processor_features, try_best_instructions
print(try_best_instructions(), *processor_features())
"""


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="one set at most")
def test_one_set_is_tried_and_the_same_features_are_found(tmp_path: Path) -> None:
    real = shutil.which("g++")
    if real is None:
        pytest.skip("no compiler")
    compiler, log = tmp_path / "g++", tmp_path / "log"
    # Torch's vector headers take a second and more. A set with further instructions is tried on small programs as well.
    found = f'grep -s ATen/cpu/vec/vec.h -- "$at" >> "{log}"'
    compiler.write_text(f'#!/bin/sh\nfor at; do {found}; done\nexec "{real}" "$@"\n')
    compiler.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k not in (VECTORS, "ATEN_CPU_CAPABILITY")}
    env |= {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    taken, *features = done.stdout.split()
    assert taken == str("avx2" in features)
    calls = log.read_text().splitlines() if log.exists() else []
    assert len(calls) == (1 if features else 0), calls


def test_a_set_that_the_user_chose_is_left_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from shiplap.torch_private.dynamo import try_best_instructions

    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert not try_best_instructions()
