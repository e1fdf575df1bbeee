"""A survey as text, JSON and HTML: three views of one value."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shiplap.render import render_html
from shiplap.render.graph import Box, graph_svg
from shiplap.rewrite.match import Match, NearMiss
from shiplap.rewrite.survey import Call, Measured, Step, Survey, View

if TYPE_CHECKING:
    from rich.console import Console


def survey_json(survey: Survey, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return one JSON-ready object: facts, matches, near misses, measurements, and each graph as a difference of
    texts.
    """
    measured = asdict(survey.measured) | {"speedup": survey.measured.speedup} if survey.measured else None
    return {
        "facts": dict(facts),
        "target": survey.target,
        "summary": survey.summary,
        "graphs": survey.graphs,
        "rewrites": [{"name": n, "level": level} for n, level in survey.rewrites],
        "matches": json.loads(json.dumps([asdict(m) for m in survey.matches])),
        "near_misses": json.loads(json.dumps([asdict(m) for m in survey.near_misses])),
        "measured": measured,
        "differences": [{"graph": v.number, "level": v.level, "text": difference(v)} for v in survey.views],
    }


def print_survey(survey: Survey, console: Console, graphs: bool = False) -> None:
    """Print a line per rewrite, its places, the near misses with their reasons, and the total saving."""
    from rich.text import Text

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)

    for name, level in survey.rewrites:
        matches = [m for m in survey.matches if m.rewrite == name]
        misses = [m for m in survey.near_misses if m.rewrite == name]
        step = survey.step(name)
        measured = f"; {_changed(step)}" if step else ""
        say(f"{name} ({level}): {len(matches)} matched, {len(misses)} near{measured}", "bold" if matches else "")
        for text, times in _counted(map(_matched, matches)):
            say(f"  {text}{times}", "green")
        for text, times in _counted(map(_missed, misses)):
            say(f"  {text}{times}", "yellow")
    if graphs:
        for view in survey.views:
            say(f"\ngraph {view.number}, {view.level}", "bold")
            say(difference(view))
    say(survey.summary + (f"; {_saved(survey)}" if survey.matches else ""))
    if survey.measured:
        say(_measured(survey))


def _counted(texts: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Yield each text once, with its number of occurrences: a model repeats its layers."""
    # groupby() joins neighbours only.
    for text, same in groupby(sorted(texts)):
        number = len(list(same))
        yield text, f"  ({number} times)" if number > 1 else ""


def _matched(m: Match) -> str:
    """Return one line for a match."""
    where = _at(m.where[-1] if m.where else "")
    return f"{' + '.join(_short(m.operators))}{where}: {_change(m.saving.nodes, m.saving.bytes)}"


def _missed(m: NearMiss) -> str:
    """Return one line for a near miss."""
    fix = f"; {m.fix}" if m.fix else ""
    return f"{m.obstacle}{_at(m.where)}: {m.reason} ({m.fitting} of {m.of} nodes fit){fix}"


def _short(operators: Sequence[str]) -> list[str]:
    """Return the operators with repetitions counted, ``3 x linear``."""
    return [f"{n} x {op}" if (n := len(list(same))) > 1 else op for op, same in groupby(operators)]


def _bytes(number: int) -> str:
    """Return a number of bytes with a unit."""
    size = float(number)
    for unit in ("B", "kB", "MB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _saved(survey: Survey) -> str:
    """Return the sum of all savings as text."""
    nodes = sum(m.saving.nodes for m in survey.matches)
    return _change(nodes, sum(m.saving.bytes for m in survey.matches))


def _change(nodes: int, traffic: int) -> str:
    """Return a number of nodes and of bytes, those that the nodes read and write where none is fused, as text."""
    fewer = f"{abs(nodes)} node{'s' * (abs(nodes) != 1)} {'more' if nodes < 0 else 'fewer'}"
    return f"{fewer}, {_bytes(abs(traffic))} {'more' if traffic < 0 else 'less'} to move"


def _at(where: str) -> str:
    """Return a line of source as text, relative to the current directory where it lies below."""
    if not where:
        return ""
    try:
        return f" at {Path(where).relative_to(Path.cwd())}"
    except ValueError:
        return f" at {where}"


def _measured(survey: Survey) -> str:
    """Return the line with the measurements of all rewrites."""
    assert survey.measured is not None
    m = survey.measured
    errors = f"results differ by {m.error:.1e}, compiled code from eager by {m.eager_error:.1e}"
    return f"{_changed(m)} ({m.speedup:.2f}x); {errors}"


def _changed(m: Measured | Step) -> str:
    """Return kernels and times before and after: ``5 -> 4 kernels, 0.812 -> 0.797 ms a call``."""
    without, with_it = (f"{s * 1e3:.3g}" for s in m.seconds)
    return f"{m.kernels[0]} -> {m.kernels[1]} kernels, {without} -> {with_it} ms a call"


def difference(view: View) -> str:
    """Return before and after as a difference of texts, a node a line: only changed lines, with the lines around
    them.
    """
    before, after = ([_line(c) for c in calls] for calls in (view.before, view.after))
    return "\n".join(difflib.unified_diff(before, after, "before", "after", lineterm="", n=2))


def _line(call: Call) -> str:
    """Return one node as a line of text."""
    made = f"{call.name}: {call.shape}" if call.shape else call.name
    return f"{made} = {call.operator}({', '.join(call.reads)})"


def survey_html(survey: Survey, facts: Mapping[str, str]) -> str:
    """Return one page that needs no other file, with the places as pictures, before and after."""
    return render_html(
        "survey.html.jinja",
        package="shiplap.rewrite",
        title="shiplap rewrite",
        facts=facts,
        found=survey,
        matched=_matched,
        missed=_missed,
        saved=_saved,
        measured=_measured,
        changed=_changed,
        difference=difference,
        pictures=list(_pictures(survey)),
    )


def _pictures(survey: Survey) -> Iterator[tuple[Match, int, str, str]]:
    """Yield ``(match, how many look the same, svg before, svg after)``. Places with the same operators are drawn
    once.
    """
    kinds: dict[tuple[Any, ...], list[Match]] = {}
    for match in survey.matches:
        kinds.setdefault((match.rewrite, match.operators), []).append(match)
    for same in kinds.values():
        view = next((v for v in survey.views if v.number == same[0].graph), None)
        if view is not None:
            before, after = (
                _drawn(c, names) for c, names in ((view.before, same[0].nodes), (view.after, same[0].made))
            )
            yield same[0], len(same), before, after


def _drawn(calls: Sequence[Call], names: Sequence[str], most: int = 40) -> str:
    """Return a picture of the named nodes with their inputs and readers."""
    inside = set(names[:most])
    by_name = {c.name: c for c in calls}
    # Neighbours on both sides show where the place lies in the graph.
    around = {n for c in calls if c.name in inside for n in c.reads} | {c.name for c in calls if inside & set(c.reads)}
    shown = [by_name[n] for n in by_name if n in inside | around]
    return graph_svg([Box(c.name, c.operator, c.shape, c.reads, c.name in inside) for c in shown])
