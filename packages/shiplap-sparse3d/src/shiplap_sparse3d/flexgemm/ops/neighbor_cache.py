"""``flex_gemm.ops.neighbor_cache``: which input row each output reads, from voxels of any number of axes.

A row of coordinates has batch columns and then as many axes as the kernel. The input under tap ``v`` of output ``o`` is
at ``o * stride + delta[v] + offset``, where the taps of a ``kernel_size`` lie around their middle. ``padding`` is
another word for the offset: ``offset = (kernel_size - 1) // 2 * dilation - padding``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d.coords import require_scenes
from shiplap_sparse3d.flexgemm.algorithms import PlanCache, flat_table, map_of_edges, rows_of_segments
from shiplap_sparse3d.flexgemm.ops.utils import with_scene
from shiplap_sparse3d.geometry import Geometry
from shiplap_sparse3d.offsets import box_offsets, connect_by_offsets, offset_cells
from shiplap_sparse3d.ops import transpose_table
from shiplap_sparse3d.plan import Plan
from shiplap_sparse3d.postprocess import masked_gemm_kernels, masked_gemm_signals

__all__ = [
    "NeighborCache",
    "NeighborCacheT",
    "build_neighbor_cache",
    "compute_strided_kernel_delta_output_shape",
    "compute_strided_kernel_delta_transpose_output_shape",
    "compute_strided_kernel_size_output_shape",
    "compute_strided_kernel_size_transpose_output_shape",
]

Ints = Sequence[int]
_SIGNATURE = ("kernel_size", "dilation", "stride", "offset")


class NeighborCache(PlanCache):
    """The neighbours of output voxels among input voxels, and the arguments of the convolution that reads them.

    A map ``[rows, V]`` holds the neighbour's row under each of ``V`` taps, or -1 (``fwd_map`` by output, ``bwd_map`` by
    input). Edges are an input row, an output row that reads it, and the tap. Segments list the neighbours of each row
    in turn. A cache is built from one of these three and computes the others when they are read.

    Attributes:
        input_coords, output_coords: the voxels.
        input_sparse_shape, output_sparse_shape: the grids that they lie in, with the batch, or None.
        num_kernels: the number ``V`` of taps.
        symmetric: whether inputs are outputs, and the map read backwards is its own transpose.
        kernel_size, dilation, kernel_delta, stride, offset: the arguments of the convolution, or None.
    """

    is_transposed: ClassVar[bool] = False

    def __init__(
        self,
        *,
        fwd_map: Tensor | None = None,
        bwd_map: Tensor | None = None,
        fwd_seg_indices: Tensor | None = None,
        fwd_seg_offsets: Tensor | None = None,
        bwd_seg_indices: Tensor | None = None,
        bwd_seg_offsets: Tensor | None = None,
        edge_in: Tensor | None = None,
        edge_out: Tensor | None = None,
        edge_kernel: Tensor | None = None,
        num_kernels: int | None = None,
        input_coords: Tensor,
        output_coords: Tensor,
        input_sparse_shape: Ints | None = None,
        output_sparse_shape: Ints | None = None,
        symmetric: bool = False,
        kernel_size: Ints | None = None,
        dilation: Ints | None = None,
        kernel_delta: Tensor | None = None,
        stride: Ints | None = None,
        offset: Ints | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Build the plan from a map, segments or edges, unless ``plan`` is given. Raise ``SL208`` if none is given."""
        n, m = input_coords.shape[0], output_coords.shape[0]
        if plan is None:
            if fwd_seg_indices is not None and fwd_seg_offsets is not None:
                edge_in, edge_out = fwd_seg_indices, rows_of_segments(fwd_seg_offsets)
            elif bwd_seg_indices is not None and bwd_seg_offsets is not None:
                edge_in, edge_out = rows_of_segments(bwd_seg_offsets), bwd_seg_indices
            if fwd_map is None and bwd_map is not None:
                fwd_map = transpose_table(bwd_map.view(torch.int32).contiguous(), m)
            elif fwd_map is None and edge_in is not None and edge_out is not None:
                fwd_map = map_of_edges(edge_in, edge_out, edge_kernel, (n, m, num_kernels))
            if fwd_map is None:
                got = "neither a map nor segments nor edges"
                raise error("SL208", where="NeighborCache", got=got, expected="one of them")
            plan = Plan(fwd_map.view(torch.int32).contiguous(), n, symmetric=symmetric)
        super().__init__(plan)
        self.input_coords, self.output_coords, self.symmetric = input_coords, output_coords, symmetric
        self.input_sparse_shape = None if input_sparse_shape is None else torch.Size(input_sparse_shape)
        self.output_sparse_shape = None if output_sparse_shape is None else torch.Size(output_sparse_shape)
        self.num_input_coords, self.num_output_coords, self.num_kernels = n, m, plan.table.shape[1]
        self.kernel_size, self.dilation = _as_tuple(kernel_size), _as_tuple(dilation)
        self.stride, self.offset, self.kernel_delta = _as_tuple(stride), _as_tuple(offset), kernel_delta
        self._other: NeighborCache | None = None

    @property
    def T(self) -> NeighborCache:
        """The cache with inputs and outputs exchanged. It is made once and kept, and ``cache.T.T`` is ``cache``."""
        if self._other is None:
            if not self._built.whole:
                self._use_plan(self._built.complete())
            kind: type[NeighborCache] = NeighborCache if self.is_transposed else NeighborCacheT
            self._other = kind(
                plan=self._built.t,
                input_coords=self.output_coords,
                output_coords=self.input_coords,
                input_sparse_shape=self.output_sparse_shape,
                output_sparse_shape=self.input_sparse_shape,
                symmetric=self.symmetric,
                kernel_delta=self.kernel_delta,
                **{name: getattr(self, name) for name in _SIGNATURE},
            )
            self._other._other = self
        return self._other

    def transpose(self) -> NeighborCache:
        """Return :attr:`T`, the cache of neighbours with inputs and outputs exchanged."""
        return self.T

    def assert_match(
        self,
        *,
        input_coords: Tensor | None = None,
        output_coords: Tensor | None = None,
        is_transposed: bool | None = None,
        kernel_delta: Tensor | None = None,
        **signature: Ints | None,
    ) -> None:
        """Raise ``SL830`` unless this cache was made with these values. An argument of None is not compared."""
        for name, given in (("input_coords", input_coords), ("output_coords", output_coords)):
            if given is not None and not _same_tensor(getattr(self, name), given):
                raise _mismatch(name, "another tensor", "the tensor that the cache was built from")
        if is_transposed is not None and is_transposed != self.is_transposed:
            got = "a cache of the way back" if self.is_transposed else "a cache of the way there"
            raise _mismatch("direction", got, "its .T")
        for name, value in signature.items():
            if value is not None and getattr(self, name) != tuple(value):
                raise _mismatch(name, getattr(self, name), tuple(value))
        mine = self.kernel_delta
        if kernel_delta is not None and mine is not kernel_delta and (mine is None or not mine.equal(kernel_delta)):
            raise _mismatch("kernel_delta", "other offsets", "those of the call")

    def __getitem__(self, name: str) -> Any:
        """Return the attribute ``name``, as FlexGEMM's caches are indexed."""
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        """Return whether the cache has the attribute ``name``."""
        return hasattr(self, name)

    @property
    def fwd_map(self) -> Tensor:
        """The input row that each output reads by each of ``V`` taps, ``int32 [outputs, V]``, or -1 for none."""
        return flat_table(self._built)

    @property
    def bwd_map(self) -> Tensor:
        """The output row that reads each input by each of ``V`` taps, ``int32 [inputs, V]``, or -1 for none."""
        return self.T.fwd_map

    @property
    def fwd_mask(self) -> Tensor:
        """Whether there is an input under each tap of each output, ``bool [outputs, V]``."""
        return self.fwd_map >= 0

    @property
    def bwd_mask(self) -> Tensor:
        """Whether an output reads each input by each tap, ``bool [inputs, V]``."""
        return self.bwd_map >= 0

    @property
    def edge_in(self) -> Tensor:
        """The input row of each edge (input row, output row, tap), ``int32 [edges]``, sorted by output row and tap."""
        return self.fwd_map[self.fwd_mask]

    @property
    def edge_out(self) -> Tensor:
        """The output row of each edge (input row, output row, tap), ``int32 [edges]``, in ascending order."""
        return self.fwd_mask.nonzero()[:, 0].int()

    @property
    def edge_kernel(self) -> Tensor:
        """The tap of each edge (input row, output row, tap), ``int32 [edges]``, sorted by output row and tap."""
        return self.fwd_mask.nonzero()[:, 1].int()

    @property
    def fwd_seg_indices(self) -> Tensor:
        """The input row of each (input row, output row) pair, ``int32 [pairs]``, sorted by output row."""
        return self.edge_in

    @property
    def fwd_seg_offsets(self) -> Tensor:
        """The start of each output's pairs in ``fwd_seg_indices``, then the number of all pairs, ``[outputs + 1]``."""
        return torch.nn.functional.pad(self.fwd_mask.sum(1).cumsum(0), (1, 0)).int()

    @property
    def bwd_seg_indices(self) -> Tensor:
        """The output row of each (input row, output row) pair, ``int32 [pairs]``, sorted by input row."""
        return self.T.fwd_seg_indices

    @property
    def bwd_seg_offsets(self) -> Tensor:
        """The start of each input's pairs in ``bwd_seg_indices``, then the number of pairs, ``[inputs + 1]``."""
        return self.T.fwd_seg_offsets

    @property
    def fwd_gray_code(self) -> Tensor:
        """A bit mask of the taps under which each output has an input, ``int32 [outputs]``, for at most 32 taps."""
        return masked_gemm_signals(self.fwd_map)[0]

    @property
    def fwd_sorted_idx(self) -> Tensor:
        """The output rows, ``int64 [outputs]``, sorted by the rank of their ``fwd_gray_code`` as a Gray code."""
        return masked_gemm_signals(self.fwd_map)[1]

    def fwd_valid_kernel(self, block_size: int) -> tuple[Tensor, Tensor]:
        """Return the taps under which any output of a block has an input, for all blocks in one list, and where the
        taps of each block begin in it. A block is ``block_size`` consecutive rows of ``fwd_sorted_idx``.
        """
        code, order, *_ = masked_gemm_signals(self.fwd_map)
        taps, ends = masked_gemm_kernels(code, order, block_size)
        return taps[taps >= 0], ends


class NeighborCacheT(NeighborCache):
    """The neighbour cache of a transposed convolution, such as the :attr:`NeighborCache.T` of a convolution's cache."""

    is_transposed: ClassVar[bool] = True


def _as_tuple(values: Ints | None) -> tuple[int, ...] | None:
    """Return ``values`` as a tuple, or None if ``values`` is None."""
    return None if values is None else tuple(values)


def _mismatch(name: str, got: object, expected: object) -> Exception:
    """Return the error ``SL830`` for a cache whose attribute ``name`` is ``got``, while the call has ``expected``."""
    return error("SL830", where=f"neighbor_cache, {name}", got=got, expected=expected)


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    """Return whether ``a`` and ``b`` have equal shape, dtype and address. A traced graph does not compare addresses."""
    if a is b or a.shape != b.shape or a.dtype != b.dtype:
        return a is b
    return torch.compiler.is_compiling() or a.data_ptr() == b.data_ptr()


# --- shapes -----------------------------------------------------------------------------------------------------------


def compute_strided_kernel_size_output_shape(
    input_sparse_shape: Ints, kernel_size: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> torch.Size:
    """Return the batch sizes and the output grid of a convolution. An axis of ``W`` cells becomes ``(W + 2P - D(K - 1)
    - 1) // S + 1`` cells, where ``K``, ``S``, ``P`` and ``D`` are kernel size, stride, padding and dilation.
    """
    axes = zip(input_sparse_shape[-len(kernel_size) :], kernel_size, stride, padding, dilation, strict=True)
    cells = ((w + 2 * p - d * (k - 1) - 1) // s + 1 for w, k, s, p, d in axes)
    return torch.Size([*input_sparse_shape[: -len(kernel_size)], *cells])


def compute_strided_kernel_size_transpose_output_shape(
    input_sparse_shape: Ints, kernel_size: Ints, stride: Ints, padding: Ints, dilation: Ints
) -> torch.Size:
    """Return the batch sizes and the output grid of a transposed convolution. An axis of ``W`` cells becomes ``(W - 1)S
    - 2P + D(K - 1) + 1`` cells, where ``K``, ``S``, ``P`` and ``D`` are kernel size, stride, padding and dilation.
    """
    axes = zip(input_sparse_shape[-len(kernel_size) :], kernel_size, stride, padding, dilation, strict=True)
    cells = ((w - 1) * s - 2 * p + d * (k - 1) + 1 for w, k, s, p, d in axes)
    return torch.Size([*input_sparse_shape[: -len(kernel_size)], *cells])


def compute_strided_kernel_delta_output_shape(input_sparse_shape: Ints, stride: Ints) -> torch.Size:
    """Return the batch sizes and grid of a convolution whose taps are offsets, ``size // stride`` cells per axis."""
    cells = (w // s for w, s in zip(input_sparse_shape[-len(stride) :], stride, strict=True))
    return torch.Size([*input_sparse_shape[: -len(stride)], *cells])


def compute_strided_kernel_delta_transpose_output_shape(input_sparse_shape: Ints, stride: Ints) -> torch.Size:
    """Return batch and grid of a transposed convolution whose taps are offsets, ``size * stride`` cells per axis."""
    cells = (w * s for w, s in zip(input_sparse_shape[-len(stride) :], stride, strict=True))
    return torch.Size([*input_sparse_shape[: -len(stride)], *cells])


# --- building ---------------------------------------------------------------------------------------------------------


def resolve_offset(kernel_size: Ints, dilation: Ints, padding: Ints | None, offset: Ints | None) -> tuple[int, ...]:
    """Return the offset of a kernel's middle from its output for each axis. It is ``(kernel_size - 1) // 2 * dilation -
    padding`` if ``padding`` is given, else ``offset``, else zeros. Raise ``SL208`` if both are given and differ.
    """
    if padding is None:
        return tuple(offset) if offset is not None else (0,) * len(kernel_size)
    derived = tuple((k - 1) // 2 * d - p for k, d, p in zip(kernel_size, dilation, padding, strict=True))
    if offset is not None and tuple(offset) != derived:
        raise error(
            "SL208", where="build_neighbor_cache", got=f"offset {tuple(offset)}", expected=f"{derived}, of the padding"
        )
    return derived


def build_neighbor_cache(
    input_coords: Tensor,
    output_coords: Tensor | None = None,
    *,
    submanifold: bool,
    kernel_size: Ints | None = None,
    kernel_delta: Tensor | None = None,
    stride: Ints | None = None,
    dilation: Ints | None = None,
    padding: Ints | None = None,
    offset: Ints | None = None,
    input_sparse_shape: Ints | None = None,
    output_sparse_shape: Ints | None = None,
    symmetric: bool | None = None,
    transpose: bool = False,
) -> NeighborCache:
    """Return the cache of the neighbours of a convolution, or of a transposed one. The cache holds which input row each
    output reads by each tap.

    Args:
        input_coords: ``[n, batch columns + axes]``, an integer dtype.
        output_coords: the output voxels, by default every voxel that an input reaches inside the output grid.
        submanifold: whether the outputs are the inputs.
        kernel_size, kernel_delta: taps per axis, or ``[V, axes]`` offsets. One of them must be given.
        stride, dilation, padding, offset: one number per axis.
        input_sparse_shape: the input grid with its batch. It is needed if ``output_coords`` are not given.
        output_sparse_shape: the output grid, by default that of ``torch.nn.ConvNd`` or ``ConvTransposeNd``.
        symmetric: whether the offsets are their own mirror image. If it is None, the offsets are compared.
        transpose: whether the convolution is transposed. The cache is then a :class:`NeighborCacheT`.

    Raises:
        ArgumentError: ``SL208`` for arguments that do not go together, ``SL211`` for duplicate voxels.
    """
    taps = read_taps(input_coords, kernel_size, kernel_delta, stride, dilation, padding, offset)
    if submanifold and (transpose or any(s != 1 for s in taps.stride) or any(padding or ()) or any(offset or ())):
        got = f"stride {taps.stride}, padding {padding}, offset {offset}, transpose {transpose}"
        raise error("SL208", where="build_neighbor_cache, submanifold", got=got, expected="none of them")
    if symmetric is None:
        odd = kernel_size is not None and all(k % 2 for k in kernel_size)
        symmetric = submanifold and (odd or (kernel_delta is not None and kernel_delta.equal(-kernel_delta.flip(0))))
    grid = _as_tuple(input_sparse_shape)
    usual = torch.Size(grid or ()) if submanifold else _usual_grid(grid or (), taps, transpose)
    reached = usual if output_sparse_shape is None else torch.Size(output_sparse_shape)
    # The kernels that find voxels in grids take boxes of int32 voxels in up to three axes.
    plain = taps.window is not None and min(taps.window[2]) >= 0 and (symmetric or not submanifold)
    plain = plain and input_coords.dtype == torch.int32 and taps.lead == 1 and len(taps.stride) <= 3
    if plain and output_coords is None and grid is not None:
        # A graph would learn a guard from a comparison of the two grids.
        given = None if submanifold or output_sparse_shape is None else (usual, reached)
        plan, output_coords = _plan_in_grid(input_coords, grid, taps, submanifold, transpose, given)
    else:
        if grid is not None and taps.lead == 1:
            require_scenes("build_neighbor_cache", input_coords, grid[0], on_gpu=True)
        if submanifold:
            output_coords = input_coords
        elif output_coords is None:
            output_coords = _reached_voxels(input_coords, taps, grid, reached, transpose)
        ends = with_scene(input_coords), with_scene(output_coords)
        # A transposed convolution is the way back of the one from its outputs to its inputs.
        wide, outputs = reversed(ends) if transpose else ends
        made = connect_by_offsets(wide, outputs, taps.columns(input_coords.device), taps.steps)
        plan = replace(made, symmetric=symmetric)
    here = input_coords, None if grid is None else torch.Size(grid)
    there = output_coords, None if grid is None and output_sparse_shape is None else reached
    (inputs, input_grid), (outputs, output_grid) = (there, here) if transpose else (here, there)
    cache = NeighborCache(
        plan=plan,
        input_coords=inputs,
        output_coords=outputs,
        input_sparse_shape=input_grid,
        output_sparse_shape=output_grid,
        symmetric=symmetric,
        kernel_size=kernel_size,
        dilation=None if taps.window is None else taps.window[3],
        kernel_delta=kernel_delta,
        stride=taps.stride,
        offset=taps.offset,
    )
    return cache.T if transpose else cache


def sparse_grid(where: str, coords: Tensor, shape: Ints | None) -> torch.Size | None:
    """Return the first sizes of ``shape`` (batch and grid), one for each column of ``coords``, or None if ``shape`` is
    None. Raise ``SL208`` if it has fewer sizes. ``where`` is the function's name in the message.
    """
    if shape is None:
        return None
    if len(shape) < coords.shape[1]:
        expected = f"(batch, axes, channels): at least {coords.shape[1]} sizes for coords {tuple(coords.shape)}"
        raise error("SL208", where=f"{where}, argument 'shape'", got=tuple(shape), expected=expected)
    return torch.Size(shape[: coords.shape[1]])


def neighbors_of_call(
    where: str,
    coords: Tensor,
    shape: Ints,
    cache: NeighborCache | None,
    *,
    submanifold: bool,
    output_coords: Tensor | None = None,
    output_shape: Ints | None = None,
    transpose: bool = False,
    symmetric: bool | None = None,
    kernel_size: Ints | None = None,
    kernel_delta: Tensor | None = None,
    stride: Ints | None = None,
    dilation: Ints | None = None,
    padding: Ints | None = None,
    offset: Ints | None = None,
) -> NeighborCache:
    """Return ``cache`` if it fits a call with these arguments, or a new cache if it is None. Raise ``SL830`` if it was
    built for other arguments. ``shape`` and ``output_shape`` have the channels last. ``where`` is the function's name
    in messages. The other arguments are those of :func:`build_neighbor_cache`.
    """
    window = {"stride": stride, "dilation": dilation, "padding": padding, "offset": offset}
    if cache is None:
        return build_neighbor_cache(
            coords,
            output_coords,
            submanifold=submanifold,
            kernel_size=kernel_size,
            kernel_delta=kernel_delta,
            **window,
            input_sparse_shape=sparse_grid(where, coords, shape),
            output_sparse_shape=sparse_grid(where, coords, output_shape),
            symmetric=symmetric,
            transpose=transpose,
        )
    taps = read_taps(coords, kernel_size, kernel_delta, **window)
    cache.assert_match(
        input_coords=coords,
        output_coords=coords if submanifold else output_coords,
        is_transposed=transpose,
        kernel_delta=kernel_delta,
        kernel_size=kernel_size,
        dilation=None if taps.window is None else taps.window[3],
        stride=taps.stride,
        offset=taps.offset,
    )
    return cache


Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Taps(NamedTuple):
    """The taps of a convolution.

    Attributes:
        lead: the number of batch columns.
        stride, offset: one number per axis.
        window: kernel size, stride, padding and dilation of a box, or None.
        given: the offsets ``[V, axes]`` in place of a box, or None.
    """

    lead: int
    stride: tuple[int, ...]
    offset: tuple[int, ...]
    window: Window | None
    given: Tensor | None = None

    @property
    def steps(self) -> list[int]:
        """The stride per column of coordinates. It is 1 for the leading scene column and for the batch columns."""
        return [1] * (1 + self.lead) + [*self.stride]

    def columns(self, device: torch.device) -> Tensor:
        """Return the taps' offsets, ``int32 [V, 1 + lead + axes]``, with zeros for the scene and the batch first."""
        if self.window is not None:
            kernel, _, padding, dilation = self.window
            delta = torch.tensor(box_offsets(kernel, dilation, padding=padding), dtype=torch.int32)
        else:
            assert self.given is not None
            delta = self.given + torch.tensor(self.offset, device=self.given.device)
        return torch.nn.functional.pad(delta.to(device).int(), (1 + self.lead, 0))


def read_taps(
    coords: Tensor,
    kernel_size: Ints | None,
    kernel_delta: Tensor | None,
    stride: Ints | None,
    dilation: Ints | None,
    padding: Ints | None,
    offset: Ints | None,
) -> Taps:
    """Return the taps that these arguments describe, a box of ``kernel_size`` or the offsets ``kernel_delta``. Raise
    ``SL208`` if both or neither are given, and if an argument does not fit them or the columns of ``coords``.
    """
    if kernel_size is not None and kernel_delta is None:
        axes = len(kernel_size)
    elif kernel_delta is not None and kernel_size is None and dilation is None and padding is None:
        axes = kernel_delta.shape[1]
    else:
        got = "both, none, or dilation or padding of kernel_delta"
        raise error("SL208", where="build_neighbor_cache", got=got, expected="kernel_size or kernel_delta")
    steps, spacing = tuple(stride or (1,) * axes), tuple(dilation or (1,) * axes)
    for name, values in (("stride", steps), ("dilation", spacing), ("padding", padding), ("offset", offset)):
        if coords.shape[1] < axes or (values is not None and len(values) != axes):
            where = f"build_neighbor_cache, argument {name!r}"
            raise error("SL208", where=where, got=values, expected=f"{axes} numbers, and as many columns of coords")
    lead = coords.shape[1] - axes
    if kernel_size is None:
        return Taps(lead, steps, tuple(offset or (0,) * axes), None, kernel_delta)
    shift = resolve_offset(kernel_size, spacing, padding, offset)
    pads = tuple((k - 1) // 2 * d - o for k, d, o in zip(kernel_size, spacing, shift, strict=True))
    return Taps(lead, steps, shift, (tuple(kernel_size), steps, pads, spacing))


def _usual_grid(grid: Ints, taps: Taps, transpose: bool) -> torch.Size:
    """Return the default output grid of a convolution with its batch sizes. For a box it is that of
    ``torch.nn.ConvTransposeNd`` or, if ``transpose`` is false, ``torch.nn.ConvNd``. It is empty if ``grid`` is.
    """
    if not grid:
        return torch.Size(())
    if taps.window is not None and transpose:
        return compute_strided_kernel_size_transpose_output_shape(grid, *taps.window)
    if taps.window is not None:
        return compute_strided_kernel_size_output_shape(grid, *taps.window)
    if transpose:
        return compute_strided_kernel_delta_transpose_output_shape(grid, taps.stride)
    return compute_strided_kernel_delta_output_shape(grid, taps.stride)


def _plan_in_grid(
    coords: Tensor,
    grid: tuple[int, ...],
    taps: Taps,
    submanifold: bool,
    transpose: bool,
    given: tuple[torch.Size, torch.Size] | None,
) -> tuple[Plan, Tensor]:
    """Return the plan (neighbour tables) of a box kernel in a grid, from finer to coarser voxels, and the output
    coordinates. The convolution is submanifold if ``submanifold`` is true, else transposed if ``transpose`` is true,
    else strided. ``given`` holds the default output grid and its replacement, or is None to keep the default.
    """
    here, window = Geometry(coords, grid[1:], grid[0]), taps.window
    assert window is not None
    if submanifold:
        return here.subm(window[0], window[3]), coords
    extra = 0 if given is None else tuple(new - old for old, new in zip(*(size[1:] for size in given), strict=True))
    if transpose:
        step = here.transposed(*window, extra, back=True)
    elif given is None:
        step = here.strided(*window)
    else:
        step = here.strided_within(*window, spatial_shape=given[1][1:])
    reached, axes = step.geometry.coords, len(taps.stride)
    outputs = reached if axes == 3 else torch.cat([reached[:, :1], reached[:, 4 - axes :]], 1)
    return step.plan.t if transpose else step.plan, outputs


def _reached_voxels(
    coords: Tensor, taps: Taps, grid: tuple[int, ...] | None, reached: torch.Size, transpose: bool
) -> Tensor:
    """Return the voxels that ``taps`` reach in the grid ``reached``, ascending. If ``transpose`` is true, outputs lie
    at ``input * stride + offset``. Otherwise inputs lie at ``output * stride + offset``. ``grid`` is that of the input.
    Raise ``SL208`` if it is None.
    """
    if grid is None:
        got = "neither output_coords nor input_sparse_shape"
        raise error("SL208", where="build_neighbor_cache", got=got, expected="one of them")
    high = [1, *grid[: taps.lead], *reached[taps.lead :]]
    cells = offset_cells(with_scene(coords), taps.columns(coords.device), taps.steps, [0] * len(high), high, transpose)
    return cells[:, 1:].to(coords.dtype).contiguous()
