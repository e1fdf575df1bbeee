"""``z_order_*`` and ``hilbert_*`` in Triton: one pass over the rows, everything in registers."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from shiplap.plugin_api import triton_launcher
from shiplap_sparse3d.cuda import status
from shiplap_sparse3d.cuda.hash import report_row

__all__ = ["decode_curve", "encode_curve"]

NO_FIT = "coords row {row} does not fit a code of this many bits"
NO_CODE = "codes[{row}] is no code of this many bits an axis"
BLOCK = 512


@triton.jit
def _spread_bits(x):
    """Return the low 21 bits of ``x`` with two zero bits between neighbours, for interleaving three axes."""
    # Each step moves half of the bits apart and masks the copies.
    x = (x | (x << 32)) & 0x1F00000000FFFF
    x = (x | (x << 16)) & 0x1F0000FF0000FF
    x = (x | (x << 8)) & 0x100F00F00F00F00F
    x = (x | (x << 4)) & 0x10C30C30C30C30C3
    return (x | (x << 2)) & 0x1249249249249249


@triton.jit
def _gather_bits(x):
    """Return every third bit of ``x``, 21 in all, without the bits between them. This is the inverse of
    ``_spread_bits``.
    """
    x = x & 0x1249249249249249
    x = (x | (x >> 2)) & 0x10C30C30C30C30C3
    x = (x | (x >> 4)) & 0x100F00F00F00F00F
    x = (x | (x >> 8)) & 0x1F0000FF0000FF
    x = (x | (x >> 16)) & 0x1F00000000FFFF
    return (x | (x >> 32)) & 0x1FFFFF


@triton.jit
def _invert_first_axis(first, bit):
    """Return ``first`` with all bits below ``bit`` inverted where ``bit`` is set. This is Skilling's step of the
    Hilbert curve for the first axis with itself.
    """
    return first ^ tl.where((first >> bit) & 1 == 1, (1 << bit) - 1, 0)


@triton.jit
def _exchange_axes(first, other, bit):
    """Return (first, other) after Skilling's step of the Hilbert curve. Where ``bit`` of ``other`` is set, the lower
    bits of ``first`` are inverted. Elsewhere the lower bits of both axes are exchanged.
    """
    flip = (other >> bit) & 1 == 1
    swap = tl.where(flip, 0, (first ^ other) & ((1 << bit) - 1))
    return first ^ swap ^ tl.where(flip, (1 << bit) - 1, 0), other ^ swap


@triton.jit
def _to_hilbert(x, y, z, BITS: tl.constexpr):
    """Return the coordinates of a voxel as a transposed Hilbert index of ``BITS`` bits per axis. The interleaved bits
    of the three numbers are the index.
    """
    for step in range(1, BITS):
        x = _invert_first_axis(x, BITS - step)
        x, y = _exchange_axes(x, y, BITS - step)
        x, z = _exchange_axes(x, z, BITS - step)
    y = y ^ x
    z = z ^ y
    # Zeros of the type and shape of ``z``.
    parity = z ^ z
    for step in range(1, BITS):
        parity = parity ^ tl.where((z >> (BITS - step)) & 1 == 1, (1 << (BITS - step)) - 1, 0)
    return x ^ parity, y ^ parity, z ^ parity


@triton.jit
def _from_hilbert(x, y, z, BITS: tl.constexpr):
    """Return the coordinates of a voxel from its transposed Hilbert index of ``BITS`` bits per axis. This is the
    inverse of ``_to_hilbert``.
    """
    last = z >> 1
    z = z ^ y
    y = y ^ x
    x = x ^ last
    for bit in range(1, BITS):
        x, z = _exchange_axes(x, z, bit)
        x, y = _exchange_axes(x, y, bit)
        x = _invert_first_axis(x, bit)
    return x, y, z


@triton.jit(do_not_specialize=["n", "scenes", "code"])
def encode_kernel(
    coords,
    codes,
    status,
    n,
    scenes,
    code,
    BITS: tl.constexpr,
    A0: tl.constexpr,
    A1: tl.constexpr,
    A2: tl.constexpr,
    HILBERT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the code of each voxel along a space-filling curve to ``codes [n]``, and -1 for padding. The curve is
    Hilbert's if ``HILBERT`` is true, and otherwise the Z-order curve. ``A0`` to ``A2`` are the axes from the most to
    the least significant. Rows that do not fit the code are reported in the word ``status``, from which the host raises
    ``SL211`` later.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    b = tl.load(coords + row * 4, mask=inside, other=-1)
    x = tl.load(coords + row * 4 + 1 + A0, mask=inside, other=0)
    y = tl.load(coords + row * 4 + 1 + A1, mask=inside, other=0)
    z = tl.load(coords + row * 4 + 1 + A2, mask=inside, other=0)
    EDGE: tl.constexpr = 1 << BITS
    # The axes are loaded in the order of significance, so the test needs no order.
    fits = (b >= 0) & (b < scenes) & (x >= 0) & (x < EDGE) & (y >= 0) & (y < EDGE) & (z >= 0) & (z < EDGE)
    report_row(status, code, row, (b != -1) & ~fits)
    if HILBERT:
        x, y, z = _to_hilbert(x, y, z, BITS)
    low = (_spread_bits(x.to(tl.int64)) << 2) | (_spread_bits(y.to(tl.int64)) << 1) | _spread_bits(z.to(tl.int64))
    tl.store(codes + row, tl.where(fits, (b.to(tl.int64) << (3 * BITS)) | low, -1), mask=inside)


@triton.jit(do_not_specialize=["n", "code"])
def decode_kernel(
    codes,
    coords,
    status,
    n,
    code,
    BITS: tl.constexpr,
    A0: tl.constexpr,
    A1: tl.constexpr,
    A2: tl.constexpr,
    HILBERT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the voxel of each code along a space-filling curve to ``coords [n, 4]``, and -1 for padding. The curve is
    Hilbert's if ``HILBERT`` is true, and otherwise the Z-order curve. ``A0`` to ``A2`` are the axes from the most to
    the least significant. Invalid codes are reported in the word ``status``, from which the host raises ``SL211``
    later.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    given = tl.load(codes + row, mask=inside, other=-1)
    b = given >> (3 * BITS)
    # The scene has to fit into an int32.
    good = (b >= 0) & (b < 0x80000000)
    report_row(status, code, row, (given != -1) & ~good)
    low = given - (b << (3 * BITS))
    x = _gather_bits(low >> 2).to(tl.int32)
    y = _gather_bits(low >> 1).to(tl.int32)
    z = _gather_bits(low).to(tl.int32)
    if HILBERT:
        x, y, z = _from_hilbert(x, y, z, BITS)
    tl.store(coords + row * 4, tl.where(good, b.to(tl.int32), -1), mask=inside)
    tl.store(coords + row * 4 + 1 + A0, tl.where(good, x, -1), mask=inside)
    tl.store(coords + row * 4 + 1 + A1, tl.where(good, y, -1), mask=inside)
    tl.store(coords + row * 4 + 1 + A2, tl.where(good, z, -1), mask=inside)


_encode = triton_launcher(encode_kernel)
_decode = triton_launcher(decode_kernel)


def encode_curve(op: str, coords: Tensor, bits: int, axes: Sequence[int], width: int, codes: Tensor) -> None:
    """Write the curve code of each voxel to ``codes``, computed by the Triton kernel of ``op`` (a Z-order or Hilbert
    encode op). ``bits`` is the number of bits per axis, and ``axes`` lists the axes from the most significant on. Rows
    that do not fit ``width`` bits are reported in a status word, from which the host raises ``SL211`` later.
    """
    word, rows = status.word(coords.device), coords.shape[0]
    if rows:
        # The bits above those of the three axes hold the scene.
        scenes = min(2**31, 2 ** (width - 3 * bits))
        _encode[(-(-rows // BLOCK),)](
            coords.contiguous(),
            codes,
            word,
            rows,
            scenes,
            status.code_of(op, NO_FIT),
            BITS=bits,
            A0=axes[0],
            A1=axes[1],
            A2=axes[2],
            HILBERT=op.startswith("hilbert"),
            BLOCK=BLOCK,
        )


def decode_curve(op: str, codes: Tensor, bits: int, axes: Sequence[int], coords: Tensor) -> None:
    """Write the voxel of each curve code to ``coords``, computed by the Triton kernel of ``op`` (a Z-order or Hilbert
    decode op). ``bits`` is the number of bits per axis, and ``axes`` lists the axes from the most significant on.
    Invalid codes are reported in a status word, from which the host raises ``SL211`` later.
    """
    word, rows = status.word(codes.device), codes.shape[0]
    if rows:
        _decode[(-(-rows // BLOCK),)](
            codes.contiguous(),
            coords,
            word,
            rows,
            status.code_of(op, NO_CODE),
            BITS=bits,
            A0=axes[0],
            A1=axes[1],
            A2=axes[2],
            HILBERT=op.startswith("hilbert"),
            BLOCK=BLOCK,
        )
