"""The (2N-2):2N pattern: pruning, the sliding windows that make it 2:4, and the portable compressed form.

A group is ``2N`` neighbours along k, N *pairs*; of these at most ``2N - 2`` are not zero. Window ``w`` of ``N - 1``
covers pairs ``w`` and ``w + 1``, four lanes, of which it stores two. Rules and proofs: docs/design/0011-slidesparse.md.
All functions are plain PyTorch, for any dtype and device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiplap.plugin_api import error

__all__ = [
    "Pattern",
    "compress_two_of_four",
    "compressed_bytes",
    "decompress_two_of_four",
    "dense_depth",
    "lane_sources",
    "lift_columns",
    "lifted_depth",
    "pad_matrix",
    "prune",
    "slide_weight",
    "unslide_weight",
]

ROWS, DEPTH = 16, 32  # what sparse tensor cores take: rows of activations, and the other two sizes, in multiples of
# N of the pattern with the longest groups, 14:16.
MAX_PAIRS = 8
_ONE_OF = 'take "dense", or one of "2:4", "4:6", "6:8", "8:10", "10:12", "12:14", "14:16"'
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # elements that torch gathers in any format


@dataclass(frozen=True)
class Pattern:
    """A sparsity pattern ``(2N-2):2N`` with N = ``pairs`` from 2 to 8, such as ``"6:8"``. With 0 pairs it is
    ``"dense"``, which keeps all weights.
    """

    pairs: int

    def __post_init__(self) -> None:
        """Raise ``SL211`` if ``pairs`` is neither 0 nor a number from 2 to 8."""
        # ``type``, since a bool is an int.
        if type(self.pairs) is not int or self.pairs not in (0, *range(2, MAX_PAIRS + 1)):
            raise error(
                "SL211",
                where="slidesparse.Pattern",
                got=f"{self.pairs!r} pairs",
                expected=f"2 to {MAX_PAIRS}, or 0 for dense",
                fix=_ONE_OF,
            )

    @classmethod
    def parse(cls, text: str | Pattern) -> Pattern:
        """Return the pattern that a string names, such as ``Pattern(4)`` for ``"6:8"`` and ``Pattern(0)`` for
        ``"dense"``. If ``text`` is a pattern, return it unchanged. Raise ``SL211`` for anything else.
        """
        if isinstance(text, Pattern) or text == "dense":
            return text if isinstance(text, Pattern) else cls(0)
        match = re.fullmatch(r"(\d{1,2}):(\d{1,2})", text) if isinstance(text, str) else None
        kept, size = map(int, match.groups()) if match else (0, 0)
        if size % 2 or kept != size - 2 or not 4 <= size <= 2 * MAX_PAIRS:
            raise error(
                "SL211",
                where="slidesparse.Pattern",
                got=repr(text),
                expected="dense, or (2N-2):2N with N from 2 to 8",
                fix=_ONE_OF,
            )
        return cls(size // 2)

    def __str__(self) -> str:
        """Return the pattern as text, such as ``6:8`` or ``dense``."""
        return f"{self.kept}:{self.size}" if self.sparse else "dense"

    @property
    def sparse(self) -> bool:
        """Whether the pattern prunes weights, as 6:8 does and ``dense`` does not."""
        return self.pairs > 0

    @property
    def size(self) -> int:
        """The number of neighbouring weights of a row that form a group of the pattern, 8 for 6:8 and 1 for ``dense``.
        A weight matrix may be cut along its columns between groups.
        """
        return 2 * self.pairs or 1

    @property
    def kept(self) -> int:
        """The number of weights of a group that may be nonzero, 6 for 6:8. It is defined for sparse patterns only."""
        return 2 * self.pairs - 2

    @property
    def expansion(self) -> float:
        """The factor by which lifting lengthens a row of activations, 1.5 for 6:8 and 1 for ``dense``. Lifting writes
        overlapping windows of four elements side by side. The factor is ``2 - 2/N`` with N pairs in a group.
        """
        return 2 - 2 / self.pairs if self.sparse else 1.0

    @property
    def ceiling(self) -> float:
        """The largest speed-up that sparse tensor cores can give for the pattern, 4/3 for 6:8 and 1 for ``dense``.
        These cores skip half of the products, so the speed-up is ``N / (N - 1)`` with N pairs in a group.
        """
        return self.pairs / (self.pairs - 1) if self.sparse else 1.0


def dense_depth(k: int) -> int:
    """Return ``k`` rounded up to the multiple of 32 that 8-bit products need."""
    return -(-k // DEPTH) * DEPTH


def lifted_depth(k: int, pairs: int) -> int:
    """Return the length k' of a row of ``k`` elements after lifting, which writes overlapping windows of four elements
    side by side. A group of ``pairs`` pairs of elements has ``pairs - 1`` windows. The length is rounded up to a
    multiple of 32.
    """
    return dense_depth(-(-k // (2 * pairs)) * 4 * (pairs - 1))


def lane_sources(k: int, pairs: int, device: torch.device | str = "cpu") -> Tensor:
    """Return an int64 tensor ``[k']`` on ``device`` with the index of the original element that each element of a
    lifted row copies. In a lifted row of length k', overlapping windows of four elements lie side by side. The index
    ``k`` stands for a zero. ``pairs`` is the number of pairs in a group of the weight's pattern (4 for 6:8).
    """
    lane = torch.arange(lifted_depth(k, pairs), device=device)
    group, rest = lane // (4 * (pairs - 1)), lane % (4 * (pairs - 1))
    return (group * 2 * pairs + 2 * (rest // 4) + rest % 4).clamp_max(k)


def pad_matrix(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return ``x`` as a matrix of ``rows`` x ``columns``, with zeros below and to the right. Return ``x`` itself if it
    has this size.
    """
    if x.shape == (rows, columns):
        return x
    padded = x.new_zeros(rows, columns)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded


def lift_columns(x: Tensor, pairs: int) -> Tensor:
    """Return ``x`` ``[m, k]`` lifted to ``[m', k']``, where m' is ``m`` rounded up to a multiple of 16 and k' is
    ``lifted_depth(k, pairs)``. Added rows hold zeros. Lifting writes the four elements of each overlapping window side
    by side. A group of ``pairs`` pairs of elements has ``pairs - 1`` windows.

    A weight of a pattern such as 6:8 then becomes a 2:4 weight. Each window multiplies with at most two weights that
    are not zero.
    """
    rows = -(-x.shape[0] // ROWS) * ROWS
    return pad_matrix(x, rows, x.shape[1] + 1)[:, lane_sources(x.shape[1], pairs, x.device)]


def prune(weight: Tensor, pattern: str | Pattern) -> Tensor:
    """Return a copy of ``weight`` ``[n, k]`` in which the two smallest magnitudes of each group are set to zero. A
    group is ``2N`` neighbours of a row for the pattern ``(2N-2):2N``.

    Magnitudes are compared in float32, or in float64 for float64 weights. Of equal magnitudes the first is dropped. If
    ``k`` cuts a group short, the missing elements count as dropped zeros. So a group of ``s`` elements loses ``max(0, s
    - (2N - 2))``. The pattern ``dense`` drops none. Raise ``SL211`` for NaN and for anything but a matrix of real
    numbers.
    """
    shape = Pattern.parse(pattern)
    size, (n, k) = shape.size, check_matrix(weight, "slidesparse.prune").shape
    magnitude = weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32).abs()
    _refuse_nan("slidesparse.prune", magnitude)
    if not shape.sparse:
        return weight.detach().clone()  # as for the others, a tensor of its own
    groups = -(-k // size)
    # A last group that is cut short is filled up, so that all groups have one size.
    magnitude = torch.nn.functional.pad(magnitude, (0, groups * size - k)).view(n, groups, size)
    if k % size:  # the filling goes first, whatever else is zero
        magnitude[:, -1, k % size :] = -1
    # Stable, so that of equal magnitudes the first is dropped on every device.
    smallest = magnitude.argsort(dim=-1, stable=True)[..., :2]
    dropped = torch.zeros_like(magnitude, dtype=torch.bool).scatter_(-1, smallest, True)
    zero = torch.zeros((), dtype=weight.dtype, device=weight.device)  # float8 has torch.where, not masked_fill
    return torch.where(dropped.view(n, groups * size)[:, :k], zero, weight.detach())


def check_matrix(weight: Any, where: str) -> Tensor:
    """Return ``weight`` if it is a matrix of real numbers that is not on the meta device. Otherwise raise ``SL211``.
    ``where`` names the caller in the error.
    """
    if not isinstance(weight, Tensor):
        got = type(weight).__name__
    elif weight.dim() != 2 or weight.is_complex() or weight.dtype == torch.bool:
        got = f"{weight.dtype} {tuple(weight.shape)}"
    elif weight.is_meta:
        got = "a weight on the meta device"
    else:
        return weight
    raise error("SL211", where=where, got=got, expected="a weight [n, k]", fix="pass the matrix of one layer, loaded")


def _refuse_nan(where: str, weight: Tensor) -> None:
    """Raise ``SL211`` with the number of the first row of ``weight`` that holds NaN, if there is one."""
    if (bad := torch.isnan(weight).any(-1)).any():
        row = int(bad.nonzero()[0, 0])
        raise error(
            "SL211",
            where=where,
            got=f"row {row} holds NaN",
            expected="weights without NaN",
            fix="repair the checkpoint: NaN has no magnitude to prune by",
        )


def slide_weight(weight: Tensor, pattern: str | Pattern) -> Tensor:
    """Return the 2:4 weight ``[n, k']`` for sparse tensor cores that replaces ``weight`` ``[n, k]``, which is pruned to
    ``pattern``. Each four neighbours of the result have at most two non-zeros.

    The product of the result with lifted activations equals that of ``weight`` with the activations themselves. Lifting
    writes overlapping windows of four elements side by side. -0.0 becomes 0.0. Raise ``SL211`` with the first group
    that has more than ``2N - 2`` non-zeros.
    """
    shape = Pattern.parse(pattern)
    (n, k), pairs = weight.shape, shape.pairs
    groups = -(-k // shape.size)
    zero = torch.zeros((), dtype=weight.dtype, device=weight.device)
    whole = pad_matrix(weight, n, groups * shape.size).view(n, groups, pairs, 2)
    used = whole != 0
    counts = used.sum(-1, dtype=torch.int8)
    over = counts.sum(-1, dtype=torch.int8) > shape.kept
    if over.any():
        row, group = map(int, over.nonzero()[0])
        raise error(
            "SL211",
            where="slidesparse.slide",
            got=f"{int(counts[row, group].sum())} non-zeros in row {row}, columns {group * shape.size} to "
            f"{min(k, (group + 1) * shape.size) - 1}",
            expected=f"at most {shape.kept} of {shape.size}",
            fix=f'call prune(weight, "{shape}") first',
        )
    # Each window takes the late non-zeros of its first pair and the early ones of its second.
    early, late = _split_pairs(used, counts)
    windows = whole.new_empty(n, groups, pairs - 1, 4)  # autocast refuses to join float16 on a CPU
    windows[..., :2] = torch.where(late[:, :, :-1], whole[:, :, :-1], zero)
    windows[..., 2:] = torch.where(early[:, :, 1:], whole[:, :, 1:], zero)
    return pad_matrix(windows.reshape(n, groups * 4 * (pairs - 1)), n, lifted_depth(k, pairs))


def _split_pairs(used: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return two masks of the non-zeros of each pair of neighbours. The first mask selects those that are stored in the
    window of four that ends with the pair. The second selects those in the window that begins with it.

    Windows are filled greedily from the left. ``counts`` holds the number of non-zeros of each pair, and ``C_k`` is the
    sum of the counts up to and including pair ``k``. The ``k`` windows before pair ``k`` have room for two non-zeros
    each. So ``max(0, C_k - 2k)`` non-zeros of pair ``k`` are left for the next window.
    """
    pairs = counts.shape[-1]
    first = torch.arange(0, 2 * pairs, 2, dtype=counts.dtype, device=counts.device)
    left = (counts.cumsum(-1, dtype=counts.dtype) - first).clamp_min(0)
    early = counts - left
    goes = torch.stack((early > 0, early > used[..., 0]), -1)  # of a pair, the first ``early`` non-zeros
    return used & goes, used & ~goes


def unslide_weight(slid: Tensor, k: int, pattern: str | Pattern) -> Tensor:
    """Return the weight ``[n, k]`` of the sparsity ``pattern`` from ``slid``, the result ``[n, k']`` of
    ``slide_weight``.
    """
    pairs = Pattern.parse(pattern).pairs
    groups, n = -(-k // (2 * pairs)), slid.shape[0]
    windows = slid[:, : groups * 4 * (pairs - 1)].reshape(n, groups, pairs - 1, 4)
    whole = slid.new_zeros(n, groups, pairs, 2)
    whole[:, :, :-1] = windows[..., :2]
    later = windows[..., 2:]
    # A pair lies in two windows. At most one of the two copies of an element is not zero.
    whole[:, :, 1:] = torch.where(later != 0, later, whole[:, :, 1:])
    return whole.view(n, groups * 2 * pairs)[:, :k].contiguous()


def compressed_bytes(n: int, depth: int, itemsize: int) -> int:
    """Return the number of bytes of a 2:4 weight ``[n, depth]`` in the packed format that is the same for all devices.
    The format holds half of the elements, and two bits for each of these. ``itemsize`` is the number of bytes of an
    element.
    """
    return n * depth * itemsize // 2 + n * depth // 8


def compress_two_of_four(slid: Tensor) -> Tensor:
    """Return a 2:4 weight ``[n, k']`` in the packed format that is the same for all devices, as a uint8 vector. The
    bytes of the values ``[n, k' / 2]`` come first, then the metadata ``[n, k' / 8]``.

    Of each four neighbours two are kept, in their order. The position of each takes two bits of metadata, the first one
    in the lower bits. Two groups share a byte, the first one in the lower half. If fewer than two are non-zero, the
    first zeros are kept as well. Raise ``SL211`` for a weight that is not 2:4.
    """
    n, depth = slid.shape
    fours = slid.contiguous().view(n, depth // 4, 4)
    used = fours != 0
    if (bad := used.sum(-1) > 2).any():
        row, four = map(int, bad.nonzero()[0])
        raise error(
            "SL211",
            where="slidesparse.compress",
            got=f"more than 2 non-zeros in row {row}, lanes {4 * four} to {4 * four + 3}",
            expected="2 of 4",
            fix="compress what slide() returned",
        )
    bits = used.view(torch.uint8)
    masks = bits[..., 0] + 2 * bits[..., 1] + 4 * bits[..., 2] + 8 * bits[..., 3]
    # A table of the 16 masks replaces a sort of each group.
    kept = _kept_lanes(slid.device)[masks.int()]
    values = fours.view(_BITS[slid.itemsize]).masked_fill(~used, 0).gather(-1, kept.long())  # -0.0 becomes 0.0
    nibbles = (kept[..., 0] + 4 * kept[..., 1]).view(n, depth // 8, 2)
    meta = nibbles[..., 0] + 16 * nibbles[..., 1]
    return torch.cat((values.reshape(-1).view(torch.uint8), meta.reshape(-1)))


def _kept_lanes(device: torch.device) -> Tensor:
    """Return a uint8 table ``[16, 2]`` on ``device``. Its row index is a 4-bit mask of the non-zeros among four
    elements. Each row holds the ascending positions (0 to 3) of the two elements to keep.
    """
    masks = torch.arange(16, device=device)[:, None] >> torch.arange(4, device=device) & 1
    return (1 - masks).argsort(dim=-1, stable=True)[:, :2].sort(-1).values.to(torch.uint8)


def decompress_two_of_four(packed: Tensor, n: int, depth: int, dtype: torch.dtype) -> Tensor:
    """Return the 2:4 weight ``[n, depth]`` of ``dtype`` from ``packed``, a result of ``compress_two_of_four``. Raise
    ``SL211`` if the number of bytes is wrong.
    """
    wanted = compressed_bytes(n, depth, dtype.itemsize)
    if packed.numel() != wanted:
        raise error(
            "SL211",
            where="slidesparse.decompress",
            got=f"{packed.numel()} bytes",
            expected=f"{wanted} for {n} rows of {depth} {dtype}",
            fix="pack the weight anew",
        )
    packed = packed.contiguous()
    kept = n * depth * dtype.itemsize // 2
    values = (
        packed[:kept].clone(memory_format=torch.contiguous_format).view(_BITS[dtype.itemsize]).view(n, depth // 4, 2)
    )
    meta = packed[kept:].to(torch.int64).view(n, depth // 8, 1)
    # Two groups share a byte, the first one in its lower half.
    nibbles = torch.cat((meta & 15, meta >> 4), -1).view(n, depth // 4, 1)
    # Two bits for the position of each kept element.
    lanes = torch.cat((nibbles & 3, nibbles >> 2), -1)
    return values.new_zeros(n, depth // 4, 4).scatter(-1, lanes, values).view(dtype).view(n, depth)
