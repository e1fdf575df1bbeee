"""A survey sorted into tiles, with the class of each point: the examples of a training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiplap.plugin_api.files import open_new
from shiplap_sparse3d.survey.cloud import CHUNK, open_cloud, read_chunks
from shiplap_sparse3d.survey.engine import SurveyEngine
from shiplap_sparse3d.survey.folder import Tile
from shiplap_sparse3d.survey.job import SurveyJob
from shiplap_sparse3d.survey.model import SurveyModel
from shiplap_sparse3d.survey.predict import points_within, question_of
from shiplap_sparse3d.survey.run import open_job, sort_points


@dataclass(frozen=True)
class Manifest:
    """A survey whose points are sorted into tiles, with the class of each point, for training: the result of
    :func:`prepare`.
    """

    job: SurveyJob

    @property
    def tiles(self) -> list[Tile]:
        """Return the tiles that have points, as (x, y), in ascending order."""
        return self.job.points.tiles

    def batch(self, tile: Tile) -> tuple[Tensor, Tensor, tuple[int, int, int], Tensor]:
        """Return ``(cells, features, grid, labels)`` of the points of ``tile`` and its halo, as one example for
        training.

        ``labels int64 [p]`` index ``model.classes``; they are -100, which losses of torch ignore, in the halo and for
        points of other classes. ``model.forward`` takes the other three and returns the logits of the points.
        """
        question = question_of(self.job, tile, points_within(self.job, tile))
        # The index that torch's losses ignore by default.
        labels = torch.full((len(question.cells),), -100)
        codes = torch.from_numpy(self._codes(question.index.numpy()))
        for number, code in enumerate(self.job.model.classes):
            labels[question.wanted[codes == code]] = number
        return question.cells, question.feats, question.grid, labels

    def _codes(self, index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the class codes ``uint8 [p]`` of the source file for the points with the numbers ``index``, which
        ascend.
        """
        codes = np.empty(len(index), np.uint8)
        with self.job.folder.labels.open("rb") as file:
            # Points of a tile are scattered over the file: near ones share a read.
            for part in np.split(np.arange(len(index)), np.flatnonzero(np.diff(index // CHUNK)) + 1):
                if len(part):
                    first = int(index[part[0]])
                    file.seek(first)
                    window = np.frombuffer(file.read(int(index[part[-1]]) - first + 1), np.uint8)
                    codes[part] = window[index[part] - first]
        return codes


def prepare(
    source: str | Path,
    folder: str | Path,
    model: SurveyModel,
    *,
    tile: int | None = None,
    halo: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Sort the points of a classified survey into tiles, read their classes, and return the manifest whose ``batch``
    gives a training loop the examples.

    Call this in one process before several processes train. If ``folder`` already has the sorted points, as after
    ``survey(..., keep=True)`` with the same voxels and tiles, they are reused.

    Args:
        source: a LAS, LAZ or COPC file whose points have classes.
        folder: the folder for the sorted points, about 25 bytes for each point.
        model: the network, the size of a voxel, and the class codes.
        tile, halo: in voxels, see :func:`tiling`. By default as large as the network needs.
        progress: called with (points done, points in all).

    Raises:
        SurveyError: SL820 and SL825 for the model, SL821 for the tiles, SL822 for the input, SL823 for a folder that
            belongs to another survey.
        CommandError: SL602 for a folder that everybody can write, or that holds links.
    """
    job = open_job(Path(source), Path(folder), model, tile, halo)
    job.folder.make_directory()
    job = sort_points(job, SurveyEngine(), lambda stage, done, total, note: progress(done, total))
    labels = job.folder.labels
    if not labels.exists() or labels.stat().st_size != job.total:
        draft = labels.with_suffix(".part")
        with open_new(draft) as file, open_cloud(job.source) as reader:
            for points in read_chunks(reader, job.source):
                file.write(np.asarray(points["classification"]).astype(np.uint8).tobytes())
        # Renamed when it is complete: a file of this name is not written again.
        draft.replace(labels)
    return Manifest(job)
