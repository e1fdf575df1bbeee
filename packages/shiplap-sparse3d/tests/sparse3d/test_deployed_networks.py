"""Networks of sparse layers as packages that a program without Python runs, and what such a program refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shiplap.errors import ShiplapError
from shiplap.packaging import package_model
from shiplap.plugin_api.containers import leaves
from shiplap_sparse3d import ops, steps
from shiplap_testing.deployed import compiled_runner, run_without_python
from shiplap_testing.effort import sampled
from tests.sparse3d.consumers.detectors import DETECTORS
from tests.sparse3d.consumers.hybrids import HYBRIDS
from tests.sparse3d.consumers.specimens import GRID, SPECIMENS, Specimen, block, cells
from tests.sparse3d.nets import UNet, exported_specimen, padded, scenes_of

ALL = SPECIMENS | DETECTORS | HYBRIDS
NAMES = [name for name in ALL if not name.startswith("TRELLIS")]  # those take the grid from the coordinates
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled_runner(tmp_path_factory.mktemp("runner"), "cpu")


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_is_one_file_that_a_program_without_python_runs(name: str, runner: Path, tmp_path: Path) -> None:
    net, program = exported_specimen(ALL[name])
    package = package_model(program, tmp_path / "net.pt2").path
    done = run_without_python(runner, package, scenes_of(ALL[name], net), "cpu", 1e-5)
    assert done.returncode == 0, done.stdout + done.stderr
    print(name, done.stdout.replace("\n", ", "))


PLAIN = {"chosen_rows", "offset_table", "offset_cells"}  # ops that Python runs on every device


@pytest.mark.parametrize(
    "name", sampled(["Decoder", "Sequence4D", "MinkUNet", "SENet"], long=["Sequence4D", "MinkUNet", "SENet"])
)
def test_programs_for_files_have_no_op_that_only_python_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Here the device of a program is the CPU. On a GPU these are kernels of Python as well.
    for module in (steps, ops):
        monkeypatch.setattr(module, "runs_without_python", lambda *_: torch.compiler.is_exporting())
    net, program = exported_specimen(ALL[name])
    called = {str(node.target).split(".")[1] for node in program.graph.nodes if "sparse3d" in str(node.target)}
    assert not called & (PLAIN | {"unique_coords", "out_coords"})
    for given, wanted in scenes_of(ALL[name], net):
        torch.testing.assert_close(leaves(program.module()(*given)), list(wanted))


ON_CUDA = {n: ALL[n] for n in ("PTv3", "OACNN", "VoxelBackBone8x", "SparseEncoder", "UNetV2")}
ON_CUDA |= {"UNet": Specimen(lambda _: UNet(), lambda n, _: padded(n))}


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("name", sampled(ON_CUDA, long=["OACNN", "SparseEncoder", "UNet"]))
def test_networks_are_one_file_on_cuda(name: str, tmp_path: Path) -> None:
    net, program = exported_specimen(ON_CUDA[name], "cuda")
    package = package_model(program, tmp_path / "net.pt2").path
    scenes = scenes_of(ON_CUDA[name], net, "cuda")
    done = run_without_python(compiled_runner(tmp_path, "cuda"), package, scenes, "cuda", 2e-3)
    assert done.returncode == 0, done.stdout + done.stderr
    print(name, done.stdout.replace("\n", ", "))


class Wide(nn.Module):
    """A strided layer and its inverse in a grid with room for many voxels."""

    def __init__(self, sp: Any) -> None:
        super().__init__()
        self.sp, self.enter = sp, block(sp, 4, 16, "a")
        # One output for a voxel at most: a proof of eight times as many rows takes more memory than a worker has.
        self.down = block(sp, 16, 16, "d", "spconv", kernel_size=2, stride=2)
        self.up = sp.SparseInverseConv3d(16, 8, 2, indice_key="d", bias=False)

    def forward(self, features: Tensor, coords: Tensor) -> Tensor:
        x = self.enter(self.sp.SparseConvTensor(features, coords, [32, 128, 128], 2))
        out: Tensor = self.up(self.down(x)).features
        return out


@pytest.mark.gpu
@CUDA
def test_a_file_takes_many_more_voxels_than_its_example_on_cuda(tmp_path: Path) -> None:
    wide = Specimen(Wide, lambda n, seed: cells(n, seed, (32, 128, 128)))
    net, program = exported_specimen(wide, "cuda", most=1 << 17)
    package = package_model(program, tmp_path / "net.pt2").path
    scenes = scenes_of(wide, net, "cuda", (60, 9000, 40000, 90, 100000))
    done = run_without_python(compiled_runner(tmp_path, "cuda"), package, scenes, "cuda", 2e-3)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout.replace("\n", ", "))


LAUNCHED = {"Classifier": "conv_table", "MinkUNet": "conv_table", "SENet": "global_sum_pool"}  # by Python, on a GPU


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("name", LAUNCHED)
def test_an_op_that_python_launches_is_named_on_cuda(name: str, tmp_path: Path) -> None:
    _, program = exported_specimen(ALL[name], "cuda")
    with pytest.raises(ShiplapError, match="SL307: ") as caught:
        package_model(program, tmp_path / "net.pt2")
    assert (caught.value.where, caught.value.got) == (
        f"sparse3d::{LAUNCHED[name]}",
        "triton, launched by Python on cuda",
    )


def hostile_inputs() -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Yield what a caller may pass by mistake, with a name of the mistake."""
    features, coords = cells(90, 0)
    z, _, x = GRID

    def changed(row: int, *values: int) -> Tensor:
        other = coords.clone()
        other[row] = torch.tensor(values, dtype=torch.int32)
        return other

    big = 2**31 - 1
    for name, values in {
        "a cell behind the grid": (0, z + 1, 0, 0),  # the network adds one
        "a column behind the grid": (0, 0, 0, x),
        "a cell before the grid": (0, 0, -1, 0),
        "the largest cell": (0, big, big, big),
        "the least cell": (0, -big - 1, 0, 0),
        "a scene too many": (2, 0, 0, 0),
        "the largest scene": (big, 0, 0, 0),
        "a negative scene": (-2, 0, 0, 0),
        "a voxel twice": tuple(coords[8].tolist()),
    }.items():
        yield name, (features, changed(7, *values))
    yield "one voxel in all rows", (features, coords[:1].repeat(90, 1))
    for dtype in (torch.int64, torch.int16, torch.uint8, torch.bool, torch.float32):
        yield f"coordinates of {dtype}", (features, coords.to(dtype))
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.complex64):
        yield f"features of {dtype}", (features.to(dtype), coords)
    yield "coordinates without scenes", (features, coords[:, 1:].contiguous())
    yield "coordinates of four axes", (features, torch.cat([coords, coords[:, :1]], 1))
    yield "coordinates of one axis", (features, coords.flatten())
    yield "a channel too few", (features[:, :3].contiguous(), coords)
    yield "a channel too many", (torch.cat([features, features[:, :1]], 1), coords)
    yield "features without channels", (features[:, 0].contiguous(), coords)
    yield "features of three axes", (features[None], coords)
    yield "features column by column", (features.t().contiguous().t(), coords)
    yield "every second row of features", (torch.cat([features, features], 1)[:, :4], coords)
    yield "fewer voxels than features", (features, coords[:50])
    yield "more voxels than features", (features[:50], coords)
    yield "no voxels", (features[:0], coords[:0])
    yield "one voxel", (features[:1], coords[:1])
    yield "more voxels than the bound", cells(1200, 0)
    yield "features alone", (features,)
    yield "an input too many", (features, coords, coords)


@pytest.mark.long
def test_wrong_inputs_are_exceptions_and_the_program_goes_on(runner: Path, tmp_path: Path) -> None:
    net, program = exported_specimen(ALL["VoxelBackBone8x"])
    package = package_model(program, tmp_path / "net.pt2").path
    good = scenes_of(ALL["VoxelBackBone8x"], net)
    scenes: list[Any] = [*good]
    wrong = list(hostile_inputs())
    assert len(wrong) == 36
    for number, (name, tensors) in enumerate(wrong):
        scenes += [(tensors, name), good[number % 5]]
    done = run_without_python(runner, package, scenes, "cpu", 1e-5)
    answers = done.stdout.splitlines()
    assert [line for line in answers if line.endswith(": not refused")] == [], done.stderr[-3000:]
    assert (done.returncode, answers[-1], len(answers)) == (0, "equal", len(scenes) + 1), done.stdout + done.stderr
    assert "SL211" in done.stderr
