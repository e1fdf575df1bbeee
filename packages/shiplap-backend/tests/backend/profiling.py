"""Whether the installed torch asks a device of ours for the times of its kernels."""

from __future__ import annotations

from pathlib import Path

import torch

NATIVE = (
    Path(torch.__file__).with_name("include").joinpath("torch/csrc/profiler/standalone/privateuse1_profiler.h").exists()
)
NO_KERNELS = "this torch has no profiler for the kernels of such a device"
