"""A model written for spconv, on shiplap: one import differs.

Run: python examples/spconv_model.py
"""

import torch
from torch import nn

# --8<-- [start:switch]
import shiplap_sparse3d.spconv as spconv  # was: import spconv.pytorch as spconv

# --8<-- [end:switch]


# --8<-- [start:model]
def block(ci: int, co: int, key: str) -> spconv.SparseSequential:
    return spconv.SparseSequential(
        spconv.SubMConv3d(ci, co, 3, padding=1, bias=False, indice_key=key),
        nn.BatchNorm1d(co),
        nn.ReLU(),
    )


class Residual(spconv.SparseModule):
    """Two submanifold convolutions on the same voxels, around which the input is
    added."""

    def __init__(self, channels: int, key: str) -> None:
        super().__init__()
        self.conv1 = spconv.SubMConv3d(
            channels, channels, 3, padding=1, bias=False, indice_key=key
        )
        self.bn1 = nn.BatchNorm1d(channels)
        self.conv2 = spconv.SubMConv3d(
            channels, channels, 3, padding=1, bias=False, indice_key=key
        )
        self.bn2 = nn.BatchNorm1d(channels)

    def forward(self, x: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
        out = self.conv1(x)
        out = out.replace_feature(torch.relu(self.bn1(out.features)))
        out = self.conv2(out)
        return out.replace_feature(torch.relu(self.bn2(out.features) + x.features))


class Second(nn.Module):
    """The middle of a detector: voxel features in, a bird's eye view out, and features
    of each voxel."""

    def __init__(
        self, channels: int = 4, grid: tuple[int, int, int] = (11, 40, 32)
    ) -> None:
        super().__init__()
        self.grid = grid
        self.stem = spconv.SparseSequential(
            block(channels, 16, "subm1"), Residual(16, "subm1")
        )
        self.down = spconv.SparseSequential(
            spconv.SparseConv3d(
                16, 32, 3, stride=2, padding=1, bias=False, indice_key="down"
            ),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            block(32, 32, "subm2"),
        )
        self.up = spconv.SparseSequential(
            spconv.SparseInverseConv3d(32, 16, 3, indice_key="down"), nn.ReLU()
        )
        self.flat = spconv.SparseSequential(
            spconv.SparseConv3d(32, 32, (3, 1, 1), stride=(2, 1, 1), bias=False),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            spconv.ToDense(),
        )

    def forward(self, features: torch.Tensor, indices: torch.Tensor, batch_size: int):
        x = spconv.SparseConvTensor(features, indices, self.grid, batch_size)
        fine = self.stem(x)
        coarse = self.down(fine)
        seen = self.flat(coarse)
        return seen.flatten(1, 2), fine.features + self.up(coarse).features


# --8<-- [end:model]


def scene(
    n: int, grid: tuple[int, int, int], batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and indices (batch, z, y, x) of ``n`` voxels."""
    cells = torch.randperm(batch_size * grid[0] * grid[1] * grid[2])[:n]
    return torch.randn(n, 4), torch.stack(
        torch.unravel_index(cells, (batch_size, *grid)), 1
    ).int()


def main() -> None:
    torch.manual_seed(0)
    model = Second().eval()
    # --8<-- [start:compile]
    # no break, and any number of voxels
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    # --8<-- [end:compile]
    with torch.no_grad():
        for n in (900, 800):
            features, indices = scene(n, model.grid, 2)
            expected = model(features, indices, 2)
            view, points = compiled(features, indices, 2)
            torch.testing.assert_close((view, points), expected, rtol=1e-4, atol=1e-5)
    print(
        f"one graph: {tuple(view.shape)} seen from above, "
        f"{tuple(points.shape)} on the voxels"
    )


if __name__ == "__main__":
    main()
