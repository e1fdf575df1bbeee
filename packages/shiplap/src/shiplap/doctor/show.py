"""A diagnosis as text, JSON and HTML: three views of one value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from shiplap.doctor import registry
from shiplap.doctor.causes import CAUSES
from shiplap.doctor.diagnosis import Break, Diagnosis, Place, Recompile
from shiplap.doctor.recompiles import VARIED
from shiplap.render import render_html

if TYPE_CHECKING:
    from rich.console import Console


def diagnosis_json(diagnosis: Diagnosis, facts: Mapping[str, str]) -> dict[str, object]:
    """Return one JSON-ready object: facts, the diagnosis field by field, its summary and the titles of the causes."""
    value = asdict(diagnosis) | {"ok": diagnosis.ok, "summary": diagnosis.summary}
    for row in value["breaks"]:
        # Readers of the JSON need no table of causes.
        row["title"] = CAUSES[row["cause"]].title
    return {"facts": dict(facts), **json.loads(json.dumps(value))}


def diagnosis_html(diagnosis: Diagnosis, facts: Mapping[str, str]) -> str:
    """Return a self-contained HTML page."""
    return render_html(
        "diagnosis.html.jinja",
        package="shiplap.doctor",
        title="shiplap doctor",
        facts=facts,
        found=diagnosis,
        groups=_by_cause(diagnosis.breaks),
        causes=CAUSES,
        varied=VARIED,
        near=near,
        seen=seen,
        recompile_cost=recompile_cost,
        entry=registry.by_id,
        show=show,
    )


def _by_cause(breaks: Sequence[Break]) -> list[tuple[str, list[Break]]]:
    """Return the breaks by cause, the most costly cause first."""
    order = list(dict.fromkeys(b.cause for b in breaks))
    # The sort is stable, so breaks of one cause stay in the order of their cost.
    ranked = sorted(breaks, key=lambda b: order.index(b.cause))
    return [(cause, list(group)) for cause, group in groupby(ranked, key=lambda b: b.cause)]


def show(p: Place) -> str:
    """Return a place as text, relative to its package or to the current directory."""
    try:
        return p.short if p.package else f"{Path(p.file).relative_to(Path.cwd())}:{p.line}"
    except ValueError:
        return str(p)


def near(p: Place, radius: int = 1) -> list[tuple[int, str, bool]]:
    """Return ``(number, line, whether it is the place itself)`` for the lines around a place, empty where the source
    cannot be read.
    """
    import linecache

    lines = linecache.getlines(p.file)
    around = range(max(1, p.line - radius), min(len(lines), p.line + radius) + 1)
    return [(n, lines[n - 1].rstrip(), n == p.line) for n in around] if p.line <= len(lines) else []


def seen(b: Break) -> str:
    """Return the cost of a break in words."""
    what = "runs uncompiled" if b.skipped else f"cuts {b.graphs} function" + "s" * (b.graphs != 1)
    return f"{what}, seen {b.times}x, {b.seconds:.2f} s of compilation"


def recompile_cost(r: Recompile) -> str:
    """Return the cost of a recompile in words."""
    values = f"; values {', '.join(r.values)}" if r.values else ""
    limit = "; torch has stopped compiling it" if r.limit else ""
    return f"{r.times}x, {r.seconds:.2f} s of compilation{values}{limit}"


def print_diagnosis(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Print a ranked table, then each break and recompile with its code, its remedy and torch's own words."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console(highlight=False)
    if diagnosis.breaks:
        console.print(_table(diagnosis.breaks), "")
    for number, b in enumerate(diagnosis.breaks, 1):
        _print_break(number, b, console)
    for r in diagnosis.recompiles:
        _print_recompile(r, console)
    for s in diagnosis.skips:
        at = f" at {show(s.place)}" if s.place else ""
        console.print(Text(f"CUDA graph skipped {s.times}x{at}: {s.reason}", "bold"), soft_wrap=True)
        _row(console, "fix", s.fix, "green")
        console.print()
    if diagnosis.error:
        console.print(Text(f"it ended with {diagnosis.error}", "red"), soft_wrap=True)
    elif diagnosis.exit_code:
        console.print(Text(f"the program ended with exit status {diagnosis.exit_code}", "red"))
    console.print(Text(diagnosis.summary, "bold green" if diagnosis.ok else "bold"), soft_wrap=True)


def _table(breaks: Sequence[Break]) -> object:
    """Return the table of all breaks."""
    # rich is imported where something is printed: the JSON and HTML need none of it.
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "where", "call", "cause", "torch", "cuts", "s"):
        # Numbers are compared by eye, so they are aligned to the right.
        right = name in ("", "cuts", "s")
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=name == "torch")
    for number, b in enumerate(breaks, 1):
        cuts = Text("all", "bold red") if b.skipped else Text(str(b.graphs))
        title, id = Text(CAUSES[b.cause].title), Text(b.registry, "dim")
        table.add_row(str(number), Text(show(b.place)), Text(b.call), title, id, cuts, f"{b.seconds:.2f}")
    return table


def _row(console: Console, label: str, value: str, style: str = "") -> None:
    """Print one labelled row of a break, nothing where the value is empty."""
    from rich.text import Text

    if value:
        console.print(
            Text(f"  {label:<9}", "dim").append(value.replace("\n", "\n" + " " * 11), style or "default"),
            soft_wrap=True,
        )


def _print_break(number: int, b: Break, console: Console) -> None:
    """Print one break with its code, cost and remedy."""
    from rich.text import Text

    console.print(Text(f"{number}. {show(b.place)}", "bold").append(f"  {b.call}", "bold red"), soft_wrap=True)
    _print_code(b.place, console)
    cause = CAUSES[b.cause]
    _row(console, "cause", f"{cause.title}. {cause.why}")
    if b.user != b.place:
        _row(console, "reached", "\n".join(f"{show(p)}  {p.code}" for p in b.chain[:-1]))
    _row(console, "cost", seen(b))
    _row(console, "torch", f"{b.registry} {b.reason}\n{b.explanation}".strip())
    for hint in b.hints:
        _row(console, "hint", hint)
    _row(console, "fix", b.fix, "green")
    if b.example:  # flush left: it is there to be copied
        console.print("", Text(b.example), sep="\n", soft_wrap=True)
    console.print()


def _print_code(p: Place, console: Console) -> None:
    """Print the lines around a place."""
    from rich.text import Text

    for n, line, here in near(p):
        mark = Text(f"  {'>' if here else ' '} {n:>5}  ", "red" if here else "dim")
        console.print(mark.append(line, "" if here else "dim"), soft_wrap=True)


def _print_recompile(r: Recompile, console: Console) -> None:
    """Print one recompile with its cost and remedy."""
    from rich.text import Text

    title = Text(f"recompiled: {show(r.place)}", "bold").append(f"  {r.place.function}", "bold red")
    console.print(title, soft_wrap=True)
    _row(console, "cause", f"{VARIED[r.cause].title}: {r.subject}")
    _row(console, "cost", recompile_cost(r))
    _row(console, "torch", r.guard)
    _row(console, "fix", r.fix, "green")
    if r.example:
        _row(console, "", r.example)
    console.print()
