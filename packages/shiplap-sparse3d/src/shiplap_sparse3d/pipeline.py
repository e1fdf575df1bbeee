"""Pipelines whose stages pass sparse tensors on: ``torch.distributed.pipelining`` carries their tensors.

Torch cuts a batch along the rows of its tensors and allocates once the tensors that a stage receives. So each
micro-batch is whole scenes in the capacity form (``SparseTensor.pad``), which has the same number of rows for any
scenes. Features and coordinates travel between stages, and tables do not: an inverse convolution finds its way back
only if its stage has the convolution, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shiplap.plugin_api import error
from shiplap_sparse3d.modes import evaluation_mode
from shiplap_sparse3d.tensor import SparseTensor

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = ["Voxels", "split", "stage"]

MOST = 16  # sparse tensors that a stage hands on
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Before torch 2.13 all that a stage receives must be of a floating dtype, and a gradient of each tensor goes back.
AS_FLOATS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


class _ReceivedCoords(torch.autograd.Function):
    """The autograd function for coordinates that a stage has received as float64 together with features. The forward
    converts the coordinates to int32. The backward returns zeros as their gradient.
    """

    @staticmethod
    def forward(ctx: Any, feats: Tensor, coords: Tensor) -> tuple[Tensor, Tensor]:
        """Return a view of ``feats`` with the same elements and shape, and ``coords`` as int32. Coordinates may be sent
        as floats, since older pipelines send gradients for all tensors.
        """
        ctx.like = coords.new_zeros(()), coords.shape
        return feats.view_as(feats), coords.int()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        """Return the gradient of the features unchanged, and zeros for the coordinates."""
        zero, shape = ctx.like
        return grad, zero.expand(shape).contiguous()


@dataclass(frozen=True)
class Voxels:
    """The shape of a micro-batch's sparse tensor before the tensor exists.

    Args:
        rows: the capacity. :func:`split` raises ``SL208`` for a micro-batch with more voxels.
        channels: the number of channels of the features.
        spatial_shape: the number of cells per axis.
        batch_size: the number of scenes of a micro-batch.
        dtype: the dtype of the features.
    """

    rows: int
    channels: int
    spatial_shape: tuple[int, ...]
    batch_size: int = 1
    dtype: torch.dtype = torch.float32

    def empty(self, device: torch.device, received: bool) -> tuple[Tensor, Tensor]:
        """Return features ``[rows, channels]`` of zeros and coordinates of -1 (padding) as an example input of a stage.
        If ``received`` is true, the stage receives them from another stage. The features then require gradients, and
        the coordinates are float64 before torch 2.13. Otherwise the features require no gradients, and the coordinates
        are int32.
        """
        feats = torch.zeros(self.rows, self.channels, dtype=self.dtype, device=device)
        coords = torch.full((self.rows, 1 + len(self.spatial_shape)), -1, dtype=torch.int32, device=device)
        return feats.requires_grad_(received), coords.double() if AS_FLOATS and received else coords

    def tensor(self, feats: Tensor, coords: Tensor) -> SparseTensor:
        """Return the sparse tensor of the features and coordinates that the previous stage has sent. It is padded to a
        fixed number of rows.
        """
        if coords.is_floating_point():
            feats, coords = _ReceivedCoords.apply(feats, coords)
        return SparseTensor(feats, coords, self.spatial_shape, self.batch_size, padded=True)


class _StageModule(nn.Module):
    """The user's ``module`` as a stage of a pipeline, which takes and returns tensors in place of sparse tensors.
    ``takes`` describes each sparse tensor that the module takes. ``last`` is true if the stage is the last one.
    """

    def __init__(self, module: nn.Module, takes: Sequence[Voxels], last: bool) -> None:
        """Store the module of a stage, the shapes of the sparse tensors that it takes, and whether the stage is the
        last one.
        """
        super().__init__()
        self.module, self.takes, self.last = module, takes, last

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the outputs of the module as tensors, a tuple of them if there are several. ``tensors`` are the
        features and coordinates of each sparse input in turn. Each sparse output is returned as its features and
        coordinates.
        """
        pairs = zip(self.takes, tensors[::2], tensors[1::2], strict=True)
        out = self.module(*(voxels.tensor(feats, coords) for voxels, feats, coords in pairs))
        made = tuple(_output_tensors(out if isinstance(out, (tuple, list)) else (out,), self.last))
        return made[0] if len(made) == 1 else made


def _output_tensors(outputs: Sequence[Any], last: bool) -> list[Tensor]:
    """Return the outputs of a stage as a list of tensors that another rank can receive. A sparse tensor becomes its
    features and its coordinates, and a tensor is unchanged. Before torch 2.13 the coordinates are float64, unless
    ``last`` is true. Raise ``SL209`` for any other output.
    """
    made: list[Tensor] = []
    for out in outputs:
        if isinstance(out, SparseTensor):
            made += [out.feats, out.coords.double() if AS_FLOATS and not last else out.coords]
        elif isinstance(out, Tensor):
            made.append(out)
        else:
            raise _stage_error(f"an output of {type(out).__name__}", "sparse tensors, and in the last stage tensors")
    return made


def _stage_error(got: str, expected: str) -> Exception:
    """Return the error ``SL209`` of a stage whose outputs the next stage cannot take. In the error's text, ``got``
    describes the outputs, and ``expected`` describes outputs that can be sent.
    """
    fix = "let the module of each stage but the last return a sparse tensor, or a tuple of them"
    return error("SL209", where="a stage of a pipeline", got=got, expected=expected, fix=fix)


def stage(
    module: nn.Module, index: int, stages: int, device: torch.device, takes: Voxels, group: Any = None
) -> PipelineStage:
    """Return the stage ``index`` of ``stages`` of a pipeline, for the schedules of ``torch.distributed.pipelining``
    (``ScheduleGPipe``, ``Schedule1F1B`` and others).

    The module takes the result of the previous stage's module, which is a sparse tensor or a tuple of them. In the
    last stage it may return tensors, and a sparse tensor becomes ``(feats, coords)`` for ``loss_fn``. Rows whose
    coordinates are -1 are padding without a meaning. On the first rank, pass :func:`split` of the batch to
    ``schedule.step``.

    Every rank has to call this function, in the order of its stages, since each stage receives the shapes of its inputs
    from the one before.

    Args:
        module: the layers that this stage runs.
        index, stages: the number of this stage, from 0, and the count of all. Rank ``i % ranks`` has stage ``i``.
        device: the device of this rank.
        takes: the shape of the sparse tensor that the first stage takes. Every stage must get it, but only the first
            one reads it.
        group: the process group of the pipeline's ranks. None stands for all ranks.

    Raises:
        ShiplapError: ``SL209`` for outputs that another stage cannot take, and for several stages on a single rank.
    """
    from torch.distributed.pipelining import PipelineStage

    ranks = dist.get_world_size(group)
    if ranks == 1 and stages > 1:
        raise _stage_error(f"{stages} stages on one rank", "at most one stage on a single rank")
    given = (takes,) if index == 0 else _receive_shapes((index - 1) % ranks, device, group)
    wrapped = _StageModule(module, given, index == stages - 1)
    sample = tuple(t for voxels in given for t in voxels.empty(device, index > 0))
    with torch.no_grad(), evaluation_mode(module):  # statistics are those of voxels, and there is none
        out = module(
            *(v.tensor(*pair) for v, pair in zip(given, zip(sample[::2], sample[1::2], strict=True), strict=True))
        )
        made = _output_tensors(out if isinstance(out, (tuple, list)) else (out,), index == stages - 1)
    if index < stages - 1:
        _send_shapes(out if isinstance(out, (tuple, list)) else (out,), (index + 1) % ranks, device, group)
    made = [t.detach().requires_grad_(t.is_floating_point()) for t in made]
    return PipelineStage(wrapped, index, stages, device, input_args=sample, output_args=tuple(made), group=group)


def _send_shapes(outputs: Sequence[Any], rank: int, device: torch.device, group: Any) -> None:
    """Send the shapes of ``outputs``, as numbers in a tensor of a fixed size, to the rank of the next stage. Raise
    ``SL209`` if one is not a sparse tensor or there are more than ``MOST``.
    """
    if len(outputs) > MOST or not all(isinstance(out, SparseTensor) for out in outputs):
        kinds = ", ".join(type(out).__name__ for out in outputs)
        raise _stage_error(f"{len(outputs)} outputs: {kinds}", f"at most {MOST} sparse tensors")
    lines = [
        [*out.feats.shape, out.batch_size, DTYPES.index(out.feats.dtype), *(*out.spatial_shape, 0, 0)[:3]]
        for out in outputs
    ]
    # A fixed size, so that the receiver needs no message before it.
    told = torch.zeros(MOST, 7, dtype=torch.int64)
    told[: len(lines)] = torch.tensor(lines)
    dist.send(told.to(device), group=group, group_dst=rank)


def _receive_shapes(rank: int, device: torch.device, group: Any) -> tuple[Voxels, ...]:
    """Return the shapes of this stage's inputs, received as numbers from ``rank``, which runs the stage before this
    one.
    """
    told = torch.zeros(MOST, 7, dtype=torch.int64, device=device)
    dist.recv(told, group=group, group_src=rank)
    # Unused lines of the fixed-size message are zeros.
    lines = [line for line in told.tolist() if line[0]]
    return tuple(
        Voxels(rows, channels, tuple(cells for cells in shape if cells), scenes, DTYPES[dtype])
        for rows, channels, scenes, dtype, *shape in lines
    )


def split(x: SparseTensor, parts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return ``(feats, coords)`` of the scenes of ``x`` as ``parts`` micro-batches, one after the other. All have the
    same number of scenes and are padded to ``rows`` rows. ``torch.chunk(t, parts)`` of each tensor gives the
    micro-batches, as torch's schedules cut them.

    Raises:
        ShiplapError: ``SL208`` for a number of scenes that is not a multiple of ``parts``, and for more than ``rows``
            voxels.
    """
    if parts < 1 or x.batch_size % parts:
        raise error(
            "SL208",
            where="pipeline.split",
            got=f"{x.batch_size} scenes for {parts} micro-batches",
            expected="as many scenes in each",
        )
    scenes = x.batch_size // parts
    # Equal numbers of rows let ``torch.chunk`` cut exactly between micro-batches.
    made = [x[at : at + scenes].pad(rows) for at in range(0, x.batch_size, scenes)]
    return torch.cat([part.feats for part in made]), torch.cat([part.coords for part in made])
