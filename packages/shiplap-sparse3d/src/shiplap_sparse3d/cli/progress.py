"""Progress bars for the stages of long work."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from shiplap.plugin_api import verbs

__all__ = ["show_progress"]


@contextlib.contextmanager
def show_progress(quiet: bool) -> Iterator[Callable[[str, int, int, str], None]]:
    """Show a progress bar for each stage on stderr during the block of a context manager, which gets the function that
    advances them. Without a terminal, or if ``quiet``, that function does nothing.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda stage, done, total, note: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=verbs.err(), transient=True) as bar:
        tasks = {}

        def advance(stage: str, done: int, total: int, note: str) -> None:
            """Set the bar of ``stage``, which the first call adds, to ``done`` of ``total`` and its text to
            ``note``.
            """
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, note="")
            bar.update(tasks[stage], completed=done, total=total, note=note)

        yield advance
