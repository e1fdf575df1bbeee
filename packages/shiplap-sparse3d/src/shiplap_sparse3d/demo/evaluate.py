"""Scores on an area that the network has not seen, the plain baseline, and the time that compiling saves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shiplap_sparse3d.demo.scan import Scan
from shiplap_sparse3d.demo.tiles import FeatureScaling, TrainingTile, make_tile
from shiplap_sparse3d.demo.train import Forward, loss_of

__all__ = ["StepTimes", "measure_step_times", "predict_by_height", "predict_logits"]

MARGIN = 50.0  # metres of context around the area to be judged
_BASELINE_CELL, _BASELINE_HEIGHT = 12.0, 0.8  # metres: plain numbers, fitted to no scan


def predict_by_height(scan: Scan) -> Tensor:
    """Return the prediction of a simple rule to compare the network with, ``bool [p]``. A point is ground if it is less
    than 0.8 m above the lowest point of its cell, a square of 12 m.
    """
    cell = (scan.xyz[:, :2] / _BASELINE_CELL).long()
    flat = cell[:, 0] * (int(cell[:, 1].max()) + 1) + cell[:, 1]
    lowest = scan.xyz.new_full((int(flat.max()) + 1,), 1e4).scatter_reduce(0, flat, scan.xyz[:, 2], "amin")
    return scan.xyz[:, 2] - lowest[flat] < _BASELINE_HEIGHT


def predict_logits(forward: Forward, look: FeatureScaling, scan: Scan, wanted: Tensor, levels: int) -> Tensor:
    """Return the logits ``[w]`` of being ground that the network ``forward`` computes for the points that the mask
    ``wanted`` selects. These points must form a strip along x. ``look`` scales the features of points, and ``levels``
    is the number of levels of the network.

    The strip is one tile, with 50 m of context on either side. Of the points in the context only the positions are
    used, and never the labels.
    """
    x = scan.xyz[:, 0]
    near = (x >= x[wanted].min() - MARGIN) & (x <= x[wanted].max() + MARGIN)
    tile = make_tile(look.describe_area(scan.take(near)), levels)
    # Gradients stay on: a graph without them would be compiled a second time, for one call.
    return forward(tile.voxels, tile.points, tile.inverse).detach()[wanted[near]]


@dataclass(frozen=True)
class StepTimes:
    """The times of one training step (forward and backward, without the building of neighbour tables) on one tile, in
    milliseconds. ``compiled_ms`` and ``eager_ms`` are the medians of ``runs`` steps with and without ``torch.compile``.
    """

    compiled_ms: float
    eager_ms: float
    runs: int


def measure_step_times(net: Forward, compiled: Forward, tile: TrainingTile, runs: int) -> StepTimes:
    """Return the median times in ms of ``runs`` training steps on ``tile``, for the eager network ``net`` and the
    compiled one ``compiled``. Eager and compiled steps alternate, so that other load on the machine slows both in equal
    measure.
    """
    times: dict[str, list[float]] = {"compiled": [], "eager": []}
    # The first run of each compiles or fills caches, and is not timed.
    for forward in (compiled, net):
        _time_step(forward, tile)
    for _ in range(runs):
        times["compiled"].append(_time_step(compiled, tile))
        times["eager"].append(_time_step(net, tile))
    return StepTimes(statistics.median(times["compiled"]), statistics.median(times["eager"]), runs)


def _time_step(forward: Forward, tile: TrainingTile) -> float:
    """Return the time in ms of one forward and one backward pass on ``tile``. For a tile on a GPU, the time includes
    waiting for the GPU to finish.
    """
    synchronize: Callable[[], None] = torch.cuda.synchronize if tile.ground.is_cuda else (lambda: None)
    synchronize()
    start = time.perf_counter()
    loss_of(forward, tile).backward()
    synchronize()
    return (time.perf_counter() - start) * 1000
