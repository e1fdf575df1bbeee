"""Exported programs as one file: ``export_onnx`` for onnxruntime, ``package_model`` for torch's loader in C++.

``shares_cxx_runtime`` says whether a library can live in torch's process.
``computed_sizes_unguarded`` is the context in which ``torch.export`` accepts ranges of sizes from 2 on for any op.
"""

from __future__ import annotations

from shiplap.packaging.model import package_model
from shiplap.packaging.onnx import export_onnx
from shiplap.packaging.tags import shares_cxx_runtime
from shiplap.torch_private.symbolic_sizes import computed_sizes_unguarded

__all__ = ["computed_sizes_unguarded", "export_onnx", "package_model", "shares_cxx_runtime"]
