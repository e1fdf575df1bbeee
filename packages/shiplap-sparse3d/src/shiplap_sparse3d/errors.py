"""Surveys: SL82x."""

from __future__ import annotations

from shiplap import ShiplapError
from shiplap.extend import register_errors

__all__ = ["SurveyError"]


class SurveyError(ShiplapError, RuntimeError):
    """A survey or a scan that cannot be processed as asked (SL82x)."""


register_errors(
    SurveyError,
    [
        (
            "SL820",
            "the network has no bounded receptive field",
            (
                "A survey is predicted tile by tile. The result equals the untiled one only if an output depends on "
                "voxels within a known distance."
            ),
            "take layers out that look at all voxels at once, or move them behind the survey",
        ),
        (
            "SL821",
            "the tiles do not fit the network",
            (
                "A tile whose origin is not a multiple of the network's total stride, or whose halo is smaller than "
                "the receptive field, gives other values than the untiled survey."
            ),
            "leave the argument out, or pass what 'expected' names",
        ),
        (
            "SL822",
            "the point cloud cannot be read",
            "Every point of the input gets a class, so a file that is damaged or of another kind stops the survey.",
            "pass a whole LAS, LAZ or COPC file; 'got' says what the reader met",
        ),
        (
            "SL823",
            "the survey folder belongs to another survey",
            "Finished tiles are reused. They are of use only for the same input, network, tiles and halo.",
            "pass another folder, or delete this one to start again",
        ),
        (
            "SL824",
            "the survey is not complete",
            "The output is written when every tile is done. Tiles are missing, or their results are damaged.",
            "run the same command again: finished tiles are kept",
        ),
        (
            "SL825",
            "the survey model cannot be used",
            "A survey needs a SurveyModel: a network of voxels, features that look no further than declared, classes.",
            "correct what 'got' names; docs/surveys.md has a model that works",
        ),
        (
            "SL826",
            "the scan has no classes to learn from",
            "The demonstration learns from the classification field of the scan and is judged by it.",
            "pass a scan whose points are classified, or other classes with --classes",
        ),
    ],
)
