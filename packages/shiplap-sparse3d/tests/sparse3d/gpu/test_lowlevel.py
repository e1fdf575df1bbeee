"""Hash maps, curves, grid sampling, post-processing and the FlexGEMM facade on a GPU."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap import torch_private
from shiplap_sparse3d.flexgemm.ops.spconv import ALGORITHMS, Algorithm, sparse_conv3d, sparse_submanifold_conv3d
from tests.sparse3d.lowlevel_cases import OPS, cases, disagreements
from tests.sparse3d.scenes import scene

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GRID = (40, 41, 42)


def free(gigabytes: int) -> bool:
    return torch.cuda.mem_get_info()[0] > gigabytes << 30


@pytest.mark.parametrize("name", OPS)
def test_a_kernel_agrees_with_the_reference(name):
    assert disagreements(name, random.randrange(2**31), "cuda") == []
    sparse3d.synchronize()


@pytest.mark.parametrize("name", OPS)
def test_nothing_waits_for_the_device(name):
    op = getattr(sparse3d, name)
    args = [case.fresh() for case in [*cases(op, 3, "cuda")][:30]]
    for values in args:
        op(*values)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for values in args:
            op(*values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    sparse3d.synchronize()


def test_a_million_keys_from_all_threads_make_the_table_of_one():
    keys = torch.randint(1, 600_000, (1_000_000,)) * 0x1E3779B97F4A7C15 & 2**63 - 1  # many of them more than once
    values = torch.randint(0, 2**31 - 1, (len(keys),), dtype=torch.int32)
    here, there = sparse3d.init_hashmap(len(keys)), sparse3d.init_hashmap(len(keys), "cuda")
    sparse3d.hash_insert(*here, keys, values)
    for part in (slice(0, 300_000), slice(300_000, None)):
        sparse3d.hash_insert(*there, keys[part].cuda(), values[part].cuda())
    assert torch.equal(there[0].cpu(), here[0])
    assert torch.equal(there[1].cpu(), here[1])
    slots = sparse3d.hash_lookup(*there, torch.cat([keys, -2 - keys]).cuda()).cpu()
    assert torch.equal(slots[: len(keys)], sparse3d.hash_lookup(*here, keys))
    assert (slots[len(keys) :] == -1).all()
    sparse3d.synchronize()


LATE = {
    "full": lambda c: sparse3d.hash_insert_3d_index(*(t[:5] for t in sparse3d.init_hashmap(9, "cuda")), c, [9, 9, 9]),
    "outside": lambda c: sparse3d.hash_insert_3d_index(*sparse3d.init_hashmap(99, "cuda"), c + 5, [9, 9, 9]),
    "code": lambda c: sparse3d.hilbert_encode(c, 2),
    "decode": lambda c: sparse3d.z_order_decode(-2 - c[:, 1].long(), 4),
    "twice": lambda c: sparse3d.nearest_map(torch.cat([c, c[7:8]]), torch.rand(1, 4, 3).cuda(), [9, 9, 9]),
    "index": lambda c: sparse3d.indice_weighted_sum(torch.ones(3, 4).cuda(), c, torch.ones(len(c), 4).cuda()),
    "index of the gradient": lambda c: sparse3d.indice_weighted_sum_grad(
        torch.ones(len(c), 4).cuda(), c, torch.ones(len(c), 4).cuda(), 3
    ),
    "row": lambda c: sparse3d.masked_gemm_kernels(c[:, 1].contiguous(), c[:, 1].long() + 70, 8),
}


@pytest.mark.parametrize("case", LATE)
def test_what_was_wrong_is_told_later_and_once(case):
    coords = torch.cartesian_prod(torch.arange(1), *[torch.arange(4, 8)] * 3).int().cuda()
    sparse3d.synchronize()
    LATE[case](coords)
    with pytest.raises(sl.ShiplapError, match="SL211"):
        sparse3d.synchronize()
    sparse3d.synchronize()
    good = sparse3d.encode_seq(coords, (1, 1, 8, 8, 8), "hilbert")  # the device has survived it
    assert torch.equal(sparse3d.decode_seq(good, (1, 1, 8, 8, 8), "hilbert"), coords)


@pytest.mark.whole_device
def test_sums_of_more_than_2_to_the_31_elements():
    if not free(40):
        pytest.skip("needs 40 GiB")
    rows, channels = 2_100_000, 1024
    feats = torch.randn(rows, channels, device="cuda", dtype=torch.float16)
    indices = torch.arange(rows - 1, -1, -1, device="cuda", dtype=torch.int32)[:, None]
    weights = torch.ones(rows, 1, device="cuda")
    out = sparse3d.indice_weighted_sum(feats, indices, weights)
    for row in (0, 1, rows // 2, rows - 1):
        assert torch.equal(out[row], feats[rows - 1 - row])
    grad = sparse3d.indice_weighted_sum_grad(out, indices, weights, rows)
    assert torch.equal(grad[-3:], feats[-3:])
    assert torch.equal(grad[:3], feats[:3])


@pytest.mark.whole_device
def test_tables_of_more_than_2_to_the_31_entries():
    if not free(60):
        pytest.skip("needs 60 GiB")
    n, v = 80_000_000, 27
    table = torch.full((n, v), -1, dtype=torch.int32, device="cuda")
    table[-1, 26], table[0, 26], table[-2, 0] = 5, 6, 7
    codes, order, inputs, outputs, ends = sparse3d.masked_gemm_signals(table)
    assert inputs[:4].tolist() == [7, 6, 5, -1]
    assert outputs[:4].tolist() == [n - 2, 0, n - 1, -1]
    assert ends.tolist() == [0, *[1] * 26, 3]
    assert order[-3:].tolist() in ([n - 2, 0, n - 1],)
    assert int(codes[-1]) == 1 << 26


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["trilinear", "nearest"])
def test_grid_sample_and_its_gradient_are_those_of_the_cpu(mode, dtype):
    """Bit-equal between two runs, from the first one on."""
    x = scene(20_000, GRID, 48, dtype=torch.float64)
    queries = torch.rand(2, 5000, 3) * 44 - 2
    queries[:, :500] = 7.3  # one voxel with many queries
    shape, results = (2, 48, *GRID), []
    weight = torch.randn(2, 5000, 48).to(dtype).double()
    exact = x.feats.to(dtype).double().requires_grad_()
    want = sparse3d.grid_sample_3d(exact, x.coords, shape, queries, mode)
    (want_grad,) = torch.autograd.grad(want, exact, weight)
    for _ in range(2):
        feats = x.feats.to("cuda", dtype).requires_grad_()
        out = sparse3d.grid_sample_3d(feats, x.coords.cuda(), shape, queries.cuda(), mode)
        results.append((out.detach(), *torch.autograd.grad(out, feats, weight.to("cuda", dtype))))
    for first, second, exactly in zip(*results, (want.detach(), want_grad), strict=True):
        assert torch.equal(first, second)
        rounding = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(
            first.double().cpu(), exactly, rtol=rounding, atol=rounding * float(exactly.abs().max())
        )


def test_a_captured_graph_follows_voxels_queries_and_features():
    first, second = (scene(500, GRID, 8, dtype=torch.float32) for _ in range(2))
    coords, feats = first.coords.cuda(), first.feats.cuda()
    queries = torch.rand(2, 300, 3, device="cuda") * 40

    def run():
        leaf = feats.detach().requires_grad_()
        out = sparse3d.grid_sample_3d(leaf, coords, (2, 8, *GRID), queries)
        codes = sparse3d.encode_seq(coords, (2, 8, *GRID), "hilbert")
        table = sparse3d.subm_table(coords, list(GRID), [3, 3, 3], [1, 1, 1])
        signals = sparse3d.masked_gemm_signals(table)
        taps = sparse3d.masked_gemm_kernels(*signals[:2], 64)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaf), codes, *signals, *taps

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    coords.copy_(second.coords)
    feats.copy_(second.feats)
    queries.copy_(torch.rand(2, 300, 3) * 40)
    graph.replay()
    for got, want in zip(captured, run(), strict=True):
        assert torch.equal(got, want)
    sparse3d.synchronize()


def test_training_from_coordinates_to_samples_is_one_graph():
    torch_private.reset_compiler()

    def loss(feats, coords, weight, queries):
        shape = (2, 16, *GRID)
        out, cache = sparse_submanifold_conv3d(feats, coords, shape, weight)
        out, _ = sparse_submanifold_conv3d(out.relu(), coords, shape, weight, None, cache)
        return sparse3d.grid_sample_3d(out, coords, shape, queries).square().mean()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    queries = torch.rand(2, 200, 3, device="cuda") * 40
    for n in (3000, 5000, 7000):
        x = scene(n, GRID, 16, dtype=torch.float32)
        leaves = [x.feats.cuda().requires_grad_(), (torch.randn(16, 3, 3, 3, 16) / 20).cuda().requires_grad_()]
        grads = [
            torch.autograd.grad(f(leaves[0], x.coords.cuda(), leaves[1], queries), leaves) for f in (compiled, loss)
        ]
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", [(3, 3, 3), (2, 2, 2), (5, 3, 1)])
def test_algorithms_of_the_facade_agree(kernel, dtype):
    x = scene(4000, GRID, 32, dtype=torch.float32)
    weight, shape, results = torch.randn(48, *kernel, 32) / 20, (2, 32, *GRID), {}
    for algorithm in ALGORITHMS:
        leaves = [x.feats.to("cuda", dtype).requires_grad_(), weight.to("cuda", dtype).requires_grad_()]
        out, _ = sparse_submanifold_conv3d(leaves[0], x.coords.cuda(), shape, leaves[1], algorithm=algorithm)
        down, coords, _ = sparse_conv3d(
            leaves[0], x.coords.cuda(), shape, leaves[1], stride=(2, 2, 2), padding=(1, 1, 1), algorithm=algorithm
        )
        total = out.float().square().mean() + down.float().square().mean()
        results[algorithm] = (out.detach(), down.detach(), coords, *torch.autograd.grad(total, leaves))
    rounding = {torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    for first, second in pairwise(results.values()):
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b, rtol=rounding, atol=rounding * float(b.abs().max()))


def test_a_frozen_cache_is_sorted_for_the_masked_algorithms():
    x = scene(300, GRID, 8, dtype=torch.float32)
    _, cache = sparse_submanifold_conv3d(
        x.feats.cuda(), x.coords.cuda(), (2, 8, *GRID), torch.randn(8, 3, 3, 3, 8, device="cuda")
    )
    assert cache.freeze().plan.order is not None
    assert cache.freeze(algorithm=Algorithm.IMPLICIT_GEMM).plan.order is None
