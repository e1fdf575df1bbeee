"""Every kind of convolution and pooling against dense torch on the active set, forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap import ShiplapError
from shiplap_sparse3d.plan import Plan
from tests.sparse3d.scenes import at, scene

DENSE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
DENSE_T = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def layer_of(kind: str, ndim: int, *args, **kwargs):
    return getattr(sparse3d, f"{kind}{ndim}d")(*args, dtype=torch.float64, **kwargs)


def dense_weight(layer, transposed: bool = False):
    """``[co, *k, ci / g]`` → what torch's (transposed) convolution takes."""
    w = layer.weight.movedim(-1, 1)
    if not transposed:
        return w
    g, co = layer.groups, layer.out_channels
    return w.unflatten(0, (g, co // g)).transpose(1, 2).flatten(0, 1)


def rows_at(dense, coords):
    b, *cells = coords.long().unbind(1)
    return dense[(b, slice(None), *cells)]


def check(got, want, x, *parameters):
    """Values and gradients of two ways to the same rows; ``x`` are features, a leaf."""
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    if got.numel() == 0:
        return
    weight = torch.randn_like(got)
    a, b = (torch.autograd.grad(t, (x, *parameters), weight, retain_graph=True) for t in (got, want))
    for g, w in zip(a, b, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


def leaf(x):
    feats = x.feats.clone().requires_grad_()
    return feats, x.replace(feats)


def lowered(x: sparse3d.SparseTensor, ndim: int) -> sparse3d.SparseTensor:
    """The voxels of a scene whose leading axes have one cell, with fewer axes."""
    keep = [0, *range(4 - ndim, 4)]
    return sparse3d.SparseTensor(x.feats, x.coords[:, keep], x.spatial_shape[3 - ndim :], x.batch_size)


def reachable(x, shape, window, transposed):
    """``int32 [m, 1 + d]``: the cells that a kernel of ones reaches, ascending."""
    ndim = x.geometry.ndim
    ones = torch.ones(1, 1, *window.pop("kernel"), dtype=torch.float64)
    active = x.replace(torch.ones_like(x.feats[:, :1])).dense()
    reached = (DENSE_T if transposed else DENSE)[ndim](active, ones, **window)
    assert reached.shape[2:] == shape
    return (reached[:, 0] > 0.5).nonzero().int()


TRANSPOSED = [
    (k, s, p, d, extra)
    for k, s, p, d, extra in itertools.product((1, 2, 3, 4), (1, 2, 3), (0, 1, 3), (1, 2), (0, 1))
    if extra < max(s, d) and (p <= k or k == 1)
]


@pytest.mark.parametrize(("k", "stride", "padding", "dilation", "extra"), TRANSPOSED)
def test_transposed_equals_dense(k, stride, padding, dilation, extra):
    feats, x = leaf(scene(40, (5, 4, 6), 4))
    layer = layer_of("SparseConvTranspose", 3, 4, 5, k, stride, padding, extra, dilation=dilation)
    window = {"stride": stride, "padding": padding, "dilation": dilation, "output_padding": extra}
    if min((w - 1) * stride - 2 * padding + dilation * (k - 1) + 1 + extra for w in (5, 4, 6)) < 1:
        with pytest.raises(ShiplapError, match="SL208"):
            layer(x)
        return
    dense = F.conv_transpose3d(x.dense(), dense_weight(layer, True), layer.bias, **window)
    y = layer(x)
    assert y.spatial_shape == dense.shape[2:]
    assert torch.equal(y.coords, reachable(x, dense.shape[2:], {"kernel": (k,) * 3, **window}, True))
    check(y.feats, at(dense, y.coords), feats, layer.weight, layer.bias)


def test_a_negative_output_padding_cuts_the_far_end_off():
    x = scene(30, (5, 4, 6), 3)
    whole, cut = (x.geometry.transposed(3, 2, 1, 2, extra) for extra in (0, (-2, 0, -1)))
    inside = (whole.geometry.coords[:, 1:] < torch.tensor(cut.geometry.spatial_shape)).all(1)
    assert cut.geometry.spatial_shape == tuple(
        w - c for w, c in zip(whole.geometry.spatial_shape, (2, 0, 1), strict=True)
    )
    assert torch.equal(cut.geometry.coords, whole.geometry.coords[inside])
    assert torch.equal(cut.plan.table, whole.plan.table[inside])


@pytest.mark.parametrize(("k", "dilation"), [(1, 1), (3, 1), (3, 2), ((1, 5, 3), 1), (2, 1), (4, 2), (7, 1)])
def test_generative_grows_by_its_kernel(k, dilation):
    feats, x = leaf(scene(12, (7, 6, 5), 3))
    layer = layer_of("GenerativeConv", 3, 3, 4, k, dilation)
    around = [a // 2 * dilation for a in layer.kernel_size]
    dense = F.conv3d(x.dense(), dense_weight(layer), layer.bias, padding=around, dilation=dilation)
    y = layer(x)
    assert y.spatial_shape == dense.shape[2:]
    window = {"kernel": layer.kernel_size, "padding": around, "dilation": dilation}
    assert torch.equal(y.coords, reachable(x, dense.shape[2:], window, False))
    check(y.feats, at(dense, y.coords), feats, layer.weight)
    same = layer_of("SubMConv", 3, 3, 4, k, dilation=dilation)
    same.load_state_dict(layer.state_dict())  # a submanifold convolution is its restriction to the input's voxels
    torch.testing.assert_close(same(x).feats, at(y.dense(), x.coords))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", ["SubMConv", "SparseConv", "SparseConvTranspose", "GenerativeConv"])
def test_groups_equal_dense(kind, groups):
    feats, x = leaf(scene(60, (6, 5, 7), 4))
    arguments = {"SparseConv": (3, 2, 1), "SparseConvTranspose": (2, 2)}.get(kind, (3,))
    layer = layer_of(kind, 3, 4, 8, *arguments, groups=groups)
    transposed = kind == "SparseConvTranspose"
    window = {"stride": getattr(layer, "stride", 1), "padding": getattr(layer, "padding", 1), "groups": groups}
    dense = (F.conv_transpose3d if transposed else F.conv3d)(
        x.dense(), dense_weight(layer, transposed), layer.bias, **window
    )
    y = layer(x)
    check(y.feats, at(dense, y.coords), feats, layer.weight, layer.bias)
    if kind == "SparseConv":
        up = layer_of("SparseInverseConv", 3, 8, 4, 3, groups=groups)
        z = up(y)
        dense = F.conv_transpose3d(y.dense(), dense_weight(up, True), up.bias, 2, 1, (1, 0, 0), groups)
        pad = [v for w, o in zip(reversed(x.spatial_shape), reversed(dense.shape[2:]), strict=True) for v in (0, w - o)]
        check(z.feats, at(F.pad(dense, pad), x.coords), feats, up.weight)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("kind", ["SubMConv", "SparseConv", "SparseConvTranspose", "GenerativeConv"])
def test_one_and_two_axes_equal_dense(kind, ndim):
    shape = (1, 1, 90) if ndim == 1 else (1, 9, 11)
    feats, x = leaf(lowered(scene(60, shape, 4), ndim))
    assert x.dense().shape == (2, 4, *shape[3 - ndim :])
    arguments = {"SparseConv": (3, 2, 1), "SparseConvTranspose": (4, 2, 1)}.get(kind, (3,))
    layer = layer_of(kind, ndim, 4, 5, *arguments)
    assert layer.weight.shape == (5, *(arguments[0],) * ndim, 4)
    transposed = kind == "SparseConvTranspose"
    window = {"stride": getattr(layer, "stride", 1), "padding": getattr(layer, "padding", 1)}
    dense = (DENSE_T if transposed else DENSE)[ndim](x.dense(), dense_weight(layer, transposed), layer.bias, **window)
    y = layer(x)
    assert y.spatial_shape == dense.shape[2:]
    assert y.coords.shape[1] == 1 + ndim
    check(y.feats, rows_at(dense, y.coords), feats, layer.weight, layer.bias)
    if kind == "SparseConv":
        z = layer_of("SparseInverseConv", ndim, 5, 4, 3)(y)
        assert z.geometry is x.geometry
    for pool, dense_pool in (("Max", F.max_pool1d if ndim == 1 else F.max_pool2d), ("Avg", None)):
        z = getattr(sparse3d, f"Sparse{pool}Pool{ndim}d")(2)(x.replace(feats.abs() + 1))
        assert z.spatial_shape == tuple(w // 2 for w in x.spatial_shape)
        if dense_pool is not None:
            want = rows_at(dense_pool(x.replace(feats.abs() + 1).dense(), 2), z.coords)
            assert torch.equal(z.feats, want)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7])
def test_kernels_of_one_to_seven(k):
    """343 taps at most; forward and both gradients."""
    feats, x = leaf(scene(40, (8, 7, 9), 2))
    layer = layer_of("SubMConv", 3, 2, 3, k)
    pad = [v for _ in range(3) for v in (k // 2, (k - 1) // 2)]
    dense = F.conv3d(F.pad(x.dense(), pad), dense_weight(layer), layer.bias)
    check(layer(x).feats, at(dense, x.coords), feats, layer.weight, layer.bias)
    plan = x.geometry.subm(k).sorted()
    assert plan.order.shape[0] >= -(-(k**3) // 31)
    check(plan.conv(feats, layer.weight.flatten(1, 3), layer.bias), at(dense, x.coords), feats, layer.weight)


@pytest.mark.parametrize("parts", [None, 1, 3])
def test_the_way_back_of_a_plan_that_has_none_yet(parts):
    x = scene(60, (9, 8, 7), 3)
    step = x.geometry.strided(3, 2, 1)
    bare = Plan(step.plan.table, 60)
    rows = torch.randn(step.geometry.coords.shape[0], 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 27, 3, dtype=torch.float64, requires_grad=True)
    plan = bare if parts is None else bare.sorted(parts)
    check(plan.t.conv(rows, weight), step.plan.t.conv(rows, weight), rows, weight)
    check(plan.t.t.conv(x.feats, weight), step.plan.conv(x.feats, weight), weight)


@st.composite
def scenes(draw):
    """Voxels of a small grid: spread, clustered, all even, all odd, one, or none; some scenes empty."""
    shape = tuple(draw(st.integers(1, 6)) for _ in range(3))
    cells = st.tuples(st.integers(0, 2), *(st.integers(0, w - 1) for w in shape))
    occupied = draw(st.sets(cells, max_size=25))
    parity = draw(st.sampled_from([None, 0, 1]))
    rows = [c for c in occupied if parity is None or all(v % 2 == parity for v in c[1:])]
    coords = torch.tensor(rows, dtype=torch.int32).reshape(-1, 4)
    return sparse3d.SparseTensor(torch.randn(len(rows), 2, dtype=torch.float64), coords, shape, 3)


@settings(max_examples=20, deadline=None)
@given(scenes(), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2))
def test_any_scene_any_window(x, k, stride, padding, dilation):
    feats, x = leaf(x)
    window = {"stride": stride, "padding": padding, "dilation": dilation}
    fits = min(w + 2 * padding - dilation * (k - 1) for w in x.spatial_shape) >= 1
    down = layer_of("SparseConv", 3, 2, 3, k, stride, padding, dilation)
    if fits:
        y = down(x)
        dense = F.conv3d(x.dense(), dense_weight(down), down.bias, **window)
        assert torch.equal(y.coords, reachable(x, y.spatial_shape, {"kernel": (k,) * 3, **window}, False))
        check(y.feats, at(dense, y.coords), feats, down.weight)
    else:
        with pytest.raises(ShiplapError, match="SL208"):
            down(x)
    up = layer_of("SparseConvTranspose", 3, 2, 3, k, stride, padding, 0, dilation=dilation)
    if min((w - 1) * stride - 2 * padding + dilation * (k - 1) + 1 for w in x.spatial_shape) >= 1:
        dense = F.conv_transpose3d(x.dense(), dense_weight(up, True), up.bias, **window)
        z = up(x)
        check(z.feats, at(dense, z.coords), feats, up.weight)
    else:
        with pytest.raises(ShiplapError, match="SL208"):
            up(x)


@pytest.mark.parametrize("n", [0, 1])
def test_no_voxel_and_one(n):
    x = scene(n, (6, 6, 6), 3)
    for layer in (
        layer_of("SparseConvTranspose", 3, 3, 4, 2, 2),
        layer_of("GenerativeConv", 3, 3, 4, 3),
        sparse3d.SparseMaxPool3d(2),
        sparse3d.SparseAvgPool3d(3, 2, 1),
        sparse3d.BatchNorm(3).double(),
    ):
        y = layer(x)
        assert (y.feats.shape[0] > 0) == (n > 0)
        assert y.feats.isfinite().all()


def test_grids_of_two_to_the_57_cells():
    """The far corner of a huge grid is like that of a small one, in each direction."""
    small = scene(30, (6, 6, 6), 2, batch_size=1)
    edge = 2**19
    far = small.coords + torch.tensor([0, *[edge - 6] * 3], dtype=torch.int32)
    huge = sparse3d.SparseTensor(small.feats, far, edge, 1)
    for layer in (
        layer_of("SubMConv", 3, 2, 3, 3),
        layer_of("SparseConv", 3, 2, 3, 2, 2),
        layer_of("SparseConvTranspose", 3, 2, 3, 2, 2),
        layer_of("GenerativeConv", 3, 2, 3, 3),
    ):
        near, there = layer(small), layer(huge)
        if isinstance(layer, sparse3d.GenerativeConv3d):  # the small grid cuts off what the huge one keeps
            kept = (there.coords[:, 1:] >= edge - 6).all(1)
            there = sparse3d.SparseTensor(there.feats[kept], there.coords[kept], edge, 1)
        moved = [a - b for a, b in zip(there.spatial_shape, near.spatial_shape, strict=True)]
        assert torch.equal(there.coords - torch.tensor([0, *moved], dtype=torch.int32), near.coords)
        assert torch.equal(there.feats, near.feats)
    with pytest.raises(sl.ShiplapError, match=r"SL211(.|\n)*2\^63 cells or more"):
        layer_of("SparseConvTranspose", 3, 2, 3, 2, 8)(huge)


def test_what_is_refused():
    x = scene(10, (5, 5, 5), 3)
    with pytest.raises(sl.ShiplapError, match=r"SL201(.|\n)*SubMConv2d(.|\n)*voxels with 3 axes(.|\n)*2 axes"):
        layer_of("SubMConv", 2, 3, 4, 3)(x)
    with pytest.raises(sl.ShiplapError, match=r"SL208(.|\n)*3 groups of 4 and 6 channels"):
        sparse3d.SubMConv3d(4, 6, 3, groups=3)
    with pytest.raises(sl.ShiplapError, match=r"SL208(.|\n)*kernel(.|\n)*\(3, 3\)(.|\n)*one int for each of 3 axes"):
        sparse3d.SubMConv3d(4, 6, (3, 3))
    with pytest.raises(sl.ShiplapError, match=r"SL201(.|\n)*6 columns(.|\n)*2 to 5"):
        sparse3d.SparseTensor(x.feats, torch.zeros(10, 6, dtype=torch.int32), 5)


def test_a_representation_shows_shapes():
    assert repr(sparse3d.SparseConv2d(4, 8, (3, 1), 2, groups=2)) == (
        "SparseConv2d(4, 8, kernel_size=(3, 1), stride=(2, 2), groups=2, bias=True, weight=[8, 3, 1, 2])"
    )
    assert "spatial_shape=(5, 5, 5)" in repr(scene(3, (5, 5, 5), 2).geometry)


def test_the_way_back_is_built_when_somebody_wants_it():
    """Inference does without: half of what a strided layer builds."""
    x = scene(60, (9, 8, 7), 3)
    down, up = layer_of("SparseConv", 3, 3, 4, 3, 2, 1), layer_of("SparseInverseConv", 3, 4, 2, 3)
    even = layer_of("SubMConv", 3, 3, 4, 2)
    with torch.no_grad():
        coarse, flat = down(x), even(x)
        assert x.geometry.strided(3, 2, 1).plan.back is None
        assert x.geometry.subm(2).back is None
        fine = up(coarse)
        assert x.geometry.strided(3, 2, 1).plan.back is not None
    torch.testing.assert_close(up(down(x)).feats, fine.feats)
    torch.testing.assert_close(even(x).feats, flat.feats)
    assert x.geometry.subm(2).back is not None


def test_a_plain_tensor_is_refused_by_name():
    with pytest.raises(sl.ShiplapError, match=r"SL209(.|\n)*SubMConv3d(.|\n)*a Tensor(.|\n)*a SparseTensor"):
        sparse3d.SubMConv3d(3, 4, 3)(torch.zeros(5, 3))
