"""A second process finds the graph that a first one compiled from spconv's layers."""

import os

import pytest

from shiplap_testing.forked import WITH_FAMILIES, python

PROGRAM = """
import torch
import shiplap_sparse3d.spconv as spconv
from torch._dynamo.utils import counters

torch.manual_seed(0)
net = spconv.SparseSequential(
    spconv.SubMConv3d(4, 8, 3, indice_key="a"), torch.nn.BatchNorm1d(8),
    spconv.SparseConv3d(8, 8, 2, 2, indice_key="d"), torch.nn.ReLU(),
).eval()
coords = torch.tensor([[0, i, j, (i * j) % 6] for i in range(6) for j in range(6)], dtype=torch.int32)
feats = torch.ones(36, 4)
for tensor in (coords, feats):
    torch._dynamo.mark_dynamic(tensor, 0)
with torch.no_grad():
    run = lambda f, c: net(spconv.SparseConvTensor(f, c, [6, 6, 6], 1)).features
    assert torch.allclose(torch.compile(run)(feats, coords), run(feats, coords), atol=1e-5)
print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_bypass"])
"""


@pytest.mark.long
def test_a_second_process_finds_the_graph(tmp_path):
    """On torch 2.11 a graph that asserts something with torch._check was not cached."""
    caches = {name: str(tmp_path) for name in ("SHIPLAP_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    hits = []
    for _ in range(2):
        done = python("-c", PROGRAM, env={**os.environ, **caches}, imported=WITH_FAMILIES)
        assert done.returncode == 0, done.stderr[-3000:]
        hits.append(done.stdout.split()[-2:])
    assert hits == [["0", "0"], ["1", "0"]]
