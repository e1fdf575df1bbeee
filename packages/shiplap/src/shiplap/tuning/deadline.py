"""Time budgets of tuning. Work that is unfinished at the end of the budget is abandoned and reported as left out."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextvars import Context, copy_context
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, TypeVar, cast

import torch

ABANDONED = 10.0  # seconds that the end of a program waits for work that was abandoned
T = TypeVar("T")


class OutOfTime(Exception):
    """The error that the time budget is spent."""


class Deadline:
    """The end of a time budget, as a context manager that runs work in one thread of its own. If the budget ends while
    work runs, ``on_end`` is called to stop that work.

    All work runs in the same thread, because a worker process ends with the thread that started it.
    """

    def __init__(self, seconds: float, on_end: Callable[[], None] = lambda: None) -> None:
        """Start the time budget of ``seconds`` and the thread in which work runs. ``on_end`` is called if the budget
        ends while work runs.
        """
        self.ends, self.on_end, self.over = monotonic() + seconds, on_end, False
        self._work: SimpleQueue[tuple[Context, Callable[[], Any], SimpleQueue[Any]] | None] = SimpleQueue()
        # The current device and torch's number of threads belong to a thread. The working thread has to take over the
        # caller's. A choice is stored under that number.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._threads = torch.get_num_threads()
        # A daemon thread, so that a kernel that hangs does not keep the interpreter from ending.
        self._thread = Thread(target=self._serve, name="shiplap tune", daemon=True)
        self._thread.start()

    def __enter__(self) -> Deadline:
        """Return the deadline."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the thread end after its present work, which then counts as abandoned. Do not wait for it."""
        self.over = True
        self._work.put(None)

    @property
    def seconds_left(self) -> float:
        """The seconds until the time budget ends. The number is negative after its end."""
        return self.ends - monotonic()

    def check(self) -> None:
        """Raise ``OutOfTime`` if the work of this deadline was abandoned. Long work calls this method now and then, so
        that it neither stores nor starts anything after the end of the budget.
        """
        if self.over:
            raise OutOfTime

    def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread of this deadline, wait for it, and return its result. An exception of ``work`` is
        raised again.

        Raise ``OutOfTime`` when the budget ends, even if ``work`` hangs. The thread itself continues until ``work``
        calls ``check`` or returns.
        """
        if self.seconds_left <= 0:
            raise OutOfTime
        told: SimpleQueue[Any] = SimpleQueue()
        self._work.put((copy_context(), work, told))
        try:
            result, failure = told.get(timeout=self.seconds_left)
        except Empty:
            self.over = True
            # An interpreter that ends while a thread is inside of torch ends the process with an abort.
            atexit.register(self._thread.join, ABANDONED)
            self.on_end()
            raise OutOfTime from None
        if failure is not None:
            raise failure
        return cast(T, result)

    def _serve(self) -> None:
        """Run each work in the queue of this thread, in the context variables of its caller. Put the result or the
        exception into the caller's queue. None in the queue ends the thread.
        """
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        if self._device is not None:
            torch.cuda.set_device(self._device)  # of this thread
        while (asked := self._work.get()) is not None:
            context, work, told = asked
            try:
                told.put((context.run(work), None))
            except BaseException as e:
                # Raised in the thread that waits, while this one goes on to serve.
                told.put((None, e))
