"""A ``SparseTensor`` as users of torch expect it: arithmetic, comparison, masks, casts, and modules of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shiplap_sparse3d as sparse3d
from shiplap.errors import ShiplapError
from shiplap_sparse3d.memory import available_bytes

GRID = (6, 5, 4)


def scene(channels: int = 4, axes: int = 3) -> sparse3d.SparseTensor:
    torch.manual_seed(0)
    cells = [torch.randint(0, size, (40,)) for size in (2, *GRID[:axes])]
    coords = torch.unique(torch.stack(cells, 1), dim=0).int()
    return sparse3d.SparseTensor(torch.randn(len(coords), channels), coords, GRID[:axes], 2)


GATE = torch.rand(scene().feats.shape[0], 1)
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "x * 2": lambda x: x * 2,
    "2 * x": lambda x: 2 * x,
    "x * gate": lambda x: x * GATE,
    "gate * x": lambda x: GATE * x,
    "x * x": lambda x: x * x,
    "-x": lambda x: -x,
    "abs": abs,
    "x - 1": lambda x: x - 1,
    "1 - x": lambda x: 1 - x,
    "gate - x": lambda x: GATE - x,
    "x / gate": lambda x: x / GATE,
    "1 / x": lambda x: 1 / x,
    "x ** 2": lambda x: x**2,
    "x > 0": lambda x: x > 0,
    "x == x": lambda x: x == x * 1,
    "~": lambda x: ~(x >= 0.5),
    "torch.mul": lambda x: torch.mul(x, 3),
    "torch.maximum": lambda x: torch.maximum(x, -x),
    "clamp": lambda x: torch.clamp(x, min=0.0),
    "sigmoid": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "linear": lambda x: nn.functional.linear(x, torch.ones(3, 4)),
    "x.relu()": lambda x: x.relu() + x.clamp(min=0.1),
    "x.add(x, alpha=2)": lambda x: x.add(x, alpha=2),
    "x // 2 % 2": lambda x: x // 2 % 2,
    "2 ** x": lambda x: 2**x,
    "masks": lambda x: (x > 0) & (x < 1) | ~(x > -1) ^ (x == 0),
    "torch.where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "softmax": lambda x: x.softmax(-1) + nn.functional.log_softmax(x, dim=1),
    "normalize": lambda x: nn.functional.normalize(x),
    "cat": lambda x: torch.cat([x, -x], dim=1),
    "x @ weight": lambda x: x @ torch.ones(4, 3) + torch.matmul(x, torch.ones(4, 3)),
    "group_norm": lambda x: nn.functional.group_norm(x, 2),
    "zeros_like": lambda x: torch.zeros_like(x) + torch.full_like(x, 2.0),
    "number of NumPy": lambda x: np.float32(2) * x * np.float64(3),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_one_of_the_features_on_the_same_voxels(name: str) -> None:
    x = scene()
    out = OPERATIONS[name](x)
    assert out.geometry is x.geometry
    assert torch.equal(out.feats, OPERATIONS[name](x.feats))


@pytest.mark.long
def test_operations_are_part_of_one_graph() -> None:
    coords, layer = scene().coords, nn.Sequential(sparse3d.SubMConv3d(4, 4, 3), nn.BatchNorm1d(4), nn.ReLU())

    def run(feats: Tensor) -> Tensor:
        y = layer(1 - sparse3d.SparseTensor(feats, coords, GRID, 2) * 2)
        return (y * (y > 0) * torch.sigmoid(y) / 2).feats

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    layer.eval()
    torch.testing.assert_close(compiled(scene().feats), run(scene().feats))


def test_operands_on_other_voxels_are_refused() -> None:
    x, y = scene(), scene()
    for operation in (lambda: x * y, lambda: x == y, lambda: torch.add(x, y), lambda: x[y > 0]):
        with pytest.raises(ShiplapError, match="SL202"):
            operation()
    for operation in (lambda: x * torch.ones(3, 4), lambda: x * "a"):
        with pytest.raises((ShiplapError, RuntimeError, TypeError)):
            operation()


@pytest.mark.parametrize("function", [torch.sum, lambda x: torch.cumsum(x, 0), lambda x: torch.softmax(x, 0)])
def test_a_function_that_mixes_rows_is_for_the_features(function: Callable[[Any], Any]) -> None:
    with pytest.raises(ShiplapError, match="SL209"):
        function(scene())


def test_it_is_compared_as_a_tensor_and_hashed_as_an_object() -> None:
    x = scene()
    assert {x: 1}[x] == 1
    assert (x != None) is True  # noqa: E711
    with pytest.raises(ShiplapError, match=r"SL209(.|\n)*len"):
        bool(x == x * 1)


@pytest.mark.parametrize("axes", [2, 3])
def test_a_mask_keeps_voxels(axes: int) -> None:
    x = scene(axes=axes)
    mask = x.feats[:, 0] > 0
    for given in (mask, mask[:, None], (x > 0).replace(mask[:, None])):
        kept = x[given]
        assert torch.equal(kept.feats, x.feats[mask])
        assert torch.equal(kept.coords, x.coords[mask])
        assert (kept.spatial_shape, kept.batch_size) == (x.spatial_shape, 2)


def test_a_mask_of_padded_voxels_keeps_the_number_of_rows() -> None:
    x = scene().pad(64)
    mask = torch.arange(64) % 2 == 0
    kept = x[mask]
    assert len(kept) == 64
    assert torch.equal(kept.is_voxel[:, 0], x.is_voxel[:, 0] & mask)


@pytest.mark.parametrize("mask", [torch.ones(3, dtype=torch.bool), torch.ones(len(GATE), 2, dtype=torch.bool), GATE])
def test_another_mask_is_refused(mask: Tensor) -> None:
    with pytest.raises(ShiplapError, match=r"SL20[24]"):
        scene()[mask]


def test_it_has_what_is_asked_of_a_tensor() -> None:
    x = scene()
    assert (x.device, x.dtype, x.shape, len(x)) == (x.feats.device, torch.float32, x.feats.shape, len(x.feats))
    assert (x.dim(), x.ndim, x.size(), x.size(1)) == (2, 2, x.feats.shape, 4)
    casts = x.half(), x.bfloat16(), x.float(), x.double(), x.to(torch.float16), x.cpu()
    dtypes = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float16, torch.float32
    assert tuple(made.dtype for made in casts) == dtypes
    assert all(made.geometry is x.geometry for made in casts)
    recorded = (x * 1).requires_grad_()
    assert recorded.requires_grad
    assert not recorded.detach().requires_grad
    assert x.clone().feats.data_ptr() != x.feats.data_ptr()
    assert [len(one) for one in x] == [len(x[0]), len(x[1])]


@pytest.mark.parametrize("training", [True, False])
def test_modules_of_torch_work_in_its_sequential(training: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.LayerNorm(6), nn.GELU(), nn.Dropout(0.0), nn.PReLU(6)]
    conv, x = sparse3d.SubMConv3d(4, 8, 3), scene()
    net, ours = nn.Sequential(conv, *layers).train(training), sparse3d.Sequential(conv, *layers).train(training)
    expected = ours(x).feats
    layers[0].reset_running_stats()
    out = net(x)
    if training:
        torch.testing.assert_close(out.feats, expected)
    out.feats.sum().backward()
    assert conv.weight.grad is not None


def test_a_batch_norm_of_torch_does_not_learn_from_padding() -> None:
    net = nn.Sequential(sparse3d.SubMConv3d(4, 8, 3), nn.BatchNorm1d(8))
    with pytest.raises(ShiplapError, match=r"SL208(.|\n)*sparse3d.BatchNorm"):
        net(scene().pad(64))
    net.eval()(scene().pad(64))


WRONG: dict[str, tuple[str, Callable[[], Any]]] = {
    "kernel larger than the grid": ("SL208", lambda: sparse3d.SparseConv3d(4, 4, 9)(scene())),
    "pool larger than the grid": ("SL208", lambda: sparse3d.SparseMaxPool3d(9)(scene())),
    "negative batch size": ("SL208", lambda: sparse3d.SparseTensor(scene().feats, scene().coords, GRID, -1)),
    "float batch size": ("SL209", lambda: sparse3d.SparseTensor(scene().feats, scene().coords, GRID, 1.0)),
    "float8": ("SL204", lambda: sparse3d.SubMConv3d(4, 4, 3)(scene().to(torch.float8_e4m3fn))),
    "memory": ("SL208", lambda: scene().__class__(scene().feats, scene().coords, (1 << 18, 1 << 18, 8), 2).dense()),
    "padding of a submanifold layer": ("SL208", lambda: sparse3d.SubMConv3d(4, 4, 3, padding=0)),
    "padding of a dilated submanifold layer": ("SL208", lambda: sparse3d.SubMConv3d(4, 4, 3, padding=1, dilation=2)),
    "stride of a submanifold layer": ("SL208", lambda: sparse3d.SubMConv3d(4, 4, 3, stride=2)),
    "padding mode": ("SL209", lambda: sparse3d.SparseConv3d(4, 4, 3, padding_mode="reflect")),
    "padding of a name": ("SL208", lambda: sparse3d.SparseConv3d(4, 4, 3, padding="full")),
    "same padding of a strided layer": ("SL208", lambda: sparse3d.SparseConv3d(4, 4, 3, stride=2, padding="same")),
    "same padding of an even kernel": ("SL208", lambda: sparse3d.SparseConv3d(4, 4, 2, padding="same")),
    "old names": ("SL209", lambda: sparse3d.SubMConv3d(4, 4, 3, ci=4)),
    "channels of a float": ("SL209", lambda: sparse3d.SubMConv3d(4.0, 4, 3)),
    "groups of a float": ("SL209", lambda: sparse3d.SubMConv3d(4, 4, 3, groups=2.0)),
    "no groups": ("SL208", lambda: sparse3d.SubMConv3d(4, 4, 3, groups=0)),
    "dtype of integers": ("SL204", lambda: sparse3d.SubMConv3d(4, 4, 3, dtype=torch.int32)),
    "dtype of float8": ("SL204", lambda: sparse3d.SparseConv3d(4, 4, 3, dtype=torch.float8_e4m3fn)),
    "negative capacity": ("SL208", lambda: sparse3d.SparseConv3d(4, 4, 3, capacity=-1)),
    "capacity of a float": ("SL209", lambda: sparse3d.SparseMaxPool3d(2, capacity=1.5)),
    "ceil mode": ("SL209", lambda: sparse3d.SparseMaxPool3d(2, ceil_mode=True)),
    "unpooling with another kernel": (
        "SL208",
        lambda: sparse3d.SparseUnpool3d(3)(sparse3d.SparseMaxPool3d(2)(scene())),
    ),
    "no kernel": ("SL209", lambda: sparse3d.SubMConv3d(4, 4)),
    "kernel and offsets": ("SL209", lambda: sparse3d.SubMConv3d(4, 4, 3, offsets=[[0, 0, 0]])),
    "offsets of two axes": ("SL208", lambda: sparse3d.SubMConv3d(4, 4, offsets=[[0, 0]])),
    "equal offsets": ("SL208", lambda: sparse3d.SubMConv3d(4, 4, offsets=[[0, 0, 0], [0, 0, 0]])),
    "far offsets": ("SL208", lambda: sparse3d.SubMConv3d(4, 4, offsets=[[99, 0, 0], [0, 99, 0]])),
    "region": ("SL208", lambda: sparse3d.SubMConv3d(4, 4, 3, region="ball")),
    "cross of an even kernel": ("SL208", lambda: sparse3d.SubMConv3d(4, 4, 2, region="cross")),
    "floor with padding": ("SL208", lambda: sparse3d.SparseConv3d(4, 4, 3, stride=2, padding=1, out_coords="floor")),
    "other out_coords": ("SL208", lambda: sparse3d.SparseConv3d(4, 4, 3, out_coords="all")),
    "no batch column": ("SL208", lambda: sparse3d.SparseTensor(scene().feats, scene().coords[:, 1:], GRID)),
    "scene beyond the batch": ("SL208", lambda: scene()[2]),
    "index of a name": ("SL209", lambda: scene()["a"]),
    "list of scenes": ("SL209", lambda: scene()[[0, 1]]),
    "negative capacity of rows": ("SL208", lambda: scene().pad(-1)),
    "capacity of rows of a float": ("SL209", lambda: scene().pad(64.0)),
    "channels of a norm": ("SL202", lambda: sparse3d.BatchNorm(5)(scene())),
    "channels of an instance norm": ("SL202", lambda: sparse3d.InstanceNorm(5)(scene())),
    "gate of a row too few": ("SL202", lambda: scene() * torch.ones(len(GATE) - 1, 1)),
    "gate without its dim": ("SL202", lambda: torch.ones(len(GATE)) * scene()),
    "gate of three dims": ("SL202", lambda: scene() * torch.ones(2, 1, 1)),
    "shuffle of too few channels": ("SL202", lambda: sparse3d.SparsePixelShuffle3d(2)(scene())),
    "softmax of rows": ("SL209", lambda: scene().softmax(0)),
    "join of rows": ("SL209", lambda: torch.cat([scene(), scene()])),
    "no samples": ("SL208", lambda: sparse3d.collate([])),
    "samples of other channels": ("SL202", lambda: sparse3d.collate([torch.ones(2, 3), torch.ones(2, 4)])),
    "union of grids": (
        "SL202",
        lambda: sparse3d.union([scene(), sparse3d.SparseTensor(GATE, scene().coords, (9, 9, 9), 2)]),
    ),
    "quantised size": ("SL208", lambda: sparse3d.sparse_quantize(torch.rand(5, 3), size=0.0)),
    "quantised NaN": ("SL211", lambda: sparse3d.sparse_quantize(torch.full((5, 3), torch.nan))),
    "quantised labels": ("SL204", lambda: sparse3d.sparse_quantize(torch.rand(5, 3), labels=torch.rand(5))),
    "unpooling with another stride": (
        "SL208",
        lambda: sparse3d.SparseUnpool3d(2, 3)(sparse3d.SparseMaxPool3d(2)(scene())),
    ),
    "unknown argument": ("SL209", lambda: sparse3d.SparseConv3d(4, 4, 3, indice_key="a")),
    "kernel of none": ("SL208", lambda: sparse3d.SubMConv3d(4, 4, 0)),
    "stride of none": ("SL208", lambda: sparse3d.SparseConv3d(4, 4, 3, stride=0)),
    "negative padding": ("SL208", lambda: sparse3d.SparseConv3d(4, 4, 3, padding=-1)),
    "dilation of none": ("SL208", lambda: sparse3d.SparseMaxPool3d(3, dilation=0)),
    "negative channels": ("SL208", lambda: sparse3d.SubMConv3d(-4, 4, 3)),
    "features of NumPy": ("SL209", lambda: sparse3d.SparseTensor(scene().feats.numpy(), scene().coords, GRID, 2)),
    "coordinates of NumPy": ("SL209", lambda: sparse3d.SparseTensor(scene().feats, scene().coords.numpy(), GRID, 2)),
    "coordinates in a list": ("SL209", lambda: sparse3d.SparseTensor(scene().feats, scene().coords.tolist())),
    "no features": ("SL209", lambda: scene().replace(None)),
    "a sparse tensor as features": ("SL209", lambda: scene().replace(scene().relu())),
    "voxels of NumPy": ("SL209", lambda: sparse3d.SparseConv3d(4, 4, 3)(scene(), scene().coords.numpy())),
    "volume of NumPy": ("SL209", lambda: sparse3d.SparseTensor.from_dense(scene().dense().numpy())),
    "points of NumPy": ("SL209", lambda: sparse3d.voxelize(np.ones((5, 3)), torch.ones(5, 1), 1.0)),
    "quantised points of NumPy": ("SL209", lambda: sparse3d.sparse_quantize(np.ones((5, 3)))),
    "quantised labels of NumPy": ("SL209", lambda: sparse3d.sparse_quantize(torch.ones(5, 3), labels=np.ones(5, int))),
    "point tensor of NumPy": ("SL209", lambda: sparse3d.PointTensor(torch.ones(5, 1), np.ones((5, 3)))),
    "samples at points of NumPy": (
        "SL209",
        lambda: sparse3d.grid_sample_3d(scene().feats, scene().coords, (2, 4, *GRID), np.ones((2, 1, 3))),
    ),
    "pooling of features": ("SL209", lambda: sparse3d.GlobalPool()(scene().feats)),
    "cat of features": ("SL209", lambda: sparse3d.cat([scene(), scene().feats])),
    "cat of nothing": ("SL208", lambda: sparse3d.cat([])),
    "union of features": ("SL209", lambda: sparse3d.union([scene(), scene().feats])),
    "crop of features": ("SL209", lambda: sparse3d.crop(scene().feats, 0, 3)),
    "neighbours of features": ("SL209", lambda: sparse3d.neighbor_indexes(scene().feats)),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_size_is_an_error_of_the_catalogue(case: str) -> None:
    id, build = WRONG[case]
    with pytest.raises(ShiplapError, match=id):
        build()


def test_constructors_have_the_names_and_the_order_of_torch() -> None:
    layer = sparse3d.SparseConv3d(in_channels=4, out_channels=6, kernel_size=3, stride=2, padding=1)
    assert (layer.in_channels, layer.out_channels, layer.kernel_size) == (4, 6, (3, 3, 3))
    assert sparse3d.SparseMaxPool3d(kernel_size=2).kernel_size == (2, 2, 2)
    given = 4, 6, 3, 2, 1, 1, 2, False
    ours, theirs = sparse3d.SparseConv3d(*given), nn.Conv3d(*given)
    for name in ("stride", "padding", "dilation", "groups", "bias"):
        assert getattr(ours, name) == getattr(theirs, name)
    given = 4, 6, 3, 2, 1, 1, 2, True, 2
    up, dense = sparse3d.SparseConvTranspose3d(*given), nn.ConvTranspose3d(*given)
    for name in ("stride", "padding", "output_padding", "groups", "dilation"):
        assert getattr(up, name) == getattr(dense, name)
    assert sparse3d.SubMConv3d(4, 4, 3, device="meta", dtype=torch.float16).weight.dtype == torch.float16
    assert sparse3d.SparseConv3d(4, 4, 3, padding_mode="zeros").bias is not None


def test_a_submanifold_layer_takes_the_padding_that_it_has() -> None:
    x = scene()
    for window in ({}, {"padding": 1}, {"padding": "same"}, {"stride": 1, "padding": (1, 1, 1)}):
        torch.manual_seed(1)
        layer = sparse3d.SubMConv3d(4, 4, 3, **window)
        torch.manual_seed(1)
        assert torch.equal(layer(x).feats, sparse3d.SubMConv3d(4, 4, 3)(x).feats)
    assert sparse3d.SubMConv3d(4, 4, (5, 3, 1), padding=(4, 2, 0), dilation=2).dilation == (2, 2, 2)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_named_paddings_are_those_of_dense_convolution(padding: str) -> None:
    x, layer = scene(), sparse3d.SparseConv3d(4, 5, 3, padding=padding)
    dense = nn.functional.conv3d(x.dense(), layer.weight.movedim(-1, 1), layer.bias, padding=padding)
    y = layer(x)
    b, i, j, k = y.coords.long().unbind(1)
    torch.testing.assert_close(y.feats, dense[b, :, i, j, k])
    assert y.spatial_shape == dense.shape[2:]


def test_sums_are_pooled_and_spread_again() -> None:
    x = scene()
    x = x.double().requires_grad_()
    pooled = sparse3d.SparseSumPool3d(2)(x)
    mean = sparse3d.SparseAvgPool3d(2)(x)
    count = sparse3d.SparseSumPool3d(2)(torch.ones_like(x)).feats
    torch.testing.assert_close(pooled.feats, mean.feats * count)
    spread = sparse3d.SparseUnpool3d(2)(pooled)
    assert spread.coords is x.coords
    cells = x.coords.clone()
    cells[:, 1:] //= 2
    hit = (cells[:, None] == pooled.coords).all(2)  # no window reaches the last cells of an odd axis
    torch.testing.assert_close(spread.feats, hit.double() @ pooled.feats)
    overlapping = sparse3d.SparseMaxPool3d(3, stride=1, padding=1)(x)
    feats = overlapping.feats.detach().requires_grad_()
    unpool = sparse3d.SparseUnpool3d(3, mode="mean")
    assert torch.autograd.gradcheck(lambda f: unpool(overlapping.replace(f)).feats, feats)


IN_NO_GRAPH = {"~", "masks", "number of NumPy"}  # Dynamo has no ``~`` of objects, and takes NumPy's numbers for arrays


def test_every_operation_is_part_of_a_graph() -> None:
    coords, weight = scene().coords, torch.randn(4, 4)
    more: dict[str, Callable[[Any], Any]] = {
        "x - gate": lambda x: x - GATE,
        "gate / x": lambda x: GATE / x,
        "x % gate": lambda x: x % GATE,
        "gate ** x": lambda x: GATE**x,
        "x // gate": lambda x: x // GATE,
        "gate // x": lambda x: GATE // x,
        "x < gate": lambda x: x < GATE,
        "x @ weight": lambda x: x @ weight,
        "methods": lambda x: torch.where((x > 0) & x.lt(1), x.sigmoid().clamp(min=0.1), x.logical_not()),
    }
    operations = [run for name, run in {**OPERATIONS, **more}.items() if name not in IN_NO_GRAPH]

    def run(feats: Tensor) -> list[Tensor]:
        x = sparse3d.SparseTensor(feats, coords, GRID, 2)
        return [operation(x).feats for operation in operations]

    feats = scene().feats
    for got, operation in zip(torch.compile(run, backend="eager", fullgraph=True)(feats), operations, strict=True):
        torch.testing.assert_close(got, operation(feats), equal_nan=True)


def test_it_is_moved_and_asked_as_a_tensor() -> None:
    x = scene()
    assert (x.is_leaf, x.grad_fn, x.grad, x.is_cuda, x.numel()) == (True, None, None, False, x.feats.numel())
    assert x.to(x.half()).dtype == torch.float16
    assert x.type_as(x.double()).is_floating_point()
    y = x.clone().requires_grad_()
    (y * 2).feats.sum().backward()
    assert torch.equal(y.grad, torch.full_like(y.feats, 2))
    assert x.replace(x.feats.t().contiguous().t()).contiguous().feats.is_contiguous()


def test_without_a_grid_the_coordinates_give_it() -> None:
    x = scene()
    made = sparse3d.SparseTensor(x.feats, x.coords)
    assert made.spatial_shape == tuple((x.coords[:, 1:].amax(0) + 1).tolist())
    assert made.batch_size == int(x.coords[:, 0].max()) + 1
    assert sparse3d.SparseTensor(x.feats[:0], x.coords[:0]).spatial_shape == (1, 1, 1)
    layer = sparse3d.SubMConv3d(4, 4, 3)
    assert torch.equal(layer(made).feats, layer(x).feats)
    moved = x.coords - torch.tensor([0, 9, 9, 9], dtype=torch.int32)
    torch.testing.assert_close(layer(sparse3d.SparseTensor(x.feats, moved)).feats, layer(x).feats)


def test_dense_of_a_grid_beyond_free_memory_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    x = sparse3d.SparseTensor(scene().feats, scene().coords, (64, 512, 512), 2)
    monkeypatch.setattr("shiplap_sparse3d.tensor.available_bytes", lambda device: 1 << 28)
    with pytest.raises(ShiplapError, match=r"SL208(.|\n)*268435456 bytes are free"):
        x.dense()
    free = available_bytes(torch.device("cpu"))
    assert free is None or free > 0


def test_strides_multiply_to_that_of_the_tensor() -> None:
    x = scene()
    down = sparse3d.SparseConv3d(4, 4, 2, (2, 1, 2))(x)
    assert (x.tensor_stride, down.tensor_stride) == ((1, 1, 1), (2, 1, 2))
    assert sparse3d.SparseInverseConv3d(4, 4, 2)(down).tensor_stride == (1, 1, 1)
    assert sparse3d.SparseMaxPool3d(2, 1)(down).tensor_stride == (2, 1, 2)
    assert sparse3d.SparseConvTranspose3d(4, 4, 2, 2)(x).tensor_stride == (0.5, 0.5, 0.5)
