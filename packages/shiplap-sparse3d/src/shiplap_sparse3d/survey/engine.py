"""The engine that runs the tasks of a survey: this process, or a Dask cluster (:mod:`.cluster`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from shiplap_sparse3d.survey.tasks import SurveyJob

Item = TypeVar("Item")
Result = TypeVar("Result")
Task = Callable[[SurveyJob, Item], Result]

THREADS = 3  # for a GPU: one reads, one sorts points into voxels, one waits for classes and writes them
LOOK = 1.0  # seconds between looks at the state of the workers


class SurveyEngine:
    """Runs the tasks of a survey in this process.

    Args:
        threads: the number of threads. A network on a CPU uses all cores itself, and one on a GPU takes ``THREADS``.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads, self._pool = threads, ThreadPoolExecutor(threads)

    def share(self, job: SurveyJob) -> None:
        """Keep ``job``, which is the first argument of every task that is run from now on."""
        self._job = job

    def run(
        self, task: Task[Item, Result], items: Iterable[Item], *, ordered: bool = False
    ) -> Iterator[tuple[Item, Result]]:
        """Yield (item, ``task(job, item)``) for each of ``items``, as they are ready or, if ``ordered``, in order.

        Few tasks are begun before those ahead of them have been yielded, so memory does not depend on their number.
        """
        waiting, running = deque(items), dict[Future[Result], Item]()
        try:
            while waiting or running:
                places = self._count_places()
                if len(running) <= places // 2:  # several at a time, which costs an engine less
                    sent = [waiting.popleft() for _ in range(min(places - len(running), len(waiting)))]
                    running.update(zip(self._submit(task, sent), sent, strict=True))
                first = [next(iter(running))] if ordered else running
                for future in wait(first, LOOK, FIRST_COMPLETED).done:
                    item = running.pop(future)
                    yield item, self._take_result(future, f"{task.__name__} {item}")
        finally:
            for future in running:
                future.cancel()

    def _count_places(self) -> int:
        """Return how many tasks may be begun at a time: twice as many as run at a time."""
        return 2 * self._threads

    def _submit(self, task: Task[Item, Result], items: list[Item]) -> list[Future[Result]]:
        """Begin ``task`` for each of ``items``, and return the futures."""
        return [self._pool.submit(task, self._job, item) for item in items]

    def _take_result(self, future: Future[Result], name: str) -> Result:
        """Return the result of the ended ``future`` of the task ``name``, or raise its error."""
        return future.result()

    def close(self) -> None:
        """End the threads, after the tasks that they have begun."""
        self._pool.shutdown(cancel_futures=True)
