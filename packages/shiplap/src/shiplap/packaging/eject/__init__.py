"""Ops as plain sources of torch, without a dependency on Shiplap: ``eject(ops, package).write(folder)``."""

from shiplap.packaging.eject.engine import EjectedPackage, eject

__all__ = ["EjectedPackage", "eject"]
