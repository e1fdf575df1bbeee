"""``SparseTensor``, batch norm, autocast, and the capacity form: what padding must not change."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap_sparse3d import spconv
from shiplap_sparse3d.flexgemm.ops import spconv as flexgemm
from tests.sparse3d.scenes import scene

GRID = (9, 8, 7)
DOUBLE = {"dtype": torch.float64}


# --- SparseTensor -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_dense_and_back(ndim):
    dense = torch.randn(2, 3, *(4, 5, 6)[:ndim]) * (torch.rand(2, 1, *(4, 5, 6)[:ndim]) < 0.4)
    x = sparse3d.SparseTensor.from_dense(dense)
    assert torch.equal(x.dense(), dense)
    assert x.coords.dtype == torch.int32
    assert x.coords.shape == ((dense != 0).any(1).sum(), 1 + ndim)
    assert x.spatial_shape == dense.shape[2:]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([[0, 0, 0, 0], [0, 1, 1, 2]], r"row 1 is outside spatial_shape \(2, 2, 2\)"),
        ([[0, 0, 0, -1]], "row 0 is outside"),
        ([[0, 1, 1, 1], [0, 1, 1, 1]], "duplicate coordinates: row 1"),
        ([[0, 1, 1, 1], [1, 0, 0, 0]], r"row 1 has a batch index outside \[-1, 1\)"),
    ],
)
def test_voxels_that_have_no_cell_of_their_own_are_refused_by_dense(rows, told):
    """They would go to another cell, or nowhere."""
    coords = torch.tensor(rows, dtype=torch.int32)
    x = sparse3d.SparseTensor(torch.ones(len(rows), 1), coords, 2)
    for dense in (x.dense, spconv.SparseConvTensor(x.feats, coords, [2, 2, 2], 1).dense):
        with pytest.raises(sl.ShiplapError, match=rf"SL211(.|\n)*{told}"):
            dense()


LAYERS = {
    "SubMConv3d": lambda ci: sparse3d.SubMConv3d(ci, 4, 3),
    "SparseConv3d": lambda ci: sparse3d.SparseConv3d(ci, 4, 3, 2, groups=1),
    "SparseConvTranspose3d": lambda ci: sparse3d.SparseConvTranspose3d(ci, 4, 2, 2),
    "GenerativeConv3d": lambda ci: sparse3d.GenerativeConv3d(ci, 4, 3),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_names_itself_and_both_numbers_of_channels(name):
    x = scene(20, GRID, 4, dtype=torch.float32)
    fix = "make the layer with in_channels = 4, or pass features of 3 channels"
    with pytest.raises(sl.ShiplapError, match="SL202") as caught:
        LAYERS[name](3)(x)
    failure = caught.value
    assert (failure.where, failure.got, failure.expected, failure.fix) == (name, "4 channels", "in_channels = 3", fix)


def test_wrong_channels_in_a_graph_are_the_same_error():
    x = scene(20, GRID, 4, dtype=torch.float32)
    with pytest.raises(
        sl.ShiplapError, match=r"where    SubMConv3d\n  got      4 channels\n  expected in_channels = 3"
    ):
        torch.compile(sparse3d.SubMConv3d(3, 4, 3), backend="eager")(x)


TENSORS = {
    "SparseTensor": (lambda x: x, "x.replace({}(x.feats{}))", "sparse3d.Sequential"),
    "SparseConvTensor": (
        lambda x: spconv.SparseConvTensor(x.feats, x.coords, GRID, 2),
        "x.replace_feature({}(x.features{}))",
        "SparseSequential",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_function_of_torch_says_what_to_write(name):
    """Those of the facade, whatever they do: the functional ones too, by which modules of torch get there."""
    if name == "SparseTensor":  # which takes functions of rows
        x = scene(20, GRID, 4, dtype=torch.float32)
        with pytest.raises(sl.ShiplapError, match=r"SL209(.|\n)*write x.replace\(torch.cumsum\(x.feats, \.\.\.\)\)"):
            torch.cumsum(x, 0)
        return
    made, call, container = TENSORS[name]
    x = made(scene(20, GRID, 4, dtype=torch.float32))
    for run, function, more in (
        (lambda: torch.relu(x), "torch.relu", ""),
        (lambda: nn.Sequential(nn.ReLU())(x), "torch.nn.functional.relu", ""),
        (lambda: nn.Linear(4, 4)(x), "torch.nn.functional.linear", ", ..."),
        (lambda: torch.compile(torch.relu, backend="eager")(x), "torch.relu", ""),
    ):
        with pytest.raises(sl.ShiplapError, match="SL209") as caught:
            run()
        assert (caught.value.where, caught.value.got) == (function, f"a {name}")
        assert (
            caught.value.fix == f"write {call.format(function, more)}, or {container} in place of torch.nn.Sequential"
        )
    with pytest.raises(sl.ShiplapError, match=r"torch\.cat\(\[x\."):
        torch.cat([x, x], 1)


def test_operators_of_python_ask_the_other_operand():
    x = TENSORS["SparseConvTensor"][0](scene(20, GRID, 4, dtype=torch.float32))
    plain = torch.ones(20, 4)
    assert (plain == x) is False
    assert x not in [plain]
    assert isinstance(plain + x, type(x))
    with pytest.raises(TypeError, match="unsupported operand"):
        plain * x

    class Scaled(type(x)):
        def __rmul__(self, other):
            return "scaled"

    x.__class__ = Scaled
    assert plain * x == "scaled"


@pytest.mark.parametrize("layer", ["subm", "strided"])
def test_a_row_of_a_scene_that_there_is_not_is_refused_when_a_table_is_built(layer):
    """As the kernels of GPUs do; the last row that is right, and padding, are not."""
    coords = torch.tensor([[0, 0, 0, 0], [2, 1, 1, 1], [-1, -1, -1, -1]], dtype=torch.int32)
    own = {"subm": sparse3d.SubMConv3d(4, 4, 3), "strided": sparse3d.SparseConv3d(4, 4, 3, 2)}[layer]
    theirs = {"subm": spconv.SubMConv3d(4, 4, 3), "strided": spconv.SparseConv3d(4, 4, 3, 2)}[layer]
    told = r"SL211(.|\n)*row 1 has a batch index outside \[-1, 2\)"
    with pytest.raises(sl.ShiplapError, match=told):
        own(sparse3d.SparseTensor(torch.ones(3, 4), coords, 4, 2, padded=True))
    with pytest.raises(sl.ShiplapError, match=told):
        theirs(spconv.SparseConvTensor(torch.ones(2, 4), coords[:2], [4, 4, 4], 2))
    own(sparse3d.SparseTensor(torch.ones(3, 4), coords, 4, 3, padded=True))
    theirs(spconv.SparseConvTensor(torch.ones(2, 4), coords[:2], [4, 4, 4], 3))


def test_tables_are_built_where_a_tracer_has_no_values():
    x, layer = scene(20, GRID, 4, dtype=torch.float32), sparse3d.SubMConv3d(4, 4, 3)

    def run(feats: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        return layer(sparse3d.SparseTensor(feats, coords, GRID, 2)).feats

    assert torch.equal(make_fx(run)(x.feats, x.coords)(x.feats, x.coords), run(x.feats, x.coords))


def test_what_is_no_sparse_tensor_is_refused_when_it_is_made():
    feats, coords = torch.ones(2, 1), torch.zeros(2, 4, dtype=torch.int32)
    for id, bad in (
        ("SL201", (feats, coords[0], 2)),
        ("SL201", (feats[:, 0], coords, 2)),
        ("SL204", (feats, coords.long(), 2)),
        ("SL209", (feats, coords, 2.0)),
        ("SL209", (feats, coords, (2, 2, 2.5))),
    ):
        with pytest.raises(sl.ShiplapError, match=id):
            sparse3d.SparseTensor(*bad)
    for shape in (numpy.int64(2), numpy.array([2, 2, 2]), torch.tensor([2, 2, 2])):  # tables are found by their numbers
        assert sparse3d.SparseTensor(feats, coords, shape).spatial_shape == (2, 2, 2)
        assert type(sparse3d.SparseTensor(feats, coords, shape).spatial_shape[0]) is int


def test_features_are_as_many_as_voxels():
    """Those that are more would be dropped, or sampled from elsewhere."""
    x = scene(30, GRID, 3)
    weight, shape = torch.randn(4, 3, 3, 3, 3, **DOUBLE), (2, 3, *GRID)
    _, cache = flexgemm.sparse_submanifold_conv3d(x.feats, x.coords, shape, weight)
    for feats in (x.feats[:7], torch.cat([x.feats, x.feats])):
        for where, call in {
            "SparseTensor": lambda f: sparse3d.SparseTensor(f, x.coords, GRID, 2),
            "SparseTensor ": x.replace,
            "grid_sample_3d": lambda f: sparse3d.grid_sample_3d(f, x.coords, shape, torch.rand(2, 5, 3)),
            "sparse_conv3d": lambda f: flexgemm.sparse_conv3d(f, x.coords, shape, weight),
            "sparse_submanifold_conv3d": lambda f: flexgemm.sparse_submanifold_conv3d(f, x.coords, shape, weight),
            "sparse3d.flexgemm, argument 'feats'": lambda f: cache.freeze().conv(f, weight),
            "sparse3d.flexgemm, argument 'feats' ": lambda f: cache.freeze(algorithm="explicit_gemm").conv(f, weight),
        }.items():
            told = rf"SL202(.|\n)*where    {where.strip()}\n  got      {len(feats)} rows of features\n  expected 30"
            with pytest.raises(sl.ShiplapError, match=told):
                call(feats)


def test_rows_add_on_the_same_voxels_only():
    x = scene(30, GRID, 3)
    y = x.replace(x.feats * 2)
    assert torch.equal((x + y).feats, x.feats * 3)
    assert torch.equal((1 + x).feats, x.feats + 1)
    assert (x + y).geometry is x.geometry
    other = scene(20, GRID, 3)
    with pytest.raises(sl.ShiplapError, match=r"SL202(.|\n)*n=30(.|\n)*and(.|\n)*n=20(.|\n)*same voxels") as caught:
        x + other
    assert "voxels of its own" in str(caught.value)


def test_skip_connections_share_voxels():
    x = scene(60, GRID, 3)
    y = sparse3d.SparseConv3d(3, 5, 2, 2, **DOUBLE)(x)
    z = sparse3d.SparseInverseConv3d(5, 4, 2, **DOUBLE)(y)
    both = sparse3d.cat([x, z])
    assert torch.equal(both.feats, torch.cat([x.feats, z.feats], 1))
    assert both.geometry is x.geometry
    assert (x.replace(z.feats) + z).geometry is x.geometry


def test_cat_of_channels_and_of_scenes():
    x, y = scene(30, GRID, 3), scene(20, GRID, 3, batch_size=3)
    scenes = sparse3d.cat([x, y], 0)
    assert scenes.batch_size == 5
    assert torch.equal(scenes.dense(), torch.cat([x.dense(), y.dense()]))
    with pytest.raises(sl.ShiplapError, match=r"SL202(.|\n)*same voxels"):
        sparse3d.cat([x, y])
    padded = sparse3d.cat([x.pad(33), y.pad(21)], 0)
    assert padded.geometry.padded
    assert torch.equal(padded.dense(), scenes.dense())
    with pytest.raises(sl.ShiplapError, match=r"SL202(.|\n)*grids of one size"):
        sparse3d.cat([x, scene(5, (9, 8, 6), 3)], 0)
    with pytest.raises(sl.ShiplapError, match=r"SL208(.|\n)*0 \(scenes\) or 1 \(channels\)"):
        sparse3d.cat([x, x], 2)


@pytest.mark.parametrize("padded", [False, True])
def test_scenes_by_index_and_slice(padded):
    x = scene(80, GRID, 3, batch_size=4)
    dense = x.dense()
    x = x.pad(100) if padded else x
    for chosen in (0, 3, -1, slice(1, 3), slice(2, None), slice(0, 0)):
        y = x[chosen]
        want = dense[chosen] if isinstance(chosen, slice) else dense[chosen][None]
        assert torch.equal(y.dense(), want)
        assert y.batch_size == want.shape[0]
        assert not padded or y.feats.shape[0] == 100
    for beyond in (4, -5):
        with pytest.raises(sl.ShiplapError, match=rf"SL208(.|\n)*scene {beyond}(.|\n)*below 4"):
            x[beyond]
    assert [len(y.coords) for y in x] == [len(x[b].coords) for b in range(4)]  # iterating ends with the last scene
    with pytest.raises(sl.ShiplapError, match=r"SL208(.|\n)*step 1"):
        x[::2]


def test_to_another_dtype_and_device():
    x = scene(30, GRID, 3)
    assert x.to(dtype=torch.float32).feats.dtype == torch.float32
    assert x.to(torch.float32).feats.dtype == torch.float32
    assert x.to(dtype=torch.float32).geometry is x.geometry
    moved = x.to("meta")
    assert moved.coords.device.type == "meta"
    assert moved.spatial_shape == GRID


def test_tables_die_with_their_tensors():
    """No cycle between a level and the one below: memory of a GPU must not wait for the garbage collector."""
    x = scene(60, GRID, 3)
    y = sparse3d.SparseConv3d(3, 4, 2, 2, **DOUBLE)(x)
    z = sparse3d.SparseInverseConv3d(4, 3, 2, **DOUBLE)(sparse3d.SubMConv3d(4, 4, 3, **DOUBLE)(y))
    references = [
        weakref.ref(t) for t in (y.coords, *y.geometry.subm(3).tensors, *z.geometry.strided(2, 2).plan.tensors)
    ]
    gc.collect()
    gc.disable()
    try:
        del x, y, z
        assert [ref() for ref in references] == [None] * len(references)
    finally:
        gc.enable()


# --- batch norm -------------------------------------------------------------------------------------------------------


def norms(c, **options):
    ours, theirs = sparse3d.BatchNorm(c, **options), nn.BatchNorm1d(c, **options)
    for p in theirs.parameters():
        nn.init.normal_(p)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.3, "eps": 1e-2}],
)
def test_batch_norm_is_torchs_over_the_voxels(padded, options):
    ours, theirs = norms(5, **options, dtype=torch.float64)
    for n in (60, 3, 40):
        x = scene(n, GRID, 5)
        feats = (x.feats * 3 + 1).requires_grad_()
        got, want = x.replace(feats), theirs(feats)
        got = ours(got.pad(n + 17) if padded else got).feats
        torch.testing.assert_close(got[:n], want)
        assert not got[n:].any()
        weight = torch.randn_like(want)
        (a,), (b,) = (torch.autograd.grad(t, feats, weight) for t in (got[:n], want))
        torch.testing.assert_close(a, b)
    for (name, a), (_, b) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x.pad(50) if padded else x).feats[: x.feats.shape[0]], theirs(x.feats))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_of_halves_keeps_statistics_in_float32(dtype):
    ours, theirs = norms(4)
    x = scene(200, GRID, 4).to(dtype=dtype)
    x = x.replace(x.feats * 30 + 500)  # their squares leave the range of a half
    got, want = ours(x.pad(220)).feats[:200], theirs(x.feats.float())
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, rtol=0.02, atol=0.02)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-4, atol=1e-4)


def test_batch_norm_of_no_voxel_learns_nothing():
    for x in (scene(0, GRID, 3), scene(0, GRID, 3).pad(20)):
        norm = sparse3d.BatchNorm(3, **DOUBLE)
        before = {k: v.clone() for k, v in norm.state_dict().items()}
        assert not norm(x).feats.any()
        assert all(torch.equal(v, before[k]) for k, v in norm.state_dict().items())
    assert sparse3d.BatchNorm(3, **DOUBLE)(scene(1, GRID, 3)).feats.isfinite().all()


def test_a_batch_norm_that_would_learn_from_padding_is_refused():
    x = scene(20, GRID, 3)
    for norm in (nn.BatchNorm1d(3, **DOUBLE), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3, **DOUBLE))):
        net = sparse3d.Sequential(norm, nn.ReLU())
        net(x)
        with pytest.raises(sl.ShiplapError, match=r"SL208(.|\n)*BatchNorm1d(.|\n)*padding(.|\n)*sparse3d.BatchNorm"):
            net(x.pad(30))
        net.eval()(x.pad(30))
    norm = nn.BatchNorm1d(3, **DOUBLE, track_running_stats=False).eval()  # takes the statistics of its batch
    with pytest.raises(sl.ShiplapError, match=r"SL208(.|\n)*BatchNorm1d"):
        sparse3d.Sequential(norm)(x.pad(30))


# --- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_dense_convolution(dtype):
    x = scene(50, GRID, 4, dtype=torch.float32)
    layers = [sparse3d.SubMConv3d(4, 8, 3), sparse3d.SparseConv3d(8, 8, 2, 2), sparse3d.SparseInverseConv3d(8, 4, 2)]
    net = sparse3d.Sequential(layers[0], sparse3d.BatchNorm(8), nn.ReLU(), *layers[1:])
    dense = nn.Conv3d(4, 8, 3)
    with torch.autocast("cpu", dtype=dtype):
        y = net(x)
        assert y.feats.dtype == dense(x.dense()).dtype == dtype
        loss = y.feats.float().square().sum()
    loss.backward()
    full = sparse3d.Sequential(*net)(x)
    torch.testing.assert_close(y.feats.float(), full.feats, rtol=0.1, atol=0.1)
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())
    with torch.autocast("cpu", dtype=dtype):
        wide = sparse3d.SubMConv3d(4, 8, 3, **DOUBLE)(x.to(dtype=torch.float64)).feats
        assert wide.dtype == nn.Conv3d(4, 8, 3, **DOUBLE)(x.dense().double()).dtype == torch.float64
    with pytest.raises(sl.ShiplapError, match="SL205"):  # no silent cast outside of it, as in torch
        layers[0](x.to(dtype=dtype))


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_gradients_of_two_processes_are_those_of_one():
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.sparse3d.ddp_step"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert "gradients of 2 processes are those of one" in done.stdout, done.stderr[-3000:]
