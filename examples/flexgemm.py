"""FlexGEMM's calls on shiplap: python examples/flexgemm.py"""

import torch

import shiplap_sparse3d.flexgemm as flex_gemm
from shiplap_sparse3d.flexgemm.ops.spconv import (
    Algorithm,
    sparse_conv3d,
    sparse_submanifold_conv3d,
)


def shell(resolution: int) -> torch.Tensor:
    """Voxels of a sphere's surface, ``int32 [n, 4]``."""
    cells = torch.cartesian_prod(*[torch.arange(resolution)] * 3)
    radius = (cells - resolution / 2 + 0.5).norm(dim=1)
    cells = cells[(radius >= resolution / 2 - 1.25) & (radius <= resolution / 2)]
    return torch.cat([torch.zeros(len(cells), 1), cells], 1).int()


coords = shell(16)
feats, shape = torch.randn(len(coords), 8), torch.Size((1, 8, 16, 16, 16))
weight = torch.randn(8, 3, 3, 3, 8, requires_grad=True)

# --8<-- [start:legacy]
# builds the neighbour map
out, cache = sparse_submanifold_conv3d(feats, coords, shape, weight)
# another layer on the same voxels
out, _ = sparse_submanifold_conv3d(out, coords, shape, weight, None, cache)
down, down_coords, _ = sparse_conv3d(
    out, coords, shape, weight, stride=(2, 2, 2), padding=(1, 1, 1)
)
# --8<-- [end:legacy]

# --8<-- [start:second]
inner = flex_gemm.nn.SubmanifoldConv3d(8, 16, 3)
halve = flex_gemm.nn.SparsePool3d(2, reduce="max")
double = flex_gemm.nn.SparseConvTranspose3d(16, 8, 2, stride=2)

channels_last = torch.Size((1, 16, 16, 16, 8))
x, _ = inner(feats, coords, channels_last)
low, low_coords, low_shape, neighbors = halve(x, coords, channels_last)
# back onto the same voxels, with the same neighbours
up, up_coords, up_shape, _ = double(
    low, low_coords, low_shape, neighbor_cache=neighbors.T
)
# --8<-- [end:second]

# --8<-- [start:compiled]
config = cache.freeze(algorithm=Algorithm.MASKED_IMPLICIT_GEMM)  # tensors and integers


@torch.compile(fullgraph=True)
def layer(feats, weight, config):
    return sparse_submanifold_conv3d(feats, weight=weight, config=config).relu()


layer(feats, weight, config).sum().backward()
# --8<-- [end:compiled]

# --8<-- [start:sample]
points = torch.rand(1, 100, 3) * 16
features = flex_gemm.ops.grid_sample.grid_sample_3d(out, coords, shape, points)
codes = flex_gemm.ops.serialize.encode_seq(coords, shape, "hilbert")
# --8<-- [end:sample]

if __name__ == "__main__":
    assert torch.equal(
        flex_gemm.ops.serialize.decode_seq(codes, shape, "hilbert"), coords
    )
    print(
        f"{len(coords)} voxels, {len(down_coords)} after a step of 2, "
        f"{features.shape[1]} points sampled"
    )
