"""The training loop: one tile a step, forward and backward compiled."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shiplap.plugin_api.compiling import try_best_instructions
from shiplap_sparse3d.demo.model import GroundNet
from shiplap_sparse3d.demo.scan import Scan
from shiplap_sparse3d.demo.score import iou
from shiplap_sparse3d.demo.tiles import DescribedArea, FeatureScaling, TrainingTile, make_tile, random_tiles

__all__ = ["Forward", "Progress", "TrainedNetwork", "TrainingRecipe", "choose_backend", "loss_of", "train_network"]

Progress = Callable[[str, int, int, str], None]
"""Called with (stage, steps done, steps in all, note), for a progress bar."""

Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class TrainingRecipe:
    """The settings of the training, chosen by validation inside the training area. ``steps`` is the number of training
    steps, ``levels`` that of grids and ``channels`` that of channels. ``rate`` is the greatest learning rate.
    """

    steps: int = 200
    levels: int = 4
    channels: int = 16
    rate: float = 1e-2
    weight_decay: float = 1e-2


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network.

    Attributes:
        net: the module.
        forward: the same module, compiled unless it was trained in eager mode.
        look: the scaling of the features of points.
        threshold: points with a greater logit are ground.
        losses: the loss of each step.
        points, voxels: the smallest and the largest number of points and of voxels of a tile.
        first_step: the time of the first step in seconds, in which everything is compiled.
        seconds: the time of the whole training in seconds.
    """

    net: GroundNet
    forward: Forward
    look: FeatureScaling
    threshold: float
    losses: tuple[float, ...]
    points: tuple[int, int]
    voxels: tuple[int, int]
    first_step: float
    seconds: float


def loss_of(forward: Forward, tile: TrainingTile) -> Tensor:
    """Return the mean binary cross-entropy of the network's logits over the points of ``tile``, as a tensor that can be
    differentiated. ``forward`` is the network.
    """
    return F.binary_cross_entropy_with_logits(forward(tile.voxels, tile.points, tile.inverse), tile.ground)


def choose_backend(device: torch.device) -> str:
    """Return the name of the backend of ``torch.compile`` for ``device``. It is ``inductor``, or on a CPU without a C++
    compiler ``aot_eager``, which generates no code.
    """
    found = device.type != "cpu" or shutil.which(os.environ.get("CXX") or "g++") is not None
    return "inductor" if found else "aot_eager"


def train_network(
    areas: Sequence[Scan], recipe: TrainingRecipe, seed: int, progress: Progress, *, compiled: bool = True
) -> TrainedNetwork:
    """Train a network on random tiles of ``areas``, on their device. Return it with its threshold and the losses and
    times of the training. No tile lies in two areas. If ``compiled`` is true, the network is compiled by
    ``torch.compile``. Otherwise it runs in eager mode. ``recipe`` holds the settings of the training, and ``seed``
    determines weights and tiles.
    """
    # Weights are drawn from torch's own generator, and tiles from one of theirs.
    torch.manual_seed(seed)
    look, described = FeatureScaling.of(areas)
    net = GroundNet(recipe.channels, recipe.levels).to(areas[0].xyz.device)
    backend = choose_backend(areas[0].xyz.device)
    forward: Forward = torch.compile(net, fullgraph=True, backend=backend) if compiled else net
    optimizer = torch.optim.AdamW(net.parameters(), recipe.rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, total_steps=recipe.steps, pct_start=0.2)
    tiles = random_tiles(described, recipe.levels, seed)
    losses, points, voxels, marks = [], [], [], [time.perf_counter()]
    progress("train", 0, recipe.steps, "compiling")
    if compiled and backend == "inductor" and areas[0].xyz.device.type == "cpu":
        try_best_instructions()
    for step in range(recipe.steps):
        tile = next(tiles)
        losses.append(_training_step(forward, tile, optimizer))
        schedule.step()
        points.append(len(tile.ground))
        voxels.append(tile.voxels.feats.shape[0])
        marks.append(time.perf_counter())
        progress("train", step + 1, recipe.steps, f"loss {sum(losses[-20:]) / len(losses[-20:]):.3f}")
    return TrainedNetwork(
        net,
        forward,
        look,
        _best_threshold(forward, described, recipe.levels),
        tuple(losses),
        (min(points), max(points)),
        (min(voxels), max(voxels)),
        # The first step, which compiles.
        marks[1] - marks[0],
        marks[-1] - marks[0],
    )


def _best_threshold(forward: Forward, areas: Sequence[DescribedArea], levels: int) -> float:
    """Return the logit above which points are called ground. It is the threshold with the best IoU (intersection over
    union), if the network's probabilities are right.

    Where labels are ambiguous, no probability is near 1, and a threshold of one half would miss most ground. If J is
    the best IoU that any threshold reaches, this threshold is ``J / (1 + J)``, whose logit is the logarithm of J. J is
    measured on the training ``areas``. The threshold that reaches J on them is not used, since it depends on noise.
    """
    tiles = [make_tile(area, levels) for area in areas]
    logits = torch.cat([forward(tile.voxels, tile.points, tile.inverse).detach() for tile in tiles])
    truth = torch.cat([tile.ground for tile in tiles]).bool()
    # Thresholds from -4 to 2 in steps of a fifth.
    best = max(iou(logits > fifth / 5, truth) for fifth in range(-20, 11))
    return math.log(max(best, 1e-3))


def _training_step(forward: Forward, tile: TrainingTile, optimizer: torch.optim.Optimizer) -> float:
    """Compute the loss on ``tile``, take one step of ``optimizer``, and return the loss as a float. ``forward`` is the
    network.
    """
    loss = loss_of(forward, tile)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def count_parameters(net: nn.Module) -> int:
    """Return the number of elements of all parameters of ``net``."""
    return sum(p.numel() for p in net.parameters())
