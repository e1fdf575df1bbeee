"""``Plan``: the reads and writes of a convolution as tensors and integers, for any number of layers and steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.compiler import is_compiling

from shiplap.plugin_api import error
from shiplap.plugin_api.compiling import allows_tf32
from shiplap.plugin_api.memos import built_outside_modes
from shiplap_sparse3d import ops
from shiplap_sparse3d.coords import is_known_to_hold

__all__ = ["Plan", "parts_for", "parts_that_fill", "set_most_parts", "wants_sorted"]


def parts_for(rows: int, taps: int, *, strided: bool = False) -> int:
    """Return the number of parts into which a neighbour table of ``rows`` outputs and ``taps`` columns is cut. A part
    is a group of columns that is sorted separately.

    The number is the one that was fastest for so many rows on an H200 (``docs/design/0008-sparse3d-cuda.md``).
    ``strided`` is true for outputs that a stride above 1 reaches, whose rows have fewer neighbours in common, and false
    otherwise. A graph compiled for any number of rows gets the number for many rows, since each limit would otherwise
    need a graph.
    """
    least = -(-taps // ops.MAX_PART)
    # ``bool`` of a symbolic size would add a guard, and with it a graph for each limit.
    known = is_known_to_hold if is_compiling() else bool
    for limit, parts in _STRIDED if strided else _PARTS:
        if known(rows <= limit):
            return _filled_parts(taps, max(least, min(taps, parts, _most_parts)))
    return max(1, least)


def _filled_parts(taps: int, parts: int) -> int:
    """Return how many of ``parts`` equal parts are not empty if ``taps`` columns of a table are cut into them. For
    example, eight columns in five parts of two leave one part empty, so the result is 4. Without columns it is
    ``parts``.
    """
    return -(-taps // -(-taps // parts)) if taps > 0 else parts


_PARTS = (8_000, 9), (32_000, 3), (128_000, 2)  # up to so many rows, into so many parts
_STRIDED = (2_000, 9), (8_000, 5), (32_000, 3), (80_000, 2)
_most_parts = 1 << 31


def set_most_parts(most: int | None) -> int | None:
    """Limit the number of parts into which neighbour tables that are built from now on are sorted, and return the
    previous limit. A part is a group of columns that is sorted separately. None stands for no limit. Raise ``SL208``
    for a limit below 1.

    A convolution over ``p`` parts holds ``p`` partial sums of its result in float32 before it adds them. Below 128,000
    voxels they are most of its peak of memory. Fewer parts take less memory. They take more time if the voxels of a
    block have neighbours in different columns.
    """
    global _most_parts
    before = None if _most_parts == 1 << 31 else _most_parts
    if most is not None and most < 1:
        raise error("SL208", where="sparse3d.set_most_parts", got=most, expected="1 or more, or None")
    _most_parts = 1 << 31 if most is None else most
    return before


def parts_that_fill(rows: int, channels: int, taps: int, *, multiprocessors: int = 132) -> int:
    """Return the smallest number of parts of a neighbour table that gives each multiprocessor two tiles of 64 rows x
    128 channels. It is at most nine. A part is a group of columns that one GPU program handles. The table has ``rows``
    rows and ``taps`` columns.

    More parts do not keep the device busier, but let blocks of rows skip more columns. ``multiprocessors`` is the
    number of multiprocessors of the GPU, by default that of an H200.
    """
    tiles = max(1, -(-rows // 64) * -(-channels // 128))
    least = max(1, -(-taps // ops.MAX_PART))
    return max(least, min(taps, 9, -(-2 * multiprocessors // tiles)))


def wants_sorted(tensor: Tensor) -> bool:
    """Return whether convolutions on the device of ``tensor`` run best over sorted neighbour tables, which is true for
    CUDA devices alone. In a sorted table, rows with neighbours under the same taps (cells of the kernel) are adjacent.
    """
    return tensor.device.type == "cuda"


@dataclass(frozen=True)
class Plan:
    """A neighbour table, sorted or not, and its transpose for the gradient and the inverse convolution.

    Attributes:
        table: ``int32 [m, k]``, the input row at each tap (cell of the kernel) of each output row, or -1.
        rows: ``n``, the number of input rows.
        order, masks: the results of ``sort_table`` that describe a sorted table, or None if it is not sorted.
        reflect: whether tap ``v`` takes the weight of tap ``k - 1 - v``.
        symmetric: whether the table read backwards is its own transpose (submanifold, odd kernel).
        back: the transposed table with its description, ``(table, order, masks)``, or None. A symmetric plan needs
            none, and the gradient of other plans builds one when it runs.
    """

    table: Tensor
    rows: int
    order: Tensor | None = None
    masks: Tensor | None = None
    reflect: bool = False
    symmetric: bool = False
    back: tuple[Tensor, Tensor | None, Tensor | None] | None = None

    def conv(
        self, feats: Tensor, weight: Tensor, bias: Tensor | None = None, groups: int = 1, tf32: bool | None = None
    ) -> Tensor:
        """Return the convolution ``[m, co]`` of ``feats [n, ci]`` with ``weight [co, k, ci / groups]`` over the plan's
        table. If ``tf32`` is None, torch's setting for matrix products applies. If ``bias`` is None, no bias is added.
        ``groups`` is the number of groups of channels, as in ``torch.nn.Conv3d``.
        """
        back, order, masks = self.back or (None, None, None)
        tf32 = allows_tf32() if tf32 is None else tf32
        return ops.conv(
            feats,
            weight,
            self.table,
            bias,
            self.order,
            self.masks,
            back,
            order,
            masks,
            groups,
            self.reflect,
            self.symmetric,
            tf32,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the plan, to move, record or mark as dynamic. They are the neighbour table, the order of its
        rows, and the masks of columns that blocks of rows use, for both directions.
        """
        return [t for t in (self.table, self.order, self.masks, *(self.back or ())) if t is not None]

    @property
    def t(self) -> Plan:
        """The plan (neighbour tables) of the transposed convolution, which goes from outputs to inputs. The transposed
        table is built if this plan does not hold it.
        """
        if self.symmetric:
            # A symmetric table read backwards is its own transpose.
            return replace(self, reflect=not self.reflect)
        if self.back is None:
            return replace(self.transposed(), reflect=self.reflect)
        table, order, masks = self.back
        return Plan(table, self.table.shape[0], order, masks, self.reflect, back=(self.table, self.order, self.masks))

    @built_outside_modes
    def transposed(self) -> Plan:
        """Return the plan (neighbour tables) from outputs to inputs, with newly built tables. The table of this plan is
        the transpose in the returned plan, whose rows are sorted if those of this plan are.
        """
        plain = ops.transpose_table(self.unsorted().table, self.rows)
        table, order, masks = (plain, None, None) if self.order is None else _sort_tables(plain, None)
        return Plan(table, self.table.shape[0], order, masks, back=(self.table, self.order, self.masks))

    @property
    def whole(self) -> bool:
        """Whether the plan holds all that a gradient reads. This is so if it has the transposed table, from outputs to
        inputs, or if its table is its own transpose.
        """
        return self.symmetric or self.back is not None

    def complete(self) -> Plan:
        """Return the plan (neighbour tables) with the transposed table, from outputs to inputs, which a gradient reads.
        If the plan lacks that table, build it. Otherwise return this plan itself.
        """
        if self.whole:
            return self
        back = self.transposed()
        return replace(self, back=(back.table, back.order, back.masks))

    @built_outside_modes
    def sorted(self, parts: int | None = None) -> Plan:
        """Return the plan over neighbour tables whose rows are sorted by the columns in which they have a neighbour.
        GPU kernels can then skip columns. A sorted plan is returned unchanged.

        ``parts`` is the number of groups of columns that are sorted separately. If it is None, it is that of
        :func:`parts_for`.
        """
        if self.order is not None:
            return self
        table, order, masks = _sort_tables(self.table, parts)
        back = _sort_tables(self.back[0], parts) if self.back is not None else None
        return replace(self, table=table, order=order, masks=masks, back=back)

    @built_outside_modes
    def unsorted(self) -> Plan:
        """Return the plan over neighbour tables whose rows are in the order of the outputs, for pooling and exports. An
        unsorted plan is returned unchanged.
        """
        if self.order is None:
            return self
        back = (ops.by_output(*self.back[:2]), None, None) if self.back is not None else None
        return replace(self, table=ops.by_output(self.table, self.order), order=None, masks=None, back=back)


def _sort_tables(table: Tensor, parts: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the neighbour ``table`` with its rows sorted by the columns in which they have a neighbour, as ``(table,
    order, masks)``. ``order`` holds the output of each row, and ``masks`` the columns in which any row of each block of
    64 has a neighbour.

    ``parts`` is the number of groups of columns that are sorted separately. If it is None, it is that of
    :func:`parts_for`.
    """
    columns, order, masks = ops.sort_table(table, parts or parts_for(table.shape[0], table.shape[1]))
    return columns.t(), order, masks
