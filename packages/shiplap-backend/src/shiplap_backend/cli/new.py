"""The command ``shiplap backend new``: write a project that generates and compiles a device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shiplap.plugin_api import verbs

EPILOG = """\b
Examples:
  shiplap backend new openvino --runtime openvino       writes ./torch-openvino
  shiplap backend new mydev --runtime openvino --dir x  the device mydev, in ./x
  shiplap backend new mine --runtime ./runtime-mine     a runtime of your own, in a directory

\b
Exit status:
  0  written
  2  the name, the runtime or the directory cannot be used"""


def command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help='Name of the device, as in torch.ones(2, device="NAME").')
    ],
    runtime: Annotated[
        str,
        typer.Option(
            "--runtime", metavar="NAME|PATH", help="Vendor runtime: openvino, onednn, an installed one, or a directory."
        ),
    ],
    directory: Annotated[Path | None, typer.Option("--dir", help="Where; by default ./torch-NAME.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON value: the project.")] = False,
) -> None:
    """Write a project: settings, metadata, a build hook and the Python package of the device."""
    from shiplap_backend.project import create_project

    project = create_project(name, runtime, directory or Path(f"torch-{name}"))
    if json:
        verbs.emit_json({"directory": str(project.root), "device": project.device, "runtime": project.runtime.name})
    else:
        verbs.note(f"wrote {project.root}; next: shiplap backend build {project.root}")
