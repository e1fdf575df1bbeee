"""The classes of one tile: its points and those of its halo → features → voxels → the network → its own points."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiplap_sparse3d.geometry import Triple
from shiplap_sparse3d.survey.buckets import Buckets, Grid, within
from shiplap_sparse3d.survey.folder import POINT, RESULT, Folder, Tile
from shiplap_sparse3d.survey.model import Points, SurveyModel
from shiplap_sparse3d.survey.tiles import Box, Tiling

__all__ = ["Question", "points_of", "points_within", "predicted", "read_tile"]

_BLOCK = 1 << 18  # points of a neighbouring bucket in memory at a time


@dataclass(frozen=True)
class Question:
    """What the network is asked about one tile, in the memory of the host.

    Attributes:
        index: ``int64 [c]``, the numbers in the file of the points of the tile.
        cells, feats: ``int32 [p, 3]`` and ``float32 [p, f]`` of these points and of those around them, in ``grid``.
        wanted: ``bool [p]``, which of them are those of the tile.
    """

    index: np.ndarray[Any, Any]
    cells: Tensor
    feats: Tensor
    grid: Triple
    wanted: Tensor


def read_tile(model: SurveyModel, folder: Folder, buckets: Buckets, grid: Grid, tiling: Tiling, tile: Tile) -> Question:
    """The points of ``tile`` and around it, and their features. Needs no device."""
    box = tiling.grid(tile, buckets.extent)
    rows = points_within(model, folder, buckets, grid, tiling, tile, box)
    cells = grid.cells(rows["raw"])
    (left, right), (low, high) = tiling.core(tile)
    core = within(cells, (left, low), (right, high))
    cells -= np.array(box.origin)
    inside = within(cells, (0, 0, 0), box.shape)
    feats = model.features_of(points_of(rows, grid))[torch.from_numpy(inside)]
    local = torch.from_numpy(cells[inside].astype(np.int32))
    return Question(rows["index"][core], local, feats, box.shape, torch.from_numpy(core[inside]))


def predicted(model: SurveyModel, question: Question) -> np.ndarray[Any, Any]:
    """The classes of the points of a tile, by their number in the file: ``[c]`` of :data:`RESULT`."""
    codes = torch.tensor(model.classes, dtype=torch.uint8)
    result = np.empty(len(question.index), RESULT)
    result["index"] = question.index
    result["code"] = codes[_logits(model, question).argmax(1).cpu()].numpy()
    return result


def points_within(
    model: SurveyModel, folder: Folder, buckets: Buckets, grid: Grid, tiling: Tiling, tile: Tile, box: Box
) -> np.ndarray[Any, Any]:
    """Points of ``box`` and of the context around it, in the order of the file, so that sums are always the same."""
    margin = math.ceil(model.context / min(model.voxel[:2])) + 1 if model.context else 0
    low = [first - margin for first in box.origin[:2]]
    high = [first + cells + margin for first, cells in zip(box.origin[:2], box.shape[:2], strict=True)]
    parts = []
    for other in tiling.around(tile, margin):
        if other in buckets.sizes:
            parts += _cut(folder.bucket(other), grid, low, high)
    rows = np.concatenate(parts) if parts else np.empty(0, POINT)
    return rows[np.argsort(rows["index"], kind="stable")]


def _cut(path: Path, grid: Grid, low: list[int], high: list[int]) -> list[np.ndarray[Any, Any]]:
    parts = []
    with path.open("rb") as file:
        while len(block := np.fromfile(file, POINT, _BLOCK)):
            parts.append(block[within(grid.cells(block["raw"]), low, high)])
    return parts


def _logits(model: SurveyModel, question: Question) -> Tensor:
    """Of the points of the tile, on the device of the network."""
    device = model.device
    logits = model.logits(question.cells.to(device), question.feats.to(device), question.grid)
    return logits[question.wanted.to(device)]


def points_of(rows: np.ndarray[Any, Any], grid: Grid) -> Points:
    """What features are made of."""
    xyz = torch.from_numpy(grid.xyz(rows["raw"]))
    names = "intensity", "return_number", "number_of_returns"
    intensity, number, returns = (torch.from_numpy(rows[name].astype(np.int64)) for name in names)
    return Points(xyz, intensity, number, returns)
