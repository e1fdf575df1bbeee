"""Maps and strided steps that sort, under torch's profiler, until a damaged heap would have ended the process."""

from __future__ import annotations

import torch

import shiplap_sparse3d as sparse3d
from shiplap.kernels.native import binding
from shiplap_sparse3d import bounded, planning


def main() -> None:
    cells = torch.randperm(64**3)[:40_000]
    coords = torch.stack([cells * 0, cells // 64**2, cells // 64 % 64, cells % 64], 1).int().cuda()
    sorting = bounded.voxels_of_keys, planning.subm_plan, planning.conv_plan
    for op in (bounded.first_voxels, bounded.reached_keys, *sorting):
        binding.build(op)
    step = coords, [64] * 3, [3] * 3, [2] * 3, [1] * 3, [1] * 3
    for _ in range(30):
        with torch.profiler.profile() as profiled:
            for _ in range(6):
                geometry = sparse3d.Geometry(coords, 64, 1)
                geometry.subm(3)
                geometry.strided(3, 2, 1)
                bounded.voxels_of_keys(bounded.reached_keys(*step, len(coords))[0], [32] * 3)
            torch.cuda.synchronize()
        assert any("radixsort" in event.key.lower() for event in profiled.key_averages()), "nothing was sorted"
    print("done")


main()
