"""The members of spconv and cumm that models read beside the layers: arrays, timers, sizes, texts and utilities."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shiplap_sparse3d as s3
import shiplap_sparse3d.spconv as spconv
from shiplap_sparse3d.spconv import constants, containers, core, cppcore, modules, ops, tensorview
from shiplap_sparse3d.spconv.timer import CUDAKernelTimer
from shiplap_sparse3d.spconv_package import utils
from tests.sparse3d.test_spconv_modules import voxels


def test_a_tensorview_has_the_members_of_cumms() -> None:
    held = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    view = tensorview.Tensor(held)
    assert view.cpu().torch.data_ptr() == held.data_ptr()
    view.clone().torch.zero_()
    assert held.sum() == 15, "a clone has memory of its own"
    assert (view.shape, view.ndim, view.dtype, view.size, view.dim(1), len(view)) == ([2, 3], 2, torch.float32, 6, 3, 2)
    assert not view.empty()
    assert tensorview.Tensor(held[:0]).empty()
    assert torch.equal(view[1].torch, held[1])
    assert np.asarray(view, np.float64).dtype == np.float64
    np.testing.assert_array_equal(np.asarray(view), held.numpy())
    assert repr(view) == "Tensor[shape=[2, 3], dtype=torch.float32]"
    assert torch.equal(tensorview.zeros([2, 3], tensorview.int32).torch, torch.zeros(2, 3, dtype=torch.int32))


def test_tensors_and_tensorviews_share_their_memory() -> None:
    held = torch.arange(6, dtype=torch.int32)
    whole, other = cppcore.torch_tensors_to_tv(held, held[1:])
    assert whole.torch.data_ptr() == held.data_ptr()
    assert torch.equal(other.torch, held[1:])
    assert cppcore.torch_tensor_to_tv(held, torch.uint8).shape == [24]
    assert torch.equal(cppcore.torch_tensor_to_tv(held, shape=[2, 3]).torch, held.view(2, 3))
    every_other = cppcore.torch_tensor_to_tv(held, shape=[3], stride=[2]).torch
    assert every_other.tolist() == [0, 2, 4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_there_is_no_stream_and_no_architecture() -> None:
    assert cppcore.get_current_stream() == 0
    assert cppcore.get_arch() == (0, 0)


def test_a_timer_measures_nothing() -> None:
    timer = CUDAKernelTimer(False)
    with timer.namespace("a network"), timer.record("a layer"):
        pass
    assert timer.enable is False
    assert timer.get_all_pair_time() == {}


def test_autocast_of_cuda_is_what_counts() -> None:
    before = torch.is_autocast_enabled("cuda")
    try:
        for enabled in (True, False):
            torch.set_autocast_enabled("cuda", enabled)
            assert constants.is_amp_enabled() == enabled
    finally:
        torch.set_autocast_enabled("cuda", before)


def test_layers_that_keep_the_grid_say_so() -> None:
    for layer in (spconv.Identity(), spconv.JoinTable(), spconv.ConcatTable().add(spconv.Identity())):
        assert layer.input_spatial_size([4, 5, 6]) == [4, 5, 6]


def test_a_layer_can_be_inverted_if_it_has_a_key_and_moves_voxels() -> None:
    assert spconv.SparseConv3d(2, 2, 3, indice_key="a").is_inverseable()
    assert not spconv.SparseConv3d(2, 2, 3).is_inverseable()
    assert not spconv.SubMConv3d(2, 2, 3, indice_key="a").is_inverseable()


def test_updates_are_scattered_into_zeros() -> None:
    indices, updates = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    want = torch.zeros(2, 3, 2)
    want[0, 1], want[1, 2] = updates
    assert torch.equal(core.scatter_nd(indices, updates, [2, 3, 2]), want)


def test_features_are_dequantized_on_their_voxels() -> None:
    x = voxels(20)
    out = x.dequantize()
    assert out is not x
    assert torch.equal(out.features, x.features)
    assert out.indices is x.indices


def test_a_tensor_lists_its_members_and_those_that_were_set() -> None:
    x: Any = voxels(5)
    x.note = "own"
    assert {"replace_feature", "spatial_shape", "note"} <= {*dir(x)}
    assert "note" not in dir(voxels(5))


def test_the_largest_number_is_kept() -> None:
    number = torch.tensor([3], dtype=torch.int32)
    ops.maximum_value_int_(number, 5)
    ops.maximum_value_int_(number, 2)
    assert number.tolist() == [5]


def test_modules_say_what_they_take() -> None:
    assert modules.is_spconv_module(spconv.SubMConv3d(1, 1, 3))
    assert modules.is_spconv_module(spconv.SparseReLU())
    assert not modules.is_spconv_module(nn.ReLU())
    assert modules.is_sparse_conv(spconv.SparseConv3d(1, 1, 3))
    assert not modules.is_sparse_conv(spconv.SparseMaxPool3d(2))
    assert not modules.is_sparse_conv(nn.Conv3d(1, 1, 3))


def test_modules_print_what_passes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x = voxels(10)
    assert modules.PrintTensorMeta()(x) is x
    shown = capsys.readouterr().out
    assert modules.PrintTensorMeta()(x.features) is x.features
    assert capsys.readouterr().out == shown
    assert str(x.features.max()) in shown
    now = iter([10.0, 13.0, 20.0, 20.0, 21.5])
    monkeypatch.setattr(time, "time", lambda: next(now))
    watch = modules.PrintCurrentTime()
    assert watch(x, "after") is x
    watch(x, "again", reset=True)
    watch(x, "then")
    assert capsys.readouterr().out == "after 3.0\nagain 0.0\nthen 1.5\n"


def test_a_batch_norm_over_processes_is_that_of_one_where_it_is_not_trained() -> None:
    x, norm = voxels(30), modules.SparseSyncBatchNorm(4).eval()
    norm.running_mean, norm.running_var = torch.rand(4), torch.rand(4) + 0.5
    moments = norm.running_mean, norm.running_var
    own = nn.functional.batch_norm(x.features, *moments, norm.weight, norm.bias, eps=norm.eps)
    torch.testing.assert_close(norm(x).features, own)


def test_unused_rows_of_a_voxel_are_zeros_or_its_mean() -> None:
    points = np.array([[0.25, 0.25, 0.25], [0.75, 0.25, 0.25]], np.float32)
    made = utils.Point2VoxelCPU3d([1.0] * 3, [0.0] * 3 + [2.0] * 3, 3, 10, 3)
    mean = points.mean(0)
    for run, rest in (
        (made.point_to_voxel, np.zeros(3)),
        (made.point_to_voxel_empty_mean, mean),
        (made.point_to_voxel_hash, np.zeros(3)),
        (lambda p: made.point_to_voxel_hash(p, empty_mean=True), mean),
    ):
        held, indices, number = run(tensorview.from_numpy(points.copy()))
        np.testing.assert_allclose(held.numpy()[0], [*points, rest])
        assert (indices.numpy().tolist(), number.numpy().tolist()) == ([[0, 0, 0]], [2])


def test_structures_of_tensors_are_alike_whatever_they_hold() -> None:
    some, other = containers._TensorMembers(voxels(5)), containers._TensorMembers(voxels(6))
    assert some == other
    assert hash(some) == hash(other)
    assert some != 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (spconv.SparseMaxPool3d(2, 3), "stride=[3, 3, 3], padding=[0, 0, 0], dilation=[1, 1, 1], algo="),
        (s3.nn.SparseMaxPool3d(2, 3), "kernel_size=(2, 2, 2), stride=(3, 3, 3), padding=(0, 0, 0), dilation=(1, 1, 1)"),
        (s3.nn.SparseUnpool3d(2), "kernel_size=(2, 2, 2), mode='sum'"),
        (s3.nn.SparseUpsample3d(2), "factor=(2, 2, 2)"),
        (s3.nn.GlobalPool("max"), "'max'"),
        (s3.nn.InstanceNorm(8), "8, eps=1e-05, affine="),
        (s3.nn.SparseAttention(8, num_heads=2), "8, num_heads=2, patch_size=1024, order='z_order'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_module_shows_its_arguments(module: nn.Module, text: str) -> None:
    assert text in repr(module)
