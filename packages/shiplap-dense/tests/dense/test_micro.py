"""The micro-kernels by themselves, on each instruction set: compiled everywhere, run where the processor has it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

import shiplap_dense
from shiplap_headers import include_dir
from shiplap_testing.effort import sampled

HERE = Path(__file__).resolve().parent
SOURCES = Path(shiplap_dense.__file__).parent
SETS = {
    "avx2": (8, ["-DCPU_CAPABILITY_AVX2", "-mavx2", "-mfma", "-mf16c"]),
    "avx512": (16, ["-DCPU_CAPABILITY_AVX512", *(f"-mavx512{part}" for part in ("f", "dq", "vl", "bw")), "-mfma"]),
}


def has(isa: str) -> bool:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return all(f in flags for f in {"avx2": ("avx2", "fma"), "avx512": ("avx512bw", "avx512vl", "avx512dq")}[isa])


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("isa", sampled(SETS, long=["avx512"]))
def test_micro_kernels_equal_plain_loops(isa, tmp_path):
    lanes, flags = SETS[isa]
    libraries = str(Path(torch.__file__).parent / "lib")
    include = [f"-I{path}" for path in [*include_paths("cpu"), SOURCES, include_dir()]]
    built = subprocess.run(
        [
            "g++",
            "-std=c++20",
            "-O1",
            "-w",
            "-DC10_USING_CUSTOM_GENERATED_MACROS",
            "-DSTANDALONE_TORCH_HEADER",
            *flags,
            *include,
            str(HERE / "micro.cpp"),
            "-o",
            str(tmp_path / "micro"),
            f"-L{libraries}",
            f"-Wl,-rpath,{libraries}",
            "-ltorch_cpu",
            "-lc10",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    if not has(isa):
        pytest.skip(f"compiled; this processor has no {isa}")
    ran = subprocess.run([str(tmp_path / "micro")], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"lanes {lanes}, failures 0" in ran.stdout
