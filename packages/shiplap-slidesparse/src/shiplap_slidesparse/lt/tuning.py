"""The choice of algorithm and split of k for a product: listed by the libraries and timed by ``shiplap.tune``, at load.

The lists differ from size to size, so they are not ``configs=`` of a declaration. The result is an ordinary choice of
the leaf op (``shiplap freeze``, ``shiplap cache``). A call searches for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

import shiplap as sl
from shiplap.plugin_api.tuning import Choice, ConfigSource, Value
from shiplap_slidesparse import formats, layers, ops
from shiplap_slidesparse.lt import kernels, libraries, native

__all__ = [
    "ALGORITHMS",
    "FEW_ROWS",
    "SPLITS",
    "accepts_config",
    "list_algorithms",
    "problem_of",
    "tune_layer",
    "tune_product",
]

SPLITS = (2, 4, -1)  # beside the library's own; -1 is segment-k
FEW_ROWS = 1024  # with more, there are tiles enough to fill the device

_SOURCE = {
    ops.mm_int8: torch.int8,
    ops.mm_fp8: torch.float8_e4m3fn,
    ops.sparse_mm_int8: torch.int8,
    ops.sparse_mm_fp8: torch.float8_e4m3fn,
    ops.sparse_mm_bf16: torch.bfloat16,
    ops.sparse_mm_fp16: torch.float16,
}
_LEAVES: dict[sl.Op, tuple[sl.Op | None, sl.Op]] = {
    layers.linear_int8: (ops.mm_int8, ops.sparse_mm_int8),
    layers.linear_fp8: (ops.mm_fp8, ops.sparse_mm_fp8),
    layers.linear_bf16: (None, ops.sparse_mm_bf16),
    layers.linear_fp16: (None, ops.sparse_mm_fp16),
}


def problem_of(op: sl.Op, device: int, m: int, n: int, k: int) -> native.ProductProblem:
    """Return the description of the library call for the product ``op`` of ``[m, k]`` and ``[n, k]`` on the CUDA device
    with the index ``device``. It leaves the choice of the algorithm to the library.
    """
    source = _SOURCE[op]
    scaling = native.PER_ROW if op is ops.mm_fp8 else native.UNSCALED
    return native.ProductProblem(device, m, n, k, source, native.RESULT[source], scaling)


def _with_config(problem: native.ProductProblem, config: Mapping[str, Value]) -> native.ProductProblem:
    """Return a copy of ``problem`` with the algorithm number ``config["ALG"]`` and with ``config["SPLIT_K"]``, the
    number of parts into which the dimension k is split. A missing ``SPLIT_K`` becomes 0, which leaves the number to the
    library.
    """
    return problem.with_fields(algorithm=config["ALG"], split_k=config.get("SPLIT_K", 0))


class AlgorithmSource(ConfigSource):
    """The source of the algorithms among which ``shiplap.tune`` chooses for a product, as the library lists them. A
    config is usable for a call if the library makes a plan for it.
    """

    def configs(self, op: sl.Op, device: torch.device, sizes: Mapping[str, Any]) -> list[dict[str, int]]:
        """Return the configurations to tune for a product ``op`` of ``sizes`` (``m``, ``n`` and ``k``). The library's
        own choice comes first, then every algorithm for which it makes a plan.
        """
        problem = problem_of(op, _device_index(device), sizes["m"], sizes["n"], sizes["k"])
        default = {"ALG": -1} if op in kernels.DENSE else kernels.DEFAULT
        return [default, *list_algorithms(op, problem, _stream_handle(device))]

    def refusal(self, op: sl.Op, config: Mapping[str, Value], args: tuple[Any, ...]) -> str:
        """Return the reason why the library does not run ``op`` with the algorithm in ``config`` for the arguments
        ``args``. Return an empty string if it does.
        """
        x = args[0]
        n = len(args[1]) if op in kernels.DENSE else args[2]
        problem = problem_of(op, _device_index(x.device), x.shape[0], n, x.shape[1])
        try:
            native.prepare_plan(_with_config(problem, config), op in kernels.SPARSE, _stream_handle(x.device))
        except native.LibraryRefusal as e:
            return str(e)
        return ""


ALGORITHMS = AlgorithmSource(f"{__name__}:ALGORITHMS", "cuda", kernels.NAME)


def list_algorithms(
    op: sl.Op, problem: native.ProductProblem, stream: int = 0, splits: Sequence[int] | None = None
) -> list[dict[str, int]]:
    """Return the configurations of ``op`` for which the library can run the product ``problem``. Each holds the number
    of an algorithm. For packed weights it also holds the number of parts into which k is split, and cuSPARSELt's
    version. ``splits`` are the numbers of parts to try, and their default depends on the number of rows. ``stream`` is
    the handle of a CUDA stream, by default that of the default stream.
    """
    sparse = op in kernels.SPARSE
    if sparse:
        libraries.require_sparse(torch.device("cuda", problem.device), op.spec.name)
    try:
        count = native.prepare_plan(problem, sparse, stream).algorithms
    except native.LibraryRefusal:
        return []
    if splits is None:
        # With many rows the tiles fill the device, and a split only adds a reduction.
        splits = (0, *SPLITS) if sparse and problem.m <= FEW_ROWS else (0,)
    listed = [
        {"ALG": a, "SPLIT_K": s, "VERSION": _cusparselt_version()} if sparse else {"ALG": a}
        for s in splits
        for a in range(count)
    ]
    return [config for config in listed if accepts_config(op, problem, config, stream)]


def accepts_config(op: sl.Op, problem: native.ProductProblem, config: Mapping[str, Value], stream: int = 0) -> bool:
    """Return whether the library makes a plan of the product ``problem`` with ``config``. The plan is kept for later
    calls. ``stream`` is the handle of a CUDA stream, by default that of the default stream.
    """
    try:
        native.prepare_plan(_with_config(problem, config), op in kernels.SPARSE, stream)
    except native.LibraryRefusal:
        return False
    return True


def _cusparselt_version() -> int:
    """Return the version of the open cuSPARSELt as one number, such as 8001 for 0.8.1. C++'s ``Version::number`` gives
    the same number.
    """
    major, minor, patch = map(int, native.library_versions()[1].split("."))
    return major * 1000000 + minor * 1000 + patch


def _device_index(device: torch.device) -> int:
    """Return the index of a CUDA device, or that of the current device if ``device`` has none."""
    return device.index if device.index is not None else torch.cuda.current_device()


def _stream_handle(device: torch.device) -> int:
    """Return the handle of the current CUDA stream of ``device``, as torch sets it."""
    return torch.cuda.current_stream(device).cuda_stream


def tune_product(
    op: sl.Op,
    sizes: Iterable[tuple[int, int, int]],
    device: str = "cuda",
    seconds: float = 20.0,
    remeasure: bool = False,
) -> list[Choice]:
    """Tune the algorithm of a product op for each ``(m, n, k)`` of ``sizes``, and return one ``Choice`` for each.
    Candidates run in a separate process. ``seconds`` is the time for one choice. If ``remeasure`` is true, sizes with a
    stored choice are measured again. Otherwise the stored choice is returned.
    """
    # A packed weight has a size that only the library knows, here any number.
    more = {"_": 1, "layout": ops.CUSPARSELT} if op in kernels.SPARSE else {}
    samples: list[dict[str, Value]] = [{"m": m, "n": n, "k": k, **more} for m, n, k in dict.fromkeys(sizes)]
    return ALGORITHMS.tune(op, samples, device=device, seconds=seconds, remeasure=remeasure)


def tune_layer(
    op: sl.Op,
    rows: Iterable[int],
    n: int,
    k: int,
    pairs: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    seconds: float = 20.0,
    remeasure: bool = False,
) -> list[Choice]:
    """Tune the layer op ``op`` with a weight ``[n, k]`` for each number in ``rows``, and return the choices. First the
    algorithms of its products with the row-major and with the packed weight are tuned, then the choice between the two
    products.

    That last choice is timed in this process, since the products have been verified and their algorithms are in force
    here. With 0 ``pairs`` there is no packed weight and only the first step is done. ``dtype`` is that of the
    activations, and ``seconds`` is the time for one choice. If ``remeasure`` is true, sizes with a stored choice are
    measured again. Otherwise the stored choice is returned.
    """
    # They are read several times, and may come from an iterator.
    rows = list(rows)
    dense, sparse = _LEAVES[op]
    wide, choices = formats.dense_depth(n), list[Choice]()
    for leaf, depth in ((dense, k), (sparse, formats.lifted_depth(k, pairs) if pairs else 0)):
        usable = pairs and leaf in kernels.SPARSE and libraries.available(device, _SOURCE[leaf]) is True
        if leaf is not None and (usable or (leaf in kernels.DENSE and n % 32 == 0 and k % 32 == 0)):
            choices += tune_product(leaf, [(-(-m // 16) * 16, wide, depth) for m in rows], device, seconds, remeasure)
    if not pairs:  # a dense weight has one form
        return choices
    # Samples have to be packed in the layout that the kernels of this device read.
    layout = ops.CUSPARSELT if libraries.available(device) is True else ops.PORTABLE
    drawn_as = {"dtype": str(dtype)} if op in (layers.linear_int8, layers.linear_fp8) else {}
    samples = [{"m": m, "n": n, "k": k, "_": 1, "pairs": pairs, "layout": layout, **drawn_as} for m in rows]
    return [*choices, *sl.tune(op, samples, seconds * len(rows), device=device, remeasure=remeasure, isolate=False)]
