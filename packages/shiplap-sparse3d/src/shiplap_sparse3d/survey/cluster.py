"""The tasks of a survey on Dask: a cluster of this machine, or one that runs already.

Dask gives a task of a worker that died to another one, and starts local workers again. This module adds the refusal of
workers with other versions, the connection to a scheduler that was started again, and an end for a cluster that stays
without workers.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import platform
import queue
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import cloudpickle
import torch
from distributed import Client, Future, KilledWorker, LocalCluster, WorkerPlugin, get_worker

from shiplap import ShiplapError
from shiplap.plugin_api import error
from shiplap_sparse3d.survey.engine import Item, Result, SurveyEngine
from shiplap_sparse3d.survey.folder import read_mark
from shiplap_sparse3d.survey.job import SurveyJob

_REACH, _PATIENCE = 5.0, 30.0  # seconds for the first contact with a scheduler, and for one that was lost
_LOOK = 1.0  # seconds between looks at the state of the cluster
_THREADS = 3  # of a worker on a GPU, as in the embedded engine
_PACKAGES = ("shiplap", "shiplap-sparse3d", "torch", "numpy", "distributed", "laspy", "lazrs")


def _installed_versions() -> dict[str, str]:
    """Return the installed versions, by name, of Python and of the packages in which the client and all workers must
    agree, without local parts such as ``+cpu``. A package that is not installed is left out.
    """
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            # The local part, such as ``+cpu``, names a build, which may differ between machines.
            versions[name] = importlib.metadata.version(name).partition("+")[0]
    return versions


class JobPlugin(WorkerPlugin):
    """Plugin that holds the job of a survey on each Dask worker. The scheduler also sends it to workers that come
    later.
    """

    def __init__(self, job: SurveyJob, device: str, threads: int | None) -> None:
        """Pickle ``job`` with its network on the CPU, and keep what workers compare or set: the versions of the client,
        the identity of the sorted points, ``device``, and ``threads`` of torch (None: torch's default).
        """
        # A copy: ``cpu`` moves a module in place, and the client's network stays where it is.
        net = deepcopy(job.model.net).cpu()
        self._content = cloudpickle.dumps(replace(job, model=replace(job.model, net=net)))
        self._identity = read_mark(job.folder.points_identity)
        self._versions, self._device, self._threads = _installed_versions(), device, threads

    def setup(self, worker: Any) -> None:
        """Keep ``worker``, on which Dask starts this plugin. The job is unpickled later, by the first task, because
        only the error of a task reaches the client.
        """
        # Locks cannot be pickled, so this one is made on the worker.
        self._worker, self._lock = worker, threading.Lock()
        self._job: SurveyJob | None = None

    def open_job(self) -> SurveyJob:
        """Return the job of the survey, which the first call unpickles, with the network on the device of this worker.
        Raises SL828 if the worker cannot use the job, and SL605 without the device.
        """
        with self._lock:
            if self._job is None:
                self._job = self._read_job()
            return self._job

    def _read_job(self) -> SurveyJob:
        """Unpickle the job, set the threads of torch, and return the job with its network on this worker's device, in
        evaluation mode. Raises SL828 if versions differ from the client's, if unpickling fails, or if the folder is
        another one.
        """
        here, address = _installed_versions(), self._worker.address
        wrong = {name: version for name, version in self._versions.items() if here.get(name) != version}
        if wrong:
            raise _worker_error(
                f"worker {address}",
                ", ".join(f"{name} {here.get(name, 'missing')}" for name in wrong),
                ", ".join(f"{name} {version}" for name, version in wrong.items()),
                fix="install the same versions on the client and on all workers",
            )
        try:
            job: SurveyJob = cloudpickle.loads(self._content)
        except Exception as failure:
            raise _worker_error(
                f"worker {address}",
                f"{type(failure).__name__}: {failure}",
                "a SurveyModel whose modules can be imported on the worker",
                fix="install the model's modules on the workers, or define the model in the file that --model names",
            ) from None
        if read_mark(job.folder.points_identity) != self._identity:
            raise _worker_error(
                f"worker {address}",
                f"no such folder {job.folder.path}",
                "a file system that all workers share, at the same path",
                fix="pass --folder and files on a file system that all workers share",
            )
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        net = job.model.net.to(_device_of_worker(self._device, self._worker.name)).eval()
        return replace(job, model=replace(job.model, net=net))


def _device_of_worker(device: str, name: object) -> torch.device:
    """Return the torch device ``device``. For plain ``cuda`` the GPUs of the machine are taken in turn, by the number
    ``name`` of a worker of a local cluster. Raises SL605 if the device is not there.
    """
    from shiplap.plugin_api import verbs

    if device == "cuda" and isinstance(name, int) and torch.cuda.device_count():
        device = f"cuda:{name % torch.cuda.device_count()}"
    verbs.require_device(device)
    return torch.device(device)


def _run_task(plugin: str, task: Callable[[SurveyJob, Any], Any], item: Any) -> Any:
    """Return ``task(job, item)``, run on the Dask worker of this process. ``plugin`` is the name of the registered
    :class:`JobPlugin` that holds the job.
    """
    return task(cast(JobPlugin, get_worker().plugins[plugin]).open_job(), item)


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
        """Start ``workers`` local processes or connect to ``scheduler``. If either fails, everything that was started
        is ended before the error is raised.
        """
        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors are raised, and tracebacks are not shown
        self._device, self._name = device, f"shiplap-survey-{os.getpid()}-{time.time_ns()}"
        self._plugin: JobPlugin | None = None
        self._local, self._open = workers, contextlib.ExitStack()
        self._cluster: Any = scheduler
        try:
            if workers is not None:
                self._cluster = self._start_cluster(workers)
            self._client = self._connect(_REACH)
        except BaseException:
            self._open.close()
            raise

    def _start_cluster(self, workers: int) -> LocalCluster:
        """Start and return a Dask cluster of ``workers`` processes on this machine, which ``close`` ends. Raises SL828
        if they do not start.
        """
        scratch = self._open.enter_context(tempfile.TemporaryDirectory(prefix="shiplap-survey-"))
        threads = _THREADS if (self._device or "cpu").startswith("cuda") else 1
        try:
            return self._open.enter_context(
                LocalCluster(
                    n_workers=workers,
                    threads_per_worker=threads,
                    host="127.0.0.1",
                    dashboard_address="127.0.0.1:0",
                    security=True,  # other users of this machine can reach its ports, and a task is any program
                    memory_limit=None,
                    local_directory=scratch,
                    silence_logs=logging.CRITICAL,
                )
            )
        except Exception as failure:  # a process that cannot be started has many reasons
            got = f"{type(failure).__name__}: {failure}".splitlines()[0]
            raise _worker_error("the local Dask cluster", got, f"{workers} processes that start") from None

    def _connect(self, seconds: float) -> Client:
        """Connect to the scheduler within ``seconds``, set ``dashboard`` (an address) and ``workers`` (the number of
        worker threads), and return the client. Raises SL827 if the scheduler does not answer.
        """
        try:
            client = Client(self._cluster, timeout=seconds, set_as_default=False)
            self.dashboard, self.workers = str(client.dashboard_link), self._count_threads(client)
        except Exception as failure:  # addresses, certificates and protocols fail in many ways
            raise error(
                "SL827",
                where=str(self._cluster),
                got=f"{type(failure).__name__}: {failure}".splitlines()[0],
                expected=f"a Dask scheduler that answers within {seconds:.0f} s, such as tcp://10.0.0.1:8786",
            ) from None
        self._seen = time.monotonic()
        return client

    def _count_threads(self, client: Client) -> int:
        """Return the number of threads of all workers of the scheduler, which is how many tasks run at a time. Raises
        ``_LostError`` if the scheduler does not answer.
        """
        if client.status != "running":
            raise _LostError("no connection")
        try:
            state = client.sync(cast(Any, client.scheduler).identity, n_workers=-1, callback_timeout=_PATIENCE)
        except Exception:
            raise _LostError("no answer") from None
        return sum(int(worker["nthreads"]) for worker in state["workers"].values())

    def share(self, job: SurveyJob) -> None:
        """Make ``job`` available to the tasks that are run from now on: a plugin with the pickled job is registered
        with the scheduler, which sends it to every worker.
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = None if self._local is None else max(1, cores // self._local)
        self._plugin = JobPlugin(job, self._device or job.model.device.type, threads)
        try:
            self._register()
        except _LostError:
            self._reconnect()

    def _register(self) -> None:
        """Register ``_plugin``, which carries the job, with the scheduler and its workers. Raises ``_LostError`` if the
        scheduler does not answer, and SL828 if a worker cannot load the plugin.
        """
        assert self._plugin is not None
        try:
            self._client.register_plugin(self._plugin, name=self._name)
        except OSError:
            raise _LostError("no answer") from None
        except Exception as failure:  # a worker that cannot import the plugin
            expected = "shiplap-sparse3d[survey] on every worker"
            raise _worker_error("a Dask worker", f"{type(failure).__name__}: {failure}", expected) from None

    def run(
        self, task: Callable[[SurveyJob, Item], Result], items: Iterable[Item], *, ordered: bool = False
    ) -> Iterator[tuple[Item, Result]]:
        """Run ``task(job, item)`` for each item on the workers, and yield (item, result) pairs as they are ready or, if
        ``ordered``, in the order of ``items``. When the scheduler is lost, unfinished items run again after a new
        connection.
        """
        waiting = deque(enumerate(items))
        running: dict[Future[Any], tuple[int, Item]] = {}
        ready: dict[int, tuple[Item, Result]] = {}
        ended: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        sent, look = 0, 0.0
        while waiting or running or ready:
            try:
                if time.monotonic() >= look:
                    self._check_workers()
                    look = time.monotonic() + _LOOK
                # One runs at least: fewer workers than before, and the first result would be waited for forever.
                while waiting and (not running or len(running) + len(ready) < 2 * self.workers + 2):
                    future = self._submit(task, *waiting[0], ended)
                    running[future] = waiting.popleft()
                with contextlib.suppress(queue.Empty):
                    future = ended.get(timeout=_LOOK)
                    # A future that was given up after a lost connection may still end.
                    if future in running:
                        place, item = running.pop(future)
                        waiting.appendleft((place, item))
                        ready[place] = item, self._take_result(future, task, item)
                        waiting.popleft()
            except _LostError:
                # ``extendleft`` reverses, so the items come back in their old order.
                waiting.extendleft(sorted(running.values(), key=lambda each: -each[0]))
                running.clear()
                self._reconnect()
            while ready and (not ordered or sent in ready):
                yield ready.pop(sent if ordered else next(iter(ready)))
                sent += 1

    def _submit(
        self, task: Callable[..., Any], place: int, item: Any, ended: queue.SimpleQueue[Future[Any]]
    ) -> Future[Any]:
        """Send ``task`` for ``item`` (number ``place`` of its run) to the cluster and return its future, which is put
        into the queue ``ended`` when it ends. Raises ``_LostError`` if the scheduler does not answer.
        """
        try:
            # A new key each time: for a known one Dask would return the earlier result.
            key = f"{task.__name__}-{self._name}-{place}-{time.time_ns()}"
            future = self._client.submit(_run_task, self._name, task, item, key=key, pure=False)
        except Exception:
            raise _LostError("no answer") from None
        future.add_done_callback(ended.put)
        return future

    def _take_result(self, future: Future[Any], task: Callable[..., Any], item: Any) -> Any:
        """Return the result of the ended ``future`` of ``task`` for ``item``, or raise the task's error. Raises SL828
        for a task whose workers died repeatedly, and ``_LostError`` if the scheduler does not answer.
        """
        failure: Any
        try:
            if future.status == "error":
                failure = future.exception(timeout=_PATIENCE)
            elif future.status == "finished":
                return future.result(timeout=_PATIENCE)
            else:
                raise _LostError("no connection")
        except (OSError, CancelledError):
            raise _LostError("no answer") from None
        if isinstance(failure, KilledWorker):
            raise _worker_error(
                f"{task.__name__} {item}",
                "a task whose workers died again and again",
                "workers with enough memory for a tile and its halo",
                fix="pass a smaller --tile, or start workers with more memory; finished tiles are kept",
            )
        raise failure

    def _check_workers(self) -> None:
        """Set ``workers`` to the number of worker threads of the cluster now. Raises SL827 when there have been none
        for 30 seconds.
        """
        self.workers = self._count_threads(self._client)
        if self.workers:
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > _PATIENCE:
            raise error(
                "SL827",
                where=str(getattr(self._cluster, "scheduler_address", self._cluster)),
                what="the Dask scheduler has no workers",
                got=f"no worker for {_PATIENCE:.0f} s",
                expected="at least one",
                fix="start workers, and run the same command again; finished tiles are kept",
            )

    def _reconnect(self) -> None:
        """Replace the client by a new connection to the scheduler, which may have been restarted, and register the job
        again. Raises SL827 if the scheduler does not answer for 30 seconds.
        """
        until = time.monotonic() + _PATIENCE
        while True:
            with contextlib.suppress(Exception):
                self._client.close(timeout=1)
            with contextlib.suppress(_LostError):
                self._client = self._connect(max(0.1, until - time.monotonic()))
                # A scheduler that was started again does not have the plugin.
                return self._register()

    def close(self) -> None:
        """Remove the job from the workers, close the client, and end the cluster if this engine has started it. Errors
        on the way are ignored.
        """
        with contextlib.suppress(Exception):
            if self._client.status == "running":
                self._client.sync(self._client._unregister_worker_plugin, self._name, callback_timeout=_REACH)
        with contextlib.suppress(Exception):
            self._client.close(timeout=_REACH)
        self._open.close()


def _worker_error(where: str, got: str, expected: str, fix: str = "") -> ShiplapError:
    """Return the error SL828 for workers of a Dask cluster that cannot be used, with these parts of its message."""
    return error("SL828", where=where, got=got, expected=expected, fix=fix)
