"""The tasks of a survey: sort a segment (:mod:`.sorting`), predict a tile, merge the classes of a segment.

Each task is a function of the job and a small value. A task may run twice, in any process, at any time: all its results
are files that are written whole, with the same bytes each time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shiplap_sparse3d.beside import hand_over
from shiplap_sparse3d.survey.folder import POINT, Tile
from shiplap_sparse3d.survey.job import SurveyJob
from shiplap_sparse3d.survey.predict import damaged_points, prepare_tile, read_tile, run_network


def predict_codes(job: SurveyJob, tile: Tile) -> np.ndarray[Any, Any]:
    """Return the predicted class codes of the points of ``tile``, ``uint8 [c]`` in the order of the input.

    Threads read and prepare tiles beside the network, and run it one after the other. On a GPU each thread has a stream
    of its own, of high priority, which sorts points into voxels and builds the tables that the network needed for the
    tile before. So the GPU has work while a thread waits for the size of a table.
    """
    model, device, state = job.model, job.model.device, job.network
    if device.type != "cuda":
        made = prepare_tile(model, read_tile(job, tile), state.recipe)
        with state.lock:
            return run_network(model, made).wait_for_codes()
    if not hasattr(state.here, "stream"):
        torch.cuda.set_device(device)  # features may be made there
        state.here.stream = torch.cuda.Stream(device, priority=-1)
    with torch.cuda.stream(state.here.stream):
        made = prepare_tile(model, read_tile(job, tile), state.recipe)
    ready = state.here.stream.record_event()
    with state.lock:  # a captured graph of the user's has one memory
        hand_over(made.tensors, ready, torch.cuda.current_stream(device))
        answer = run_network(model, made)
        state.recipe = made.scene.voxels.geometry.recipe
    return answer.wait_for_codes()


def predict_tile(job: SurveyJob, tile: Tile) -> None:
    """Predict the class codes of the points of ``tile``, and write them and then the tile's mark to the folder of the
    survey.
    """
    job.folder.write_result(tile, predict_codes(job, tile))


def merge_segment(job: SurveyJob, number: int) -> np.ndarray[Any, Any]:
    """Return the class code of each point of segment ``number``, ``uint8 [p]`` in the order of the input, from the
    results of its tiles.

    Raises:
        SurveyError: SL824 if the classes of a tile are missing or damaged.
    """
    first, count = job.segment_range(number)
    path = job.folder.points_path(number)
    place = np.fromfile(path, POINT)["index"] - first if path.exists() else np.empty(0)
    # Damaged numbers would write outside of the array, or leave points without a class.
    if not np.array_equal(np.sort(place), np.arange(count)):
        raise damaged_points(job.folder, number)
    codes = np.empty(count, np.uint8)
    for part in job.points.of_segment(number):
        tile = int(part["x"]), int(part["y"])
        found = job.folder.read_result(tile, job.points.count(tile))
        codes[place[part["start"] : part["start"] + part["count"]]] = found[part["before"] :][: part["count"]]
    return codes
