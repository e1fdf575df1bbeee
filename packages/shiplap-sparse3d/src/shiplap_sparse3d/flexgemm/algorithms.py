"""The algorithms of FlexGEMM's convolutions, and the plan that any of them reads."""

from __future__ import annotations

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d.ops import MAX_PART
from shiplap_sparse3d.plan import Plan, wants_sorted

__all__ = ["ALGORITHMS", "DEFAULT", "Algorithm", "PlanCache", "check_algorithm", "flat_table", "gather_rows"]


class Algorithm:
    """The names of the algorithms of a convolution. The tile sizes of each algorithm are tuned for each call."""

    EXPLICIT_GEMM = "explicit_gemm"
    IMPLICIT_GEMM = "implicit_gemm"
    IMPLICIT_GEMM_SPLITK = "implicit_gemm_splitk"
    MASKED_IMPLICIT_GEMM = "masked_implicit_gemm"
    MASKED_IMPLICIT_GEMM_SPLITK = "masked_implicit_gemm_splitk"


ALGORITHMS = tuple(v for n, v in vars(Algorithm).items() if n.isupper())
DEFAULT = Algorithm.MASKED_IMPLICIT_GEMM_SPLITK


def check_algorithm(algorithm: str, splitk: int = 1) -> None:
    """Raise ``SL208`` unless ``algorithm`` is one of FlexGEMM's names (``ALGORITHMS``) and ``splitk`` is at least 1."""
    if algorithm not in ALGORITHMS or splitk < 1:
        raise error(
            "SL208",
            where="sparse3d.flexgemm",
            got=f"algorithm {algorithm!r}, splitk {splitk}",
            expected=f"one of {', '.join(ALGORITHMS)}, splitk >= 1",
        )


def flat_table(plan: Plan) -> Tensor:
    """Return the neighbour table of ``plan``, ``int32 [m, k]``. It holds the input row of each output under each tap,
    or -1, in the order of the outputs and of the weight's taps.
    """
    table = plan.unsorted().table
    return table.flip(1) if plan.reflect else table


def gather_rows(feats: Tensor, rows: Tensor) -> Tensor:
    """Return ``feats[rows]``, with zeros where a row is -1. ``rows`` may have any shape."""
    return torch.cat([feats, feats.new_zeros(1, feats.shape[1])])[rows.long()]  # -1 is the last row


class PlanCache:
    """The plan of a convolution, for any number of layers and any algorithm, with or without gradients."""

    def __init__(self, plan: Plan) -> None:
        """Store ``plan``, from which the plans for other algorithms are derived when they are needed."""
        self._use_plan(plan)

    def _use_plan(self, plan: Plan) -> None:
        """Replace the stored plan (neighbour tables of a convolution) by ``plan``, and drop the sorted or cut plans
        that were derived from the old one.
        """
        self._built = plan
        self._plans: dict[int, Plan] = {0 if plan.order is None else -1: plan}  # by parts; -1: as many as are fast

    def plan(self, algorithm: str = DEFAULT, splitk: int = 1) -> Plan:
        """Return the plan (neighbour tables) for ``algorithm``, which is derived once. Algorithms that split the sum
        get tables cut into ``splitk`` parts of the taps. On a GPU, masked algorithms get rows sorted by the taps under
        which they have a neighbour. Others get the unsorted tables.
        """
        taps, parts = self._built.table.shape[1], 0
        if algorithm.endswith("splitk") and splitk > 1 and taps:
            # Each part needs a tap, and holds MAX_PART of them at most.
            parts = max(min(splitk, taps), -(-taps // MAX_PART))
        elif algorithm.startswith("masked") and wants_sorted(self._built.table):
            parts = -1  # only the masked kernels skip taps, for which the table has to be sorted
        if parts not in self._plans:
            plain = self._built.unsorted()
            self._plans[parts] = plain.sorted(parts if parts > 0 else None) if parts else plain
        return self._plans[parts]

    def convolve(
        self, feats: Tensor, weight: Tensor, bias: Tensor | None, algorithm: str, tf32: bool | None = None
    ) -> Tensor:
        """Return the convolution ``[m, co]`` of ``feats [n, ci]`` with ``weight [co, k, ci]`` by ``algorithm``. If a
        gradient of ``feats`` will be needed, the table from outputs to inputs is built first. Raise ``SL208`` for an
        unknown algorithm. ``tf32`` is whether a GPU may round float32 factors. If it is None, torch's setting for
        matrix products applies.
        """
        check_algorithm(algorithm)
        if feats.requires_grad and torch.is_grad_enabled() and not self._built.whole:
            # Otherwise each backward pass would build the tables of the way back again.
            self._use_plan(self._built.complete())
        if algorithm == Algorithm.EXPLICIT_GEMM:
            return explicit_gemm(feats, weight, bias, flat_table(self._built))
        return self.plan(algorithm).conv(feats, weight, bias, tf32=tf32)


def explicit_gemm(feats: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor) -> Tensor:
    """Return the convolution ``[m, co]`` of ``feats [n, ci]`` with ``weight [co, k, ci]`` by one product over gathered
    neighbours, ``[m, k * ci]``. ``table`` holds the input rows ``[m, k]``, or -1. This algorithm needs the most memory.
    """
    return torch.nn.functional.linear(gather_rows(feats, table).flatten(1), weight.flatten(1), bias)
