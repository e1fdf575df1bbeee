"""Networks of sparse layers in onnxruntime: equal to eager, without torch in the process, and errors for wrong data."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import shiplap_sparse3d as sparse3d
from shiplap.packaging.onnx import export_onnx
from shiplap_sparse3d import ops
from tests.sparse3d.consumers.detectors import DETECTORS
from tests.sparse3d.consumers.specimens import SPECIMENS
from tests.sparse3d.nets import exported_specimen, scenes_of, use_other_statistics

pytestmark = pytest.mark.usefixtures("onnx_operators")
GRID = (12, 10, 8)
ROWS = (0, 1, 2, 60, 700)
ALL = SPECIMENS | DETECTORS


def scene(n: int, seed: int, channels: int = 4) -> tuple[Tensor, Tensor]:
    """Voxels of two scenes, in no order."""
    rng = torch.Generator().manual_seed(seed)
    number = torch.randperm(2 * GRID[0] * GRID[1] * GRID[2], generator=rng)[:n]
    return torch.randn(n, channels, generator=rng), torch.stack(torch.unravel_index(number, (2, *GRID)), 1).int()


def exported(net: nn.Module, args: tuple[Any, ...], path: Path, varying: list[bool]) -> onnxruntime.InferenceSession:
    shapes: Any = tuple({0: Dim.DYNAMIC} if vary else None for vary in varying)
    if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(net.forward).parameters.values()):
        shapes = (shapes,)
    with torch.no_grad():
        program = torch.export.export(net, args, dynamic_shapes=shapes, strict=False)
    export_onnx(program, path)
    return onnxruntime.InferenceSession(str(path))


def run_session(session: onnxruntime.InferenceSession, *args: Tensor) -> list[Tensor]:
    named = {given.name: value.numpy() for given, value in zip(session.get_inputs(), args, strict=True)}
    return [torch.from_numpy(result) for result in session.run(None, named)]


class Tables(nn.Module):
    """Every table op of a network on the CPU."""

    def forward(self, coords: Tensor) -> tuple[Tensor, ...]:
        window = [3, 3, 2], [2, 2, 2], [1, 1, 0], [1, 1, 1]
        reached = ops.out_coords(coords, [*GRID], *window)
        table = ops.conv_table(coords, reached, [*GRID], *window)
        return (
            ops.subm_table(coords, [*GRID], [3, 1, 2], [1, 2, 1]),
            reached,
            table,
            ops.transpose_table(table, coords.shape[0]),
            *ops.unique_coords(coords),
        )


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> onnxruntime.InferenceSession:
    return exported(Tables(), scene(30, 0)[1:], tmp_path_factory.mktemp("tables") / "tables.onnx", [True])


@pytest.mark.long
@pytest.mark.parametrize("n", ROWS)
def test_table_ops_are_equal_for_any_number_of_voxels(tables: onnxruntime.InferenceSession, n: int) -> None:
    coords = scene(n, n)[1]
    coords[: n // 5] = torch.tensor([-1, 3, 0, 0], dtype=torch.int32)  # padding
    for got, want in zip(run_session(tables, coords), Tables()(coords), strict=True):
        assert torch.equal(got, want)


@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0, 12, 0, 0], "SL211: coords row . is outside spatial_shape"),
        ([0, 0, -1, 0], "SL211: coords row . is outside spatial_shape"),
        ([-2, 0, 0, 0], "SL211: coords row . is outside spatial_shape"),
        (None, "SL211: duplicate coordinates"),
    ],
)
def test_wrong_coordinates_fail_as_in_eager(
    tables: onnxruntime.InferenceSession, row: list[int] | None, message: str
) -> None:
    coords = scene(40, 1)[1]
    coords[7] = coords[9] if row is None else torch.tensor(row, dtype=torch.int32)
    with pytest.raises(Exception, match=message):
        run_session(tables, coords)
    run_session(tables, scene(40, 1)[1])


class Net(nn.Module):
    """Submanifold, strided, pooled, transposed and inverse layers, norms, groups, and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = sparse3d.Sequential(sparse3d.SubMConv3d(4, 8, 3), sparse3d.BatchNorm(8), nn.ReLU())
        self.down = sparse3d.Sequential(
            sparse3d.SparseConv3d(8, 12, 3, stride=2, padding=1), sparse3d.BatchNorm(12), nn.ReLU()
        )
        self.pool = sparse3d.SparseMaxPool3d(2, 2)
        self.deep = sparse3d.SubMConv3d(12, 12, 3, bias=False)
        self.back = sparse3d.SparseInverseConv3d(12, 8, 3)
        self.up = sparse3d.SparseConvTranspose3d(12, 6, 2, stride=2)
        self.head = nn.Conv3d(6, 3, 1)

    def forward(self, feats: Tensor, coords: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.enter(sparse3d.SparseTensor(feats, coords, GRID, 2))
        down = self.down(x)
        deep = self.deep(self.pool(down))
        same = sparse3d.cat([x, self.back(down)])
        return same.feats, deep.feats, self.head(self.up(deep).dense())


@pytest.mark.long
def test_a_network_of_every_kind_of_layer_is_equal_in_a_process_without_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = use_other_statistics(Net())
    exported(net, scene(50, 0), tmp_path / "net.onnx", [True, True])
    for number, n in enumerate((2, 30, 200, 700, 1500)):
        feats, coords = scene(n, number)
        with torch.no_grad():
            want = net(feats, coords)
        named = {f"want{i}": value.numpy() for i, value in enumerate(want)}
        np.savez(tmp_path / f"{number}.npz", feats=feats.numpy(), coords=coords.numpy(), **named)
    program = f"""
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession({str(tmp_path / "net.onnx")!r})
for number in range(5):
    held = numpy.load({str(tmp_path)!r} + f"/{{number}}.npz")
    got = session.run(None, {{"feats": held["feats"], "coords": held["coords"]}})
    for i, result in enumerate(got):
        numpy.testing.assert_allclose(result, held[f"want{{i}}"], rtol=1e-4, atol=1e-4)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


NAMES = [name for name in ALL if not name.startswith("TRELLIS")]  # those take the grid from the coordinates


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_networks_of_consumers_are_equal(name: str, tmp_path: Path) -> None:
    net, program = exported_specimen(ALL[name])
    export_onnx(program, tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    for tensors, want in scenes_of(ALL[name], net):
        for got, expected in zip(run_session(session, *tensors), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
