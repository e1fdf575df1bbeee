"""``flex_gemm.kernels.triton.neighbor_cache.output_coords``: output voxels and the pairs that lead to them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shiplap_sparse3d.flexgemm.ops.neighbor_cache import Ints, Taps, read_taps
from shiplap_sparse3d.flexgemm.ops.utils import with_scene
from shiplap_sparse3d.offsets import offset_cells, offset_table, unbounded

__all__ = [
    "get_output_coords_kernel_delta",
    "get_output_coords_kernel_delta_torch",
    "get_output_coords_kernel_size_dilation",
    "get_output_coords_kernel_size_dilation_torch",
]

Boundary = Sequence[tuple[int, int]]
Reached = tuple[Tensor, Tensor, Tensor, Tensor]


def get_output_coords_kernel_size_dilation(
    input_coords: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    dilation: Ints | None = None,
    offset: Ints | None = None,
    boundary: Boundary | None = None,
    transposed: bool = False,
) -> Reached:
    """Return the output voxels that a box kernel reaches inside ``boundary``, and the pairs of voxels that it connects.

    The result is ``(voxels, inputs, outputs, taps)``. ``voxels`` are rows like those of ``input_coords``, ascending.
    The others are ``int32`` and hold the input row, the output row and the tap of each pair.

    An output lies at ``(input - offset - delta) / stride`` if that is whole, where ``delta`` is the offset of a tap. If
    ``transposed`` is true, it lies at ``input * stride + offset + delta``. The default of ``stride`` and ``dilation``
    is 1, and that of ``offset`` is 0, for each axis. ``boundary`` holds the lowest and one past the highest coordinate
    of each column. If it is None, all coordinates are allowed.
    """
    taps = read_taps(input_coords, kernel_size, None, stride, dilation, None, offset)
    return _reach(input_coords, taps, boundary, transposed)


def get_output_coords_kernel_delta(
    input_coords: Tensor,
    delta: Tensor,
    stride: Ints | None = None,
    offset: Ints | None = None,
    boundary: Boundary | None = None,
    transposed: bool = False,
) -> Reached:
    """Return the output voxels that taps at the offsets ``delta [V, axes]`` reach inside ``boundary``, and the pairs of
    voxels that they connect. The form of the result, ``boundary`` and ``transposed`` are those of
    :func:`get_output_coords_kernel_size_dilation`. The default of ``stride`` is 1, and that of ``offset`` is 0, for
    each axis.
    """
    axes = delta.shape[1]
    # Offsets may have columns for the batch, whose stride and offset are not given.
    stride = stride and (*[1] * (axes - len(stride)), *stride)
    offset = offset and (*[0] * (axes - len(offset)), *offset)
    return _reach(input_coords, read_taps(input_coords, None, delta, stride, None, None, offset), boundary, transposed)


def _reach(coords: Tensor, taps: Taps, boundary: Boundary | None, transposed: bool) -> Reached:
    """Return the voxels that ``taps`` reach from ``coords``, ascending, and the pairs of voxels that they connect. The
    pairs are three ``int32`` tensors, which hold the input row, the output row and the tap of each pair.

    If ``transposed`` is true, outputs lie at ``input * stride + offset``. Otherwise inputs lie at ``output * stride +
    offset``. ``boundary`` holds the lowest and one past the highest coordinate of each column. If it is None, all
    coordinates are allowed.
    """
    wide, columns = with_scene(coords), taps.columns(coords.device)
    low, high = unbounded(coords.shape[1])
    if boundary is not None:
        # The first column is the added scene, which is always 0.
        low, high = [0, *(b[0] for b in boundary)], [1, *(b[1] for b in boundary)]
    cells = offset_cells(wide, columns, taps.steps, low, high, transposed)
    ends = (cells, wide) if transposed else (wide, cells)
    table = offset_table(*ends, columns, taps.steps)
    row, tap = (table >= 0).nonzero().unbind(1)
    other = table[row, tap].long()
    pairs = (row, other) if transposed else (other, row)
    return cells[:, 1:].to(coords.dtype).contiguous(), pairs[0].int(), pairs[1].int(), tap.int()


get_output_coords_kernel_size_dilation_torch = get_output_coords_kernel_size_dilation
get_output_coords_kernel_delta_torch = get_output_coords_kernel_delta
