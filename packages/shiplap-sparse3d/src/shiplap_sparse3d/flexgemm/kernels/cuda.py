"""``flex_gemm.kernels.cuda`` and ``torch.ops.flex_gemm``: the low-level functions of FlexGEMM 1.x, on any device.

They are composed of the ops of this package, so a graph holds those. Row numbers are ``uint32`` and a missing one is
``0xffffffff``; a hash map is ``uint32`` or ``uint64`` keys that are all ones where it is empty, and values of either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shiplap_sparse3d import grid_sample, hashing, ops, postprocess, serialize
from shiplap_sparse3d.plan import Plan
from shiplap_sparse3d.rows import chosen_rows

__all__ = [
    "expand_unique_build_sparse_conv_out_coords",
    "hashmap_build_grid_sample_3d_nearest_neighbor_map",
    "hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight",
    "hashmap_build_sparse_conv_neighbour_map",
    "hashmap_build_sparse_conv_out_coords",
    "hashmap_build_submanifold_conv_neighbour_map",
    "hashmap_insert",
    "hashmap_insert_3d",
    "hashmap_insert_3d_idx_as_val",
    "hashmap_lookup",
    "hashmap_lookup_3d",
    "hilbert_decode",
    "hilbert_encode",
    "neighbor_map_post_process_for_masked_implicit_gemm_1",
    "neighbor_map_post_process_for_masked_implicit_gemm_1_no_bwd",
    "neighbor_map_post_process_for_masked_implicit_gemm_2",
    "sparse_conv_masked_bwd",
    "sparse_conv_masked_fwd",
    "sparse_conv_masked_splitk_bwd",
    "sparse_conv_masked_splitk_fwd",
    "z_order_decode",
    "z_order_encode",
]

# --- hash maps --------------------------------------------------------------------------------------------------------


def _as_signed(tensor: Tensor) -> Tensor:
    """Return a view of ``tensor`` (``uint32`` or ``uint64``) as signed integers of the same width, in which -1 has all
    bits set. A tensor of another dtype is returned unchanged.
    """
    kinds = {torch.uint32: torch.int32, torch.uint64: torch.int64}
    return tensor.view(kinds[tensor.dtype]) if tensor.dtype in kinds else tensor


def _as_int64(tensor: Tensor) -> Tensor:
    """Return the integers of ``tensor`` as ``int64``. Numbers with all bits set become -1. Other 32-bit numbers are
    read as unsigned.
    """
    signed = _as_signed(tensor)
    return signed if signed.dtype == torch.int64 else torch.where(signed == -1, -1, signed.long() & 0xFFFFFFFF)


def hashmap_insert(hashmap_keys: Tensor, hashmap_values: Tensor, keys: Tensor, values: Tensor) -> None:
    """Insert ``keys`` with ``values`` into the hash map ``hashmap_keys`` and ``hashmap_values``, in place. A key that
    exists already gets the new value. Of equal ``keys`` the first is stored. Raise ``SL211`` if the map has no room.
    """
    here, wanted = _as_int64(hashmap_keys).clone(), _as_int64(keys)
    # The entries of the map move as others come in, so what is inserted are the numbers of the values.
    new, slots = values.shape[0], torch.arange(here.shape[0], dtype=torch.int32, device=here.device)
    number = torch.where(here == -1, -1, new + slots)
    hashing.hash_insert(here, number, wanted, torch.arange(new, dtype=torch.int32, device=here.device))
    both = torch.cat([_as_signed(values).to(_as_signed(hashmap_values).dtype), _as_signed(hashmap_values)])
    # Index -1 is any value, which an empty slot may have.
    _as_signed(hashmap_values).copy_(both[number.long()])
    _as_signed(hashmap_keys).copy_(here.to(_as_signed(hashmap_keys).dtype))


def hashmap_lookup(hashmap_keys: Tensor, hashmap_values: Tensor, keys: Tensor) -> Tensor:
    """Return the value of each of ``keys`` in the hash map, in the dtype of ``hashmap_values``. For a key that is
    missing from the map, all bits of the value are set.
    """
    here = _as_int64(hashmap_keys)
    slots = torch.arange(here.shape[0], dtype=torch.int32, device=here.device)
    # Slots are looked up and not values, which may have any dtype.
    slot = hashing.hash_lookup(here, torch.where(here == -1, -1, slots), _as_int64(keys))
    values = _as_signed(hashmap_values)
    return torch.where(slot >= 0, values[slot.long()], -1).to(values.dtype).view(hashmap_values.dtype)


def _keys_of_voxels(coords: Tensor, grid: Sequence[int]) -> Tensor:
    """Return the key of each voxel ``[n, 4]`` (scene, x, y, z) as ``int64 [n]``. The key is the number of the voxel's
    cell in a ``grid`` of W x H x D cells, ``((scene * W + x) * H + y) * D + z``. Outside the grid it is -1, which no
    map contains.
    """
    b, x, y, z = coords.long().unbind(1)
    inside = (b >= 0) & (x >= 0) & (x < grid[0]) & (y >= 0) & (y < grid[1]) & (z >= 0) & (z < grid[2])
    return torch.where(inside, ((b * grid[0] + x) * grid[1] + y) * grid[2] + z, -1)


def hashmap_insert_3d(
    hashmap_keys: Tensor, hashmap_values: Tensor, coords: Tensor, values: Tensor, W: int, H: int, D: int
) -> None:
    """Insert the voxels ``coords`` (``int32 [m, 4]``, scene, x, y, z) with ``values`` into the hash map, in place. The
    key of a voxel is the number of its cell, counted over all scenes, each a grid of ``W`` x ``H`` x ``D`` cells.
    Voxels outside the grid are left out.
    """
    hashmap_insert(hashmap_keys, hashmap_values, _keys_of_voxels(coords, (W, H, D)), values)


def hashmap_insert_3d_idx_as_val(
    hashmap_keys: Tensor, hashmap_values: Tensor, coords: Tensor, W: int, H: int, D: int
) -> None:
    """Insert the voxels ``coords`` (``int32 [m, 4]``, scene, x, y, z) into the hash map, in place, with their row
    numbers as values. The key of a voxel is that of :func:`hashmap_insert_3d`, for a grid of ``W`` x ``H`` x ``D``
    cells in each scene. Voxels outside the grid are left out.
    """
    rows = torch.arange(coords.shape[0], device=coords.device)
    hashmap_insert_3d(hashmap_keys, hashmap_values, coords, rows, W, H, D)


def hashmap_lookup_3d(hashmap_keys: Tensor, hashmap_values: Tensor, coords: Tensor, W: int, H: int, D: int) -> Tensor:
    """Return the value that the hash map holds for each voxel of ``coords`` (``int32 [m, 4]``, scene, x, y, z). All
    bits of the value are set for a voxel outside the grid of ``W`` x ``H`` x ``D`` cells, and for a voxel that is
    missing from the map.
    """
    return hashmap_lookup(hashmap_keys, hashmap_values, _keys_of_voxels(coords, (W, H, D)))


# --- codes along a curve ----------------------------------------------------------------------------------------------


def z_order_encode(coords: Tensor, bit_length: int, codes: Tensor) -> None:
    """Write the Z-order code of each voxel of ``coords [n, 4]`` (scene, x, y, z) into ``codes [n]``, in place. A code
    has ``bit_length`` bits for each axis.
    """
    codes.copy_(serialize.z_order_encode(coords, bit_length))


def hilbert_encode(coords: Tensor, bit_length: int, codes: Tensor) -> None:
    """Write the Hilbert code of each voxel of ``coords [n, 4]`` (scene, x, y, z) into ``codes [n]``, in place. A code
    has ``bit_length`` bits for each axis.
    """
    codes.copy_(serialize.hilbert_encode(coords, bit_length))


def z_order_decode(codes: Tensor, bit_length: int) -> Tensor:
    """Return the voxels ``int32 [n, 4]`` (scene, x, y, z) of the Z-order codes ``codes``, which are integers ``[n]``.

    The low ``3 * bit_length`` bits of a code interleave ``bit_length`` bits of each of x, y and z. The bits above them
    are the scene. A code of -1 gives a row of -1.
    """
    voxels: Tensor = serialize.z_order_decode(codes.long(), bit_length)
    return voxels


def hilbert_decode(codes: Tensor, bit_length: int) -> Tensor:
    """Return the voxels ``int32 [n, 4]`` (scene, x, y, z) of Hilbert codes with ``bit_length`` bits for each axis."""
    voxels: Tensor = serialize.hilbert_decode(codes.long(), bit_length)
    return voxels


# --- neighbours -------------------------------------------------------------------------------------------------------


def hashmap_build_grid_sample_3d_nearest_neighbor_map(
    hashmap_keys: Tensor, hashmap_vals: Tensor, coords: Tensor, grid: Tensor, W: int, H: int, D: int
) -> Tensor:
    """Return the row of ``coords`` whose voxel contains each point of ``grid [b, l, 3]``, as ``uint32 [b, l]``. All
    bits of the number are set if no voxel contains the point. Points are in units of cells, and their first index is
    the scene.

    The grid has ``W`` x ``H`` x ``D`` cells. As in FlexGEMM, the voxels are also inserted into the hash map, in place,
    with their row numbers as values.
    """
    hashmap_insert_3d_idx_as_val(hashmap_keys, hashmap_vals, coords, W, H, D)
    return grid_sample.nearest_map(coords, grid.float(), [W, H, D]).view(torch.uint32)


def hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight(
    hashmap_keys: Tensor, hashmap_vals: Tensor, coords: Tensor, grid: Tensor, W: int, H: int, D: int
) -> tuple[Tensor, Tensor]:
    """Return the rows of ``coords`` of the 8 voxels around each point of ``grid [b, l, 3]``, as ``uint32 [b, l, 8]``,
    and their trilinear weights ``[b, l, 8]``. All bits are set in the row of a missing voxel, whose weight is 0. The
    weights of a point's other voxels sum to 1.

    Points are in units of cells, and their first index is the scene. The grid has ``W`` x ``H`` x ``D`` cells. As in
    FlexGEMM, the voxels are also inserted into the hash map, in place, with their row numbers as values.
    """
    hashmap_insert_3d_idx_as_val(hashmap_keys, hashmap_vals, coords, W, H, D)
    rows, weights = grid_sample.trilinear_map(coords, grid.float(), [W, H, D])
    return rows.view(torch.uint32), weights


def hashmap_build_submanifold_conv_neighbour_map(
    hashmap_keys: Tensor,
    hashmap_vals: Tensor,
    coords: Tensor,
    W: int,
    H: int,
    D: int,
    Kw: int,
    Kh: int,
    Kd: int,
    Dw: int,
    Dh: int,
    Dd: int,
) -> Tensor:
    """Return the neighbour map of a submanifold convolution, ``uint32 [n, V]``. It holds the row of the voxel under
    each of the ``V`` taps around each voxel. All bits are set if there is no voxel.

    The grid has ``W`` x ``H`` x ``D`` cells, and the kernel has ``Kw`` x ``Kh`` x ``Kd`` taps. ``Dw``, ``Dh`` and
    ``Dd`` are the dilations along the axes. As in FlexGEMM, the voxels are also inserted into the hash map, in place,
    with their row numbers as values.
    """
    hashmap_insert_3d_idx_as_val(hashmap_keys, hashmap_vals, coords, W, H, D)
    return ops.subm_table(coords, [W, H, D], [Kw, Kh, Kd], [Dw, Dh, Dd]).view(torch.uint32)


def hashmap_build_sparse_conv_out_coords(
    in_coords: Tensor, hashmap_ratio: float, serialize_mode: int, B: int, W: int, H: int, D: int, *window: int
) -> Tensor:
    """Return the output voxels of a strided convolution, ``int32 [m, 4]`` (scene, x, y, z), in ascending order of the
    rows. The input grid has ``W`` x ``H`` x ``D`` cells. ``window`` has three numbers each for kernel size, stride,
    padding and dilation. ``hashmap_ratio``, ``serialize_mode`` and ``B`` are not read.
    """
    voxels: Tensor = ops.out_coords(in_coords, [W, H, D], *_window(window))
    return voxels


def expand_unique_build_sparse_conv_out_coords(
    in_coords: Tensor, serialize_mode: int, B: int, W: int, H: int, D: int, *window: int
) -> Tensor:
    """Return the output voxels of a strided convolution, ``int32 [m, 4]`` (scene, x, y, z), in ascending order of the
    rows. The function calls ``hashmap_build_sparse_conv_out_coords``, which describes the arguments.
    """
    return hashmap_build_sparse_conv_out_coords(in_coords, 1.0, serialize_mode, B, W, H, D, *window)


def hashmap_build_sparse_conv_neighbour_map(
    in_coords: Tensor,
    out_coords: Tensor,
    hashmap_ratio: float,
    include_bwd: bool,
    B: int,
    W: int,
    H: int,
    D: int,
    *window: int,
) -> tuple[Tensor, Tensor]:
    """Return the neighbour map of a strided convolution, ``uint32 [m, V]``, and its transpose, ``uint32 [n, V]``. The
    map holds the row of ``in_coords`` under each tap of each output. The transpose holds the row of ``out_coords`` that
    reads each input by each tap. A number with all bits set stands for no row.

    If ``include_bwd`` is false, the transpose is an empty tensor. The input grid has ``W`` x ``H`` x ``D`` cells.
    ``window`` has three numbers each for kernel size, stride, padding and dilation. ``hashmap_ratio`` and ``B`` are not
    read.
    """
    table = ops.conv_table(in_coords, out_coords, [W, H, D], *_window(window))
    back = ops.transpose_table(table, in_coords.shape[0]) if include_bwd else table.new_empty(0)
    return table.view(torch.uint32), back.view(torch.uint32)


def _window(numbers: Sequence[int]) -> list[list[int]]:
    """Return twelve numbers as four lists of three numbers, which are kernel size, stride, padding and dilation."""
    return [list(numbers[3 * i : 3 * i + 3]) for i in range(4)]


# --- after the map ----------------------------------------------------------------------------------------------------


def neighbor_map_post_process_for_masked_implicit_gemm_1(
    neighbor_map: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return five tensors of a neighbour map ``[m, V]`` of at most 32 taps.

    The first, ``int32 [m]``, has bit ``v`` set if the row has a neighbour under tap ``v``. The second, ``int64 [m]``,
    holds the row numbers sorted by the rank of these bits as a Gray code. The third and the fourth, ``uint32``, hold
    the input and the output row of each pair of neighbours, tap by tap. Their length depends on the data. The last,
    ``uint32 [V + 1]``, holds where the pairs of each tap begin, and the number of all pairs.
    """
    code, order, inputs, outputs, ends = postprocess.masked_gemm_signals(_as_signed(neighbor_map).contiguous())
    # The op pads its lists to a fixed length, and FlexGEMM's lists have no padding.
    pairs = chosen_rows(inputs >= 0)
    inputs, outputs = inputs.index_select(0, pairs), outputs.index_select(0, pairs)
    return code, order, inputs.view(torch.uint32), outputs.view(torch.uint32), ends.int().view(torch.uint32)


def neighbor_map_post_process_for_masked_implicit_gemm_1_no_bwd(neighbor_map: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bit mask for each row of a neighbour map ``[m, V]`` of at most 32 taps, and the sorted order of the
    rows. Bit ``v`` of the mask, ``int32 [m]``, is set if the row has a neighbour under tap ``v``. The order, ``int64
    [m]``, holds the row numbers sorted by the rank of their masks as a Gray code.
    """
    code, order, *_ = postprocess.masked_gemm_signals(_as_signed(neighbor_map).contiguous())
    return code, order


def neighbor_map_post_process_for_masked_implicit_gemm_2(
    gray_code: Tensor, sorted_idx: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Return the taps that each block of ``block_size`` sorted rows needs, and where the taps of each block begin. A
    block needs a tap if one of its rows has a neighbour under it.

    The taps are one ``int32`` list for all blocks, whose length depends on the data. Those of block ``i`` are
    ``taps[begins[i] : begins[i + 1]]``. ``gray_code`` and ``sorted_idx`` are the first two results of
    ``neighbor_map_post_process_for_masked_implicit_gemm_1``.
    """
    taps, ends = postprocess.masked_gemm_kernels(gray_code, sorted_idx, block_size)
    return taps.index_select(0, chosen_rows(taps >= 0)), ends


# --- convolutions over a map ------------------------------------------------------------------------------------------


def _plan_of_map(neighbor: Tensor, rows: int, splitk: int = 1) -> Plan:
    """Return a plan, which holds neighbour tables and convolves features, for the neighbour map ``neighbor [m, V]``.
    ``rows`` is the number of inputs. If ``splitk`` is above 1, the plan is cut into that many parts of its taps.
    """
    plan, taps = Plan(_as_signed(neighbor).contiguous(), rows), neighbor.shape[1]
    return plan.sorted(max(min(splitk, taps), -(-taps // ops.MAX_PART))) if splitk > 1 and taps else plan


def sparse_conv_masked_splitk_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    neighbor: Tensor,
    sorted_idx: Tensor,
    valid_kernel: Sequence[Tensor],
    valid_kernel_seg: Sequence[Tensor],
    block_sizes: Sequence[int],
    splitk: int,
) -> Tensor:
    """Return the convolution ``[m, co]`` of ``input [n, ci]`` with ``weight [co, V, ci]`` over the neighbour map
    ``neighbor [m, V]``. The sum over the taps is split into ``splitk`` parts. If ``bias`` is None, no bias is added.
    The arguments from ``sorted_idx`` to ``block_sizes`` are not read, since Shiplap's kernels derive what they need
    from the map.
    """
    return _plan_of_map(neighbor, input.shape[0], splitk).conv(input, weight, bias)


def sparse_conv_masked_splitk_bwd(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    neighbor: Tensor,
    sorted_idx: Tensor,
    valid_kernel: Sequence[Tensor],
    valid_kernel_seg: Sequence[Tensor],
    block_sizes: Sequence[int],
    valid_signal_i: Tensor,
    valid_signal_o: Tensor,
    valid_signal_seg: Tensor,
    splitk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``sparse_conv_masked_splitk_fwd`` with respect to the input ``[n, ci]``, the weight
    ``[co, V, ci]`` and the bias ``[co]``. ``grad_output`` is ``[m, co]``. The arguments from ``sorted_idx`` to
    ``valid_signal_seg`` are not read, and neither is ``bias``.
    """
    table = _as_signed(neighbor).contiguous()
    back = _plan_of_map(ops.transpose_table(table, input.shape[0]), grad_output.shape[0], splitk)
    grad = grad_output.contiguous()
    return (
        back.conv(grad, weight.permute(2, 1, 0).contiguous()),
        ops.conv_weight_grad(grad, input, table),
        grad.sum(0),
    )


def sparse_conv_masked_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    neighbor: Tensor,
    sorted_idx: Tensor,
    valid_kernel: Sequence[Tensor],
    valid_kernel_seg: Sequence[Tensor],
    block_sizes: Sequence[int],
) -> Tensor:
    """Return the convolution ``[m, co]`` of ``input [n, ci]`` with ``weight [co, V, ci]`` over the neighbour map
    ``neighbor [m, V]``. This is ``sparse_conv_masked_splitk_fwd`` with ``splitk=1``. The arguments after ``neighbor``
    are not read.
    """
    lists = valid_kernel, valid_kernel_seg, block_sizes
    return sparse_conv_masked_splitk_fwd(input, weight, bias, neighbor, sorted_idx, *lists, 1)


def sparse_conv_masked_bwd(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    neighbor: Tensor,
    sorted_idx: Tensor,
    valid_kernel: Sequence[Tensor],
    valid_kernel_seg: Sequence[Tensor],
    block_sizes: Sequence[int],
    valid_signal_i: Tensor,
    valid_signal_o: Tensor,
    valid_signal_seg: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``sparse_conv_masked_fwd`` with respect to the input ``[n, ci]``, the weight ``[co, V,
    ci]`` and the bias ``[co]``. This is ``sparse_conv_masked_splitk_bwd`` with ``splitk=1``.
    """
    lists = valid_kernel, valid_kernel_seg, block_sizes, valid_signal_i, valid_signal_o, valid_signal_seg
    return sparse_conv_masked_splitk_bwd(grad_output, input, weight, bias, neighbor, sorted_idx, *lists, 1)


# --- torch.ops.flex_gemm ----------------------------------------------------------------------------------------------

_MAP = "Tensor(a!) hashmap_keys, Tensor(b!) hashmap_values, "
_GRID = "SymInt W, SymInt H, SymInt D"
_ENCODE = "(Tensor coords, int bit_length, Tensor(a!) codes) -> ()"
_DECODE = "(Tensor codes, int bit_length) -> Tensor"
_LISTS = "Tensor neighbor, Tensor sorted_idx, Tensor[] valid_kernel, Tensor[] valid_kernel_seg, int[] block_sizes"
_SIGNALS = "Tensor valid_signal_i, Tensor valid_signal_o, Tensor valid_signal_seg"
_SAMPLE = f"({_MAP}Tensor coords, Tensor grid, {_GRID}) -> "

TORCH_OPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "hashmap_insert_cuda": (f"({_MAP}Tensor keys, Tensor values) -> ()", hashmap_insert),
    "hashmap_lookup_cuda": ("(Tensor hashmap_keys, Tensor hashmap_values, Tensor keys) -> Tensor", hashmap_lookup),
    "hashmap_insert_3d_cuda": (f"({_MAP}Tensor coords, Tensor values, {_GRID}) -> ()", hashmap_insert_3d),
    "hashmap_lookup_3d_cuda": (
        f"(Tensor hashmap_keys, Tensor hashmap_values, Tensor coords, {_GRID}) -> Tensor",
        hashmap_lookup_3d,
    ),
    "hashmap_insert_3d_idx_as_val_cuda": (f"({_MAP}Tensor coords, {_GRID}) -> ()", hashmap_insert_3d_idx_as_val),
    "z_order_encode": (_ENCODE, z_order_encode),
    "z_order_decode": (_DECODE, z_order_decode),
    "hilbert_encode": (_ENCODE, hilbert_encode),
    "hilbert_decode": (_DECODE, hilbert_decode),
    "hashmap_build_grid_sample_3d_nearest_neighbor_map": (
        f"{_SAMPLE}Tensor",
        hashmap_build_grid_sample_3d_nearest_neighbor_map,
    ),
    "hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight": (
        f"{_SAMPLE}(Tensor, Tensor)",
        hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight,
    ),
    "hashmap_build_submanifold_conv_neighbour_map_cuda": (
        f"({_MAP}Tensor coords, {_GRID}, SymInt Kw, SymInt Kh, SymInt Kd, SymInt Dw, SymInt Dh, SymInt Dd) -> Tensor",
        hashmap_build_submanifold_conv_neighbour_map,
    ),
    "neighbor_map_post_process_for_masked_implicit_gemm_1": (
        "(Tensor neighbor_map) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        neighbor_map_post_process_for_masked_implicit_gemm_1,
    ),
    "neighbor_map_post_process_for_masked_implicit_gemm_2": (
        "(Tensor gray_code, Tensor sorted_idx, int block_size) -> (Tensor, Tensor)",
        neighbor_map_post_process_for_masked_implicit_gemm_2,
    ),
    "sparse_conv_masked_fwd": (
        f"(Tensor input, Tensor weight, Tensor? bias, {_LISTS}) -> Tensor",
        sparse_conv_masked_fwd,
    ),
    "sparse_conv_masked_bwd": (
        f"(Tensor grad_output, Tensor input, Tensor weight, Tensor? bias, {_LISTS}, {_SIGNALS})"
        " -> (Tensor, Tensor, Tensor)",
        sparse_conv_masked_bwd,
    ),
    "sparse_conv_masked_splitk_fwd": (
        f"(Tensor input, Tensor weight, Tensor? bias, {_LISTS}, int splitk) -> Tensor",
        sparse_conv_masked_splitk_fwd,
    ),
    "sparse_conv_masked_splitk_bwd": (
        f"(Tensor grad_output, Tensor input, Tensor weight, Tensor? bias, {_LISTS}, {_SIGNALS}, int splitk)"
        " -> (Tensor, Tensor, Tensor)",
        sparse_conv_masked_splitk_bwd,
    ),
}


def register_torch_ops() -> torch.library.Library | None:
    """Register the ops of ``TORCH_OPS`` under ``torch.ops.flex_gemm`` and return the ``torch.library.Library`` that
    holds them. Return None, and register nothing, if an op of one of the names exists already. The registration lasts
    as long as the returned library.
    """
    if any(hasattr(torch.ops.flex_gemm, name) for name in TORCH_OPS):
        return None
    library = torch.library.Library("flex_gemm", "FRAGMENT")
    for name, (schema, function) in TORCH_OPS.items():
        library.define(name + schema)
        # Composite, so that gradients and compilation go through the ops of this package.
        library.impl(name, function, "CompositeImplicitAutograd")
    return library
