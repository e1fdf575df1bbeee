"""Surveys: SL82x. Neighbour caches: SL83x. Networks as one file: SL84x."""

from __future__ import annotations

from shiplap import ShiplapError
from shiplap.plugin_api import register_errors

__all__ = ["NeighborCacheError", "SurveyError"]


class SurveyError(ShiplapError, RuntimeError):
    """An error of a survey or a scan that cannot be processed (SL82x)."""


register_errors(
    SurveyError,
    [
        (
            "SL820",
            "the network has no bounded receptive field",
            (
                "Shiplap predicts a survey tile by tile. The result equals that of the whole survey only if each "
                "output depends on voxels within a known distance."
            ),
            "remove layers that mix all voxels, such as attention and global pooling",
        ),
        (
            "SL821",
            "the tiles do not fit the network",
            (
                "The origin of a tile must be a multiple of the network's total stride, and the halo must cover the "
                "receptive field. Otherwise the points of a tile would get other classes than in the whole point cloud."
            ),
            "omit the argument to get the default, or pass a value as under 'expected'",
        ),
        (
            "SL822",
            "the point cloud cannot be read",
            (
                "Shiplap gives a class to every point of the input. It therefore stops if the file is damaged or in "
                "another format."
            ),
            "pass a complete LAS, LAZ or COPC file",
        ),
        (
            "SL823",
            "the survey folder belongs to another survey",
            (
                "The folder contains finished tiles. They are valid only for the same input, network, tile size and "
                "halo."
            ),
            "pass another folder, or delete this folder",
        ),
        (
            "SL824",
            "the survey is not complete",
            (
                "Shiplap writes the output when the classes of all tiles are there. A file in the survey folder is "
                "missing or damaged, as after a loss of power."
            ),
            "run the same command again; it keeps what is whole and makes the rest again",
        ),
        (
            "SL825",
            "the survey model cannot be used",
            (
                "A SurveyModel needs a network that maps voxels to logits, a function that computes the features of "
                "points, the size of a voxel, and one class code for each logit."
            ),
            "correct what 'got' names; docs/surveys.md has a working example",
        ),
        (
            "SL826",
            "the scan has no classes to learn from",
            (
                "The demonstration trains on the classification field of the scan, and compares the predictions with "
                "this field."
            ),
            "pass a scan whose points are classified, or name the ground classes of the scan with --classes",
        ),
        (
            "SL827",
            "the Dask scheduler cannot be used",
            "A survey with a scheduler runs on the workers of its Dask cluster, and on no other machine.",
            "start the scheduler and its workers, and run the same command again; finished tiles are kept",
        ),
        (
            "SL828",
            "a Dask worker cannot run the survey",
            (
                "Each worker needs the package versions of the client, the modules of the model and the files of the "
                "survey. Otherwise it would load other classes or other data."
            ),
            "put on the workers what 'got' names, and run the same command again; finished tiles are kept",
        ),
    ],
)


class NeighborCacheError(ShiplapError, ValueError, AssertionError):
    """A neighbour cache that does not fit the call (``SL830``). It is an ``AssertionError`` too, as in FlexGEMM."""


register_errors(
    NeighborCacheError,
    [
        (
            "SL830",
            "the neighbour cache belongs to another call",
            (
                "A cache holds the neighbours of given voxels under given taps. Another kernel, stride or direction "
                "would read wrong rows. Voxels are the same if they are the same tensor."
            ),
            "pass neighbor_cache=None, the cache of a layer like this one, or its .T for the way back",
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
                "A file for other runtimes is made from the code of the network and the weights of a checkpoint. The "
                "checkpoint must have all weights of the network, and torch.export must be able to trace it."
            ),
            (
                "for missing weights, pass the network's checkpoint, or set --prefix to the text before its names; for "
                "a trace that fails, change the code under 'got' so that torch.export traces it"
            ),
        ),
    ],
)
