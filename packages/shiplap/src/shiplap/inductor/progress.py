"""The progress of a compilation, which is shown on stderr after a few seconds.

It is shown on a terminal, or if the environment variable ``SHIPLAP_PROGRESS`` is 1.
"""

from __future__ import annotations

import sys
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shiplap.render.console import make_console
from shiplap.settings import settings

if TYPE_CHECKING:
    from rich.status import Status

PATIENCE = 3.0  # seconds before anything is said
EACH = 5.0  # seconds from one line to the next, where lines stay


@dataclass
class CompileProgress:
    """The progress of lowering a graph. ``done`` is the number of calls of ops whose lowering has begun, out of
    ``total``. ``began`` is the time at which the lowering of the graph began, as ``time.monotonic()`` returned it.
    """

    total: int
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    _last: float = 0.0
    _status: Status | None = None

    def step(self, op: str) -> None:
        """Add 1 to ``done``, since the lowering of a call of the op named ``op`` begins. If the compilation has taken
        three seconds and progress is wanted, show the count and ``op`` on stderr. With the last call, remove the status
        line.
        """
        self.done += 1
        seconds = time.monotonic() - self.began
        # Most compilations end sooner, and a line for each of them would be noise.
        if seconds < PATIENCE or not _progress_is_wanted():
            return
        text = f"torch.compile: {op}, kernel {self.done} of {self.total}, {seconds:.0f} s"
        if sys.stderr.isatty():
            self._on_terminal(text)
        # Lines in a log stay, so there are few of them.
        elif seconds - self._last >= EACH:
            self._last = seconds
            print(text, file=sys.stderr, flush=True)
        if self.done >= self.total:
            self.end()

    def _on_terminal(self, text: str) -> None:
        """Show ``text`` in the status line of the terminal. The first call starts the status line."""
        if self._status is None:
            self._status = make_console(stderr=True).status(text)
            self._status.start()
        self._status.update(text)

    def end(self) -> None:
        """Remove the status line from the terminal, if there is one."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def start_progress(total: int, graph: Any) -> CompileProgress:
    """Return a progress counter for the ``total`` calls of ``graph`` that are lowered to kernels. Its status line on
    the terminal is removed at the last call, or when ``graph`` is freed.
    """
    progress = CompileProgress(total)
    # Lowering may fail before the last call, and a status line would stay on the terminal.
    weakref.finalize(graph, progress.end)
    return progress


def _progress_is_wanted() -> bool:
    """Return whether progress is shown. This is so if stderr is a terminal, or if the environment variable
    ``SHIPLAP_PROGRESS`` asks for it.
    """
    return settings().progress or sys.stderr.isatty()
