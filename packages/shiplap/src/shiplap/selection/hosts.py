"""One locked process for each kernel of an op that is tuned: it starts when it is needed, and anew after it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shiplap.referee.process import Bounds, Ended, Launcher
from shiplap.referee.witness import Witness, Wrong

__all__ = ["Hosts", "Unhosted"]

HOME = {"home": "shiplap.selection.hosted", "names": ["maker"], "kind": "maker", "seed": 0, "compile": False}


class Unhosted(Exception):
    """Raised when no process can be started, or the op cannot be imported in it."""


class Hosts:
    """The processes of one op. Those of another op end when this one is opened."""

    def __init__(self, launcher: Launcher, seconds: float) -> None:
        self.launcher, self.seconds = launcher, seconds
        self.started, self._ready = 0, False
        self.doubted = False  # whether anything was refused, or ended by itself
        self._identity = ""
        self._opening: Mapping[str, Any] = {}
        self._running: dict[str, tuple[Witness, str]] = {}

    def open(self, opening: Mapping[str, Any], libraries: list[str]) -> None:
        """Serve this task: processes of the same op are kept, and told about the task when they are next used."""
        if self._identity != opening["identity"]:
            self.close()
        self._identity, self._opening = opening["identity"], opening
        self._order = json.dumps(opening)
        places = [*(str(p) for p in opening["path"] if p), *libraries]
        self._places = [*places, *([str(Path(opening["file"]).parent)] if opening["file"] else [])]

    def close(self) -> None:
        """End all processes."""
        for witness, _ in self._running.values():
            witness.prisoner.kill()
        self._running.clear()

    def end(self, kernel: str) -> None:
        """End the process of this kernel, if it has one, for what it did."""
        self.doubted = True
        witness, _ = self._running.pop(kernel, (None, ""))
        if witness is not None:
            witness.prisoner.kill()

    def of(self, kernel: str, patience: float = 1.0) -> Witness:
        """The process of this kernel, ready for the task. Raises Unhosted.

        ``patience``: how many times longer than others one request to it may take.
        """
        witness, order = self._running.get(kernel, (None, ""))
        try:
            if witness is None:
                bounds = Bounds(seconds=max(self.seconds * patience, 1.0))
                if not self._ready:
                    self.launcher.ask({"do": "import", "module": HOME["home"]})
                    self._ready = True
                started = self.launcher.start(self._places, bounds, threads=self._opening["threads"])
                witness = Witness(started)
                self.started += 1
                self._running[kernel] = witness, ""
            if order != self._order:
                witness.load({**HOME, "path": self._opening["path"]}, [self._order], {})
                self._running[kernel] = witness, self._order
        except (Ended, Wrong) as e:
            self.end(kernel)
            raise Unhosted(str(e)) from None
        return witness
