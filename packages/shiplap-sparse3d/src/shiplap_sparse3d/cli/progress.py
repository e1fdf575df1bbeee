"""Progress bars for the stages of long work."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from shiplap.plugin_api import verbs

__all__ = ["show_progress"]


@contextlib.contextmanager
def show_progress(quiet: bool) -> Iterator[Callable[[str, int, int, str], None]]:
    """Show progress bars for stages of work on stderr during the block of a context manager, which receives the
    function that advances them. If ``quiet`` is true, or stderr is no terminal, there are no bars. A note without steps
    (a ``total`` of 0) is printed as a line of its own in any case.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda stage, done, total, note: None if total else verbs.note(note)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=verbs.err(), transient=True) as bar:
        tasks = {}

        def advance(stage: str, done: int, total: int, note: str) -> None:
            """Set the bar of ``stage`` to ``done`` of ``total``, with the text ``note``. The first call for a stage
            adds its bar.
            """
            if not total:  # on the console of the bars, which redraws them below the line
                return bar.console.print(note, markup=False)
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, note="")
            bar.update(tasks[stage], completed=done, total=total, note=note)

        yield advance
