"""Points and scenes as a data loader has them: collation, quantisation with labels, unions, boxes, norms of a scene."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shiplap_sparse3d as sparse3d
from shiplap.errors import ShiplapError
from shiplap_sparse3d import ops
from tests.sparse3d.scenes import at, scene

GRID = (7, 6, 5)


class Sample(NamedTuple):
    cells: torch.Tensor
    feats: torch.Tensor
    label: int


def test_samples_of_a_loader_become_a_batch():
    cells = [scene(n, GRID, 1, batch_size=1).coords[:, 1:] for n in (5, 8, 0)]
    samples = [Sample(c, torch.randn(len(c), 2), b) for b, c in enumerate(cells)]
    coords, feats, labels = sparse3d.collate(samples)
    assert torch.equal(coords, torch.cat([nn.functional.pad(c, (1, 0), value=b) for b, c in enumerate(cells)]))
    assert (feats.shape, labels.tolist()) == ((13, 2), [0, 1, 2])
    named = sparse3d.collate([{"x": sample, "path": object()} for sample in samples])
    assert torch.equal(named["x"].cells, coords)
    assert len(named["path"]) == 3
    tensors = [sparse3d.SparseTensor(s.feats, nn.functional.pad(s.cells, (1, 0)), GRID) for s in samples]
    batch = next(iter(torch.utils.data.DataLoader(tensors, batch_size=3, collate_fn=sparse3d.collate)))
    assert (batch.batch_size, batch.spatial_shape) == (3, GRID)
    assert torch.equal(batch.coords, coords)
    assert [len(part) for part in batch.decomposed_features] == [5, 8, 0]
    arrays = sparse3d.collate([(s.cells.numpy(), s.feats.numpy()) for s in samples])
    assert torch.equal(arrays[0], coords)
    assert torch.equal(arrays[1], feats)
    names = [np.array(["a", "b"]), np.array([{"a": 1}], dtype=object)]
    assert sparse3d.collate(names) == names


@pytest.mark.parametrize("conflict", ["vote", "ignore"])
def test_labels_of_voxels(conflict):
    points = torch.rand(200, 2) * 6 - 3
    labels = torch.randint(0, 4, (200,))
    labels[::7] = -100
    made = sparse3d.sparse_quantize(points, torch.arange(200)[:, None], labels, 0.5, conflict=conflict)
    cells = torch.floor(points / 0.5).int()
    assert torch.equal(made.coords[made.inverse], cells)
    assert torch.equal(made.coords, torch.unique(cells, dim=0))
    for voxel, cell in enumerate(made.coords):
        mine = (cells == cell).all(1).nonzero()[:, 0]
        assert made.first[voxel] == mine[0] == made.feats[voxel, 0]
        votes = torch.bincount(labels[mine][labels[mine] >= 0], minlength=4)
        expected = int(votes.argmax()) if votes.any() else -100
        if conflict == "ignore" and int((votes > 0).sum()) > 1:
            expected = -100
        assert made.labels[voxel] == expected
    empty = sparse3d.sparse_quantize(points[:0], labels=labels[:0])
    assert (empty.coords.shape, empty.labels.shape) == ((0, 2), (0,))
    assert (sparse3d.sparse_quantize(points, labels=torch.full((200,), -100)).labels == -100).all()


def test_a_union_adds_where_voxels_meet():
    x, y = scene(40, GRID, 3), scene(50, GRID, 3)
    both = sparse3d.union([x, y, x])
    torch.testing.assert_close(both.dense(), 2 * x.dense() + y.dense())
    assert len(both) == int(((x.dense() != 0) | (y.dense() != 0)).any(1).sum())
    assert sparse3d.union([x, x * 2]).geometry is x.geometry
    feats = x.feats.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda f: sparse3d.union([x.replace(f), y]).feats, feats, fast_mode=True)


def test_a_box_of_voxels():
    x = scene(60, GRID, 3)
    cut = sparse3d.crop(x, (1, 0, 2), (5, 6, 4))
    expected = torch.zeros_like(x.dense())
    expected[:, :, 1:5, :, 2:4] = x.dense()[:, :, 1:5, :, 2:4]
    torch.testing.assert_close(cut.dense(), expected)
    padded = sparse3d.crop(x.pad(70), 0, 3)
    assert len(padded) == 70


def test_neighbours_by_tap():
    x = scene(60, GRID, 1)
    indexes = sparse3d.neighbor_indexes(x, 3)
    dense = nn.functional.pad(x.dense(), (1,) * 6)
    for tap, cell in enumerate(torch.cartesian_prod(*[torch.arange(3)] * 3)):
        moved = x.coords + nn.functional.pad(cell, (1, 0)).int()
        found = torch.where(indexes[:, tap, None] >= 0, x.feats[indexes[:, tap].clamp_min(0).long()], 0)
        assert torch.equal(found, at(dense, moved))


@pytest.mark.parametrize("padded", [False, True])
def test_instance_norm_is_that_of_each_scene(padded):
    x = scene(60, GRID, 3)
    norm = sparse3d.InstanceNorm(3, affine=True, dtype=torch.float64)
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    out = norm(x.pad(80) if padded else x).feats
    for scene_number in range(2):
        rows = x.coords[:, 0] == scene_number
        expected = nn.functional.instance_norm(x.feats[rows].t()[None], None, None, norm.weight, norm.bias)[0].t()
        torch.testing.assert_close(out[:60][rows], expected)
    assert not out[60:].any()


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_points_give_voxels_and_take_features_of_voxels(mode):
    points, batch = torch.rand(90, 3) * 6, torch.randint(0, 3, (90,))
    here = sparse3d.PointTensor(torch.randn(90, 4), points, batch)
    x = here.voxelize((6, 6, 6), 3)
    torch.testing.assert_close(
        x.feats, sparse3d.voxelize(points, here.feats, 1.0, batch=batch, origin=(0, 0, 0))[0].feats
    )
    got = here.sample(x, mode)
    for b in range(3):
        rows = batch == b
        alone = sparse3d.PointTensor(here.feats[rows], points[rows]).sample(x[b], mode)
        torch.testing.assert_close(got.feats[rows], alone.feats)


def test_a_point_is_in_one_voxel_whatever_asks():
    """In float64 a point may lie so near to the next cell that float32 has it there."""
    points = torch.tensor([[2 - 1e-9, 1.0, 3 - 1e-12]], dtype=torch.float64)
    here = sparse3d.PointTensor(torch.ones(1, 2, dtype=torch.float64), points)
    x = here.voxelize((6, 6, 6), 1)
    assert x.coords.tolist() == [[0, 1, 1, 2]]
    assert torch.equal(here.sample(x, "nearest").feats, here.feats)


class PointNet(nn.Module):
    """Voxels of points, and features back at the points."""

    def forward(self, feats, points, batch):
        here = sparse3d.PointTensor(feats, points, batch)
        x = here.voxelize((6, 6, 6), 3)
        return x.feats, x.coords, here.sample(x).feats, here.sample(x, "nearest").feats


def test_points_and_their_voxels_are_part_of_a_program():
    def some(n):
        return torch.randn(n, 4), torch.rand(n, 3) * 6, torch.randint(0, 3, (n,))

    rows = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(PointNet(), some(40), dynamic_shapes=(rows, rows, rows), strict=False).module()
    for n in (40, 7, 200):
        args = some(n)
        for got, want in zip(program(*args), PointNet()(*args), strict=True):
            torch.testing.assert_close(got, want)
    feats, points, batch = some(9)
    for wrong, text in (((points + 6, batch), "outside of the grid"), ((points, batch + 3), "no scene from 0 to 2")):
        with pytest.raises(RuntimeError, match=f"SL211.*{text}"):
            program(feats, *wrong)


class Sampled(nn.Module):
    """Features of given voxels at points."""

    def forward(self, feats, points, batch):
        cells = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [2, 1, 1, 1]], dtype=torch.int32)
        x = sparse3d.SparseTensor(feats[:3], cells, (6, 6, 6), 3)
        return sparse3d.PointTensor(feats, points, batch).sample(x).feats


@pytest.mark.parametrize("other", [-1, -3, 3])
def test_a_point_of_no_scene_reads_no_other_one(other):
    args = torch.randn(40, 4), torch.rand(40, 3) * 6, torch.randint(0, 3, (40,))
    program = torch.export.export(Sampled(), args, strict=False).module()
    args[2][5] = other
    for call in (Sampled(), program):
        with pytest.raises((RuntimeError, ShiplapError), match=r"SL211[\s\S]*PointTensor.sample"):
            call(*args)


class UniqueDtypes(TorchDispatchMode):
    """Keeps the dtype of each tensor of which distinct values or rows are numbered or counted."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "unique" in func.__name__:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("call", ["quantize", "distinct"])
def test_distinct_rows_are_numbered_in_int64(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of torch 2.11 take the numbers to have the dtype of the argument, and they have int64."""
    monkeypatch.setattr(ops, "runs_without_python", lambda *args: True)
    coords = torch.tensor([[0, 3, 1, 2], [0, 1, 1, 1], [0, 3, 1, 2]], dtype=torch.int32)
    with UniqueDtypes() as seen:
        if call == "distinct":
            found = ops.distinct_voxels(coords)
            expected = ([[0, 1, 1, 1], [0, 3, 1, 2]], [1, 0, 1], [1, 2])
        else:
            quantized = sparse3d.sparse_quantize(coords[:, 1:].double(), size=1.0)
            found = quantized.coords, quantized.inverse
            expected = ([[1, 1, 1], [3, 1, 2]], [1, 0, 1])
    assert seen.dtypes == {torch.int64}
    assert [t.tolist() for t in found] == list(expected)
    assert found[0].dtype == torch.int32
