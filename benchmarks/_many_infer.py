"""Inference on the tiles of a survey by one, two, four ... ranks: the part ``infer`` of ``many_gpus.py``.

Started by itself (``python _many_infer.py FOLDER DEVICE [SURVEY ...]``) it makes the surveys that are asked for, or
all of them, which takes no GPU, beside the ranks.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from _many_ranks import Ranks, Works, middle
from _many_train import network
from torch import nn

if TYPE_CHECKING:
    from shiplap_sparse3d.survey import Manifest, SurveyModel
    from shiplap_sparse3d.survey.field import Tile
    from shiplap_sparse3d.survey.tasks import SurveyJob

__all__ = ["SURVEYS", "Survey", "infer"]


@dataclass(frozen=True)
class Survey:
    """A survey, the network that predicts it, and for how many seconds that is measured."""

    points: int
    area: tuple[int, int]
    channels: tuple[int, ...]
    tile: int | None
    limit: float
    half: bool = False  # bfloat16 by autocast
    place: str = ""  # of another survey, whose points these are

    def model(self, device: torch.device) -> SurveyModel:
        """The network on ``device``, with the same weights everywhere."""
        import shiplap_sparse3d as sparse3d
        from shiplap_sparse3d.survey import SurveyModel

        class Seen(nn.Module):
            def __init__(self, channels: tuple[int, ...], *, half: bool) -> None:
                super().__init__()
                self.first, self.net, self.half = sparse3d.SubMConv3d(5, 4, 1), network(3, channels), half

            def forward(self, x: Any) -> Any:
                with torch.autocast(x.feats.device.type, torch.bfloat16, enabled=self.half):
                    return self.net(self.first(x))

        torch.manual_seed(2)
        return SurveyModel(Seen(self.channels, half=self.half).to(device).eval(), (1.0, 1.0, 1.0), (1, 2, 5))

    def made(self, folder: Path, device: torch.device) -> Manifest:
        """The survey, sorted into tiles: found in ``folder``, or made there."""
        import laspy

        from shiplap_sparse3d.survey import prepare

        source = folder / "in.las"
        if not source.exists():
            draw, (width, depth) = np.random.default_rng(0), self.area
            cloud = laspy.create(point_format=1, file_version="1.2")
            cloud.header.scales, cloud.header.offsets = (0.01,) * 3, (0.0,) * 3
            cloud.x, cloud.y = draw.uniform(0, width - 0.1, self.points), draw.uniform(0, depth - 0.1, self.points)
            cloud.z = 8 * np.sin(cloud.x / 31) + 6 * np.cos(cloud.y / 17) + draw.exponential(1.5, self.points)
            cloud.intensity = draw.integers(0, 4000, self.points)
            cloud.classification = np.full(self.points, 1, np.uint8)
            folder.mkdir(parents=True, exist_ok=True)
            cloud.write(source)
        return prepare(source, folder / "tiles", self.model(device), tile=self.tile)


SURVEYS = {
    "cuda": {
        "wide": Survey(20_000_000, (5120, 3200), (64, 128, 256), None, 40),  # tiles as the network wants them
        "narrow": Survey(2_400_000, (1024, 832), (32, 64, 128), 64, 12),
        "half": Survey(20_000_000, (5120, 3200), (64, 128, 256), None, 12, half=True, place="wide"),
    },
    "cpu": {
        "wide": Survey(40_000, (128, 128), (8, 16), 16, 5),
        "narrow": Survey(10_000, (64, 32), (4, 8), 8, 5),
        "half": Survey(40_000, (128, 128), (8, 16), 16, 5, half=True, place="wide"),
    },
}


def infer(ranks: Ranks, folder: Path, names: Sequence[str] = ()) -> dict[str, Any]:
    """Each survey of the device, or those of ``names``, as soon as it is made."""
    parts, surveys = {}, SURVEYS[ranks.device.type]
    for name, survey in ((name, surveys[name]) for name in names or surveys):
        at = survey.place or name
        while not (folder / f"{at}.made").exists():
            if (folder / "failed").exists():
                raise RuntimeError((folder / "failed").read_text())
            time.sleep(0.2)
        ranks.say("infer", name)
        parts[name] = scaling(ranks, survey, folder / at)
    return {"surveys": parts, "equal": all(part.pop("equal") for part in parts.values())}


def scaling(ranks: Ranks, survey: Survey, folder: Path) -> dict[str, Any]:
    """Tiles of a survey folder by ``k`` ranks, as a worker of ``shiplap survey`` does it: read, predict, write.

    Each rank has every ``k``-th of the groups of tiles, the largest first. Dask takes no part.
    """
    from shiplap_sparse3d.survey.tasks import THREADS, TOGETHER, SurveyEngine, predict_group

    job = survey.made(folder, ranks.device).job
    job = replace(job, together=TOGETHER[ranks.device.type])
    place, tiles, results = job.folder, job.tiles, {}
    groups = sorted(job.groups, key=lambda first: -sum(map(job.count, job.groups[first])))

    usual = THREADS if ranks.device.type == "cuda" else 1

    def forget() -> None:
        """What the run before has written, kept to be compared."""
        if (place.path / "classes").exists():
            results[len(results)] = {tile: sha256(place.result_path(tile).read_bytes()).digest() for tile in tiles}
        clear()

    def clear() -> None:
        shutil.rmtree(place.path / "classes", ignore_errors=True)

    def predict(groups: list[Tile], threads: int = usual) -> None:
        with closing(SurveyEngine(threads)) as engine:
            engine.share(job)
            for _ in engine.run(predict_group, groups):
                pass

    def run(k: int, threads: int = usual) -> None:
        predict(groups[ranks.rank :: k], threads)

    works: Works = {f"{k}": (k, partial(run, k)) for k in ranks.sizes}
    works |= {
        "1 again": (1, partial(run, 1)),
        f"{ranks.world} in turn": (ranks.world, partial(run, ranks.world, 1)),
    }
    predict(kinds(groups))
    ranks.wait()
    if ranks.rank == 0:
        clear()  # also of what another network has said of the same points
    seconds = ranks.rounds(works, survey.limit, warm=1, only=f"{ranks.world}", before=forget)
    taken = middle(seconds)
    mean = {name: statistics.mean(sum(each) / len(each) for each in of) for name, of in seconds.items()}
    top = f"{ranks.world}"
    other = [tile for each in results.values() for tile in each if each[tile] != results[0][tile]]
    return {
        "tiles": len(tiles),
        "points": survey.points,
        "channels": list(survey.channels),
        "tile": job.tiling.size,
        "halo": job.tiling.halo,
        "dtype": "bfloat16" if survey.half else "float32",
        "seconds": {name: [[round(s, 4) for s in each] for each in of] for name, of in seconds.items()},
        "speed": {k: round(taken["1"] / taken[f"{k}"], 3) for k in ranks.sizes},
        "gained by reading ahead": round(taken[f"{top} in turn"] / taken[top], 3),
        "slowest rank over the mean": round(taken[top] / mean[top], 3),
        "control": round(taken["1"] / taken["1 again"], 3),
        "ms of a tile": spent(ranks, job, groups[:: max(1, len(groups) // 24)]),
        "equal": ranks.rank != 0 or (len(results) > 1 and not other),
    }


def kinds(groups: list[Tile]) -> list[Tile]:
    """Some of ``groups``, the largest ones first, and the smallest four: corners, of which not every rank gets one.

    Kernels are compiled, or loaded, for sizes that a process has not met. That is done before anything is timed.
    """
    return [*groups[:: max(1, len(groups) // 16)], *groups[-4:]]


def spent(ranks: Ranks, job: SurveyJob, firsts: list[Tile]) -> dict[str, float]:
    """Milliseconds of a tile of the groups that begin with ``firsts``: their input on the host, reading and predicting,
    and what of that the GPU works.
    """
    from shiplap_sparse3d.survey.tasks import predict_codes, question_of

    taken, groups = {"read": 0.0, "predict": 0.0}, [job.groups[first] for first in firsts]
    tiles = sum(map(len, groups))
    for group in groups:
        times = [time.perf_counter()]
        question_of(job, group, torch.device("cpu"))
        times.append(time.perf_counter())
        predict_codes(job, group)  # its classes are copied to the host
        times.append(time.perf_counter())
        taken["read"] += times[1] - times[0]
        taken["predict"] += times[2] - times[1]
    if ranks.device.type == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for group in groups[:8]:
                predict_codes(job, group)
        busy = sum(e.self_device_time_total for e in profile.key_averages()) / 1e6
        taken["device"] = busy * tiles / sum(map(len, groups[:8]))
    return {name: round(s / tiles * 1e3, 2) for name, s in taken.items()}


if __name__ == "__main__":
    at, surveys = Path(sys.argv[1]), SURVEYS[sys.argv[2]]
    wanted = {surveys[name].place or name for name in sys.argv[3:] or surveys}
    try:
        for label, asked in surveys.items():
            began = time.perf_counter()
            if label in wanted:
                asked.made(at / label, torch.device("cpu"))
                (at / f"{label}.made").touch()
                print(f"survey {label} made in {time.perf_counter() - began:.1f} s", flush=True)
    except BaseException as why:
        (at / "failed").write_text(repr(why))
        raise
