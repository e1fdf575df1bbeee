"""The engine that runs the tasks of a survey: this process, or a Dask cluster (:mod:`.cluster`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from shiplap_sparse3d.survey.job import SurveyJob

Item = TypeVar("Item")
Result = TypeVar("Result")

_THREADS = 3  # for a GPU: one reads, one sorts points into voxels, one waits for classes and writes them


class SurveyEngine:
    """Runs the tasks of a survey in this process: one after the other, or in a few threads if the network is on a GPU.

    Args:
        threads: the number of threads, by default as above. On a CPU the network uses all cores itself.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def share(self, job: SurveyJob) -> None:
        """Make ``job`` available to the tasks that are run from now on."""
        self._job = job

    def run(
        self, task: Callable[[SurveyJob, Item], Result], items: Iterable[Item], *, ordered: bool = False
    ) -> Iterator[tuple[Item, Result]]:
        """Yield each item with the result of its task, as they are ready or, if ``ordered``, in the order of items."""
        job = self._job
        threads = self._threads or (1 if job.model.device.type == "cpu" else _THREADS)
        if threads == 1:
            yield from ((item, task(job, item)) for item in items)
            return
        with ThreadPoolExecutor(threads) as pool:
            begun: deque[tuple[Any, Future[Result]]] = deque()
            try:
                for item in items:
                    begun.append((item, pool.submit(task, job, item)))
                    if len(begun) > threads:
                        done, future = begun.popleft()
                        yield done, future.result()
                for done, future in begun:
                    yield done, future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Release what the engine has started, which is nothing here."""
