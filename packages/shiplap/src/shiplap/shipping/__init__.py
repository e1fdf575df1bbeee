"""Wheels that carry native code: what ``shiplap package`` and the build backend ``shiplap.shipping.backend`` do."""

from shiplap.shipping.contents import Extras
from shiplap.shipping.wheel import Packed, Request, package

__all__ = ["Extras", "Packed", "Request", "package"]
