"""Wrappers for a new device, generated from what torch declares and the vendor ships (docs/backend.md)."""
