"""The command ``shiplap survey``: classify every point of a scan that may be larger than memory."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from shiplap.plugin_api import verbs
from shiplap_sparse3d.cli.progress import show_progress
from shiplap_sparse3d.cli.targets import named_instance

__all__ = ["command"]

STOPPED = 130  # the exit status after Ctrl-C
EPILOG = """\b
Examples:
  shiplap survey in.laz out.laz --model ground.py:model
  shiplap survey in.laz out.laz --model ground.py:model --workers 4 --device cuda
  shiplap survey in.laz out.laz --model ground.py:model --scheduler tcp://10.0.0.1:8786

\b
Exit status:
  0  the output is written
  2  it could not run: the input, the model, the tiles, the folder, the workers or the output
  130  it was stopped by Ctrl-C"""


def command(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="A LAS, LAZ or COPC file.")],
    target: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The .las or .laz file to write.")],
    model: Annotated[str, typer.Option("--model", metavar="TARGET", help="module:name, file.py:name: a SurveyModel.")],
    tile: Annotated[int | None, typer.Option("--tile", metavar="CELLS", help="Voxels of a tile along x and y.")] = None,
    halo: Annotated[int | None, typer.Option("--halo", metavar="CELLS", help="Voxels that a tile sees around.")] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="For points and classes, or OUTPUT.survey.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the folder there when everything is done.")] = False,
    workers: Annotated[int | None, typer.Option("--workers", metavar="N", min=1, help="Local Dask workers.")] = None,
    scheduler: Annotated[str | None, typer.Option("--scheduler", metavar="ADDRESS", help="Of a Dask cluster.")] = None,
    device: Annotated[str, typer.Option("--device", help="A device; workers take the GPUs of cuda in turn.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object: what was done.")] = False,
) -> None:
    """Classify every point of a laser scan, tile by tile, in constant memory.

    The range within which points affect each other in the network is derived, and checked with a probe. The scan is cut
    into tiles with a margin of that range. The points are written in the order of the input, with new classes. The same
    command continues a run that was stopped. The work runs in this process unless --workers or --scheduler names a Dask
    cluster.
    """
    with verbs.own_stdout():
        try:
            from shiplap_sparse3d.survey import SurveyModel, survey

            module, name = verbs.load_target(model)
            loaded = named_instance(module, name or "model", SurveyModel, "SL825", f"--model {model}")
            if model.removesuffix(f":{name}").endswith(".py"):
                with contextlib.suppress(ModuleNotFoundError):  # without Dask, the survey says so
                    import cloudpickle

                    cloudpickle.register_pickle_by_value(module)  # workers need not have the file
            options: dict[str, Any] = {"tile": tile, "halo": halo, "folder": folder, "keep": keep, "workers": workers}
            with show_progress(quiet=json) as show:
                result = survey(source, target, loaded, scheduler=scheduler, device=device, progress=show, **options)
        except KeyboardInterrupt:  # the bars have ended, and erase no line any more
            verbs.note("the survey was stopped; the same command continues it")
            if workers is not None or scheduler is not None:
                # Threads of Dask would keep the process until their connections have ended.
                os._exit(STOPPED)
            raise typer.Exit(STOPPED) from None
    if json:
        verbs.emit_json(asdict(result))
    else:
        text = f"""points  {result.points:,}
tiles   {result.tiles:,} of {result.tile} x {result.tile} voxels, {result.predicted:,} predicted now
halo    {result.halo} voxels; the network sees {max(result.field.before[:2] + result.field.after[:2])}
stride  {max(result.field.stride[:2])} voxels
time    {result.seconds:.1f} s
memory  {result.peak_mb:,.0f} MB at most
output  {result.output}"""
        verbs.out().print(text, markup=False, soft_wrap=True)
