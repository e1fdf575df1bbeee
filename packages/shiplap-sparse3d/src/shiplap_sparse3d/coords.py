"""Integer geometry in plain PyTorch: the building blocks of the references of the table ops.

A row whose batch index is -1 is padding: no voxel, absent everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shiplap import ShiplapError
from shiplap.plugin_api import error
from shiplap.plugin_api.compiling import assert_in_graph, constant_result
from shiplap.plugin_api.memos import built_outside_modes

__all__ = [
    "NO_KEY",
    "GridLookup",
    "RowLookup",
    "assert_some_rows",
    "check_coords",
    "check_rows",
    "check_scenes",
    "count_axes",
    "inside_grid",
    "is_known_size",
    "is_known_to_hold",
    "keys_of",
    "other_channels",
    "output_shape",
    "refuse_rows",
    "require",
    "require_scenes",
    "require_tensor",
    "tap_offsets",
]

# Cells are numbered in int64.
MAX_CELLS = 2**63
NO_KEY = MAX_CELLS - 1  # the key of padding, which sorts after every voxel's


def refuse_rows(op: str, bad: Tensor, message: str) -> None:
    """Raise ``SL211`` for ``op`` if any element of ``bad [n]`` is true. In the text ``message``, ``{row}`` is replaced
    by the number of the first such row.
    """
    if bool(bad.any()):
        raise error("SL211", where=f"sparse3d::{op}", got=message.format(row=int(bad.nonzero()[0, 0])))


def require_tensor(where: str, value: Any) -> None:
    """Raise ``SL209`` if ``value`` is no tensor, such as an array of NumPy, a list or None. ``where`` names the
    argument in the error. Anything with a method ``dim`` is taken for a tensor, as proxies of ``torch.fx`` are.
    """
    if not hasattr(value, "dim"):
        got, fix = f"a {type(value).__name__}", "convert it with torch.as_tensor"
        got, fix = ("None", "pass a tensor") if value is None else (got, fix)
        raise error("SL209", where=where, got=got, expected="a torch.Tensor", fix=fix)


def count_axes(coords: Tensor) -> int:
    """Return the number of spatial axes of ``coords``, ``int32 [n, 1 + axes]``. Raise ``SL209``, ``SL201`` or ``SL204``
    for another form, and ``SL201`` unless there are 1 to 4 axes.
    """
    where = "Geometry, argument 'coords'"
    require_tensor(where, coords)
    if coords.dim() != 2 or coords.dtype != torch.int32:
        id, got = ("SL201", f"{coords.dim()} dims") if coords.dim() != 2 else ("SL204", coords.dtype)
        raise error(id, where=where, got=got, expected="int32 [n, 1 + axes]")
    axes: int = coords.shape[1] - 1
    if not 1 <= axes <= 4:
        raise error("SL201", where=where, got=f"{axes + 1} columns", expected="2 to 5")
    return axes


def check_rows(where: str, feats: Tensor, voxels: int) -> None:
    """Raise ``SL202`` if ``feats`` does not have ``voxels`` rows. ``where`` names the layer or function in the error.
    Nothing is checked while a graph is traced, since the comparison would add a guard.
    """
    if torch.compiler.is_compiling():
        return
    if feats.shape[0] != voxels:
        got = f"{feats.shape[0]} rows of features"
        raise error("SL202", where=where, got=got, expected=f"{voxels}, one for each voxel")


def as_many_rows(coords: Tensor, feats: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``coords`` and ``feats`` with one common number of rows.

    In a graph, one of the two numbers may depend on data while the other is known. The tensor whose number depends on
    data then gets the known number, and the graph asserts each time it runs that the numbers are equal. If both depend
    on data and were counted apart, the features get the number of the voxels, with the same assertion. In all other
    cases both tensors are returned unchanged.

    Scenes that were joined in a graph have a number of rows that depends on data. Later modules compare this number
    with 0 and 1, which the graph cannot do for such a number.
    """
    if not torch.compiler.is_compiling():
        return coords, feats
    rows, known = coords.shape[0], feats.shape[0]
    if is_of_data(rows) and not is_of_data(known):
        torch._check(rows == known)
        return coords.narrow(0, 0, known), feats
    if is_of_data(known) and not is_known_size(rows, known):
        torch._check(rows == known)
        return coords, feats.narrow(0, 0, rows)
    return coords, feats


def runs_without_python(rows: Tensor, devices: Sequence[str] = ("cpu", "cuda")) -> bool:
    """Return whether ``torch.export`` is tracing now and the tensor ``rows`` is on one of ``devices``. The exported
    file may run without Python, which the kernels of this package's ops need on these devices. The caller then uses
    operators of torch instead.
    """
    return rows.device.type in devices and _is_exporting()


@constant_result  # Dynamo of torch 2.11 answers True in every graph
def _is_exporting() -> bool:
    """Return whether ``torch.export`` is tracing now. In a graph the result is a constant."""
    return torch.compiler.is_exporting()


def is_of_data(rows: int) -> bool:
    """Return whether ``rows``, a number of rows in a traced graph, depends on the values of tensors. Torch can then not
    say whether the number is at least 2.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # here: it is slow to import

    return not guard_or_false(rows >= 2) and not guard_or_false(rows < 2)


def is_known_size(size: int, wanted: int) -> bool:
    """Return whether ``size`` equals ``wanted``. In a graph, return False for a size that depends on data, because the
    graph has no answer.
    """
    if not torch.compiler.is_compiling():
        return size == wanted
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # here: it is slow to import

    return guard_or_false(size == wanted)


def is_known_to_hold(condition: bool) -> bool:
    """Return whether ``condition``, a comparison of sizes, holds. In a graph, return False unless it holds for all
    sizes that the graph is made for. No guard is added.
    """
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # here: it is slow to import

    return statically_known_true(condition)


def assert_some_rows(made: Tensor, source: Tensor) -> None:
    """In a graph, assert that ``made`` has a row if ``source`` is known to have one. The number of rows of ``made``
    depends on data, and the caller knows that each row of ``source`` leads to one of them.

    Attention of torch compares the number of rows with 0, which the graph cannot do without this fact.
    """
    if torch.compiler.is_compiling() and is_of_data(made.shape[0]) and is_known_to_hold(source.shape[0] >= 1):
        torch._check(made.shape[0] >= 1)


def other_channels(where: str, feats: Tensor, wanted: int, name: str = "in_channels") -> ShiplapError:
    """Return the error ``SL202`` of a layer whose input ``feats`` does not have ``wanted`` channels. ``where`` is the
    layer's name, and ``name`` is its argument for the number of channels.
    """
    return error(
        "SL202",
        where=where,
        got=f"{feats.shape[1]} channels",
        expected=f"{name} = {wanted}",
        fix=f"make the layer with {name} = {feats.shape[1]}, or pass features of {wanted} channels",
    )


def tap_offsets(kernel: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the index ``(kx, ky, kz)`` of each tap (cell of a kernel ``[Kx, Ky, Kz]``). The index of the tap ``v =
    (kx*Ky + ky)*Kz + kz`` is yielded at position ``v``.
    """
    yield from product(range(kernel[0]), range(kernel[1]), range(kernel[2]))


def output_shape(
    shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Return the numbers of cells per axis of the output grid of a strided convolution. On each axis it is ``floor((W +
    2P - Dl*(K-1) - 1)/S) + 1``, and at least 0. ``W``, ``K``, ``S``, ``P`` and ``Dl`` stand for shape, kernel, stride,
    padding and dilation.
    """
    return tuple(map(_output_cells_along, shape, kernel, stride, padding, dilation))


def _output_cells_along(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Return the number of output cells of a strided convolution along one axis. It is ``floor((W + 2P - Dl*(K-1) -
    1)/S) + 1``, and at least 0. ``W``, ``K``, ``S``, ``P`` and ``Dl`` stand for size, kernel, stride, padding and
    dilation.
    """
    return max(0, (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1)


def most_outputs(n: int, window: Sequence[Sequence[int]]) -> int:
    """Return an upper bound of the number of output voxels that ``n`` input voxels reach, the value of the expression
    ``ops.OUT_COORDS_BOUND``. ``window`` holds kernel, stride, padding and dilation, each with one number per axis.
    """
    kernel, stride, _, dilation = window
    for k, s, d in zip(kernel, stride, dilation, strict=True):
        n *= -(-k // (s // math.gcd(s, d)))
    return n


def inside_grid(coords: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the mask ``bool [...]`` of those rows of ``coords [..., 4]`` (scene, x, y, z) that lie in the grid
    ``shape`` and in a scene from 0 on.
    """
    limit = torch.tensor(shape, dtype=torch.int64, device=coords.device)  # a grid may be wider than its coordinates
    return ((coords[..., 1:] >= 0) & (coords[..., 1:] < limit)).all(-1) & (coords[..., 0] >= 0)


def keys_of(coords: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the number of each row's cell, counted over the grids of all scenes, as ``int64 [...]``. In a grid ``[X,
    Y, Z]`` it is ``((scene*X + x)*Y + y)*Z + z``. ``coords`` is ``[..., 1 + axes]``. Its rows must lie in the grid
    ``shape``.
    """
    keys, *axes = coords.long().unbind(-1)
    for size, axis in zip(shape, axes, strict=True):
        keys = keys * size + axis
    return keys


def check_coords(op: str, coords: Tensor, shape: Sequence[int]) -> None:
    """Raise ``SL211`` if a row of ``coords`` is outside the grid of ``shape`` or occurs twice. Raise it also if the
    grid has too many cells for int64. Padding (-1) is valid. ``op`` is the op's name in the message.
    """
    # Nothing branches on the number of rows, so that a program without Python has these checks for every number.
    voxels, grid = coords[:, 0] != -1, str(tuple(shape))
    refuse_rows(op, voxels & ~inside_grid(coords, shape), "coords row {row} is outside spatial_shape " + grid)
    if bool((coords[:, 0].long() >= _max_scenes(shape)).any()):
        raise error("SL211", where=f"sparse3d::{op}", got=f"a grid {grid} of 2^63 cells or more")
    # Padding gets one key that no voxel has, and is left out of the comparison.
    keys, at = torch.where(voxels, keys_of(coords, shape), NO_KEY).sort(stable=True)
    repeated = (keys[1:] == keys[:-1]) & (keys[1:] != NO_KEY)
    twins = torch.zeros_like(voxels).scatter(0, at[1:], repeated)
    refuse_rows(op, twins, "duplicate coordinates: row {row} occurs more than once")


def _max_scenes(shape: Sequence[int]) -> int:
    """Return the largest number of scenes for which all cells of their grids of ``shape`` can be numbered by int64
    numbers below ``NO_KEY``, the largest int64.
    """
    return NO_KEY // max(1, math.prod(shape))  # a step may lead to a grid without cells


def check_scenes(op: str, coords: Tensor, batch_size: int) -> None:
    """Raise ``SL211`` if the scene of a row of ``coords`` is not in ``[-1, batch_size)``. The scene -1 is padding.
    ``op`` is the op's name in the message.
    """
    bad = (coords[:, 0] < -1) | (coords[:, 0] >= batch_size)
    refuse_rows(op, bad, "coords row {row} has a batch index outside " + f"[-1, {batch_size})")


@built_outside_modes
def has_scenes_of(coords: Tensor, batch_size: int, on_gpu: bool = False) -> bool:
    """Return False if a scene in ``coords`` is known to be outside ``[-1, batch_size)``, and True otherwise. The values
    of traced tensors are not known. Those on a GPU are read and known if ``on_gpu`` is true, and otherwise not known.
    """
    here = type(coords) is Tensor and (on_gpu or coords.device.type == "cpu")
    if not here or coords.shape[0] == 0:
        return True
    try:
        low, high = torch.stack(coords[:, 0].aminmax()).tolist()  # one wait for a device
    except RuntimeError:  # make_fx and vmap give no values
        return True
    return bool(low >= -1 and high < batch_size)


def assert_scenes(coords: Tensor, batch_size: int) -> None:
    """Add an assertion to the graph that is being traced, which raises as the graph runs if ``coords`` has a scene
    outside ``[-1, batch_size)``. Nothing is added for ``coords`` on a GPU, or if :func:`set_graph_checks` has turned
    checks off.
    """
    if _graph_checks and coords.device.type == "cpu":
        scene = coords[:, 0]
        assert_in_graph(((scene >= -1) & (scene < batch_size)).all(), _OTHER_SCENE)


def require_scenes(where: str, coords: Tensor, batch_size: int, *, on_gpu: bool = False) -> None:
    """Raise ``SL211`` if a scene in ``coords`` is outside ``[-1, batch_size)``. While a graph is traced, add an
    assertion to it instead. ``where`` names the caller in the error.

    If ``on_gpu`` is true, values on a GPU are read and checked, too. Otherwise values on a GPU are left to the kernels,
    which check them.
    """
    if torch.compiler.is_compiling():
        assert_scenes(coords, batch_size)
    elif not has_scenes_of(coords, batch_size, on_gpu):
        check_scenes(where, coords, batch_size)


def require(holds: Tensor, text: str, refuse: Callable[[], Exception]) -> None:
    """If the bool tensor ``holds`` is false, raise the error that a call of ``refuse`` returns.

    In a compiled graph, add an assertion with the message ``text`` instead, which is checked each time the graph runs.
    The assertion is left out on a GPU and if :func:`set_graph_checks` has turned checks off.
    """
    if not torch.compiler.is_compiling():
        if not bool(holds):
            raise refuse()
    elif _graph_checks and holds.device.type == "cpu":
        assert_in_graph(holds, text)


def assert_inside(coords: Tensor, batch_size: int, shape: Sequence[int]) -> None:
    """Add assertions to the graph that is being traced. As it runs, the graph raises if ``coords`` has a scene outside
    ``[-1, batch_size)`` or a cell outside the grid ``shape``. Nothing is added for ``coords`` on a GPU, or if
    :func:`set_graph_checks` has turned checks off.
    """
    assert_scenes(coords, batch_size)
    if _graph_checks and coords.device.type == "cpu":
        cells = [(c >= 0) & (c < size) for c, size in zip(coords[:, 1:].unbind(1), shape, strict=True)]
        inside = cells[0]
        for axis in cells[1:]:
            inside = inside & axis
        assert_in_graph(((coords[:, 0] == -1) | inside).all(), _OUTSIDE)


_graph_checks = True
_OTHER_SCENE = "SL211: a row of coords has a batch index outside [-1, batch_size); correct batch_size or the coords"
_OUTSIDE = "SL211: a row of coords is outside spatial_shape; correct spatial_shape or the coordinates"


def set_graph_checks(on: bool) -> bool:
    """Set whether compiled graphs and exported packages that are made from now on check the values of coordinates each
    time they run. If ``on`` is true, they do, and otherwise they do not. Return the previous setting.

    Eager calls always check the values. A check reads the coordinates once.
    """
    global _graph_checks
    before, _graph_checks = _graph_checks, on
    return before


class GridLookup:
    """A lookup that finds the rows of voxels by their coordinates. A call with coordinates ``[..., 4]`` returns the row
    of the equal voxel, or -1 if there is none.

    An instance holds the sorted keys of the voxels, the row of each key and the ``shape`` of the grid. A call is a
    binary search without a branch on the data. The voxels must pass :func:`check_coords`.
    """

    def __init__(self, coords: Tensor, shape: Sequence[int]) -> None:
        """Sort the keys of the voxels ``coords [n, 4]`` in a grid of ``shape`` for binary search. Rows of padding are
        left out.
        """
        self.shape = shape
        keys, rows = torch.where(coords[:, 0] != -1, keys_of(coords, shape), NO_KEY).sort(stable=True)
        # A key that no voxel has stands last, so that every search ends at a row.
        self.keys = torch.cat([keys, keys.new_full((1,), NO_KEY)])
        self.rows = torch.cat([rows.int(), rows.new_full((1,), -1, dtype=torch.int32)])

    def __call__(self, queries: Tensor) -> Tensor:
        """Return the number of the voxel that equals each of ``queries [..., 4]`` (scene, x, y, z), as ``int32 [...]``.
        It is -1 if there is none.
        """
        known = inside_grid(queries, self.shape) & (queries[..., 0] < _max_scenes(self.shape))
        wanted = torch.where(known, keys_of(queries, self.shape), NO_KEY)
        at = torch.searchsorted(self.keys, wanted)
        return torch.where(known & (self.keys[at] == wanted), self.rows[at], -1)


class RowLookup:
    """A lookup that finds rows of integers, with any number of columns, by their contents. A call with such rows
    returns the number of the first equal row, or -1 if there is none. An instance holds the sorted keys of its rows and
    the row of each key.

    A key has one digit for each column, in the range of the column's values. If the next digit would take the keys
    beyond int64, the keys of the digits before it are replaced by their ranks.
    """

    def __init__(self, rows: Tensor) -> None:
        """Sort the keys of ``rows [n, columns]`` for binary search. Rows that begin with -1 are padding and are left
        out.
        """
        voxels = (rows[:, 0] != -1).nonzero()[:, 0]
        wide = rows[voxels].long()
        self._digits: list[tuple[int, int, Tensor | None]] = []
        keys, size = wide.new_zeros(wide.shape[0]), 1
        # A column without elements has no minimum.
        for column in wide.unbind(1) if wide.shape[0] else ():
            low, high = int(column.min()), int(column.max())
            # Mixed-radix numbers that would overflow int64 are replaced by their ranks.
            ranks = keys.unique() if size * (high - low + 1) >= MAX_CELLS else None
            if ranks is not None:
                keys, size = torch.searchsorted(ranks, keys), ranks.shape[0]
            self._digits.append((low, high, ranks))
            keys, size = keys * (high - low + 1) + (column - low), size * (high - low + 1)
        self.keys, at = keys.sort(stable=True)
        self.rows = voxels[at]

    def __call__(self, queries: Tensor) -> Tensor:
        """Return the number of the row that equals each of ``queries [q, columns]``, as ``int32 [q]``. It is the number
        of the first of equal rows, and -1 if there is none.
        """
        missing = torch.full((queries.shape[0],), -1, dtype=torch.int32, device=queries.device)
        if self.keys.numel() == 0:
            return missing
        known = torch.ones_like(missing, dtype=torch.bool)
        wanted = torch.zeros_like(missing, dtype=torch.int64)
        for (low, high, ranks), column in zip(self._digits, queries.long().unbind(1), strict=True):
            if ranks is not None:
                at = torch.searchsorted(ranks, wanted).clamp_max(ranks.shape[0] - 1)
                # A number that has no rank is in none of the rows.
                known, wanted = known & (ranks[at] == wanted), at
            known = known & (column >= low) & (column <= high)
            wanted = wanted * (high - low + 1) + (column.clamp(low, high) - low)
        # A number above the last key gets a valid place, and the comparison below rejects it.
        at = torch.searchsorted(self.keys, wanted).clamp_max(self.keys.numel() - 1)
        return torch.where(known & (self.keys[at] == wanted), self.rows[at].int(), missing)

    def repeats(self) -> Tensor:
        """Return the indices of the rows that equal an earlier row, ``int64 [repeats]``, in the ascending order of the
        rows' keys.
        """
        return self.rows[1:][self.keys[1:] == self.keys[:-1]]
