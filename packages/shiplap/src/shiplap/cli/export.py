"""``shiplap export``: write a model with declared ops as one file that runs without Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shiplap.cli import console
from shiplap.cli.model import load_model
from shiplap.errors import ShiplapError, error, first_line

EPILOG = """\b
Examples:
  shiplap export mylib.model model.onnx               for onnxruntime, without torch
  shiplap export mylib.model:net net.pt2              for torch's own loader in C++ and Python
  shiplap export model.py:net net.onnx --dynamic      sizes vary where the model allows it

\b
Exit status:
  0  the file is written
  1  the model cannot be exported: the reason is printed
  2  the model does not exist, or the file has another suffix"""
# The suffix of the file decides its form.
WRITERS = {".onnx": "ONNX", ".pt2": "AOTInductor"}


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="module[:name] or path/to/file.py[:name].")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write: .onnx or .pt2.")],
    inputs: Annotated[
        str, typer.Option("--inputs", metavar="NAME", help="The function in the same file that returns the arguments.")
    ] = "example_inputs",
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Let each size of the inputs vary where the model allows it.")
    ] = False,
    opset: Annotated[
        int | None, typer.Option("--opset", help="The version of ONNX's operators; the default is torch's.")
    ] = None,
    no_checks: Annotated[bool, typer.Option("--no-checks", help="Leave the checks of data and sizes out.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Export a model with declared ops.

    An .onnx file holds each declared op as a function, made of standard operators from the op's reference. onnxruntime
    runs such a file on any machine. A .pt2 file holds the compiled model and the native kernels of its ops, for this
    platform and torch.
    """
    if file.suffix not in WRITERS:
        expected = " or ".join(WRITERS)
        raise error("SL613", where=str(file), got=file.suffix or "no suffix", expected=expected)
    with console.own_stdout():
        _, called, args = load_model(model, inputs)
        try:
            program = _export_program(called, args, dynamic)
            ops = _write_file(program, file, opset, not no_checks)
        except ShiplapError as e:
            # These ids say that the model cannot be exported, which is a result and no wrong command.
            if e.id not in ("SL321", "SL307", "SL404"):
                raise
            console.err().print(str(e), markup=False, soft_wrap=True)
            raise typer.Exit(console.FAILED) from None
    form, size = WRITERS[file.suffix], file.stat().st_size
    with_ops = f" with {', '.join(ops)}" if ops else ""
    result = {"file": str(file), "form": form, "bytes": size, "ops": list(ops)}
    console.show(result, [f"{file}: {form}, {size} bytes{with_ops}"], as_json=json)


def _export_program(called: Any, args: tuple[Any, ...] | dict[str, Any], dynamic: bool) -> Any:
    """Return the program that ``torch.export`` makes of ``called``, a model or function, for the arguments ``args``. If
    ``dynamic`` is true, sizes of the inputs may vary. Otherwise they are fixed. Raise ``SL321``, with torch's reason,
    if the export fails.
    """
    import torch
    from torch.export import Dim, export

    from shiplap.rewrite.survey import bind_by_name
    from shiplap.torch_private.graph_objects import map_leaves

    if isinstance(args, dict):
        called, args = bind_by_name(called, args)
    module = called if isinstance(called, torch.nn.Module) else _as_module(called)
    # An argument that is not a tensor has no sizes.
    shapes = map_leaves(lambda x: [Dim.AUTO] * x.dim() if isinstance(x, torch.Tensor) else None, tuple(args))
    try:
        # Dim.AUTO lets torch fix those sizes that the model needs as constants.
        return export(module.eval(), tuple(args), dynamic_shapes=shapes if dynamic else None, strict=False)
    except ShiplapError:
        raise
    except Exception as e:
        raise error(
            "SL321",
            what="torch.export refuses the model",
            where=type(module).__name__,
            got=first_line(e),
            expected="a model that torch.export takes",
            fix="see shiplap doctor for what breaks the graph",
        ) from e


def _as_module(called: Any) -> Any:
    """Return a module whose ``forward`` calls the function ``called``. Torch exports only modules."""
    import torch

    class Wrapped(torch.nn.Module):
        """A module that calls the function ``called``, the argument of the enclosing function ``_as_module``."""

        def forward(self, *args: Any) -> Any:
            """Return the result of ``called`` for ``args``."""
            return called(*args)

    return Wrapped()


def _write_file(program: Any, file: Path, opset: int | None, checks: bool) -> tuple[str, ...]:
    """Write the exported program to ``file`` and return the names of its declared ops.

    The suffix of ``file`` is ``.onnx`` or ``.pt2``, and determines the format. ``opset`` is the version of ONNX's
    operators, or None for torch's default. If ``checks`` is false, tests of data and sizes are left out of the file.
    """
    if file.suffix == ".onnx":
        from shiplap.packaging.onnx import export_onnx

        return export_onnx(program, file, opset=opset, checks=checks).ops
    from shiplap.packaging.model import package_model

    return package_model(program, file, checks=checks).ops
