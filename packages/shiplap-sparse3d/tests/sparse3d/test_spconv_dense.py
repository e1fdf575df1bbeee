"""The spconv facade against dense PyTorch at the active voxels: values, output voxels and every gradient.

Grid, number of voxels and windows are those of spconv's own convolution tests; in float64, so tolerances are tight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shiplap_sparse3d.spconv as spconv
from shiplap_testing.effort import sampled
from tests.sparse3d.scenes import at, scene

GRID, VOXELS, CI, CO = (19, 18, 17), 1500, 4, 3
WINDOWS = [
    window
    for window in itertools.product((2, 3), (1, 2, 3), (0, 1, 2), (1, 2, 3))  # kernel, stride, padding, dilation
    if window[1] == 1 or window[3] == 1
]


def voxels(batch_size: int, channels: int = CI, grid: tuple[int, int, int] = GRID) -> spconv.SparseConvTensor:
    x = scene(VOXELS * batch_size, grid, channels, batch_size=batch_size)
    return spconv.SparseConvTensor(x.feats.requires_grad_(), x.coords, grid, batch_size)


def dense_weight(layer: nn.Module) -> Tensor:
    return layer.weight.permute(0, 4, 1, 2, 3)


def agree(x: spconv.SparseConvTensor, y: spconv.SparseConvTensor, dense: Tensor, layer: nn.Module) -> None:
    """``y`` is ``dense`` at its voxels, and a random loss on it has the same gradients either way."""
    expected = at(dense, y.indices)
    torch.testing.assert_close(y.features, expected, rtol=1e-9, atol=1e-9)
    cotangent = torch.randn_like(expected)
    inputs = [x.features, *layer.parameters()]
    ours = torch.autograd.grad(y.features, inputs, cotangent)
    for actual, wanted in zip(ours, torch.autograd.grad(expected, inputs, cotangent), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-8, atol=1e-8)


def occupied(x: spconv.SparseConvTensor) -> Tensor:
    """``[b, 1, x, y, z]``, 1 at the voxels."""
    return x.replace_feature(torch.ones_like(x.features[:, :1])).dense()


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("k", sampled([1, 3, 5], 2))
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_submanifold(k, dilation, batch_size):
    x, layer = voxels(batch_size), spconv.SubMConv3d(CI, CO, k, dilation=dilation).double()
    weight = dense_weight(layer) if k > 1 else layer.weight.view(CI, CO).t()[:, :, None, None, None]  # as spconv has it
    y = layer(x)
    assert y.indices is x.indices
    agree(x, y, F.conv3d(x.dense(), weight, layer.bias, padding=k // 2 * dilation, dilation=dilation), layer)


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(("k", "stride", "padding", "dilation"), WINDOWS)
def test_strided(k, stride, padding, dilation, batch_size):
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    x, layer = voxels(batch_size), spconv.SparseConv3d(CI, CO, k, **window).double()
    y = layer(x)
    reached = F.conv3d(occupied(x), torch.ones(1, 1, k, k, k).double(), **window) > 0.5
    assert y.spatial_shape == list(reached.shape[2:])
    assert torch.equal(reached.nonzero()[:, [0, 2, 3, 4]].int(), y.indices)  # each voxel that is reached, ascending
    agree(x, y, F.conv3d(x.dense(), dense_weight(layer), layer.bias, **window), layer)


@pytest.mark.parametrize(("k", "stride", "padding", "dilation"), WINDOWS)
def test_transposed(k, stride, padding, dilation):
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    x = scene(200, (7, 6, 5), CI)
    x = spconv.SparseConvTensor(x.feats.requires_grad_(), x.coords, (7, 6, 5), 2)
    layer = spconv.SparseConvTranspose3d(CI, CO, k, **window).double()
    y = layer(x)
    size = [(w - 1) * stride - 2 * padding + k for w in (7, 6, 5)]  # of a kernel that is not dilated
    assert y.spatial_shape == size

    def cut(dense: Tensor) -> Tensor:
        return dense[:, :, : size[0], : size[1], : size[2]]

    reached = cut(F.conv_transpose3d(occupied(x), torch.ones(1, 1, k, k, k).double(), **window)) > 0.5
    assert torch.equal(reached.nonzero()[:, [0, 2, 3, 4]].int(), y.indices)
    weight = layer.weight.permute(4, 0, 1, 2, 3)
    agree(x, y, cut(F.conv_transpose3d(x.dense(), weight, layer.bias, **window)), layer)


@pytest.mark.parametrize("make", [spconv.SparseConv3d, spconv.SparseMaxPool3d, spconv.SparseConvTranspose3d])
@pytest.mark.parametrize(("k", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 1), (3, 3, 0)])
def test_inverse_of(make, k, stride, padding):
    """The way back is the transpose of the way there, over the same pairs."""
    window = {"stride": stride, "padding": padding, "indice_key": "key"}
    there = make(k, **window) if make is spconv.SparseMaxPool3d else make(CI, CI, k, **window).double()
    back = spconv.SparseInverseConv3d(CI, CO, k, "key").double()
    x = scene(200, (7, 6, 5), CI)
    x = spconv.SparseConvTensor(x.feats.requires_grad_(), x.coords, (7, 6, 5), 2)
    middle = there(x)
    middle = middle.replace_feature(middle.features.detach().requires_grad_())
    y = back(middle)
    assert y.indices is x.indices
    assert y.spatial_shape == x.spatial_shape
    if make is spconv.SparseConvTranspose3d:
        dense = F.conv3d(middle.dense(), dense_weight(back), back.bias, stride=stride, padding=padding)
    else:
        weight, free = back.weight.permute(4, 0, 1, 2, 3), {"stride": stride, "padding": 0}
        dense = F.conv_transpose3d(middle.dense(), weight, back.bias, **free)
        room = [max(0, w + padding - have) for w, have in zip((7, 6, 5), dense.shape[2:], strict=True)]
        dense = F.pad(dense - back.bias.view(-1, 1, 1, 1), [v for r in reversed(room) for v in (0, r)])
        x0, y0, z0 = (slice(padding, padding + w) for w in (7, 6, 5))
        dense = dense[:, :, x0, y0, z0] + back.bias.view(-1, 1, 1, 1)
    agree(middle, y, dense, back)


@pytest.mark.parametrize(("k", "stride", "padding", "dilation"), WINDOWS)
def test_max_pooling_of_signed_features_starts_from_zero(k, stride, padding, dilation):
    """As spconv's kernels do, and as a dense maximum of what is zero where no voxel is."""
    x = voxels(1)
    x = x.replace_feature((x.features - 1).detach().requires_grad_())
    y = spconv.SparseMaxPool3d(k, stride, padding, dilation)(x)
    lowest = torch.where(occupied(x) > 0, x.dense(), -1e9)
    lowest = F.pad(lowest, (padding,) * 6, value=-1e9)
    assert bool((y.features == 0).any())
    agree(x, y, F.max_pool3d(lowest, k, stride, 0, dilation).clamp_min(0), nn.Identity())


@pytest.mark.parametrize(("k", "stride", "padding"), [w[:3] for w in WINDOWS if w[3] == 1 and w[2] <= w[0] // 2])
def test_average_pooling_divides_by_the_voxels_there_are(k, stride, padding):
    x = voxels(2)
    y = spconv.SparseAvgPool3d(k, stride, padding)(x)
    total, count = (F.avg_pool3d(d, k, stride, padding, divisor_override=1) for d in (x.dense(), occupied(x)))
    agree(x, y, total / count.clamp_min(1), nn.Identity())


@pytest.mark.parametrize(
    ("pool", "reduce"),
    [(spconv.SparseGlobalAvgPool, lambda f: f.mean(0)), (spconv.SparseGlobalMaxPool, lambda f: f.amax(0))],
)
def test_global_pooling(pool: Callable[[], nn.Module], reduce: Callable[[Tensor], Tensor]):
    x = voxels(2)
    expected = torch.stack([reduce(x.features[x.indices[:, 0] == b]) for b in (0, 1)])
    pooled = pool()(x)
    torch.testing.assert_close(pooled, expected)  # every channel, unlike spconv's average
    cotangent = torch.randn_like(expected)
    ours, wanted = (torch.autograd.grad(out, x.features, cotangent)[0] for out in (pooled, expected))
    torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("ndim", [1, 2])
def test_one_and_two_axes(ndim):
    """The same layers, with all gradients."""
    grid = (60,) if ndim == 1 else (14, 13)
    cells = torch.randperm(2 * int(torch.tensor(grid).prod()))[:60]
    indices = torch.stack(torch.unravel_index(cells, (2, *grid)), 1).int()
    x = spconv.SparseConvTensor(torch.randn(60, CI, dtype=torch.float64, requires_grad=True), indices, grid, 2)
    conv, transposed = (getattr(F, f"conv{t}{ndim}d") for t in ("", "_transpose"))
    for name, dense_of, order in (("SparseConv", conv, (0, -1)), ("SparseConvTranspose", transposed, (-1, 0))):
        layer = getattr(spconv, f"{name}{ndim}d")(CI, CO, 3, 2, 1).double()
        y = layer(x)
        weight = layer.weight.movedim((order[0], order[1]), (0, 1))
        dense = dense_of(x.dense(), weight, layer.bias, stride=2, padding=1)
        assert y.spatial_shape == list(dense.shape[2:])
        expected = dense.movedim(1, -1)[tuple(y.indices.long().unbind(1))]
        torch.testing.assert_close(y.features, expected, rtol=1e-9, atol=1e-9)
        cotangent, inputs = torch.randn_like(expected), [x.features, *layer.parameters()]
        for ours, wanted in zip(
            *(torch.autograd.grad(o, inputs, cotangent) for o in (y.features, expected)), strict=True
        ):
            torch.testing.assert_close(ours, wanted)


def test_groups():
    x, layer = voxels(1, 6), spconv.SubMConv3d(6, 4, 3, groups=2).double()
    assert layer.weight.shape == (4, 3, 3, 3, 3)
    agree(x, layer(x), F.conv3d(x.dense(), dense_weight(layer), layer.bias, padding=1, groups=2), layer)
