"""Pooling kernels under Triton's interpreter against the references, in a process of its own.

``interpret_pool.py some|every``: values of one dtype, drawn anew each time, or of every one.
"""

from __future__ import annotations

import os
import random
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from shiplap.errors import ShiplapError
from shiplap_sparse3d import pooling
from shiplap_sparse3d.cuda import pool, status
from shiplap_sparse3d.cuda import scenes as over

CPU = torch.device("cpu")


def outputs(op, args, **sizes):
    """Garbage of the declared outputs, shaped like the reference's."""
    want = op.reference(*args)
    want = want if isinstance(want, tuple) else (want,)
    return want, [torch.full_like(w, 77) for w in want]


def kernel_of(name):
    return getattr(over if name.startswith("global") else pool, name)


def same(op, args, scratch: int | None = None):
    want, got = outputs(op, args)
    names = [o.name for o in op.spec.outputs]
    extra = {} if scratch is None else {"workspace": torch.full((scratch,), 0xAB, dtype=torch.uint8)}
    kernel_of(op.spec.opname)(*args, **dict(zip(names, got, strict=True)), **extra)
    status.poll(CPU)
    tolerance = 2e-3 if want[0].dtype == torch.float16 else 1e-5 if want[0].dtype == torch.float32 else 1e-12
    for w, g in zip(want, got, strict=True):
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance, equal_nan=True)


def table_of(rng, m, n, k):
    span = max(1, 2 * max(m, n))
    table = torch.stack([torch.randperm(span, generator=rng)[:m] for _ in range(k)], 1)
    return torch.where(table < n, table, -1).int()


def over_tables(rng, dtype, m, n, k, c):
    feats = (torch.randint(-9, 3, (n, c), generator=rng) / 4).to(dtype)  # with ties
    feats[torch.rand(n, c, generator=rng) < 0.05] = torch.nan
    feats[torch.rand(n, c, generator=rng) < 0.05] = -torch.inf
    table = table_of(rng, m, n, k)
    back = pooling.transpose_table.reference(table, n)
    same(pooling.max_pool_with_taps, (feats, table.t().contiguous().t(), None))
    taps = pooling.max_pool_with_taps.reference(feats, table)[1]
    grad = torch.randn(1, c, generator=rng).to(dtype).expand(m, c)  # as of a sum
    same(pooling.max_pool_grad, (grad, taps, back.t().contiguous().t()))
    plain = torch.randn(n, 2 * c + 1, generator=rng).to(dtype)[:, 1::2]  # any strides
    for average in (False, True):
        same(pooling.sum_pool, (plain, table.t().contiguous().t(), None, average))


def over_scenes(rng, dtype, n, c, scenes):
    feats = (torch.randint(-9, 3, (n, c), generator=rng) / 4).to(dtype)
    scene = torch.randint(-1, max(1, scenes - 1), (n, 1), generator=rng, dtype=torch.int32)  # the last one is empty
    coords = scene.expand(n, 4)
    parts = min(-(-n // over.PART), over.PARTS) * scenes
    same(pooling.global_sum_pool, (feats, coords, scenes, False), parts * (8 * c + 8))
    same(pooling.global_sum_pool, (feats, coords, scenes, True), parts * (8 * c + 8))
    feats[torch.rand(n, c, generator=rng) < 0.01] = torch.nan
    feats[:, :1] = -torch.inf
    same(pooling.global_max_pool, (feats, coords, scenes), parts * 4 * c)


def told(op, *args, **outs):
    kernel_of(op)(*args, **outs)
    try:
        status.poll(CPU)
    except ShiplapError as e:
        return e.got
    return ""


if __name__ == "__main__":
    rng = torch.Generator().manual_seed(torch.seed() % 2**31)
    over.PART, pool.TILE = 32, 512  # several parts and blocks of few rows
    dtypes = torch.float32, torch.float16, torch.float64
    for dtype in dtypes if sys.argv[1] == "every" else (random.choice(dtypes),):
        for m, n, k, c in ((0, 3, 8, 4), (1, 1, 1, 1), (40, 25, 8, 3), (20, 0, 4, 5)):
            over_tables(rng, dtype, m, n, k, c)
        for n, c, scenes in ((0, 3, 2), (1, 1, 1), (90, 5, 3)):
            over_scenes(rng, dtype, n, c, scenes)
    over_tables(rng, torch.float32, 9, 12, 3, 130)
    over_tables(rng, torch.float32, 5, 9, 130, 2)
    feats, out = torch.ones(3, 2), torch.empty(2, 2)
    bad = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    assert told("sum_pool", feats, bad, None, False, out=out) == "table row 1 has an entry outside its range"
    assert torch.equal(out, torch.tensor([[2.0, 2.0], [1.0, 1.0]]))
    coords = torch.tensor([[0, 0, 0, 0], [-1, 0, 0, 0], [2, 0, 0, 0]], dtype=torch.int32)
    message = told("global_sum_pool", feats, coords, 2, False, out=out, workspace=torch.empty(64, dtype=torch.uint8))
    assert message == "coords row 2 has a batch index outside [-1, batch_size)"
    print("pooling kernels agree")
