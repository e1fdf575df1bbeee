"""OpenVINO: graphs of its opset 15, compiled for the CPU. Headers and libraries come from the ``openvino`` wheel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from shiplap.plugin_api import error
from shiplap_backend.runtime import CONTRACT, RUNTIMES, Runtime
from shiplap_backend.vendor import Functions, enums, node_classes

__all__ = ["RUNTIME"]

_HERE = Path(__file__).parent

# The classes with several outputs, which the headers do not say: how many, or the parameter that says so; 0: it varies.
_OUTPUTS: Mapping[str, int | str] = {
    **dict.fromkeys(("If", "Loop", "TensorIterator"), 0),
    **{"Split": "num_splits", "VariadicSplit": "split_lengths"},
    **dict.fromkeys(("AdaptiveMaxPool", "CTCGreedyDecoderSeqLen", "ConvertPromoteTypes", "GRUSequence"), 2),
    **dict.fromkeys(("LSTMCell", "MaxPool", "Proposal", "RNNSequence", "TopK"), 2),
    **{"ExperimentalDetectronGenerateProposalsSingleImage": 2, "ExperimentalDetectronROIFeatureExtractor": 2},
    **dict.fromkeys(("ExperimentalDetectronDetectionOutput", "GenerateProposals", "LSTMSequence", "MatrixNms"), 3),
    **dict.fromkeys(("MulticlassNms", "NMSRotated", "NonMaxSuppression", "StringTensorUnpack"), 3),
    "Unique": 4,
}


@cache
def _package() -> Path:
    """Return the directory of the wheel, without importing it."""
    spec = find_spec("openvino")
    if spec is None or spec.origin is None:
        raise error(
            "SL907",
            where="openvino",
            got="no package 'openvino'",
            expected="openvino>=2026.1",
            fix="install it: pip install 'shiplap-backend[openvino]'",
        )
    return Path(spec.origin).parent


def _version() -> str:
    """Return the version of the wheel, or "0" for an installation without metadata."""
    try:
        return version("openvino")
    except PackageNotFoundError:
        _package()
        return "0"


def _headers() -> Path:
    return _package() / "include" / "openvino"


@cache
def _opset() -> Functions:
    """Return the functions of opset 15."""
    return node_classes(_headers() / "op", _headers() / "opsets" / "opset15_tbl.hpp", outputs=_OUTPUTS)


@cache
def _enums() -> Mapping[str, Mapping[str, str]]:
    """Return the enums of the headers."""
    return enums(_headers() / "op")


def _link_args() -> list[str]:
    libraries = _package() / "libs"
    # Wheels have no libopenvino.so without a version.
    library = next(libraries.glob("libopenvino.so.*"))
    return [str(library), f"-Wl,-rpath,{libraries}"]


RUNTIME = Runtime(
    name="openvino",
    contract=CONTRACT,
    directory=_HERE,
    metadata=RUNTIMES.parent / "metadata" / "openvino.yaml",
    requires={"openvino": ">=2026.1,<2027"},
    system_dirs=lambda: [_package() / "include"],
    link_args=_link_args,
    opset=_opset,
    enums=_enums,
    version=_version,
)
