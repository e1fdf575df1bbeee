"""Calls that hung, and values of which kernel and reference thought differently."""

from __future__ import annotations

import pytest
import torch

from shiplap.errors import ShiplapError
from shiplap_sparse3d import hashing, ops, planning


@pytest.mark.parametrize("parts", [28, 2**31, 2**62])
def test_more_parts_than_taps_are_refused_at_once(parts):
    coords = torch.zeros(1, 4, dtype=torch.int32)
    for call in (
        lambda: ops.sort_table(torch.zeros(4, 27, dtype=torch.int32), parts),
        lambda: planning.subm_plan(coords, [8] * 3, [3] * 3, [1] * 3, parts),
        lambda: planning.conv_plan(coords, coords, [8] * 3, [3] * 3, [1] * 3, [1] * 3, [1] * 3, 1, parts),
        lambda: planning.conv_plan(coords, coords, [8] * 3, [3] * 3, [1] * 3, [1] * 3, [1] * 3, parts, 0),
    ):
        with pytest.raises(ShiplapError, match="SL2"):
            call()


def test_a_tap_that_hits_nothing_adds_nothing_whatever_its_weight():
    feats, table = torch.ones(2, 1), torch.tensor([[0, -1], [-1, 1]], dtype=torch.int32)
    weight = torch.tensor([[[2.0], [float("inf")]]])
    result = ops.conv.reference(feats, weight, table)
    assert result.tolist() == [[2.0], [float("inf")]]
    assert torch.equal(ops.conv(feats, weight, table), result)
    grad = torch.tensor([[float("inf")], [1.0]])
    result = ops.conv_weight_grad.reference(grad, feats, table)
    assert result.flatten().tolist() == [float("inf"), 1.0]
    assert torch.equal(ops.conv_weight_grad(grad, feats, table), result)


def test_free_slots_of_a_table_hold_nothing_after_an_insertion():
    tables = []
    for insert in (hashing.hash_insert, hashing.hash_insert.reference):
        keys, values = torch.full((7,), -1), torch.arange(7, dtype=torch.int32)
        insert(keys, values, torch.tensor([5, 9]), torch.tensor([1, 2], dtype=torch.int32))
        tables.append(values)
    assert torch.equal(*tables)
