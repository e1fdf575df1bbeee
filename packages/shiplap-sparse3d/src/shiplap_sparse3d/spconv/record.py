"""The record that a layer leaves under its ``indice_key``: its input, its output, and the plan between the two."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor
from torch.compiler import is_compiling

from shiplap_sparse3d import ops as kernels
from shiplap_sparse3d.geometry import Geometry, Strided, in_passing_graph
from shiplap_sparse3d.plan import Plan
from shiplap_sparse3d.spconv.shared import SharedPlan, plan_of, refuse_shared
from shiplap_sparse3d.steps import StepWindow as Step

__all__ = ["ConvAlgo", "ImplicitGemmIndiceData", "IndiceData", "LayerWindow"]


class ConvAlgo(Enum):
    """The algorithms of spconv, which every layer accepts as ``algo``. Layers that share an ``indice_key`` must have
    the same one.
    """

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


@dataclass(frozen=True)
class LayerWindow:
    """The window of a layer, which holds its kernel size (``ksize``), stride, padding, dilation and output padding.
    Each field has one int per axis. Only the window of a transposed layer has an ``output_padding``, which is None
    otherwise.
    """

    ksize: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    output_padding: list[int] | None = None

    @property
    def text(self) -> str:
        """The sizes as a string for error messages, such as ``kernel_size [3, 3, 3], stride [1, 1, 1]`` and so on."""
        made = f"kernel_size {self.ksize}, stride {self.stride}, padding {self.padding}, dilation {self.dilation}"
        return made if self.output_padding is None else f"{made}, output_padding {self.output_padding}"

    def step(self, geometry: Geometry, *, pooled: bool = False, back: bool | None = None) -> Strided:
        """Return the voxels that this window reaches from the voxels of ``geometry``, together with the neighbour
        tables. ``geometry`` stores the result, so that layers with equal windows build it once.

        If ``pooled`` is true, the tables are left unsorted, as pooling needs them. Otherwise they are sorted on a GPU.
        If ``back`` is true, tables from outputs to inputs are built as well. If it is None, they are built if gradients
        are recorded.
        """
        window = self.ksize, self.stride, self.padding, self.dilation
        if is_compiling() and geometry.ndim == 3 and self.output_padding is None and not geometry.padded:
            step = Step(*map(tuple, window))  # type: ignore[arg-type] # three numbers each, as they are
            return geometry.step(step, plain=pooled, back=back)
        if self.output_padding is None:
            return geometry.pooled(*window) if pooled else geometry.strided(*window, back=back)
        # spconv's grid has the size of an undilated kernel.
        extra = [o - (d - 1) * (k - 1) for o, d, k in zip(self.output_padding, self.dilation, self.ksize, strict=True)]
        return geometry.transposed(*window, extra, back=back)


@dataclass
class IndiceData:
    """The record of a layer in ``indice_dict``. It holds the voxels of the input and of the output, and the plan
    (neighbour tables) between them. ``window`` and ``algo`` are those of the layer, and ``is_subm`` is whether the
    layer is submanifold.

    Attributes:
        geometry, out_geometry: the voxels of the input and of the output.
        indices, out_indices: the coordinates of these voxels.
        plan: the neighbour tables from inputs to outputs.
        known_plan: ``plan`` if a layer has built it, otherwise None.
        passing_plan: the plan that a graph without gradients has built. Other calls may not use it, since the graph may
            have run in inference mode.
        pair_fwd, pair_bwd: spconv's tables ``int32 [taps, m]`` of input rows and ``[taps, n]`` of output rows, or -1.
        indice_pairs: the pairs of spconv's ``Native`` algorithm, ``int32 [2, taps, n]`` padded with -1.
        indice_pair_num: the number of pairs of each tap.
    """

    indices: Tensor
    out_indices: Tensor
    spatial_shape: list[int]
    out_spatial_shape: list[int]
    is_subm: bool
    algo: ConvAlgo
    window: LayerWindow
    geometry: Geometry
    out_geometry: Geometry
    known_plan: Plan | None = field(default=None, repr=False, compare=False)
    passing_plan: Plan | None = field(default=None, repr=False, compare=False)

    @property
    def plan(self) -> Plan:
        """The plan (neighbour tables) of the convolution, built at its first use. If grad mode is on, it also has
        tables from outputs to inputs.
        """
        plan = self.known_plan
        if plan is None or (torch.is_grad_enabled() and not plan.whole):
            if self.is_subm:
                plan = plan_of(self.geometry, self.ksize, self.dilation)
            else:
                plan = self.window.step(self.geometry).plan
            # Tables of such a graph may be inference tensors, which other code must not get.
            if in_passing_graph():
                self.passing_plan = plan
            else:
                self.known_plan = plan
        return plan

    @property
    def whole(self) -> bool:
        """Whether the tables from outputs to inputs, which gradients read, are built or not needed. A submanifold layer
        does not need them.
        """
        return self.is_subm or (self.known_plan is not None and self.known_plan.whole)

    @property
    def way_back(self) -> Plan:
        """The plan (neighbour tables) from outputs to inputs, with which inverse layers compute. It is built at its
        first use.
        """
        if self.whole:
            return self.plan.t
        plan = self.window.step(self.geometry, back=True).plan
        if not in_passing_graph():
            self.known_plan = plan
        return plan.t

    @property
    def pool_plan(self) -> Plan:
        """The plan for pooling, which holds neighbour tables whose rows are in the order of the outputs. Raise
        ``SL211`` for a submanifold layer if two of its voxels lie in the same cell.
        """
        if self.is_subm:
            refuse_shared(self.plan, "a pool over the voxels of a submanifold layer")
            # A pool needs no way back of its own: the voxels stay the same.
            return Plan(by_output(self.plan), self.plan.rows)
        return self.window.step(self.geometry, pooled=True).plan

    @property
    def ksize(self) -> list[int]:
        """The kernel size per axis of the layer that made this record of voxels and neighbours."""
        return self.window.ksize

    @property
    def stride(self) -> list[int]:
        """The stride per axis of the layer that made this record of voxels and neighbours."""
        return self.window.stride

    @property
    def padding(self) -> list[int]:
        """The padding per axis of the layer that made this record of voxels and neighbours."""
        return self.window.padding

    @property
    def dilation(self) -> list[int]:
        """The dilation per axis of the layer that made this record of voxels and neighbours."""
        return self.window.dilation

    @property
    def pair_fwd(self) -> Tensor:
        """spconv's forward table, ``int32 [taps, m]``. It holds the input row of each output under each tap, or -1."""
        return by_output(self.plan).t()

    @property
    def pair_bwd(self) -> Tensor:
        """spconv's backward table, ``int32 [taps, n]``. It holds the output row that reads each input under each tap,
        or -1.
        """
        return kernels.transpose_table(by_output(self.plan), self.plan.rows).t()

    @property
    def indice_pairs(self) -> Tensor:
        """The pairs of input and output rows in spconv's layout, ``int32 [2, taps, n]``. The pairs of a tap come first
        in its row, and -1 fills the remaining columns.
        """
        return self._pairs[0]

    @property
    def indice_pair_num(self) -> Tensor:
        """The number of pairs of each tap, ``int32 [taps]``."""
        return self._pairs[1]

    @property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        """The pairs of input and output rows, ``int32 [2, taps, n]``, and the number of pairs of each tap, ``int32
        [taps]``. The pairs of a tap come first in its row, and -1 fills the remaining columns.
        """
        if not isinstance(self.plan, SharedPlan):
            return compact_pairs(self.pair_bwd)
        pairs, counts = compact_pairs(self.pair_fwd)  # an input may be read more than once: listed by outputs
        return pairs.flip(0), counts


ImplicitGemmIndiceData = IndiceData  # one record serves both: a table is either form


def by_output(plan: Plan) -> Tensor:
    """Return the neighbour table of ``plan``, ``int32 [m, taps]``, whose rows are in the order of the outputs. It holds
    the input row of each output under each tap, or -1.
    """
    return plan.by_row if isinstance(plan, SharedPlan) else plan.unsorted().table


def compact_pairs(pair_bwd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs of input and output rows in the table ``pair_bwd``, ``int32 [2, taps, n]``, and the number of
    pairs of each tap, ``int32 [taps]``.

    ``pair_bwd`` holds the output row of each input row or -1, ``int32 [taps, n]``. The pairs of a tap come first, and
    -1 fills the remaining columns.
    """
    hit = pair_bwd >= 0
    # Hits come first, in the order of their rows.
    first = (~hit).to(torch.int8).argsort(dim=1, stable=True)
    inputs = torch.arange(pair_bwd.shape[1], dtype=torch.int32, device=pair_bwd.device).expand_as(pair_bwd)
    pairs = torch.stack([torch.where(hit, inputs, -1).gather(1, first), pair_bwd.gather(1, first)])
    return pairs, hit.sum(1, dtype=torch.int32)
