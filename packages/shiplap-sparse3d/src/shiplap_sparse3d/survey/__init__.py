"""Surveys larger than memory: a network classifies every point of a LAS, LAZ or COPC file, tile by tile."""

from shiplap_sparse3d.survey.field import Field, Tiling, probe, receptive_field, tiling
from shiplap_sparse3d.survey.model import Points, SurveyModel, point_features
from shiplap_sparse3d.survey.run import Manifest, SurveyResult, prepare, survey

__all__ = [
    "Field",
    "Manifest",
    "Points",
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
