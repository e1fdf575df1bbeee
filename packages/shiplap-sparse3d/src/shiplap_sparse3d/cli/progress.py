"""Progress bars for the stages of long work."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from shiplap.plugin_api import verbs

__all__ = ["show_progress"]


@contextlib.contextmanager
def show_progress(quiet: bool) -> Iterator[Callable[[str, int, int, str], None]]:
    """Show progress bars for stages of work on stderr during the block of a context manager. The manager yields a
    function of ``(stage, done, total, note)`` that sets the bar of a stage.

    If ``quiet`` is true, or stderr is no terminal, there are no bars. In any case a call with a ``total`` of 0 prints
    its note as a line.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda stage, done, total, note: None if total else verbs.note(note)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=verbs.err(), transient=True) as bar:
        tasks = {}

        def advance(stage: str, done: int, total: int, note: str) -> None:
            """Set the bar of ``stage`` to ``done`` of ``total``, with the text ``note`` beside it. The first call for a
            stage adds its bar. If ``total`` is 0, print the note as a line instead.
            """
            if not total:  # on the console of the bars, which redraws them below the line
                return bar.console.print(note, markup=False)
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, note="")
            bar.update(tasks[stage], completed=done, total=total, note=note)

        yield advance
