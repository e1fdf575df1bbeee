"""The FlexGEMM facade: against dense convolution, with caches and configs, compiled, and where FlexGEMM errs."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import shiplap as sl
import shiplap_sparse3d as sparse3d
import shiplap_sparse3d.flexgemm as flex_gemm
from shiplap_sparse3d.flexgemm.ops import spconv
from shiplap_sparse3d.flexgemm.ops.spconv import Algorithm, sparse_conv3d, sparse_submanifold_conv3d
from shiplap_testing.effort import sampled
from tests.sparse3d.scenes import at, scene

GRID = (7, 6, 8)
ALGORITHMS = spconv.ALGORITHMS


def shape_of(x: sparse3d.SparseTensor) -> torch.Size:
    return torch.Size((x.batch_size, x.feats.shape[1], *x.spatial_shape))


def dense_subm(x, weight, bias, dilation):
    """The same convolution of the dense volume, zero where no voxel is; even kernels reach further down than up."""
    low = [k // 2 * d for k, d in zip(weight.shape[1:4], dilation, strict=True)]
    high = [(k - 1) * d - p for k, d, p in zip(weight.shape[1:4], dilation, low, strict=True)]
    pads = [v for lo, hi in zip(reversed(low), reversed(high), strict=True) for v in (lo, hi)]
    volume = torch.nn.functional.pad(x.dense(), pads)
    return at(torch.nn.functional.conv3d(volume, weight.permute(0, 4, 1, 2, 3), bias, dilation=dilation), x.coords)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("kernel", "dilation", "bias"),
    [
        ((3, 3, 3), (1, 1, 1), True),
        ((3, 1, 5), (2, 1, 1), False),
        ((2, 2, 2), (1, 1, 1), False),
        ((4, 3, 2), (1, 2, 1), True),
    ],
)
def test_submanifold_forward_and_all_gradients(kernel, dilation, bias, algorithm):
    """Even kernels and training without a bias included, which go wrong there."""
    x = scene(90, GRID, 3)
    leaves = [x.feats.requires_grad_(), torch.randn(4, *kernel, 3).double().requires_grad_()]
    leaves += [torch.randn(4).double().requires_grad_()] if bias else []
    out, cache = sparse_submanifold_conv3d(
        leaves[0], x.coords, shape_of(x), leaves[1], leaves[2] if bias else None, None, dilation, algorithm=algorithm
    )
    want = dense_subm(x, leaves[1], leaves[2] if bias else None, dilation)
    torch.testing.assert_close(out, want)
    assert cache.neighbor_map.shape == (90, kernel[0] * kernel[1] * kernel[2])
    grad = torch.randn_like(out)
    for got, expected in zip(*(torch.autograd.grad(o, leaves, grad) for o in (out, want)), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        ((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
        ((2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1)),
        ((3, 2, 1), (1, 2, 3), (2, 0, 1), (1, 2, 1)),
    ],
)
def test_strided_forward_and_all_gradients(kernel, stride, padding, dilation, algorithm):
    x = scene(90, GRID, 3)
    leaves = [x.feats.requires_grad_(), torch.randn(4, *kernel, 3).double().requires_grad_()]
    out, coords, cache = sparse_conv3d(
        leaves[0], x.coords, shape_of(x), leaves[1], None, None, None, stride, padding, dilation, algorithm=algorithm
    )
    volume = torch.nn.functional.conv3d(
        x.dense(), leaves[1].permute(0, 4, 1, 2, 3), stride=stride, padding=padding, dilation=dilation
    )
    assert coords is cache.out_coords
    torch.testing.assert_close(out, at(volume, coords))
    active = (
        torch.zeros(2, 1, *volume.shape[2:])
        .double()
        .index_put(
            (coords[:, 0].long(), torch.zeros(len(coords)).long(), *coords[:, 1:].long().unbind(1)),
            torch.ones(()).double(),
        )
    )
    assert not (volume * (1 - active)).any()  # no output voxel is missing
    grad = torch.randn_like(out)
    for got, expected in zip(*(torch.autograd.grad(o, leaves, grad) for o in (out, at(volume, coords))), strict=True):
        torch.testing.assert_close(got, expected)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_voxels_and_windows(data):
    cells = st.tuples(st.integers(0, 1), *[st.sampled_from([0, 1, 2, 3, 5])] * 3)
    rows = data.draw(st.one_of(st.lists(cells, max_size=20, unique=True), st.just([(1, 4, 4, 4)])))
    window = [data.draw(st.tuples(*[st.integers(a, b)] * 3)) for a, b in ((1, 3), (1, 3), (0, 2), (1, 2))]
    coords = torch.tensor(rows, dtype=torch.int32).view(-1, 4)
    x = sparse3d.SparseTensor(torch.randn(len(rows), 2).double(), coords, (6, 6, 6), 2)
    weight = torch.randn(3, *window[0], 2).double()
    out, outs, _ = sparse_conv3d(x.feats, coords, shape_of(x), weight, None, None, None, *window[1:])
    args = dict(zip(("stride", "padding", "dilation"), window[1:], strict=True))
    size = sparse3d.coords.output_shape((6, 6, 6), *window)
    if min(size) < 1:
        assert len(outs) == 0
        return
    torch.testing.assert_close(
        out, at(torch.nn.functional.conv3d(x.dense(), weight.permute(0, 4, 1, 2, 3), **args), outs)
    )
    out, _ = sparse_submanifold_conv3d(x.feats, coords, shape_of(x), weight, dilation=window[3])
    torch.testing.assert_close(out, dense_subm(x, weight, None, window[3]))


def test_no_voxels_train():
    for call in (sparse_submanifold_conv3d, sparse_conv3d):
        feats, weight = torch.zeros(0, 3, requires_grad=True), torch.randn(4, 3, 3, 3, 3, requires_grad=True)
        out = call(feats, torch.zeros(0, 4, dtype=torch.int32), (1, 3, *GRID), weight)[0]
        out.sum().backward()
        assert out.shape == (0, 4)
        assert not weight.grad.any()


@pytest.mark.parametrize(("built", "used"), [*itertools.permutations((ALGORITHMS[0], ALGORITHMS[1], ALGORITHMS[4]), 2)])
def test_a_cache_built_without_gradients_and_for_another_algorithm_trains(built, used):
    x = scene(60, GRID, 3)
    weight = torch.randn(4, 3, 3, 3, 3).double().requires_grad_()
    grads = []
    for reuse in (True, False):
        with torch.no_grad():
            _, cache = sparse_submanifold_conv3d(x.feats, x.coords, shape_of(x), weight, algorithm=built)
        cache = cache if reuse else None
        out, _ = sparse_submanifold_conv3d(x.feats, x.coords, shape_of(x), weight, None, cache, algorithm=used)
        grads.append(torch.autograd.grad(out.square().sum(), weight)[0])
    torch.testing.assert_close(*grads)


def test_a_strided_cache_brings_its_voxels_and_given_ones_are_used():
    x = scene(60, GRID, 3)
    weight = torch.randn(4, 2, 2, 2, 3).double()
    stride = (2, 2, 2)
    out, coords, cache = sparse_conv3d(x.feats, x.coords, shape_of(x), weight, stride=stride)
    repeated, same, second_cache = sparse_conv3d(x.feats, x.coords, shape_of(x), weight, None, cache, stride=stride)
    assert same is coords
    assert second_cache is cache
    assert torch.equal(out, repeated)
    few = coords[::3].contiguous()
    some, given, _ = sparse_conv3d(x.feats, x.coords, shape_of(x), weight, None, None, few, stride)
    assert given is few
    torch.testing.assert_close(some, out[::3])
    with pytest.raises(sl.ShiplapError, match=r"SL208(.|\n)*neighbor_cache, or None"):
        sparse_conv3d(x.feats, x.coords, shape_of(x), weight, None, cache, few, stride)


@pytest.mark.long
@pytest.mark.parametrize(
    "algorithm",
    [Algorithm.EXPLICIT_GEMM, pytest.param(Algorithm.MASKED_IMPLICIT_GEMM_SPLITK, marks=pytest.mark.long)],
)
def test_the_compiled_call_is_the_legacy_call(algorithm, fresh_compiler):
    """A config from outside the graph, any number of voxels, training, bias or not."""

    def loss(feats, weight, bias, config):
        out = sparse_submanifold_conv3d(feats, weight=weight, bias=bias, config=config)
        return sparse_submanifold_conv3d(out.relu(), weight=weight, config=config).square().mean()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (40, 90):
        x = scene(n, GRID, 4)
        leaves = [x.feats, torch.randn(4, 3, 3, 3, 4).double(), torch.randn(4).double()]
        leaves = [v.requires_grad_() for v in leaves]
        _, cache = sparse_submanifold_conv3d(x.feats, x.coords, shape_of(x), leaves[1])
        config = cache.freeze(splitk=2, algorithm=algorithm)
        assert config.algorithm == algorithm
        assert all(isinstance(t, torch.Tensor) for t in config.plan.tensors)
        for got, want in zip(*(torch.autograd.grad(f(*leaves, config), leaves) for f in (compiled, loss)), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.long
def test_maps_are_built_inside_the_graph(fresh_compiler):
    """Submanifold, strided and back to points: one graph from coordinates to the gradient."""

    def loss(feats, coords, weight, queries):
        shape = (2, 4, *GRID)
        out, cache = sparse_submanifold_conv3d(feats, coords, shape, weight)
        out, _ = sparse_submanifold_conv3d(out.relu(), coords, shape, weight, None, cache)
        down, coords, _ = sparse_conv3d(out, coords, shape, weight, stride=(2, 2, 2), padding=(1, 1, 1))
        half = (2, 4, *[(w - 1) // 2 + 1 for w in GRID])
        order = flex_gemm.ops.serialize.encode_seq(coords, half, "hilbert").argsort()
        return flex_gemm.ops.grid_sample.grid_sample_3d(down[order], coords[order], half, queries).square().mean()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    queries = torch.rand(2, 20, 3) * 3
    for n in (50, 120):
        x = scene(n, GRID, 4)
        leaves = [x.feats.requires_grad_(), torch.randn(4, 3, 3, 3, 4).double().requires_grad_()]
        grads = [torch.autograd.grad(f(leaves[0], x.coords, leaves[1], queries), leaves) for f in (compiled, loss)]
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("last", sampled([False, True], 1), ids=["channels second", "channels last"])
def test_a_graph_takes_the_grid_from_the_coordinates(last, fresh_compiler):
    """Sizes of such a grid depend on data, and whether one of them is the number of channels cannot be asked."""
    weight = torch.randn(4, 3, 3, 3, 3).double()

    def layer(feats, coords, grid=None):
        batches, *grid = grid or (coords.max(0)[0] + 1).tolist()
        shape = (batches, *grid, 3) if last else (batches, 3, *grid)
        return sparse_submanifold_conv3d(feats, coords, torch.Size(shape), weight)[0]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for n in (40, 70):
        x = scene(n, GRID, 3)
        torch.testing.assert_close(compiled(x.feats, x.coords), layer(x.feats, x.coords, (2, *GRID)))


def test_a_cache_of_another_convolution_is_refused():
    x, weight = scene(30, GRID, 3), torch.randn(4, 3, 3, 3, 3).double()
    _, cache = sparse_submanifold_conv3d(x.feats, x.coords, shape_of(x), weight)
    other = scene(31, GRID, 3)
    cube, ones = (3, 3, 3), (1, 1, 1)
    for y, shape, kernel, dilation in (
        (other, shape_of(other), cube, ones),
        (x, shape_of(x), (3, 3, 1), ones),
        (x, shape_of(x), cube, (2, 1, 1)),
        (x, (2, 3, 9, 9, 9), cube, ones),
    ):
        with pytest.raises(sl.ShiplapError, match=r"SL208: the neighbour cache belongs to another convolution"):
            sparse_submanifold_conv3d(
                y.feats, y.coords, shape, torch.randn(4, *kernel, 3).double(), None, cache, dilation
            )
    with pytest.raises(sl.ShiplapError, match=r"SL202(.|\n)*that of the neighbours"):
        sparse_submanifold_conv3d(x.feats, weight=torch.randn(4, 1, 9, 3, 3).double(), config=cache.freeze())


@pytest.mark.parametrize(
    ("id", "call"),
    [
        ("SL208", lambda x, w: sparse_submanifold_conv3d(x.feats, x.coords, GRID, w)),
        ("SL208", lambda x, w: sparse_submanifold_conv3d(x.feats, x.coords, None, w)),
        ("SL208", lambda x, w: sparse_submanifold_conv3d(x.feats, x.coords, shape_of(x), w, algorithm="fastest")),
        ("SL208", lambda x, w: sparse_submanifold_conv3d(x.feats, x.coords, shape_of(x), w)[1].freeze(0)),
        ("SL208", lambda x, w: sparse_conv3d(x.feats, x.coords, shape_of(x), w, stride=(2, 2))),
        ("SL208", lambda x, w: sparse_conv3d(x.feats, x.coords, shape_of(x), w, stride=(0, 1, 1))),
        ("SL209", lambda x, w: sparse_submanifold_conv3d(x.feats, None, shape_of(x), w)),
        ("SL209", lambda x, w: sparse_submanifold_conv3d(x.feats, x.coords, shape_of(x))),
        ("SL201", lambda x, w: sparse_submanifold_conv3d(x.feats, x.coords, shape_of(x), w.flatten(1, 3))),
        ("SL211", lambda x, w: sparse_submanifold_conv3d(x.feats, x.coords, (2, 3, 3, 3, 3), w)),
        ("SL211", lambda x, w: sparse_conv3d(x.feats, x.coords[:1].expand(30, 4), shape_of(x), w)),
    ],
)
def test_calls_that_mean_nothing_are_refused(id, call):
    with pytest.raises(sl.ShiplapError, match=id):
        call(scene(30, GRID, 3), torch.randn(4, 3, 3, 3, 3).double())


@pytest.fixture
def shell():
    """A hollow sphere, as in FlexGEMM's examples: features, coordinates, shape, weight, bias."""
    r = torch.arange(16)
    x, y, z = torch.meshgrid(r, r, r, indexing="ij")
    distance = ((x - 7.5) ** 2 + (y - 7.5) ** 2 + (z - 7.5) ** 2).sqrt()
    cells = ((distance > 5.5) & (distance < 7)).nonzero().int()
    coords = torch.cat([torch.zeros_like(cells[:, :1]), cells], 1).contiguous()
    weight, bias = torch.randn(8, 3, 3, 3, 6, requires_grad=True), torch.randn(8, requires_grad=True)
    return torch.randn(len(coords), 6), coords, torch.Size((1, 6, 16, 16, 16)), weight, bias


def test_the_example_of_flexgemm_with_a_setting(shell):
    """That of its main branch: the setter, then functions under ``ops.spconv``."""
    *_, weight, bias = shell
    flex_gemm.ops.spconv.set_algorithm(flex_gemm.ops.spconv.Algorithm.MASKED_IMPLICIT_GEMM_SPLITK)
    flex_gemm.ops.spconv.set_hashmap_ratio(2.0)
    out, cache = flex_gemm.ops.spconv.sparse_submanifold_conv3d(*shell)
    out.sum().backward()
    x = sparse3d.SparseTensor(shell[0], shell[1], (16, 16, 16), 1)
    expected = dense_subm(x, weight, bias, (1, 1, 1))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    wanted = torch.autograd.grad(expected.sum(), [weight, bias])
    torch.testing.assert_close([weight.grad, bias.grad], list(wanted), rtol=1e-4, atol=1e-3)
    assert cache["neighbor_map"].shape == (len(shell[0]), 27)


def test_the_example_of_flexgemm_with_an_argument(shell):
    """That of its newest branch: functions at the top, the algorithm an argument."""
    out, _ = flex_gemm.sparse_submanifold_conv3d(*shell, algorithm="masked_implicit_gemm_splitk")
    out.sum().backward()
    assert shell[3].grad.shape == shell[3].shape


def test_settings_of_the_process_are_accepted_and_change_nothing(shell):
    """TRELLIS.2 makes them in every forward, compiled too."""

    def layer(feats, weight):
        flex_gemm.ops.spconv.set_algorithm("explicit_gemm")
        flex_gemm.ops.spconv.set_hashmap_ratio(1.5)
        return sparse_submanifold_conv3d(feats, shell[1], shell[2], weight, shell[4], None, (1, 1, 1))[0]

    expected = sparse_submanifold_conv3d(*shell)[0]
    torch.testing.assert_close(layer(shell[0], shell[3]), expected)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(shell[0], shell[3]), expected)
    assert (spconv.ALGORITHM, spconv.HASHMAP_RATIO) == (Algorithm.MASKED_IMPLICIT_GEMM_SPLITK, 2.0)
    with pytest.raises(sl.ShiplapError, match="SL208"):
        spconv.set_algorithm("fastest")
    with pytest.raises(AttributeError, match="no attribute 'sparse'"):
        flex_gemm.ops.spconv.sparse  # noqa: B018


class Factors(TorchDispatchMode):
    """Keeps whether each convolution may round its factors."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "sparse3d::conv":
            names = [argument.name for argument in func._schema.arguments]
            self.rounded.append({**dict(zip(names, args, strict=False)), **(kwargs or {})}.get("tf32", False))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("setting", [None, False, True])
def test_the_setting_of_1_x_says_whether_factors_are_rounded(shell, setting, monkeypatch):
    """FlexGEMM's own ablations set it: of calls, and of calls with a frozen cache."""
    monkeypatch.setattr(flex_gemm.kernels.triton.spconv.config, "allow_tf32", setting)
    feats, coords, shape, weight, bias = shell
    with Factors() as factors:
        _, cache = sparse_submanifold_conv3d(feats, coords, shape, weight, bias)
        sparse_submanifold_conv3d(feats, coords, shape, weight, bias, config=cache.freeze())
    assert factors.rounded == [torch.backends.cuda.matmul.allow_tf32 if setting is None else setting] * 2


def test_names_are_those_of_flexgemm():
    assert Algorithm.MASKED_IMPLICIT_GEMM_SPLITK == "masked_implicit_gemm_splitk" == spconv.DEFAULT
    assert len(ALGORITHMS) == 5
    assert flex_gemm.ops.serialize.encode_seq is sparse3d.encode_seq
    assert flex_gemm.ops.grid_sample.grid_sample_3d is sparse3d.grid_sample_3d
