"""Triton compiles the templates of convolutions once for any number of rows, which differs from scene to scene."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shiplap as sl
from shiplap.declare.kernel import KernelTerms
from shiplap.kernels.triton import template_kernel
from shiplap.kernels.triton.template_kernel import TemplateKernel
from shiplap_sparse3d import ops

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

TAPS, CHANNELS = 27, 64
BACKEND, FORMS = make_backend(GPUTarget("cuda", 90, 32)), list[Any]()


def sorted_table(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """A sorted neighbour table of one part, as ``sort_table`` returns it, with its order and masks."""
    columns, numbers = torch.zeros(TAPS, rows, dtype=torch.int32), torch.arange(rows, dtype=torch.int32)
    return columns.t(), numbers[None], torch.ones(1, -(-rows // 64), dtype=torch.int32)


def forward(rows: int) -> tuple[sl.Op, tuple[Any, ...]]:
    feats, weight = torch.zeros(rows, CHANNELS), torch.zeros(CHANNELS, TAPS, CHANNELS)
    table, order, masks = sorted_table(rows)
    return ops.conv, (feats, weight, table, None, order, masks, None, None, None, 1, False, False, True)


def weight_gradient(rows: int) -> tuple[sl.Op, tuple[Any, ...]]:
    feats, (table, order, masks) = torch.zeros(rows, CHANNELS), sorted_table(rows)
    blocks, counts = ops.tap_blocks.reference(masks, TAPS)
    return ops.conv_weight_grad, (feats, feats, table, order, blocks, counts, 1, False, True)


class Recorder:
    """In place of the launcher of a Triton kernel: the source of each launch and on what Triton would specialise it."""

    def __init__(self, kernel: Any) -> None:
        self.source = kernel.src
        self.bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **options: FORMS.append((self.source, self.bind(*args, **options)[1:]))


@pytest.mark.parametrize("case", [forward, weight_gradient])
@pytest.mark.parametrize("rows", [2064, 16384])  # multiples of 16; of the second the blocks of 64 rows are, too
def test_a_multiple_of_16_rows_needs_no_other_kernel(case: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_kernel, "triton_launcher", Recorder)
    monkeypatch.setattr(template_kernel, "add_partial_sums", lambda partial_sums, out: None)
    FORMS.clear()
    for number in (rows, rows + 1):
        op, args = case(number)
        call, template = op.bind(args), op.templates["cuda"][0]
        kernel = TemplateKernel(op.spec, KernelTerms(template.name, "cuda", template), template)
        serving = kernel.variant_for_call(call)
        assert not isinstance(serving, str), serving
        serving.run_call(call)
    assert FORMS[0] == FORMS[1]
