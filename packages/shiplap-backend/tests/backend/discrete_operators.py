"""Operators of PyTorch's database on both devices and beside the default stream. `test_discrete.py` runs this file."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import pytest
import torch

from shiplap.torch_private.device_tests import op_infos
from shiplap_backend import opinfo

sys.path.insert(0, os.environ["SHIPLAP_DISCRETE_PROJECT"])
importlib.import_module("torch_mine").autoload()
mine: Any = torch.mine  # type: ignore[attr-defined]

# Native ones, and of those that run on the CPU: views, lists, results of several tensors, writes, and random numbers.
OPERATORS = (
    *("add", "mul", "mm", "addmm", "sum", "tanh", "nn.functional.relu", "softmax", "transpose", "as_strided", "cat"),
    *("sort", "topk", "index_put", "scatter_add", "nonzero", "masked_fill", "cumsum", "linalg.svd", "fft.rfft"),
    *("nn.functional.conv2d", "nn.functional.layer_norm", "nn.functional.dropout", "split", "unfold", "normal"),
)


@pytest.mark.parametrize("device", ["mine:0", "mine:1"])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_the_cpus(name: str, device: str) -> None:
    """Current device and stream are neither the default ones."""
    with mine.device(device), mine.stream(torch.Stream(device)):
        for dtype in {torch.float32, torch.int64} & op_infos()[name].supported_dtypes("cpu"):
            evidence = opinfo.SampleEvidence()
            error = opinfo._check_samples(op_infos()[name], device, dtype, 3, evidence)
            assert error is None, evidence
            assert evidence.samples
