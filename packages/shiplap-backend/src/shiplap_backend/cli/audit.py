"""``shiplap backend audit``: PyTorch's OpInfo database on the device against the CPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shiplap.plugin_api import verbs

EPILOG = """\b
Examples:
  shiplap backend audit torch-openvino                           float32, every operator
  shiplap backend audit torch-openvino --dtypes f32,bf16,i64     several dtypes
  shiplap backend audit torch-openvino --match '^add|^mm$'       some operators
  shiplap backend audit torch-openvino --ops add,mm --samples 3  these, quickly
  shiplap backend audit torch-openvino --jobs 8                  several processes at a time
  shiplap backend audit torch-openvino --json > opinfo.json      every verdict, with its reason
  shiplap backend audit torch-openvino --models                  whole models: inference and a training step
  shiplap backend audit torch-openvino --models --match '^gpt2$' one of them

\b
The same test cases run under pytest: cd torch-openvino && pytest test_opinfo.py -k 'add and float32'

\b
Exit status:
  0  no wrong value and no crash
  1  a wrong value, an error or a crash
  2  the device does not load, or no operator or model matches"""


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A project that was built.")],
    dtypes: Annotated[str, typer.Option("--dtypes", help="Of f32 bf16 f16 f64 i64 i32 i16 i8 u8 bool.")] = "f32",
    match: Annotated[str, typer.Option("--match", help="Regular expression on the operator's name.")] = "",
    ops: Annotated[str, typer.Option("--ops", help="Exact names instead, separated by commas.")] = "",
    samples: Annotated[int, typer.Option("--samples", min=1, help="At most so many samples an operator.")] = 8,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes at a time.")] = 1,
    models: Annotated[bool, typer.Option("--models", help="Whole models in float32 instead of operators.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON value: counts and verdicts.")] = False,
) -> None:
    """Run torch's operator database, or whole models, on the device and on the CPU, in processes that may crash."""
    from shiplap.plugin_api import error
    from shiplap_backend import audit
    from shiplap_backend.expression import DTYPES
    from shiplap_backend.project import open_project, require_built

    project = open_project(directory)
    require_built(project)
    chosen = _require_known("--dtypes", dtypes.split(","), list(DTYPES))
    if models and chosen != ["f32"]:
        raise error("SL613", where="--dtypes", got=dtypes, expected="f32, in which models are compared")
    known = audit.model_names() if models else audit.operator_names(project)
    names = (
        _require_known("--ops", ops.split(","), known)
        if ops
        else _match_names(match, known, "model" if models else "operator")
    )
    swept = audit.run_sweep(project, names, chosen, samples=samples, jobs=jobs, models=models, tell=verbs.note)
    verdicts = list(swept)
    # A refusal is no failure, since it gives a reason and no wrong value.
    bad = [v for v in verdicts if v.state in ("fail", "crash")]
    if json:
        verbs.emit_json({"counts": audit.count_by_dtype(verdicts), "verdicts": [v.as_json() for v in verdicts]})
    else:
        for dtype, counts in audit.count_by_dtype(verdicts).items():
            verbs.out().print(f"{dtype:5}" + "  ".join(f"{k} {n}" for k, n in counts.items() if n), markup=False)
        for v in verdicts:
            if models or v.state in ("fail", "crash", "refused"):
                verbs.out().print(f"{v.state}  {v.op}  {v.dtype}  {v.why}".rstrip(), markup=False)
    if bad:
        raise typer.Exit(verbs.FAILED)


def _require_known(option: str, given: list[str], known: Sequence[str]) -> list[str]:
    """Return ``given``, the names that were passed to the command-line option ``option``.

    Raise ``SL613`` with the nearest name if one of them is not in ``known``.
    """
    from shiplap.plugin_api import error
    from shiplap_backend.expression import suggest_nearest

    for name in given:
        if name not in known:
            expected = ", ".join(known) if len(known) < 50 else "names of torch's operator database, such as 'add'"
            whole = next((n for n in known if n.endswith(f".{name}")), "")  # "nn.functional.relu" for "relu"
            meant = f"; did you mean {whole!r}?" if whole else suggest_nearest(name, known)
            raise error("SL613", where=option, got=f"{name!r}{meant}", expected=expected)
    return given


def _match_names(pattern: str, known: Sequence[str], what: str) -> list[str]:
    """Return the names in ``known`` in which the regular expression ``pattern`` is found.

    ``what`` is a noun for the names, for the error. Raise ``SL613`` if none matches or if ``pattern`` is invalid.
    """
    from shiplap.plugin_api import error

    try:
        names = [n for n in known if re.search(pattern, n)]
        got = "" if names else f"no {what} matches {pattern!r}"
    except re.error as e:
        got = f"{pattern!r}: {e}"
    if got:
        raise error(
            "SL613", where="--match", got=got, expected=f"part of a name such as {known[0]!r}, or a regular expression"
        )
    return names
