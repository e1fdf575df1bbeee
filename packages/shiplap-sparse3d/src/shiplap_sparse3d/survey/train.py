"""Training on the tiles of a survey folder: deterministic order, any number of workers, resumed after an interruption.

The folder is one that ``survey(..., keep=True)`` or :func:`prepare` has filled. A step learns from one tile for each
worker. Which tiles those are depends on the seed, the epoch and the number of workers, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shiplap.plugin_api import error
from shiplap.plugin_api.files import open_named, write_whole
from shiplap_sparse3d.survey.buckets import Buckets, Grid, fill_buckets, finished_buckets
from shiplap_sparse3d.survey.cloud import CHUNK, open_cloud, read_chunks
from shiplap_sparse3d.survey.folder import SurveyFolder, Tile
from shiplap_sparse3d.survey.model import SurveyModel
from shiplap_sparse3d.survey.predict import points_within, question_of
from shiplap_sparse3d.survey.tiles import tiling
from shiplap_sparse3d.survey.workers import rank_and_world

__all__ = ["Manifest", "epoch_order", "prepare", "train"]


@dataclass(frozen=True)
class Manifest:
    """A survey whose points are sorted into tiles, with the class of each point.

    Made by :func:`prepare`.
    """

    model: SurveyModel
    folder: SurveyFolder
    buckets: Buckets
    grid: Grid
    tile: int | None
    halo: int | None

    def batch(self, tile: Tile) -> tuple[Tensor, Tensor, tuple[int, int, int], Tensor]:
        """Return ``(cells, features, grid, labels)`` of the points of ``tile`` and its halo.

        ``labels int64 [p]`` index ``model.classes``; they are -100, which losses of torch ignore, in the halo and for
        points of other classes.
        """
        tiles = tiling(self.model.field, self.tile, self.halo)
        box = tiles.grid(tile, self.buckets.extent)
        rows = points_within(self.model, self.folder, self.buckets, self.grid, tiles, tile, box)
        question = question_of(self.model, self.grid, tiles, tile, box, rows)
        # The index that torch's losses ignore by default.
        labels = torch.full((len(question.cells),), -100)
        codes = torch.from_numpy(self._codes(question.index.numpy()))
        for number, code in enumerate(self.model.classes):
            labels[question.wanted[codes == code]] = number
        return question.cells, question.feats, box.shape, labels

    def _codes(self, index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        codes = np.empty(len(index), np.uint8)
        with self.folder.classes.open("rb") as file:
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
    """Sort the points of a classified survey into tiles, for :func:`train`.

    Call this in one process before several workers train. If ``folder`` already has the tiles, they are reused.

    Args:
        source: a LAS, LAZ or COPC file whose points have classes.
        folder: the folder for the tiles, about 24 bytes for each point.
        model: the network, the size of a voxel, and the class codes.
        tile, halo: in voxels, see :func:`tiling`. By default as large as the network needs.
        progress: called with (points done, points in all).

    Raises:
        SurveyError: SL820 and SL825 for the model, SL821 for the tiles, SL822 for the input, SL823 for a folder that
            belongs to another survey.
        CommandError: SL602 for a folder that everybody can write, or that holds links.
    """
    source, place = Path(source), SurveyFolder(Path(folder))
    tiles = tiling(model.field, tile, halo)
    with open_cloud(source) as reader:
        grid = Grid(tuple(reader.header.scales), tuple(reader.header.offsets), model.voxel)
        total = reader.header.point_count
    place.make_directory()
    place.claim({"training": str(total), "tile": tiles.size, "halo": tiles.halo, "voxel": list(model.voxel)})
    buckets = finished_buckets(place, total) or fill_buckets(place, source, grid, tiles, CHUNK, progress)
    if not place.classes.exists() or place.classes.stat().st_size != total:
        draft = place.classes.with_suffix(".part")
        with draft.open("wb") as file, open_cloud(source) as reader:
            for points in read_chunks(reader, source):
                file.write(np.asarray(points["classification"]).astype(np.uint8).tobytes())
        draft.replace(place.classes)
    return Manifest(model, place, buckets, grid, tile, halo)


def epoch_order(tiles: list[Tile], epoch: int, seed: int, workers: tuple[int, int]) -> list[Tile]:
    """Return the tiles of one worker in one epoch: deterministic, and equally many for each worker.

    The first tiles of the order come again at its end where the number of workers does not divide that of the tiles.
    """
    rank, world = workers
    draw = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = [tiles[i] for i in torch.randperm(len(tiles), generator=draw).tolist()]
    while len(order) % world:
        # Every worker must take part in each step, or the others would wait forever.
        order += order[: world - len(order) % world]
    return order[rank::world]


def train(
    manifest: Manifest,
    checkpoint: str | Path,
    *,
    epochs: int,
    rate: float = 1e-3,
    seed: int = 0,
    workers: tuple[int, int] | None = None,
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> list[float]:
    """Train ``manifest.model.net`` with AdamW and cross-entropy, and return the mean loss of each epoch of this call.

    With several workers, ``DistributedDataParallel`` averages the gradients. It uses the process group of the caller.
    If there is none, this function makes one, with gloo, or with NCCL for a network on CUDA. Worker 0 writes
    ``checkpoint`` after each epoch. If the file exists, training continues after its last epoch, and the parameters end
    up as they would without the interruption.

    Args:
        manifest: from :func:`prepare`.
        checkpoint: the file for the network, the optimizer and the epoch. It is read with ``weights_only=True``.
        epochs: the number of epochs in all, including those of the checkpoint.
        rate: the learning rate of AdamW, 0.001 by default.
        seed: determines the order of the tiles, 0 by default.
        workers: ``(rank, number of workers)``, by default as the launcher states them in the environment.
        progress: called with (step, steps in all, loss).

    Raises:
        SurveyError: SL823 for a checkpoint that is damaged or of another network.
    """
    workers = rank_and_world() if workers is None else workers
    net, path = manifest.model.net, Path(checkpoint)
    optimizer = torch.optim.AdamW(net.parameters(), rate)
    first = _load_checkpoint(path, net, optimizer)
    losses: list[float] = []
    with _process_group(workers, manifest.model.device) as wrap:
        run = wrap(_LogitsModule(manifest.model))
        net.train()
        for epoch in range(first, epochs):
            order = epoch_order(manifest.buckets.tiles, epoch, seed, workers)
            steps = [
                _train_step(run, optimizer, manifest, tile)
                for tile in _report_progress(order, epoch, epochs, losses, progress)
            ]
            losses.append(sum(steps) / max(1, len(steps)))
            if workers[0] == 0:
                _save_checkpoint(path, net, optimizer, epoch + 1)
    return losses


class _LogitsModule(nn.Module):
    """The network behind the voxels of points as a module, as ``DistributedDataParallel`` requires."""

    def __init__(self, model: SurveyModel) -> None:
        super().__init__()
        # In a list, so that the model is not registered as a submodule a second time.
        self.net, self._model = model.net, [model]

    def forward(self, cells: Tensor, feats: Tensor, grid: tuple[int, int, int]) -> Tensor:
        return self._model[0].forward(cells, feats, grid)


def _report_progress(
    order: list[Tile], epoch: int, epochs: int, losses: list[float], progress: Callable[[int, int, float], None]
) -> Iterator[Tile]:
    for number, tile in enumerate(order):
        progress(epoch * len(order) + number, epochs * len(order), losses[-1] if losses else 0.0)
        yield tile


def _train_step(run: nn.Module, optimizer: torch.optim.Optimizer, manifest: Manifest, tile: Tile) -> float:
    device = manifest.model.device
    cells, feats, grid, labels = manifest.batch(tile)
    logits = run(cells.to(device), feats.to(device), grid)
    total = nn.functional.cross_entropy(logits, labels.to(device), reduction="sum")
    loss = total / (labels >= 0).sum().clamp_min(1).to(device)  # a tile without labels teaches nothing, and is no NaN
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@contextmanager
def _process_group(workers: tuple[int, int], device: torch.device) -> Iterator[Callable[[nn.Module], nn.Module]]:
    """Yield the function that makes a module average its gradients over the workers."""
    if workers[1] == 1:
        yield lambda module: module
        return
    import torch.distributed as dist

    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=workers[0], world_size=workers[1])
    try:
        yield nn.parallel.DistributedDataParallel
    finally:
        if mine:
            dist.destroy_process_group()


def _save_checkpoint(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    import io

    content = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, content)
    # Written whole, so that an interruption leaves the checkpoint of the epoch before.
    write_whole(path, content.getvalue())


def _load_checkpoint(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the epoch to begin with; 0 without a checkpoint."""
    if not path.exists():
        return 0
    try:
        with open_named(path) as file:
            state = torch.load(file, weights_only=True, map_location="cpu")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["epoch"])
    except Exception as failure:  # torch's reader has many kinds of them
        text = " ".join(str(failure).split())[:300]
        what = "the checkpoint cannot be used"
        raise error("SL823", where=str(path), what=what, got=text, expected="a checkpoint of this network") from None
