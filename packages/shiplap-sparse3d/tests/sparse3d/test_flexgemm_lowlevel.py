"""``torch.ops.flex_gemm`` and the names below the functions of FlexGEMM 1.x."""

from __future__ import annotations

import pytest
import torch

import shiplap as sl
import shiplap_sparse3d as sparse3d
import shiplap_sparse3d.flexgemm as facade
from shiplap_sparse3d.drop_in import drop_in
from shiplap_sparse3d.flexgemm.kernels import cuda
from shiplap_sparse3d.flexgemm.ops import spconv
from shiplap_testing.effort import sampled
from shiplap_testing.forked import python
from tests.sparse3d.scenes import scene

GRID = (7, 6, 8)
FIELDS = ["neighbor_map", "sorted_idx", "valid_kernels", "valid_kernel_segs", "block_sizes", "valid_signal_i"]
FIELDS += ["valid_signal_o", "valid_signal_seg", "splitk", "algorithm"]


@pytest.fixture
def ops():
    """``torch.ops.flex_gemm`` for the time of a test."""
    with drop_in("flex_gemm"):
        yield torch.ops.flex_gemm


def shape_of(x):
    return (x.batch_size, x.feats.shape[1], *GRID)


def test_the_eighteen_ops_are_there_while_the_drop_in_is(ops):
    assert len(cuda.TORCH_OPS) == 18
    for name in cuda.TORCH_OPS:
        assert str(getattr(ops, name).default._schema).startswith(f"flex_gemm::{name}(")
    assert cuda.register_torch_ops() is None  # they are registered once


def test_the_ops_stay_where_nothing_holds_the_drop_in():
    program = 'import gc, torch; from shiplap_sparse3d.drop_in import drop_in; drop_in("flex_gemm"); gc.collect()'
    done = python("-c", program + '; print(hasattr(torch.ops.flex_gemm, "sparse_conv_masked_fwd"))')
    assert done.stdout.split() == ["True"], done.stderr


@pytest.mark.parametrize("key", sampled([torch.uint32, torch.uint64], 1))
@pytest.mark.parametrize("value", sampled([torch.uint32, torch.uint64], 1))
def test_hash_maps_of_unsigned_numbers(ops, key, value):
    coords = scene(60, GRID, 1).coords

    def program(keys, values, coords, data):
        ops.hashmap_insert_3d_cuda(keys, values, coords[:40], data[:40], *GRID)
        ops.hashmap_insert_3d_cuda(keys, values, coords[30:50], data[30:50], *GRID)  # in part the same ones again
        return ops.hashmap_lookup_3d_cuda(keys, values, coords, *GRID)

    data = torch.randint(0, torch.iinfo(value).max // 2, (60,)).to(value)
    for run in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
        keys, values = torch.full((120,), torch.iinfo(key).max, dtype=key), torch.zeros(120, dtype=value)
        found = run(keys, values, coords, data)
        assert found.dtype == value
        assert found[:50].tolist() == data[:50].tolist()
        assert found[50:].tolist() == [torch.iinfo(value).max] * 10
    plain = torch.tensor([5, 900, 7]).to(key)
    keys, values = torch.full((7,), torch.iinfo(key).max, dtype=key), torch.zeros(7, dtype=value)
    ops.hashmap_insert_cuda(keys, values, plain, torch.tensor([1, 2, 3]).to(value))
    assert ops.hashmap_lookup_cuda(keys, values, plain).tolist() == [1, 2, 3]
    with pytest.raises(sl.ShiplapError, match="SL211"):
        ops.hashmap_insert_cuda(keys[:2], values[:2], plain, plain.to(value))


def test_codes_and_neighbours(ops):
    x = scene(60, GRID, 3)
    for kind in ("z_order", "hilbert"):
        codes = torch.empty(60, dtype=torch.int32)
        getattr(ops, f"{kind}_encode")(x.coords, 3, codes)
        assert torch.equal(getattr(ops, f"{kind}_decode")(codes, 3), x.coords)
    keys, values = facade.ops.utils.init_hashmap((2, *GRID), 130, "cpu")
    table = ops.hashmap_build_submanifold_conv_neighbour_map_cuda(keys, values, x.coords, *GRID, 3, 3, 3, 1, 1, 1)
    assert torch.equal(table.view(torch.int32), x.geometry.subm(3).table)
    assert ops.hashmap_lookup_3d_cuda(keys, values, x.coords, *GRID).tolist() == list(range(60))
    points = torch.rand(2, 9, 3) * 6
    keys, values = facade.ops.utils.init_hashmap((2, 1, *GRID), 130, "cpu")
    near = ops.hashmap_build_grid_sample_3d_nearest_neighbor_map(keys, values, x.coords, points, *GRID)
    assert torch.equal(near.view(torch.int32), sparse3d.nearest_map(x.coords, points, list(GRID)))
    rows, weights = ops.hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight(
        keys, values, x.coords, points, *GRID
    )
    assert torch.equal(rows.view(torch.int32), sparse3d.trilinear_map(x.coords, points, list(GRID))[0])
    assert weights.shape == (2, 9, 8)


def test_lists_after_the_map_have_exactly_as_many_entries_as_there_are(ops):
    table = scene(60, GRID, 3).geometry.subm(3).table

    def program(table):
        code, order, *pairs = ops.neighbor_map_post_process_for_masked_implicit_gemm_1(table)
        return code, order, *pairs, *ops.neighbor_map_post_process_for_masked_implicit_gemm_2(code, order, 32)

    for run in (program, torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")):
        code, order, inputs, outputs, ends, taps, seg = run(table)
        hits = int((table >= 0).sum())
        assert len(inputs) == len(outputs) == hits == int(ends.view(torch.int32)[-1])
        assert sorted(order.tolist()) == list(range(60))
        rebuilt = torch.full_like(table, -1)
        tap = torch.arange(27).repeat_interleave(ends.view(torch.int32).diff())
        rebuilt[outputs.view(torch.int32).long(), tap] = inputs.view(torch.int32)
        assert torch.equal(rebuilt, table)
        assert len(taps) == int(seg[-1])
        wanted = [sorted({v for r in order[s : s + 32] for v in range(27) if table[r, v] >= 0}) for s in (0, 32)]
        assert taps.tolist() == wanted[0] + wanted[1]
        assert code.tolist() == [sum(1 << v for v in range(27) if table[r, v] >= 0) for r in range(60)]


@pytest.mark.parametrize("splitk", [1, 4])
def test_masked_convolutions_over_a_config(ops, splitk):
    x, weight, bias = scene(60, GRID, 3), torch.randn(4, 3, 3, 3, 3).double(), torch.randn(4).double()
    _, cache = spconv.sparse_submanifold_conv3d(x.feats, x.coords, shape_of(x), weight)
    frozen = cache.freeze(splitk)
    lists = frozen.neighbor_map, frozen.sorted_idx, frozen.valid_kernels, frozen.valid_kernel_segs, frozen.block_sizes
    leaves = [t.requires_grad_() for t in (x.feats, weight, bias)]
    want = x.geometry.subm(3).conv(x.feats, weight.flatten(1, 3), bias)
    grad = torch.randn_like(want)
    expected = torch.autograd.grad(want, leaves, grad)
    flat, signals = weight.flatten(1, 3), (frozen.valid_signal_i, frozen.valid_signal_o, frozen.valid_signal_seg)
    extra = [] if splitk == 1 else [splitk]
    name = "sparse_conv_masked" if splitk == 1 else "sparse_conv_masked_splitk"
    torch.testing.assert_close(getattr(ops, f"{name}_fwd")(x.feats, flat, bias, *lists, *extra), want)
    grads = getattr(ops, f"{name}_bwd")(grad, x.feats, flat, bias, *lists, *signals, *extra)
    for got, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(got.reshape(wanted.shape), wanted)


def test_a_config_has_the_ten_fields_and_splits_as_it_was_told():
    x, weight = scene(90, GRID, 3), torch.randn(4, 3, 3, 3, 3).double().requires_grad_()
    out, cache = spconv.sparse_submanifold_conv3d(x.feats, x.coords, shape_of(x), weight)
    for algorithm in spconv.ALGORITHMS:
        frozen = cache.freeze(4, algorithm)
        assert [name for name in FIELDS if not hasattr(frozen, name)] == []
        splits = algorithm.endswith("splitk")
        assert frozen.splitk == (4 if splits else 1)
        assert (frozen.plan.order is not None) == splits  # the tables of a split product are sorted by part
        if splits:
            assert frozen.plan.order.shape[0] == 4
        assert len(frozen.valid_kernels) == len(frozen.block_sizes) == 4
        again = spconv.sparse_submanifold_conv3d(x.feats, weight=weight, config=frozen)
        torch.testing.assert_close(again, out)
        grads = [torch.autograd.grad(o.square().sum(), weight, retain_graph=True)[0] for o in (again, out)]
        torch.testing.assert_close(*grads)
    large = torch.randn(4, 5, 3, 3, 3).double()
    _, wide = spconv.sparse_submanifold_conv3d(x.feats, x.coords, shape_of(x), large)
    frozen = wide.freeze()
    assert frozen.sorted_idx is None  # codes of FlexGEMM have 32 bits
    torch.testing.assert_close(frozen.conv(x.feats, large), wide.apply(x.feats, large, None, spconv.DEFAULT))


def test_the_functions_behind_them():
    x, weight, bias = scene(60, GRID, 3), torch.randn(4, 3, 3, 3, 3).double(), torch.randn(4).double()
    sub, strided = spconv.SubMConv3dFunction, spconv.SparseConv3dFunction
    ones, twos = (1, 1, 1), (2, 2, 2)
    caches = [
        sub._compute_neighbor_cache(x.coords, shape_of(x), (3, 3, 3), ones, True),
        sub._compute_neighbor_cache_torch(x.coords, shape_of(x), (3, 3, 3), ones),
    ]
    assert torch.equal(caches[0].neighbor_map, caches[1].neighbor_map)
    out = sub._sparse_submanifold_conv_forward(x.feats, caches[0], weight, bias)
    torch.testing.assert_close(out, sub.apply(x.feats, x.coords, shape_of(x), None, weight, bias)[0])
    window = (3, 3, 3), twos, ones, ones
    outs = strided._get_output_coords(x.coords, shape_of(x), *window)
    assert torch.equal(outs, strided._get_output_coords_torch(x.coords, shape_of(x), *window))
    both = [
        strided._compute_neighbor_cache(x.coords, outs, shape_of(x), *window, True),
        strided._compute_neighbor_cache_torch(x.coords, outs, shape_of(x), *window, True),
    ]
    assert torch.equal(both[0].neighbor_map, both[1].neighbor_map)
    assert torch.equal(both[0]["neighbor_map_bwd"], sparse3d.transpose_table(both[0].neighbor_map, 60))
    leaves = [t.requires_grad_() for t in (x.feats, weight, bias)]
    out, got_coords, _ = strided.apply(*leaves[:1], x.coords, shape_of(x), None, *leaves[1:], None, twos, ones, ones)
    assert torch.equal(got_coords, outs)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(out, leaves, grad)
    for got, expected in zip(strided._sparse_conv_backward(grad, x.feats, both[1], weight, bias), wanted, strict=True):
        torch.testing.assert_close(got, expected)
    frozen = weight.detach()
    assert strided._sparse_conv_backward(grad, x.feats, both[0], frozen, None)[1:] == (None, None)
    sub_grads = sub._sparse_submanifold_conv_backward(torch.ones(60, 4).double(), x.feats, caches[0], weight, bias)
    torch.testing.assert_close(sub_grads[2], torch.full((4,), 60.0).double())


def test_both_forms_stand_side_by_side():
    """The path of ``sparse_conv3d`` decides, or an argument that one form has alone; of the other name the shape."""
    x, weight = scene(60, GRID, 3), torch.randn(4, 2, 2, 2, 3).double()
    last, twos = (2, *GRID, 3), (2, 2, 2)
    first = spconv.sparse_conv3d(x.feats, x.coords, shape_of(x), weight, stride=twos)
    second = facade.sparse_conv3d(x.feats, x.coords, last, weight, stride=2)
    assert (len(first), len(second)) == (3, 4)
    torch.testing.assert_close(first[0], second[0])
    named = spconv.sparse_conv3d(x.feats, x.coords, last, weight, stride=twos, output_shape=second[2])
    assert len(named) == 4
    reused = spconv.sparse_conv3d(x.feats, x.coords, last, weight, stride=twos, neighbor_cache=second[3])
    assert reused[3] is second[3]
    cube = torch.randn(4, 3, 3, 3, 3).double()
    old, cache = spconv.sparse_submanifold_conv3d(x.feats, x.coords, shape_of(x), cube)
    new, second_cache = spconv.sparse_submanifold_conv3d(x.feats, x.coords, last, cube)
    torch.testing.assert_close(old, new)
    assert isinstance(cache, spconv.SubMConv3dNeighborCache)
    assert isinstance(second_cache, facade.NeighborCache)
    assert spconv.sparse_submanifold_conv3d(x.feats, x.coords, last, cube, None, second_cache)[1] is second_cache


def test_programs_of_both_forms_import_their_modules():
    with drop_in("flex_gemm"):
        import flex_gemm
        from flex_gemm import config, kernels
        from flex_gemm.kernels.triton import hashmap_build, hashmap_lookup, hashmap_unique
        from flex_gemm.kernels.triton.neighbor_cache.output_coords import get_output_coords_kernel_delta
        from flex_gemm.nn import SubmanifoldConv3d
        from flex_gemm.ops.grid_sample import grid_sample_3d, grid_sample_3d_torch
        from flex_gemm.ops.utils import make_conv_kernel_delta

        assert flex_gemm.nn.SubmanifoldConv3d is SubmanifoldConv3d
        assert config.IS_CUDA_EXTENSION_AVAILABLE is False
        assert kernels.cuda is cuda
        assert grid_sample_3d_torch is grid_sample_3d
        keys = torch.tensor([[3, 1], [2, 2], [3, 1]], dtype=torch.int16)
        found = hashmap_lookup(hashmap_build(keys), keys, torch.tensor([[2, 2], [3, 1], [9, 9]], dtype=torch.int16))
        assert found.tolist() == [1, 0, -1]
        rows, first, number = hashmap_unique(keys, return_index=True, return_inverse=True)
        assert (rows.tolist(), first.tolist(), number.tolist()) == ([[2, 2], [3, 1]], [1, 0], [1, 0, 1])
        delta = make_conv_kernel_delta((3,), (2,), batch_dims=1)
        assert delta.tolist() == [[0, -2], [0, 0], [0, 2]]
        cells, *pairs = get_output_coords_kernel_delta(keys[:2], delta, stride=(2,), boundary=((0, 9), (0, 3)))
        assert cells.tolist() == [[2, 0], [2, 1], [2, 2]]
        assert [p.tolist() for p in pairs] == [[1, 1, 1], [0, 1, 2], [2, 1, 0]]
        lifted, *_ = get_output_coords_kernel_delta(keys[:2], delta, stride=(2,), transposed=True)
        assert lifted.tolist() == [[2, 2], [2, 4], [2, 6], [3, 0], [3, 2], [3, 4]]
    assert not hasattr(torch.ops.flex_gemm, "z_order_encode")
