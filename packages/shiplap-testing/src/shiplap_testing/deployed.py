"""Packaged models in a C++ program without Python, ``examples/deploy/deploy_scenes.cpp``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shiplap_testing.paths import REPOSITORY

PLAIN = """
import sys, torch
net, x = torch.nn.Linear(8, 8).to(sys.argv[1]), torch.randn(4, 8, device=sys.argv[1])
with torch.no_grad():
    path = torch._inductor.aoti_compile_and_package(torch.export.export(net, (x,)))
torch._inductor.aoti_load_package(path)(x)
"""


def need_packages(device: str) -> None:
    """Skip the calling test if torch cannot run its own package of a linear layer on ``device``. The package is
    compiled ahead of time without shiplap, in a separate process.
    """
    if subprocess.run([sys.executable, "-c", PLAIN, device], capture_output=True, check=False).returncode:
        pytest.skip("torch's own package of a linear layer does not run here")


def compiled_runner(folder: Path, device: str) -> Path:
    """Compile ``examples/deploy/deploy_scenes.cpp`` to a program in ``folder``, linked with torch for ``device`` and
    without Python. Return the path of the program. Raise ``AssertionError`` if the compilation fails.
    """
    home, program = Path(torch.__file__).parent, folder / f"deploy_scenes_{device}"
    include = [f"-isystem{home / part}" for part in ("include", "include/torch/csrc/api/include")]
    libraries = ["torch", "torch_cpu", "c10", *(("torch_cuda", "c10_cuda") if device == "cuda" else ())]
    link = [
        f"-L{home / 'lib'}",
        f"-Wl,-rpath,{home / 'lib'}",
        "-Wl,--no-as-needed,--unresolved-symbols=ignore-in-shared-libs",
    ]
    link += [f"-l{name}" for name in libraries]
    compiler = os.environ.get("CXX") or shutil.which("c++") or ""
    source = REPOSITORY / "examples" / "deploy" / "deploy_scenes.cpp"
    command = [compiler, "-std=c++20", "-O0", *include, "-o", program, source, *link, "-ldl"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    # A deployed program must run where no Python is installed.
    assert "libpython" not in subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return program


def run_without_python(
    runner: Path, package: Path, scenes: list[Any], device: str, within: float
) -> subprocess.CompletedProcess[str]:
    """Run the program ``runner`` on the packaged model ``package``, and return the ended process with its output.

    The model runs on ``device``, and the process cannot find Python. ``scenes`` are pairs of inputs and expected
    results. ``within`` is the tolerance of the results.
    """
    saved = package.with_suffix(".scenes.pt")
    torch.save(scenes, saved)
    # Without a PATH the program cannot start Python either.
    environment = {"PATH": "/nonexistent", **{k: v for k, v in os.environ.items() if k.startswith(("LD_", "CUDA_"))}}
    command = [runner, package, saved, device, str(within)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
