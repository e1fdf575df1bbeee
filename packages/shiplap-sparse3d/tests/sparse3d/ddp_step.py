"""One training step under DistributedDataParallel against the same step in one process: torchrun ddp_step.py"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import shiplap_sparse3d as sparse3d
from tests.sparse3d.scenes import scene


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = sparse3d.Sequential(
            sparse3d.SubMConv3d(4, 8, 3),
            nn.ReLU(),
            sparse3d.SparseConv3d(8, 8, 2, 2),
            sparse3d.BatchNorm(8),
            sparse3d.SparseMaxPool3d(3, 1, 1),
            sparse3d.SparseConvTranspose3d(8, 6, 2, 2),
            sparse3d.GlobalPool("avg"),
        ).double()

    def forward(self, x: sparse3d.SparseTensor) -> torch.Tensor:
        return self.layers(x)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Net().train()
    scenes = [scene(60 + 20 * r, (8, 8, 8), 4, seed=r) for r in range(world)]
    wanted = [torch.zeros_like(p) for p in net.parameters()]
    for x in scenes:  # batch statistics are those of a rank, as torch's are
        grads = torch.autograd.grad(net(x).square().sum() / world, list(net.parameters()))
        wanted = [w + g for w, g in zip(wanted, grads, strict=True)]
    parallel = nn.parallel.DistributedDataParallel(net)
    for _ in range(2):  # buffers of rank 0 reach the others
        net.zero_grad()
        parallel(scenes[rank]).square().sum().backward()
    for p, w in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, w, rtol=1e-10, atol=1e-10)
    dist.barrier()
    if rank == 0:
        print(f"gradients of {world} processes are those of one")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
