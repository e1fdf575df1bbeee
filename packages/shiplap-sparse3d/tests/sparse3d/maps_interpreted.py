"""Run by test_maps.py in a process of its own: the Triton kernels, interpreted, on CPU tensors.

``maps_interpreted.py SEED some|every [FOLDER]``: each case says that it agrees, or what does not. Of the sizes and
forms of a case the seed draws ``some``. Modules in ``FOLDER`` stand before those of the package: wrong ones, which must
not agree.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import math
import random
import sys
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
import torch
import triton

import shiplap as sl
from shiplap.declare.dim_expression import Expr
from shiplap.declare.kernel import KernelTerms
from shiplap.plugin_api import TritonLaunches
from shiplap_sparse3d import bounded, cuda, ops, planning
from shiplap_sparse3d.coords import output_shape

cuda.__path__[:0] = sys.argv[3:]  # before its modules are imported

from shiplap_sparse3d.cuda import digits  # noqa: E402

digits.PAGE, digits.GROUP = 128, triton.language.constexpr(2)  # so that few rows have several pages and groups
digits.BITS, digits.PASSES = 7, 5  # whose counts fit a workspace for few rows

from shiplap_sparse3d.cuda import (  # noqa: E402
    BOUNDED,
    CONV_PLAN,
    FIRST,
    HASH,
    KEYS,
    SET,
    SORT,
    SUBM_PLAN,
    cells,
    coords,
    plain_tables,
    sort,
    status,
    tables,
    unique,
)

CPU = torch.device("cpu")
WORKSPACES = {
    "subm_table": (plain_tables.subm_table, HASH),
    "conv_table": (plain_tables.conv_table, HASH),
    "transpose_table": (tables.TRANSPOSE_TABLE, None),
    "sort_table": (sort.SORT_TABLE, SORT.format("m")),
    "subm_plan": (tables.SUBM_PLAN, SUBM_PLAN),
    "conv_plan": (tables.CONV_PLAN, CONV_PLAN),
    "tap_blocks": (sort.TAP_BLOCKS, None),
    "out_coords_bounded": (coords.BOUNDED, BOUNDED),
    "reached_keys": (coords.REACHED_KEYS, SET),
    "first_voxels": (cells.FIRST_VOXELS, FIRST),
    "voxels_of_keys": (coords.VOXELS_OF_KEYS, KEYS),
}
GUARD = 64  # bytes behind a workspace that nobody may touch
T = TypeVar("T")


def some(sizes: Sequence[T], count: int) -> Sequence[T]:
    """So many of the sizes, or all of them."""
    return sizes if sys.argv[2] == "every" else random.sample(sizes, count)


def voxels(rng: torch.Generator, rows: int, grid: list[int], scenes: int = 2, padding: float = 0.0) -> torch.Tensor:
    """Distinct rows in any order, some of them padding."""
    cells = torch.randperm(scenes * math.prod(grid), generator=rng)[:rows]
    z, rest = cells % grid[2], cells // grid[2]
    y, rest = rest % grid[1], rest // grid[1]
    coords = torch.stack([rest // grid[0], rest % grid[0], y, z], 1).int()
    coords[torch.rand(len(coords), generator=rng) < padding] = -1
    return coords


def launch(op: Any, code: Any, args: Sequence[Any], outs: Sequence[torch.Tensor], memory: torch.Tensor | None) -> None:
    """Run ``code``, a program or a function that launches, into ``outs``, with ``memory`` as its workspace."""
    if isinstance(code, TritonLaunches):
        call = op.bind(op.spec.complete(args))
        code.bind(op.spec, KernelTerms("triton", "cpu", code)).run_into(call, outs, memory)
        return
    extra = {} if memory is None else {"workspace": memory}
    code(*args, **dict(zip([o.name for o in op.spec.outputs], outs, strict=True)), **extra)


def run(op: Any, *args: Any, code: Any = None, room: str = "") -> tuple[torch.Tensor, ...]:
    """The kernel of ``op`` on poisoned outputs and a poisoned workspace of the declared size."""
    known, workspace = WORKSPACES[op.spec.opname]
    want = op.reference(*args)
    want = want if isinstance(want, tuple) else (want,)
    names, outs = [o.name for o in op.spec.outputs], [torch.full_like(w, 77) for w in want]
    given = dict(zip([a.name for a in op.spec.args], args, strict=False))
    scalars = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
    sizes = {"n": len(args[0]), "m": len(given.get("out_coords", args[0])), "k": math.prod(given.get("kernel", []))}
    size = int(Expr.parse(room or workspace or "0", "test")({**sizes, **scalars}))
    memory = torch.full((size + GUARD,), 0xAB, dtype=torch.uint8)
    launch(op, code or known, args, outs, None if workspace is None else memory[:size])
    status.poll(CPU)
    for name, got, expected in zip(names, outs, want, strict=True):
        if name in op.spec.unordered:
            got, expected = got.sort()[0], expected.sort()[0]
        assert torch.equal(got, expected), f"{op.spec.opname} {name} {scalars}"
    assert bool((memory[size:] == 0xAB).all()), f"{op.spec.opname} writes behind its workspace"
    return tuple(outs)


def submanifold(rng: torch.Generator) -> None:
    sizes = (
        (40, [4, 5, 6], [5, 2, 4], [1, 3, 2], 0.1),
        (0, [4, 4, 4], [3, 3, 3], [1, 1, 1], 0.0),
        (1, [1, 1, 1], [3, 3, 3], [1, 1, 1], 0.0),
        (135, [7, 5, 6], [3, 3, 1], [1, 1, 1], 0.2),  # more than one tile of a counting sort
        (30, [2**21 - 1, 2**20, 2**20], [1, 3, 2], [2**31 - 1, 1, 2**20], 0.1),
    )
    for rows, grid, kernel, dilation, padding in some(sizes, 1):
        at = voxels(rng, rows, grid, padding=padding) if math.prod(grid) < 10**6 else far(rng, rows, grid)
        at = torch.cat([at.new_zeros(1, 4), at])[1:]  # an offset
        for plain_tables.NEAR in (1024, 0):  # compared with each other, and through the hash
            run(ops.subm_table, at, grid, kernel, dilation)
        taps = math.prod(kernel)
        for parts, near, run_of in ((-(-taps // 31), 0, 1 << 18), (-(-taps // 3), 1024, 50)):
            code = tables.subm_plan(near, 10**6, 10**6)
            run(planning.subm_plan, at, grid, kernel, dilation, parts, run_of, code=code)


def bricks(rng: torch.Generator) -> None:
    """Many voxels: of one part and more, of a run and several, of windows that are not cubes."""
    sizes = (
        (200, [9, 11, 13], [3, 3, 3], 1, 1 << 18, 0.1),
        (330, [5, 9, 20], [3, 3, 3], 2, 256, 0.1),  # two parts of two runs
        (257, [5, 9, 15], [3, 3, 3], 9, 100, 0.0),  # parts of few taps
        (200, [2, 16, 9], [2, 2, 3], 1, 64, 0.2),
        (90, [2**20, 2**20, 2**21 - 1], [2, 3, 3], 1, 1 << 18, 0.0),
    )
    for rows, grid, kernel, parts, run_of, padding in some(sizes, 1):
        at = voxels(rng, rows, grid, padding=padding) if math.prod(grid) < 10**6 else far(rng, rows * 3, grid)
        for scenes in some((0, 2), 1):  # in a hash, and a word for each brick
            run(planning.subm_plan, at, grid, kernel, [1] * 3, parts, run_of, scenes, code=tables.subm_plan(0, 0, 0))
    twice = voxels(rng, 65, [6, 6, 6])
    for row in some(([0], [0, 6, 0, 0], [-2, 0, 0, 0], [2, 0, 0, 0]), 1):
        bad = twice.new_tensor([row]) if len(row) > 1 else twice[:1]
        for scenes in (2,) if row[0] == 2 else some((0, 2), 1):
            arguments = torch.cat([twice, bad]), [6] * 3, [3] * 3, [1] * 3, 1, 1 << 18, scenes
            for least in some((0, 10**6), 1):
                told("duplicate" if len(row) == 1 else "outside", planning.subm_plan, *arguments, least=least)


def far(rng: torch.Generator, rows: int, grid: list[int]) -> torch.Tensor:
    """Voxels at the corners of a vast grid."""
    ends = [torch.tensor([0, 1, w - 2, w - 1])[torch.randint(0, 4, (rows,), generator=rng)] for w in grid]
    return torch.unique(torch.stack([torch.randint(0, 2, (rows,), generator=rng), *ends], 1), dim=0).int()


def steps(rng: torch.Generator) -> None:
    sizes = (
        (0, [[3, 3, 3], [2, 2, 2], [1, 1, 1], [1, 1, 1]]),
        (50, [[3, 3, 3], [2, 2, 2], [1, 1, 1], [1, 1, 1]]),
        (60, [[2, 3, 1], [2, 1, 3], [0, 1, 0], [1, 2, 3]]),
    )
    for rows, window in some(sizes, 1):
        grid = [9, 8, 10]
        at = voxels(rng, rows, grid, padding=0.1)
        reached = ops.out_coords.reference(at, grid, *window)
        most = len(reached)
        run(bounded.out_coords_bounded, at, grid, *window, most + 9, code=coords.out_coords_bounded(0))
        reached, _ = run(bounded.out_coords_bounded, at, grid, *window, most + 9)
        keys, _ = run(bounded.reached_keys, at, grid, *window, most + random.choice((0, 9)))
        keyed(keys, list(output_shape(grid, *window)))
        in_order(at, grid, window, most)
        (table,) = run(ops.conv_table, at, reached, grid, *window)
        run(ops.transpose_table, table, rows)
        k = math.prod(window[0])
        for parts, parts_t, run_of in some(((-(-k // 9), 1, 1 << 18), (1, 0, 40)), 1):
            run(planning.conv_plan, at, reached, grid, *window, parts, parts_t, run_of)
        run(planning.conv_plan, at, reached, grid, *window, k // 2 + 1, 0, 40)  # the last parts have no taps
        odd = reached[: (len(reached) - 1) | 1]  # the keys of the other direction have 64 bits and stay aligned
        run(planning.conv_plan, at, odd, grid, *window, 1, 1, 1)
    run(planning.conv_plan, at, reached[:0], grid, *window, 2, 3, 50)
    nothing_reached(rng)


def nothing_reached(rng: torch.Generator) -> None:
    """A kernel that is wider than the padded grid has no outputs, and inputs as all others."""
    window, grid = ([3, 3, 3], [3, 3, 3], [1, 1, 1], [3, 3, 3]), [4, 3, 3]
    at, second = voxels(rng, 5, grid, padding=0.1), torch.tensor([[1, 3, 2, 2]], dtype=torch.int32)
    at = torch.cat([at[(at != second).any(1)], second])
    assert min(output_shape(grid, *window)) == 0
    for room, scenes in some(((1, 0), (1, 1), (0, 1), (2, 2)), 2):
        run(bounded.first_voxels, at, grid, *window, room, scenes)
    run(bounded.reached_keys, at, grid, *window, 1)
    bad = torch.tensor([[0, 1, 1, 1], [0, 4, 0, 0]], dtype=torch.int32)
    for scenes in (0, 1):
        told("outside", bounded.first_voxels, bad, grid, *window, 2, scenes)


def in_order(at: torch.Tensor, grid: list[int], window: list[list[int]], most: int) -> None:
    """Voxels by a bit for each cell: too few scenes, just enough and more; too little room, just enough and more.

    And by comparison with each other: just enough room and more.
    """
    rooms = (1, most), (2, max(0, most - 3)), (2, most), (3, most + 9), (0, most), (0, most + 50)
    for scenes, room in some(rooms, 2):
        run(bounded.first_voxels, at, grid, *window, room, scenes)
    want = ops.out_coords.reference(at, grid, *window)
    for scenes in some(
        (0, 1, 2), 1
    ):  # by hash, too few scenes, just enough; of windows of stride 1 there are more than inputs
        cells.scenes_for = lambda *_, scenes=scenes: scenes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ops have no kernels for these tensors
            assert torch.equal(cells.out_coords(at, grid, *window), want), f"out_coords by cells of {scenes} scenes"


def keyed(keys: torch.Tensor, grid: list[int]) -> None:
    """Voxels of keys that are compared with each other, and of more than that, which are sorted."""
    run(bounded.voxels_of_keys, keys, grid)
    run(bounded.voxels_of_keys, keys, grid, code=coords.voxels_of_keys(0), room="24 * m")


def sorts(rng: torch.Generator) -> None:
    for parts, b, taps in some(((1, 0, 5), (3, 1, 27), (2, 700, 40), (9, 2000, 27), (4, 30, 3), (1, 3, 0)), 2):
        masks = torch.randint(0, 2**31 - 1, (b, parts), generator=rng).int().t()
        run(ops.tap_blocks, masks & torch.randint(0, 2**31 - 1, (parts, 1), generator=rng).int(), taps)
    for m, k in some(((0, 27), (1, 9), (64, 5), (1200, 5), (135, 40), (90, 1)), 1):
        table = torch.where(torch.rand(m, k, generator=rng) < 0.3, torch.randint(0, 9, (m, k), generator=rng), -1).int()
        for parts in sorted({-(-k // 31), -(-k // 9), -(-k // 3)}):
            run(ops.sort_table, table, parts, 1 << 18)
        run(ops.sort_table, table, -(-k // 9), 100)
        run(ops.sort_table, table, -(-k // 31), 256)  # by digits
    run(ops.sort_table, torch.arange(-1, 59).int().view(10, 6), 6, 1 << 18)  # a part for each tap


def points(rng: torch.Generator) -> None:
    """Distinct rows, and means of those that share one; some segments are empty, and rows are views."""
    for n in (0, 1, 700):
        rows = torch.randint(-3, 4, (n, 4), generator=rng).int()
        for at in some((rows, rows.new_zeros(4, n).t().copy_(rows), rows * 2**13), 1):
            for got, want in zip(unique.unique_coords(at), ops.unique_coords.reference(at), strict=True):
                assert torch.equal(got, want), "unique_coords"
        if n:
            corners = torch.cat([rows[:1].fill_(-(2**31)), torch.full((1, 4), 2**31 - 1, dtype=torch.int32)])
            with pytest.raises(sl.ShiplapError, match=r"span \(4294967296(, 4294967296){3}\) cells"):
                unique.unique_coords(corners)
        sizes = (
            (9, 5, torch.float32),
            (60, 150, torch.float64),
            (3, 1, torch.float16),
            (2, 0, torch.float32),
        )
        for m, c, dtype in some(sizes, 1):
            index = torch.randint(0, m - 1, (n,), generator=rng).int()
            feats = torch.randn(2 * n, c, generator=rng).to(dtype)[::2]
            args = feats, index, torch.bincount(index, minlength=m).int()
            got = torch.full((m, c), torch.nan, dtype=dtype)
            unique.segment_mean(*args, out=got)
            status.poll(CPU)
            want = ops.segment_mean.reference(feats.double(), *args[1:])
            torch.testing.assert_close(got, want.to(dtype))
    for bad, m in ((-1, 3), (3, 3), (0, 0)):
        args = torch.ones(2, 4), torch.tensor([0, bad], dtype=torch.int32), torch.ones(m, dtype=torch.int32)
        unique.segment_mean(*args, out=torch.empty(m, 4))
        with pytest.raises(sl.ShiplapError, match=r"index\[\d\] is not a row of counts"):
            status.poll(CPU)


def told(match: str, op: Any, *args: Any, least: int | None = None) -> None:
    """What is wrong with the arguments is told by the next call. ``least``: of more voxels than that in bricks."""
    with pytest.raises(sl.ShiplapError, match=match):
        op.reference(*args)
    known = WORKSPACES[op.spec.opname][0] if least is None else tables.subm_plan(0, least, least)
    n = len(args[0])
    shapes = [(n, 27)] if len(op.spec.outputs) == 1 else [(27, n), (9, n), (9, -(-n // 64))]
    outs = [torch.empty(shape, dtype=torch.int32) for shape in shapes]
    if op is bounded.first_voxels:
        outs = [torch.empty(args[-2], 4, dtype=torch.int32), torch.empty(1, dtype=torch.int64)]
    scratch = torch.empty(1 << 18, dtype=torch.uint8)
    launch(op, known, args, outs, scratch)
    with pytest.raises(sl.ShiplapError, match=match):
        status.poll(CPU)
    status.poll(CPU)


def late_errors(rng: torch.Generator) -> None:
    at = torch.tensor([[0, 1, 1, 1], [0, 2, 2, 2], [1, 3, 3, 3], [0, 0, 1, 2]], dtype=torch.int32)
    arguments = [4, 4, 4], [3, 3, 3], [1, 1, 1]
    rows = ([0, 2, 2, 2], "duplicate"), ([0, 4, 0, 0], "outside"), ([-2, 0, 0, 0], "outside")
    for row, match in some(rows, 1):
        bad = at.clone()
        bad[3] = torch.tensor(row)
        for plain_tables.NEAR in (1024, 0):
            told(match, ops.subm_table, bad, *arguments)
        told(match, planning.subm_plan, bad, *arguments, 9, 1 << 18)
        told(match, ops.conv_table, bad, at, *arguments[:2], *[[1, 1, 1]] * 3)
    bad = at.clone()
    bad[1, 3] = 9
    told("outside", ops.conv_table, at, bad, *arguments[:2], *[[1, 1, 1]] * 3)


if __name__ == "__main__":
    warnings.simplefilter("ignore", sl.ShiplapNotice)  # the launcher says that the interpreter launches otherwise
    random.seed(int(sys.argv[1]))
    generator = torch.Generator().manual_seed(int(sys.argv[1]))
    for case in (late_errors, points, submanifold, bricks, steps, sorts):
        try:
            case(generator)
        except (AssertionError, pytest.fail.Exception, sl.ShiplapError) as failure:
            print(case.__name__, "differs:", str(failure).splitlines()[0])
        else:
            print(case.__name__, "agrees")
