"""Kernel libraries: SL4xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register

__all__ = ["LibraryError"]


class LibraryError(ShiplapError, RuntimeError):
    """A kernel library that cannot be found, loaded or trusted (SL4xx)."""


register(
    LibraryError,
    [
        (
            "SL401",
            "kernel library not found",
            "The C ABI kernel is bound by path.",
            "build it (make install), or set SHIPLAP_LIBRARY_PATH to its directory",
        ),
        ("SL402", "symbol not in the library", "Library and declaration differ in age.", "rebuild the library"),
        (
            "SL403",
            "library built for another declaration",
            "Calling it would misread arguments.",
            "regenerate the header with 'shiplap header', then rebuild the library",
        ),
        (
            "SL404",
            "declaration has no C form",
            "The C ABI carries tensors, optional tensors and scalars.",
            "split the argument, or bind a Python launcher instead",
        ),
        (
            "SL405",
            "no native binding",
            "It is compiled on your machine; until it is there the Python binding serves.",
            "install a C++20 compiler or set CXX; SHIPLAP_NATIVE=0 asks for none",
        ),
        (
            "SL406",
            "cache directory that is not private",
            "What lies in it is loaded as code.",
            "set SHIPLAP_CACHE_DIR to a directory of your own; remove what others could write, with all it holds",
        ),
        (
            "SL407",
            "no tvm-ffi",
            "Exporting a kernel through tvm-ffi needs its headers and its library.",
            "pip install 'shiplap[tvm-ffi]'",
        ),
    ],
)
