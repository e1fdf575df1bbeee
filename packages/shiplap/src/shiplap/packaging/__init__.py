"""Packages with native code: wheels (``shiplap package`` and its build backend), and models as one ``.pt2``."""

from shiplap.packaging.contents import PackageExtras
from shiplap.packaging.model import PackedModel, package_model
from shiplap.packaging.wheel import PackedWheel, WheelRequest, package

__all__ = ["PackageExtras", "PackedModel", "PackedWheel", "WheelRequest", "package", "package_model"]
