"""``shiplap demo``: a sparse U-Net learns in one pass what a cloth simulation does iteratively, on a real scan."""

from shiplap_sparse3d.demo.result import DemoResult, DemoSettings
from shiplap_sparse3d.demo.run import run

__all__ = ["DemoResult", "DemoSettings", "run"]
