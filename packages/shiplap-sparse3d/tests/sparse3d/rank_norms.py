"""Norms with statistics of several ranks: second derivatives, and evaluation without running statistics.

``tests/sparse3d/test_ranks.py`` runs these cells by gloo on the CPU. They are in no table of the documentation.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shiplap_sparse3d as sparse3d
from shiplap_testing.ranks import cell, device, main
from tests.sparse3d.rank_cells import scenes


def second_gradients(norm: nn.Module, x: sparse3d.SparseTensor) -> tuple[Tensor, ...]:
    """Return the gradients of the squared norm of a gradient, for the features and for the weight of ``norm``."""
    feats = x.feats.detach().clone().requires_grad_()
    out = norm(x.replace(feats))
    (first,) = torch.autograd.grad(out.feats.pow(3).sum(), feats, create_graph=True)
    return torch.autograd.grad(first.square().sum(), (feats, norm.weight))


def run_second_derivative(rank: int, world: int) -> str:
    """Compare the second derivatives of a norm on several ranks with those of one process with all voxels."""
    inputs = scenes(world)
    alone, parallel = (kind(4).double().to(device()) for kind in (sparse3d.BatchNorm, sparse3d.SyncBatchNorm))
    feats, weight = second_gradients(alone, sparse3d.cat(inputs, 0))
    own, part = second_gradients(parallel, inputs[rank])
    dist.all_reduce(part)
    before = sum(len(x.feats) for x in inputs[:rank])
    torch.testing.assert_close(own, feats[before : before + len(own)], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(part, weight, rtol=1e-9, atol=1e-9)
    return "1e-9"


def run_evaluation_alone(rank: int, world: int, *, torchs: bool) -> str:
    """Evaluate a norm without running statistics on rank 0 alone. Other ranks do not call it."""
    kind = nn.SyncBatchNorm if torchs else sparse3d.SyncBatchNorm
    norm = kind(4, track_running_stats=False).double().to(device()).eval()
    x = scenes(world)[rank]
    if rank == 0:
        got = sparse3d.Sequential(norm)(x).feats
        torch.testing.assert_close(got, norm(x.feats) if torchs else sparse3d.BatchNorm(4).double()(x).feats)
    return "the same"


cell("second derivative")(run_second_derivative)
cell("evaluation alone")(partial(run_evaluation_alone, torchs=False))
cell("evaluation alone, torch's norm")(partial(run_evaluation_alone, torchs=True))

if __name__ == "__main__":
    main()
