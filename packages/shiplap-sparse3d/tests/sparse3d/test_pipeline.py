"""What a pipeline carries of a sparse tensor, in one process; two ranks are in ``rank_cells``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

import shiplap_sparse3d as sparse3d
from shiplap.errors import ShiplapError
from shiplap_sparse3d import pipeline
from tests.sparse3d.scenes import scene

TAKES = pipeline.Voxels(40, 4, (6, 6, 6), batch_size=2, dtype=torch.float64)


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.device("cpu")
    dist.destroy_process_group()


def test_parts_are_whole_scenes_of_as_many_rows():
    x = scene(60, (6, 6, 6), 4, batch_size=4, seed=0)
    feats, coords = pipeline.split(x, 2, 40)
    assert feats.shape == (80, 4)
    for i in range(2):
        part = pipeline.Voxels(40, 4, (6, 6, 6), 2, torch.float64).tensor(feats.chunk(2)[i], coords.chunk(2)[i])
        assert torch.equal(part.dense(), x[2 * i : 2 * i + 2].dense())
    with pytest.raises(ShiplapError, match=r"SL208(.|\n)*4 scenes for 3 micro-batches"):
        pipeline.split(x, 3, 40)
    with pytest.raises(ShiplapError, match=r"SL208(.|\n)*capacity 8"):
        pipeline.split(x, 2, 8)


def test_making_a_stage_changes_no_statistics_and_no_mode(alone):
    net = sparse3d.Sequential(sparse3d.SubMConv3d(4, 8, 3), sparse3d.BatchNorm(8)).double()
    net[0].eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    made = pipeline.stage(net, 0, 1, alone, TAKES)
    assert [m.training for m in net.modules()] == [True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    x = scene(60, (6, 6, 6), 4, batch_size=2, seed=0)
    feats, coords = ScheduleGPipe(made, 2).step(*pipeline.split(x, 2, 40))
    assert feats.shape == (80, 8)
    assert int((coords[:, 0] >= 0).sum()) == 60


def test_coordinates_travel_as_floats_where_torch_sends_a_gradient_of_each_tensor(monkeypatch):
    """As torch 2.11 does it: what a stage receives requires a gradient, and each must have one after the backward."""
    monkeypatch.setattr(pipeline, "AS_FLOATS", True)
    x, conv = scene(30, (6, 6, 6), 4, seed=0).pad(40), sparse3d.SubMConv3d(4, 3, 3).double()
    sent = pipeline._output_tensors((x,), last=False)
    assert [t.dtype for t in sent] == [t.dtype for t in TAKES.empty(torch.device("cpu"), received=True)]
    came = [t.detach().requires_grad_() for t in sent]
    got = TAKES.tensor(*came)
    assert torch.equal(got.coords, x.coords)
    conv(got).feats.square().sum().backward()
    feats = x.feats.detach().requires_grad_()
    wanted = torch.autograd.grad(conv(x.replace(feats)).feats.square().sum(), feats)[0]
    assert torch.equal(came[0].grad, wanted)
    assert torch.equal(came[1].grad, torch.zeros_like(came[1]))
    assert pipeline._output_tensors((x,), last=True)[1] is x.coords


class Named(nn.Module):
    def forward(self, x: sparse3d.SparseTensor) -> dict[str, sparse3d.SparseTensor]:
        return {"x": x}


def test_what_no_stage_could_take_is_refused_when_the_stage_is_made(alone):
    with pytest.raises(ShiplapError, match=r"SL209(.|\n)*an output of dict"):
        pipeline.stage(Named(), 0, 1, alone, TAKES)
    with pytest.raises(ShiplapError, match=r"SL209(.|\n)*2 stages on one rank"):
        pipeline.stage(Named(), 0, 2, alone, TAKES)
    x = scene(20, (6, 6, 6), 4, seed=0)
    with pytest.raises(ShiplapError, match=r"SL209(.|\n)*2 outputs: SparseTensor, Tensor"):
        pipeline._send_shapes((x, x.feats), 1, alone, None)
