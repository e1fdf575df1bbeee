"""What spconv's users rely on around the convolutions: keys, containers, tables, checkpoints, autocast, utilities."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from contextlib import nullcontext
from types import FrameType

import numpy as np
import pytest
import torch
from torch import nn

import shiplap as sl
import shiplap_sparse3d.spconv as spconv
from shiplap_sparse3d import geometry
from shiplap_sparse3d.spconv import functional, ops, utils
from shiplap_sparse3d.spconv import indices as records
from shiplap_sparse3d.spconv.core import IndiceData
from shiplap_sparse3d.spconv.hash import HashTable
from tests.sparse3d.scenes import scene

GRID = (9, 8, 7)


def voxels(
    n: int = 80, channels: int = 4, batch_size: int = 2, dtype: torch.dtype = torch.float32
) -> spconv.SparseConvTensor:
    x = scene(n, GRID, channels, batch_size=batch_size, dtype=dtype)
    return spconv.SparseConvTensor(x.feats, x.coords, GRID, batch_size)


def refused(match: str) -> pytest.RaisesExc:
    return pytest.raises(sl.ShiplapError, match=match)


READERS = {
    "SubMConv3d": lambda x: spconv.SubMConv3d(4, 4, 3)(x),
    "SparseConv3d": lambda x: spconv.SparseConv3d(4, 4, 1)(x),
    "SparseInverseConv3d": lambda x: spconv.SparseInverseConv3d(4, 4, 3, "a")(x),
    "ToDense": spconv.ToDense(),
    "SparseMaxPool3d": spconv.SparseMaxPool3d(2),
    "SparseGlobalAvgPool": spconv.SparseGlobalAvgPool(),
    "AddTable": lambda x: spconv.AddTable()([x, x]),
    "JoinTable": lambda x: spconv.JoinTable()([x, x]),
}


@pytest.mark.parametrize("name", READERS)
def test_what_a_layer_cannot_read_is_refused(name):
    """Features without voxels, and a tensor whose features are more or fewer than its voxels."""
    x = voxels(20)
    with refused(rf"SL209: (.|\n)*where    {name}\n  got      Tensor\n  expected a SparseConvTensor"):
        READERS[name](x.features)
    for features in (x.features[:7], torch.cat([x.features, x.features])):
        with refused(rf"SL202: (.|\n)*where    {name}\n  got      {len(features)} rows of features\n  expected 20"):
            READERS[name](x.replace_feature(features))
    more = x.replace_feature(torch.cat([x.features, x.features]))  # and its voxels are assigned after that
    more.indices = torch.cat([x.indices, x.indices + torch.tensor([2, 0, 0, 0]).int()])
    more.batch_size = 4
    with refused("no such key") if name == "SparseInverseConv3d" else nullcontext():
        READERS[name](more)


# --- the tensor -------------------------------------------------------------------------------------------------------


def test_a_tensor_has_what_it_was_made_of():
    feats, indices = torch.randn(2, 3), torch.tensor([[0, 1, 2, 3], [1, 0, 0, 0]], dtype=torch.int32)
    x = spconv.SparseConvTensor(feats, indices, np.array([9, 8, 7]), 2, benchmark=True, voxel_num=torch.tensor([2]))
    assert x.features is feats
    assert x.indices is indices
    assert x.spatial_shape == [9, 8, 7]
    assert (x.batch_size, x.spatial_size, x.is_quantized, x.benchmark) == (2, 504, False, True)
    assert (x.find_indice_pair(None), x.find_indice_pair("k"), x.indice_dict) == (None, None, {})
    assert repr(x) == "SparseConvTensor[shape=torch.Size([2, 3])]"
    assert torch.equal(x.minus().features, -feats)
    assert x.shadow_copy().features is feats


def test_new_features_share_records_and_tables():
    x = voxels()
    x.indice_dict["a"] = "record"  # type: ignore[assignment]
    table = x.geometry.subm(3).table
    y = x.replace_feature(x.features * 2)
    assert y.indice_dict is x.indice_dict
    assert y.geometry.subm(3).table is table
    y.features = x.features  # as models of spconv 1.x write it
    assert y.features is x.features
    y.features += 1
    assert y.geometry.subm(3).table is table


def test_what_a_tensor_carries_along_is_its_own():
    x = voxels()
    x.grid, x.benchmark_record["a"] = torch.ones(2), "shared, as spconv shares it"
    y = x.replace_feature(x.features * 2)
    assert y.grid is x.grid
    assert y.benchmark_record is x.benchmark_record
    assert (y._timer, y.force_algo, y.voxel_num) == (x._timer, None, None)
    y.grid = y.force_algo = None
    y.benchmark, y.voxel_num, y._timer = True, torch.tensor([4]), "another"
    assert (x.grid is not None, x.benchmark, x.voxel_num, x._timer != "another") == (True, False, None, True)
    y.thrust_allocator = y.int8_scale = "set by a model"
    assert (x.thrust_allocator, x.int8_scale) == (None, None)
    assert x.replace_feature(x.features).thrust_allocator is None


def test_new_indices_forget_tables():
    x = voxels()
    before = x.geometry
    x.indices = x.indices.flip(0).contiguous()
    assert x.geometry is not before
    x.spatial_shape = [9, 8, 8]
    assert x.geometry.spatial_shape == (9, 8, 8)


def test_selection_has_no_records_and_leaves_those_of_the_original():
    x = voxels()
    x.indice_dict["a"] = "record"  # type: ignore[assignment]
    mask = torch.arange(80) % 2 == 0
    y = x.select_by_index(mask)
    assert y.indices.shape[0] == 40
    assert torch.equal(y.features, x.features[mask])
    assert (list(y.indice_dict), list(x.indice_dict)) == ([], ["a"])


@pytest.mark.parametrize("shape", [(40,), (12, 9), (7, 6, 5)])
def test_dense_and_back(shape):
    dense = torch.randn(2, *shape, 3) * (torch.rand(2, *shape, 1) < 0.2)
    x = spconv.SparseConvTensor.from_dense(dense)
    assert (x.spatial_shape, x.batch_size, x.indices.dtype) == (list(shape), 2, torch.int32)
    assert torch.equal(x.dense(channels_first=False), dense)
    assert torch.equal(x.dense(), dense.movedim(-1, 1))
    assert x.dense().is_contiguous()
    assert torch.equal(spconv.ToDense()(x), x.dense())


def test_sums():
    x = voxels()
    for y in (x + x, x + x.features, x.features.__radd__(0) + x.features):
        assert torch.equal(y.features if isinstance(y, spconv.SparseConvTensor) else y, 2 * x.features)
    y = x
    y += x
    assert torch.equal(y.features, 2 * x.features)
    with pytest.raises(TypeError):
        x + 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"indices": torch.zeros(2, 4, dtype=torch.int64)}, "SL204"),
        ({"indices": torch.zeros(2, 3, dtype=torch.int32)}, "3 columns of indices, 3 axes"),
        ({"indices": torch.zeros(2, 5, dtype=torch.int32), "spatial_shape": [2, 2, 2, 2]}, "4 spatial axes"),
        ({"features": torch.zeros(2)}, "1 dims"),
        ({"batch_size": 0}, "batch_size 0"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(change, says):
    good = {"features": torch.zeros(2, 3), "indices": torch.zeros(2, 4, dtype=torch.int32), "spatial_shape": [2, 2, 2]}
    with refused(says):
        spconv.SparseConvTensor(**{**good, "batch_size": 1, **change})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_features_are_refused():
    quantised = torch.quantize_per_tensor(torch.zeros(2, 3), 1.0, 0, torch.qint8)
    with refused("qint8"):
        spconv.SparseConvTensor(quantised, torch.zeros(2, 4, dtype=torch.int32), [2, 2, 2], 1)
    with refused("a quantised tensor"):
        voxels().q_scale()


# --- indice_key -------------------------------------------------------------------------------------------------------


def test_submanifold_layers_share_a_key():
    x = voxels()
    y = spconv.SubMConv3d(4, 4, 3, indice_key="a")(x)
    record = y.find_indice_pair("a")
    assert isinstance(record, IndiceData)
    assert (record.is_subm, record.ksize, record.spatial_shape) == (True, [3, 3, 3], [9, 8, 7])
    assert x.indice_dict == {}
    z = spconv.SubMConv3d(4, 4, 3, indice_key="a")(y)
    assert z.find_indice_pair("a") is record


def test_a_record_has_spconvs_tables():
    x = voxels()
    down = spconv.SparseConv3d(4, 6, 3, 2, 1, indice_key="a")
    y = down(x)
    record = y.find_indice_pair("a")
    assert record.indices is x.indices
    assert record.out_indices is y.indices
    assert (record.stride, record.padding, record.dilation) == ([2] * 3, [1] * 3, [1] * 3)
    assert (record.pair_fwd.shape, record.pair_bwd.shape) == ((27, len(y.indices)), (27, len(x.indices)))
    assert torch.equal(record.indice_pair_num, (record.pair_bwd >= 0).sum(1).int())
    pairs, weight = record.indice_pairs, down.weight
    by_pairs = functional.indice_conv(
        x.features, weight, pairs, record.indice_pair_num, len(y.indices), record.algo, None, down.bias
    )
    by_table = functional.implicit_gemm(
        x.features,
        weight,
        record.pair_fwd,
        record.pair_bwd,
        [],
        [],
        [],
        [],
        len(y.indices),
        [],
        True,
        False,
        None,
        None,
        down.bias,
    )
    torch.testing.assert_close(by_pairs, y.features)
    torch.testing.assert_close(by_table, y.features)
    back = functional.indice_inverse_conv(y.features, torch.randn(4, 3, 3, 3, 6), pairs, record.indice_pair_num, 80)
    assert back.shape == (80, 4)


def wrong(first: nn.Module, second: nn.Module, says: str) -> None:
    with refused(says) as caught:
        second(first(voxels()))
    assert isinstance(caught.value, ValueError)
    assert "indice_key='a'" in str(caught.value)


def test_a_record_finds_its_plan_once_and_completes_it_for_gradients():
    for layer in (spconv.SparseConv3d(4, 4, 2, 2, indice_key="k"), spconv.SubMConv3d(4, 4, 2, indice_key="k")):
        with torch.no_grad():
            record = layer(voxels()).indice_dict["k"]
            without = record.plan
            assert record.plan is without
            assert without.back is None
        whole = record.plan
        assert whole.back is not None
        assert record.plan is whole
        with torch.no_grad():
            assert record.plan is whole


def test_misused_keys_are_refused():
    subm, conv, key = spconv.SubMConv3d(4, 4, 3, indice_key="a"), spconv.SparseConv3d, {"indice_key": "a"}
    wrong(subm, spconv.SubMConv3d(4, 4, (3, 3, 1), **key), r"kernel_size \[3, 3, 1\]")
    wrong(subm, spconv.SubMConv3d(4, 4, 3, dilation=2, **key), r"dilation \[2, 2, 2\]")
    wrong(subm, spconv.SubMConv3d(4, 4, 3, algo=spconv.ConvAlgo.Native, **key), "algo=ConvAlgo.Native")
    wrong(subm, conv(4, 4, 3, **key), "a key that an earlier layer has used")
    wrong(subm, spconv.SparseMaxPool3d(2, **key), "a key that an earlier layer has used")
    wrong(subm, spconv.SparseInverseConv3d(4, 4, 3, "a"), "the key of a submanifold layer")
    wrong(conv(4, 4, 3, 2, 1, **key), spconv.SubMConv3d(4, 4, 3, **key), "a key that an earlier layer has used")
    wrong(conv(4, 4, 3, 2, 1), spconv.SparseInverseConv3d(4, 4, 3, "a"), "no such key")
    wrong(conv(4, 4, 3, 2, 1, **key), spconv.SparseInverseConv3d(4, 4, 2, "a"), r"kernel_size \[2, 2, 2\]")
    down = spconv.SparseSequential(subm, conv(4, 4, 3, 2, 1))
    wrong(down, spconv.SubMConv3d(4, 4, 3, **key), r"spatial_shape \[5, 4, 4\]")


def test_a_u_net_finds_its_way_back():
    net = spconv.SparseSequential(
        spconv.SubMConv3d(4, 8, 3, indice_key="s1"),
        spconv.SparseConv3d(8, 8, 3, 2, 1, indice_key="d1"),
        spconv.SparseMaxPool3d(2, 2, indice_key="d2"),
        spconv.SubMConv3d(8, 8, 3, indice_key="s3"),
        spconv.SparseInverseConv3d(8, 8, 2, "d2"),
        spconv.SparseInverseConv3d(8, 4, 3, "d1"),
    )
    x = voxels()
    y = net(x)
    assert y.indices is x.indices
    assert y.spatial_shape == list(GRID)
    assert set(y.indice_dict) == {"s1", "d1", "d2", "s3"}


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SubMConv4d", "SparseConv4d", "SparseConvTranspose4d", "SparseMaxPool4d"])
def test_four_axes_are_refused(name):
    arguments = (2,) if "Pool" in name else (4, 4, 3)
    with refused("1 to 3") as caught:
        getattr(spconv, name)(*arguments)
    assert str(caught.value).startswith(
        f"SL208: a precondition does not hold\n  where    {name}\n  got      4 spatial axes"
    )
    with refused("4 spatial axes"):
        spconv.SparseInverseConv4d(4, 4, 3, "key")


def test_layers_refuse_what_spconv_refuses():
    x = voxels()
    for layer in (spconv.SubMConv3d(5, 4, 3), spconv.SubMConv3d(5, 4, 1)):
        with refused(
            "where    SubMConv3d\n  got      4 channels\n  expected in_channels = 5\n  fix .* in_channels = 4, or"
        ):
            layer(x)
    with refused("padding 0"):
        spconv.SparseConv3d(4, 4, 1, padding=1)
    with refused("an int, or one int for each of 3 axes"):
        spconv.SubMConv3d(4, 4, (3, 3))
    with refused("output shape"):
        spconv.SparseConv3d(4, 4, 9)(x)
    lost = spconv.SparseConvTensor(torch.zeros(1, 4), torch.tensor([[0, 7, 0, 0]], dtype=torch.int32), [8, 8, 8], 1)
    with refused("1 voxels, none with an output"):
        spconv.SparseConv3d(4, 4, 2, 4)(lost)
    with refused("multiples of groups = 3"):
        spconv.SubMConv3d(6, 4, 3, groups=3)
    with refused("act_type"):
        spconv.conv.SparseConvolution(3, 4, 4, act_type="Swish")


def test_parameters_and_their_initial_values():
    layer = spconv.SubMConv3d(64, 32, (3, 1, 5))
    assert layer.weight.shape == (32, 3, 1, 5, 64)
    assert layer.weight_shape == [32, 3, 1, 5, 64]
    bound = 1 / (64 * 15) ** 0.5
    for parameter in layer.parameters():
        assert parameter.abs().max() <= bound
        assert parameter.abs().max() > 0.8 * bound
    assert spconv.SubMConv3d(4, 4, 3, bias=False).bias is None
    assert repr(spconv.SparseConv3d(4, 8, 3, 2, 1, indice_key="a")) == (
        "SparseConv3d(4, 8, kernel_size=[3, 3, 3], stride=[2, 2, 2], padding=[1, 1, 1], dilation=[1, 1, 1], "
        "output_padding=[0, 0, 0], algo=ConvAlgo.MaskImplicitGemm)"  # as spconv's, to the letter
    )
    assert spconv.SubMConv3d(4, 4, 5).algo == spconv.ConvAlgo.Native
    assert spconv.SubMConv3d(4, 4, 5, large_kernel_fast_algo=True).algo == spconv.ConvAlgo.MaskImplicitGemm


def test_a_copy_of_a_layer_counts_for_itself():
    layer = spconv.SparseConv3d(4, 4, 3, 2, 1, record_voxel_count=True)
    twin = copy.deepcopy(layer)
    layer(voxels(80)), layer(voxels(10))
    assert layer.get_max_num_voxels() > 80
    assert twin.get_max_num_voxels() == 0
    state = layer.state_dict()
    del state[spconv_count := "max_num_voxels_during_training"]
    layer.load_state_dict(state)  # saved without record_voxel_count: counting starts anew
    assert layer.state_dict()[spconv_count] == 0


def test_add_input_is_added():
    x, layer = voxels(), spconv.SubMConv3d(4, 4, 3)
    torch.testing.assert_close(layer(x, x).features, layer(x).features + x.features)


def test_an_inverse_layer_of_one_cell_stays_where_it_is():
    """As in spconv, where every kernel of one cell and stride 1 is a matrix product."""
    x = spconv.SparseConv3d(4, 4, 1, 2, indice_key="a")(voxels())
    layer = spconv.SparseInverseConv3d(4, 6, 1, "a", bias=False)
    y = layer(x)
    assert y.indices is x.indices
    torch.testing.assert_close(y.features, x.features @ layer.weight.view(4, 6))


@pytest.mark.parametrize("n", [0, 1])
def test_no_voxel_and_one_voxel(n):
    """Both are trouble in spconv; no voxels give no voxels, and leave batch norm alone."""
    norm = nn.BatchNorm1d(8)
    net = spconv.SparseSequential(
        spconv.SubMConv3d(4, 8, 3),
        norm if n == 0 else nn.ReLU(),
        spconv.SparseConv3d(8, 6, 3, 2, 1, indice_key="a"),
        spconv.SparseMaxPool3d(3, 2, 1, indice_key="b"),
        spconv.SparseInverseConv3d(6, 6, 3, "b"),
        spconv.SparseInverseConv3d(6, 4, 3, "a"),
    )
    x = scene(n, GRID, 4, dtype=torch.float32)
    y = net(spconv.SparseConvTensor(x.feats, x.coords, GRID, 2))
    assert y.features.shape == (n, 4)
    y.features.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)
    assert torch.equal(norm.running_mean, torch.zeros(8))
    assert spconv.SparseGlobalAvgPool()(y).shape == (2, 4)
    assert spconv.ToDense()(y).shape == (2, 4, *GRID)


# --- autocast and dtypes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("k", [1, 3])
def test_autocast_narrows_every_layer(dtype, training, k):
    net = spconv.SparseSequential(
        spconv.SubMConv3d(4, 8, k),
        spconv.SparseConv3d(8, 8, 2, 2, indice_key="a"),
        spconv.SparseMaxPool3d(2, 1),
        spconv.SparseAvgPool3d(2, 1),
    ).train(training)
    x = voxels()
    wide = net(x).features
    with torch.autocast("cpu", dtype=dtype):
        narrow = net(x).features
        narrow.float().sum().backward()
    assert (wide.dtype, narrow.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(narrow.float(), wide, rtol=0.03, atol=0.03)
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_in_another_dtype(dtype):
    """bfloat16 too, which spconv has no kernels for."""
    net = spconv.SparseSequential(
        spconv.SubMConv3d(4, 8, 3),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        spconv.SparseConv3d(8, 4, 3, 2, 1, indice_key="a"),
        spconv.SparseInverseConv3d(4, 4, 3, "a"),
    )
    x = voxels(dtype=torch.float64)
    expected = copy.deepcopy(net).double()(x).features
    y = net.to(dtype)(x.replace_feature(x.features.to(dtype))).features
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=0.05, atol=0.05)


# --- containers and tables --------------------------------------------------------------------------------------------


def test_a_sequence_by_position_by_name_and_by_order():
    conv, relu = spconv.SubMConv3d(4, 4, 3), nn.ReLU()
    by_position = spconv.SparseSequential(conv, relu, conv, relu)
    assert (len(by_position), by_position[1], by_position[-1]) == (4, relu, relu)
    by_name = spconv.SparseSequential(OrderedDict(a=conv, b=relu))
    assert list(by_name._modules) == ["a", "b"]
    by_name.add(relu)
    by_name.add(conv, "d")
    assert list(by_name._modules) == ["a", "b", "2", "d"]
    assert list(spconv.SparseSequential(conv, last=relu)._modules) == ["0", "last"]
    with pytest.raises(KeyError):
        by_name.add(conv, "a")
    with pytest.raises(IndexError):
        by_position[4]
    x = voxels()
    twice = relu(conv(x.replace_feature(relu(conv(x).features))).features)
    torch.testing.assert_close(by_position(x).features, twice)  # a module that occurs twice runs twice


def test_modules_that_take_either():
    x = voxels()
    for module in (spconv.SparseBatchNorm(4), spconv.SparseReLU(), spconv.SparseIdentity()):
        both = spconv.SparseSequential(module)
        state = copy.deepcopy(module)
        torch.testing.assert_close(both(x).features, state(x.features))
    assert spconv.Identity()(x) is x
    x.grid = torch.zeros(1)
    assert spconv.RemoveGrid()(x).grid is None
    assert isinstance(spconv.SparseSyncBatchNorm(4), nn.SyncBatchNorm)


def test_names():
    net = nn.ModuleDict({"a": spconv.SparseSequential(spconv.SubMConv3d(4, 4, 3, name="first"))})
    spconv.assign_name_for_sparse_modules(net)
    assert (net["a"][0]._sparse_unique_name, net["a"][0].name) == ("a.0", "first")


def test_tables_of_branches():
    x = voxels()
    branches = spconv.ConcatTable().add(spconv.SubMConv3d(4, 4, 3, indice_key="a")).add(spconv.Identity())
    parts = branches(x)
    added, joined = spconv.AddTable()(parts), spconv.JoinTable()(parts)
    torch.testing.assert_close(added.features, parts[0].features + x.features)
    assert torch.equal(joined.features, torch.cat([parts[0].features, x.features], 1))
    assert set(added.indice_dict) == {"a"}
    assert added.indices is x.indices
    with refused("number of voxels 40"):
        spconv.AddTable()([x, x.select_by_index(torch.arange(40))])
    with refused("number of channels 8"):
        spconv.AddTable()([x, joined])


def test_misaligned_sums_keep_records_where_one_operand_has_all_voxels():
    x = spconv.SubMConv3d(4, 4, 3, indice_key="a")(voxels())
    part = x.select_by_index(torch.randperm(80)[:40])
    for first, second in ((x, part), (part, x)):
        y = spconv.AddTableMisaligned()([first, second])
        assert y.indices is x.indices
        assert set(y.indice_dict) == {"a"}
        torch.testing.assert_close(y.dense(), x.dense() + part.dense())
    other = voxels(30)
    y = spconv.AddTableMisaligned()([x, other])
    assert y.indice_dict == {}
    torch.testing.assert_close(y.dense(), x.dense() + other.dense())
    gradient = torch.autograd.grad(y.features.sum(), x.features, allow_unused=True)[0]
    assert torch.equal(gradient, torch.ones_like(x.features))


# --- utilities --------------------------------------------------------------------------------------------------------


def test_points_to_voxels():
    cloud = torch.tensor(
        [[0.1, 0.1, 0.1], [9.0, 0, 0], [1.2, 0.1, 0.1], [0.2, 0.2, 0.2], [0.3, 0, 0], [float("nan"), 0, 0]]
    )
    voxelizer = utils.PointToVoxel([1, 1, 1], [0, 0, 0, 3, 2, 1], 3, 10, 2)
    voxels_, indices, counts, ids = voxelizer.generate_voxel_with_id(cloud, empty_mean=True)
    assert indices.tolist() == [[0, 0, 0], [0, 0, 1]]  # z, y, x
    assert counts.tolist() == [2, 1]
    assert ids.tolist() == [0, -1, 1, 0, 0, -1]
    assert torch.equal(voxels_, torch.stack([cloud[[0, 3]], cloud[[2, 2]]]))
    assert [t.shape[0] for t in voxelizer(cloud[:0])] == [0, 0, 0]
    few = utils.PointToVoxel([1, 1, 1], [0, 0, 0, 3, 2, 1], 3, 1, 2)
    assert few.generate_voxel_with_id(cloud)[3].tolist() == [0, -1, -1, 0, 0, -1]
    with refused(r"\[n, 3\]"):
        voxelizer(cloud[:, :2])
    gathered = utils.gather_features_by_pc_voxel_id(torch.tensor([[1.0], [2.0]], requires_grad=True), ids, -1)
    assert gathered.flatten().tolist() == [1, -1, 2, 1, 1, -1]
    assert utils.gather_features_by_pc_voxel_id(torch.zeros(0, 2), torch.tensor([-1, -1])).shape == (2, 2)


@pytest.mark.parametrize("key", [torch.int32, torch.int64])
@pytest.mark.parametrize("value", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_a_hash_table_is_a_dict(key, value):
    table, expected, rng = HashTable(torch.device("cpu"), key, value), {}, torch.Generator().manual_seed(3)
    for _ in range(3):
        keys = torch.randint(-20, 20, (15,), generator=rng, dtype=key)
        values = torch.randint(0, 100, (15,), generator=rng).to(value)
        table.insert(keys, values)
        expected |= dict(zip(keys.tolist(), values.tolist(), strict=True))
    asked = torch.arange(-25, 25, dtype=key)
    stored, missing = table.query(asked)
    assert missing.tolist() == [k not in expected for k in asked.tolist()]
    assert {
        k: v for k, v, m in zip(asked.tolist(), stored.tolist(), missing.tolist(), strict=True) if not m
    } == expected
    failed = table.insert_exist_keys(torch.tensor([50, min(expected)], dtype=key), torch.tensor([1, 2]).to(value))
    assert (failed.tolist(), failed.dtype) == ([1, 0], torch.uint8)
    assert table.query(torch.tensor([min(expected)], dtype=key))[0] == 2
    count = table.assign_arange_()
    keys, values, repeated = table.items()
    assert (int(count), int(repeated), keys.tolist()) == (len(expected), len(expected), sorted(expected))
    assert values.tolist() == list(range(len(expected)))


def test_what_a_hash_table_refuses():
    with refused("SL204"):
        HashTable(torch.device("cpu"), torch.float32, torch.int32)
    table = HashTable(torch.device("cpu"), torch.int32, torch.int32, max_size=2)
    with refused("3 distinct keys"):
        table.insert(torch.arange(3, dtype=torch.int32))
    with refused("keys"):
        table.query(torch.arange(3))
    values, missing = table.query(torch.arange(3, dtype=torch.int32))
    assert missing.all()
    assert values.tolist() == [0, 0, 0]


# --- low level --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", [spconv.ConvAlgo.MaskImplicitGemm, spconv.ConvAlgo.MaskSplitImplicitGemm])
@pytest.mark.parametrize("k", [3, 4])
def test_tables_with_masks(algo, k):
    x, window = voxels(), ([k] * 3, [2] * 3, [1] * 3, [1] * 3, [0] * 3)
    out, num, fwd, bwd, masks, masks_bwd, orders, orders_bwd, covered = ops.get_indice_pairs_implicit_gemm(
        x.indices, 2, GRID, algo, *window
    )
    parts = 1 + (algo == spconv.ConvAlgo.MaskSplitImplicitGemm)
    assert (fwd.shape, bwd.shape) == ((k**3, len(out)), (k**3, 80))
    assert num.tolist() == (fwd >= 0).sum(1).tolist() == (bwd >= 0).sum(1).tolist()
    assert [len(arrays) for arrays in (masks, masks_bwd, orders, orders_bwd, covered)] == [parts] * 5
    bits = sum(m.long() & 0xFFFFFFFF for m in masks)
    for tap in range(k**3):
        assert torch.equal((bits[:, tap // 32] >> tap % 32) & 1 == 1, fwd[tap] >= 0)
    assert all(sorted(order.tolist()) == list(range(len(out))) for order in orders)
    back = ops.get_indice_pairs_implicit_gemm(x.indices, 2, GRID, algo, *window, is_train=False)
    assert (back[3].numel(), back[5], back[7]) == (0, [], [])


def test_functions_on_pairs_have_the_gradients_of_layers():
    x = voxels(dtype=torch.float64)
    x = x.replace_feature(x.features.requires_grad_())
    down = spconv.SparseConv3d(4, 3, 3, 2, 1, indice_key="a").double()
    y = down(x)
    record, grad = y.indice_dict["a"], torch.randn_like(y.features)
    expected = torch.autograd.grad(y.features, [x.features, down.weight], grad)
    pairs, num = record.indice_pairs, record.indice_pair_num
    by_pairs = ops.indice_conv_backward(x.features, down.weight, grad, pairs, num)
    tables = record.pair_fwd, record.pair_bwd
    by_table = ops.implicit_gemm_backward(x.features, down.weight, grad, *tables, [], [], [], [], None, [], -1, False)
    for gradients in (by_pairs, by_table):
        torch.testing.assert_close(gradients, expected)
    for make, layer in (("max", spconv.SparseMaxPool3d(3, 2, 1)), ("avg", spconv.SparseAvgPool3d(3, 2, 1))):
        y = layer(x).features
        grad = torch.randn_like(y)
        expected = torch.autograd.grad(y, x.features, grad)[0]
        if make == "max":
            torch.testing.assert_close(functional.indice_maxpool(x.features, pairs, num, len(y)), y)
            torch.testing.assert_close(functional.indice_maxpool_implicit_gemm(x.features, *tables, len(y)), y)
            torch.testing.assert_close(ops.indice_maxpool_backward(x.features, y, grad, pairs, num), expected)
            gradients = ops.indice_maxpool_implicit_gemm_backward(x.features, y, grad, tables[1])
        else:
            torch.testing.assert_close(functional.indice_avgpool_implicit_gemm(x.features, *tables, len(y), True), y)
            _, count = ops.indice_avgpool_implicit_gemm(x.features, tables[0], len(y), True)
            gradients = ops.indice_avgpool_implicit_gemm_backward(grad, tables[1], count)
        torch.testing.assert_close(gradients, expected)


def test_rows_of_scenes():
    x = voxels()
    rows, counts = ops.global_pool_rearrange(x.indices, 3)
    for b in range(3):
        members = (x.indices[:, 0] == b).nonzero().flatten().tolist()
        assert int(counts[b]) == len(members)
        assert rows[b].tolist() == members + [-1] * (80 - len(members))


def test_sizes():
    assert ops.get_conv_output_size([9, 8], [3, -1], [2, 1], [1, 0], [1, 1]) == [5, 1]
    assert ops.get_deconv_output_size([5, 4], [3, 2], [2, 2], [1, 0], [3, 1], [0, 1]) == [9, 9]
    with refused("1 or more per axis"):
        ops.get_deconv_output_size([5], [-1], [1], [0], [1], [0])


def test_a_layer_whose_table_is_known_runs_little_python():
    """Calls of Python functions by convolution, batch norm and ReLU in eval: they are most of the time on a GPU."""
    layers = spconv.SparseSequential(spconv.SubMConv3d(4, 4, 3, indice_key="a"), nn.BatchNorm1d(4), nn.ReLU()).eval()
    calls: list[str] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "shiplap_sparse3d" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    with torch.no_grad():
        x = layers(layers(voxels()))
        sys.setprofile(look)
        try:
            layers(x)
        finally:
            sys.setprofile(None)
    assert len(calls) <= 26, calls


def test_a_pool_builds_the_table_of_its_cells_alone(monkeypatch):
    monkeypatch.setattr(geometry, "wants_sorted", lambda tensor: True)
    built: list[bool] = []
    connect = geometry.connect_voxels
    monkeypatch.setattr(geometry, "connect_voxels", lambda *a, **k: built.append(k["ordered"]) or connect(*a, **k))
    spconv.SparseMaxPool3d(2, 2)(voxels())
    assert built == [False]


def test_an_inverse_layer_makes_its_tables_in_one_go(monkeypatch):
    """Without gradients a strided layer makes no way back, until an inverse layer has gone back there once."""
    monkeypatch.setattr(geometry, "wants_sorted", lambda tensor: True)
    monkeypatch.setattr(records, "_LED_BACK", set())
    built: list[bool] = []
    connect = geometry.connect_voxels
    down = spconv.SparseConv3d(4, 6, 2, stride=2, indice_key="d")
    up = spconv.SparseInverseConv3d(6, 4, 2, indice_key="d")
    x = voxels()
    wanted = up(down(x))
    monkeypatch.setattr(geometry, "connect_voxels", lambda *a, **k: built.append(k["back"]) or connect(*a, **k))
    for ways in [False, True], [False, True, True]:
        with torch.no_grad():
            y = up(down(spconv.SparseConvTensor(x.features, x.indices, GRID, 2)))
        assert built == ways
        torch.testing.assert_close(y.features, wanted.features)
        assert torch.equal(y.indices, wanted.indices)
