"""A test of the receptive field: one voxel is changed, and nothing beyond the derived field may change with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shiplap import ShiplapError
from shiplap.plugin_api import error
from shiplap_sparse3d.axes import Triple
from shiplap_sparse3d.survey.field import Field, Run, evaluation_mode, rows_of
from shiplap_sparse3d.tensor import SparseTensor

_ACROSS, _FILLED, _TOLERANCE = 5, 0.7, 1e-4  # cells across the corridor; share of them in use; of the largest logit


@dataclass(frozen=True)
class Seen:
    """The farthest observed changes, in cells: below and above the voxel on which an output depends.

    ``before`` and ``after`` are at most those of the field that was probed.
    """

    before: Triple
    after: Triple


def probe(net: nn.Module, channels: int, field: Field, run: Run | None = None) -> Seen:
    """Test the derived receptive field ``field``: change single voxels, run ``net``, and compare its outputs. Returns
    how far changes reached.

    The inputs are long, narrow blocks of random voxels along x and along y, three times as long as the receptive field.
    One voxel gets another value, then a NaN (which no weight and no activation can hide), and then it is removed. At
    last all voxels outside of its receptive field are removed.

    Args:
        net, channels, run: as for :func:`receptive_field`.
        field: the derived receptive field.

    Returns:
        The distance, in voxels, up to which outputs changed.

    Raises:
        SurveyError: SL820 if an output outside of the receptive field changes.
    """
    parameter = next(net.parameters(), None)
    device = parameter.device if parameter is not None else torch.device("cpu")
    below, above = torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long)
    with evaluation_mode(net), torch.no_grad():
        # Tiles are cut along x and y only.
        for axis in (0, 1):
            # The first and the last cell of a coarse cell are the extreme places of an input.
            for shift in {0, field.stride[axis] - 1}:
                coords, grid, row = _draw_corridor(field, axis, shift)
                for distance in _changed_outputs(run or net, coords, grid, row, channels, device):
                    if not len(distance):
                        continue
                    below, above = torch.maximum(below, (-distance).amax(0)), torch.maximum(above, distance.amax(0))
                if _changes_when_cropped(run or net, coords, grid, row, channels, device, field):
                    raise _sees_beyond("another output after all voxels beyond its field were left out", field)
    seen = Seen(_as_triple(below), _as_triple(above))
    if any(s > f for s, f in zip((*seen.before, *seen.after), (*field.before, *field.after), strict=True)):
        raise _sees_beyond(
            f"a change {seen.before} cells before and {seen.after} behind the voxel that depends on it", field
        )
    return seen


def _sees_beyond(got: str, field: Field) -> ShiplapError:
    """Return the error SL820 for a network whose outputs change with inputs beyond ``field``. ``got`` says what was
    observed.
    """
    return error(
        "SL820",
        where="the probe of the receptive field",
        what="the network looks beyond the receptive field of its layers",
        got=got,
        expected=f"changes within {field.before} and {field.after} cells, the field of its sparse layers",
        fix="remove layers that mix voxels in another way than sparse layers do, such as attention or means over rows",
    )


def _as_triple(values: Tensor) -> Triple:
    """Return a tensor of three integers as a tuple of Python integers."""
    x, y, z = values.tolist()
    return x, y, z


def _draw_corridor(field: Field, axis: int, shift: int) -> tuple[Tensor, Triple, int]:
    """Return a block of random voxels along ``axis``, three receptive fields long, with a full line through its middle:
    coordinates ``int32 [v, 4]``, the grid, and the row of the middle voxel, which ``shift`` moves along the axis.
    """
    far = max(field.before[axis], field.after[axis])
    # Room beyond the field on both sides, where a change would be an error.
    half = 3 * far + 4 * field.stride[axis] + 32
    middle = -(-half // field.stride[axis]) * field.stride[axis] + shift
    sizes = [_ACROSS] * 3
    sizes[axis] = 2 * middle + 1
    draw = torch.Generator().manual_seed(axis)
    used = torch.rand(sizes, generator=draw) < _FILLED
    centre = [_ACROSS // 2] * 3
    centre[axis] = middle
    line: list[int | slice] = list(centre)
    line[axis] = slice(None)
    used[tuple(line)] = True  # without gaps, or a dilated kernel might have nothing to see where it looks
    cells = used.nonzero()
    row = int((cells == torch.tensor(centre)).all(1).nonzero())
    x, y, z = (-(-size // s) * s for size, s in zip(sizes, field.stride, strict=True))
    return torch.cat([torch.zeros(len(cells), 1), cells], 1).int(), (x, y, z), row


def _changed_outputs(
    run: Run, coords: Tensor, grid: Triple, row: int, channels: int, device: torch.device
) -> list[Tensor]:
    """Return three tensors ``int64 [changes, 3]``: the distances from the voxel in ``row`` to the outputs that changed
    when its value was changed, made NaN, and when the voxel was removed. Raises SL825 for outputs that are not finite.
    """
    feats = _random_features(coords, channels, device)
    distance = (coords[row] - coords)[:, 1:].long()
    before = _output_rows(run, feats, coords, grid)
    if not bool(before.isfinite().all()):
        raise error("SL825", where="the probe of the network", got="logits that are not finite", expected="numbers")
    other, nan = feats.clone(), feats.clone()
    # A large change: weights near zero must not hide it below the rounding of float32.
    other[row] += 10
    nan[row] = torch.nan
    rest = torch.arange(len(coords)) != row
    without = _output_rows(run, feats[rest.to(device)], coords[rest], grid)
    # Without the voxel, sums run in another order, so results may differ by rounding.
    limit = _TOLERANCE * float(before.abs().amax().clamp_min(1e-6))
    return [
        distance[(_output_rows(run, other, coords, grid) != before).any(1)],
        distance[_output_rows(run, nan, coords, grid).isnan().any(1)],
        distance[rest][((without - before[rest]).abs() > limit).any(1)],
    ]


def _changes_when_cropped(
    run: Run, coords: Tensor, grid: Triple, row: int, channels: int, device: torch.device, field: Field
) -> bool:
    """Return whether the output at ``row`` changes beyond rounding when only the voxels of ``field`` around it are
    left.
    """
    feats, distance = _random_features(coords, channels, device), (coords - coords[row])[:, 1:].long()
    near = ((distance >= -torch.tensor(field.before)) & (distance <= torch.tensor(field.after))).all(1)
    whole = _output_rows(run, feats, coords, grid)[row]
    part = _output_rows(run, feats[near.to(device)], coords[near], grid)[int(near[:row].sum())]
    return bool(((whole - part).abs() > _TOLERANCE * float(whole.abs().amax().clamp_min(1e-6))).any())


def _random_features(coords: Tensor, channels: int, device: torch.device) -> Tensor:
    """Return normal random features ``[v, channels]`` for ``coords`` on ``device``, the same at each call."""
    return torch.randn(len(coords), channels, generator=torch.Generator().manual_seed(1)).to(device)


def _output_rows(run: Run, feats: Tensor, coords: Tensor, grid: Triple) -> Tensor:
    """Return the output of the network ``run`` for voxels with ``feats`` at ``coords`` in ``grid``, as
    ``float32 [v, n]`` on the CPU.
    """
    rows = rows_of(run(SparseTensor(feats, coords.to(feats.device), grid)))
    return rows.reshape(len(rows), -1).float().cpu()
