"""Exported programs as one file: ``export_onnx`` for onnxruntime, ``package_model`` for torch's loader in C++."""

from __future__ import annotations

from shiplap.packaging.model import package_model
from shiplap.packaging.onnx import export_onnx

__all__ = ["export_onnx", "package_model"]
