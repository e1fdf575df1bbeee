"""Packages with native code: wheels (``shiplap package`` and its build backend), and models as one ``.pt2``."""

from shiplap.packaging.contents import Extras
from shiplap.packaging.model import PackedModel, package_model
from shiplap.packaging.wheel import Packed, Request, package

__all__ = ["Extras", "Packed", "PackedModel", "Request", "package", "package_model"]
