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
            "the kernel library cannot be loaded",
            "A C ABI kernel lives in a shared library, which shiplap opens by its path.",
            "build the library (make install), or set SHIPLAP_LIBRARY_PATH to its directory",
        ),
        (
            "SL402",
            "the library does not contain the symbol",
            "The library is older or newer than the declaration that names the symbol.",
            "rebuild the library",
        ),
        (
            "SL403",
            "the library was built for another declaration",
            "A kernel built from another declaration would misread its arguments.",
            "regenerate the header with 'shiplap header', then rebuild the library",
        ),
        (
            "SL404",
            "the declaration has no equivalent in C",
            "The C ABI carries tensors, optional tensors and scalars, and C++ can evaluate only some checks.",
            "split the argument, or bind a Python launcher instead",
        ),
        (
            "SL405",
            "the native binding cannot be used",
            (
                "Unless its package brings one along, the native binding is compiled on your machine. Until it is "
                "available, calls go through the slower Python binding."
            ),
            "install a C++20 compiler or set CXX; set SHIPLAP_NATIVE=0 to keep the Python binding",
        ),
        (
            "SL406",
            "the cache directory is not private",
            "Files in the cache directory are loaded as code, so only you may be able to write to it.",
            (
                "set SHIPLAP_CACHE_DIR to a directory of your own, and delete a directory that other users could "
                "write to"
            ),
        ),
        (
            "SL407",
            "tvm-ffi is not installed",
            "Exporting a kernel through tvm-ffi needs its headers and its library.",
            "install it: pip install 'shiplap[tvm-ffi]'",
        ),
    ],
)
