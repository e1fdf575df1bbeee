"""Pooling kernels under Triton's interpreter against the references, in a process of its own.

``interpret_pool.py some|every``: values of one dtype, drawn anew each time, or of every one.
"""

from __future__ import annotations

import os
import random
import sys

os.environ["TRITON_INTERPRET"] = "1"

import warnings

import torch

import shiplap as sl
from shiplap.errors import ShiplapError
from shiplap.op.expr import Expr
from shiplap.op.kernel import Terms
from shiplap.op.launch import workspace_size
from shiplap_sparse3d import pooling
from shiplap_sparse3d.cuda import MAX_PARTS, SUM_PARTS, pool, status
from shiplap_sparse3d.cuda import scenes as over

CPU = torch.device("cpu")
TILE, PART = 512, 32  # blocks of few rows, and several parts
PROGRAMS = {  # the shipped ones, and those of small blocks
    "max_pool_with_taps": (pool.MAX_POOL, pool.max_pool(TILE)),
    "max_pool_grad": (pool.MAX_POOL_GRAD, pool.max_pool_grad(TILE)),
    "sum_pool": (pool.SUM_POOL, pool.sum_pool(TILE)),
    "global_max_pool": (over.GLOBAL_MAX_POOL, over.global_max_pool(PART, TILE)),
    "global_sum_pool": (over.GLOBAL_SUM_POOL, over.global_sum_pool(PART, TILE)),
}
GUARD = 64  # bytes behind a workspace that nobody may touch


def outputs(op, args, **sizes):
    """Garbage of the declared outputs, shaped like the reference's."""
    want = op.reference(*args)
    want = want if isinstance(want, tuple) else (want,)
    return want, [torch.full_like(w, 77) for w in want]


def launch(op, program, args, outs, workspace=""):
    """Run the program with a poisoned workspace of so many bytes, behind which nothing may change."""
    call, room = op.bind(op.spec.complete(args)), Expr.parse(workspace, "test") if workspace else None
    size = workspace_size(room, call)
    memory = torch.full((size + GUARD,), 0xAB, dtype=torch.uint8)
    kernel = program.bind(op.spec, Terms("triton", "cpu", "", workspace=room))
    kernel.into(call, outs, memory[:size] if size else None)
    assert bool((memory[size:] == 0xAB).all()), f"{op.spec.opname} writes behind its workspace"


def same(op, args, workspace=""):
    want, _ = outputs(op, args)
    tolerance = 2e-3 if want[0].dtype == torch.float16 else 1e-5 if want[0].dtype == torch.float32 else 1e-12
    for program, part in zip(PROGRAMS[op.spec.opname], (over.PART, PART), strict=True):
        got = outputs(op, args)[1]
        launch(op, program, args, got, workspace.replace(f"cdiv(n, {over.PART})", f"cdiv(n, {part})"))
        status.poll(CPU)
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
    same(pooling.max_pool_with_taps, (feats, table, None))
    taps = pooling.max_pool_with_taps.reference(feats, table)[1]
    same(pooling.max_pool_grad, (torch.randn(m, c, generator=rng).to(dtype), taps, back))
    plain = torch.randn(n, 2 * c + 1, generator=rng).to(dtype)[:, 1::2]  # any strides
    for average in (False, True):
        same(pooling.sum_pool, (plain, table.t().contiguous().t(), None, average))


def over_scenes(rng, dtype, n, c, scenes):
    feats = (torch.randint(-9, 3, (n, c), generator=rng) / 4).to(dtype)
    coords = torch.randint(-1, max(1, scenes - 1), (n, 4), generator=rng, dtype=torch.int32)  # the last one is empty
    same(pooling.global_sum_pool, (feats, coords, scenes, False), SUM_PARTS)
    same(pooling.global_sum_pool, (feats, coords, scenes, True), SUM_PARTS)
    feats[torch.rand(n, c, generator=rng) < 0.01] = torch.nan
    feats[:, :1] = -torch.inf
    same(pooling.global_max_pool, (feats, coords, scenes), MAX_PARTS)


def told(op, *args, out, workspace=""):
    launch(op, PROGRAMS[op.spec.opname][0], args, [out], workspace)
    try:
        status.poll(CPU)
    except ShiplapError as e:
        return e.got
    return ""


if __name__ == "__main__":
    warnings.simplefilter("ignore", sl.ShiplapNotice)  # the launcher says that the interpreter launches otherwise
    rng = torch.Generator().manual_seed(torch.seed() % 2**31)
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
    assert told(pooling.sum_pool, feats, bad, None, False, out=out) == "table row 1 has an entry outside its range"
    assert torch.equal(out, torch.tensor([[2.0, 2.0], [1.0, 1.0]]))
    coords = torch.tensor([[0, 0, 0, 0], [-1, 0, 0, 0], [2, 0, 0, 0]], dtype=torch.int32)
    message = told(pooling.global_sum_pool, feats, coords, 2, False, out=out, workspace="64")
    assert message == "coords row 2 has a batch index outside [-1, batch_size)"
    print("pooling kernels agree")
