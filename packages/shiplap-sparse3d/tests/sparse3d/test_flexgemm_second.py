"""The facade of FlexGEMM 2.0: each name against a dense computation of torch, two to four axes, and its caches."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

import shiplap as sl
import shiplap_sparse3d.flexgemm as flex_gemm
from shiplap_sparse3d.flexgemm import config, nn
from shiplap_sparse3d.flexgemm.algorithms import ALGORITHMS
from shiplap_sparse3d.flexgemm.ops.neighbor_cache import NeighborCache, NeighborCacheT
from shiplap_testing.effort import sampled
from shiplap_testing.support import fails

pytestmark = pytest.mark.usefixtures("each_device")
GRIDS = {2: (9, 7), 3: (5, 6, 4), 4: (4, 3, 4, 3)}
CONV = {2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


def scene(axes, channels, density=0.4):
    """Return features in float64, coordinates in any order, and the shape with the channels last."""
    cells = (torch.rand(2, *GRIDS[axes]) < density).nonzero()
    coords = cells[torch.randperm(len(cells))].int().contiguous()
    return torch.randn(len(coords), channels).double(), coords, torch.Size((2, *GRIDS[axes], channels))


def volume(feats, coords, shape):
    """Return the dense volume with the channels first."""
    return feats.new_zeros(shape).index_put(tuple(coords.long().unbind(1)), feats).movedim(-1, 1)


def at(dense, coords):
    return dense.movedim(1, -1)[tuple(coords.long().unbind(1))]


def assert_equal_with_gradients(out, want, leaves):
    torch.testing.assert_close(out, want)
    grad = torch.randn_like(out)
    for got, expected in zip(*(torch.autograd.grad(o, leaves, grad) for o in (out, want)), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("axes", [2, 3])
def test_submanifold_convolution(axes, algorithm):
    feats, coords, shape = scene(axes, 3)
    weight, bias = torch.randn(4, *[3] * axes, 3).double(), torch.randn(4).double()
    leaves = [t.requires_grad_() for t in (feats, weight, bias)]
    call = {2: flex_gemm.submanifold_conv2d, 3: flex_gemm.submanifold_conv3d}[axes]
    out, cache = call(feats, coords, shape, weight, bias, dilation=2, algorithm=algorithm)
    dense = CONV[axes](volume(feats, coords, shape), weight.movedim(-1, 1), bias, padding=2, dilation=2)
    assert_equal_with_gradients(out, at(dense, coords), leaves)
    again, same = call(feats, coords, shape, weight, bias, dilation=2, neighbor_cache=cache)
    assert same is cache
    torch.testing.assert_close(again, out)
    assert cache.symmetric
    assert torch.equal(cache.bwd_map, cache.fwd_map.flip(1))


@pytest.mark.parametrize("window", [(3, 2, 1, 1), (2, 2, 0, 1), (3, 1, 1, 2), ((3, 2), (1, 2), (2, 0), 1)])
@pytest.mark.parametrize("axes", [2, 3])
def test_strided_and_transposed_convolution(axes, window):
    kernel, *rest = [(v[0], *v[1:], *v[1:])[:axes] if isinstance(v, tuple) else (v,) * axes for v in window]
    stride, padding, dilation = rest
    feats, coords, shape = scene(axes, 3)
    weight, bias = torch.randn(4, *kernel, 3).double(), torch.randn(4).double()
    leaves = [t.requires_grad_() for t in (feats, weight, bias)]
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    out, outs, grid, cache = flex_gemm.sparse_conv(feats, coords, shape, weight, bias, **options)
    dense = CONV[axes](volume(feats, coords, shape), weight.movedim(-1, 1), bias, **options)
    assert grid == torch.Size((2, *dense.shape[2:], 4))
    assert_equal_with_gradients(out, at(dense, outs), leaves)
    dense = CONV[axes](volume(feats, coords, shape), weight.movedim(-1, 1), None, **options)
    missing = flex_gemm.sparse_to_dense(torch.zeros_like(out) + 1, outs, grid).movedim(-1, 1)
    assert not (dense * (1 - missing)).any()  # no output is left out

    up = torch.randn(5, *kernel, 3).double().requires_grad_()
    out, outs, grid, cache = flex_gemm.sparse_conv_transpose(feats, coords, shape, up, None, **options)
    dense = TRANSPOSED[axes](volume(feats, coords, shape), up.movedim(-1, 0).movedim(1, 1), None, **options)
    assert grid == torch.Size((2, *dense.shape[2:], 5))
    assert isinstance(cache, NeighborCacheT)
    assert_equal_with_gradients(out, at(dense, outs), [feats, up])


def test_given_outputs_and_any_offsets():
    feats, coords, shape = scene(3, 3)
    outs = torch.unique(torch.randint(0, 4, (30, 4)) % torch.tensor([2, 4, 4, 4]), dim=0).int()
    delta = torch.tensor([[0, 0, 0], [1, 2, -1], [-1, 0, 1]], dtype=torch.int32)
    weight = torch.randn(4, 3, 3).double()
    leaves = [t.requires_grad_() for t in (feats, weight)]
    options = {"kernel_delta": delta, "stride": (1, 2, 1), "offset": (0, 1, 0)}
    out, given, _, cache = flex_gemm.sparse_conv(feats, coords, shape, weight, None, output_coords=outs, **options)
    assert given is outs
    dense = functional.pad(volume(feats, coords, shape), (9,) * 6).movedim(1, -1)
    want = 0
    for v, tap in enumerate(delta.tolist()):
        cells = outs[:, 1:].long() * torch.tensor([1, 2, 1]) + torch.tensor([0, 1, 0]) + torch.tensor(tap) + 9
        want = want + dense[(outs[:, 0].long(), *cells.unbind(1))] @ weight[:, v].T
    assert_equal_with_gradients(out, want, leaves)
    # The way back from there is the transpose, with the same cache.
    there = torch.randn(len(outs), 3).double()
    back, over, _, _ = flex_gemm.sparse_conv_transpose(
        there, outs, (2, 4, 4, 4, 3), weight, None, neighbor_cache=cache.T, **options
    )
    assert over is coords
    want = torch.zeros(len(coords), 4).double()
    for i, o, v in zip(cache.edge_in.tolist(), cache.edge_out.tolist(), cache.edge_kernel.tolist(), strict=True):
        want[i] += weight[:, v].detach() @ there[o]
    torch.testing.assert_close(back, want)
    sub, near = flex_gemm.submanifold_conv(feats, coords, shape, weight, kernel_delta=delta)
    assert near.num_kernels == 3
    assert sub.shape == (len(coords), 4)


def test_four_axes():
    feats, coords, shape = scene(4, 2)
    weight = torch.randn(3, 3, 3, 3, 3, 2).double()
    out, _ = flex_gemm.submanifold_conv4d(feats, coords, shape, weight)
    dense = functional.pad(volume(feats, coords, shape), (1,) * 8).movedim(1, -1)
    want = 0
    for v, tap in enumerate(itertools.product(range(3), repeat=4)):
        cells = coords[:, 1:].long() + torch.tensor(tap)
        want = want + dense[(coords[:, 0].long(), *cells.unbind(1))] @ weight.flatten(1, 4)[:, v].T
    torch.testing.assert_close(out, want)
    down, outs, grid, _ = flex_gemm.sparse_pool4d(feats, coords, shape, 2, reduce="sum")
    assert grid == torch.Size((2, 2, 1, 2, 1, 2))
    inside = (coords[:, 1:] < torch.tensor([4, 2, 4, 2])).all(1)
    torch.testing.assert_close(down.sum(0), feats[inside].sum(0))
    _, fine, shape_up, _ = flex_gemm.sparse_upsample4d(down, outs, grid, 2)
    assert len(fine) == 16 * len(outs)
    assert shape_up == torch.Size((2, 4, 2, 4, 2, 2))
    lifted = flex_gemm.sparse_conv_transpose4d(down, outs, grid, torch.ones(2, 2, 2, 2, 2, 2).double(), stride=2)
    assert lifted[2] == torch.Size((2, 4, 2, 4, 2, 2))
    assert flex_gemm.sparse_conv4d(feats, coords, shape, weight, stride=2, padding=1)[2][1:5] == torch.Size(
        (2, 2, 2, 2)
    )
    packed, low, _, down_cache = flex_gemm.sparse_pixel_unshuffle4d(feats[inside], coords[inside], shape, 2)
    assert packed.shape == (len(low), 32)
    back = flex_gemm.sparse_pixel_shuffle4d(packed, low, (2, 2, 1, 2, 1, 32), 2, neighbor_cache=down_cache.T)
    torch.testing.assert_close(back[0], feats[inside])


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_pooling(reduce):
    feats, coords, shape = scene(3, 3)
    feats.requires_grad_()
    for call in (
        lambda f: flex_gemm.submanifold_pool3d(f, coords, shape, 3, reduce),
        lambda f: flex_gemm.sparse_pool3d(f, coords, shape, 2, reduce=reduce)[::3],
        lambda f: flex_gemm.sparse_pool3d(f, coords, shape, 3, 2, 1, reduce)[::3],
    ):
        out, cache = call(feats)
        rows = [[] for _ in range(cache.num_output_coords)]
        for i, o in zip(cache.edge_in.tolist(), cache.edge_out.tolist(), strict=True):
            rows[o].append(feats[i])
        each = {"sum": lambda t: t.sum(0), "mean": lambda t: t.mean(0), "prod": lambda t: t.prod(0)}
        each |= {"max": lambda t: t.amax(0), "min": lambda t: t.amin(0)}
        want = torch.stack([each[reduce](torch.stack(r)) for r in rows])
        assert_equal_with_gradients(out, want, [feats])
    with pytest.raises(sl.ShiplapError, match="SL208"):
        flex_gemm.sparse_pool3d(feats, coords, shape, 2, reduce="median")
    with pytest.raises(sl.ShiplapError, match="SL208"):
        nn.SparsePool3d(2, reduce="median")


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("axes", [2, 3])
def test_upsampling_of_a_full_grid_is_that_of_torch(axes, align_corners):
    feats, coords, shape = scene(axes, 3, density=2)
    feats.requires_grad_()
    call = {2: flex_gemm.sparse_upsample2d, 3: flex_gemm.sparse_upsample3d}[axes]
    factor = (2, 3, 2)[:axes]
    out, outs, grid, cache = call(feats, coords, shape, factor, mode="bilinear", align_corners=align_corners)
    mode = {2: "bilinear", 3: "trilinear"}[axes]
    dense = functional.interpolate(
        volume(feats, coords, shape), scale_factor=factor, mode=mode, align_corners=align_corners
    )
    assert grid == torch.Size((2, *dense.shape[2:], 3))
    torch.testing.assert_close(out, at(dense, outs), rtol=1e-5, atol=1e-5)
    near = call(feats, coords, shape, factor, neighbor_cache=cache)[0]
    dense = functional.interpolate(volume(feats, coords, shape), scale_factor=factor, mode="nearest")
    assert_equal_with_gradients(near, at(dense, outs), [feats])


@pytest.mark.parametrize("axes", [2, 3])
def test_pixel_shuffles_are_inverse(axes):
    feats, coords, shape = scene(axes, 3)
    down = {2: flex_gemm.sparse_pixel_unshuffle2d, 3: flex_gemm.sparse_pixel_unshuffle3d}[axes]
    up = {2: flex_gemm.sparse_pixel_shuffle2d, 3: flex_gemm.sparse_pixel_shuffle3d}[axes]
    whole = (coords[:, 1:] < torch.tensor(GRIDS[axes]) // 2 * 2).all(1)
    f, c = feats[whole].requires_grad_(), coords[whole].contiguous()
    packed, low, grid, cache = down(f, c, shape, 2)
    assert cache.num_kernels == 2**axes
    blocks = volume(f, c, shape).movedim(1, -1)[(slice(None), *(slice(0, g // 2 * 2) for g in GRIDS[axes]))]
    for a in range(axes):
        blocks = blocks.unflatten(1 + 2 * a, (-1, 2))
    cells, parts = [1 + 2 * a for a in range(axes)], [2 + 2 * a for a in range(axes)]
    dense = blocks.permute(0, *cells, *parts, 2 * axes + 1).flatten(1 + axes)
    assert grid == dense.shape
    torch.testing.assert_close(packed, dense[tuple(low.long().unbind(1))])
    there, over, _, _ = up(packed, low, grid, 2, neighbor_cache=cache.T)
    assert over is c
    assert_equal_with_gradients(there, f * 1, [f])
    new, fine, fine_grid, _ = up(packed, low, grid, 2)
    assert fine_grid == torch.Size((2, *(g // 2 * 2 for g in GRIDS[axes]), 3))
    torch.testing.assert_close(flex_gemm.sparse_to_dense(new, fine, fine_grid).sum(), f.sum())
    with pytest.raises(sl.ShiplapError, match="SL202"):
        up(f[:, :1], c, shape, 2)


@pytest.mark.parametrize("padding_mode", ["zeros", "normalize"])
def test_sampling_is_differentiable_in_features_and_points(padding_mode):
    feats, coords, _ = scene(3, 3)
    feats.requires_grad_()
    points = torch.rand(20, 4, dtype=torch.float64) * torch.tensor([0, 4, 5, 3])
    points[:, 0] = torch.randint(0, 2, (20,))
    points = points.float().requires_grad_()
    out, mask = flex_gemm.sparse_grid_sample(
        feats, coords, points, padding_mode=padding_mode, n_spatial_dims=3, return_mask=True
    )
    full, there = (
        volume(feats, coords, (2, *GRIDS[3], 3)),
        volume(torch.ones_like(feats[:, :1]), coords, (2, *GRIDS[3], 1)),
    )
    scale = 2 / (torch.tensor(GRIDS[3]) - 1)
    grid = (points[:, 1:].double() * scale - 1).flip(1).view(1, 1, 1, 20, 3).expand(2, 1, 1, 20, 3)
    one, weight = (functional.grid_sample(v, grid, align_corners=True) for v in (full, there))
    pick = (points[:, 0].long(), slice(None), 0, 0, torch.arange(20))
    want, total = one[pick], weight[pick][:, 0]
    if padding_mode == "normalize":
        want = want / total[:, None].clamp_min(1e-12)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mask.double(), total, rtol=1e-4, atol=1e-4)
    got, expected = (torch.autograd.grad(o.square().sum(), (feats, points)) for o in (out, want))
    torch.testing.assert_close(got[0], expected[0], rtol=1e-3, atol=1e-3)
    assert got[1].isfinite().all()
    assert bool(got[1].any())
    far = torch.tensor([[0.0, float("nan"), 0, 0], [0, 1e30, 0, 0], [0, -5, 0, 0]])
    assert not flex_gemm.sparse_grid_sample(feats, coords, far, n_spatial_dims=3).any()
    assert not flex_gemm.sparse_grid_sample(feats, coords, far, mode="nearest").any()


def test_a_cache_of_another_call_is_an_assertion_error_of_the_catalogue():
    feats, coords, shape = scene(3, 4)
    conv, other = nn.SubmanifoldConv3d(4, 4, 3).double(), nn.SubmanifoldConv3d(4, 4, 1).double()
    _, cache = conv(feats, coords, shape)
    for call in (
        lambda: other(feats, coords, shape, cache),
        lambda: conv(feats, coords.clone(), shape, cache),
        lambda: nn.SparseConvTranspose3d(4, 4, 3).double()(feats, coords, shape, neighbor_cache=cache),
        lambda: flex_gemm.sparse_upsample(feats, coords, shape, (3, 3, 3), neighbor_cache=cache),
    ):
        with pytest.raises(AssertionError, match="SL830: the neighbour cache belongs to another call"):
            call()
        with pytest.raises(sl.ShiplapError, match="SL830"):
            call()
    assert cache.T.T is cache
    assert cache.T.is_transposed


def test_a_cache_lists_its_taps_by_masks_and_by_name():
    _, coords, shape = scene(3, 1)
    cache = flex_gemm.build_neighbor_cache(
        coords, submanifold=False, kernel_size=(2, 2, 2), stride=(2, 2, 2), input_sparse_shape=shape[:4]
    )
    assert cache.transpose() is cache.T
    assert cache["num_kernels"] == 8
    assert "fwd_map" in cache
    assert "another" not in cache
    assert torch.equal(cache.bwd_mask, cache.bwd_map >= 0)
    mask = cache.fwd_map >= 0
    assert torch.equal(cache.fwd_gray_code.long(), (mask.long() << torch.arange(8)).sum(1))
    order = cache.fwd_sorted_idx
    assert torch.equal(order.sort().values, torch.arange(len(mask)))
    taps, ends = cache.fwd_valid_kernel(2)
    blocks = [taps[begin:end].tolist() for begin, end in itertools.pairwise(ends.tolist())]
    rows = mask[order]
    assert blocks == [rows[n : n + 2].any(0).nonzero().flatten().tolist() for n in range(0, len(rows), 2)]


def test_every_form_of_a_cache_is_the_same_cache():
    _, coords, shape = scene(3, 1)
    cache = flex_gemm.build_neighbor_cache(
        coords, submanifold=False, kernel_size=(2, 2, 2), stride=(2, 2, 2), input_sparse_shape=shape[:4]
    )
    ends = {"input_coords": coords, "output_coords": cache.output_coords}
    edges = {"edge_in": cache.edge_in, "edge_out": cache.edge_out}
    forms = [
        NeighborCache(fwd_map=cache.fwd_map, **ends),
        NeighborCache(bwd_map=cache.bwd_map, **ends),
        NeighborCache(**edges, edge_kernel=cache.edge_kernel, num_kernels=8, **ends),
    ]
    for made in forms:
        assert torch.equal(made.fwd_map, cache.fwd_map)
        assert torch.equal(made.bwd_map, cache.bwd_map)
    loose = [
        NeighborCache(**edges, **ends),
        NeighborCache(fwd_seg_indices=cache.fwd_seg_indices, fwd_seg_offsets=cache.fwd_seg_offsets, **ends),
        NeighborCache(bwd_seg_indices=cache.bwd_seg_indices, bwd_seg_offsets=cache.bwd_seg_offsets, **ends),
    ]
    pairs = set(zip(cache.edge_in.tolist(), cache.edge_out.tolist(), strict=True))
    for made in loose:
        assert set(zip(made.edge_in.tolist(), made.edge_out.tolist(), strict=True)) == pairs
    with pytest.raises(sl.ShiplapError, match="SL208"):
        NeighborCache(**ends)


def test_edges_that_are_no_map_are_refused():
    """Without the number of taps, the map would have none; negative rows would count from the end."""
    coords = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.int32)
    ends = {"input_coords": coords, "output_coords": coords}

    def cache(rows, outputs, taps, **sizes):
        edges = {"edge_in": torch.tensor(rows), "edge_out": torch.tensor(outputs), "edge_kernel": torch.tensor(taps)}
        return NeighborCache(**edges, **ends, **sizes)

    assert cache([0, 1], [1, 1], [0, 2], num_kernels=4).fwd_map.tolist() == [[-1] * 4, [0, -1, 1, -1]]
    assert cache([], [], [], num_kernels=3).fwd_map.shape == (2, 3)
    with fails("SL208", got="edge_kernel without num_kernels"):
        cache([0, 1], [1, 1], [0, 2])
    with fails("SL208", got="lengths [2, 1, 2]"):
        cache([0, 1], [1], [0, 2], num_kernels=3)
    for edges, got in (
        (([0, -1], [1, 1], [0, 2]), "edge 1 has no input row from 0 to 1"),
        (([0, 1], [0, 2], [0, 2]), "edge 1 has no output row from 0 to 1"),
        (([0, 1], [-1, 1], [0, 2]), "edge 0 has no output row from 0 to 1"),
        (([0, 1], [1, 1], [0, 3]), "edge 1 has no tap from 0 to 2"),
        (([0, 1], [1, 1], [2, 2]), "edge 1 has the output row and the tap of an earlier edge"),
    ):
        with fails("SL211", got=got):
            cache(*edges, num_kernels=3)


@pytest.mark.long
def test_modules_of_a_network_are_one_graph_and_train(fresh_compiler):
    """Down and up again with one cache, as refiners do; another number of voxels compiles nothing anew."""

    class Refiner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.SubmanifoldConv3d(3, 8, 3)
            self.down = nn.SparseConv3d(8, 8, 2, stride=2)
            self.up = nn.SparseConvTranspose3d(8, 3, 2, stride=2)

        def forward(self, feats, coords, shape):
            x, _ = self.inner(feats, coords, shape)
            low, outs, grid, cache = self.down(x.relu(), coords, shape)
            return self.up(low, outs, grid, neighbor_cache=cache.T)[0]

    model = Refiner().double()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for density in (0.3, 0.6):
        feats, coords, shape = scene(3, 3, density)
        losses = [m(feats, coords, shape).square().sum() for m in (compiled, model)]
        grads = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)


def test_helpers_of_coordinates():
    coords = torch.tensor([[1, -2], [0, 3], [1, -2], [0, -1]])
    feats = torch.arange(4.0)[:, None]
    merged, cells = flex_gemm.coalesce_coords(feats, coords)
    assert cells.tolist() == [[0, -1], [0, 3], [1, -2]]
    assert merged[:, 0].tolist() == [3, 1, 2]
    assert flex_gemm.coalesce_coords(feats, coords, reduce="amax")[0][:, 0].tolist() == [3, 1, 2]
    assert flex_gemm.sort_coords(coords).tolist() == [3, 1, 0, 2]
    assert flex_gemm.sort_coords(coords, 1).tolist() == [1, 3, 0, 2]
    for call in (
        lambda: flex_gemm.coalesce_coords(feats, coords, reduce="median"),
        lambda: flex_gemm.sort_coords(coords, 3),
        lambda: flex_gemm.sparse_upsample(feats, coords, (2, 4, 1), (2,), mode="cubic"),
    ):
        with pytest.raises(sl.ShiplapError, match="SL208"):
            call()
    with pytest.raises(sl.ShiplapError, match="SL202"):
        flex_gemm.sparse_to_dense(feats, coords, (2, 4, 3))


def test_the_default_algorithm_is_a_setting_of_config(monkeypatch):
    feats, coords, shape = scene(3, 3)
    monkeypatch.setattr(config, "DEFAULT_SPCONV_ALGORITHM", "no such")
    with pytest.raises(sl.ShiplapError, match="SL208"):
        nn.SubmanifoldConv3d(3, 3, 3).double()(feats, coords, shape)


def test_every_name_of_the_second_form_is_there():
    kinds = ["SubmanifoldConv", "SparseConv", "SparseConvTranspose", "SubmanifoldPool", "SparsePool", "SparseUpsample"]
    kinds += ["SparsePixelShuffle", "SparsePixelUnshuffle"]
    assert {k + d for k in kinds for d in ("", "2d", "3d", "4d")} == set(nn.__all__)
    calls = ["submanifold_conv", "sparse_conv", "sparse_conv_transpose", "submanifold_pool", "sparse_pool"]
    calls += ["sparse_upsample", "sparse_pixel_shuffle", "sparse_pixel_unshuffle"]
    for name in [c + d for c in calls for d in ("", "2d", "3d", "4d")] + ["build_neighbor_cache", "sparse_grid_sample"]:
        assert getattr(flex_gemm, name) is getattr(flex_gemm.ops, name)
    assert nn.SparseConv3d(2, 4, 3, stride=2).extra_repr().startswith("in_channels=2, out_channels=4")
    with pytest.raises(sl.ShiplapError, match="SL208"):
        nn.SparseConv(2, 4, 3)


class Refiner(torch.nn.Module):
    """A U-Net that pools to ``ceil(cells / 2)``, and goes up again by the caches of the way down."""

    def __init__(self, widths=(4, 6, 8)):
        super().__init__()
        self.enter = torch.nn.Linear(3, widths[0])
        self.stages = torch.nn.ModuleList(nn.SubmanifoldConv3d(c, c, 3) for c in widths)
        self.down = torch.nn.ModuleList(map(torch.nn.Linear, widths[:-1], widths[1:]))
        self.up = torch.nn.ModuleList(map(torch.nn.Linear, widths[1:], widths[:-1]))
        self.pool, self.nearest = nn.SparsePool3d(2), nn.SparseUpsample3d(2)

    def forward(self, feats, coords, shape):
        x, grid, caches, ways, levels = self.enter(feats), torch.Size([*shape[:4], 4]), [], [], []
        for level, stage in enumerate(self.stages):
            moved, cache = stage(x, coords, grid)
            x, caches = x + functional.silu(moved), [*caches, cache]
            if level < len(self.down):
                levels.append((x, coords, grid))
                half = torch.Size([grid[0], *((cells + 1) // 2 for cells in grid[1:4]), x.shape[1]])
                x, coords, grid, way = self.pool(x, coords, grid, output_shape=half)
                x, ways = self.down[level](x), [*ways, way]
        for level in reversed(range(len(self.up))):
            skip, there, wide = levels[level]
            x, coords, grid, _ = self.nearest(self.up[level](x), coords, grid, there, wide, ways[level].T)
            moved, _ = self.stages[level](x + skip, coords, grid, neighbor_cache=caches[level])
            x = x + skip + functional.silu(moved)
        return x

    def dense(self, feats, coords, shape):
        """The same over volumes with the channels last, whose empty cells stay zero."""
        there = volume(torch.ones_like(feats[:, :1]), coords, (*shape[:4], 1)).movedim(1, -1) > 0
        x = self.enter(volume(feats, coords, shape).movedim(1, -1)) * there
        levels = []

        def convolve(stage, x, there):
            weight = stage.weight.movedim(-1, 1)
            moved = functional.conv3d(x.movedim(-1, 1), weight, stage.bias, padding=1).movedim(1, -1)
            return x + functional.silu(moved) * there

        for level, stage in enumerate(self.stages):
            x = convolve(stage, x, there)
            if level < len(self.down):
                levels.append((x, there))
                odd = [cells % 2 for cells in x.shape[1:4]]
                room = (0, 0, 0, odd[2], 0, odd[1], 0, odd[0])
                blocks = [functional.pad(v, room).movedim(-1, 1) for v in (x, there.double())]
                total, hits = (8 * functional.avg_pool3d(v, 2).movedim(1, -1) for v in blocks)
                there = hits > 0
                x = self.down[level](total / hits.clamp_min(1)) * there
        for level in reversed(range(len(self.up))):
            skip, there = levels[level]
            x = self.up[level](x)
            for axis in (1, 2, 3):
                x = x.repeat_interleave(2, axis).narrow(axis, 0, there.shape[axis])
            x = convolve(self.stages[level], x * there + skip, there)
        return x[tuple(coords.long().unbind(1))]


def scenes_of(*grids):
    """Return features, coordinates and shape of a scene in each grid."""
    for grid in grids:
        coords = (torch.rand(3, *grid) < 0.3).nonzero().int()
        yield torch.randn(len(coords), 3).double().requires_grad_(), coords, torch.Size([3, *grid, 3])


def test_a_refiner_with_caches_is_a_dense_network():
    model = Refiner().double()
    for feats, coords, shape in scenes_of((8, 6, 5), (7, 9, 4)):
        leaves = [feats, *model.parameters()]
        assert_equal_with_gradients(model(feats, coords, shape), model.dense(feats, coords, shape), leaves)


@pytest.mark.long
def test_a_refiner_is_compiled_twice_at_most_for_five_scenes(fresh_compiler):
    model, graphs = Refiner().double(), []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for scene in scenes_of((8, 6, 5), (7, 9, 4), (11, 5, 6), (4, 10, 9), (9, 7, 8)):
        leaves = [scene[0], *model.parameters()]
        assert_equal_with_gradients(compiled(*scene), model.dense(*scene), leaves)
    assert len(graphs) <= 2


@pytest.mark.long
def test_a_graph_takes_grids_whose_last_window_is_not_full(fresh_compiler):
    graphs = []

    def halve(feats, coords, shape):
        half = torch.Size([shape[0], *((cells + 1) // 2 for cells in shape[1:4]), 3])
        return flex_gemm.sparse_pool3d(feats, coords, shape, 2, reduce="sum", output_shape=half)[:3]

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(halve, fullgraph=True, dynamic=True, backend=backend)
    for feats, coords, shape in scenes_of((8, 6, 4), (7, 9, 5), (11, 5, 6)):
        (out, outs, grid), (want, wanted, _) = (f(feats, coords, shape) for f in (compiled, halve))
        assert grid == torch.Size([3, *((cells + 1) // 2 for cells in shape[1:4]), 3])
        assert torch.equal(outs, wanted)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(out.sum(0), feats.sum(0))  # no voxel of an incomplete window is left out
    assert len(graphs) == 1


@pytest.mark.parametrize("room", [(-1, 0, 2), (1, 1, -2), (0, -1, 0)])
def test_any_grid_of_the_outputs(room):
    """A grid larger or smaller than the usual one: its voxels are those that an input reaches inside of it."""
    feats, coords, shape = scene(3, 3)
    weight = torch.randn(4, 3, 3, 3, 3).double()
    for transposed in (False, True):
        options = {"stride": (2, 1, 2), "padding": (1, 0, 1), "transposed": transposed}
        usual = flex_gemm.sparse_conv(feats, coords, shape, weight, **options)[2]
        grid = torch.Size([2, *(cells + more for cells, more in zip(usual[1:4], room, strict=True)), 4])
        out, there, reached, cache = flex_gemm.sparse_conv(feats, coords, shape, weight, output_shape=grid, **options)
        assert reached == grid
        wide = (torch.ones(2, *grid[1:4]) > 0).nonzero().int()
        every = flex_gemm.sparse_conv(feats, coords, shape, weight, output_coords=wide, **options)
        hit = (every[3].fwd_map >= 0).any(1)
        assert torch.equal(there, wide[hit])
        torch.testing.assert_close(out, every[0][hit])
        assert cache.output_sparse_shape == grid[:4]


def test_a_cache_of_another_stride_or_offset_is_refused():
    feats, coords, shape = scene(3, 3)
    weight, delta = torch.randn(3, 3, 3, 3, 3).double(), torch.tensor([[0, 0, 0], [0, 0, 1]])
    flat = torch.randn(3, 2, 3).double()
    onto = {"output_coords": coords, "output_shape": shape}
    wrong = [
        flex_gemm.sparse_conv(feats, coords, shape, weight, stride=(1, 1, 2), padding=(1, 1, 1), **onto)[3],
        flex_gemm.sparse_conv(feats, coords, shape, weight, padding=(1, 1, 0), **onto)[3],
    ]
    for cache in wrong:
        for call in (
            lambda cache: flex_gemm.submanifold_conv(feats, coords, shape, weight, neighbor_cache=cache),
            lambda cache: flex_gemm.submanifold_pool3d(feats, coords, shape, 3, neighbor_cache=cache),
        ):
            with pytest.raises(AssertionError, match="SL830"):
                call(cache)
    moved = flex_gemm.sparse_conv(feats, coords, shape, flat, kernel_delta=delta, offset=(0, 1, 0), **onto)[3]
    with pytest.raises(AssertionError, match="SL830"):
        flex_gemm.submanifold_conv(feats, coords, shape, flat, kernel_delta=delta, neighbor_cache=moved)
    right = flex_gemm.sparse_conv(feats, coords, shape, weight, padding=(1, 1, 1), **onto)[3]
    out, same = flex_gemm.submanifold_conv(feats, coords, shape, weight, neighbor_cache=right)
    assert same is right
    torch.testing.assert_close(out, flex_gemm.submanifold_conv(feats, coords, shape, weight)[0])


CALLS = {
    "even kernel": lambda f, c: flex_gemm.submanifold_conv3d(f, c, (2, 5, 6, 4, 3), torch.ones(1, 2, 2, 2, 3).double())[
        0
    ],
    "another grid": lambda f, c: flex_gemm.sparse_pool3d(f, c, (2, 5, 6, 4, 3), 2, output_shape=(2, 3, 3, 2, 3))[0],
    "first form": lambda f, c: flex_gemm.sparse_submanifold_conv3d(
        f, c, (2, 3, 5, 6, 4), torch.ones(1, 3, 3, 3, 3).double()
    )[0],
    "first form, strided": lambda f, c: flex_gemm.ops.spconv.sparse_conv3d(
        f, c, (2, 3, 5, 6, 4), torch.ones(1, 2, 2, 2, 3).double(), stride=(2, 2, 2)
    )[0],
}


@pytest.mark.parametrize("name", sampled(CALLS, 2))
def test_voxels_of_another_batch_are_refused_in_graphs_too(name, fresh_compiler, each_device):
    feats, coords, _ = scene(3, 3)
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
    compiled(feats, coords)
    coords[4, 0] = 2
    if each_device == "cpu":  # a GPU reports it later
        for call in (CALLS[name], compiled):
            with pytest.raises((sl.ShiplapError, RuntimeError), match="SL211"):
                call(feats, coords)
