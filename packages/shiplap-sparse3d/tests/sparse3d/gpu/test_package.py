"""AOTInductor packages of sparse3d on CUDA: convolutions and tables are part of them, what Python launches is not."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap.packaging import package_model
from shiplap_sparse3d import ops
from shiplap_testing.deployed import need_packages
from shiplap_testing.effort import sampled
from tests.sparse3d.nets import ROWS, SCENES, deployed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ALONE = """
import sys, torch
package, data = sys.argv[1:]
model = torch._inductor.aoti_load_package(package)
for args, want in torch.load(data):
    torch.testing.assert_close(model(*args), want, rtol=2e-3, atol=2e-3)
assert "shiplap" not in sys.modules
"""


def test_the_network_of_the_demonstration_is_one_package_that_a_program_without_python_runs(tmp_path):
    """Tables included: they are launch programs, which C++ launches."""
    need_packages("cuda")
    message = deployed(tmp_path, "cuda")
    assert message.endswith("equal\n"), message
    assert message.count(f"{ROWS} rows, ") == len(SCENES), message


class Means(torch.nn.Module):
    """A mean for each segment, which a function in Python launches."""

    def forward(self, feats, index, counts):
        return ops.segment_mean(feats, index, counts)


def test_a_network_with_an_op_that_python_launches_is_not_packaged_and_the_op_is_named(tmp_path):
    index, counts = torch.zeros(9, dtype=torch.int32).cuda(), torch.full((1,), 9, dtype=torch.int32).cuda()
    program = torch.export.export(Means(), (torch.randn(9, 4).cuda(), index, counts))
    with pytest.raises(sl.ShiplapError, match="SL307") as caught:
        package_model(program, tmp_path / "means.pt2")
    assert "sparse3d::segment_mean" in str(caught.value)
    assert "launched by Python on cuda" in str(caught.value)
    assert not (tmp_path / "means.pt2").exists()


class Layer(torch.nn.Module):
    """One whose tables are inputs."""

    def __init__(self, channels):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(channels, 27, channels) / (27 * channels) ** 0.5)

    def forward(self, x, table, order, masks):
        back = (None, None, None)
        return torch.relu(ops.conv(x, self.weight, table, None, order, masks, *back, 1, False, True, False))


def layer_inputs(n, channels):
    cells = torch.randperm(16**3)[:n]
    coords = torch.stack([cells * 0, cells % 16, cells // 16 % 16, cells // 256], 1).int().cuda()
    plan = sparse3d.Geometry(coords, (16,) * 3, 1).subm(3)
    return torch.randn(n, channels, device="cuda").half(), *plan.tensors


@pytest.mark.parametrize("channels", sampled([8, 256], long=["8"]))
def test_a_layer_that_is_given_its_tables_is_packaged(tmp_path, channels):
    """Its package runs in a process without shiplap, up to 4096 voxels. 256 channels: the bulk copy engine."""
    need_packages("cuda")
    layer, rows, blocks = Layer(channels).cuda().half().eval(), *(torch.export.Dim.DYNAMIC(max=n) for n in (4096, 64))
    with torch.no_grad():
        shapes = ({0: rows}, {0: rows}, {1: rows}, {1: blocks})
        program = torch.export.export(layer, layer_inputs(200, channels), dynamic_shapes=shapes)
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        cases = [layer_inputs(n, channels) for n in (200, 90, 1000, 64)]
        torch.save([(args, layer(*args)) for args in cases], tmp_path / "cases.pt")
    command = [sys.executable, "-c", ALONE, package, str(tmp_path / "cases.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
