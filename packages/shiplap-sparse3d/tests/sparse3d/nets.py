"""A U-Net in capacity form: tensors in and out, all of fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shiplap_sparse3d as sparse3d
import shiplap_sparse3d.spconv as spconv
from shiplap.packaging import package_model
from shiplap.plugin_api.containers import leaves
from shiplap.plugin_api.exporting import computed_sizes_unguarded
from shiplap_sparse3d.demo.model import GroundNet
from shiplap_sparse3d.demo.tiles import POINT_FEATURES, VOXEL_FEATURES
from shiplap_sparse3d.export import FixedNumbers
from shiplap_testing.deployed import compiled_runner, run_without_python
from tests.sparse3d.consumers.specimens import Specimen
from tests.sparse3d.scenes import scene

GRID = (12, 10, 8)
ROWS, COARSE = 300, 250


class UNet(nn.Module):
    """Two levels, a skip connection, every kind of table."""

    def __init__(self, capacity: int | None = COARSE) -> None:
        super().__init__()
        self.enter = sparse3d.Sequential(sparse3d.SubMConv3d(5, 8, 3), sparse3d.BatchNorm(8), nn.ReLU())
        self.down = sparse3d.Sequential(
            sparse3d.SparseConv3d(8, 16, 2, 2, capacity=capacity),
            sparse3d.BatchNorm(16),
            nn.ReLU(),
            sparse3d.SubMConv3d(16, 16, 3),
        )
        self.up = sparse3d.SparseInverseConv3d(16, 8, 2)
        self.leave = sparse3d.Sequential(
            sparse3d.SubMConv3d(16, 8, 3), sparse3d.BatchNorm(8), nn.ReLU(), nn.Linear(8, 3)
        )

    def rows(self, x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
        x = self.enter(x)
        return self.leave(sparse3d.cat([x, self.up(self.down(x))]))

    def forward(self, feats: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        y = self.rows(sparse3d.SparseTensor(feats, coords, GRID, 2, padded=True))
        return torch.where(y.is_voxel, y.feats, 0)


def padded(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = scene(n, GRID, 5, dtype=torch.float32).pad(ROWS)
    return x.feats, x.coords


# --- the demonstration's network, from coordinates to the answers of points -------------------------------------------

POINTS = 500
SCENES = (ROWS, 200, 90, 1, 0)  # voxels


class Demonstration(nn.Module):
    """``GroundNet`` on rows of which the last are padding: it builds every table itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GroundNet(16, 3)

    def forward(self, feats: Tensor, coords: Tensor, points: Tensor, inverse: Tensor) -> Tensor:
        return self.net(sparse3d.SparseTensor(feats, coords, GRID, 2, padded=True), points, inverse)


def tile(voxels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the network takes of one scene; each point lies in one of its voxels, if there is one."""
    x = scene(voxels, GRID, VOXEL_FEATURES, dtype=torch.float32).pad(ROWS)
    return x.feats, x.coords, torch.randn(POINTS, POINT_FEATURES), torch.randint(0, max(voxels, 1), (POINTS,))


def results_on_cpu(net: nn.Module, *args: Any) -> tuple[Tensor, ...]:
    """Return the tensors that ``net`` makes, as a packaged program returns them."""
    with torch.no_grad():
        return tuple([result.cpu().contiguous() for result in leaves(net(*args))])


def deployed(folder: Path, device: str) -> str:
    """Return what the runner prints of the demonstration's network in one package, over five scenes."""
    net = Demonstration().to(device).eval()
    with torch.no_grad():
        program = torch.export.export(net, tuple(t.to(device) for t in tile(200)))
    package = package_model(program, folder / "ground.pt2").path
    tiles = [tile(n) for n in SCENES]
    scenes = [(inputs, results_on_cpu(net, *(t.to(device) for t in inputs))) for inputs in tiles]
    done = run_without_python(compiled_runner(folder, device), package, scenes, device, 1e-3)
    return str(done.stdout + done.stderr)


def use_other_statistics(net: nn.Module) -> nn.Module:
    """Return the network with statistics of batch norm that are not the initial ones, for inference."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.uniform_(-0.1, 0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return net.eval()


class Fixed(nn.Module):
    """A network of tensors alone. Other arguments are those of one call, in a program also what it reads."""

    def __init__(self, net: nn.Module, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.net, self.others = net, [a for a in args if not isinstance(a, Tensor)]
        with FixedNumbers() as read, torch.no_grad():
            net(*args)
        self.numbers = read.numbers

    def forward(self, *tensors: Tensor) -> Any:
        if not torch.compiler.is_compiling():  # what the program has to equal: a scene's own numbers
            return self.net(*tensors, *self.others)
        with FixedNumbers(self.numbers):
            return self.net(*tensors, *self.others)


def exported_specimen(
    specimen: Specimen, device: str = "cpu", rows: int = 90, most: int = 1000
) -> tuple[nn.Module, Any]:
    """Return a network of a state dict, and its exported program for 2 to ``most`` rows."""
    torch.manual_seed(0)
    trained = use_other_statistics(specimen.make(spconv))
    net = specimen.make(spconv).eval()
    net.load_state_dict(trained.state_dict())
    args = [a.to(device) if isinstance(a, Tensor) else a for a in specimen.inputs(rows, 0)]
    fixed = Fixed(net.to(device), tuple(args)).eval()
    tensors = tuple([a for a in args if isinstance(a, Tensor)])
    any_rows = torch.export.Dim("rows", min=2, max=most)
    shapes = (tuple([{0: any_rows} if len(t) == rows else None for t in tensors]),)
    with torch.no_grad(), computed_sizes_unguarded():
        return fixed, torch.export.export(fixed, tensors, dynamic_shapes=shapes, strict=False)


def scenes_of(
    specimen: Specimen, net: nn.Module, device: str = "cpu", sizes: Sequence[int] = (90, 130, 77, 200, 150)
) -> list[tuple[Any, Any]]:
    """Return scenes of ``sizes`` rows with the results of ``net`` in this process."""
    made = []
    for seed, n in enumerate(sizes):
        tensors = tuple([a for a in specimen.inputs(n, seed) if isinstance(a, Tensor)])
        made.append((tensors, results_on_cpu(net, *(t.to(device) for t in tensors))))
    return made
