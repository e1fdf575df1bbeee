"""OpenVINO: graphs of its opset 15, compiled for the CPU. Headers and libraries come from the ``openvino`` wheel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from shiplap.plugin_api import error
from shiplap_backend.runtime import CONTRACT, RUNTIMES, Runtime
from shiplap_backend.vendor import Functions, find_enums, node_classes

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
def _package_directory() -> Path:
    """Return the directory of the installed openvino package, without importing it.

    Raise ``SL907`` if it is not installed.
    """
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


def _wheel_version() -> str:
    """Return the version of the openvino wheel, or ``"0"`` for an installation without metadata.

    Raise ``SL907`` if openvino is not installed.
    """
    try:
        return version("openvino")
    except PackageNotFoundError:
        _package_directory()
        return "0"


def _opset_headers() -> Path:
    """Return the folder of OpenVINO's C++ headers."""
    return _package_directory() / "include" / "openvino"


@cache
def _read_opset() -> Functions:
    """Return the constructors of the operations in OpenVINO's opset 15 by operation name, read from its headers."""
    return node_classes(_opset_headers() / "op", _opset_headers() / "opsets" / "opset15_tbl.hpp", outputs=_OUTPUTS)


@cache
def _read_enums() -> Mapping[str, Mapping[str, str]]:
    """Return the enums in OpenVINO's headers by qualified name. Each maps an enumerator to its C++ name."""
    return find_enums(_opset_headers() / "op")


def _link_args() -> list[str]:
    """Return the linker's arguments for OpenVINO's library."""
    libraries = _package_directory() / "libs"
    # Wheels have no libopenvino.so without a version.
    library = next(libraries.glob("libopenvino.so.*"))
    return [str(library), f"-Wl,-rpath,{libraries}"]


RUNTIME = Runtime(
    name="openvino",
    contract=CONTRACT,
    directory=_HERE,
    metadata=RUNTIMES.parent / "metadata" / "openvino.yaml",
    requires={"openvino": ">=2026.1,<2027"},
    system_dirs=lambda: [_package_directory() / "include"],
    link_args=_link_args,
    opset=_read_opset,
    enums=_read_enums,
    version=_wheel_version,
)
