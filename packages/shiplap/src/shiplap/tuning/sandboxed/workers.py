"""One locked process for each kernel of an op that is tuned. It starts when it is needed, and again after it has
ended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from shiplap.sandbox.candidate import CandidateError, TargetProcess
from shiplap.sandbox.supervisor import Bounds, ProcessEnded, SandboxLauncher

HOME = {"home": "shiplap.tuning.sandboxed.child", "names": ["maker"], "kind": "maker", "seed": 0, "compile": False}


class ProcessUnavailable(Exception):
    """Raised when no process can be started, or the op cannot be imported in it."""


class KernelProcesses:
    """The processes of one op. Those of another op end when this one is opened."""

    def __init__(self, launcher: SandboxLauncher, seconds: float) -> None:
        self.launcher, self.seconds = launcher, seconds
        self.started, self._ready = 0, False
        self.doubted = False  # whether anything was refused, or ended by itself
        self._identity = ""
        self._opening: Mapping[str, Any] = {}
        self._running: dict[str, tuple[TargetProcess, str]] = {}
        self._failed: dict[str, str] = {}  # kernel → why its process was not made ready

    def open(self, opening: Mapping[str, Any], libraries: list[str]) -> None:
        """Serve this task. Processes of the same op are kept, and load the task when they are next used."""
        if self._identity != opening["identity"]:
            self.close()
        self._identity, self._opening = opening["identity"], opening
        self._failed.clear()
        self._order = json.dumps(opening)
        places = [*(str(p) for p in opening["path"] if p), *libraries]
        self._places = [*places, *([str(Path(opening["file"]).parent)] if opening["file"] else [])]

    def close(self) -> None:
        """End all processes."""
        for witness, _ in self._running.values():
            witness.prisoner.kill()
        self._running.clear()

    def end_process(self, kernel: str) -> None:
        """End the process of this kernel, if it has one, after an error of the kernel."""
        self.doubted = True
        witness, _ = self._running.pop(kernel, (None, ""))
        if witness is not None:
            witness.prisoner.kill()

    def prepare(self, patience: Mapping[str, float]) -> None:
        """Start processes for as many of these kernels as there are processors, because loading an op takes a while.

        Nothing is timed meanwhile. An error is raised later, when the process of that kernel is requested. ``patience``
        is explained at ``of``.
        """
        first, *others = list(patience)[: len(os.sched_getaffinity(0))]
        for kernel in (first, *others):
            self._try(partial(self._start, kernel, patience[kernel]), kernel)
        beside = [Thread(target=self._try, args=(partial(self._load, k), k), daemon=True) for k in others]
        for thread in beside:
            thread.start()
        # The first kernel is loaded in this thread, which would otherwise only wait.
        self._try(partial(self._load, first), first)
        for thread in beside:
            thread.join()

    def _try(self, step: Callable[[], None], kernel: str) -> None:
        if kernel in self._failed:
            return
        try:
            step()
        except (ProcessEnded, CandidateError) as e:
            self.end_process(kernel)
            self._failed[kernel] = str(e)

    def process_for(self, kernel: str, patience: float = 1.0) -> TargetProcess:
        """Return the process of this kernel, ready for the task. Raises Unhosted.

        ``patience`` is the factor by which one request to the process may take longer than others.
        """
        if kernel in self._failed:
            raise ProcessUnavailable(self._failed.pop(kernel))
        try:
            self._start(kernel, patience)
            self._load(kernel)
        except (ProcessEnded, CandidateError) as e:
            self.end_process(kernel)
            raise ProcessUnavailable(str(e)) from None
        return self._running[kernel][0]

    def _start(self, kernel: str, patience: float) -> None:
        if kernel in self._running:
            return
        if not self._ready:
            self.launcher.ask({"do": "import", "module": HOME["home"]})
            self._ready = True
        bounds = Bounds(seconds=max(self.seconds * patience, 1.0))
        self._running[kernel] = (
            TargetProcess(self.launcher.start(self._places, bounds, threads=self._opening["threads"])),
            "",
        )
        self.started += 1

    def _load(self, kernel: str) -> None:
        witness, order = self._running[kernel]
        if order != self._order:
            witness.load({**HOME, "path": self._opening["path"]}, [self._order], {})
            self._running[kernel] = witness, self._order
