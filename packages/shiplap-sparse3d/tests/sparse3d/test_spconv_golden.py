"""The spconv facade against spconv 2.3.8 itself: results and public surface frozen by spconv_golden/generate.py."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import shiplap_sparse3d.spconv as spconv
from shiplap_sparse3d.spconv import core, functional, ops, utils
from shiplap_testing.paths import REPOSITORY

HERE = Path(__file__).parent / "spconv_golden"
GRID, BATCH, CI, CO = (7, 6, 5), 2, 3, 2
WINDOWS = list(itertools.product((2, 3), (1, 2, 3), (0, 1, 2), (1, 2, 3)))  # kernel, stride, padding, dilation


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    with np.load(HERE / "golden.npz", allow_pickle=False) as archive:
        return {name: torch.from_numpy(archive[name]) for name in archive}


def rows(x: spconv.SparseConvTensor) -> np.ndarray:
    """One row a voxel, ascending: indices, features (which are integers)."""
    feats = x.features.detach().numpy()
    assert (feats == feats.round()).all()
    table = np.concatenate([x.indices.numpy(), feats.astype(np.int16)], 1)
    return table[np.lexsort(table.T[::-1])]


def case(golden: dict[str, torch.Tensor], kind: str, number: int) -> np.ndarray:
    table = golden[kind].numpy()
    return table[table[:, 0] == number][:, 1:]


def with_weights(layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> nn.Module:
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def scene(golden: dict[str, torch.Tensor], feats: torch.Tensor | None = None) -> spconv.SparseConvTensor:
    return spconv.SparseConvTensor(golden["feats"] if feats is None else feats, golden["indices"], GRID, BATCH)


@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_submanifold(golden, dilation):
    layer = with_weights(spconv.SubMConv3d(CI, CO, 3, dilation=dilation), golden["weight3"], golden["bias"])
    assert np.array_equal(rows(layer(scene(golden))), case(golden, "subm", dilation))


@pytest.mark.parametrize("number", range(len(WINDOWS)), ids=lambda n: "k{} s{} p{} d{}".format(*WINDOWS[n]))
def test_every_window(golden, number):
    """Strided, transposed and inverse convolution and max pooling: the same voxels, values and shapes, exactly."""
    k, stride, padding, dilation = WINDOWS[number]
    window = {"stride": stride, "padding": padding, "dilation": dilation, "indice_key": "key"}
    down = with_weights(spconv.SparseConv3d(CI, CO, k, **window), golden[f"weight{k}"], golden["bias"])
    up = with_weights(spconv.SparseInverseConv3d(CO, CI, k, "key"), golden[f"back{k}"], golden["bias_back"])
    grow = with_weights(spconv.SparseConvTranspose3d(CI, CO, k, **window), golden[f"weight{k}"], golden["bias"])
    pool = spconv.SparseMaxPool3d(k, **window)
    layers = {"conv": (down, None), "transposed": (grow, None), "pool": (pool, None)}
    for kind, (layer, feats) in layers.items():
        expected = case(golden, kind, number)
        if not len(expected):  # spconv refused it, or lost all voxels
            with pytest.raises(ValueError, match=r"SL208|SL211"):
                layer(scene(golden, feats))
            continue
        y = layer(scene(golden, feats))
        assert np.array_equal(rows(y), expected), kind
        assert y.spatial_shape == golden[f"{kind}_shape"][number].tolist()
        if kind == "conv":
            z = up(y)
            assert np.array_equal(rows(z), case(golden, "inverse", number))
            assert z.indices is scene(golden).indices


def test_a_maximum_starts_from_zero_and_so_does_its_gradient(golden):
    feats = golden["max_feats"].clone().requires_grad_()
    x = spconv.SparseConvTensor(feats, golden["max_indices"], GRID, BATCH)
    for algo in (spconv.ConvAlgo.Native, spconv.ConvAlgo.MaskImplicitGemm):  # one source, two kernels, the same zero
        y = spconv.SparseMaxPool3d(3, 2, 1, algo=algo)(x)
        assert np.array_equal(rows(y), case(golden, "max", 0))
        assert bool((y.features == 0).any())
        cotangent = y.indices.sum(1, keepdim=True).float().expand_as(y.features)
        assert torch.equal(torch.autograd.grad(y.features, feats, cotangent)[0], golden["max_grad"])


@pytest.mark.parametrize("ndim", [1, 2])
def test_one_and_two_axes(golden, ndim):
    grid = {1: [40], 2: [12, 9]}[ndim]
    x = spconv.SparseConvTensor(golden[f"feats{ndim}d"], golden[f"indices{ndim}d"], grid, BATCH)
    layers = {
        "subm": getattr(spconv, f"SubMConv{ndim}d")(CI, CO, 3),
        "conv": getattr(spconv, f"SparseConv{ndim}d")(CI, CO, 3, 2, 1),
        "transposed": getattr(spconv, f"SparseConvTranspose{ndim}d")(CI, CO, 3, 2, 1),
    }
    for kind, layer in layers.items():
        y = with_weights(layer, golden[f"weight{ndim}d"], golden[f"bias{ndim}d"])(x)
        assert np.array_equal(rows(y), case(golden, f"{kind}{ndim}d", 0)), kind
        assert y.indices.shape[1] == 1 + ndim


def test_a_kernel_of_one_cell_reads_its_weight_as_spconv_does(golden):
    layer = with_weights(spconv.SparseConv3d(CI, CO, 1), golden["weight1"], golden["bias"])
    assert np.array_equal(rows(layer(scene(golden))), case(golden, "pointwise", 0))


def test_a_kernel_of_uneven_sides(golden):
    layer = with_weights(spconv.SubMConv3d(CI, CO, (1, 3, 5)), golden["uneven_weight"], golden["bias"])
    assert np.array_equal(rows(layer(scene(golden))), case(golden, "uneven", 0))


def test_a_checkpoint_of_spconv_loads_and_means_the_same(golden):
    net = spconv.SparseSequential(
        spconv.SubMConv3d(CI, 8, 3, indice_key="fine", bias=False),
        spconv.SparseBatchNorm(8),
        spconv.SparseReLU(),
        spconv.SparseConv3d(8, 12, 3, 2, 1, indice_key="down", record_voxel_count=True),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        spconv.SubMConv3d(12, 6, 1),
        spconv.SubMConv3d(6, 6, 3, indice_key="coarse"),
        spconv.SparseInverseConv3d(6, 4, 3, "down"),
        spconv.ToDense(),
    )
    saved = {name.removeprefix("state:"): value for name, value in golden.items() if name.startswith("state:")}
    own = net.state_dict()
    assert {n: (v.shape, v.dtype) for n, v in own.items()} == {n: (v.shape, v.dtype) for n, v in saved.items()}
    assert list(own) == list(saved)
    net.load_state_dict(saved)
    dense = net.eval()(spconv.SparseConvTensor(golden["net_feats"], golden["net_indices"], [6, 5, 4], BATCH))
    torch.testing.assert_close(dense, golden["net_dense"], rtol=1e-5, atol=1e-6)
    assert net[3].get_max_num_voxels() == saved["3.max_num_voxels_during_training"]


def test_points_to_voxels(golden):
    voxelizer = utils.PointToVoxel([1.0, 0.5, 1.0], [0, 0, 0, 4, 3, 2], 4, 30, 3)
    assert voxelizer.grid_size == [2, 6, 4]
    voxels, indices, counts, ids = voxelizer.generate_voxel_with_id(golden["cloud"])
    for ours, theirs in ((voxels, "voxels"), (indices, "voxel_indices"), (counts, "voxel_counts"), (ids, "voxel_ids")):
        assert ours.dtype == golden[theirs].dtype
        assert torch.equal(ours, golden[theirs]), theirs
    assert torch.equal(utils.gather_features_by_pc_voxel_id(voxels[:, 0], ids, -7), golden["gathered"])
    for ours, repeated in zip(voxelizer(golden["cloud"]), (voxels, indices, counts), strict=True):
        assert torch.equal(ours, repeated)


def test_sums_of_different_voxels(golden):
    a, b = (spconv.SparseConvTensor(golden[f"add{i}"], golden[f"add_indices{i}"], [4, 3, 2], BATCH) for i in (0, 1))
    for total in (
        functional.sparse_add(a, b),
        functional.sparse_add_hash_based(a, b),
        spconv.AddTableMisaligned()([a, b]),
    ):
        assert np.array_equal(rows(total), case(golden, "added", 0))


def written_out(pairs: torch.Tensor, indices: torch.Tensor) -> set[tuple[int, ...]]:
    return {(i, *indices[o].tolist()) for i, o in pairs.t().tolist() if i >= 0}


def test_pairs(golden):
    """Outputs are numbered in another order; the pairs are the same once both are written as indices."""
    arguments = [4, 3, 2], spconv.ConvAlgo.Native, [2] * 3, [2] * 3, [0] * 3, [1] * 3, [0] * 3
    out, pairs, num = ops.get_indice_pairs(golden["add_indices0"], BATCH, *arguments)
    assert torch.equal(num, golden["pair_num"])
    assert pairs.shape == golden["pairs"].shape
    for tap in range(8):
        assert written_out(pairs[:, tap], out) == written_out(golden["pairs"][:, tap], golden["pair_out"])
        assert (pairs[:, tap, num[tap] :] == -1).all()


# --- surface ----------------------------------------------------------------------------------------------------------

ABSENT = {  # debugging and internals
    "conv.SparseConvolutionBase",
    "core.ThrustSortAllocator",
    "ops.fused_indice_conv",
}
RECORDS = {"core.IndiceData", "core.ImplicitGemmIndiceData"}  # one record, made by layers
TORCHS_OWN = {  # their parameters are torch's
    "SparseBatchNorm": nn.BatchNorm1d,
    "SparseSyncBatchNorm": nn.SyncBatchNorm,
    "SparseReLU": nn.ReLU,
    "SparseIdentity": nn.Identity,
}


def surface() -> dict[str, object]:
    return json.loads((HERE / "api.json").read_text())


def parameters(function: object) -> list[tuple[str, str]]:
    listed = inspect.signature(function).parameters.values()
    return [(p.name, "" if p.default is p.empty else f"{p.default}") for p in listed if p.name != "self"]


def test_everything_is_exported():
    frozen = surface()
    assert set(frozen["exports"]) <= set(spconv.__all__)
    assert {"ops", "functional", "AddTableMisaligned", "SparseSyncBatchNorm"} <= set(spconv.__all__)
    assert all(hasattr(core.SparseConvTensor, name) for name in frozen["tensor"])


INTERNAL = {"functional.identity_decorator", "hash.main"}
NAMED = [(k, n) for k in ("classes", "functions") for n in surface()[k] if n not in ABSENT | RECORDS | INTERNAL]


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, n in NAMED if not n.endswith("Function")])
def test_parameters_are_those_of_spconv_in_their_order(kind, name):
    where, attribute = name.split(".")
    ours = getattr(importlib.import_module(f"shiplap_sparse3d.spconv.{where}"), attribute)
    if attribute in TORCHS_OWN:
        assert issubclass(ours, TORCHS_OWN[attribute])
        return
    if kind == "classes" and "__init__" not in vars(ours) and surface()[kind][name] == "args, kwargs":
        return
    expected = [tuple(p.partition("=")[::2]) for p in surface()[kind][name].split(", ") if p]
    given = parameters(ours.__init__ if kind == "classes" else ours)
    assert [n for n, _ in given] == [n for n, _ in expected]
    for (parameter, default), (_, theirs) in zip(given, expected, strict=True):
        if parameter not in ("timer", "act_type", "device", "algo", "direct_table", "do_sort"):
            assert default == theirs, parameter


def test_what_is_absent_is_absent_and_said_so():
    page = (REPOSITORY / "docs" / "spconv.md").read_text()
    for name in ABSENT:
        where, attribute = name.split(".")
        assert not hasattr(importlib.import_module(f"shiplap_sparse3d.spconv.{where}"), attribute)
        assert f"`{name}`" in page
