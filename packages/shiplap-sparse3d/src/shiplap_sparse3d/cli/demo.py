"""The command ``shiplap demo``: run the demonstration and print its numbers and the path of the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shiplap.plugin_api import error, verbs
from shiplap_sparse3d.cli.progress import show_progress
from shiplap_sparse3d.errors import require_packages

if TYPE_CHECKING:
    from shiplap_sparse3d.demo import DemoResult

__all__ = ["command"]

EPILOG = """\b
Examples:
  shiplap demo                       writes shiplap-report/demo.html
  shiplap demo --quick --no-audit    smaller network, fewer steps, ops not audited
  shiplap demo --device cuda --output report
  shiplap demo --quick --json | jq .graph_breaks
  shiplap demo --input scan.laz --classes 2,9      anybody's classified scan
  shiplap demo --input scan.laz --unit 0.3048      one whose coordinates are feet

\b
Exit status:
  0  it ran
  1  it ran, but the graph broke or an audited op failed a check
  2  it could not run: optional packages, device, output directory, or a scan without classes"""

DEVICES = ("cpu", "cuda")


def command(
    quick: Annotated[bool, typer.Option("--quick", help="A smaller network and fewer steps.")] = False,
    device: Annotated[str, typer.Option("--device", help="Device to run on.")] = "cpu",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Directory for the report; created if absent.")
    ] = Path("shiplap-report"),
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights and tiles.")] = 0,
    source: Annotated[
        Path | None, typer.Option("--input", metavar="SCAN", help="A classified LAS, LAZ or COPC file to learn from.")
    ] = None,
    classes: Annotated[str, typer.Option("--classes", help="Its classes that are ground, as 2,9.")] = "2",
    unit: Annotated[float, typer.Option("--unit", help="Metres in a unit of its coordinates.")] = 1.0,
    no_audit: Annotated[bool, typer.Option("--no-audit", help="Do not audit the ops that were used.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object: everything measured.")] = False,
) -> None:
    """Train a compiled sparse U-Net on a laser scan, and report what was measured.

    The scan comes with Shiplap, or is one of yours. The network learns which points are ground. It is judged on a part
    of the scan that it has not seen, and compared with the best rules of two numbers. Graphs, breaks and recompiles are
    counted, compiled code is compared with eager code, and the ops are audited.
    """
    require_packages("shiplap demo", "demo", "laspy", "lazrs", "matplotlib")
    _parse_codes(classes)
    # All options are checked before anything slow is imported.
    if not 0 < unit < 1e6:
        raise error("SL613", where="--unit", got=unit, expected="metres above 0, as 0.3048 for feet")
    _require_device(device)
    verbs.require_directory(output)
    from shiplap_sparse3d.demo import DemoSettings, run_demo

    settings = DemoSettings(quick, device, output, seed, not no_audit, source, _parse_codes(classes), unit)
    with verbs.own_stdout(), show_progress(quiet=json) as progress:
        result = run_demo(settings, progress)
    if json:
        verbs.emit_json(result.json())
    else:
        _print_demo(result)
    if result.graph_breaks or any(verdicts.fail for verdicts in result.audits.values()):
        raise typer.Exit(verbs.FAILED)


def _parse_codes(text: str) -> tuple[int, ...]:
    """Return the class codes in the string ``text``, such as ``(2, 9)`` for ``"2,9"``. Raise ``SL613`` unless it has
    numbers from 0 to 255, separated by commas.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) <= 255 for part in parts):
        raise error("SL613", where="--classes", got=repr(text), expected="class codes from 0 to 255, as 2,9")
    return tuple(int(part) for part in parts)


def _require_device(device: str) -> None:
    """Raise ``SL605`` if the demo has no kernels for ``device`` (neither CPU nor CUDA) or the device does not exist."""
    if device.partition(":")[0] not in DEVICES:
        raise error(
            "SL605",
            where=f"--device {device}",
            got=f"{device!r}",
            expected=" or ".join(DEVICES),
            what="the demo does not run on this device",
            fix="run 'shiplap demo --device cpu'",
        )
    verbs.require_device(device)


def _print_demo(result: DemoResult) -> None:
    """Print the main numbers of ``result``, the verdicts of its audits and the path of its HTML report to stdout."""
    from shiplap_sparse3d.demo.report import VERDICTS, headline_rows

    screen = verbs.out()
    shown = headline_rows(result)
    wide, value_wide = max(len(label) for label, _, _ in shown), max(len(value) for _, value, _ in shown)
    for label, value, note in shown:
        screen.print(f"{label:{wide}}  {value:>{value_wide}}  {note}".rstrip(), markup=False)
    for op, verdicts in result.audits.items():
        more = f", {verdicts.incomplete} incomplete" if verdicts.incomplete else ""
        more += f", {verdicts.fail} fail ({', '.join(verdicts.failed)})" if verdicts.fail else ""
        screen.print(f"{'audit of ' + op:{wide}}  {verdicts.ok} ok, {verdicts.skip} skip{more}", markup=False)
    if result.audits:
        screen.print(VERDICTS, markup=False)
    screen.print(f"report: {result.html}", markup=False)
