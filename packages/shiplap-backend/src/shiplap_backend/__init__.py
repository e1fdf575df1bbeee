"""Wrappers for a new device, generated from what torch declares and the vendor ships (docs/backend.md)."""

from shiplap_backend.errors import BackendError  # its import also adds SL9xx to the catalogue

__all__ = ["BackendError"]
