"""Voxels along a space-filling curve: Z-order (Morton) and Hilbert codes, and back.

A code holds the three axes in its lowest ``3 * bits`` bits and the batch above them, so that sorting codes sorts by
batch first. ``axes`` says which axis counts most: (0, 1, 2) is x, then y, then z. Codes are not negative; a padding row
(batch -1) has the code -1, which decodes to a row of -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

import shiplap as sl
from shiplap.plugin_api import error
from shiplap_sparse3d.coords import refuse_rows
from shiplap_sparse3d.cpu import LIBRARY

__all__ = ["decode_seq", "encode_seq", "hilbert_decode", "hilbert_encode", "z_order_decode", "z_order_encode"]

# The number of a scene is an int32.
MAX_BATCH = 2**31
XYZ = [0, 1, 2]
_CURVE = (
    "bits >= 0",
    "3 * bits <= width",
    "width <= 63",
    "len(axes) == 3",
    "min(axes) >= 0",
    "axes[0] + axes[1] + axes[2] == 3",
    "axes[0] * axes[1] * axes[2] == 0",
    "max(axes) == 2",
)
_DECODE = ("bits <= 21", *(condition for condition in _CURVE if "width" not in condition))


# --- references ------------------------------------------------------------------------------------------------------


def _curve_columns(op: str, coords: Tensor, bits: int, axes: list[int], width: int) -> tuple[Tensor, list[Tensor]]:
    """Return the scene of each voxel, and its coordinates as columns in the order ``axes``, the most significant first.
    Padding becomes zeros. Raise ``SL211`` for rows that do not fit a code of ``width`` bits. ``op`` is the op's name in
    the message.
    """
    coords = coords.long()
    padding, scenes = coords[:, 0] == -1, min(MAX_BATCH, 2 ** (width - 3 * bits))
    fits = (coords[:, 0] >= 0) & (coords[:, 0] < scenes)
    fits &= ((coords[:, 1:] >= 0) & (coords[:, 1:] < 2**bits)).all(1)
    # A code that does not fit would be that of another voxel.
    refuse_rows(op, ~(fits | padding), f"coords row {{row}} does not fit a code of {width} bits, {bits} for each axis")
    batch, *xyz = coords.masked_fill(padding[:, None], 0).unbind(1)
    return batch, [xyz[axis] for axis in axes]


def _interleave_bits(columns: list[Tensor], bits: int) -> Tensor:
    """Return codes ``int64 [n]`` that hold the lowest ``bits`` bits of three ``columns``, interleaved. Of the three
    bits at each level, that of the first column is the most significant.
    """
    code = torch.zeros_like(columns[0])
    for bit in range(bits):
        for place, column in enumerate(reversed(columns)):
            # One bit of each axis in turn, so that near voxels have near codes.
            code |= (column >> bit & 1) << (3 * bit + place)
    return code


def _deinterleave_bits(code: Tensor, bits: int) -> list[Tensor]:
    """Return the three columns, of ``bits`` bits each, whose bits are interleaved in ``code``. This is the inverse of
    ``_interleave_bits``.
    """
    columns = [torch.zeros_like(code) for _ in range(3)]
    for bit in range(bits):
        for place, column in enumerate(reversed(columns)):
            column |= (code >> (3 * bit + place) & 1) << bit
    return columns


def _encode_columns(coords: Tensor, batch: Tensor, columns: list[Tensor], bits: int) -> Tensor:
    """Return codes ``int64 [n]`` that hold the scene ``batch`` above the interleaved bits of the three ``columns``.
    Rows of padding in ``coords`` get -1.
    """
    return torch.where(coords[:, 0] == -1, -1, batch << 3 * bits | _interleave_bits(columns, bits))


def _decode_columns(codes: Tensor, columns: list[Tensor], bits: int, axes: list[int]) -> Tensor:
    """Return the voxels ``int32 [n, 4]`` of ``codes``. The scene is in the bits of a code above the lowest ``3 *
    bits``. ``columns`` are the coordinates, of which column ``i`` belongs to axis ``axes[i]``. Codes of -1 give rows of
    -1.
    """
    xyz = [columns[axes.index(axis)] for axis in range(3)]
    rows = torch.stack([codes >> 3 * bits, *xyz], 1)
    return torch.where(codes[:, None] == -1, -1, rows).int()


def _check_codes(op: str, codes: Tensor, bits: int) -> None:
    """Raise ``SL211`` for a code below -1 and for one whose scene is beyond int32. ``op`` is the op's name in the
    message.
    """
    refuse_rows(
        op, (codes < -1) | (codes >> 3 * bits >= MAX_BATCH), "codes[{row}] is no code of " + f"{bits} bits an axis"
    )


def _exchange_bits(x: list[Tensor], axis: int, bit: int) -> None:
    """Apply one step of Skilling's algorithm to the columns ``x`` in place. Where ``bit`` of the column ``axis`` is
    set, the lower bits of the first column are inverted. Elsewhere the lower bits of the first column and of ``axis``
    are exchanged.
    """
    low = (1 << bit) - 1
    flip = (x[axis] >> bit & 1).bool()
    swap = torch.where(flip, 0, (x[0] ^ x[axis]) & low)
    x[axis] = x[axis] ^ swap
    x[0] = x[0] ^ swap ^ torch.where(flip, low, 0)


def _to_hilbert(x: list[Tensor], bits: int) -> list[Tensor]:
    """Return the transposed Hilbert index of the coordinates in the three columns ``x``, as three new columns. Their
    interleaved bits are the index. The algorithm is J. Skilling's ("Programming the Hilbert curve", 2004).
    """
    x = list(x)
    for bit in range(bits - 1, 0, -1):
        for axis in range(3):
            _exchange_bits(x, axis, bit)
    x[1] = x[1] ^ x[0]
    x[2] = x[2] ^ x[1]
    parity = torch.zeros_like(x[0])
    for bit in range(bits - 1, 0, -1):
        parity = parity ^ torch.where((x[2] >> bit & 1).bool(), (1 << bit) - 1, 0)
    return [column ^ parity for column in x]


def _from_hilbert(x: list[Tensor], bits: int) -> list[Tensor]:
    """Return the three columns of coordinates of a transposed Hilbert index ``x``. This is the inverse of
    ``_to_hilbert``.
    """
    x = list(x)
    last = x[2] >> 1
    x[2] = x[2] ^ x[1]
    x[1] = x[1] ^ x[0]
    x[0] = x[0] ^ last
    for bit in range(1, bits):
        for axis in (2, 1, 0):
            _exchange_bits(x, axis, bit)
    return x


# --- ops -------------------------------------------------------------------------------------------------------------


@sl.op("sparse3d::z_order_encode", outputs=("codes",), requires=_CURVE)
def z_order_encode(
    coords: Int32[Tensor, "n 4"], bits: int, axes: list[int] = XYZ, width: int = 63
) -> Int64[Tensor, "n"]:
    """Return the Z-order codes of voxels, ``int64 [n]`` in the order of ``coords``. Sorting by the codes brings near
    voxels together.

    From its highest bit down, a code holds the scene and then ``3 * bits`` bits of the position along the curve.

    Args:
        coords: ``int32 [n, 4]`` rows (scene, x, y, z), in any order. A row whose scene is -1 is padding, and its code
            is -1.
        bits: the number of bits of each axis. Coordinates are from 0 to ``2^bits - 1``. ``3 * bits`` is at most
            ``width``.
        axes: a permutation of 0 (x), 1 (y) and 2 (z), from the most to the least significant axis.
        width: the number of bits of a code, at most 63. Codes of at most 31 bits fit int32. Scenes are from 0 to
            ``2^(width - 3 * bits) - 1``, and at most ``2^31 - 1``.

    Raises:
        ArgumentError: ``SL208`` for ``bits``, ``axes`` or ``width`` beyond these bounds. ``SL211``, with the number of
            the row, for a scene or a coordinate beyond them.
    """
    batch, columns = _curve_columns("z_order_encode", coords, bits, axes, width)
    return _encode_columns(coords, batch, columns, bits)


@sl.op("sparse3d::z_order_decode", outputs=("coords",), requires=_DECODE)
def z_order_decode(codes: Int64[Tensor, "n"], bits: int, axes: list[int] = XYZ) -> Int32[Tensor, "n 4"]:
    """Return the voxels of Z-order codes, ``int32 [n, 4]`` rows (scene, x, y, z) in the order of ``codes``.

    Args:
        codes: ``int64 [n]``, as the encoder of the same ``bits`` and ``axes`` returns them. A code of -1 is padding,
            and gives a row of -1.
        bits: the number of bits of each axis, from 0 to 21.
        axes: a permutation of 0 (x), 1 (y) and 2 (z), from the most to the least significant axis.

    Raises:
        ArgumentError: ``SL208`` for ``bits`` or ``axes`` beyond these bounds. ``SL211``, with the number of the code,
            for a code below -1 and for one whose scene is not an int32.
    """
    _check_codes("z_order_decode", codes, bits)
    return _decode_columns(codes, _deinterleave_bits(codes, bits), bits, axes)


@sl.op("sparse3d::hilbert_encode", outputs=("codes",), requires=_CURVE)
def hilbert_encode(
    coords: Int32[Tensor, "n 4"], bits: int, axes: list[int] = XYZ, width: int = 63
) -> Int64[Tensor, "n"]:
    """Return the Hilbert codes of voxels, ``int64 [n]`` in the order of ``coords``. Sorting by the codes brings near
    voxels together.

    From its highest bit down, a code holds the scene and then ``3 * bits`` bits of the position along the curve.

    Args:
        coords: ``int32 [n, 4]`` rows (scene, x, y, z), in any order. A row whose scene is -1 is padding, and its code
            is -1.
        bits: the number of bits of each axis. Coordinates are from 0 to ``2^bits - 1``. ``3 * bits`` is at most
            ``width``.
        axes: a permutation of 0 (x), 1 (y) and 2 (z), from the most to the least significant axis.
        width: the number of bits of a code, at most 63. Codes of at most 31 bits fit int32. Scenes are from 0 to
            ``2^(width - 3 * bits) - 1``, and at most ``2^31 - 1``.

    Raises:
        ArgumentError: ``SL208`` for ``bits``, ``axes`` or ``width`` beyond these bounds. ``SL211``, with the number of
            the row, for a scene or a coordinate beyond them.
    """
    batch, columns = _curve_columns("hilbert_encode", coords, bits, axes, width)
    return _encode_columns(coords, batch, _to_hilbert(columns, bits), bits)


@sl.op("sparse3d::hilbert_decode", outputs=("coords",), requires=_DECODE)
def hilbert_decode(codes: Int64[Tensor, "n"], bits: int, axes: list[int] = XYZ) -> Int32[Tensor, "n 4"]:
    """Return the voxels of Hilbert codes, ``int32 [n, 4]`` rows (scene, x, y, z) in the order of ``codes``.

    Args:
        codes: ``int64 [n]``, as the encoder of the same ``bits`` and ``axes`` returns them. A code of -1 is padding,
            and gives a row of -1.
        bits: the number of bits of each axis, from 0 to 21.
        axes: a permutation of 0 (x), 1 (y) and 2 (z), from the most to the least significant axis.

    Raises:
        ArgumentError: ``SL208`` for ``bits`` or ``axes`` beyond these bounds. ``SL211``, with the number of the code,
            for a code below -1 and for one whose scene is not an int32.
    """
    _check_codes("hilbert_decode", codes, bits)
    return _decode_columns(codes, _from_hilbert(_deinterleave_bits(codes, bits), bits), bits, axes)


for _op in (z_order_encode, z_order_decode, hilbert_encode, hilbert_decode):
    _op.kernel("cpu", sl.cabi(LIBRARY, f"sparse3d_{_op.spec.opname}"))


# --- public ----------------------------------------------------------------------------------------------------------

_MODES = {"z_order": (z_order_encode, z_order_decode), "hilbert": (hilbert_encode, hilbert_decode)}


def encode_seq(coords: Tensor, shape: Sequence[int], mode: str = "z_order", axes: str = "xyz") -> Tensor:
    """Return the codes of voxels along a space-filling curve, by which near voxels sort near each other. They are
    ``int32 [n]`` if 31 bits hold all codes of ``shape``, and otherwise ``int64 [n]``.

    Args:
        coords: ``int32 [n, 4]`` rows (batch, x, y, z).
        shape: ``(batches, channels, X, Y, Z)``. The channels are not used.
        mode: ``"z_order"`` or ``"hilbert"``.
        axes: the axes from the most to the least significant, one of the six orders of "xyz".

    Raises:
        ArgumentError: ``SL208`` if 63 bits do not hold a code of this shape, ``SL211`` for voxels that do not fit it.
    """
    encode, _, order = _check_curve(mode, axes)
    bits, width = _code_layout(shape)
    codes: Tensor = encode(coords, bits, order, width)
    return codes.int() if width == 31 else codes


def decode_seq(codes: Tensor, shape: Sequence[int], mode: str = "z_order", axes: str = "xyz") -> Tensor:
    """Return the voxels ``int32 [n, 4]`` (scene, x, y, z) of ``codes`` (int32 or int64). The codes must come from
    :func:`encode_seq` with the same ``shape``, ``mode`` and ``axes``. Raise ``SL208`` if one of these is invalid.
    """
    _, decode, order = _check_curve(mode, axes)
    coords: Tensor = decode(codes.long(), _code_layout(shape)[0], order)
    return coords


def _check_curve(mode: str, axes: str) -> tuple[sl.Op, sl.Op, list[int]]:
    """Return the encoding op and the decoding op of the curve ``mode``, and ``axes``, such as ``"xyz"``, as a list of
    numbers. Raise ``SL208`` for an unknown curve, and if ``axes`` is not an order of x, y and z.
    """
    if mode not in _MODES:
        raise error("SL208", where="sparse3d serialization", got=f"mode {mode!r}", expected=" or ".join(_MODES))
    if sorted(axes) != ["x", "y", "z"]:
        raise error("SL208", where="sparse3d serialization", got=f"axes {axes!r}", expected='an order of "xyz"')
    return *_MODES[mode], ["xyz".index(axis) for axis in axes]


def _code_layout(shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of bits per axis, and the width of a code in bits (31 or 63), that hold all voxels of
    ``shape``, ``(batches, channels, X, Y, Z)``. Raise ``SL208`` if ``shape`` does not have five positive numbers
    (channels aside), or needs more than 21 bits per axis or 63 bits in all.
    """
    if len(shape) != 5 or min(shape[0], *shape[2:]) < 1:
        raise error(
            "SL208",
            where="sparse3d serialization",
            got=f"shape {tuple(shape)}",
            expected="(batches, channels, X, Y, Z), each but channels at least 1",
        )
    bits = (max(int(s) for s in shape[2:]) - 1).bit_length()
    used = 3 * bits + (int(shape[0]) - 1).bit_length()
    # Three axes of 21 bits fill the 63 bits of a positive int64.
    if bits > 21 or used > 63:
        raise error(
            "SL208",
            where="sparse3d serialization",
            got=f"{used} bits for shape {tuple(shape)}",
            expected="at most 21 bits an axis and 63 in all",
        )
    # Codes of 31 bits fit into int32, which halves their memory.
    return bits, 31 if used <= 31 else 63
