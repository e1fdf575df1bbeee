"""The reader of classified scans: last returns in metres, and which of them are ground."""

from __future__ import annotations

import math
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch

from shiplap import ShiplapError
from shiplap.plugin_api import error
from shiplap_sparse3d.demo.scan import Scan, held_out_mask
from shiplap_sparse3d.survey.cloud import open_cloud, read_chunks

__all__ = ["load_shipped_scan", "read_scan"]

NOISE = 7, 18  # classes of the LAS specification
FEWEST, MOST = 5_000, 5_000_000  # last returns
FEWEST_OF_A_CLASS = 100  # in the training area, and in the one that is held out


def load_shipped_scan() -> Scan:
    """Return the scan that comes with the package, a laser scan of the Statue of Liberty. ``data/README.md`` describes
    its origin.
    """
    with as_file(files("shiplap_sparse3d.demo") / "data" / "liberty.laz") as path:
        return read_scan(path, (2,), 1.0)


def read_scan(path: Path, classes: tuple[int, ...], metres: float) -> Scan:
    """Return the points of the last returns in the file ``path``, without noise, in metres from their lowest
    coordinates. A point is ground if its class is one of ``classes``.

    Args:
        path: a LAS, LAZ or COPC file.
        classes: the codes of the classification field that count as ground.
        metres: the length of one unit of the file in metres, 0.3048 for feet.

    Raises:
        SurveyError: ``SL822`` for a file that cannot be read, ``SL826`` for one from whose classes nothing can be
            learned.
    """
    xyz, codes = [], []
    with open_cloud(path) as reader:
        for points in read_chunks(reader, path):
            code = np.asarray(points["classification"])
            # The last return of a pulse is the one that may have reached the ground.
            last = np.asarray(points["return_number"]) >= np.asarray(points["number_of_returns"])
            keep = last & ~np.isin(code, NOISE)
            xyz.append(np.stack([points.x, points.y, points.z], 1)[keep])
            codes.append(code[keep])
            # For each chunk, so that a huge file is refused before it fills the memory.
            if sum(map(len, codes)) > MOST:
                raise _unfit_scan_error(
                    path, f"more than {MOST:,} last returns", "a smaller part: the demonstration trains on one area"
                )
    place, code = np.concatenate(xyz), np.concatenate(codes)
    _check_classes(path, code, classes)
    if len(code) < FEWEST:
        raise _unfit_scan_error(path, f"{len(code):,} last returns", f"{FEWEST:,} or more")
    wide = float((place.max(0) - place.min(0))[:2].max()) * metres
    if not math.isfinite(wide) or not 50 <= wide <= 50_000:
        raise _unfit_scan_error(
            path, f"an area {wide:,.1f} m wide", "50 m to 50 km; --unit says how long a unit of the file is"
        )
    scan = Scan(
        # float32 has too few digits for coordinates of a national grid, so the minimum is subtracted first.
        torch.from_numpy(((place - place.min(0)) * metres).astype(np.float32)),
        torch.from_numpy(np.isin(code, classes)),
    )
    held = held_out_mask(scan)
    for name, area in (("training area", ~held), ("held-out area", held)):
        ground = int(scan.ground[area].sum())
        if min(ground, int(area.sum()) - ground) < FEWEST_OF_A_CLASS:
            got = f"{ground:,} points of ground and {int(area.sum()) - ground:,} others in the {name}"
            raise _unfit_scan_error(path, got, f"{FEWEST_OF_A_CLASS} or more of both")
    return scan


def _check_classes(path: Path, code: np.ndarray, classes: tuple[int, ...]) -> None:
    """Raise ``SL826`` if all points of the scan ``path``, or none, have one of ``classes``, the class codes that count
    as ground. ``code`` holds the class code of each point.
    """
    present, counts = np.unique(code, return_counts=True)
    listed = (
        ", ".join(f"class {c}: {n:,}" for c, n in zip(present.tolist(), counts.tolist(), strict=True)) or "no points"
    )
    ground = np.isin(code, classes)
    if not ground.any() or ground.all():
        wanted = ", ".join(map(str, classes))
        raise _unfit_scan_error(
            path, f"{listed} (last returns without noise)", f"some points of class {wanted}, and others"
        )


def _unfit_scan_error(path: Path, got: str, expected: str) -> ShiplapError:
    """Return the error ``SL826`` for the scan ``path``, from which the demonstration cannot learn. In the error's
    message, ``got`` is what the scan contains, and ``expected`` is what it should contain.
    """
    return error("SL826", where=str(path), got=got, expected=expected)
