"""AOTInductor packages of sparse3d on CUDA: the convolution is part of them, what Python launches is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import shiplap_sparse3d as sparse3d
from shiplap_sparse3d import ops
from shiplap_testing.effort import sampled
from tests.sparse3d.nets import UNet, padded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PLAIN = """
import torch
net, x = torch.nn.Linear(8, 8).cuda(), torch.randn(4, 8, device="cuda")
with torch.no_grad():
    path = torch._inductor.aoti_compile_and_package(torch.export.export(net, (x,)))
torch._inductor.aoti_load_package(path)(x)
"""
ALONE = """
import sys, torch
package, data = sys.argv[1:]
model = torch._inductor.aoti_load_package(package)
for args, want in torch.load(data):
    torch.testing.assert_close(model(*args), want, rtol=2e-3, atol=2e-3)
assert "shiplap" not in sys.modules
"""


def test_a_network_that_builds_tables_is_not_packaged_and_the_op_is_named(tmp_path):
    """Python launches those ops on CUDA, and a package has none."""
    program = torch.export.export(UNet().cuda().eval(), tuple(x.cuda() for x in padded(200)))
    with pytest.raises(Exception, match="SL307") as caught:
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "u_net.pt2"))
    assert "sparse3d::out_coords" in str(caught.value)
    assert "launched by Python on cuda" in str(caught.value)


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
    """Its package runs in a process without shiplap, for any number of voxels. 256 channels: the bulk copy engine."""
    if subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, check=False).returncode:
        pytest.skip("torch's own package of a linear layer does not run here")
    layer, dynamic = Layer(channels).cuda().half().eval(), torch.export.Dim.DYNAMIC
    with torch.no_grad():
        shapes = ({0: dynamic}, {0: dynamic}, {1: dynamic}, {1: dynamic})
        program = torch.export.export(layer, layer_inputs(200, channels), dynamic_shapes=shapes)
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        cases = [layer_inputs(n, channels) for n in (200, 90, 1000, 64)]
        torch.save([(args, layer(*args)) for args in cases], tmp_path / "cases.pt")
    command = [sys.executable, "-c", ALONE, package, str(tmp_path / "cases.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
