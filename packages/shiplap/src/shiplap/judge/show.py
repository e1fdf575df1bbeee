"""Text and HTML of a verdict."""

from __future__ import annotations

from collections.abc import Iterator

from shiplap.judge.verdict import Ruling, Timed
from shiplap.render import facts, render_html


def lines(ruling: Ruling) -> Iterator[tuple[str, str]]:
    """Yield the lines of the report, each with a style of rich."""
    colours = {"accepted": "bold green", "refused": "bold red", "incomplete": "bold yellow"}
    yield f"{ruling.candidate}: {ruling.word}", colours[ruling.word]
    for reason in ruling.reasons:
        yield f"  {reason.check}: {reason.evidence}", "red"
        if reason.input:
            yield f"    on {reason.input}", "dim"
    for what, why in ruling.missing:
        yield f"  not looked at: {what}: {why}", "yellow"
    for timed in ruling.timings:
        yield f"  {timing(timed)}", ""
    if ruling.speedup:
        yield f"  {ruling.speedup:.2f}x the reference, {ruling.at_least:.2f}x at least", "bold"
    yield f"  {ruling.calls} calls were compared with {ruling.reference}, in {ruling.seconds:.1f} s", "dim"
    for text in ruling.unchecked:
        yield f"  no word about {text}", "dim"


def timing(timed: Timed) -> str:
    """Return one line with the times of one shape."""
    compiled = f", compiled {timed.compiled * 1e6:.1f} us" if timed.compiled is not None else ""
    share = f"{100 * timed.light / max(timed.candidate, 1e-9):.0f} % of what the machine could do"
    return (
        f"{timed.input}: {timed.candidate * 1e6:.1f} us, reference {timed.reference * 1e6:.1f} us{compiled} "
        f"(+- {timed.resolution * 1e6:.0f} us, {share}, {timed.rounds} calls)"
    )


def page(ruling: Ruling) -> str:
    """Return the report as one HTML page without external files."""
    return render_html(
        "judge.html.jinja",
        title=f"shiplap judge {ruling.candidate}",
        facts=facts(),
        ruling=ruling,
        lines=[text.strip() for text, _ in lines(ruling)][1:],
    )
