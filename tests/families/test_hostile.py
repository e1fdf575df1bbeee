"""Wrong calls of every op and layer of the families, a seeded sample of what ``nox -s hostile`` does for longer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.projects import FAMILIES

import shiplap_sparse3d as sl3
from shiplap_sparse3d import spconv
from shiplap_testing.forked import WITH_FAMILIES, python
from shiplap_testing.support import fails

ROUNDS = os.environ.get("SHIPLAP_TEST_HOSTILE", "2")


@pytest.mark.parametrize("module", sorted(module for _, module in FAMILIES.values()))
def test_no_wrong_call_of_an_op_ends_or_hangs_the_process(module):
    done = python(Path(__file__).with_name("hostile.py"), module, ROUNDS, 17, timeout=36000, imported=WITH_FAMILIES)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"{last} {done.stderr[-2000:]}"


def test_no_wrong_use_of_a_layer_ends_or_hangs_the_process():
    rounds = max(4, int(ROUNDS))
    done = python(Path(__file__).with_name("hostile_layers.py"), rounds, 17, timeout=36000, imported=WITH_FAMILIES)
    assert done.returncode == 0, f"{done.stdout[-2000:]} {done.stderr[-2000:]}"


def scene(grid=(8, 8, 8), padded=False):
    coords = torch.tensor([[0, 1, 2, 3], [0, 4, 5, 6]], dtype=torch.int32)
    return sl3.SparseTensor(torch.randn(2, 4), coords, grid, 1, padded=padded)


def test_what_was_found_stays_mended():
    """IndexError for no output channels, ZeroDivisionError for a stride of 0, OverflowError for a grid of 2**120."""
    assert spconv.SparseConv1d(4, 0, 3).weight.shape == (0, 3, 4)
    wide = scene()
    there = spconv.SparseConvTensor(wide.feats, wide.geometry.coords, [8, 8, 8], 1)
    with fails("SL208"):
        spconv.SparseMaxPool3d(2, 0)(there)
    with fails("SL208"):
        sl3.SparseMaxPool3d(2, 0)(scene(padded=True))
    with fails("SL208"):
        scene((2**40, 2**40, 2**40)).dense()
