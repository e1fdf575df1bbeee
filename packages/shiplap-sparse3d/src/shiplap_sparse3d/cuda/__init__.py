"""The Triton kernels of sparse3d for CUDA. A module with Triton code is imported when its first kernel runs."""

from __future__ import annotations

from torch import Tensor

from shiplap.plugin_api import late_launches
from shiplap_sparse3d import bounded, norms, ops, planning, pooling
from shiplap_sparse3d.cuda.late import lazy_function
from shiplap_sparse3d.cuda.status import synchronize

__all__ = ["synchronize"]

HASH = "40 * max(2 * n, 64)"  # bytes: hash.SLOT_BYTES * lookup.CAPACITY
SORT = "(parts * (24 * {0} + min(8 * {0}, 2097152) + 16384) + 7) // 8 * 8"  # bytes: sort.scratch_bytes


@ops.unique_coords.kernel("cuda", name="triton")
def _(coords: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct rows of ``coords``, the number of the distinct row of each input, and the number of inputs of
    each distinct row. This is the CUDA kernel of ``ops.unique_coords``, in Triton.
    """
    outputs: tuple[Tensor, Tensor, Tensor] = lazy_function("unique", "unique_coords")(coords)
    return outputs


@ops.segment_mean.kernel("cuda", name="triton", strided=["feats"])
def _(feats: Tensor, index: Tensor, counts: Tensor, *, out: Tensor) -> None:
    """Write the mean of the rows of ``feats`` with the same ``index`` to ``out``. This is the CUDA kernel of
    ``ops.segment_mean``, in Triton.
    """
    lazy_function("unique", "segment_mean")(feats, index, counts, out=out)


@ops.subm_table.kernel("cuda", name="triton", workspace=HASH)
def _(
    coords: Tensor, spatial_shape: list[int], kernel: list[int], dilation: list[int], *, out: Tensor, workspace: Tensor
) -> None:
    """Write the neighbour table ``int32 [n, k]`` of a submanifold convolution to ``out``. Voxels are found in a hash
    map in ``workspace``. This is the CUDA kernel of ``ops.subm_table``, in Triton.
    """
    lazy_function("plain_tables", "subm_table")(coords, spatial_shape, kernel, dilation, out=out, workspace=workspace)


@ops.conv_table.kernel("cuda", name="triton", workspace=HASH)
def _(
    coords: Tensor,
    out_coords: Tensor,
    spatial_shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    *,
    out: Tensor,
    workspace: Tensor,
) -> None:
    """Write to ``out`` the neighbour table ``int32 [m, k]`` of a convolution from the voxels ``coords`` to the voxels
    ``out_coords``. Voxels are found in a hash map in ``workspace``. This is the CUDA kernel of ``ops.conv_table``, in
    Triton.
    """
    lazy_function("plain_tables", "conv_table")(
        coords, out_coords, spatial_shape, kernel, stride, padding, dilation, out=out, workspace=workspace
    )


@ops.out_coords.kernel("cuda", name="triton")
def _(
    coords: Tensor,
    spatial_shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    """Return the output voxels ``int32 [m, 4]`` that a strided convolution reaches from ``coords``, ascending. This is
    the CUDA kernel of ``ops.out_coords``, in Triton.
    """
    return lazy_function("cells", "out_coords")(coords, spatial_shape, kernel, stride, padding, dilation)


TABLES, SORTS = f"{__name__}.tables", f"{__name__}.sort"
SUBM_PLAN = f"{HASH} + {SORT.format('n')} + 4 * n * k"
SORT_BACK = SORT.format("n").replace("parts", "parts_t")
CONV_PLAN = f"{HASH} + {SORT.format('m')} + {SORT_BACK} + 4 * k * (m + n * min(parts_t, 1))"
ops.sort_table.kernel("cuda", late_launches(SORTS, "SORT_TABLE"), name="triton", workspace=SORT.format("m"))
ops.transpose_table.kernel("cuda", late_launches(TABLES, "TRANSPOSE_TABLE"), name="triton")
ops.tap_blocks.kernel("cuda", late_launches(SORTS, "TAP_BLOCKS"), name="triton")
planning.subm_plan.kernel("cuda", late_launches(TABLES, "SUBM_PLAN"), name="triton", workspace=SUBM_PLAN)
planning.conv_plan.kernel("cuda", late_launches(TABLES, "CONV_PLAN"), name="triton", workspace=CONV_PLAN)


COORDS, _CAPACITY = f"{__name__}.coords", f"min(capacity, {ops.OUT_COORDS_BOUND})"
SET = f"8 * pow2ceil(max(64, 2 * {_CAPACITY}))"  # bytes: coords.SLOTS
BOUNDED, KEYS = f"{SET} + 8 + 24 * capacity", "24 * m * min(1, m // 8193)"  # more than coords.FEW
_AXIS = "max(0, (spatial_shape[{i}] + 2 * padding[{i}] - dilation[{i}] * (kernel[{i}] - 1) - 1) // stride[{i}] + 1)"
_CHUNKS = f"cdiv(scenes * {' * '.join(_AXIS.format(i=i) for i in range(3))}, 16384)"  # of cells.CHUNK words
FIRST = f"8 * capacity + where(scenes > 0, 2052 * {_CHUNKS} + 4, {SET})"  # bytes: keys, bits, sums, a flag
bounded.first_voxels.kernel("cuda", late_launches(f"{__name__}.cells", "FIRST_VOXELS"), name="triton", workspace=FIRST)
bounded.reached_keys.kernel("cuda", late_launches(COORDS, "REACHED_KEYS"), name="triton", workspace=SET)
bounded.voxels_of_keys.kernel("cuda", late_launches(COORDS, "VOXELS_OF_KEYS"), name="triton", workspace=KEYS)
bounded.out_coords_bounded.kernel("cuda", late_launches(COORDS, "BOUNDED"), name="triton", workspace=BOUNDED)

norms.norm_relu.kernel(
    "cuda", late_launches(f"{__name__}.norm", "NORM_RELU"), name="triton", dtypes=["float16", "bfloat16", "float32"]
)


# --- pooling ----------------------------------------------------------------------------------------------------------


@pooling.max_pool_with_taps.kernel("cuda", name="triton", strided=True)
def _(feats: Tensor, table: Tensor, table_t: Tensor | None, *, out: Tensor, taps: Tensor) -> None:
    """Write the maximum of the rows of ``feats`` that each output reads by the neighbour ``table`` to ``out``, channel
    by channel. Write the column of the table that each maximum comes from to ``taps``. ``table_t`` is not used.
    This is the CUDA kernel of ``pooling.max_pool_with_taps``, in Triton.
    """
    lazy_function("pool", "max_pool_with_taps")(feats, table, table_t, out=out, taps=taps)


@pooling.max_pool_grad.kernel("cuda", name="triton", strided=True)
def _(grad: Tensor, taps: Tensor, table_t: Tensor, *, out: Tensor) -> None:
    """Write the gradient of a max pooling with respect to its input to ``out``. ``taps`` holds the column of the
    neighbour table that each maximum came from, and ``table_t`` is the transposed table. This is the CUDA kernel of
    ``pooling.max_pool_grad``, in Triton.
    """
    lazy_function("pool", "max_pool_grad")(grad, taps, table_t, out=out)


@pooling.sum_pool.kernel("cuda", name="triton", strided=True)
def _(feats: Tensor, table: Tensor, table_t: Tensor | None, average: bool, *, out: Tensor) -> None:
    """Write the sum of the rows of ``feats`` that each output reads by the neighbour ``table`` to ``out``. If
    ``average`` is true, write their mean instead. ``table_t`` is not used. This is the CUDA kernel of
    ``pooling.sum_pool``, in Triton.
    """
    lazy_function("pool", "sum_pool")(feats, table, table_t, average, out=out)


_PARTS = "min(cdiv(n, 2048), 256) * batch_size"  # as many as scenes.PART and scenes.PARTS make, for each scene


@pooling.global_max_pool.kernel("cuda", name="triton", workspace=f"{_PARTS} * 4 * c", strided=True)
def _(feats: Tensor, coords: Tensor, batch_size: int, *, out: Tensor, rows: Tensor, workspace: Tensor) -> None:
    """Write the maximum over the voxels of each scene to ``out``, channel by channel. Write the row that each maximum
    comes from to ``rows``. This is the CUDA kernel of ``pooling.global_max_pool``, in Triton.
    """
    lazy_function("scenes", "global_max_pool")(feats, coords, batch_size, out=out, rows=rows, workspace=workspace)


@pooling.global_sum_pool.kernel("cuda", name="triton", workspace=f"{_PARTS} * (8 * c + 8)", strided=True)
def _(feats: Tensor, coords: Tensor, batch_size: int, average: bool, *, out: Tensor, workspace: Tensor) -> None:
    """Write the sum over the voxels of each scene to ``out``. If ``average`` is true, write the mean instead. This is
    the CUDA kernel of ``pooling.global_sum_pool``, in Triton.
    """
    lazy_function("scenes", "global_sum_pool")(feats, coords, batch_size, average, out=out, workspace=workspace)
