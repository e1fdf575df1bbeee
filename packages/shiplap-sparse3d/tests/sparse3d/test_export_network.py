"""``shiplap export-network``: checkpoints of three projects' layouts as one file."""

from __future__ import annotations

import json
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

from shiplap.errors import ShiplapError
from shiplap.plugin_api.containers import leaves
from shiplap_sparse3d import export, spconv
from shiplap_sparse3d.cli import export_network
from shiplap_sparse3d.drop_in import drop_in

pytestmark = pytest.mark.usefixtures("onnx_operators")
NETWORKS = """
import spconv.pytorch as spconv
from torch import nn

class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.sparse_shape = [6, 10, 8]
        self.enter = spconv.SparseSequential(
            spconv.SubMConv3d(5, 8, 3, bias=False, indice_key="a"), nn.BatchNorm1d(8), nn.ReLU())
        self.down = spconv.SparseConv3d(8, 4, 3, 2, padding=1, indice_key="b")

    def layers(self, features, coords, batch_size):
        x = spconv.SparseConvTensor(features, coords.int(), self.sparse_shape, batch_size)
        return self.down(self.enter(x))

class OfOpenPCDet(Layers):
    def forward(self, batch_dict):
        out = self.layers(batch_dict["voxel_features"], batch_dict["voxel_coords"], batch_dict["batch_size"])
        batch_dict.update({"encoded_spconv_tensor": out, "encoded_spconv_tensor_stride": 8})
        return batch_dict

class OfMmdet3d(Layers):
    def forward(self, voxel_features, coors, batch_size):
        return self.layers(voxel_features, coors, batch_size).dense().flatten(1, 2)

class OfPointcept(Layers):
    def forward(self, input_dict):
        import torch
        offset, cells = input_dict["offset"], input_dict["grid_coord"]
        scene = torch.searchsorted(offset, torch.arange(cells.shape[0]), right=True)
        return self.layers(input_dict["feat"], torch.cat([scene[:, None], cells], 1), offset.shape[0]).features

openpcdet, mmdet3d, pointcept = OfOpenPCDet, OfMmdet3d, OfPointcept
"""


class HistoryBuffer:
    """As mmengine keeps losses: an object of a class of its own, with an array."""

    def __init__(self) -> None:
        self._log_history = np.array([0.5, 0.25])


def optimizer_state() -> dict[str, Any]:
    """The state of an optimizer after a step."""
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def openpcdet_layout(weights: dict[str, Tensor]) -> dict[str, Any]:
    """What ``tools/train_utils/train_utils.py`` of OpenPCDet saves."""
    named = {f"backbone_3d.{k}": v for k, v in weights.items()}
    state = OrderedDict({"global_step": torch.zeros(1), **named, "dense_head.conv_cls.weight": torch.randn(2, 4, 1, 1)})
    made = {"epoch": 3, "it": 40, "model_state": state, "optimizer_state": optimizer_state()}
    return {**made, "version": "pcdet+0.6.0+8caccce"}


def mmdet3d_layout(weights: dict[str, Tensor]) -> dict[str, Any]:
    """What the runner of mmengine saves: with its log, which holds objects of its own classes."""
    named = {f"pts_middle_encoder.{k}": v for k, v in weights.items()}
    state = OrderedDict({**named, "pts_bbox_head.shared_conv.conv.weight": torch.randn(2, 4, 3, 3)})
    made = {
        "meta": {"epoch": 3, "cfg": "model = dict()", "seed": 1},
        "state_dict": state,
        "optimizer": optimizer_state(),
    }
    log = {"log_scalars": OrderedDict({"train/loss": HistoryBuffer()}), "runtime_info": {"lr": np.float64(0.1)}}
    return {**made, "message_hub": log, "param_schedulers": [{"last_step": 3}]}


def pointcept_layout(weights: dict[str, Tensor]) -> dict[str, Any]:
    """What ``CheckpointSaver`` of Pointcept saves: the best value is a scalar of numpy."""
    state = OrderedDict({f"module.backbone.{k}": v for k, v in weights.items()})
    made = {"epoch": 3, "state_dict": state, "optimizer": optimizer_state(), "scheduler": {"last_epoch": 3}}
    return {**made, "scaler": None, "best_metric_value": np.mean([0.5, 0.75])}


LAYOUTS = {"openpcdet": openpcdet_layout, "mmdet3d": mmdet3d_layout, "pointcept": pointcept_layout}


def voxels(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Voxels of two scenes, sorted by scene, each of which has some."""
    rng = torch.Generator().manual_seed(seed)
    number = torch.cat([torch.randperm(480, generator=rng)[: n - n // 2], 480 + torch.randperm(480)[: n // 2]])
    return torch.randn(n, 5, generator=rng), torch.stack(torch.unravel_index(number, (2, 6, 10, 8)), 1).int()


def made(project: str, folder: Path) -> tuple[Any, Path, Path]:
    """A network with random weights, its checkpoint, and the file with its code."""
    code, checkpoint = folder / f"build_{project}.py", folder / f"{project}.pth"
    code.write_text(NETWORKS)
    names: dict[str, Any] = {}
    torch.manual_seed(1)
    with drop_in("spconv"):
        exec(NETWORKS, names)
        network = names[project]()
    for buffer in network.buffers():
        if buffer.is_floating_point():
            torch.nn.init.uniform_(buffer, 0.5, 2)
    # OpenPCDet saves in torch's old format.
    torch.save(
        LAYOUTS[project](network.state_dict()), checkpoint, _use_new_zipfile_serialization=project != "openpcdet"
    )
    return network.eval(), checkpoint, code


@pytest.mark.long
@pytest.mark.parametrize("project", LAYOUTS)
def test_a_checkpoint_becomes_one_file(project: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network, checkpoint, code = made(project, tmp_path)
    file = tmp_path / "net.onnx"
    export_network.command(checkpoint, file, f"{code}:{project}", batch_size=2, json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["project"], told["ops"][0]) == (project, "sparse3d::conv")
    session = onnxruntime.InferenceSession(str(file))
    module = export.Deployed(network, project, 2)
    for seed, n in enumerate((30, 4, 200)):
        features, coords = voxels(n, seed)
        with torch.no_grad():
            want = leaves(module(features, coords))
        got = session.run(None, {"features": features.numpy(), "coords": coords.numpy()})
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(torch.from_numpy(a), b, rtol=1e-4, atol=1e-4)


def test_weights_are_found_by_their_names_and_what_is_missing_is_named(tmp_path: Path) -> None:
    network, checkpoint, _ = made("openpcdet", tmp_path)
    held = export.read_checkpoint(checkpoint)
    assert held.project == "openpcdet"
    before = {name: value.clone() for name, value in network.state_dict().items()}
    for parameter in network.parameters():
        torch.nn.init.zeros_(parameter)
    assert export.load_weights(network, held) == "backbone_3d."
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    with pytest.raises(ShiplapError, match=r"no head\.enter\.0\.weight") as caught:
        export.load_weights(network, held, "head.")
    assert caught.value.id == "SL840"
    del held.weights["backbone_3d.down.bias"]  # type: ignore[attr-defined]
    with pytest.raises(ShiplapError, match="no place with all of"):
        export.load_weights(network, held)


@pytest.mark.parametrize("project", LAYOUTS)
def test_the_weights_of_a_training_run_are_read_and_no_other_object_is_made(
    project: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, checkpoint, _ = made(project, tmp_path)
    monkeypatch.setattr(HistoryBuffer, "__new__", lambda *args: pytest.fail("an object of the checkpoint is made"))
    held = export.read_checkpoint(checkpoint)
    assert held.project == project
    want = {name: value.clone() for name, value in network.state_dict().items()}
    for value in network.state_dict().values():
        value.zero_()
    assert export.load_weights(network, held) in ("backbone_3d.", "pts_middle_encoder.", "backbone.")
    assert all(torch.equal(value, want[name]) for name, value in network.state_dict().items())


def forbidden() -> None:
    raise AssertionError("code of the checkpoint runs")


class Runs:
    """An object whose pickle calls a function."""

    def __reduce__(self) -> Any:
        return forbidden, ()


@pytest.mark.parametrize("old", [False, True])
def test_code_in_a_checkpoint_does_not_run(old: bool, tmp_path: Path) -> None:
    content = {"model": {"net.a": torch.ones(2), "_extra_state": Runs()}, "more": [Runs(), slice(1, 2)]}
    torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=not old)
    held = export.read_checkpoint(tmp_path / "x.pth")
    assert (held.project, list(held.weights)) == ("plain", ["net.a"])


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShiplapError, match="pass the path of a checkpoint that exists") as caught:
        export.read_checkpoint(tmp_path / "x.pth")
    assert (caught.value.id, caught.value.got) == ("SL840", "No such file or directory")


def test_a_compressed_pickle_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"cnot_there\nName\n.")
    assert export._names_in(tmp_path / "x.pth") == set()


@pytest.mark.parametrize("wrapped", ["state_dict", "model_state_dict", "model", "net", None])
def test_wrapped_modules_and_nested_state_dicts_are_found(wrapped: str | None, tmp_path: Path) -> None:
    weights = {"module._orig_mod.enter.weight": torch.ones(2), "module._orig_mod.n": torch.zeros(())}
    torch.save({"epoch": 1, wrapped: weights} if wrapped else weights, tmp_path / "x.pth")
    assert list(export.read_checkpoint(tmp_path / "x.pth", "plain").weights) == ["enter.weight", "n"]


def test_a_mapping_that_holds_itself_is_read(tmp_path: Path) -> None:
    weights: dict[str, Any] = {"enter.weight": torch.ones(2)}
    weights["model"] = weights
    torch.save(weights, tmp_path / "x.pth")
    assert list(export.read_checkpoint(tmp_path / "x.pth").weights) == ["enter.weight"]


class Pointwise(torch.nn.Module):
    """As many input as output channels, and a kernel of one cell: no shape of these tells a layout."""

    def __init__(self, ci: int = 4) -> None:
        super().__init__()
        self.enter = spconv.SubMConv3d(ci, 4, 3, bias=False, indice_key="a")
        self.one = spconv.SubMConv3d(4, 4, 1, bias=False, indice_key="b")
        self.last = spconv.SubMConv3d(4, 4, 3, bias=False, indice_key="a")


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_checkpoint_has_one_layout_that_of_all_its_kernels(axis: int, tmp_path: Path) -> None:
    network = Pointwise(5)
    want = {name: value.clone() for name, value in network.state_dict().items()}
    old = {n: v.movedim(0, axis) for n, v in want.items()} | {"one.weight": want["one.weight"].reshape(1, 1, 1, 4, 4)}
    for value in network.state_dict().values():
        value.zero_()
    export.load_weights(network, export.Checkpoint(tmp_path, "plain", old))
    assert all(torch.equal(value, want[name]) for name, value in network.state_dict().items())


def test_a_kernel_of_spconv_1_gets_the_layout_of_spconv_2(tmp_path: Path) -> None:
    network, _, _ = made("mmdet3d", tmp_path)
    weights = network.state_dict()
    old = {n: v.movedim(0, -1).contiguous() if v.dim() == 5 else v for n, v in weights.items()}
    want = network.enter[0].weight.detach().clone()
    torch.nn.init.zeros_(network.enter[0].weight)
    export.load_weights(network, export.Checkpoint(tmp_path, "plain", old))
    assert torch.equal(network.enter[0].weight, want)


@pytest.mark.parametrize("most", [2, 3, 65])
def test_an_example_has_no_more_voxels_than_a_call_may_have(most: int) -> None:
    features, coords = export.example_voxels(torch.nn.Identity(), (4, 4, 4), 2, most)
    assert 2 <= len(coords) <= most
    assert len(features) == len(coords)
    assert coords[-1].tolist() == [1, 3, 3, 3]


def test_a_network_of_another_project_is_named(tmp_path: Path) -> None:
    network, _, _ = made("pointcept", tmp_path)
    with pytest.raises(ShiplapError, match="--project") as caught:
        export.trace_network(network, "plain", voxels(20, 0), 2, 100)
    assert (caught.value.id, caught.value.where) == ("SL840", "OfPointcept")


@pytest.mark.parametrize("content", ["text", "a list", "no tensors"])
def test_another_file_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    if content == "text":
        path.write_text("weights")
    else:
        torch.save([1] if content == "a list" else {"state_dict": {"a": 1}}, path)
    with pytest.raises(ShiplapError) as caught:
        export.read_checkpoint(path)
    assert (caught.value.id, caught.value.where) == ("SL840", str(path))


@pytest.mark.parametrize(
    ("words", "id"),
    [
        ({"file": Path("net.tflite")}, "SL613"),
        ({"project": "detectron"}, "SL613"),
        ({"grid": "8;8"}, "SL613"),
        ({"model": "absent"}, "SL840"),
    ],
)
def test_what_cannot_be_done_is_said_before_the_work(words: dict[str, Any], id: str, tmp_path: Path) -> None:
    _, checkpoint, code = made("mmdet3d", tmp_path)
    target = f"{code}:{words.pop('model', 'mmdet3d')}"
    given = {"checkpoint": checkpoint, "file": tmp_path / "net.onnx", "model": target, **words}
    with pytest.raises(ShiplapError) as caught:
        export_network.command(**given)
    assert caught.value.id == id
    assert not (tmp_path / "net.onnx").exists()
