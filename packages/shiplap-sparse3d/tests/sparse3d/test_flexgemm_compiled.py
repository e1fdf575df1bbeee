"""What FlexGEMM's design for ``torch.compile`` lists, line by line: its ops, its obstacles, its lessons."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shiplap_sparse3d as sparse3d
from shiplap_sparse3d import flexgemm
from shiplap_sparse3d.drop_in import drop_in
from shiplap_sparse3d.flexgemm.ops import spconv
from shiplap_sparse3d.flexgemm.ops.spconv import sparse_submanifold_conv3d
from shiplap_testing.effort import sampled
from tests.sparse3d.scenes import at, scene

GRID = (7, 6, 8)
MAP = ["hashmap_keys", "hashmap_values"]
# The arguments that each op writes. The first fourteen had been functions of a CUDA extension.
OPS = {
    "hashmap_insert_cuda": MAP,
    "hashmap_lookup_cuda": [],
    "hashmap_insert_3d_cuda": MAP,
    "hashmap_lookup_3d_cuda": [],
    "hashmap_insert_3d_idx_as_val_cuda": MAP,
    "z_order_encode": ["codes"],
    "z_order_decode": [],
    "hilbert_encode": ["codes"],
    "hilbert_decode": [],
    "hashmap_build_grid_sample_3d_nearest_neighbor_map": MAP,
    "hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight": MAP,
    "hashmap_build_submanifold_conv_neighbour_map_cuda": MAP,
    "neighbor_map_post_process_for_masked_implicit_gemm_1": [],
    "neighbor_map_post_process_for_masked_implicit_gemm_2": [],
    "sparse_conv_masked_fwd": [],
    "sparse_conv_masked_bwd": [],
    "sparse_conv_masked_splitk_fwd": [],
    "sparse_conv_masked_splitk_bwd": [],
}


@pytest.fixture
def ops():
    """``torch.ops.flex_gemm`` for the time of a test."""
    with drop_in("flex_gemm"):
        yield torch.ops.flex_gemm


class Layer:
    """A submanifold convolution of a scene, and the same over the dense volume."""

    def __init__(self, voxels: int = 60) -> None:
        self.x = scene(voxels, GRID, 3)
        self.shape = torch.Size((2, 3, *GRID))
        self.leaves = [self.x.feats, torch.randn(4, 3, 3, 3, 3).double(), torch.randn(4).double()]
        self.place = self.x.coords, self.shape

    def cache(self) -> spconv.SubMConv3dNeighborCache:
        return sparse_submanifold_conv3d(self.leaves[0], *self.place, *self.leaves[1:])[1]

    def dense(self, feats: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        volume = self.x.replace(feats).dense()
        return at(torch.nn.functional.conv3d(volume, weight.permute(0, 4, 1, 2, 3), bias, padding=1), self.x.coords)


def compiled_layer(feats, weight, bias, config):
    return sparse_submanifold_conv3d(feats, weight=weight, bias=bias, config=config)


# ------------------------------------------------------------------------------------------------------- the ops


@pytest.mark.parametrize("name", OPS)
def test_an_op_is_registered_and_says_what_it_writes(ops, name):
    arguments = getattr(ops, name).default._schema.arguments
    assert [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write] == OPS[name]


def calls_of_all(ops, coords, points):
    """Return the results of the first fourteen ops over ``coords`` and ``points``, and what they wrote."""
    n, codes = len(coords), [torch.empty(len(coords), dtype=torch.int32) for _ in range(2)]
    keys, values = torch.full((3, 2 * n), -1).view(torch.uint64), torch.zeros(3, 2 * n, dtype=torch.uint32)
    rows = torch.arange(n)
    ops.hashmap_insert_cuda(keys[0], values[0], rows.view(torch.uint64), rows.int().view(torch.uint32))
    ops.hashmap_insert_3d_cuda(keys[1], values[1], coords, rows.int().view(torch.uint32), *GRID)
    ops.hashmap_insert_3d_idx_as_val_cuda(keys[2], values[2], coords, *GRID)
    ops.z_order_encode(coords, 3, codes[0])
    ops.hilbert_encode(coords, 3, codes[1])
    found = [ops.hashmap_lookup_cuda(keys[0], values[0], rows.view(torch.uint64))]
    found += [ops.hashmap_lookup_3d_cuda(keys[i], values[i], coords, *GRID) for i in (1, 2)]
    found += [ops.z_order_decode(codes[0], 3), ops.hilbert_decode(codes[1], 3)]
    maps = [(torch.full((2 * n,), -1).view(torch.uint64), torch.zeros(2 * n, dtype=torch.uint32)) for _ in range(3)]
    found += [ops.hashmap_build_grid_sample_3d_nearest_neighbor_map(*maps[0], coords, points, *GRID)]
    found += ops.hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight(*maps[1], coords, points, *GRID)
    taps = 3, 3, 3, 1, 1, 1
    found += [ops.hashmap_build_submanifold_conv_neighbour_map_cuda(*maps[2], coords, *GRID, *taps)]
    found += ops.neighbor_map_post_process_for_masked_implicit_gemm_1(found[-1].view(torch.int32))
    found += ops.neighbor_map_post_process_for_masked_implicit_gemm_2(found[-5], found[-4], 32)
    return [t.view(torch.int32) if t.dtype == torch.uint32 else t for t in (*found, *codes, *values)]


def test_the_first_fourteen_are_one_graph_with_the_results_of_eager(ops, fresh_compiler):
    """What they write is seen after the graph, and sizes that depend on data are exact."""
    given = scene(60, GRID, 1).coords, torch.rand(2, 5, 3) * 6
    compiled = torch.compile(lambda *given: calls_of_all(ops, *given), fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*given), calls_of_all(ops, *given), strict=True):
        assert torch.equal(got, want)


def test_a_launcher_does_not_call_other_ops_through_the_dispatcher():
    """The first lesson: the inner op would be given fakes, and return garbage."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    x = scene(60, GRID, 3)
    table = x.geometry.subm(3).table
    arguments = {
        "trilinear_map": (x.coords, torch.rand(2, 5, 3) * 6, list(GRID)),
        "masked_gemm_signals": (table,),
        "indice_weighted_sum": (x.feats, table, torch.rand(60, 27)),
        "conv": (x.feats, torch.randn(4, 27, 3).double(), table),
        "out_coords": (x.coords, list(GRID), [3] * 3, [2] * 3, [1] * 3, [1] * 3),
    }
    for name, given in arguments.items():
        seen.clear()
        with Watch():
            getattr(sparse3d, name)(*given)
        assert [s for s in seen if s.startswith("sparse3d::")] == [f"sparse3d::{name}"]


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_sampling_is_one_graph_and_trains(mode, fresh_compiler):
    x, points = scene(60, GRID, 3), torch.rand(2, 9, 3).double() * 6
    feats = x.feats.requires_grad_()

    def sample(feats):
        return flexgemm.ops.grid_sample.grid_sample_3d(feats, x.coords, (2, 3, *GRID), points, mode)

    results = [sample(feats), torch.compile(sample, fullgraph=True, backend="aot_eager")(feats)]
    grads = [torch.autograd.grad(r.square().sum(), feats)[0] for r in results]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*grads)


# ------------------------------------------------------------------------------------------------- the obstacles


def test_a_config_is_tensors_lists_of_tensors_and_integers():
    """In place of a cache, which is an object of Python. All ten fields are there, and the plan of this package."""
    config = Layer().cache().freeze()
    named = "neighbor_map sorted_idx valid_kernels valid_kernel_segs block_sizes valid_signal_i valid_signal_o"
    named += " valid_signal_seg splitk algorithm"
    fields = {f.name for f in dataclasses.fields(config)}
    assert fields == {*named.split(), "plan", "kernel"}
    assert not [name for name in named.split() if callable(getattr(config, name))]
    assert (config.splitk, config.algorithm) == (1, "masked_implicit_gemm_splitk")
    assert list(inspect.signature(spconv.SubMConv3dNeighborCache.freeze).parameters) == ["self", "splitk", "algorithm"]


def test_lists_of_taps_are_there_for_every_block_size(ops):
    """In place of a callback by block size."""
    config = Layer().cache().freeze()
    assert config.block_sizes == [32, 64, 128, 256]
    code = ops.neighbor_map_post_process_for_masked_implicit_gemm_1(config.neighbor_map)[0]
    for size, taps, ends in zip(config.block_sizes, config.valid_kernels, config.valid_kernel_segs, strict=True):
        wanted = ops.neighbor_map_post_process_for_masked_implicit_gemm_2(code, config.sorted_idx, size)
        assert torch.equal(taps, wanted[0])
        assert torch.equal(ends, wanted[1])


def test_the_algorithm_is_a_field_and_no_global():
    cache = Layer().cache()
    for algorithm in spconv.ALGORITHMS:
        spconv.set_algorithm("explicit_gemm")
        assert cache.freeze(1, algorithm).algorithm == algorithm


@pytest.mark.parametrize("splitk", [1, 3])
def test_the_number_of_splits_is_a_field_that_is_obeyed(splitk):
    """The third lesson: a number that is given is not tuned again."""
    config = Layer().cache().freeze(splitk)
    assert config.splitk == splitk
    assert splitk == 1 or config.plan.order.shape[0] == splitk
    with pytest.raises(ValueError, match="SL208"):
        Layer().cache().freeze(0)


@pytest.mark.parametrize("needs", sampled([(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)], 2))
def test_gradients_are_those_that_are_needed(needs, fresh_compiler):
    """The second lesson: a kernel that looks at ``requires_grad`` sees False."""
    layer = Layer()
    leaves = [t.clone().requires_grad_(bool(need)) for t, need in zip(layer.leaves, needs, strict=True)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    run = torch.compile(compiled_layer, fullgraph=True, backend="aot_eager")
    results = run(*leaves, layer.cache().freeze()), layer.dense(*leaves)
    grads = [torch.autograd.grad(result.square().sum(), wanted) for result in results]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


# -------------------------------------------------------------------------------------------------- the surface


def test_the_first_call_returns_a_cache_and_that_with_a_config_only_the_result():
    layer = Layer()
    out, cache = sparse_submanifold_conv3d(layer.leaves[0], *layer.place, *layer.leaves[1:])
    torch.testing.assert_close(out, layer.dense(*layer.leaves))
    again, same = sparse_submanifold_conv3d(layer.leaves[0], *layer.place, *layer.leaves[1:], cache)
    assert same is cache
    assert torch.equal(again, out)
    torch.testing.assert_close(compiled_layer(*layer.leaves, cache.freeze()), out)


def test_a_config_of_another_scene_is_the_same_graph(fresh_compiler):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    run = torch.compile(compiled_layer, fullgraph=True, backend=backend, dynamic=True)
    for voxels in (50, 100, 150):
        layer = Layer(voxels)
        torch.testing.assert_close(run(*layer.leaves, layer.cache().freeze()), layer.dense(*layer.leaves))
    assert len(graphs) == 1


@pytest.mark.long
def test_transforms_and_second_derivatives_work_with_a_config():
    """The fourth lesson is of ``autograd.Function``. These would show one that saves or marks the wrong tensors."""
    layer = Layer()
    config, (feats, weight, bias) = layer.cache().freeze(), layer.leaves

    def run(x):
        return compiled_layer(x, weight, bias, config)

    batch = torch.stack([feats, 2 * feats])
    torch.testing.assert_close(torch.func.vmap(run)(batch)[1], run(batch[1]))
    tangent = torch.randn_like(feats)
    torch.testing.assert_close(torch.func.jvp(run, (feats,), (tangent,))[1], run(tangent) - bias)
    assert torch.autograd.gradgradcheck(lambda x: run(x).sin(), feats[:].requires_grad_(), atol=1e-4)
