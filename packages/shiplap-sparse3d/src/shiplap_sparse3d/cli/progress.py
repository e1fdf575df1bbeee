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
    function that advances them. Without a terminal, or if ``quiet``, that function does nothing.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda stage, done, total, note: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=verbs.err(), transient=True) as bar:
        tasks = {}

        def advance(stage: str, done: int, total: int, note: str) -> None:
            """Set the bar of ``stage`` to ``done`` of ``total``, with the text ``note``. The first call for a stage
            adds its bar.
            """
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, note="")
            bar.update(tasks[stage], completed=done, total=total, note=note)

        yield advance
