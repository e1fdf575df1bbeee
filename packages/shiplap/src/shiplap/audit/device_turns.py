"""Turns on a device that several audits of one process share: a capture or a look at the process runs while no other
sample does.

A capture forbids calls of the CUDA runtime to every thread of its process, and a check of open files or of
synchronisation counts what other threads do. Samples of all threads of the process take turns, for each device.

Audits in other processes need no turns, since each check looks at the state of its own process only.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Turns:
    """The turns on one device. It counts the samples that run now and those that wait to be alone."""

    def __init__(self) -> None:
        """Make the turns of a device on which nothing runs."""
        self._changed = threading.Condition()
        self._shared = 0  # samples that run now, and that others may run beside
        self._alone = False  # whether a sample runs that must be alone
        self._waiting = 0  # samples that wait to be alone

    @contextmanager
    def take(self, *, alone: bool) -> Iterator[None]:
        """Return a context manager in whose body the caller has its turn. If ``alone`` is true, no other sample runs
        meanwhile. A sample that waits to be alone goes before samples that are not alone and begin later.
        """
        with self._changed:
            if alone:
                self._waiting += 1
                try:
                    self._changed.wait_for(lambda: not self._shared and not self._alone)
                finally:
                    self._waiting -= 1
                self._alone = True
            else:
                self._changed.wait_for(lambda: not self._alone and not self._waiting)
                self._shared += 1
        try:
            yield
        finally:
            with self._changed:
                if alone:
                    self._alone = False
                else:
                    self._shared -= 1
                self._changed.notify_all()


_making = threading.Lock()
_turns: defaultdict[str, _Turns] = defaultdict(_Turns)  # by device


@contextmanager
def device_turn(device: str, *, alone: bool) -> Iterator[None]:
    """Return a context manager in whose body one sample of an audit runs on ``device``. If ``alone`` is true, samples
    of all other audits of this process wait meanwhile. If it is false, samples of other audits for which it is false,
    too, may run at the same time.

    On the CPU the context does nothing, since each audit has processes of its own.
    """
    where = torch.device(device)
    if where.type == "cpu":
        yield
        return
    with _making:
        turns = _turns[str(where)]
    with turns.take(alone=alone):
        yield
