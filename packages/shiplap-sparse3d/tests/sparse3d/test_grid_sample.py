"""grid_sample_3d: against a loop over corners, against dense torch, and the ways in which others get it wrong."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shiplap as sl
import shiplap_sparse3d as sparse3d
from tests.sparse3d.scenes import scene

SHAPE = [6, 5, 7]
FULL = (2, 0, *SHAPE)  # (batches, channels, X, Y, Z)
NEAR = st.floats(-2, 9, width=32)
POINT = st.tuples(*[st.one_of(NEAR, st.integers(-4, 18).map(lambda v: v / 2))] * 3)
CELLS = st.one_of(
    st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=30, unique=True),  # clustered
    st.lists(st.tuples(*[st.sampled_from([1, 3])] * 3), max_size=8, unique=True),  # all odd
    st.just([]),
    st.just([(5, 4, 6)]),
)


def around(rows: dict[tuple[int, ...], int], scene: int, point: tuple[float, ...]) -> list[tuple[int, float]]:
    """``(row, weight)`` of the eight corners; -1 and 0 where there is no voxel."""
    low = [math.floor(v - 0.5) for v in point]
    neighbours = []
    for corner in range(8):
        cell = [low[axis] + (corner >> axis & 1) for axis in range(3)]
        weight = math.prod(1 - abs(v - c - 0.5) for v, c in zip(point, cell, strict=True))
        row = rows.get((scene, *cell), -1)
        neighbours.append((row, weight if row >= 0 else 0.0))
    total = max(sum(w for _, w in neighbours), 1e-12)
    return [(row, weight / total) for row, weight in neighbours]


@settings(max_examples=30, deadline=None)
@given(cells=CELLS, points=st.lists(POINT, min_size=1, max_size=6))
def test_maps_against_a_loop_over_corners(cells, points):
    coords = torch.tensor([(1, *c) for c in cells], dtype=torch.int32).view(-1, 4)
    rows = {(1, *c): i for i, c in enumerate(cells)}
    queries = torch.tensor([points, points])  # the voxels are in the second scene
    points = queries[0].double().tolist()
    for run in (lambda op, *args: op(*args), lambda op, *args: op.reference(*args)):
        nearest = run(sparse3d.nearest_map, coords, queries, SHAPE)
        assert (nearest[0] == -1).all()
        assert nearest[1].tolist() == [rows.get((1, *map(math.floor, p)), -1) for p in points]
        indices, weights = run(sparse3d.trilinear_map, coords, queries, SHAPE)
        assert (indices[0] == -1).all()
        assert not weights[0].any()
        for j, p in enumerate(points):
            want = around(rows, 1, p)
            assert indices[1, j].tolist() == [row for row, _ in want]
            assert weights[1, j].tolist() == pytest.approx([w for _, w in want], abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_every_voxel_is_active_it_is_torch_grid_sample(dtype):
    """Sharing the weight of missing corners is what "border" padding does at the border of a full grid."""
    x = scene(2 * math.prod(SHAPE), tuple(SHAPE), 5, dtype=dtype)
    queries = torch.rand(2, 40, 3) * torch.tensor(SHAPE)
    normalised = (queries.to(dtype) / torch.tensor(SHAPE) * 2 - 1).flip(-1)[:, :, None, None]
    for mode, name in (("trilinear", "bilinear"), ("nearest", "nearest")):
        got = sparse3d.grid_sample_3d(x.feats, x.coords, FULL, queries, mode)
        want = torch.nn.functional.grid_sample(x.dense(), normalised, name, "border", align_corners=False)
        torch.testing.assert_close(got, want[..., 0, 0].transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_negative_queries_are_outside_and_not_in_voxel_0():
    coords, feats = torch.zeros(1, 4, dtype=torch.int32), torch.ones(1, 2)
    queries = torch.tensor([[[-0.3, 0.5, 0.5], [-1e-6, 0.5, 0.5], [0.0, 0.0, 0.0], [0.99, 0.5, 0.5]]])
    sampled = sparse3d.grid_sample_3d(feats, coords, (1, 2, 4, 4, 4), queries, "nearest")
    assert sampled[0, :, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["trilinear", "nearest"])
def test_nothing_of_a_missing_voxel_is_read(mode, dtype):
    """Row 0 holds NaN and infinity, and all queries are far from its voxel, most corners of them missing."""
    coords = torch.tensor([[0, 0, 0, 0], [0, 4, 3, 4], [0, 4, 4, 4]], dtype=torch.int32)
    feats = torch.tensor([[math.nan, math.inf], [1.0, 2.0], [3.0, 4.0]], dtype=dtype, requires_grad=True)
    queries = torch.rand(1, 50, 3) * 3 + torch.tensor([2.6, 2.1, 2.6])
    sampled = sparse3d.grid_sample_3d(feats, coords, (1, 2, *SHAPE), queries, mode)
    sampled.sum().backward()
    assert sampled.isfinite().all()
    assert not feats.grad[0].any()
    assert sampled.dtype == dtype


@pytest.mark.parametrize("mode", ["trilinear", "nearest"])
def test_the_first_gradient_is_the_gradient(mode):
    """Bit-equal in every call, several queries in a voxel or not, and that of finite differences."""
    x = scene(60, tuple(SHAPE), 3)
    queries = torch.cat([torch.rand(2, 9, 3) * torch.tensor(SHAPE), torch.full((2, 9, 3), 2.25)], 1)
    feats = x.feats.requires_grad_()
    weight = torch.randn(2, 18, 3).double()

    def gradient():
        return torch.autograd.grad(
            (sparse3d.grid_sample_3d(feats, x.coords, FULL, queries, mode) * weight).sum(), feats
        )

    (first,), (second,) = gradient(), gradient()
    assert torch.equal(first, second)
    f = lambda t: sparse3d.grid_sample_3d(t, x.coords, FULL, queries, mode)  # noqa: E731
    assert torch.autograd.gradcheck(f, feats, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, feats, fast_mode=True)


def test_the_gradient_of_the_weights_is_there_and_that_of_the_grid_is_refused():
    x = scene(20, tuple(SHAPE), 3)
    indices, weights = sparse3d.trilinear_map(x.coords, torch.rand(2, 5, 3) * 5, SHAPE)
    indices, weights = indices.flatten(0, 1), weights.flatten(0, 1).requires_grad_()
    got, want = (
        torch.autograd.grad(run(x.feats, indices, weights).square().sum(), weights)[0]
        for run in (sparse3d.indice_weighted_sum, sparse3d.indice_weighted_sum.reference)
    )
    torch.testing.assert_close(got, want)
    sampled = sparse3d.grid_sample_3d(x.feats, x.coords, FULL, (torch.rand(2, 5, 3) * 5).requires_grad_())
    with pytest.raises(sl.ShiplapError, match="SL304"):
        sampled.sum().backward()


@pytest.mark.parametrize(("dtype", "cell"), [(torch.bfloat16, 129), (torch.float16, 1025), (torch.float32, 8388609)])
def test_the_nearest_voxel_of_a_whole_number(dtype, cell):
    """A half that is added in the dtype of the points would be rounded into the next voxel."""
    coords = torch.tensor([[0, cell, 0, 0]], dtype=torch.int32)
    point = torch.tensor([[[cell, 0, 0]]], dtype=dtype)
    assert sparse3d.grid_sample_3d(torch.ones(1, 2), coords, (1, 2, cell + 2, 1, 1), point, "nearest").all()


@pytest.mark.parametrize("mode", ["trilinear", "nearest"])
def test_no_voxels_no_queries_and_points_that_are_nowhere(mode):
    none, feats = torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, 3, requires_grad=True)
    sampled = sparse3d.grid_sample_3d(feats, none, FULL, torch.rand(2, 4, 3), mode)
    assert sampled.shape == (2, 4, 3)
    sampled.sum().backward()
    assert not sampled.any()
    x = scene(30, tuple(SHAPE), 3, dtype=torch.float32)
    assert sparse3d.grid_sample_3d(x.feats, x.coords, FULL, torch.rand(2, 0, 3), mode).shape == (2, 0, 3)
    assert sparse3d.grid_sample_3d(x.feats, x.coords, FULL, torch.rand(0, 4, 3), mode).shape == (0, 4, 3)
    nowhere = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -3e38, 2.0**31])[:, None].expand(2, 6, 3)
    for place in (nowhere, torch.stack([nowhere[0, :, 0], *[torch.full((6,), 2.5)] * 2], 1).expand(2, 6, 3)):
        assert not sparse3d.grid_sample_3d(x.feats, x.coords, FULL, place, mode).any()


def test_extents_of_2_to_the_31():
    far = 2**23 - 3  # beyond 2^23 float32 has no half voxels
    coords = torch.tensor([[0, far, 2, 2], [0, far, 3, 2]], dtype=torch.int32)
    queries = torch.tensor([[[far + 0.5, 3.0, 2.5], [far + 0.5, 3.5, 2.5]]])
    for run in (sparse3d.trilinear_map, sparse3d.trilinear_map.reference):
        indices, weights = run(coords, queries, [2**31 - 1, 2**15, 2**15])
        sums = sparse3d.indice_weighted_sum(torch.eye(2), indices[0], weights[0])
        assert sums.tolist() == [[0.5, 0.5], [0.0, 1.0]]


@pytest.mark.parametrize("run", ["kernel", "reference"])
def test_refused(run):
    twice = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1]], dtype=torch.int32)
    queries = torch.rand(1, 2, 3)
    for op in (sparse3d.nearest_map, sparse3d.trilinear_map):
        call = op if run == "kernel" else op.reference
        for coords, match in ((twice, "duplicate"), (twice + torch.tensor([0, 9, 0, 0]).int(), "outside")):
            with pytest.raises(sl.ShiplapError, match=rf"SL211(.|\n)*{match}"):
                call(coords, queries, SHAPE)
    for bad in (-2, 2, 2**31 - 1):
        indices = torch.tensor([[0, 1], [bad, 0]], dtype=torch.int32)
        for op, rest in ((sparse3d.indice_weighted_sum, ()), (sparse3d.indice_weighted_sum_grad, (2,))):
            with pytest.raises(sl.ShiplapError, match="SL211"):
                (op if run == "kernel" else op.reference)(torch.rand(2, 3), indices, torch.rand(2, 2), *rest)


def test_unknown_modes_and_shapes_are_refused():
    x = scene(5, tuple(SHAPE), 3)
    with pytest.raises(sl.ShiplapError, match=r"SL208(.|\n)*trilinear or nearest"):
        sparse3d.grid_sample_3d(x.feats, x.coords, FULL, torch.rand(2, 1, 3), "bilinear")
    with pytest.raises(sl.ShiplapError, match="SL208"):
        sparse3d.grid_sample_3d(x.feats, x.coords, SHAPE, torch.rand(2, 1, 3))


def test_training_through_it_is_one_graph(fresh_compiler):
    """Any number of voxels and queries, the first compiled gradient like the eager one."""

    def loss(feats, coords, queries):
        both = [sparse3d.grid_sample_3d(feats, coords, FULL, queries, mode) for mode in ("trilinear", "nearest")]
        return (both[0] * both[1].relu()).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, count in ((20, 5), (70, 12)):
        x = scene(n, tuple(SHAPE), 4, dtype=torch.float32)
        feats, queries = x.feats.requires_grad_(), torch.rand(2, count, 3) * 5
        got, want = (torch.autograd.grad(run(feats, x.coords, queries), feats)[0] for run in (compiled, loss))
        torch.testing.assert_close(got, want)


def test_several_threads():
    x = scene(400, (12, 11, 13), 16, dtype=torch.float32)
    queries = torch.rand(2, 4000, 3) * 12
    for got, want in zip(
        sparse3d.trilinear_map(x.coords, queries, [12, 11, 13]),
        sparse3d.trilinear_map.reference(x.coords, queries, [12, 11, 13]),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    indices = torch.randint(-1, 400, (4000, 8), dtype=torch.int32)
    args = torch.randn(4000, 16), indices, torch.rand(4000, 8), 400
    got, want = sparse3d.indice_weighted_sum_grad(*args), sparse3d.indice_weighted_sum_grad.reference(*args)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
