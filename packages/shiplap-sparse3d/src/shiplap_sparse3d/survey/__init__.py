"""Surveys larger than memory: a network classifies every point of a LAS, LAZ or COPC file, tile by tile."""

from shiplap_sparse3d.survey.field import Field, receptive_field
from shiplap_sparse3d.survey.manifest import Manifest, prepare
from shiplap_sparse3d.survey.model import Points, SurveyModel, point_features
from shiplap_sparse3d.survey.probe import Seen, probe
from shiplap_sparse3d.survey.run import SurveyResult, survey
from shiplap_sparse3d.survey.tiles import Tiling, tiling

__all__ = [
    "Field",
    "Manifest",
    "Points",
    "Seen",
    "SurveyModel",
    "SurveyResult",
    "Tiling",
    "point_features",
    "prepare",
    "probe",
    "receptive_field",
    "survey",
    "tiling",
]
