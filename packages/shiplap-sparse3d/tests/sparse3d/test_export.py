"""The capacity form: what padding changes (nothing), one exported graph for all scenes, and no Python behind it."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch._inductor import virtualized
from torch._subclasses import FakeTensorMode

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap.kernels.native.deploy import deploy
from shiplap.plugin_api.exporting import computed_sizes_unguarded
from shiplap_sparse3d import bounded, ops, planning
from shiplap_testing import forked
from shiplap_testing.deployed import need_packages
from tests.sparse3d.nets import COARSE, GRID, ROWS, SCENES, UNet, deployed, padded
from tests.sparse3d.scenes import scene


@pytest.mark.parametrize("capacity", [COARSE, None])
@pytest.mark.parametrize("n", [200, 1, 0])
def test_padding_changes_neither_results_nor_gradients(n, capacity):
    net = UNet(capacity).double()
    plain = UNet(None).double()
    plain.load_state_dict(net.state_dict())
    x = scene(n, GRID, 5)
    got, want = net(x.pad(ROWS).feats, x.pad(ROWS).coords), plain.rows(x).feats
    torch.testing.assert_close(got[:n], want)
    assert not got[n:].any()
    weight = torch.randn_like(want)
    (got[:n] * weight).sum().backward()
    (want * weight).sum().backward()
    for (name, a), b in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    for (name, a), b in zip(net.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


STEPS = {
    "strided": lambda g, c: g.strided(3, 2, 1, capacity=c),
    "pooled": lambda g, c: g.pooled(2, 2, capacity=c),
    "generative": lambda g, c: g.generative(3, capacity=c),
    "transposed": lambda g, c: g.transposed(3, 2, 1, capacity=c),
    "border cut off": lambda g, c: g.transposed(1, 2, 1, 1, 1, capacity=c),
    "far end cut off": lambda g, c: g.transposed(3, 2, 1, 2, -1, capacity=c),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_with_a_capacity_is_the_step_and_padding(kind):
    x = scene(60, (6, 7, 5), 3)
    want = STEPS[kind](x.geometry, None)
    m = want.geometry.coords.shape[0]
    for geometry, n in ((x.geometry, 60), (x.pad(75).geometry, 75)):
        for capacity in (m + 9, m) if kind != "far end cut off" else (4 * m + 50,):
            got = STEPS[kind](geometry, capacity)
            kept = got.geometry.coords[:, 0] >= 0
            assert got.geometry.coords.shape[0] == capacity
            assert torch.equal(got.geometry.coords[kept], want.geometry.coords)
            assert torch.equal(got.plan.table[kept], want.plan.table)
            assert (got.plan.table[~kept] == -1).all()
            assert (got.plan.t.table[60:] == -1).all()
            assert got.plan.t.table.shape[0] == n
            assert got.geometry.padded
    if kind != "far end cut off":
        with pytest.raises(sl.ShiplapError, match=rf"SL211(.|\n)*more than {m - 1} output voxels"):
            STEPS[kind](x.geometry, m - 1)
    assert STEPS[kind](x.pad(75).geometry, None).geometry.coords.shape[0] >= m  # what is proven to suffice


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_table_ops_take_padding_anywhere(order, share):
    """C++ against the references: padding before, between and behind the voxels, or nothing else."""
    coords = scene(80, (6, 7, 5), 1).coords
    coords = sparse3d.unique_coords(coords)[0] if order == "sorted" else coords
    coords = torch.where(torch.rand(80, 1) < share, torch.tensor([-1, 99, -7, 3], dtype=torch.int32), coords)
    window = [6, 7, 5], [3, 2, 3], [2, 1, 2], [1, 0, 1], [1, 2, 1]
    outputs = sparse3d.out_coords(coords, *window)
    queries = torch.cat([outputs, torch.full((5, 4), -1, dtype=torch.int32)])[torch.randperm(len(outputs) + 5)]
    capacity = len(outputs) + 7
    for op, args in (
        (sparse3d.subm_table, (coords, window[0], window[1], window[4])),
        (sparse3d.out_coords, (coords, *window)),
        (sparse3d.conv_table, (coords, queries, *window)),
        (bounded.out_coords_bounded, (coords, *window, capacity)),
    ):
        actual, wanted = (run(*args) for run in (op, op.reference))
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (actual, wanted)), strict=True):
            assert torch.equal(a, b), op
    twice = coords.clone()
    twice[:2] = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    with pytest.raises(sl.ShiplapError, match=r"SL211(.|\n)*rows 0 and 1"):
        sparse3d.subm_table(twice[:2], *window[:2], window[4])


def test_more_rows_than_the_capacity_are_refused():
    with pytest.raises(sl.ShiplapError, match=r"SL208(.|\n)*30 rows, capacity 20"):
        scene(30, GRID, 3).pad(20)


def test_pooling_and_dense_leave_padding_out():
    x = scene(50, GRID, 3)
    y = x.pad(70)
    y = y.replace(y.feats.masked_fill(~y.is_voxel, torch.nan))  # whatever padding holds
    assert torch.equal(y.dense(), x.dense())
    for mode in ("max", "avg", "sum"):
        torch.testing.assert_close(sparse3d.GlobalPool(mode)(y), sparse3d.GlobalPool(mode)(x))
    for pool in (sparse3d.SparseMaxPool3d(2), sparse3d.SparseAvgPool3d(3, 2, 1)):
        assert torch.equal(pool(y).dense(), pool(x).dense())
    layer = sparse3d.SubMConv3d(3, 4, 3, dtype=torch.float64)
    assert torch.equal(layer(y).feats[:50], layer(x).feats)


# --- export -----------------------------------------------------------------------------------------------------------


def test_an_exported_network_has_fixed_sizes_and_serves_all_scenes():
    net = UNet().eval()
    program = torch.export.export(net, padded(200))
    ours = [n for n in program.graph.nodes if "sparse3d" in str(n.target)]
    assert len(ours) == 10
    for node in ours:
        values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
        assert all(isinstance(size, int) for v in values for size in v.shape)
    run = program.module()
    for n in (ROWS, 120, 0):
        inputs = padded(n)
        torch.testing.assert_close(run(*inputs), net(*inputs))


class Growing(nn.Module):
    """The same network without a capacity: as many rows as there are voxels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(None)

    def forward(self, feats: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        return self.net.rows(sparse3d.SparseTensor(feats, coords, GRID, 2)).feats


def test_sizes_of_an_export_may_depend_on_data():
    net = Growing().eval()
    x, rows = scene(200, GRID, 5, dtype=torch.float32), torch.export.Dim("rows", min=2, max=100_000)
    run = torch.export.export(net, (x.feats, x.coords), dynamic_shapes=({0: rows}, {0: rows})).module()
    for n in (200, 50, 333):
        x = scene(n, GRID, 5, dtype=torch.float32)
        torch.testing.assert_close(run(x.feats, x.coords), net(x.feats, x.coords))


class Joined(torch.nn.Module):
    """The sum of tensors on other voxels, whose number depends on data."""

    def forward(self, feats: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        x = sparse3d.SparseTensor(feats, coords, GRID, 2)
        moved = coords.clone()
        moved[:, 1] = GRID[0] - 1 - coords[:, 1]
        return sparse3d.union([x, sparse3d.SparseTensor(feats, moved, GRID, 2)]).feats


def test_a_union_is_exported():
    x, rows = scene(20, GRID, 5, dtype=torch.float32), torch.export.Dim("rows", min=2, max=1000)
    program = torch.export.export(Joined(), (x.feats, x.coords), dynamic_shapes=({0: rows}, {0: rows}))
    x = scene(33, GRID, 5, dtype=torch.float32)
    torch.testing.assert_close(program.module()(x.feats, x.coords), Joined()(x.feats, x.coords))


ALONE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
model = torch._inductor.aoti_load_package(sys.argv[2])
for feats, coords, want in torch.load(sys.argv[3]):
    torch.testing.assert_close(model(feats, coords), want, rtol=1e-4, atol=1e-4)
assert "shiplap" not in sys.modules
print("served without shiplap")
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.long
def test_a_packaged_u_net_runs_without_shiplap(tmp_path):
    net = UNet().eval()
    library = deploy([ops.conv], tmp_path / "deployed")
    program = torch.export.export(net, padded(200))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "u_net.pt2"))
    scenes = [padded(n) for n in (200, 90, ROWS, 0)]
    torch.save([(*inputs, net(*inputs).detach()) for inputs in scenes], tmp_path / "scenes.pt")
    (tmp_path / "alone.py").write_text(ALONE)
    done = forked.python(tmp_path / "alone.py", library, package, tmp_path / "scenes.pt", cwd=tmp_path)
    assert done.stdout == "served without shiplap\n", done.stderr


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.long
def test_the_network_of_the_demonstration_is_one_package_that_a_program_without_python_runs(tmp_path):
    need_packages("cpu")
    message = deployed(tmp_path, "cpu")
    assert message.endswith("equal\n"), message
    assert message.count(f"{ROWS} rows, ") == len(SCENES), message


WINDOW = [[8] * 3, [3] * 3, [2] * 3, [1] * 3, [1] * 3]


@pytest.mark.parametrize(
    ("call", "device", "refused"),
    [
        (lambda at: planning.subm_plan(at, [8] * 3, [3] * 3, [1] * 3, 9), "cuda", ""),
        (lambda at: bounded.out_coords_bounded(at, *WINDOW, 20), "cuda", ""),
        (lambda at: ops.transpose_table(at, 9), "cuda", ""),
        (
            lambda at: ops.segment_mean(at.new_empty(9, 4, dtype=torch.float16), at.new_empty(9), at.new_empty(9)),
            "cuda",
            "sparse3d::segment_mean",
        ),
        (lambda at: planning.subm_plan(at, [8] * 3, [3] * 3, [1] * 3, 9), "cpu", "sparse3d::subm_plan"),
        (
            lambda at: ops.conv(
                at.new_empty(9, 4, dtype=torch.float16),
                at.new_empty(4, 27, 4, dtype=torch.float16),
                at.new_empty(9, 27),
            ),
            "cuda",
            "",
        ),
    ],
    ids=["table", "coordinates", "transpose", "means", "table on the CPU", "template"],
)
def test_what_python_runs_is_refused_by_a_package(call, device, refused):
    """On fake tensors, as Inductor has them while it makes a package."""
    with FakeTensorMode():
        at = torch.empty(9, 4, dtype=torch.int32, device=device)
        call(at)
        with virtualized.V.set_aot_compilation(True):
            if not refused:
                call(at)
                return
            with pytest.raises(sl.ShiplapError) as caught:
                call(at)
    assert (
        str(caught.value)
        == f"""SL307: the op cannot be packaged for this device
  where    {refused}
  got      {"triton, launched" if device == "cuda" else "the reference, run"} by Python on {device}
  expected a template or a C ABI kernel
  fix      bind one C kernel (sl.cabi) or a template, or pass the op's result to the program as an input"""
    )


def test_sorted_tables_are_exported_for_two_voxels_and_for_many():
    """A number for every 64 voxels: torch would guard that there is more than one, which a range from 2 on refuses."""

    class Planned(nn.Module):
        def forward(self, coords):
            return planning.subm_plan(coords, list(GRID), [3] * 3, [1] * 3, 2)

    def coords(n):
        return scene(n, GRID, 5).coords

    rows = torch.export.Dim("rows", min=2, max=1000)
    with pytest.raises(torch._dynamo.exc.UserError, match="Constraints violated"):
        torch.export.export(Planned(), (coords(90),), dynamic_shapes=({0: rows},))
    with computed_sizes_unguarded():
        program = torch.export.export(Planned(), (coords(90),), dynamic_shapes=({0: rows},)).module()
    for n in (2, 64, 65, 300):
        given = coords(n)
        for got, want in zip(program(given), Planned()(given), strict=True):
            assert torch.equal(got, want), n
