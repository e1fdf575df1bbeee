"""An explanation as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shiplap.inductor.explanation import Explanation, Kernel
from shiplap.inductor.fusion_choice import FusionChoice, Verdict

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"ok": "green", "wrong": "red", "broken": "red", "dropped": "red", "refused": "dim"}


def explanation_json(explanation: Explanation, facts: Mapping[str, str], source: bool = False) -> dict[str, object]:
    """Return one JSON-ready object: facts, the fields of the explanation, its summary, and on request the generated
    code.
    """
    value = asdict(explanation) | {"ok": explanation.ok, "summary": explanation.summary, "graphs": explanation.graphs}
    if not source:
        del value["source"]
    # Tuples become lists here already, so that the object equals its own text when that is read again.
    return {"facts": dict(facts), **json.loads(json.dumps(value))}


def print_explanation(explanation: Explanation, console: Console | None = None, source: bool = False) -> None:
    """Print each kernel with its operations and candidates, and what was not fused and why."""
    from rich.console import Console

    console = console or Console(highlight=False)
    # Choices are compared by identity, as two equal calls of one op have equal choices.
    shown: set[int] = set()
    for number, kernel in enumerate(explanation.kernels, 1):
        _print_kernel(number, kernel, console, explanation.graphs > 1)
        shown |= {id(d) for d in kernel.fusion_choices}
    for choice in explanation.fusion_choices:
        if id(choice) not in shown:
            _print_choice(choice, console)
            console.print()
    console.print(explanation.summary, style="bold", markup=False, soft_wrap=True)
    if source:
        for text in explanation.source:
            console.print("", text, sep="\n", markup=False, soft_wrap=True)


def _print_kernel(number: int, kernel: Kernel, console: Console, several: bool) -> None:
    from rich.text import Text

    graph = f"  graph {kernel.graph + 1}" if several else ""
    console.print(
        Text(f"{number}. {kernel.name or 'no kernel'}", "bold").append(f"  {kernel.kind}{graph}", "dim"), soft_wrap=True
    )
    _row(console, "inside", ", ".join(kernel.operators))
    _row(console, "from", ", ".join(map(_near, kernel.where)))
    for choice in kernel.fusion_choices:
        _print_choice(choice, console)
    for other in kernel.unfused:
        meaning = f"\n{other.meaning}" if other.meaning else ""
        what = f"{other.kernel} ({', '.join(other.operators)}), which runs {other.side} it"
        _row(console, "outside", f"{what}\nInductor: {other.reason}{meaning}", "yellow")
    console.print()


def _print_choice(choice: FusionChoice, console: Console) -> None:
    _row(console, "op", f"{choice.op}  {choice.sizes}  {choice.dtypes}")
    _row(console, "chosen", f"{choice.chosen}: {choice.reason}", "green")
    for verdict in choice.verdicts:
        _row(console, verdict.status, _verdict(verdict), STYLES.get(verdict.status, ""))


def _verdict(verdict: Verdict) -> str:
    time = f"alone {verdict.time_us:.1f} us" if verdict.time_us is not None else ""
    told = ", ".join(part for part in (time, verdict.detail) if part)
    return f"{verdict.candidate}: {told}" if told else verdict.candidate


def _near(where: str) -> str:
    """Return a line of source, relative to the current directory if it is inside."""
    try:
        return str(Path(where).relative_to(Path.cwd()))
    except ValueError:
        return where


def _row(console: Console, label: str, value: str, style: str = "") -> None:
    from rich.text import Text

    if value:
        line = Text(f"  {label:<9}", "dim").append(value.replace("\n", "\n" + " " * 11), style or "default")
        console.print(line, soft_wrap=True)
