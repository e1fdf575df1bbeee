"""Wrappers for a new device, generated from torch's declarations and the vendor's library (docs/backend.md)."""

from shiplap_backend.errors import BackendError  # its import also adds SL9xx to the catalogue

__all__ = ["BackendError"]
