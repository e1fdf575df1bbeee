"""The tiles of a survey among workers, and the work of one worker on its own tiles.

A tile is read on the host, predicted on the device and written on the host. On a GPU, a thread reads the next tile, and
lets a second stream sort its points into voxels and build the tables of the network's layers; another thread writes the
last tile. The thread that launches the network does nothing else, and nothing in it waits for the device. So it may be
late by the time of a tile before the GPU has nothing to do.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from shiplap_sparse3d.beside import hand_over
from shiplap_sparse3d.geometry import NOTHING, TableRecipe
from shiplap_sparse3d.survey.buckets import Buckets, Grid
from shiplap_sparse3d.survey.folder import SurveyFolder, Tile
from shiplap_sparse3d.survey.model import SurveyModel
from shiplap_sparse3d.survey.predict import PreparedTile, TileAnswer, predict_tile, prepare_tile, read_tile, run_network
from shiplap_sparse3d.survey.tiles import Tiling

__all__ = ["predict_tiles", "share_tiles", "tiles_in_turn"]


def share_tiles(buckets: Buckets, tiling: Tiling, world: int) -> list[list[Tile]]:
    """Return the tiles of each of ``world`` workers: equal amounts of work, and the same on every worker.

    The tile with most points goes to the worker that has fewest so far, and so on.
    """
    costs = {tile: _tile_cost(buckets, tiling, tile) for tile in buckets.tiles}
    tiles: list[list[Tile]] = [[] for _ in range(world)]
    sums = [0.0] * world
    for tile in sorted(costs, key=lambda tile: (-costs[tile], tile)):
        least = sums.index(min(sums))
        tiles[least].append(tile)
        sums[least] += costs[tile]
    return tiles


def tiles_in_turn(folder: SurveyFolder, parts: list[list[Tile]], rank: int) -> Iterator[Tile]:
    """Return the tiles for worker ``rank``: those of its share, and later those that other workers have not begun.

    The worker's own tiles come first to last. Of the others it takes the last ones first, since their worker comes to
    them last. No worker begins a tile that another has begun, and so no worker waits for a slow one. A tile that was
    begun before this worker started, and that has no mark when all others are begun, is done again: its worker may be
    gone.
    """
    mine, alone = parts[rank], len(parts) == 1
    before = {tile for tile in mine if folder.taken_mark_path(tile).exists()}
    # Each worker starts with its successor's tiles, so that helpers spread over the workers.
    others = [tile for part in (*parts[rank + 1 :], *parts[:rank]) for tile in reversed(part)]

    def begun() -> Iterator[Tile]:
        for tile in mine:
            if not folder.has_result(tile) and (alone or folder.begin_tile(tile)):
                yield tile
        # Listed again only after a failed attempt: two listings are cheaper than a test for each tile.
        known = set[Tile]() if alone else folder.begun_tiles()
        for tile in others:
            if tile in known:
                continue
            if folder.begin_tile(tile):
                yield tile
            else:
                known = folder.begun_tiles()
        for tile in mine:
            if tile in before and not alone and not folder.has_result(tile):
                yield tile

    return begun()


def _tile_cost(buckets: Buckets, tiling: Tiling, tile: Tile) -> float:
    """Return about how many points are in ``tile`` and its halo, by the part of each bucket that lies within."""
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
    folder: SurveyFolder,
    buckets: Buckets,
    grid: Grid,
    tiling: Tiling,
    tiles: Iterable[Tile],
    *,
    ahead: bool | None = None,
) -> Iterator[Tile]:
    """Predict ``tiles`` and write their classes and marks. Yields each tile whose network has run.

    The last ones are written when the iterator has ended.

    Args:
        ahead: whether threads read and write while the network runs. By default they do unless it runs on the CPU,
            whose cores it uses itself. Points of two more tiles are in memory then, with their tables.
    """
    given = model, folder, buckets, grid, tiling
    if model.device.type != "cpu" if ahead is None else ahead:
        yield from _predict_threaded(given, tiles)
        return
    for tile in tiles:
        folder.write_result(tile, predict_tile(model, read_tile(*given, tile)))
        yield tile


PredictArguments = tuple[SurveyModel, SurveyFolder, Buckets, Grid, Tiling]


def _write_answer(folder: SurveyFolder, tile: Tile, answer: TileAnswer) -> None:
    """Write the result of a tile once its network has ended."""
    folder.write_result(tile, answer.wait_for_result())


def _predict_threaded(given: PredictArguments, tiles: Iterable[Tile]) -> Iterator[Tile]:
    """Predict and write tiles for :func:`predict_tiles`, with threads."""
    model, folder, *_ = given
    device, making = model.device, _TileMaker(given)
    enter = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else None  # features may be made there
    with ThreadPoolExecutor(1, initializer=enter) as reader, ThreadPoolExecutor(1) as writer, making:
        written: deque[Future[None]] = deque()
        for tile, (question, made) in _read_ahead(reader, making, tiles):
            if made is not None:
                hand_over(question.tensors, made, torch.cuda.current_stream(device))
            answer = run_network(model, question)
            making.set_recipe(question.scene.voxels.geometry.recipe)
            written.append(writer.submit(_write_answer, folder, tile, answer))
            if len(written) > 2:  # so far the host may be ahead of the network, and the network of the disk
                written.popleft().result()
            yield tile
        for write in written:
            write.result()


class _TileMaker:
    """The reader of tiles, which also sorts points into voxels and builds the tables that the tile before needed.

    On a GPU this runs in a stream of its own, beside the network. The second tile is not made before the network was
    launched for the first one, and before its tables are known.
    """

    def __init__(self, given: PredictArguments) -> None:
        self.given, device = given, given[0].device
        # A high priority: the small kernels of tables must not queue behind the network's.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.recipe, self.told, self.first = NOTHING, threading.Event(), True

    def __call__(self, tile: Tile) -> tuple[PreparedTile, torch.cuda.Event | None]:
        """Return the network's input, and an event for its arrival, or None if it has arrived."""
        question = read_tile(*self.given, tile)
        if not self.first:
            self.told.wait()
        self.first = False
        if self.stream is None:
            return prepare_tile(self.given[0], question, self.recipe), None
        with torch.cuda.stream(self.stream):
            made = prepare_tile(self.given[0], question, self.recipe)
        return made, self.stream.record_event()

    def set_recipe(self, recipe: TableRecipe) -> None:
        """Store the tables that the network used, for the next tile."""
        self.recipe = recipe
        self.told.set()

    def __enter__(self) -> _TileMaker:
        return self

    def __exit__(self, *failure: object) -> None:
        self.told.set()  # the thread that reads must come to its end


MadeTile = tuple[PreparedTile, torch.cuda.Event | None]


def _read_ahead(
    reader: ThreadPoolExecutor, make: Callable[[Tile], MadeTile], tiles: Iterable[Tile]
) -> Iterator[tuple[Tile, MadeTile]]:
    """Yield each tile as it was made, while the next one is being made."""
    waiting: tuple[Tile, Future[MadeTile]] | None = None
    for tile in tiles:
        following = tile, reader.submit(make, tile)
        if waiting is not None:
            yield waiting[0], waiting[1].result()
        waiting = following
    if waiting is not None:
        yield waiting[0], waiting[1].result()
