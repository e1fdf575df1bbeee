"""The command ``shiplap export-network``: a checkpoint of a sparse network as one file for onnxruntime or torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shiplap.plugin_api import error, verbs
from shiplap_sparse3d.cli.targets import named_instance

EPILOG = """\b
Examples:
  shiplap export-network ckpt.pth net.onnx --model build.py:backbone
  shiplap export-network ckpt.pth net.pt2 --model build.py:backbone --prefix backbone_3d.
  shiplap export-network model_best.pth net.onnx --model build.py:net --grid 128,128,64

\b
Exit status:
  0  the file is written
  2  it could not run: the checkpoint, the network, an op without a form, or the file"""


def command(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Of OpenPCDet, mmdet3d or Pointcept, or a plain state dict.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write: .onnx or .pt2.")],
    model: Annotated[
        str,
        typer.Option("--model", metavar="TARGET", help="module:name or file.py:name of the network, or what makes it."),
    ],
    prefix: Annotated[
        str | None, typer.Option("--prefix", help="The beginning of the names of its weights; found by default.")
    ] = None,
    project: Annotated[
        str | None,
        typer.Option("--project", help="How voxels are passed: openpcdet, mmdet3d, pointcept or plain."),
    ] = None,
    grid: Annotated[
        str | None, typer.Option("--grid", metavar="Z,Y,X", help="Cells per axis; the network's own by default.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Scenes of a call.")] = 1,
    voxels: Annotated[int, typer.Option("--voxels", min=2, help="The largest number of voxels of a call.")] = 1 << 20,
    opset: Annotated[int | None, typer.Option("--opset", help="The version of ONNX's operators.")] = None,
    no_checks: Annotated[bool, typer.Option("--no-checks", help="Leave the checks of data out.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Export a checkpoint of a sparse network as one file.

    The network's own code runs on Shiplap's layers in place of spconv. The file takes features and coordinates of any
    number of voxels. If a part cannot be exported, it is named before anything is written.
    """
    with verbs.own_stdout():
        import torch

        from shiplap_sparse3d import export
        from shiplap_sparse3d.drop_in import drop_in

        if file.suffix not in export.ENDINGS:
            raise error("SL613", where=str(file), got=file.suffix or "no suffix", expected=" or ".join(export.ENDINGS))
        if project is not None and project not in export.PROJECTS:
            raise error("SL613", where="--project", got=project, expected=", ".join(export.PROJECTS))
        held = export.read_checkpoint(checkpoint, project)
        # The network's module imports spconv when it is loaded.
        with drop_in("spconv"):
            module, name = verbs.load_target(model)
            network = named_instance(module, name or "model", torch.nn.Module, "SL840", f"--model {model}")
            found = export.load_weights(network, held, prefix)
            example = export.example_voxels(network, _cells_per_axis(network, grid), batch_size, min(65, voxels))
            program = export.trace_network(network, held.project, example, batch_size, voxels)
            ops = export.write_network(program, file, opset=opset, checks=not no_checks)
    size = file.stat().st_size
    if json:
        made = {"file": str(file), "project": held.project, "prefix": found, "bytes": size, "ops": list(ops)}
        verbs.emit_json(made)
    else:
        text = f"{file}: {size} bytes, {held.project} weights under {found!r}, with {', '.join(ops)}"
        verbs.out().print(text, markup=False, soft_wrap=True)


def _cells_per_axis(network: Any, grid: str | None) -> Sequence[int]:
    """Return the cells per axis that the string ``grid`` of the option ``--grid`` lists. If it is None, return those of
    the attribute ``sparse_shape`` or ``spatial_shape`` of ``network``, or 128 for each of three axes. Raise ``SL613``
    for a string that is not a list of numbers.
    """
    if grid is not None:
        parts = grid.split(",")
        if not all(part.strip().isdigit() for part in parts):
            raise error("SL613", where="--grid", got=grid, expected="numbers of cells, such as 41,1600,1408")
        return [int(part) for part in parts]
    own = next((getattr(network, n) for n in ("sparse_shape", "spatial_shape") if hasattr(network, n)), None)
    return [128, 128, 128] if own is None else [int(cells) for cells in own]
