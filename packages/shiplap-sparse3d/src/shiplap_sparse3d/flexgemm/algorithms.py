"""The algorithms of FlexGEMM's convolutions, and the plan that any of them reads."""

from __future__ import annotations

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d.coords import refuse_rows
from shiplap_sparse3d.ops import MAX_PART
from shiplap_sparse3d.plan import Plan, wants_sorted

__all__ = [
    "ALGORITHMS",
    "DEFAULT",
    "Algorithm",
    "PlanCache",
    "check_algorithm",
    "flat_table",
    "gather_rows",
    "map_of_edges",
    "rows_of_segments",
]


class Algorithm:
    """String constants that name FlexGEMM's algorithms for a convolution. ``EXPLICIT_GEMM`` multiplies gathered
    neighbours, and ``IMPLICIT_GEMM`` gathers inside the product. Names with ``MASKED`` skip taps without neighbours.
    Names with ``SPLITK`` split the sum over the taps.
    """

    EXPLICIT_GEMM = "explicit_gemm"
    IMPLICIT_GEMM = "implicit_gemm"
    IMPLICIT_GEMM_SPLITK = "implicit_gemm_splitk"
    MASKED_IMPLICIT_GEMM = "masked_implicit_gemm"
    MASKED_IMPLICIT_GEMM_SPLITK = "masked_implicit_gemm_splitk"


ALGORITHMS = tuple(v for n, v in vars(Algorithm).items() if n.isupper())
DEFAULT = Algorithm.MASKED_IMPLICIT_GEMM_SPLITK


def check_algorithm(algorithm: str, splitk: int = 1) -> None:
    """Raise ``SL208`` unless ``algorithm`` is one of FlexGEMM's names (``ALGORITHMS``) and ``splitk``, the number of
    parts of the sum over the taps, is at least 1.
    """
    if algorithm not in ALGORITHMS or splitk < 1:
        raise error(
            "SL208",
            where="sparse3d.flexgemm",
            got=f"algorithm {algorithm!r}, splitk {splitk}",
            expected=f"one of {', '.join(ALGORITHMS)}, splitk >= 1",
        )


def rows_of_segments(offsets: Tensor) -> Tensor:
    """Return the segment number of each element, ``int32``. ``offsets`` holds each segment's start and the last end."""
    return torch.arange(offsets.shape[0] - 1, device=offsets.device).repeat_interleave(offsets.diff()).int()


def map_of_edges(
    edge_in: Tensor, edge_out: Tensor, edge_kernel: Tensor | None, sizes: tuple[int, int, int | None]
) -> Tensor:
    """Return the neighbour map ``int32 [outputs, taps]`` of edges (input row, output row, tap), with -1 where there is
    no edge. ``sizes`` are the numbers of inputs, outputs and taps. If ``edge_kernel`` (the taps) is None, the edges of
    each output get the taps 0, 1, 2 and so on.

    Raise ``SL208`` if ``edge_kernel`` is given without the number of taps, since no edge need reach the last tap. Raise
    it also if the three tensors differ in length. Raise ``SL211`` for a row or tap that does not exist, and for two
    edges of the same output and tap. Neither a traced graph nor the capture of a CUDA graph checks the values.
    """
    inputs, outputs, taps = sizes
    lengths = [len(edges) for edges in (edge_in, edge_out, edge_kernel) if edges is not None]
    if len({*lengths}) > 1:
        raise error("SL208", where="NeighborCache, edges", got=f"lengths {lengths}", expected="one length")
    rows = edge_out.long()
    if edge_kernel is None:
        order = rows.argsort(stable=True)
        first = torch.searchsorted(rows[order], rows[order])
        edge_kernel = torch.empty_like(rows).scatter(0, order, torch.arange(len(rows), device=rows.device) - first)
        taps = int(edge_kernel.max()) + 1 if len(rows) else 0
    elif taps is None:
        got, expected = "edge_kernel without num_kernels", "the number of taps of the kernel as num_kernels="
        raise error("SL208", where="NeighborCache, argument 'num_kernels'", got=got, expected=expected)
    columns = edge_kernel.long()
    # A capture forbids to wait for the values.
    if not torch.compiler.is_compiling() and not (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
        numbered = (edge_in.long(), inputs, "input row"), (rows, outputs, "output row"), (columns, taps, "tap")
        for values, size, name in numbered:
            message = f"edge {{row}} has no {name} from 0 to {size - 1}"
            refuse_rows("NeighborCache", (values < 0) | (values >= size), message)
        cells = (rows * taps + columns).sort(stable=True)
        again = torch.zeros_like(rows, dtype=torch.bool)
        again[cells.indices[1:]] = cells.values.diff() == 0
        refuse_rows("NeighborCache", again, "edge {row} has the output row and the tap of an earlier edge")
    table = torch.full((outputs, taps), -1, dtype=torch.int32, device=edge_in.device)
    table[rows, columns] = edge_in.int()
    return table


def flat_table(plan: Plan) -> Tensor:
    """Return the unsorted neighbour table of ``plan``, ``int32 [m, k]``. ``table[o, v]`` is the input row that output
    row ``o`` reads by tap ``v`` of the weight, or -1 if there is none.
    """
    table = plan.unsorted().table
    return table.flip(1) if plan.reflect else table


def gather_rows(feats: Tensor, rows: Tensor) -> Tensor:
    """Return ``feats[rows]`` for ``feats [n, c]``, with zeros where a number in ``rows`` is -1. The result is
    ``[*rows.shape, c]``.
    """
    return torch.cat([feats, feats.new_zeros(1, feats.shape[1])])[rows.long()]  # -1 is the last row


class PlanCache:
    """A cache of the plans (neighbour tables) of one convolution. It derives the plan for an algorithm once. Any number
    of layers can use it, with or without gradients.
    """

    def __init__(self, plan: Plan) -> None:
        """Store ``plan``, from which the plans for other algorithms are derived when they are needed."""
        self._use_plan(plan)

    def _use_plan(self, plan: Plan) -> None:
        """Replace the stored plan (neighbour tables of a convolution) by ``plan``, and drop all plans that were derived
        from the old one.
        """
        self._built = plan
        self._plans: dict[int, Plan] = {0 if plan.order is None else -1: plan}  # by parts; -1: as many as are fast

    def plan(self, algorithm: str = DEFAULT, splitk: int = 1) -> Plan:
        """Return the plan (neighbour tables) for ``algorithm``, a name of :class:`Algorithm`. Each plan is derived
        once.

        If the name ends in ``splitk`` and ``splitk`` is above 1, the taps are cut into ``splitk`` parts, each with its
        own order of the rows. Parts are at most ``MAX_PART`` taps long, which can take more parts. Otherwise a masked
        algorithm on a GPU gets rows sorted by the taps under which they have a neighbour. Every other algorithm gets
        the unsorted table.
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
        """Return the convolution ``[m, co]`` of ``feats [n, ci]`` with ``weight [co, k, ci]``, computed by
        ``algorithm``. Raise ``SL208`` for an unknown algorithm.

        If ``bias`` is None, no bias is added. If a gradient of ``feats`` will be needed, the table from outputs to
        inputs is built first. ``tf32`` is whether a GPU may round float32 factors to TF32. If it is None, torch's
        setting for matrix products applies.
        """
        check_algorithm(algorithm)
        if feats.requires_grad and torch.is_grad_enabled() and not self._built.whole:
            # Otherwise each backward pass would build the tables of the way back again.
            self._use_plan(self._built.complete())
        if algorithm == Algorithm.EXPLICIT_GEMM:
            return explicit_gemm(feats, weight, bias, flat_table(self._built))
        return self.plan(algorithm).conv(feats, weight, bias, tf32=tf32)


def explicit_gemm(feats: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor) -> Tensor:
    """Return the convolution ``[m, co]`` of ``feats [n, ci]`` with ``weight [co, k, ci]``. It is one matrix product
    over gathered neighbours, ``[m, k * ci]``, which need more memory than any other algorithm. ``table[o, v]`` is the
    input row that output ``o`` reads by tap ``v``, or -1 if there is none. If ``bias`` is None, no bias is added.
    """
    return torch.nn.functional.linear(gather_rows(feats, table).flatten(1), weight.flatten(1), bias)
