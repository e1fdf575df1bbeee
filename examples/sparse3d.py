"""A sparse 3D network from points to a trained, compiled and exported model.

Run: python examples/sparse3d.py
"""

# --8<-- [start:network]
import torch
from torch import nn

import shiplap_sparse3d as sparse3d

points, colours = torch.rand(500, 3), torch.rand(500, 3)
x, inverse = sparse3d.voxelize(
    points, colours, 0.1, origin=(0, 0, 0), spatial_shape=(10, 10, 10), batch_size=1
)

net = sparse3d.Sequential(
    sparse3d.SubMConv3d(3, 16, 3),
    sparse3d.BatchNorm(16),
    nn.ReLU(),
    sparse3d.SparseConv3d(16, 32, 2, stride=2),
    nn.ReLU(),
    sparse3d.SparseInverseConv3d(32, 4, 2),
)
logits = net(x).feats[inverse.long()]  # one row a point
# --8<-- [end:network]


def compile_it() -> None:
    # --8<-- [start:compile]
    step = torch.compile(
        lambda x: net(x).feats.square().mean(), fullgraph=True, dynamic=True
    )
    for count in (500, 300):
        cloud = torch.rand(count, 3)
        x, _ = sparse3d.voxelize(
            cloud,
            cloud,
            0.1,
            origin=(0, 0, 0),
            spatial_shape=(10, 10, 10),
            batch_size=1,
        )
        step(x).backward()
    # --8<-- [end:compile]
    print("trained in one graph")


# --8<-- [start:capacity]
class Fixed(nn.Module):
    """The network with tensors in and out, all of fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net

    def forward(self, feats: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        y = self.net(sparse3d.SparseTensor(feats, coords, (10, 10, 10), padded=True))
        return torch.where(y.is_voxel, y.feats, 0)


def export_it() -> None:
    padded = x.pad(1000)  # 1000 rows: the voxels, then padding
    program = torch.export.export(Fixed().eval(), (padded.feats, padded.coords))
    rows = program.module()(padded.feats, padded.coords)
    # --8<-- [end:capacity]
    torch.testing.assert_close(rows[: x.feats.shape[0]], net.eval()(x).feats)
    assert not rows[x.feats.shape[0] :].any()
    print(
        f"exported with {rows.shape[0]} rows, "
        f"{int((rows != 0).any(1).sum())} of them voxels"
    )


if __name__ == "__main__":
    assert logits.shape == (500, 4)
    print(x)
    compile_it()
    export_it()
