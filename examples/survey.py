"""Classify a scan tile by tile, in constant memory: python examples/survey.py"""

import tempfile
from pathlib import Path

# --8<-- [start:model]
import torch
from torch import nn

import shiplap_sparse3d as sparse3d
from shiplap_sparse3d.survey import SurveyModel


class Net(nn.Module):
    """A U-Net of two levels: it sees 5 voxels around each, and its stride is 2."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = sparse3d.SubMConv3d(5, channels, 3)
        self.down = sparse3d.SparseConv3d(channels, channels, 2, stride=2)
        self.coarse = sparse3d.SubMConv3d(channels, channels, 3)
        self.up = sparse3d.SparseInverseConv3d(channels, channels, 2)
        self.head = sparse3d.SubMConv3d(channels, classes, 3)

    def forward(self, x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
        x = self.stem(x)
        return self.head(x + self.up(self.coarse(self.down(x))))


torch.manual_seed(0)  # a real model loads its weights here
model = SurveyModel(Net(8, 2), voxel=(6.0, 6.0, 6.0), classes=(1, 2))
# --8<-- [end:model]


def classify(source: Path, folder: Path) -> None:
    # --8<-- [start:classify]
    from shiplap_sparse3d.survey import survey

    result = survey(source, folder / "out.laz", model, tile=64)
    print(
        f"{result.points:,} points in {result.tiles} tiles "
        f"with a halo of {result.halo} voxels"
    )
    # --8<-- [end:classify]


def learn(source: Path, folder: Path) -> None:
    # --8<-- [start:learn]
    from shiplap_sparse3d.survey import prepare

    manifest = prepare(source, folder / "tiles", model, tile=64)
    optimizer = torch.optim.AdamW(model.net.parameters(), 1e-3)
    losses = []
    for _ in range(2):
        losses.append(0.0)
        for tile in manifest.tiles:
            cells, features, grid, labels = manifest.batch(tile)
            logits = model.forward(cells, features, grid)
            loss = nn.functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1] += loss.item() / len(manifest.tiles)
    print(f"loss {losses[0]:.2f}, then {losses[-1]:.2f}")
    # --8<-- [end:learn]


if __name__ == "__main__":
    scan = Path(sparse3d.__file__).parent / "demo" / "data" / "autzen_trim.laz"
    with tempfile.TemporaryDirectory() as name:
        classify(scan, Path(name))
        learn(scan, Path(name))
