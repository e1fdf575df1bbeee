"""Layers onto given voxels, kernels of other shapes, and resampling: each against dense torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shiplap_sparse3d as sparse3d
from tests.sparse3d.scenes import at, scene

pytestmark = pytest.mark.usefixtures("each_device")
GRID = (7, 6, 5)
DOUBLE = {"dtype": torch.float64}


def other_voxels(shape: tuple[int, int, int], n: int = 30) -> Tensor:
    return scene(n, shape, 1).coords


@pytest.mark.parametrize("window", [(3, 1, 1, 1), (3, 2, 1, 1), (2, 2, 0, 1), ((3, 1, 2), (1, 2, 2), (1, 0, 1), 2)])
@pytest.mark.parametrize("kind", ["tensor", "coordinates"])
def test_convolution_onto_given_voxels(window, kind):
    x = scene(80, GRID, 3)
    layer = sparse3d.SparseConv3d(3, 4, *window, **DOUBLE)
    dense = nn.functional.conv3d(x.dense(), layer.weight.movedim(-1, 1), layer.bias, *window[1:])
    coords = other_voxels(tuple(dense.shape[2:]), 20)
    target = sparse3d.SparseTensor(torch.zeros(20, 1), coords, dense.shape[2:], 2) if kind == "tensor" else coords
    y = layer(x, target)
    torch.testing.assert_close(y.feats, at(dense, coords))
    assert torch.equal(y.coords, coords)
    feats = x.feats.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda f: layer(x.replace(f), target).feats, feats, fast_mode=True)


def test_voxels_beyond_the_window_read_what_there_is():
    x = scene(80, GRID, 3)
    layer = sparse3d.SparseConv3d(3, 4, 3, **DOUBLE)
    wide = nn.functional.conv3d(nn.functional.pad(x.dense(), (0, 2) * 3), layer.weight.movedim(-1, 1), layer.bias)
    torch.testing.assert_close(layer(x, x.coords).feats, at(wide, x.coords))


def test_transposed_convolution_onto_the_voxels_of_an_encoder():
    x = scene(60, GRID, 3)
    down = sparse3d.SparseConv3d(3, 4, 3, 2, 1, **DOUBLE)(x)
    up = sparse3d.SparseConvTranspose3d(4, 3, 3, 2, 1, 1, **DOUBLE)
    dense = nn.functional.conv_transpose3d(down.dense(), up.weight.permute(4, 0, 1, 2, 3), up.bias, 2, 1, 1)
    inside = x.coords[(x.coords[:, 1:] < torch.tensor(dense.shape[2:])).all(1)]
    torch.testing.assert_close(up(down, inside).feats, at(dense, inside))
    assert torch.equal(up(down, x).coords, x.coords)


@pytest.mark.parametrize("grid", [(8, 8, 4), GRID])
def test_coordinates_of_an_encoder_have_its_grid(grid):
    """A kernel of 2 with a stride of 2 leaves out the last of an odd number of cells, which the decoder needs again."""
    x = scene(60, grid, 3)
    assert (x.coords[:, 1] == grid[0] - 1).any()
    half = sparse3d.SparseConv3d(3, 4, 2, 2, **DOUBLE)(x)
    quarter = sparse3d.SparseConv3d(4, 5, 2, 2, **DOUBLE)(half)
    up, last = (sparse3d.SparseConvTranspose3d(c, c - 1, 2, 2, **DOUBLE) for c in (5, 4))
    y = last(up(quarter, half.coords), x.coords)
    assert (y.spatial_shape, sparse3d.cat([y, x]).shape[1], (y + x).shape[1]) == (grid, 6, 3)
    extra = tuple(size % 2 for size in grid)
    dense = up(quarter, half).dense()
    dense = nn.functional.conv_transpose3d(dense, last.weight.permute(4, 0, 1, 2, 3), last.bias, 2, 0, extra)
    torch.testing.assert_close(y.feats, at(dense, x.coords))
    wide = sparse3d.SparseUpsample3d(2)(half, x.coords)
    assert wide.spatial_shape == grid


@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 2, 1), (2, 2, 1), (3, (2, 1, 3), 2), (5, 3, 1)])
def test_outputs_at_floors_are_those_cells_of_a_centred_convolution(kernel, stride, dilation):
    x = scene(50, GRID, 3)
    layer = sparse3d.SparseConv3d(3, 4, kernel, stride, dilation=dilation, out_coords="floor", **DOUBLE)
    y = layer(x)
    cells = torch.cat([x.coords[:, :1], x.coords[:, 1:] // torch.tensor(layer.stride)], 1)
    assert torch.equal(y.coords, torch.unique(cells, dim=0).int())
    around = (kernel - 1) // 2 * dilation if kernel % 2 else 0
    room = nn.functional.pad(x.dense(), (around, around + 9) * 3)
    dense = nn.functional.conv3d(room, layer.weight.movedim(-1, 1), layer.bias, layer.stride, 0, layer.dilation)
    torch.testing.assert_close(y.feats, at(dense, y.coords))


REGIONS = {
    "cross": (
        {"kernel_size": (3, 5, 1), "region": "cross"},
        [(i, 0, 0) for i in (-1, 0, 1)] + [(0, j, 0) for j in (-2, -1, 1, 2)],
    ),
    "one-sided": ({"offsets": [[0, 0, 0], [1, 0, 0], [2, -1, 0]]}, [(0, 0, 0), (1, 0, 0), (2, -1, 0)]),
    "pair": ({"offsets": [[-1, 0, 1], [1, 0, -1]]}, [(-1, 0, 1), (1, 0, -1)]),
}


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("dilation", [1, 2])
def test_kernels_of_other_shapes_are_sums_over_their_cells(name, dilation):
    options, cells = REGIONS[name]
    x = scene(70, GRID, 3)
    layer = sparse3d.SubMConv3d(3, 4, dilation=dilation, **options, **DOUBLE)
    assert layer.weight.shape == (4, len(cells), 3)
    # The order of the taps is that of the cells, and of a cross ascending.
    order = sorted(cells) if name == "cross" else cells
    room = 4 * dilation
    wide = nn.functional.pad(x.dense(), (room,) * 6)
    expected = layer.bias.expand(70, 4)
    for tap, cell in enumerate(order):
        moved = x.coords.clone()
        moved[:, 1:] += room + dilation * torch.tensor(cell, dtype=torch.int32)
        expected = expected + at(wide, moved) @ layer.weight[:, tap].t()
    torch.testing.assert_close(layer(x).feats, expected)
    feats = x.feats.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda f, w: torch.func.functional_call(layer, {"weight": w}, x.replace(f)).feats,
        (feats, layer.weight),
        fast_mode=True,
    )


def test_nearest_upsampling_is_that_of_dense_tensors():
    x = scene(40, GRID, 3)
    y = sparse3d.SparseUpsample3d((2, 1, 3))(x)
    dense = nn.functional.interpolate(x.dense(), scale_factor=(2, 1, 3), mode="nearest")
    torch.testing.assert_close(y.dense(), dense)
    coords = other_voxels(y.spatial_shape)
    torch.testing.assert_close(sparse3d.SparseUpsample3d((2, 1, 3))(x, coords).feats, at(dense, coords))
    feats, up = x.feats.clone().requires_grad_(), sparse3d.SparseUpsample3d((2, 1, 3))
    assert torch.autograd.gradcheck(lambda f: up(x.replace(f), coords).feats, feats, fast_mode=True)
    spread = sparse3d.SparseUnpool3d(2)(x)
    torch.testing.assert_close(spread.dense(), nn.functional.interpolate(x.dense(), scale_factor=2, mode="nearest"))


def test_pixel_shuffles_are_those_of_torch_and_inverse_to_each_other():
    x = scene(40, (4, 6, 1), 3)
    flat = sparse3d.SparseTensor(x.feats, x.coords[:, :3].contiguous(), (4, 6), 2)
    shuffled = sparse3d.SparsePixelUnshuffle2d(2)(flat)
    torch.testing.assert_close(shuffled.dense(), nn.functional.pixel_unshuffle(flat.dense(), 2))
    torch.testing.assert_close(sparse3d.SparsePixelShuffle2d(2)(shuffled).dense(), flat.dense())
    x = scene(60, GRID, 2)
    coarse = sparse3d.SparsePixelUnshuffle3d(2)(x)
    assert coarse.spatial_shape == (4, 3, 3)
    back = sparse3d.SparsePixelShuffle3d(2)(coarse, x)
    assert torch.equal(back.feats, x.feats)
    feats = x.feats.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda f: sparse3d.SparsePixelUnshuffle3d(2)(x.replace(f)).feats, feats, fast_mode=True
    )
    wide = coarse.feats.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda f: sparse3d.SparsePixelShuffle3d(2)(coarse.replace(f), x).feats, wide, fast_mode=True
    )


def test_given_voxels_are_part_of_one_graph():
    x = scene(60, GRID, 3, dtype=torch.float32)
    net = nn.ModuleList(
        [
            sparse3d.SparseConv3d(3, 16, 3, 2, out_coords="floor"),
            sparse3d.SparsePixelShuffle3d(2),
            sparse3d.SubMConv3d(2, 4, 3, region="cross"),
        ]
    )

    def run(feats: Tensor, coords: Tensor) -> Tensor:
        here = sparse3d.SparseTensor(feats, coords, GRID, 2)
        return net[2](net[1](net[0](here), here)).feats

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x.feats, x.coords), run(x.feats, x.coords))
