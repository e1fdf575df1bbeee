"""Surveys: SL82x. Neighbour caches: SL83x. Networks as one file: SL84x."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from shiplap import ShiplapError
from shiplap.plugin_api import error, register_errors

__all__ = ["NeighborCacheError", "SurveyError"]


class SurveyError(ShiplapError, RuntimeError):
    """An error of a survey or a scan that cannot be processed (SL82x)."""


register_errors(
    SurveyError,
    [
        (
            "SL820",
            "the receptive field of the network is unknown",
            (
                "Shiplap predicts a survey tile by tile. The result equals that of the whole survey only if each "
                "output depends on voxels within a known distance, the receptive field. Shiplap computes it from the "
                "sparse layers."
            ),
            (
                "use only sparse 3-d layers on the input's voxels and on the grids that strided layers make of them. "
                "Remove layers that mix all voxels, such as attention and global pooling"
            ),
        ),
        (
            "SL821",
            "the tiles do not fit the network",
            (
                "The size, the origin and the halo of a tile must be multiples of the network's total stride. The "
                "halo, the margin around a tile, must cover the receptive field. Otherwise points of a tile could "
                "get other classes than in the whole point cloud."
            ),
            "pass the value under 'expected', or omit the argument to get the default",
        ),
        (
            "SL822",
            "the point cloud cannot be read",
            (
                "Shiplap gives a class to every point of the input. It therefore stops if the file is damaged, has "
                "no points, or is in another format."
            ),
            "pass a complete LAS, LAZ or COPC file with at least one point",
        ),
        (
            "SL823",
            "the survey folder belongs to another survey",
            (
                "The folder contains finished tiles. They are valid only for the same input, network, tile size and "
                "halo. Tiles of another type of device or of other package versions may differ in the last bit. "
                "Another version of Shiplap may have another format of folders."
            ),
            (
                "pass another folder. If the finished tiles in this folder are no longer needed, delete the folder and "
                "run the command again. To keep them, continue with what 'got' names"
            ),
        ),
        (
            "SL824",
            "the survey is not complete",
            (
                "Shiplap writes the output once the classes of all tiles are known. A file in the survey folder is "
                "missing or damaged, as after a loss of power."
            ),
            "run the same command again. It keeps the intact files and computes the others anew",
        ),
        (
            "SL825",
            "the survey model cannot be used",
            (
                "A SurveyModel needs a network that maps voxels to logits, a function that computes the features of "
                "points, the size of a voxel, and one class code for each logit."
            ),
            (
                "change the part of the model that 'where' names until it fits 'expected'. docs/surveys.md has a "
                "complete example"
            ),
        ),
        (
            "SL826",
            "the demonstration cannot learn from this scan",
            (
                "The demonstration trains on the classification field of the scan. It needs enough points of ground "
                "and of other classes, on one area of 50 m to 50 km."
            ),
            (
                "if 'got' lists classes, name those of the ground, such as --classes 2,9. If it names a width, give "
                "the metres in a unit of the file, such as --unit 0.3048. Otherwise pass a scan of the size under "
                "'expected'"
            ),
        ),
        (
            "SL827",
            "the Dask scheduler cannot be used",
            "A survey with a scheduler runs on the workers of its Dask cluster, and on no other machine.",
            "start the scheduler and its workers, and run the same command again. It keeps the finished tiles",
        ),
        (
            "SL828",
            "a Dask worker cannot run the survey",
            (
                "Each worker needs the package versions of the client, the modules of the model and the files of the "
                "survey. Otherwise it would load other classes or other data."
            ),
            (
                "install the same package versions and the model's modules on all workers, and put the files on a "
                "file system that they share. Then run the same command again, which keeps the finished tiles"
            ),
        ),
    ],
)


def require_packages(where: object, extra: str, *names: str) -> None:
    """Raise ``SL603`` unless all modules called ``names`` can be found. ``extra`` is the extra of this package that
    installs them. ``where`` names the caller in the error.
    """
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        fix = f'install them: pip install "shiplap-sparse3d[{extra}]"'
        raise error("SL603", where=str(where), got=f"no {', '.join(missing)}", expected=", ".join(names), fix=fix)


def survey_error(id: str, where: object, got: object, expected: str, fix: str = "", what: str = "") -> ShiplapError:
    """Return the error ``id`` (such as ``SL822``) of a survey. ``where`` names its place, ``got`` is the wrong value,
    and ``expected`` describes a right one. If ``fix`` or ``what`` is empty, the error has the text of the catalogue for
    ``id``.
    """
    return error(id, where=str(where), got=got, expected=expected, fix=fix, what=what)


def require_same(id: str, where: object, known: Mapping[str, Any], wanted: Mapping[str, Any], fix: str = "") -> None:
    """Raise the error ``id`` of a survey unless ``known`` has the names of ``wanted`` with the same values. The error
    shows those that differ. ``where`` and ``fix`` are arguments of :func:`survey_error`.
    """
    if names := [name for name, value in wanted.items() if name not in known or known[name] != value]:
        got, expected = (", ".join(f"{name} {of.get(name, 'missing')}" for name in names) for of in (known, wanted))
        raise survey_error(id, where, got, expected, fix)


def failure_text(failure: BaseException) -> str:
    """Return the type and the text of the exception ``failure`` in one line."""
    return " ".join(f"{type(failure).__name__}: {failure}".split())


class NeighborCacheError(ShiplapError, ValueError, AssertionError):
    """A neighbour cache that does not fit the call (``SL830``). It is an ``AssertionError`` too, as in FlexGEMM."""


register_errors(
    NeighborCacheError,
    [
        (
            "SL830",
            "the neighbour cache belongs to another call",
            (
                "A cache holds the neighbours of given voxels for one kernel, stride and direction. With another "
                "one, a convolution would read wrong rows. Voxels count as the same only if they are the same tensor."
            ),
            "pass neighbor_cache=None to build a new cache. If only the direction differs, pass the .T of the cache",
        ),
    ],
)


class ExportError(ShiplapError, RuntimeError):
    """A checkpoint or a network that cannot be exported as one file (``SL840``)."""


register_errors(
    ExportError,
    [
        (
            "SL840",
            "the network cannot be exported",
            (
                "The export joins the code of a network with the weights of a checkpoint. The checkpoint must have "
                "all weights of the network, and torch.export must be able to trace the code."
            ),
            (
                "if 'got' names weights, pass the checkpoint of this network, or set --prefix to the text before the "
                "names of its weights in the checkpoint. If it names an error of torch.export, change the code so that "
                "torch.export can trace it"
            ),
        ),
    ],
)
