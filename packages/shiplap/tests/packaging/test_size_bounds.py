"""A package takes every size for which its program was exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shiplap.packaging import model as packaging
from shiplap.packaging.model import package_model
from shiplap.torch_private.symbolic_sizes import computed_sizes_unguarded, size_bounds
from shiplap_testing.support import fails


class Blocks(nn.Module):
    """A result with one row for every 64 rows of the input, as the tables of sparse convolutions have."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange((x.shape[0] + 63) // 64)[:, None] * 2.0 + x[:1]


def exported(least: int, most: int | None) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=least, max=most)
    with torch.no_grad(), computed_sizes_unguarded():
        return torch.export.export(Blocks(), (torch.randn(200, 8),), dynamic_shapes=({0: rows},), strict=False)


@pytest.mark.long  # a package is compiled
def test_a_package_takes_sizes_of_which_a_computed_one_is_1(tmp_path: Path) -> None:
    """Inductor would add guards for 65 rows and more, and for 512 rows and fewer."""
    path = package_model(exported(2, 4096), tmp_path / "blocks.pt2").path
    loaded = torch._inductor.aoti_load_package(str(path))
    for rows in (2, 60, 64, 65, 513, 4096):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(loaded(x), Blocks()(x), rtol=0, atol=0)
    for rows in (1, 4097):
        with pytest.raises(RuntimeError):
            loaded(torch.randn(rows, 8))


def guarding(compare: Callable[[Any], object]) -> Callable[..., None]:
    """Return a compilation that adds a guard, the comparison ``compare`` of the number of rows, and writes nothing."""

    def compile_package(program: torch.export.ExportedProgram, path: Path, options: object) -> None:
        x = next(node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
        assert compare(x.shape[0])

    return compile_package


@pytest.mark.parametrize(
    ("most", "compare", "got"),
    [
        (4096, lambda rows: rows > 64, "x.shape[0] in 65..4096"),
        (4096, lambda rows: rows <= 512, "x.shape[0] in 2..512"),
        (4096, lambda rows: rows == 200, "x.shape[0] in 200..200"),
        (None, lambda rows: rows > 64, "x.shape[0] in 65.."),
    ],
)
def test_a_compilation_for_fewer_sizes_is_refused(
    most: int | None,
    compare: Callable[[Any], object],
    got: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(packaging, "compile_package", guarding(compare))
    program = exported(2, most)
    for _ in range(2):  # the guard of the first call is still there in the second one
        with fails("SL325", got=got, expected=f"2..{most or ''}"):
            package_model(program, tmp_path / "blocks.pt2")
    assert not list(tmp_path.iterdir())


def test_a_limit_of_indices_is_not_refused(tmp_path: Path) -> None:
    """Without a declared upper end, Inductor may compile for as many rows as 32-bit indices reach."""
    program = exported(2, None)
    guarding(lambda rows: rows * 8 < 2**31)(program, tmp_path, {})
    assert size_bounds(program) == {"x.shape[0]": ((2, None), (2, 2**28 - 1))}
    packaging._refuse_narrowed(program, tmp_path)


@pytest.mark.parametrize("least", [0, 1])
def test_declared_sizes_below_two_are_not_missed(least: int, tmp_path: Path) -> None:
    """``Dim("rows")`` declares sizes from 0 on. Torch exports it for sizes from 2 on."""
    packaging._refuse_narrowed(exported(least, None), tmp_path)
    packaging._refuse_narrowed(doubled(least, 64), tmp_path)


def doubled(least: int, most: int) -> torch.export.ExportedProgram:
    """Return a program with an input of which one size is twice that of another one."""
    rows = torch.export.Dim("rows", min=least, max=most)
    inputs, shapes = (torch.randn(6, 3), torch.randn(12, 3)), {"x": {0: rows}, "y": {0: 2 * rows}}
    return torch.export.export(Twice(), inputs, dynamic_shapes=shapes, strict=False)


class Twice(nn.Module):
    """A sum with each row of ``y``, which has two for every row of ``x``."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.repeat(2, 1) + y
