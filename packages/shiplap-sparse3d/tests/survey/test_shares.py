"""Each worker gets as many points as the others, and reading and writing beside the network changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from shiplap_sparse3d import geometry
from shiplap_sparse3d.geometry import NOTHING, TableRecipe
from shiplap_sparse3d.survey import Field, Manifest, SurveyModel, prepare, tiling
from shiplap_sparse3d.survey import shares as sharing
from shiplap_sparse3d.survey.buckets import Buckets, Grid
from shiplap_sparse3d.survey.folder import RESULT, SurveyFolder, Tile
from shiplap_sparse3d.survey.model import point_features
from shiplap_sparse3d.survey.predict import TileAnswer
from shiplap_sparse3d.survey.shares import predict_tiles, share_tiles, tiles_in_turn
from tests.survey.models import build

TILES = tiling(Field((14, 14, 14), (14, 14, 14), (4, 4, 4), 10), 64)  # with a halo of 16


def field(across: int, along: int) -> Buckets:
    """A survey of ``across`` times ``along`` tiles, with as many points in each."""
    return Buckets(0, {(x, y): 1000 for x in range(across) for y in range(along)})


def test_a_tile_costs_the_points_in_it_and_around_it() -> None:
    buckets = field(3, 3)
    assert sharing._tile_cost(buckets, TILES, (1, 1)) == pytest.approx(1000 * (96 / 64) ** 2)
    assert sharing._tile_cost(buckets, TILES, (0, 1)) == pytest.approx(1000 * (80 / 64) * (96 / 64))
    assert sharing._tile_cost(Buckets(0, {(0, 0): 7}), TILES, (0, 0)) == 7


def work_of(buckets: Buckets, parts: list[list[Tile]]) -> list[float]:
    return [sum(sharing._tile_cost(buckets, TILES, tile) for tile in part) for part in parts]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_shares_are_equal_and_complete(world: int) -> None:
    buckets = field(9, 5)
    parts = share_tiles(buckets, TILES, world)
    assert sorted(tile for part in parts for tile in part) == buckets.tiles
    assert max(work := work_of(buckets, parts)) - min(work) <= sharing._tile_cost(buckets, TILES, (1, 1))
    assert parts == share_tiles(Buckets(0, dict(reversed(buckets.sizes.items()))), TILES, world)


def test_dense_tiles_in_every_other_row() -> None:
    """In turn, one worker would get all of the points of the dense rows; the halos are where the others get some."""
    buckets = Buckets(0, {(x, y): 5000 if y % 2 else 1000 for x in range(8) for y in range(8)})
    work = work_of(buckets, share_tiles(buckets, TILES, 2))
    turns = work_of(buckets, [buckets.tiles[rank::2] for rank in range(2)])
    assert max(work) < 1.01 * min(work)
    assert max(turns) > 1.2 * min(turns)


def test_more_workers_than_tiles() -> None:
    assert share_tiles(field(1, 2), TILES, 3) == [[(0, 0)], [(0, 1)], []]


PARTS = [[(0, y) for y in range(6)], [(1, y) for y in range(6)], [(2, y) for y in range(6)]]


def each_marked(folder: SurveyFolder, tiles: Iterable[Tile]) -> list[Tile]:
    done = []
    for tile in tiles:
        folder.write_result(tile, np.zeros(1, RESULT))
        done.append(tile)
    return done


@pytest.fixture
def folder(tmp_path: Path) -> SurveyFolder:
    for part in ("done", "classes"):
        (tmp_path / part).mkdir()
    return SurveyFolder(tmp_path)


def test_a_fast_worker_helps_a_slow_one(folder: SurveyFolder) -> None:
    """The slow one does two tiles in the time of all others, and each tile is begun once."""
    slow, done = tiles_in_turn(folder, PARTS, 1), list[Tile]()
    done += [next(slow), next(slow)]
    done += each_marked(folder, tiles_in_turn(folder, PARTS, 0))
    assert done[:8] == [(1, 0), (1, 1), *PARTS[0]]
    assert done[8:] == [*reversed(PARTS[1][2:]), *reversed(PARTS[2])]
    assert list(slow) == list(tiles_in_turn(folder, PARTS, 2)) == []


def test_workers_at_once_begin_each_tile_once(folder: SurveyFolder) -> None:
    parts = [[(rank, y) for y in range(50)] for rank in range(4)]
    workers = [tiles_in_turn(folder, parts, rank) for rank in range(4)]
    with ThreadPoolExecutor(4) as pool:
        done = [*pool.map(lambda tiles: each_marked(folder, tiles), workers)]
    assert sorted(tile for each in done for tile in each) == sorted(tile for part in parts for tile in part)


def test_what_a_worker_had_begun_when_it_stopped_is_done_again(folder: SurveyFolder) -> None:
    first = tiles_in_turn(folder, PARTS, 0)
    begun = [next(first) for _ in range(4)]
    each_marked(folder, begun[:2])
    rest = list(tiles_in_turn(folder, PARTS, 0))
    assert rest[:2] == PARTS[0][4:]
    assert rest[-2:] == begun[2:]
    assert len(rest) == 6 * 3 - 2


def test_a_tile_that_another_has_begun_meanwhile_is_left_to_it(folder: SurveyFolder) -> None:
    mine, other = tiles_in_turn(folder, PARTS[:2], 0), tiles_in_turn(folder, PARTS[:2], 1)
    assert next(mine) == (0, 0)
    assert list(other) == [*PARTS[1], *reversed(PARTS[0][1:])]
    assert list(mine) == []


def test_tiles_that_others_have_begun_are_not_looked_at_one_by_one(
    folder: SurveyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two looks at the folder for 1,000 of them, whether a claim says so or a mark. Other files there do not count."""
    parts = [[(rank, y - 10) for y in range(1000)] for rank in range(2)]
    (folder.path / "taken").mkdir()
    for name in ("note", "1_2_3", ".3_4@host~1.tmp"):
        (folder.path / "taken" / name).touch()
    for tile in parts[1][:990]:
        folder.taken_mark_path(tile).touch()
    for tile in parts[1][985:995]:
        folder.done_mark_path(tile).touch()
    took, take = list[Tile](), SurveyFolder.begin_tile
    monkeypatch.setattr(SurveyFolder, "begin_tile", lambda self, tile: took.append(tile) or take(self, tile))
    assert list(tiles_in_turn(folder, parts, 0)) == parts[0] + parts[1][:994:-1]
    assert took == parts[0] + parts[1][:994:-1]


def test_one_worker_takes_nothing(folder: SurveyFolder) -> None:
    assert list(tiles_in_turn(folder, PARTS[:1], 0)) == PARTS[0]
    assert not (folder.path / "taken").exists()


def read_results(manifest: Manifest, done: list[Tile]) -> dict[Tile, bytes]:
    return {
        tile: manifest.folder.result_path(tile).read_bytes()
        for tile in done
        if manifest.folder.done_mark_path(tile).exists()
    }


def test_reading_ahead_changes_no_class(corner: Path, tmp_path: Path) -> None:
    results, model = [], build()
    for ahead in (False, True):
        manifest = prepare(corner, tmp_path / str(ahead), model, tile=20)
        given = model, manifest.folder, manifest.buckets, manifest.grid, tiling(model.field, 20)
        done = list(predict_tiles(*given, manifest.buckets.tiles, ahead=ahead))
        assert done == manifest.buckets.tiles
        results.append(read_results(manifest, done))
        assert len(results[-1]) == len(done) > 4
    assert results[0] == results[1]


def test_the_next_tile_is_read_while_the_network_runs(
    corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two tiles are read before the first answer: the network waits until it sees that."""
    model, read = build(), []
    manifest = prepare(corner, tmp_path / "tiles", model, tile=20)
    second, real, threads = threading.Event(), sharing.read_tile, set()

    def reading(*arguments: object) -> object:
        threads.add(threading.current_thread())
        read.append(arguments[-1])
        if len(read) == 2:
            second.set()
        return real(*arguments)  # type: ignore[arg-type]

    def predicting(*arguments: object) -> object:
        assert second.wait(30)
        return answer(*arguments)  # type: ignore[arg-type]

    answer = sharing.run_network
    monkeypatch.setattr(sharing, "read_tile", reading)
    monkeypatch.setattr(sharing, "run_network", predicting)
    given = model, manifest.folder, manifest.buckets, manifest.grid, tiling(model.field, 20)
    assert list(predict_tiles(*given, manifest.buckets.tiles[:3], ahead=True)) == manifest.buckets.tiles[:3]
    assert threading.current_thread() not in threads
    assert len(threads) == 1


def test_the_next_tile_is_made_while_the_network_runs(
    corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second tile on: by another thread, which knows by then which tables the network wants. The network waits
    until it sees that, and so does what waits for the classes.
    """
    model, done, threads = build(), list[str](), set()
    manifest = prepare(corner, tmp_path / "tiles", model, tile=20)
    given = model, manifest.folder, manifest.buckets, manifest.grid, tiling(model.field, 20)
    asked, answered, third = sharing.prepare_tile, sharing.run_network, threading.Event()

    class Late:
        def __init__(self, answer: TileAnswer) -> None:
            self.answer = answer

        def wait_for_result(self) -> object:
            assert third.wait(30)
            return self.answer.wait_for_result()

    def asking(model: SurveyModel, question: object, recipe: TableRecipe) -> object:
        done.append("asked" if recipe == NOTHING else "asked with tables")
        threads.add(threading.current_thread())
        made = asked(model, question, recipe)  # type: ignore[arg-type]
        if len(done) > 3:
            third.set()
        return made

    def answering(*arguments: object) -> object:
        assert "answered" not in done or third.wait(30)
        done.append("answered")
        return Late(answered(*arguments))  # type: ignore[arg-type]

    monkeypatch.setattr(sharing, "prepare_tile", asking)
    monkeypatch.setattr(sharing, "run_network", answering)
    tiles = manifest.buckets.tiles[:3]
    assert list(predict_tiles(*given, tiles, ahead=True)) == tiles
    assert done == ["asked", "answered", "asked with tables", "asked with tables", "answered", "answered"]
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    assert len(read_results(manifest, tiles)) == 3


def test_tables_that_were_built_are_not_built_by_the_network(
    corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tile is the only one in whose network a step is made."""
    model, inside, made = build(), threading.get_ident(), list[bool]()
    manifest = prepare(corner, tmp_path / "tiles", model, tile=20)
    given = model, manifest.folder, manifest.buckets, manifest.grid, tiling(model.field, 20)
    reach = geometry.output_cells

    def reaching(*arguments: object) -> object:
        made.append(threading.get_ident() == inside)
        return reach(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(geometry, "output_cells", reaching)
    assert list(predict_tiles(*given, manifest.buckets.tiles[:4], ahead=True)) == manifest.buckets.tiles[:4]
    assert made == [True, True, *[False] * 6]


@pytest.mark.parametrize("fails", ["read_tile", "prepare_tile", "run_network"])
def test_what_fails_in_a_thread_is_raised(
    fails: str, corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object) -> object:
        raise OSError("the disk")

    model = build()
    manifest = prepare(corner, tmp_path / "tiles", model, tile=20)
    monkeypatch.setattr(sharing, fails, failing)
    given = model, manifest.folder, manifest.buckets, manifest.grid, tiling(model.field, 20)
    with pytest.raises(OSError, match="the disk"):
        list(predict_tiles(*given, manifest.buckets.tiles, ahead=True))


def test_a_full_disk_is_raised(corner: Path, tmp_path: Path) -> None:
    model = build()
    manifest = prepare(corner, tmp_path / "tiles", model, tile=20)
    (manifest.folder.path / "classes").write_text("in the way")
    given = model, manifest.folder, manifest.buckets, manifest.grid, tiling(model.field, 20)
    with pytest.raises(OSError, match="classes"):
        list(predict_tiles(*given, manifest.buckets.tiles, ahead=True))


def test_cells_are_those_of_whole_rows() -> None:
    """Axis by axis, the coordinates and cells are those of the formula, to the bit."""
    raw = np.random.default_rng(0).integers(-(2**31), 2**31 - 1, (1000, 3), dtype=np.int32)
    grid = Grid((0.01, 0.001, 0.1), (637_000.1, -4_800_000.7, 3.3), (0.3, 1.7, 2.0))
    xyz = raw * np.array(grid.scales) + np.array(grid.offsets)
    assert np.array_equal(grid.xyz(raw), xyz)
    assert np.array_equal(grid.cells(raw), np.floor(xyz / np.array(grid.voxel)).astype(np.int64))
    assert grid.cells(raw[:0]).shape == (0, 3)
    columns = torch.from_numpy(raw)
    assert np.array_equal(torch.stack(grid.coordinates(columns), 1).numpy(), grid.xyz(raw))
    assert np.array_equal(torch.stack(grid.places(columns), 1).numpy(), grid.cells(raw))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("whose", ["ours", "a user's"])
def test_two_streams_change_no_class_on_a_gpu(corner: Path, tmp_path: Path, whose: str) -> None:
    """Again and again, since memory that is given away too early is wrong only now and then."""
    model = build()
    if whose != "ours":  # these are made on the host
        model = SurveyModel(model.net, model.voxel, model.classes, lambda points: point_features(points))
    manifest = prepare(corner, tmp_path / "tiles", model, tile=20)
    model.net.cuda()
    given = model, manifest.folder, manifest.buckets, manifest.grid, tiling(model.field, 20)
    results = []
    for ahead in (False, *[True] * 10):
        done = list(predict_tiles(*given, manifest.buckets.tiles * 4, ahead=ahead))
        results.append(read_results(manifest, done))
    model.net.cpu()
    assert len(results[0]) > 4
    assert all(result == results[0] for result in results)
