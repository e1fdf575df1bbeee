"""A float that follows from a size is no constant of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.export import Dim

import shiplap as sl
from shiplap.packaging.fixed_floats import _fixes_float
from shiplap.packaging.model import package_model
from shiplap.packaging.onnx import export_onnx
from shiplap_testing.support import fails

X = torch.randn(5, 3)


class Halved(nn.Module):
    """A call of an op with half of the number of rows, as a float or as a tensor."""

    def __init__(self, op: Any, *, tensor: bool) -> None:
        super().__init__()
        self.op, self.tensor = op, tensor

    def forward(self, x: Tensor) -> Tensor:
        rows = x.new_full((), x.shape[0]) if self.tensor else x.shape[0]
        result: Tensor = self.op(x, rows / 2)
        return result


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    """A named ``Dim`` is refused by torch itself, which lets a dim that it may choose keep a guard."""
    return torch.export.export(model, (X,), dynamic_shapes=({0: Dim.DYNAMIC},))


def test_a_float_of_a_size_that_varies_is_refused(ns: str, tmp_path: Path) -> None:
    @sl.op(f"{ns}::scaled")
    def scaled(x: Float[Tensor, "n c"], by: float) -> Float[Tensor, "n c"]:
        return x * by

    program = exported(Halved(scaled, tensor=False))
    for write, name in ((export_onnx, "it.onnx"), (package_model, "it.pt2")):
        with fails("SL324", got="(x.size()[0] / 2) == 2.5"):
            write(program, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_the_number_as_a_tensor_is_right_at_every_size(ns: str, tmp_path: Path) -> None:
    @sl.op(f"{ns}::scaled")
    def scaled(x: Float[Tensor, "n c"], by: Float[Tensor, ""]) -> Float[Tensor, "n c"]:
        return x * by

    session = onnxruntime.InferenceSession(
        str(export_onnx(exported(Halved(scaled, tensor=True)), tmp_path / "it.onnx").path)
    )
    for rows in (5, 2, 9):
        x = torch.randn(rows, 3)
        (result,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(result), x * (rows / 2))


@pytest.mark.parametrize(
    ("guard", "fixes"),
    [
        ("(L['x'].size()[0] / 2) == 2.5", True),
        ("4 == (L['x'].size()[0] / 2)", True),
        ("math.sqrt(L['x'].size()[0]) == 2.23606797749979", True),
        ("(L['x'].size()[0] // (L['x'].size()[0] // 4)) == 4", False),
        ("(L['x'].size()[0] % 2) == 1", False),
        ("(L['x'].size()[0] / 2) == (L['y'].size()[0] / 3)", False),
        ("(L['x'].size()[0] / 2) >= 2.5", False),
        ("L['x'].size()[0] == L['y'].size()[0]", False),
    ],
)
def test_a_guard_that_fixes_a_float(guard: str, fixes: bool) -> None:
    assert _fixes_float(guard) is fixes
