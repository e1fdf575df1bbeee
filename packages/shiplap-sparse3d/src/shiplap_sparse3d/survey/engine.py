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
    """Engine that runs the tasks of a survey in this process: one after the other, or in a few threads if the network
    is on a GPU.

    Args:
        threads: the number of threads, by default as above. On a CPU the network uses all cores itself.
    """

    def __init__(self, threads: int | None = None) -> None:
        """Set how many ``threads`` run tasks: by default one if the network is on the CPU, and three for a GPU."""
        self._threads = threads

    def share(self, job: SurveyJob) -> None:
        """Keep ``job``, which is the first argument of every task that is run from now on."""
        self._job = job

    def run(
        self, task: Callable[[SurveyJob, Item], Result], items: Iterable[Item], *, ordered: bool = False
    ) -> Iterator[tuple[Item, Result]]:
        """Yield (item, ``task(job, item)``) for each of ``items``, in their order, with or without ``ordered``. With
        several threads, up to ``threads`` + 1 tasks are begun before the first of them is yielded.
        """
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
                    # One more than there are threads, so that no thread waits while a result is used.
                    if len(begun) > threads:
                        done, future = begun.popleft()
                        yield done, future.result()
                for done, future in begun:
                    yield done, future.result()
            finally:
                # After an error, or if the caller stops early, nobody needs the tasks that are left.
                pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Release the resources of the engine. This engine has none, and a Dask engine closes its cluster."""
