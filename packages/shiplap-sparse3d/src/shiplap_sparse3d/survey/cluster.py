"""The tasks of a survey on Dask: a cluster of this machine, or one that runs already.

Dask gives a task of a worker that died to another one, and starts local workers again. What it cannot know is added
here: workers of other versions, a scheduler that is started again, and a cluster that stays without workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import logging
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import cloudpickle
import dask
import torch
from distributed import Client, KilledWorker, LocalCluster, get_worker
from distributed.client import ClosedClientError
from distributed.comm.core import CommClosedError

from shiplap import ShiplapError
from shiplap.plugin_api import error, verbs
from shiplap.plugin_api.files import write_whole
from shiplap_sparse3d.survey.engine import LOOK, THREADS, Item, Result, SurveyEngine, Task
from shiplap_sparse3d.survey.tasks import SurveyJob

_REACH, _PATIENCE = 5.0, 30.0  # seconds for the first contact with a scheduler, and for one that was lost
_LOSSES = 4  # of a scheduler, without a result in between
_JOBS = "shiplap-survey"  # where a worker keeps the jobs that it has read
_READING = threading.Lock()  # one thread of a worker reads a job
_PACKAGES = ("shiplap", "shiplap-sparse3d", "torch", "numpy", "distributed", "laspy", "lazrs")


def _installed_versions() -> dict[str, str]:
    """Return the installed versions, by name, of Python and of the packages in which the client and all workers must
    agree, without local parts such as ``+cpu``. A package that is not installed is left out.
    """
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name).partition("+")[0]
    return versions


class JobTicket(NamedTuple):
    """What a worker needs to read the job of a survey: its file, the digest of that, the device, and the versions."""

    path: Path
    digest: str
    device: str
    versions: dict[str, str]

    def open_job(self) -> SurveyJob:
        """Return the job, which the first task on a worker reads. Raises SL828 and SL605."""
        worker = get_worker()
        with _READING:
            known: dict[Path, tuple[str, SurveyJob]] = worker.extensions.setdefault(_JOBS, {})
            if known.get(self.path, ("",))[0] != self.digest:
                known.pop(self.path, None)  # before another network needs the memory
                known[self.path] = self.digest, self.read_job(worker)
            return known[self.path][1]

    def read_job(self, worker: Any) -> SurveyJob:
        """Return the job with its network on the device of ``worker``, in evaluation mode.

        Raises SL828 if versions differ from the client's, or if the job cannot be read or unpickled, and SL605.
        """
        here, where = _installed_versions(), f"worker {worker.address}"
        if wrong := [name for name, version in self.versions.items() if here.get(name) != version]:
            got, expected = (", ".join(f"{n} {of.get(n, 'missing')}" for n in wrong) for of in (here, self.versions))
            raise _worker_error(where, got, expected, "install the same versions on the client and on all workers")
        content = self.path.read_bytes() if self.path.exists() else b""
        if hashlib.sha256(content).hexdigest() != self.digest:
            got, expected = f"no such folder {self.path.parent}", "files that all workers share, at the same path"
            fix = "pass --folder and files on a file system that all workers share"
            raise _worker_error(where, got, expected, fix)
        try:
            job: SurveyJob = cloudpickle.loads(content)
        except Exception as failure:
            expected = "a SurveyModel whose modules can be imported on the worker"
            fix = "install the model's modules on the workers, or define the model in the file that --model names"
            raise _worker_error(where, f"{type(failure).__name__}: {failure}", expected, fix) from None
        job.model.net.to(_device_of_worker(self.device, worker.name)).eval()
        return job


def _forget_job(path: Path, dask_worker: Any) -> None:
    """Remove the job in the file ``path``, and its network, from the worker that Dask passes."""
    dask_worker.extensions.get(_JOBS, {}).pop(path, None)


def _device_of_worker(device: str, name: object) -> torch.device:
    """Return the torch device ``device``. For plain ``cuda`` the GPUs of the machine are taken in turn, by the number
    ``name`` of a worker of a local cluster. Raises SL605 if the device is not there.
    """
    if device == "cuda" and isinstance(name, int) and torch.cuda.device_count():
        device = f"cuda:{name % torch.cuda.device_count()}"
    verbs.require_device(device)
    return torch.device(device)


async def _pass_on(future: Future[Any], sent: Any) -> None:
    """Complete ``future`` as Dask's future ``sent`` ends. This runs in the loop of Dask's client."""
    try:
        future.set_result(await sent._result())
    except BaseException as failure:  # the loop's own for a client that is closed
        future.set_exception(CancelledError() if isinstance(failure, asyncio.CancelledError) else failure)


def _run_task(ticket: JobTicket, task: Task[Item, Result], item: Item) -> Result:
    """Return ``task(job, item)``, run on the Dask worker of this process."""
    return task(ticket.open_job(), item)


class _LostError(Exception):
    """Error of a connection to the Dask scheduler that does not answer, which is caught and made again."""


class DaskEngine(SurveyEngine):
    """Engine that runs the tasks of a survey on the workers of a Dask cluster.

    Args:
        workers: the number of local processes to start, or None.
        scheduler: the address of a running scheduler, or None.
        device: the device of the workers' networks, by default the type of that of the model.

    Raises:
        SurveyError: SL827 if the scheduler does not answer, SL828 if local workers do not start.
    """

    def __init__(self, workers: int | None, scheduler: str | None, device: str | None) -> None:
        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors are raised, and tracebacks are not shown
        self._device, self._ticket, self._look = device, cast(Any, None), 0.0
        with contextlib.ExitStack() as opened:
            self._cluster: Any = scheduler if workers is None else _start_cluster(workers, device, opened)
            self._connect(_REACH)
            self._opened = opened.pop_all()

    def _connect(self, seconds: float) -> None:
        """Connect to the scheduler within ``seconds``. Raises SL827 if it does not answer."""
        try:
            self._client = Client(self._cluster, timeout=seconds, set_as_default=False)
            self.dashboard, self.workers = str(self._client.dashboard_link), self._count_threads()
        except Exception as failure:  # addresses, certificates and protocols fail in many ways
            got = f"{type(failure).__name__}: {failure}".splitlines()[0]
            expected = f"a Dask scheduler that answers within {seconds:.0f} s, such as tcp://10.0.0.1:8786"
            raise error("SL827", where=str(self._cluster), got=got, expected=expected) from None
        self._seen = time.monotonic()

    def _count_threads(self) -> int:
        """Return how many tasks all workers run at a time. Raises ``_LostError`` if the scheduler does not answer."""
        if self._client.status != "running":
            raise _LostError
        try:
            return sum(self._client.nthreads(callback_timeout=_PATIENCE).values())
        except Exception:
            raise _LostError from None

    def share(self, job: SurveyJob) -> None:
        """Write ``job`` into its folder, where workers read it, with its network on the CPU."""
        net = deepcopy(job.model.net).cpu()
        content, path = cloudpickle.dumps(replace(job, model=replace(job.model, net=net))), job.folder.job_path
        write_whole(path, content, lasting=False)
        device, digest = self._device or job.model.device.type, hashlib.sha256(content).hexdigest()
        self._ticket = JobTicket(path, digest, device, _installed_versions())

    def run(
        self, task: Task[Item, Result], items: Iterable[Item], *, ordered: bool = False
    ) -> Iterator[tuple[Item, Result]]:
        """Yield as :meth:`SurveyEngine.run` does. When the scheduler is lost, items without a result run again, also on
        one that was started again. Raises SL827 if it does not answer for 30 seconds.
        """
        where, left, lost = str(self._cluster), dict.fromkeys(items), 0
        while lost < _LOSSES:
            try:
                for item, result in super().run(task, list(left), ordered=ordered):
                    lost = 0
                    del left[item]
                    yield item, result
                return
            except (_LostError, CancelledError, CommClosedError, ClosedClientError):
                lost += 1
                with contextlib.suppress(Exception):
                    self._client.close(timeout=1)
                self._connect(_PATIENCE)
        got, expected = f"tasks that were lost {lost} times in turn", "a scheduler that keeps its tasks"
        raise error("SL827", where=where, got=got, expected=expected)

    def _count_places(self) -> int:
        """Return four for each thread of a worker, and two more. Raises SL827 without workers for 30 seconds."""
        now = time.monotonic()
        if now >= self._look:
            self._look, self.workers = now + LOOK, self._count_threads()
        if self.workers:
            self._seen = now
        elif now - self._seen > _PATIENCE:
            where = str(getattr(self._cluster, "scheduler_address", self._cluster))
            what = "the Dask scheduler has no workers"
            got, fix = f"no worker for {_PATIENCE:.0f} s", "start workers, and run the same command again"
            raise error("SL827", where=where, what=what, got=got, expected="at least one", fix=fix)
        return 4 * self.workers + 2

    def _submit(self, task: Task[Item, Result], items: list[Item]) -> list[Future[Result]]:
        """Send ``task`` for each of ``items`` to the cluster, and return futures, which Dask's futures complete."""
        futures, loop = [Future[Result]() for _ in items], cast(Any, self._client.loop)
        if items:
            name = f"{task.__name__}-{self._ticket.digest[:8]}-{time.time_ns()}"  # it is on the dashboard
            keys, run = [f"{name}-{number}" for number in range(len(items))], partial(_run_task, self._ticket, task)
            for future, sent in zip(futures, self._client.map(run, items, key=keys, pure=False), strict=True):
                future.set_running_or_notify_cancel()  # Dask cancels a task when its client is closed
                loop.add_callback(_pass_on, future, sent)
        return futures

    def _take_result(self, future: Future[Result], name: str) -> Result:
        """Return the result of the ended ``future``, or raise its error. Raises SL828 for a task whose workers died."""
        try:
            return future.result()
        except KilledWorker:
            got, expected = "a task whose workers died again and again", "workers with enough memory for a tile"
            fix = "pass a smaller --tile, or start workers with more memory; finished tiles are kept"
            raise _worker_error(name, got, expected, fix) from None

    def close(self) -> None:
        """Remove the job from the workers, and end the client, and the cluster if this engine has started it."""
        with contextlib.suppress(Exception):
            if self._ticket and self._client.status == "running":
                run: Any = self._client._run  # as Client.run, which has no limit of time
                self._client.sync(run, _forget_job, self._ticket.path, on_error="ignore", callback_timeout=_REACH)
        with contextlib.suppress(Exception):
            self._client.close(timeout=_REACH)
        self._opened.close()


def _start_cluster(workers: int, device: str | None, opened: contextlib.ExitStack) -> LocalCluster:
    """Start a Dask cluster of ``workers`` processes on this machine, which ends with ``opened``, and return it.

    Raises SL828 if they do not start.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    place, threads = "distributed.nanny.pre-spawn-environ", THREADS if (device or "cpu").startswith("cuda") else 1
    opened.enter_context(dask.config.set({f"{place}.OMP_NUM_THREADS": max(1, cores // workers)}))
    scratch = opened.enter_context(tempfile.TemporaryDirectory(prefix="shiplap-survey-"))
    # Other users of this machine can reach the ports, and a task is any program: so the cluster has certificates.
    options: dict[str, Any] = {"security": True, "memory_limit": None, "silence_logs": logging.CRITICAL}
    options |= {"n_workers": workers, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    try:
        cluster = LocalCluster(threads_per_worker=threads, local_directory=scratch, **options)
    except Exception as failure:  # a process that cannot be started has many reasons
        got = f"{type(failure).__name__}: {failure}".splitlines()[0]
        raise _worker_error("the local Dask cluster", got, f"{workers} processes that start") from None
    return opened.enter_context(cluster)


def _worker_error(where: str, got: str, expected: str, fix: str = "") -> ShiplapError:
    """Return the error SL828 for workers of a Dask cluster that cannot be used, with these parts of its message."""
    return error("SL828", where=where, got=got, expected=expected, fix=fix)
