"""Packaged models in a C++ program without Python, ``examples/deploy/deploy_scenes.cpp``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

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
    """Skip where torch's own package of a linear layer does not run."""
    if subprocess.run([sys.executable, "-c", PLAIN, device], capture_output=True, check=False).returncode:
        pytest.skip("torch's own package of a linear layer does not run here")


def run_package(package: Path, scenes: Path, device: str) -> str:
    """Return what the program prints for a package and a file of ``[(*inputs, result), ...]``: at last, "equal"."""
    home, program = Path(torch.__file__).parent, package.with_name("deploy_scenes")
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
    environment = {"PATH": "/nonexistent", **{k: v for k, v in os.environ.items() if k.startswith(("LD_", "CUDA_"))}}
    done = subprocess.run(
        [program, package, scenes, device], env=environment, capture_output=True, text=True, check=False
    )
    assert "libpython" not in subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return done.stdout + done.stderr
