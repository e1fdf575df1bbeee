"""A target small enough to read: metadata written by a test, against the installed torch and OpenVINO's headers."""

from __future__ import annotations

from pathlib import Path

from shiplap_backend.generate import GeneratedWrappers, generate_wrappers
from shiplap_backend.metadata import load_metadata, shipped_metadata
from shiplap_backend.runtimes import find_runtime

# The shipped target without its ops: its operators, dtypes and index parameters.
HEAD = shipped_metadata("openvino").read_text(encoding="utf-8").partition("\nops:\n")[0]


def write(directory: Path, ops: str) -> Path:
    """A metadata file of the target with these ops; the first line of ``ops`` is line ``first_line(1)`` of the file."""
    path = directory / "ops.yaml"
    path.write_text(f"{HEAD}\nops:\n{ops}", encoding="utf-8")
    return path


def line(number: int) -> int:
    """The file's line of line ``number`` of the ops."""
    return HEAD.count("\n") + 2 + number


def made(directory: Path, ops: str, units: int = 1) -> GeneratedWrappers:
    """What the generator makes of these ops."""
    return generated(write(directory, ops), units)


def generated(path: Path, units: int = 1) -> GeneratedWrappers:
    """What the generator makes of a metadata file."""
    return generate_wrappers(load_metadata(path), find_runtime("openvino"), units=units)


def body(directory: Path, ops: str) -> str:
    """The C++ of these ops."""
    return "\n".join(made(directory, ops).files.values())
