"""The C functions of ``csrc/lt/manage.h`` by ctypes, for work outside of the hot path."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shiplap.plugin_api import error, find_library

__all__ = [
    "LIBRARY",
    "PER_ROW",
    "PER_TENSOR",
    "RESULT",
    "UNSCALED",
    "LibraryRefusal",
    "ProductPlan",
    "ProductProblem",
    "compress_at",
    "compressed_size",
    "count_plans",
    "destroy_plans",
    "library_versions",
    "multiply_at",
    "open_libraries",
    "prepare_plan",
]

LIBRARY = Path(__file__).parents[1] / "libshiplap_slidesparse_lt.so"
UNSUPPORTED = 2  # SL_UNSUPPORTED

_CUDA_TYPE = {
    torch.float32: 0,
    torch.float16: 2,
    torch.int8: 3,
    torch.int32: 10,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
}
UNSCALED, PER_TENSOR, PER_ROW = 0, 1, 2
# What a product of such operands is written as; one term of it is exact.
RESULT = {
    torch.int8: torch.int32,
    torch.float8_e4m3fn: torch.bfloat16,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
}


class LibraryRefusal(Exception):
    """The error for a device, dtype, size or algorithm that cuBLASLt or cuSPARSELt does not support."""


@dataclass(frozen=True)
class ProductProblem:
    """A product ``[m, k] @ [n, k].T`` on the CUDA device ``device``, as the libraries take it. ``source`` is the dtype
    of the operands, and ``result`` that of the result. ``scaling`` is the number of the kind of scales that the library
    applies. The attributes are the fields of the C struct ``slidesparse_lt_problem`` in the order of the struct.

    ``algorithm`` -1 and ``split_k`` 0 leave the choice to the library.
    """

    device: int
    m: int
    n: int
    k: int
    source: torch.dtype
    result: torch.dtype
    scaling: int = UNSCALED
    algorithm: int = -1
    split_k: int = 0

    def with_fields(self, **changes: Any) -> ProductProblem:
        """Return a copy of the problem with the fields ``changes`` replaced."""
        return replace(self, **changes)

    def as_struct(self) -> Any:
        """Return the fields as the array of int64 that the C functions take. A dtype becomes its number in CUDA's
        ``cudaDataType``.
        """
        values = [_CUDA_TYPE[v] if isinstance(v, torch.dtype) else v for v in astuple(self)]
        return (ctypes.c_int64 * len(values))(*values)


@cache
def _load_library(path: Path) -> ctypes.CDLL:
    """Load the library at ``path`` and return it, with the result types of its functions set."""
    library = ctypes.CDLL(str(path))
    library.slidesparse_lt_plans.restype = ctypes.c_int64
    library.slidesparse_lt_versions.restype = library.slidesparse_lt_forget.restype = None
    return library


def _library_functions() -> ctypes.CDLL:
    """Return the library of slidesparse's CUDA products. It is found and loaded at the first call only."""
    return _load_library(find_library(LIBRARY))


def _call_library(name: str, *args: Any) -> None:
    """Call the C function ``slidesparse_lt_<name>`` with ``args``. Raise ``LibraryRefusal`` with the function's message
    if the product is not supported, and ``SL305`` if it fails otherwise.
    """
    text = ctypes.create_string_buffer(1024)
    # ctypes passes a plain integer as 32 bits, which would cut addresses.
    converted = [v.encode() if isinstance(v, str) else ctypes.c_void_p(v) if isinstance(v, int) else v for v in args]
    status = getattr(_library_functions(), f"slidesparse_lt_{name}")(*converted, text, ctypes.c_size_t(len(text)))
    if status == UNSUPPORTED:
        raise LibraryRefusal(text.value.decode(errors="replace"))
    if status:
        raise error("SL305", where=f"slidesparse_lt_{name}", got=text.value.decode(errors="replace"), expected="")


def open_libraries(cublaslt: str, cusparselt: str, driver: str, oldest: Sequence[int]) -> None:
    """Open cuBLASLt, cuSPARSELt and the CUDA driver's library by their absolute paths. A library whose path is empty is
    not opened, and an open library is not opened again.

    ``oldest`` is the lowest accepted version of cuSPARSELt. Raise ``LibraryRefusal`` with the reason if a library
    cannot be used.
    """
    _call_library("open", cublaslt, cusparselt, driver, (ctypes.c_int64 * 3)(*oldest))


def library_versions() -> tuple[str, str]:
    """Return the versions of cuBLASLt and cuSPARSELt as strings such as ``0.8.1``. The string is empty for a library
    that is not open.
    """
    numbers = (ctypes.c_int64 * 6)()
    _library_functions().slidesparse_lt_versions(numbers)
    return tuple(".".join(map(str, part)) if part[0] >= 0 else "" for part in (numbers[:3], numbers[3:]))  # type: ignore[return-value]


@dataclass(frozen=True)
class ProductPlan:
    """The properties of a plan of a product. ``workspace`` is the number of bytes of its scratch memory. ``compressed``
    is the number of bytes of its compressed weight. ``algorithms`` is the number of algorithms from which the plan can
    choose.
    """

    workspace: int
    compressed: int
    algorithms: int


def prepare_plan(problem: ProductProblem, sparse: bool, stream: int = 0) -> ProductPlan:
    """Return the properties of the plan of the product ``problem``. The library makes the plan if it does not exist
    yet. ``sparse`` is true for a packed weight, and false for a row-major one. ``stream`` is the handle of a CUDA
    stream, by default that of the default stream. Raise ``LibraryRefusal`` if the library does not support the product.
    """
    info = (ctypes.c_int64 * 3)()
    _call_library("prepare", problem.as_struct(), ctypes.c_int32(sparse), stream, info)
    return ProductPlan(*info)


def compressed_size(problem: ProductProblem) -> tuple[int, int]:
    """Return the number of bytes of the compressed weight of ``problem``, and that of the scratch memory for the
    compression.
    """
    sizes = (ctypes.c_int64 * 2)()
    _call_library("compressed_size", problem.as_struct(), sizes)
    return sizes[0], sizes[1]


def compress_at(problem: ProductProblem, weight: int, compressed: int, scratch: int, stream: int) -> None:
    """Write the compressed form of a row-major 2:4 weight to ``compressed`` on the CUDA stream ``stream``. ``weight``,
    ``compressed`` and ``scratch`` are addresses of device memory. The compression uses ``scratch`` as temporary memory.
    """
    _call_library("compress", problem.as_struct(), weight, compressed, scratch, stream)


def multiply_at(
    problem: ProductProblem,
    sparse: bool,
    x: int,
    weight: int,
    scales: tuple[int, int],
    out: int,
    workspace: tuple[int, int],
    stream: int,
) -> None:
    """Write the product of ``problem`` to ``out`` on a CUDA stream, by its plan. Tensors are passed as addresses.

    ``sparse`` is true for a compressed weight, and false for a row-major one. ``scales`` holds the addresses of the
    scales of ``x`` and of the weight, or 0 for none. ``workspace`` is the address and the number of bytes of the
    scratch memory.
    """
    room = ctypes.c_size_t(workspace[1])
    _call_library(
        "multiply", problem.as_struct(), ctypes.c_int32(sparse), x, weight, *scales, out, workspace[0], room, stream
    )


def count_plans() -> int:
    """Return the number of plans that the library keeps in this process."""
    return int(_library_functions().slidesparse_lt_plans())


def destroy_plans() -> None:
    """Destroy all plans and library handles of this process, for tests."""
    _library_functions().slidesparse_lt_forget()
