"""The search for cuSPARSELt: it is found in its wheel, opened by absolute path, and its version is checked.

cuBLASLt is the one that torch has loaded. cuSPARSELt is not: torch 2.11 for CUDA 13 pins 0.8.0, which is slower on
Hopper than the releases before and after it (NVIDIA's notes to 0.8.1), so a newer one is opened next to it. Two
versions in one process do not mix, because each is opened with RTLD_LOCAL.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from shiplap import ShiplapError
from shiplap.plugin_api import error, library_folder
from shiplap_slidesparse.lt import native

__all__ = ["NAME", "OLDEST", "available", "cusparselt_candidates", "open_cusparselt", "supports_product"]

NAME = "libcusparseLt.so.0"
# The lowest version of cuSPARSELt that is accepted.
OLDEST = (0, 8, 1)
CAPABILITY = (8, 0)  # sparse tensor cores
ASKED = (128, 128, 128)  # m, n, k: whole tiles of every type
# Of the wheels, the newest layout first.
_HOMES = ("nvidia/cu13/lib", "nvidia/cu12/lib", "nvidia/cusparselt/lib", "cusparselt/lib")


def cusparselt_candidates() -> Iterator[Path]:
    """Yield the paths at which the cuSPARSELt library may lie, without a test whether it does. The folder that the
    environment variable ``SHIPLAP_LIBRARY_PATH`` names comes first, and the wheels on ``sys.path`` follow.
    """
    if (folder := library_folder()) is not None:
        yield folder / NAME
    for entry in dict.fromkeys(sys.path):
        for home in _HOMES:
            yield Path(entry or ".").absolute() / home / NAME


@cache
def open_cusparselt() -> str:
    """Open the first cuSPARSELt that is new enough, once per process. Return an empty string, or the reason if none
    could be opened.
    """
    refused = []
    # Several wheels may link to one file.
    for path in dict.fromkeys(p.resolve() for p in cusparselt_candidates() if p.is_file()):
        try:
            native.open_libraries("", str(path), "", OLDEST)
            return ""
        except native.LibraryRefusal as e:
            refused.append(f"{path}: {e}")
        except ShiplapError as e:  # our own library is not built
            return f"{e.id} {e.what}: {e.got}"
    wanted = ".".join(map(str, OLDEST))
    return "; ".join(refused) or f"no {NAME} on sys.path: pip install 'nvidia-cusparselt-cu13>={wanted}'"


def available(device: torch.device | str | int = "cuda", dtype: torch.dtype | None = None) -> bool | str:
    """Return True if products with 2:4 weights of ``dtype`` run on ``device``. Otherwise return the reason why not, as
    a string.

    The first call opens cuSPARSELt. If ``dtype`` is None, the device and the library are tested, but no product.
    """
    device = torch.device(device if not isinstance(device, int) else f"cuda:{device}")
    if device.type != "cuda":
        return f"{device.type} has no sparse tensor cores"
    if not torch.cuda.is_available():
        return "this torch sees no GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} has no sparse tensor cores"
    return open_cusparselt() or dtype is None or supports_product(device, dtype)


def supports_product(
    device: torch.device, source: torch.dtype, result: torch.dtype | None = None, scaling: int = native.UNSCALED
) -> bool | str:
    """Return True if the open cuSPARSELt makes a plan of a product with these dtypes on ``device``. Otherwise return
    the message with which it refuses.

    Results are cached, so calls of products do not repeat the query. ``source`` is the dtype of the operands. If
    ``result`` is None, the result has the default dtype for ``source``. If ``scaling`` is ``PER_ROW``, the product
    includes the multiplication by a scale for each weight row.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    # The version is part of the key: a test may open another one.
    return _query_support(index, source, result or native.RESULT[source], scaling, native.library_versions()[1])


@cache
def _query_support(device: int, source: torch.dtype, result: torch.dtype, scaling: int, version: str) -> bool | str:
    """Return True if the open cuSPARSELt makes a plan of a product of ``source`` operands with a result of dtype
    ``result`` on ``device``. Otherwise return the message with which it refuses. ``scaling`` says which scales the
    product applies. Results are cached by all arguments, and ``version`` is only a part of that key.
    """
    with torch.cuda.device(device):
        _ensure_context(device)
        try:
            native.prepare_plan(
                native.ProductProblem(device, *ASKED, source, result, scaling),
                True,
                torch.cuda.current_stream().cuda_stream,
            )
        except native.LibraryRefusal as e:
            return f"cuSPARSELt {version}: {e}"
    return True


def _ensure_context(device: int) -> None:
    """Make torch create the CUDA context of device number ``device``, which the driver needs to make plans."""
    torch.empty(1, device=torch.device("cuda", device))


def require_sparse(device: torch.device, where: str) -> None:
    """Raise ``SL401`` unless ``device`` has sparse tensor cores and a usable cuSPARSELt. ``where`` names the caller in
    the error.
    """
    why = available(device)
    if why is not True:
        raise error(
            "SL401",
            where=where,
            got=str(why),
            expected=f"cuSPARSELt {'.'.join(map(str, OLDEST))} or later",
            fix="install nvidia-cusparselt-cu13, or use the dense form",
        )
