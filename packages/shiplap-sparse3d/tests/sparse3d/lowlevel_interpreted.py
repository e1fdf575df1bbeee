"""Run by test_lowlevel_triton.py in a process of its own: the Triton kernels, interpreted, on CPU tensors.

``lowlevel_interpreted.py SEED some|every``: every third sample of each op, or all of them.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
import warnings

import pytest
import torch

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap_sparse3d.cuda import curves, hashmap, postprocess, sample, status
from tests.sparse3d.lowlevel_cases import OPS, disagreements

CPU = torch.device("cpu")


def told(match: str) -> None:
    """What went wrong is told by the next call."""
    with pytest.raises(sl.ShiplapError, match="SL211") as caught:
        status.poll(CPU)
    assert match in str(caught.value)


def late_errors() -> None:
    keys, values = torch.full((4,), -1), torch.full((4,), -1, dtype=torch.int32)
    hashmap.insert_keys("hash_insert", keys, values, torch.arange(4), torch.arange(4, dtype=torch.int32))
    status.poll(CPU)  # exactly full is not too full
    assert values[values >= 0].sort().values.tolist() == [0, 1, 2, 3]
    hashmap.insert_keys("hash_insert", keys, values, torch.arange(9), torch.arange(9, dtype=torch.int32))
    told("finds no room")
    hashmap.insert_keys("hash_insert", keys[:0], values[:0], torch.arange(2), torch.arange(2, dtype=torch.int32))
    told("finds no room")
    outside = torch.tensor([[0, 1, 1, 1], [0, 5, 0, 0], [-1, -1, -1, -1]], dtype=torch.int32)
    table = sparse3d.init_hashmap(3)
    hashmap.insert_voxels("hash_insert_3d_index", *table, outside, None, [4, 4, 4])
    told("coords row 1")
    errors = torch.empty(3, dtype=torch.int32)
    hashmap.look_up_voxels(*table, outside, [4, 4, 4], errors)
    status.poll(CPU)  # a search outside the grid finds nothing, and is no mistake
    assert errors.tolist() == [0, -1, -1]
    hashmap.look_up_voxels(*table, torch.tensor([[4, 0, 0, 0]]).int(), [2**31 - 1, 2**15, 2**15], errors[:1])
    told("2^63 cells")
    codes = torch.empty(3, dtype=torch.int64)
    curves.encode_curve("z_order_encode", outside, 2, [0, 1, 2], 63, codes)
    told("coords row 1")
    assert codes.tolist() == [7, -1, -1]
    curves.decode_curve("hilbert_decode", torch.tensor([5, -2]), 2, [0, 1, 2], torch.empty(2, 4, dtype=torch.int32))
    told("codes[1]")
    twice = torch.tensor([[0, 1, 1, 1], [0, 2, 2, 2], [0, 1, 1, 1]], dtype=torch.int32)
    rows = torch.empty(1, 1, dtype=torch.int32)
    sample.find_queries("nearest_map", twice, torch.full((1, 1, 3), 1.5), [4, 4, 4], rows, None)
    told("duplicate coordinates: row 2")
    assert int(rows) == 0
    entries = torch.tensor([[0, 7], [-2, 1]], dtype=torch.int32)
    for run in (
        lambda: sample.weighted_sum(torch.ones(2, 3), entries, torch.ones(2, 2), torch.empty(2, 3)),
        lambda: sample.weighted_sum_grad(torch.ones(2, 3), entries, torch.ones(2, 2), 2, torch.empty(2, 3)),
    ):
        run()
        told("outside")
    postprocess.launch_kernels(
        torch.ones(2, dtype=torch.int32),
        torch.tensor([0, 9]),
        2,
        torch.empty(32, dtype=torch.int32),
        torch.empty(2, dtype=torch.int32),
    )
    told("sorted_index[1]")


if __name__ == "__main__":
    warnings.simplefilter("ignore", sl.ShiplapNotice)  # the launcher says that the interpreter launches otherwise
    late_errors()
    seed, step = int(sys.argv[1]), 1 if sys.argv[2] == "every" else 5
    for op in OPS:  # bf16 is wrong in the interpreter
        differing = disagreements(op, seed=seed, without=(torch.bfloat16,), step=step)
        status.poll(CPU)
        assert not differing, f"{op}: {differing}"
    print("agree")
