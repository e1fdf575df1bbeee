"""Tables, sorted tables, coordinates and points to voxels on a GPU: Triton kernels beside the references."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap_sparse3d import ops
from shiplap_sparse3d.plan import parts_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda"
WINDOW = [3, 3, 3], [2, 2, 2], [1, 1, 1], [1, 1, 1]
READS_BACK = ("out_coords", "unique_coords")  # a size that only the data knows
NAMES = (
    "subm_table",
    "subm_plan",
    "out_coords_bounded",
    "conv_table",
    "conv_plan",
    "transpose_table",
    "sort_table",
    "tap_blocks",
    "segment_mean",
    *READS_BACK,
)
SYNC_FREE = tuple(name for name in NAMES if name not in READS_BACK)


def op(name: str) -> sl.Op:
    declared: sl.Op = getattr(sparse3d, name)
    return declared


def scene(rows: int, padding: float = 0.1) -> tuple[torch.Tensor, list[int]]:
    """Fresh voxels in any order, some of the rows padding, in two grids of which they fill a third."""
    edge = max(4, math.ceil((1.5 * rows) ** (1 / 3)))
    grid = [edge, edge + 1, edge + 2]
    cells = torch.randperm(2 * math.prod(grid), device=DEVICE)[:rows]
    z, rest = cells % grid[2], cells // grid[2]
    coords = torch.stack([rest // grid[1] // grid[0], rest // grid[1] % grid[0], rest % grid[1], z], 1).int()
    coords[torch.rand(rows, device=DEVICE) < padding] = -1
    return coords, grid


def arguments(name: str, rows: int) -> tuple[Any, ...]:
    """Fresh ones, always of the same sizes."""
    coords, grid = scene(rows)
    reached = ops.out_coords.reference(coords, grid, *WINDOW)
    queries = torch.nn.functional.pad(reached, (0, 0, 0, 2 * rows + 300 - len(reached)), value=-1)
    queries = queries[torch.randperm(len(queries), device=DEVICE)]
    table = ops.conv_table.reference(coords, queries, grid, *WINDOW)
    index = torch.randint(0, rows // 3 + 1, (rows,), dtype=torch.int32, device=DEVICE)
    counts = torch.bincount(index, minlength=rows // 3 + 2).int()
    parts = parts_for(rows, 27)
    return {
        "subm_table": (coords, grid, WINDOW[0], WINDOW[3]),
        "subm_plan": (coords, grid, WINDOW[0], WINDOW[3], parts),
        "out_coords_bounded": (coords, grid, *WINDOW, len(queries)),
        "conv_table": (coords, queries, grid, *WINDOW),
        "conv_plan": (coords, queries, grid, *WINDOW, parts_for(len(queries), 27), parts),
        "transpose_table": (table, rows),
        "sort_table": (table, parts_for(len(table), 27)),
        "tap_blocks": (torch.randint(0, 2**9, (3, rows // 64 + 1), dtype=torch.int32, device=DEVICE), 27),
        "segment_mean": (torch.randn(rows, 20, device=DEVICE), index, counts),
        "out_coords": (coords, grid, *WINDOW),
        "unique_coords": (coords // 2,),
    }[name]


def outputs(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def agrees(name: str, result: Any, args: tuple[Any, ...]) -> None:
    """Integers are those of the reference; means are those of float64."""
    if name == "segment_mean":
        exact = ops.segment_mean.reference(args[0].double(), *args[1:])
        torch.testing.assert_close(result, exact.float(), rtol=1e-5, atol=1e-6)
        return
    for got, want in zip(outputs(result), outputs(op(name).reference(*args)), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [0, 1, 63, 3000, 20_000, 300_000])
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_agrees_with_the_reference_and_with_itself(name, rows):
    args = arguments(name, rows)
    assert [kernel.name for kernel in op(name).kernels["cuda"]] == ["triton"]
    actual = op(name)(*args)
    agrees(name, actual, args)
    assert all(map(torch.equal, outputs(actual), outputs(op(name)(*args))))
    sparse3d.synchronize()


@pytest.mark.parametrize("parts", [1, 3, 9, 27])
@pytest.mark.parametrize("run", [1000, 1 << 18])
def test_every_form_of_a_sorted_table(parts, run):
    """Few rows or many, a part counted or sorted, in runs or whole."""
    for rows in (500, 9000, 140_000):
        coords, grid = scene(rows)
        step = coords, ops.out_coords.reference(coords, grid, *WINDOW), grid, *WINDOW, parts, 28 - parts, run
        agrees("conv_plan", sparse3d.conv_plan(*step), step)
        for name, args in (
            ("subm_plan", (coords, grid, *WINDOW[::3])),
            ("sort_table", arguments("sort_table", rows)[:1]),
        ):
            agrees(name, op(name)(*args, parts, run), (*args, parts, run))


@pytest.mark.parametrize("rows", [40_000, 140_000, 270_000])
@pytest.mark.parametrize("scenes", [0, 2])
def test_many_voxels_in_any_order(rows, scenes):
    """In a hash, and a word for each brick where the number of scenes is known; sorted by digits, and by torch."""
    coords, grid = scene(rows)
    for parts, run in ((parts_for(rows, 27), 1 << 18), (1, 1 << 16), (2, 8192)):
        args = coords, grid, *WINDOW[::3], parts, run, scenes
        agrees("subm_plan", sparse3d.subm_plan(*args), args)
    window = coords, grid, [2, 3, 2], [1, 1, 1], 1, 1 << 18, scenes
    agrees("subm_plan", sparse3d.subm_plan(*window), window)
    sparse3d.synchronize()


def test_a_scene_beyond_the_last_is_told():
    for rows in (500, 40_000):
        coords, grid = scene(rows)
        sparse3d.Geometry(coords, grid, 1).subm(3)
        with pytest.raises(sl.ShiplapError, match="of a scene beyond the last"):
            sparse3d.synchronize()


@pytest.mark.parametrize(("kernel", "parts"), [([2, 2, 2], 5), ([5, 3, 1], 9)])
def test_parts_without_taps(kernel, parts):
    for rows in (500, 20_000):
        coords, grid = scene(rows)
        window = kernel, [2, 2, 2], [0, 0, 0], [1, 1, 1]
        reached = ops.out_coords.reference(coords, grid, *window)
        for run in (1000, 1 << 18):
            step = coords, reached, grid, *window, parts, parts, run
            agrees("conv_plan", sparse3d.conv_plan(*step), step)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_means_of_every_dtype_of_views_and_of_long_segments(dtype):
    index = torch.cat([torch.zeros(40_000), torch.arange(5000) % 700]).int().to(DEVICE)
    feats = torch.randn(len(index), 300, device=DEVICE).to(dtype)[:, ::2]
    counts = torch.bincount(index, minlength=705).int()
    got, want = ops.segment_mean(feats, index, counts), ops.segment_mean.reference(feats.double(), index, counts)
    torch.testing.assert_close(got, want.to(dtype))
    assert torch.equal(got, ops.segment_mean(feats, index, counts))


def test_rows_that_span_too_many_cells_are_refused_at_once():
    corners = torch.tensor([[-(2**31)] * 4, [2**31 - 1] * 4], dtype=torch.int32, device=DEVICE)
    with pytest.raises(sl.ShiplapError, match=r"SL211(.|\n)*2\^63 or more"):
        sparse3d.unique_coords(corners)
    corners[0, 1], corners[1, 1], corners[:, 2:] = 0, 2**30, 7
    agrees("unique_coords", sparse3d.unique_coords(corners), (corners,))


# --- the host ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYNC_FREE)
def test_nothing_waits_for_the_device(name):
    every = [arguments(name, rows) for rows in (0, 1, 2000, 30_000)]
    for args in every:
        op(name)(*args)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for args in every:
            op(name)(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    sparse3d.synchronize()


def captured(name: str, args: tuple[Any, ...]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of one call, which was made before, and what it writes."""
    op(name)(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = op(name)(*args)
    return graph, outputs


def refill(args: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    for mine, new in zip(args, values, strict=True):
        if isinstance(mine, torch.Tensor):
            mine.copy_(new)


@pytest.mark.parametrize("rows", [1, 3000, 150_000])
@pytest.mark.parametrize("name", SYNC_FREE)
def test_a_replayed_graph_is_right_with_new_values(name, rows):
    args = arguments(name, rows)
    graph, outputs = captured(name, args)
    for _ in range(2):
        refill(args, arguments(name, rows))
        graph.replay()
        agrees(name, outputs, args)
    sparse3d.synchronize()


# --- late errors ------------------------------------------------------------------------------------------------------


def broken(name: str, fault: str) -> tuple[Any, ...]:
    """Arguments of ``name`` of the usual sizes with one fault."""
    args = arguments(name, 3000)
    first, *rest = args
    if fault == "duplicate":
        first[17] = first[2900] = torch.tensor([1, 2, 3, 1], dtype=torch.int32, device=DEVICE)
        others = first.eq(first[17]).all(1)
        others[[17, 2900]] = False
        first[others] = -1
    elif fault == "outside":
        first[2900] = torch.tensor([0, 3, -1, 2], dtype=torch.int32, device=DEVICE)
    elif fault == "a scene below padding":
        first[2900] = torch.tensor([-2, 3, 1, 2], dtype=torch.int32, device=DEVICE)
    elif fault == "outside the output grid":
        rest[0][5] = torch.tensor([0, 1, 1, 4000], dtype=torch.int32, device=DEVICE)
    elif fault == "an output twice":
        hits = (ops.conv_table.reference(*args[:7]) >= 0).any(1).nonzero()[0, 0]
        first_output = rest[0][hits].clone()
        rest[0][hits] = -1
        rest[0][5:7] = first_output
    elif fault == "entry":
        first[40, 3] = 3000
    elif fault == "entry twice":
        first[40, 3] = first[90, 3] = 7
    elif fault == "index":
        rest[0][1234] = len(rest[1])
    return args


FAULTS = [
    *[
        (name, fault, f"SL211(.|\n)*{reason}")
        for name in ("subm_table", "subm_plan", "conv_table", "conv_plan")
        for fault, reason in (
            ("duplicate", "duplicate coordinates: row (17|2900) "),
            ("outside", "row 2900 is outside"),
            ("a scene below padding", "row 2900 is outside"),
        )
    ],
    ("out_coords_bounded", "outside", "SL211(.|\n)*row 2900 is outside"),
    ("conv_table", "outside the output grid", "SL211(.|\n)*out_coords row 5 is outside"),
    ("conv_plan", "outside the output grid", "SL211(.|\n)*out_coords row 5 is outside"),
    ("conv_plan", "an output twice", "SL211(.|\n)*out_coords row [56] occurs more than once"),
    ("transpose_table", "entry", r"SL211(.|\n)*row 40 has an entry outside \[-1, rows\)"),
    ("transpose_table", "entry twice", "SL211(.|\n)*occurs twice under its tap"),
    ("segment_mean", "index", r"SL211(.|\n)*index\[1234\] is not a row of counts"),
]


@pytest.mark.parametrize(("name", "fault", "match"), FAULTS)
def test_what_was_wrong_is_told_once_by_the_next_call_or_when_waited_for(name, fault, match):
    good, bad = arguments("subm_table", 50), broken(name, fault)
    with pytest.raises(sl.ShiplapError, match="SL211"):
        op(name).reference(*bad)
    for waits in (sparse3d.synchronize, lambda: sparse3d.subm_table(*good)):
        op(name)(*bad)
        torch.cuda.synchronize()
        with pytest.raises(sl.ShiplapError, match=match):
            waits()
        agrees("subm_table", sparse3d.subm_table(*good), good)
        sparse3d.synchronize()


@pytest.mark.parametrize(("name", "fault", "match"), FAULTS)
def test_what_was_wrong_in_a_replayed_graph_is_told(name, fault, match):
    args = arguments(name, 3000)
    graph, outputs = captured(name, args)
    bad = broken(name, fault)
    refill(args, bad)
    graph.replay()
    with pytest.raises(sl.ShiplapError, match=match):
        sparse3d.synchronize()
    refill(args, arguments(name, 3000))
    graph.replay()
    agrees(name, outputs, args)
    sparse3d.synchronize()


@pytest.mark.parametrize("capacity", [0, 5, 400])
def test_more_voxels_than_the_capacity_are_told_and_what_is_there_is_inside(capacity):
    coords, grid = scene(3000)
    reached, count = sparse3d.out_coords_bounded(coords, grid, *WINDOW, capacity)
    with pytest.raises(sl.ShiplapError, match=f"more than {capacity} output voxels"):
        sparse3d.synchronize()
    assert int(count) == capacity
    inside = ((reached[:, 1:] >= 0) & (reached[:, 1:] < torch.tensor(grid, device=DEVICE))).all(1)
    assert (inside | (reached == -1).all(1)).all()


# --- size and place ---------------------------------------------------------------------------------------------------


@pytest.mark.whole_device
def test_a_plan_of_more_than_2_to_the_31_entries():
    n, line = 80_000_000, [1, 1, 27]
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("60 GiB of GPU memory")
    coords = torch.zeros(n, 4, dtype=torch.int32, device=DEVICE)
    coords[:, 3] = torch.arange(n, device=DEVICE)
    table = sparse3d.subm_table(coords, [1, 1, n], line, [1, 1, 1])
    assert table.numel() > 2**31
    for rows in (torch.arange(n - 1000, n, device=DEVICE), torch.randint(0, n, (1000,), device=DEVICE)):
        want = rows[:, None] + torch.arange(-13, 14, device=DEVICE)
        assert torch.equal(table[rows], torch.where((want >= 0) & (want < n), want, -1).int())
    columns, order, _ = sparse3d.subm_plan(coords, [1, 1, n], line, [1, 1, 1], 3)
    for part in range(3):
        places = torch.cat([torch.arange(n - 1000, n), torch.randint(0, n, (1000,))]).to(DEVICE)
        taps = slice(9 * part, 9 * part + 9)
        assert torch.equal(columns[taps, places].t(), table[order[part, places].long(), taps])
    sparse3d.synchronize()


@pytest.mark.whole_device
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_kernels_run_where_their_tensors_are(name):
    args = arguments(name, 3000)
    outputs = op(name)(*(a.to("cuda:1") if isinstance(a, torch.Tensor) else a for a in args))
    agrees(name, tuple(t.to(DEVICE) for t in outputs) if isinstance(outputs, tuple) else outputs.to(DEVICE), args)
    sparse3d.synchronize("cuda:1")
