"""The demonstration ``shiplap demo``: a sparse U-Net learns which points of a real scan are ground."""

from shiplap_sparse3d.demo.result import DemoResult, DemoSettings
from shiplap_sparse3d.demo.run import run_demo

__all__ = ["DemoResult", "DemoSettings", "run_demo"]
