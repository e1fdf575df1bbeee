"""The Triton code of hash maps, curves, grid sampling and post-processing on CUDA."""

from __future__ import annotations

from torch import Tensor

from shiplap_sparse3d import grid_sample, hashing, postprocess, serialize
from shiplap_sparse3d.cuda.late import lazy_function

__all__: list[str] = []


@hashing.hash_insert.kernel("cuda", name="triton")
def _(table_keys: Tensor, table_values: Tensor, keys: Tensor, values: Tensor) -> None:
    """Insert ``keys`` with ``values`` into the hash map. This is the CUDA kernel of ``hashing.hash_insert``, in
    Triton.
    """
    lazy_function("hashmap", "insert_keys")("hash_insert", table_keys, table_values, keys, values)


@hashing.hash_lookup.kernel("cuda", name="triton")
def _(table_keys: Tensor, table_values: Tensor, keys: Tensor, *, out: Tensor) -> None:
    """Write the value of each of ``keys`` to ``out``, or -1 for a key that the hash map lacks. This is the CUDA kernel
    of ``hashing.hash_lookup``, in Triton.
    """
    lazy_function("hashmap", "look_up_keys")(table_keys, table_values, keys, out)


@hashing.hash_insert_3d.kernel("cuda", name="triton")
def _(table_keys: Tensor, table_values: Tensor, coords: Tensor, values: Tensor, spatial_shape: list[int]) -> None:
    """Insert the voxels ``coords`` with ``values`` into the hash map. This is the CUDA kernel of
    ``hashing.hash_insert_3d``, in Triton.
    """
    lazy_function("hashmap", "insert_voxels")("hash_insert_3d", table_keys, table_values, coords, values, spatial_shape)


@hashing.hash_insert_3d_index.kernel("cuda", name="triton")
def _(table_keys: Tensor, table_values: Tensor, coords: Tensor, spatial_shape: list[int]) -> None:
    """Insert each voxel into the hash map with its row number as the value. This is the CUDA kernel of
    ``hashing.hash_insert_3d_index``, in Triton.
    """
    lazy_function("hashmap", "insert_voxels")(
        "hash_insert_3d_index", table_keys, table_values, coords, None, spatial_shape
    )


@hashing.hash_lookup_3d.kernel("cuda", name="triton")
def _(table_keys: Tensor, table_values: Tensor, coords: Tensor, spatial_shape: list[int], *, out: Tensor) -> None:
    """Write the value of each voxel to ``out``, or -1 for a voxel that the hash map lacks. This is the CUDA kernel of
    ``hashing.hash_lookup_3d``, in Triton.
    """
    lazy_function("hashmap", "look_up_voxels")(table_keys, table_values, coords, spatial_shape, out)


@serialize.z_order_encode.kernel("cuda", name="triton")
def _(coords: Tensor, bits: int, axes: list[int], width: int, *, codes: Tensor) -> None:
    """Write the Z-order code of each voxel to ``codes``. This is the CUDA kernel of ``serialize.z_order_encode``, in
    Triton.
    """
    lazy_function("curves", "encode_curve")("z_order_encode", coords, bits, axes, width, codes)


@serialize.z_order_decode.kernel("cuda", name="triton")
def _(codes: Tensor, bits: int, axes: list[int], *, coords: Tensor) -> None:
    """Write the voxel of each Z-order code to ``coords``. This is the CUDA kernel of ``serialize.z_order_decode``, in
    Triton.
    """
    lazy_function("curves", "decode_curve")("z_order_decode", codes, bits, axes, coords)


@serialize.hilbert_encode.kernel("cuda", name="triton")
def _(coords: Tensor, bits: int, axes: list[int], width: int, *, codes: Tensor) -> None:
    """Write the Hilbert code of each voxel to ``codes``. This is the CUDA kernel of ``serialize.hilbert_encode``, in
    Triton.
    """
    lazy_function("curves", "encode_curve")("hilbert_encode", coords, bits, axes, width, codes)


@serialize.hilbert_decode.kernel("cuda", name="triton")
def _(codes: Tensor, bits: int, axes: list[int], *, coords: Tensor) -> None:
    """Write the voxel of each Hilbert code to ``coords``. This is the CUDA kernel of ``serialize.hilbert_decode``, in
    Triton.
    """
    lazy_function("curves", "decode_curve")("hilbert_decode", codes, bits, axes, coords)


@grid_sample.nearest_map.kernel("cuda", name="triton")
def _(coords: Tensor, queries: Tensor, spatial_shape: list[int], *, out: Tensor) -> None:
    """Write the row of the voxel that contains each query to ``out``, or -1 if there is none. This is the CUDA kernel
    of ``grid_sample.nearest_map``, in Triton.
    """
    lazy_function("sample", "find_queries")("nearest_map", coords, queries, spatial_shape, out, None)


@grid_sample.trilinear_map.kernel("cuda", name="triton")
def _(coords: Tensor, queries: Tensor, spatial_shape: list[int], *, indices: Tensor, weights: Tensor) -> None:
    """Write the rows of the eight voxels around each query to ``indices``, and their weights to ``weights``. This is
    the CUDA kernel of ``grid_sample.trilinear_map``, in Triton.
    """
    lazy_function("sample", "find_queries")("trilinear_map", coords, queries, spatial_shape, indices, weights)


@grid_sample.indice_weighted_sum.kernel("cuda", name="triton")
def _(feats: Tensor, indices: Tensor, weights: Tensor, *, out: Tensor) -> None:
    """Write the weighted sum of the rows ``indices`` of ``feats`` for each query to ``out``. This is the CUDA kernel of
    ``grid_sample.indice_weighted_sum``, in Triton.
    """
    lazy_function("sample", "weighted_sum")(feats, indices, weights, out)


@grid_sample.indice_weighted_sum_grad.kernel("cuda", name="triton")
def _(grad: Tensor, indices: Tensor, weights: Tensor, rows: int, *, out: Tensor) -> None:
    """Write the gradient of ``indice_weighted_sum`` with respect to its features to ``out``. This is the CUDA kernel of
    ``grid_sample.indice_weighted_sum_grad``, in Triton.
    """
    lazy_function("sample", "weighted_sum_grad")(grad, indices, weights, rows, out)


@postprocess.masked_gemm_signals.kernel("cuda", name="triton")
def _(
    table: Tensor,
    *,
    gray_code: Tensor,
    sorted_index: Tensor,
    valid_signal_i: Tensor,
    valid_signal_o: Tensor,
    valid_signal_seg: Tensor,
) -> None:
    """Write five tensors that describe the neighbour ``table``, as ``postprocess.masked_gemm_signals`` defines them.
    They are a bit for each column in which a row has a neighbour, an order of the rows by these bits, the (input,
    output) pairs of all columns, and where the pairs of each column begin. This is the CUDA kernel of that op, in
    Triton.
    """
    lazy_function("postprocess", "launch_signals")(
        table, gray_code, sorted_index, valid_signal_i, valid_signal_o, valid_signal_seg
    )


@postprocess.masked_gemm_kernels.kernel("cuda", name="triton")
def _(gray_code: Tensor, sorted_index: Tensor, block: int, *, valid_kernel: Tensor, valid_kernel_seg: Tensor) -> None:
    """Write the bits that any code in each block of ``block`` rows has set to ``valid_kernel``, as bit numbers, and
    where those of each block begin to ``valid_kernel_seg``. This is the CUDA kernel of
    ``postprocess.masked_gemm_kernels``, in Triton.
    """
    lazy_function("postprocess", "launch_kernels")(gray_code, sorted_index, block, valid_kernel, valid_kernel_seg)
