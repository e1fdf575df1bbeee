"""Which algorithm and split of k a product takes: asked of the libraries, tried by ``shiplap.tune``, once, at load.

The lists differ from size to size, so they are no ``configs=`` of a declaration. What was chosen is an ordinary choice
of the leaf op (``shiplap freeze``, ``shiplap cache``); in a call nothing is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import shiplap as sl
from shiplap.op.config import Config
from shiplap.selection import Isolation, Options, Refused, choose
from shiplap.selection.candidate import KernelCandidate, ReferenceCandidate
from shiplap.selection.engine import recipe_for
from shiplap.selection.inputs import Inputs
from shiplap_slidesparse import formats, layers, ops
from shiplap_slidesparse.lt import kernels, libraries, native

__all__ = ["FEW_ROWS", "SPLITS", "algorithms", "candidates", "problem_of", "taken", "tune", "tune_layer"]

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
_LEAVES = {
    layers.linear_int8: (ops.mm_int8, ops.sparse_mm_int8),
    layers.linear_fp8: (ops.mm_fp8, ops.sparse_mm_fp8),
    layers.linear_bf16: (None, ops.sparse_mm_bf16),
    layers.linear_fp16: (None, ops.sparse_mm_fp16),
}


def problem_of(op: sl.Op, device: int, m: int, n: int, k: int) -> native.Problem:
    """The product that a call of the leaf ``op`` is; the library's own algorithm."""
    source = _SOURCE[op]
    scaling = native.PER_ROW if op is ops.mm_fp8 else native.UNSCALED
    return native.Problem(device, m, n, k, source, native.RESULT[source], scaling)


def _configured(problem: native.Problem, config: dict[str, Any]) -> native.Problem:
    return problem.but(algorithm=config["ALG"], split_k=config.get("SPLIT_K", 0))


@dataclass(frozen=True)
class Algorithm:
    """A candidate: the kernel of a leaf op with one algorithm, which takes a call if the library has a plan for it."""

    op: sl.Op
    config: Config

    kernel = "lt"

    def prepare(self, args: tuple[Any, ...]) -> Callable[[], tuple[torch.Tensor, ...]]:
        x = args[0]
        n = len(args[1]) if self.op in kernels.DENSE else args[2]
        problem = problem_of(self.op, _index(x.device), x.shape[0], n, x.shape[1])
        try:
            native.prepare(_configured(problem, self.config.as_dict()), self.op in kernels.SPARSE, _stream(x.device))
        except native.Refusal as e:
            raise Refused(str(e)) from None
        bound = next(k for k in self.op.kernels["cuda"] if k.name == self.kernel)
        return KernelCandidate(self.op, bound.variant(self.config)).prepare(args)


def candidates(op: sl.Op, drawn: Inputs) -> Sequence[Any]:
    """The reference, the library's own choice, then every algorithm of which it makes a plan."""
    device, env = torch.device(drawn.device), drawn.call.env
    problem = problem_of(op, _index(device), env["m"], env["n"], env["k"])
    default = {"ALG": -1} if op in kernels.DENSE else kernels.DEFAULT
    listed = (default, *algorithms(op, problem, _stream(device)))
    return [ReferenceCandidate(op), *(Algorithm(op, Config.of(c)) for c in listed)]


def algorithms(
    op: sl.Op, problem: native.Problem, stream: int = 0, splits: Sequence[int] | None = None
) -> list[dict[str, int]]:
    """Configs of ``op`` for which the library makes a plan; ``splits`` of k, by default as the rows call for."""
    sparse = op in kernels.SPARSE
    if sparse:
        libraries.require(torch.device("cuda", problem.device), op.spec.name)
    try:
        count = native.prepare(problem, sparse, stream).algorithms
    except native.Refusal:
        return []
    if splits is None:
        splits = (0, *SPLITS) if sparse and problem.m <= FEW_ROWS else (0,)
    listed = [
        {"ALG": a, "SPLIT_K": s, "VERSION": _version()} if sparse else {"ALG": a} for s in splits for a in range(count)
    ]
    return [config for config in listed if taken(op, problem, config, stream)]


def taken(op: sl.Op, problem: native.Problem, config: dict[str, Any], stream: int = 0) -> bool:
    """Whether the library makes a plan of this config; then there is one."""
    try:
        native.prepare(_configured(problem, config), op in kernels.SPARSE, stream)
    except native.Refusal:
        return False
    return True


def _version() -> int:
    """That of the open cuSPARSELt as ``Version::number`` has it."""
    major, minor, patch = map(int, native.versions()[1].split("."))
    return major * 1000000 + minor * 1000 + patch


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def tune(
    op: sl.Op, sizes: Iterable[tuple[int, int, int]], device: str = "cuda", seconds: float = 20.0, again: bool = False
) -> list[Any]:
    """Choose the algorithm of a leaf product for each ``(m, n, k)``; candidates run in a process of their own."""
    found = []
    with Isolation() as isolation:
        bench = isolation.bench(f"{__name__}:candidates")
        for m, n, k in dict.fromkeys(sizes):
            wanted: dict[str, Any] = {"m": m, "n": n, "k": k}
            if op in kernels.SPARSE:
                wanted |= {"_": 1, "layout": ops.CUSPARSELT}
            options = Options(seconds=seconds, again=again)
            found.append(
                choose(
                    op, recipe_for(op, wanted), device=device, candidates_of=candidates, bench=bench, options=options
                )
            )
    return found


def tune_layer(
    op: sl.Op,
    rows: Iterable[int],
    n: int,
    k: int,
    pairs: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    seconds: float = 20.0,
    again: bool = False,
) -> list[Any]:
    """Choose algorithms for both forms of a layer ``[n, k]`` and then the form, for each number of rows: all choices.

    The race of forms is run in this process: their products have been verified, and their algorithms are in force here.
    """
    rows = list(rows)
    dense, sparse = _LEAVES[op]
    wide, found = formats.dense_depth(n), []
    for leaf, depth in ((dense, k), (sparse, formats.lifted_depth(k, pairs))):
        usable = leaf in kernels.SPARSE and libraries.available(device, _SOURCE[leaf]) is True
        if leaf is not None and (usable or (leaf in kernels.DENSE and n % 32 == 0 and k % 32 == 0)):
            found += tune(leaf, [(-(-m // 16) * 16, wide, depth) for m in rows], device, seconds, again)
    layout = ops.CUSPARSELT if libraries.available(device) is True else ops.PORTABLE
    drawn_as = {"dtype": str(dtype)} if op in (layers.linear_int8, layers.linear_fp8) else {}
    samples = [{"m": m, "n": n, "k": k, "_": 1, "pairs": pairs, "layout": layout, **drawn_as} for m in rows]
    return found + sl.tune(op, samples, seconds * len(rows), device=device, again=again, isolate=False)
