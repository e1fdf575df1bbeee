"""The tiles of a survey among workers, and what one worker does with its own.

A tile is read on the host, predicted on the device and written on the host. On a GPU, threads read the next tile and
write the last one while the network runs. They and the thread that launches the network want Python, one at a time, so
they do little in it: what they call is the system. The thread that launches does not wait for an answer: while the GPU
works at it, a second stream sorts the points of the next tile into voxels.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from shiplap_sparse3d.beside import hand_over
from shiplap_sparse3d.geometry import NOTHING, Recipe
from shiplap_sparse3d.survey.buckets import Buckets, Grid
from shiplap_sparse3d.survey.folder import Folder, Tile
from shiplap_sparse3d.survey.model import SurveyModel
from shiplap_sparse3d.survey.predict import Answer, Asked, Question, Read, answered, asked, predicted, read_tile
from shiplap_sparse3d.survey.tiles import Tiling

__all__ = ["predict_tiles", "shares", "turns"]


def shares(buckets: Buckets, tiling: Tiling, world: int) -> list[list[Tile]]:
    """The tiles of each of ``world`` workers: each as much work as the others, and the same on every worker.

    The tile with most points is given to the worker that has fewest so far, and so on.
    """
    costs = {tile: _cost(buckets, tiling, tile) for tile in buckets.tiles}
    tiles: list[list[Tile]] = [[] for _ in range(world)]
    sums = [0.0] * world
    for tile in sorted(costs, key=lambda tile: (-costs[tile], tile)):
        least = sums.index(min(sums))
        tiles[least].append(tile)
        sums[least] += costs[tile]
    return tiles


def turns(folder: Folder, parts: list[list[Tile]], rank: int) -> Iterator[Tile]:
    """The tiles that worker ``rank`` does: those of its part, and what other workers have not begun by then.

    Its own come first to last. Of the others it takes the last ones first, since their worker comes to them last.
    Nobody begins what another has begun, and so no worker waits for a slow one. A tile that was begun before this
    worker started, and that has no mark when all others are begun, is done again: whoever began it may be gone.
    """
    mine, alone = parts[rank], len(parts) == 1
    before = {tile for tile in mine if folder.taken(tile).exists()}
    others = [tile for part in (*parts[rank + 1 :], *parts[:rank]) for tile in reversed(part)]

    def begun() -> Iterator[Tile]:
        for tile in mine:
            if not folder.finished(tile) and (alone or folder.take(tile)):
                yield tile
        for tile in others:
            if not folder.done(tile).exists() and folder.take(tile):
                yield tile
        for tile in mine:
            if tile in before and not alone and not folder.finished(tile):
                yield tile

    return begun()


def _cost(buckets: Buckets, tiling: Tiling, tile: Tile) -> float:
    """About how many points are in ``tile`` and its halo: of each bucket there, as large a part as lies within."""
    total = 0.0
    for other in tiling.around(tile, 0):
        if other in buckets.sizes:
            total += buckets.sizes[other] * math.prod(
                max(0, min(end, mine + tiling.halo) - max(first, start - tiling.halo)) / tiling.size
                for (start, mine), (first, end) in zip(tiling.core(tile), tiling.core(other), strict=True)
            )
    return total


def predict_tiles(
    model: SurveyModel,
    folder: Folder,
    buckets: Buckets,
    grid: Grid,
    tiling: Tiling,
    tiles: Iterable[Tile],
    *,
    ahead: bool | None = None,
) -> Iterator[Tile]:
    """Predict ``tiles`` and write their classes and marks; yields each tile whose network has run.

    The last ones are written when the iterator has ended.

    Args:
        ahead: whether threads read and write while the network runs. By default they do unless it runs on the CPU,
            whose cores it uses itself. Points of two more tiles are in memory then, one of them on the device.
    """

    def read(tile: Tile) -> Question | Read:
        return read_tile(model, folder, buckets, grid, tiling, tile)

    if ahead is None:
        ahead = model.device.type != "cpu"
    if not ahead:
        for tile in tiles:
            folder.write_result(tile, predicted(model, read(tile)))
            yield tile
        return
    device = model.device
    enter = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else None  # features may be made there
    with ThreadPoolExecutor(1, initializer=enter) as reader, ThreadPoolExecutor(1) as writer:
        written: deque[Future[None]] = deque()
        for tile, answer in _answers(model, _read_ahead(reader, read, tiles)):
            written.append(writer.submit(lambda tile, answer: folder.write_result(tile, answer.result()), tile, answer))
            if len(written) > 2:  # a disk that is slower than the network
                written.popleft().result()
            yield tile
        for write in written:
            write.result()


def _answers(model: SurveyModel, read: Iterable[tuple[Tile, Question | Read]]) -> Iterator[tuple[Tile, Answer]]:
    """The answer for each tile, at which the device may still work. It has the voxels of the next tile by then.

    And their tables, as far as the network asked for those of this tile: its layers wait for nothing.
    """
    beside = torch.cuda.Stream(model.device, priority=-1) if model.device.type == "cuda" else None
    waiting: tuple[Tile, Asked] | None = None
    for tile, question in read:
        answer = waiting and answered(model, waiting[1])
        recipe = waiting[1].scene.voxels.geometry.recipe if waiting else NOTHING
        following = tile, _asked(model, question, recipe, beside)
        if waiting and answer:
            yield waiting[0], answer
        waiting = following
    if waiting is not None:
        yield waiting[0], answered(model, waiting[1])


def _asked(model: SurveyModel, question: Question | Read, recipe: Recipe, beside: torch.cuda.Stream | None) -> Asked:
    """By the stream ``beside``, while the network runs in the one that is current."""
    if beside is None:
        return asked(model, question, recipe)
    with torch.cuda.stream(beside):
        made = asked(model, question, recipe)
    hand_over(made.tensors, beside, torch.cuda.current_stream(model.device))
    return made


def _read_ahead(
    reader: ThreadPoolExecutor, read: Callable[[Tile], Question | Read], tiles: Iterable[Tile]
) -> Iterator[tuple[Tile, Question | Read]]:
    """Each tile as it was read, the next one being read."""
    waiting: tuple[Tile, Future[Question | Read]] | None = None
    for tile in tiles:
        following = tile, reader.submit(read, tile)
        if waiting is not None:
            yield waiting[0], waiting[1].result()
        waiting = following
    if waiting is not None:
        yield waiting[0], waiting[1].result()
