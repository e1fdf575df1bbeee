"""Where the C headers (``shiplap/abi.h``) and the CMake modules of Shiplap are."""

from pathlib import Path

__all__ = ["cmake_dir", "include_dir"]


def include_dir() -> Path:
    """Return the folder to pass to a compiler with ``-I``, which holds ``shiplap/abi.h`` and the headers beside it."""
    return Path(__file__).parent / "include"


def cmake_dir() -> Path:
    """Return the folder for CMake's ``CMAKE_MODULE_PATH``, which holds ``ShiplapKernels.cmake`` and
    ``ShiplapModels.cmake``.
    """
    return Path(__file__).parent / "cmake"
