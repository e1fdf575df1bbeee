"""The classes of one tile: its points and those of its halo → features → voxels → the network → its own points."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shiplap_sparse3d.survey.buckets import Buckets, Grid
from shiplap_sparse3d.survey.folder import POINT, RESULT, Folder, Tile
from shiplap_sparse3d.survey.model import Points, SurveyModel
from shiplap_sparse3d.survey.tiles import Box, Tiling

__all__ = ["classify", "points_of", "points_within", "predict_tile"]

_BLOCK = 1 << 18  # points of a neighbouring bucket in memory at a time


def predict_tile(
    model: SurveyModel, folder: Folder, buckets: Buckets, grid: Grid, tiling: Tiling, tile: Tile
) -> np.ndarray[Any, Any]:
    """The classes of the points of ``tile``, by their number in the file: ``[p]`` of :data:`RESULT`."""
    box = tiling.grid(tile, buckets.extent)
    rows = points_within(model, folder, buckets, grid, tiling, tile, box)
    cells = grid.cells(rows["raw"])
    core = np.ones(len(rows), bool)
    for axis, (first, end) in enumerate(tiling.core(tile)):
        core &= (cells[:, axis] >= first) & (cells[:, axis] < end)
    codes = classify(model, rows, cells, grid, box, core)
    result = np.empty(len(codes), RESULT)
    result["index"], result["code"] = rows["index"][core], codes
    return result


def points_within(
    model: SurveyModel, folder: Folder, buckets: Buckets, grid: Grid, tiling: Tiling, tile: Tile, box: Box
) -> np.ndarray[Any, Any]:
    """Points of ``box`` and of the context around it, in the order of the file, so that sums are always the same."""
    margin = math.ceil(model.context / min(model.voxel[:2])) + 1 if model.context else 0
    low = np.array(box.origin[:2]) - margin
    high = np.array(box.origin[:2]) + np.array(box.shape[:2]) + margin
    parts = []
    for other in tiling.around(tile, margin):
        if other in buckets.sizes:
            parts += _cut(folder.bucket(other), grid, low, high)
    rows = np.concatenate(parts) if parts else np.empty(0, POINT)
    return rows[np.argsort(rows["index"], kind="stable")]


def _cut(path: Path, grid: Grid, low: np.ndarray[Any, Any], high: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    parts = []
    with path.open("rb") as file:
        while len(block := np.fromfile(file, POINT, _BLOCK)):
            cells = grid.cells(block["raw"])[:, :2]
            parts.append(block[((cells >= low) & (cells < high)).all(1)])
    return parts


def classify(
    model: SurveyModel,
    rows: np.ndarray[Any, Any],
    cells: np.ndarray[Any, Any],
    grid: Grid,
    box: Box,
    wanted: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any]:
    """``uint8``: class codes of the ``wanted`` rows (a mask), predicted on the grid of ``box``."""
    logits = _logits(model, rows, cells, grid, box, wanted)
    codes = torch.tensor(model.classes, dtype=torch.uint8)
    chosen: np.ndarray[Any, Any] = codes[logits.argmax(1).cpu()].numpy()
    return chosen


def _logits(
    model: SurveyModel,
    rows: np.ndarray[Any, Any],
    cells: np.ndarray[Any, Any],
    grid: Grid,
    box: Box,
    wanted: np.ndarray[Any, Any],
) -> torch.Tensor:
    local = cells - np.array(box.origin)
    inside = ((local >= 0) & (local < np.array(box.shape))).all(1)
    feats = model.features_of(points_of(rows, grid))[torch.from_numpy(inside)]
    coords = torch.from_numpy(local[inside].astype(np.int32))
    device = model.device
    logits = model.logits(coords.to(device), feats.to(device), box.shape)
    return logits[torch.from_numpy(wanted[inside]).to(device)]


def points_of(rows: np.ndarray[Any, Any], grid: Grid) -> Points:
    """What features are made of."""
    xyz = torch.from_numpy(grid.xyz(rows["raw"]))
    names = "intensity", "return_number", "number_of_returns"
    intensity, number, returns = (torch.from_numpy(rows[name].astype(np.int64)) for name in names)
    return Points(xyz, intensity, number, returns)
