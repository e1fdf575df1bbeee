"""Each op's CPU kernel against its reference, over the edges; and what the ops refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap.kernels.native import build_plan as plan
from shiplap_sparse3d import plan as plans
from shiplap_sparse3d.steps import StepWindow, connect_voxels, output_cells
from tests.sparse3d.scenes import scene

ONE = [1, 1, 1]


def same(op: sl.Op, *args: object) -> None:
    """Kernel and reference agree: exactly for integers, to 1e-12 relative in float64."""
    got, want = op(*args), op.reference(*args)
    for a, b in zip(
        got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True
    ):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert torch.equal(a, b) if not a.is_floating_point() else torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [0, 1, 2, 17, 500])
def test_unique_coords(n):
    same(sparse3d.unique_coords, torch.randint(-5, 6, (n, 4), dtype=torch.int32))


def test_unique_coords_takes_the_whole_int32_range_of_one_axis():
    coords = torch.zeros(4, 4, dtype=torch.int32)
    coords[:, 2] = torch.tensor([2**31 - 1, -(2**31), 0, 2**31 - 1])
    same(sparse3d.unique_coords, coords)


def test_unique_coords_refuses_extents_beyond_63_bits():
    coords = torch.tensor([[-(2**31)] * 4, [2**31 - 1] * 4], dtype=torch.int32)
    with pytest.raises(sl.ShiplapError, match="SL211"):
        sparse3d.unique_coords(coords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 300])
def test_segment_mean_and_its_gradient(n, dtype):
    index = torch.randint(0, 7, (n,), dtype=torch.int32)
    counts = torch.bincount(index.long(), minlength=9).int()  # two segments stay empty
    feats = torch.randn(n, 5, dtype=dtype, requires_grad=True)
    got = sparse3d.segment_mean(feats, index, counts)
    want = sparse3d.segment_mean.reference(feats, index, counts)
    torch.testing.assert_close(got, want)
    assert not got[7:].any()
    weight = torch.randn_like(got)
    (g,), (w,) = (torch.autograd.grad(t, feats, weight) for t in (got, want))
    torch.testing.assert_close(g, w)


@pytest.mark.parametrize("n", [0, 1, 40, 300])
@pytest.mark.parametrize("kernel", [[1, 1, 1], [3, 3, 3], [2, 2, 2], [5, 1, 3], [4, 3, 2]])
def test_subm_table(n, kernel):
    x = scene(n, (9, 8, 7), 1)
    same(sparse3d.subm_table, x.coords, [9, 8, 7], kernel, [1, 2, 1])


@pytest.mark.parametrize("cells", [[(0, 0, 0)], [(0, 0, 0), (0, 0, 1)], [(8, 7, 6)], [(0, 0, 6), (0, 1, 0)]])
@pytest.mark.parametrize("kernel", [[3, 3, 3], [1, 1, 3], [5, 5, 5], [2, 2, 2]])
def test_tables_at_the_corners_of_the_grid(cells, kernel):
    """From the first cell a tap below the grid has key -1, which also marks the end of the keys."""
    coords = torch.tensor([(0, *cell) for cell in cells], dtype=torch.int32)
    same(sparse3d.subm_table, coords, [9, 8, 7], kernel, ONE)
    same(sparse3d.conv_table, coords, coords, [9, 8, 7], kernel, ONE, [k // 2 for k in kernel], ONE)


@pytest.mark.parametrize("n", [0, 1, 300])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        ([3, 3, 3], [2, 2, 2], [1, 1, 1], ONE),
        ([2, 2, 2], [2, 2, 2], [0, 0, 0], ONE),
        ([1, 1, 1], [2, 2, 2], [0, 0, 0], ONE),
        ([5, 4, 3], [3, 1, 2], [2, 0, 1], [1, 2, 1]),
        ([3, 3, 3], [2, 2, 2], [1, 1, 1], [2, 2, 2]),
    ],
)
def test_out_coords_and_tables(n, kernel, stride, padding, dilation):
    x = scene(n, (9, 8, 11), 1)
    window = ([9, 8, 11], kernel, stride, padding, dilation)
    same(sparse3d.out_coords, x.coords, *window)
    outs = sparse3d.out_coords(x.coords, *window)
    same(sparse3d.conv_table, x.coords, outs, *window)
    same(sparse3d.transpose_table, sparse3d.conv_table(x.coords, outs, *window), n)


@pytest.mark.parametrize("extra", [None, (0, 1, 0)])
@pytest.mark.parametrize("back", [False, True])
def test_a_step_whose_tables_are_sorted_in_one_op_is_that_of_several(extra, back, monkeypatch):
    monkeypatch.setattr(plans, "_STRIDED", plans._PARTS)  # a table that is sorted later has as many parts as any
    x = scene(200, (7, 9, 8), 1).pad(230)
    window = StepWindow((3, 2, 3), (2, 1, 2), (1, 0, 1), (1, 2, 1), extra, 4000)
    reached = output_cells(window, x.coords, x.spatial_shape)
    several = connect_voxels(window, x.coords, x.spatial_shape, reached)
    want = (several.complete() if back else replace(several, back=None)).sorted()
    step = connect_voxels(window, x.coords, x.spatial_shape, reached, ordered=True, back=back)
    step = step if step.order is not None else replace(step, back=None).sorted()
    assert step.table.shape == (4000, 18)
    assert (step.table >= 0).any()
    assert (step.rows, step.whole, step.reflect) == (want.rows, back, want.reflect)
    assert len(step.tensors) == len(want.tensors) == (6 if back else 3)
    assert all(map(torch.equal, step.tensors, want.tensors))


@pytest.mark.parametrize("parity", [0, 1])
def test_out_coords_where_no_two_inputs_share_an_output(parity):
    """All-odd and all-even voxels: the two scenes that overrun a heuristic capacity."""
    cells = torch.cartesian_prod(*[torch.arange(parity, 12, 2)] * 3)
    coords = torch.cat([torch.zeros(len(cells), 1), cells], 1).int()
    for kernel, padding in (([3, 3, 3], ONE), ([1, 1, 1], [0, 0, 0]), ([5, 5, 5], [2, 2, 2])):
        same(sparse3d.out_coords, coords, [12, 12, 12], kernel, [2, 2, 2], padding, ONE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("ci", "co"), [(0, 3), (3, 0), (1, 1), (5, 7), (16, 16), (33, 65)])
def test_conv_and_weight_gradient(ci, co, dtype):
    x = scene(120, (6, 6, 6), ci, dtype=dtype)
    table = x.geometry.subm(3).table
    weight, bias, grad = (torch.randn(s, dtype=dtype) for s in ((co, 27, ci), (co,), (120, co)))
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-11}
    for op, args in (
        (sparse3d.conv, (x.feats, weight, table)),
        (sparse3d.conv, (x.feats, weight, table, bias)),
        (sparse3d.conv, (x.feats, weight.transpose(0, 1).contiguous().transpose(0, 1), table)),
        (sparse3d.conv_weight_grad, (grad, x.feats, table)),
    ):
        torch.testing.assert_close(op(*args), op.reference(*args), **tolerance)


def test_conv_takes_views_of_any_stride():
    x = scene(60, (6, 6, 6), 8)
    table = x.geometry.subm(3).table
    weight = torch.randn(4, 27, 8, dtype=torch.float64)
    want = sparse3d.conv(x.feats, weight, table)
    wide = torch.randn(61, 16, dtype=torch.float64)
    wide[1:, ::2] = x.feats
    assert torch.equal(sparse3d.conv(wide[1:, ::2], weight, table.T.contiguous().T), want)
    one = torch.randn(8, dtype=torch.float64)
    assert torch.equal(
        sparse3d.conv(one.expand(60, 8), weight, table), sparse3d.conv(one.expand(60, 8).clone(), weight, table)
    )


class CopiesOfIntegers(TorchDispatchMode):
    """Collects the shapes of copies of tables and indices that are made outside of kernels."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default and args[0].dtype == torch.int32:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["symmetric conv", "conv", "weight grad", "max", "sum", "weighted sum"])
def test_a_backward_reads_tables_where_they_lie(name):
    """Tables that are sorted on a GPU have adjacent columns. Copies with adjacent rows take as much memory again."""
    geometry = scene(60, (6, 6, 6), 4).geometry
    subm, down = geometry.subm(3), geometry.strided(2, 2).plan.complete()
    table, back = (t.T.contiguous().T for t in (down.table, down.back[0]))
    feats = torch.randn(60, 4, dtype=torch.float64, requires_grad=True)
    of = {
        "symmetric conv": lambda w: subm.sorted(2).conv(feats, w),
        "conv": lambda w: sparse3d.conv(feats, w[:, :8], table, table_t=back),
        "weight grad": lambda w: sparse3d.conv_weight_grad(torch.ones(len(table), 4).double(), feats, table),
        "max": lambda w: sparse3d.max_pool(feats, table, back),
        "sum": lambda w: sparse3d.sum_pool(feats, table, back),
        "weighted sum": lambda w: sparse3d.indice_weighted_sum(feats, table, torch.rand(8, len(table)).T),
    }[name]
    out = of(torch.randn(5, 27, 4, dtype=torch.float64, requires_grad=True))
    with CopiesOfIntegers() as copies:
        out.sum().backward()
    assert copies.shapes == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [1, 2, 12])
@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize("reflect", [False, True])
def test_conv_of_every_dtype_group_and_table_is_the_kernel(dtype, groups, parts, reflect):
    plan = scene(120, (6, 6, 6), 1).geometry.subm(3)
    plan = plan.sorted(parts) if parts else plan
    feats, weight = (
        torch.randn(120, 12, dtype=dtype),
        torch.randn(24 if groups < 12 else 12, 27, 12 // groups, dtype=dtype),
    )
    grad, options = torch.randn(120, len(weight), dtype=dtype), {"groups": groups, "reflect": reflect}
    out = sparse3d.conv(feats, weight, plan.table, None, plan.order, plan.masks, **options)
    gradient = sparse3d.conv_weight_grad(grad, feats, plan.table, plan.order, **options)
    wide = [t.double() for t in (feats, weight, grad)]
    want = sparse3d.conv.reference(*wide[:2], plan.table, None, plan.order, plan.masks, **options)
    want_grad = sparse3d.conv_weight_grad.reference(wide[2], wide[0], plan.table, plan.order, **options)
    for got, exact in ((out, want), (gradient, want_grad)):
        assert got.dtype == dtype
        error = float((got.double() - exact).abs().max() / exact.abs().max())
        assert error <= {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 1e-6}[dtype]


@pytest.mark.parametrize("op", [sparse3d.conv, sparse3d.conv_weight_grad], ids=lambda op: op.spec.opname)
def test_every_conv_on_the_cpu_is_the_kernel_and_can_be_bound_natively(op):
    (kernel,) = op.kernels["cpu"]
    assert kernel.supports is None
    assert kernel.dtypes == ("bfloat16", "float16", "float32", "float64")
    assert plan.bound_native_kernel(op, "cpu")[0].unfit == ""


def test_bfloat16_means_run_the_reference_and_say_so():
    index, counts = torch.zeros(3, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    with pytest.warns(sl.ShiplapNotice, match="float32 and float64, not torch.bfloat16"):
        assert sparse3d.segment_mean(torch.ones(3, 2).bfloat16(), index, counts).dtype == torch.bfloat16


def pooled_case(n: int, m: int, k: int, c: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Few different values, so that many are equal, with infinities and NaN among them; some rows have no hit."""
    feats = torch.randint(-3, 0, (n, c)).to(dtype)
    if n > 3:
        feats[1, ::3], feats[2, ::2], feats[3, 1::2] = torch.nan, -torch.inf, torch.inf
    table = torch.stack([torch.randperm(max(n, m) * 2)[:m] for _ in range(k)], 1) if k else torch.zeros(m, 0)
    return feats, torch.where(table < n, table, -1).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "m", "k", "c"), [(0, 0, 8, 3), (0, 4, 2, 5), (1, 1, 1, 1), (40, 90, 3, 7), (600, 500, 27, 64), (9, 5, 70, 77)]
)
def test_pooling_kernels(n, m, k, c, dtype):
    feats, table = pooled_case(n, m, k, c, dtype)
    for op, args in (
        (sparse3d.pooling.max_pool_with_taps, (feats, table)),
        (sparse3d.pooling.sum_pool, (feats, table)),
        (sparse3d.pooling.sum_pool, (feats, table, None, True)),
    ):
        assert [kernel.supports for kernel in op.kernels["cpu"]] == [None]
        for got, want in zip(flat(op(*args)), flat(op.reference(*args)), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    back = sparse3d.transpose_table(table, n)
    grad, taps = torch.randn(m, c).to(dtype), sparse3d.pooling.max_pool_with_taps(feats, table)[1]
    grad[:, taps[0] < 0 if m else slice(0)] = torch.nan  # nobody takes part of it
    args = grad, taps, back
    got, want = sparse3d.pooling.max_pool_grad(*args), sparse3d.pooling.max_pool_grad.reference(*args)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)


def flat(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("entry", [-2, 5, 2**31 - 1])
def test_pooling_refuses_table_entries_out_of_range(entry):
    feats, table = pooled_case(5, 400, 27, 3, torch.float32)
    table[300, 4] = entry
    taps = torch.zeros(5, 3, dtype=torch.int16)
    for call in (
        lambda: sparse3d.pooling.sum_pool(feats, table),
        lambda: sparse3d.pooling.max_pool_with_taps(feats, table),
        lambda: sparse3d.pooling.max_pool_grad(feats, taps, table),
    ):
        with pytest.raises(sl.ShiplapError, match=rf"SL211[^$]*table\[300, 4\] = {entry} but feats has 5 rows"):
            call()


REFUSED = {
    "duplicate rows": (torch.tensor([[0, 1, 1, 1], [0, 2, 2, 2], [0, 1, 1, 1]]), "duplicate"),
    "negative": (torch.tensor([[0, -1, 2, 3]]), "outside spatial_shape"),
    "too large": (torch.tensor([[0, 1, 9, 3]]), "outside spatial_shape"),
    "negative scene": (torch.tensor([[-2, 1, 1, 3]]), "outside spatial_shape"),
}


@pytest.mark.parametrize("run", ["kernel", "reference"])
@pytest.mark.parametrize("case", REFUSED)
def test_bad_coordinates_are_refused_by_every_table_op(case, run):
    rows, message = REFUSED[case]
    good = torch.zeros(0, 4, dtype=torch.int32)
    calls = (
        (sparse3d.subm_table, (rows.int(), [5, 5, 5], [3, 3, 3], ONE)),
        (sparse3d.out_coords, (rows.int(), [5, 5, 5], [3, 3, 3], [2, 2, 2], ONE, ONE)),
        (sparse3d.conv_table, (rows.int(), good, [5, 5, 5], [3, 3, 3], [2, 2, 2], ONE, ONE)),
        (sparse3d.conv_table, (good, rows.int(), [9, 9, 9], [3, 3, 3], [2, 2, 2], ONE, ONE)),
    )
    for op, args in calls:
        with pytest.raises(sl.ShiplapError, match="SL211") as caught:
            (op if run == "kernel" else op.reference)(*args)
        assert "duplicate" in str(caught.value) if message == "duplicate" else "outside" in str(caught.value)


@pytest.mark.parametrize("entry", [-2, 20, 2**31 - 1])
def test_table_entries_out_of_range_are_refused(entry):
    x = scene(20, (4, 4, 4), 4)
    table = x.geometry.subm(3).table.clone()
    table[7, 3] = entry
    weight = torch.randn(3, 27, 4, dtype=torch.float64)
    for call in (
        lambda: sparse3d.conv(x.feats, weight, table),
        lambda: sparse3d.conv_weight_grad(torch.randn(20, 3, dtype=torch.float64), x.feats, table),
        lambda: sparse3d.transpose_table(table, 20),
        lambda: sparse3d.conv.reference(x.feats, weight, table),
    ):
        with pytest.raises(sl.ShiplapError, match="SL211"):
            call()


@pytest.mark.parametrize("run", ["kernel", "reference"])
def test_transpose_table_refuses_an_input_reached_twice_by_one_tap(run):
    table = torch.tensor([[0, 1], [0, -1]], dtype=torch.int32)
    with pytest.raises(sl.ShiplapError, match="SL211"):
        (sparse3d.transpose_table if run == "kernel" else sparse3d.transpose_table.reference)(table, 2)


def test_a_grid_of_2_to_the_63_cells_is_refused_and_a_smaller_one_is_not():
    coords = torch.tensor([[0, 0, 0, 0]], dtype=torch.int32)
    edge = 2**21
    with pytest.raises(sl.ShiplapError, match="SL211"):
        sparse3d.subm_table(coords, [edge, edge, edge], [1, 1, 1], ONE)
    far = torch.tensor([[0, 2**20, 5, 2**20 - 2], [0, 2**20, 5, 2**20 - 1]], dtype=torch.int32)
    same(sparse3d.subm_table, far, [edge, edge, edge // 2], [1, 1, 3], ONE)


def test_the_reference_of_a_window_that_is_larger_than_the_grid_reaches_nothing():
    coords, none = torch.tensor([[0, 1, 1, 1]], dtype=torch.int32), torch.zeros(0, 4, dtype=torch.int32)
    window = [2, 2, 2], [5, 5, 5], ONE, [0, 0, 0], ONE
    assert sparse3d.out_coords.reference(coords, *window).shape == (0, 4)
    assert sparse3d.conv_table.reference(coords, none, *window).shape == (0, 125)


def test_voxelize_means_and_inverse():
    points, feats = torch.rand(500, 3) * 4 - 1, torch.randn(500, 3, requires_grad=True)
    voxels, inverse = sparse3d.voxelize(points, feats, 0.5, origin=(-1, -1, -1), spatial_shape=(8, 8, 8))
    cells = torch.floor((points + 1) / 0.5).int()
    assert torch.equal(voxels.coords[inverse.long()][:, 1:], cells)
    for row in (0, len(voxels.feats) - 1):
        torch.testing.assert_close(voxels.feats[row], feats[inverse == row].mean(0))
    voxels.feats.sum().backward()
    assert torch.isfinite(feats.grad).all()


def test_voxelize_refuses_points_outside_and_nan():
    feats = torch.zeros(2, 1)
    for point in (float("nan"), -0.1, 4.0):
        points = torch.tensor([[1.0, 1.0, 1.0], [point, 0.0, 0.0]])
        with pytest.raises(sl.ShiplapError, match=r"SL211.*\n.*\n.*point 1"):
            sparse3d.voxelize(points, feats, 1.0, origin=(0, 0, 0), spatial_shape=(4, 4, 4))


def test_voxelize_of_integers_and_halves():
    """Edges and corners are no integers, and half of the cells there can be have no number in float16."""
    points = torch.tensor([[0, 1, 2], [3, 4, 5], [5, 4, 3]])
    expected = (points.double() + 0.5).div(1.5).floor().int()
    for dtype in (torch.int64, torch.uint8, torch.float16, torch.bfloat16, torch.float64):
        voxels, inverse = sparse3d.voxelize(points.to(dtype), torch.zeros(3, 1), 1.5, origin=(-0.5, -0.5, -0.5))
        assert torch.equal(voxels.coords[inverse.long()][:, 1:], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_many_halves_are_means(dtype):
    feats = torch.rand(70_000, 1).to(dtype).requires_grad_()
    voxels, _ = sparse3d.voxelize(torch.zeros(70_000, 3), feats, 1.0)
    torch.testing.assert_close(voxels.feats.double(), feats.double().mean(0, keepdim=True), rtol=1e-2, atol=0)
    voxels.feats.backward(torch.full((1, 1), 60_000.0, dtype=dtype))  # an even share of it is in the range of a half
    torch.testing.assert_close(feats.grad.double(), torch.full((70_000, 1), 6 / 7).double(), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("id", "told", "change"),
    [
        ("SL211", "point 1 in scene -1", {"batch": [0, -1]}),
        ("SL211", "point 1 in scene 2", {"batch": [0, 2]}),
        ("SL204", "integers", {"batch": [0.0, 1.0]}),
        ("SL202", "as points", {"batch": [0]}),
        ("SL208", "'size'", {"size": 0.0}),
        ("SL208", "'size'", {"size": [1.0, 1.0]}),
        ("SL208", "'origin'", {"origin": (0, 0)}),
        ("SL201", "'points'", {"points": [[0.0, 0.0]]}),
    ],
)
def test_voxelize_refuses_what_does_not_fit(id, told, change):
    """A scene of -1 would make a voxel that counts as padding."""
    tensors = {name: torch.tensor(value) for name, value in change.items() if name in ("batch", "points")}
    call = {"points": torch.zeros(2, 3), "size": 1.0, "batch_size": 2} | change | tensors
    with pytest.raises(sl.ShiplapError, match=rf"{id}(.|\n)*{told}"):
        sparse3d.voxelize(feats=torch.zeros(2, 1), **call)


def test_voxelize_of_nothing():
    voxels, inverse = sparse3d.voxelize(torch.zeros(0, 3), torch.zeros(0, 2), 1.0)
    assert voxels.feats.shape == (0, 2)
    assert inverse.shape == (0,)
