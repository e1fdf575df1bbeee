"""The sort of a launch program by torch, called from C++ (``shiplap/torch_sort.h``)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from shiplap.kernels.native.build_digest import FLAGS, INCLUDE

HARNESS = Path(__file__).parent / "torch_sort_harness.cpp"


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_dispatcher_that_drops_its_arguments_early_frees_no_tensor_of_a_sort(tmp_path):
    """Torch 2.11 returned freed tensors, which damaged the heap."""
    home, program = Path(torch.__file__).parent, tmp_path / "harness"
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    link = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl", "-Wl,--allow-shlib-undefined"]
    include = ["-I", str(INCLUDE), "-isystem", str(home / "include")]
    call = ["c++", *flags, "-rdynamic", *include, "-o", str(program), str(HARNESS), *link]
    subprocess.run(call, check=True, capture_output=True, timeout=300)
    env = {**os.environ, "LD_LIBRARY_PATH": str(home / "lib")}
    done = subprocess.run([program], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "sorted\n")
