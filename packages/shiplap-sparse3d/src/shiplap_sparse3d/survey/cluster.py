"""The tasks of a survey on Dask: a cluster of this machine, or one that runs already.

Dask gives a task of a worker that died to another one, and starts local workers again. What it cannot know is added
here: workers of other versions, a scheduler that is started again, and a cluster that stays without workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import multiprocessing.resource_tracker
import operator
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import cloudpickle
import dask
import torch
from dask.system import CPU_COUNT
from distributed import Client, KilledWorker, LocalCluster, Status, get_worker
from distributed.client import ClosedClientError
from distributed.comm.core import CommClosedError

from shiplap.plugin_api import verbs
from shiplap.plugin_api.files import work_folder, write_whole
from shiplap_sparse3d.errors import failure_text, require_same, survey_error
from shiplap_sparse3d.survey import tasks
from shiplap_sparse3d.survey.tasks import Item, Progress, Result, Results, SurveyEngine, SurveyJob, Task

_REACH, _PATIENCE = 5.0, 25.0  # seconds for the first contact with a scheduler, and for one that was lost
_ADDRESS = 'pass what `dask scheduler` prints after "Scheduler at:"; tls:// needs certificates in Dask configuration'
_JOBS = "shiplap-survey"  # where a worker keeps the jobs that it has read
_READING = threading.Lock()  # one thread of a worker reads a job


class JobTicket(NamedTuple):
    """What a worker needs to read the job of a survey. ``path`` is the file of the pickled job, and ``digest`` its
    SHA-256 in hexadecimal. ``device`` is the device for the network. ``versions`` are the client's versions, by name.
    """

    path: Path
    digest: str
    device: str
    versions: dict[str, str]

    def open_job(self) -> SurveyJob:
        """Return the job, which is read from its file at the first call on a worker and kept there. Raise ``SL828`` or
        ``SL605`` as :meth:`read_job` does.
        """
        worker = get_worker()
        with _READING:
            known: dict[Path, tuple[str, SurveyJob]] = worker.extensions.setdefault(_JOBS, {})
            if known.get(self.path, ("",))[0] != self.digest:
                known.pop(self.path, None)  # before another network needs the memory
                known[self.path] = self.digest, self.read_job(worker)
            return known[self.path][1]

    def run(self, task: Task[Item, Result], item: Item) -> Result:
        """Return ``task(job, item)``, computed in this process, which is a Dask worker. The job is that of
        :meth:`open_job`.
        """
        return task(self.open_job(), item)

    def read_job(self, worker: Any) -> SurveyJob:
        """Return the job from its file, with its network on the device of ``worker`` and in evaluation mode.

        Raise ``SL828`` if versions differ from the client's, if the job cannot be read or unpickled, or if its input is
        missing. Raise ``SL605`` if the worker does not have the device.
        """
        where, fix = f"worker {worker.address}", "install the same versions on the client and all workers"
        require_same("SL828", where, tasks.installed_versions(), self.versions, fix)
        shared = "files at the same path on all workers, which this user can read"
        move = "pass an input and a --folder that all workers share, and start the workers as the user of the survey"
        content = self.path.read_bytes() if os.access(self.path, os.R_OK) else b""
        if hashlib.sha256(content).hexdigest() != self.digest:
            raise survey_error("SL828", where, f"no file of this survey at {self.path}", shared, move)
        try:
            job: SurveyJob = cloudpickle.loads(content)
        except Exception as failure:
            expected = "a SurveyModel whose modules can be imported on the worker"
            fix = "install the model's modules on the workers, or define the model in the file that --model names"
            raise survey_error("SL828", where, failure_text(failure), expected, fix) from None
        if job.slices is None and not os.access(job.source, os.R_OK):  # sorting reads the input, later tasks do not
            raise survey_error("SL828", where, f"no file {job.source} that can be read", shared, move)
        device, gpus = self.device, torch.cuda.device_count()
        if device == "cuda" and isinstance(worker.name, int) and gpus:  # the GPUs in turn, for local workers
            device = f"cuda:{worker.name % gpus}"
        verbs.require_device(device)
        job.model.net.to(device).eval()
        return job


def _forget_job(path: Path, dask_worker: Any) -> None:
    """Remove the job that was read from the file ``path``, and its network, from the Dask worker ``dask_worker``."""
    dask_worker.extensions.get(_JOBS, {}).pop(path, None)


class _BoundClient(Client):
    """A Dask client whose start fails after a limit of time, even if a server accepts the connection but is silent."""

    def start(self, **options: Any) -> None:
        """Start the client with ``options``, as Dask's client does. If this fails, raise the exception and close the
        client, so that its ``__del__`` does not wait for the connection.
        """
        try:
            super().start(callback_timeout=self._timeout + 0.5, **options)  # after the limit of the connection
        except BaseException:
            self.status = "closed"
            self._loop_runner.stop()
            raise


class DaskEngine(SurveyEngine):
    """The engine that runs the tasks of a survey on the workers of a Dask cluster. Local workers start in the
    background, and :meth:`share` waits for them.

    Args:
        workers: the number of local processes to start, or None to use the workers of ``scheduler``.
        scheduler: the address of a running scheduler. It is used if ``workers`` is None.
        device: the device of the workers' networks.
        progress: called with the stage ``workers`` and a note for the user, as the ``progress`` of :func:`survey`.

    Raises:
        SurveyError: ``SL827`` if the scheduler does not answer.
    """

    def __init__(self, workers: int | None, scheduler: str | None, device: str, progress: Progress) -> None:
        for name in ("distributed", "distributed.client"):  # errors are raised, and tracebacks are not shown
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._device, self._ticket, self._opened = device, cast(Any, None), contextlib.ExitStack()
        self._note = partial(progress, "workers", 0, 0)
        self._cluster: Any = scheduler if workers is None else _begin_cluster(workers, device, self._opened)
        if workers is None:
            self._connect(_REACH)

    def _connect(self, seconds: float) -> None:
        """Connect to the scheduler of the cluster within ``seconds``, and pass the address of its dashboard to the
        user. Raise ``SL827`` if the scheduler does not answer.
        """
        try:
            self._client: Any = _BoundClient(self._cluster, timeout=seconds, set_as_default=False)
        except Exception as failure:  # addresses, certificates and protocols fail in many ways
            got = "TimeoutError: no answer" if isinstance(failure, TimeoutError) else failure_text(failure)
            expected = f"a Dask scheduler that answers within {seconds:.0f} s, such as tcp://10.0.0.1:8786"
            fix = "" if type(failure) is OSError else _ADDRESS  # nothing listens there
            raise survey_error("SL827", self._cluster, got, expected, fix) from None
        self._look, self._alone_since = 0.0, math.inf
        with contextlib.suppress(KeyError):  # of a variable in the link that the user's configuration has
            self._note(f"dashboard of the workers: {self._client.dashboard_link}")

    def share(self, job: SurveyJob) -> None:
        """Write the pickled ``job``, with a copy of its network on the CPU, into the folder of the survey. Workers read
        it there when they run their first task. Wait for local workers that are starting, and raise ``SL828`` if they
        do not start.
        """
        if isinstance(self._cluster, Future):
            try:
                self._cluster = self._cluster.result()
            except Exception as failure:  # a process that cannot be started has many reasons
                got, fix = failure_text(failure), 'in a script, call survey() below `if __name__ == "__main__":`'
                raise survey_error("SL828", "the local Dask cluster", got, "processes that start", fix) from None
            self._connect(_REACH)
        (model := deepcopy(job.model)).net.cpu()  # with its field, which workers need not derive again
        content, path = cloudpickle.dumps(replace(job, model=model)), job.folder.path / "job.bin"
        write_whole(path, content, lasting=False)
        digest = hashlib.sha256(content).hexdigest()
        self._ticket = JobTicket(path, digest, self._device, tasks.installed_versions())

    def run(self, task: Task[Item, Result], items: Iterable[Item], *, ordered: bool = False) -> Results[Item, Result]:
        """Yield ``(item, result)`` for each of ``items`` as :meth:`SurveyEngine.run` does, with tasks on the workers.

        If the connection to the scheduler is lost, connect again, also to a restarted scheduler, and run the items that
        have no result. Raise ``SL827`` if it does not answer within 25 seconds or is lost four times without a result
        in between. Raise ``SL828`` if a task ends its workers again and again, or if a worker lacks a module.
        """
        left, lost = dict.fromkeys(items), 0
        while lost < 4:
            try:
                for item, result in super().run(task, list(left), ordered=ordered):
                    lost = 0
                    del left[item]
                    yield item, result
                return
            except KilledWorker as death:
                got, expected = "a task whose workers died again and again", "workers with enough memory for a tile"
                fix = "pass a smaller --tile, or start workers with more memory; finished tiles are kept"
                raise survey_error("SL828", str(death.task).rpartition("-")[0], got, expected, fix) from None
            except ModuleNotFoundError as missing:
                expected, fix = "a worker that has the packages of the client", "install them on all workers"
                raise survey_error("SL828", "a Dask worker", failure_text(missing), expected, fix) from None
            except (CancelledError, CommClosedError, ClosedClientError):
                lost += 1
                self._note(f"the scheduler does not answer; waiting for it and its workers, {_PATIENCE:.0f} s at most")
                with contextlib.suppress(Exception):
                    self._client.close(timeout=1)
                self._connect(_PATIENCE)
        raise survey_error("SL827", self._cluster, f"tasks lost {lost} times in turn", "a scheduler that keeps them")

    def _count_places(self) -> int:
        """Return how many items may be begun at a time, which is two for each thread of the workers, or one if there
        are none. Raise ``SL827`` after 25 seconds without workers. Raise ``CommClosedError`` if the scheduler does not
        answer.
        """
        if self._client.status != "running":
            raise CommClosedError
        if (now := time.monotonic()) >= self._look:
            try:
                self._workers = sum(self._client.nthreads(callback_timeout=_PATIENCE).values())
            except Exception:
                raise CommClosedError from None
            self._look = now + tasks.LOOK
            self._alone_since = math.inf if self._workers else min(now, self._alone_since)
            if now == self._alone_since:
                self._note(f"no workers; waiting for them, {_PATIENCE:.0f} s at most")
        if now - self._alone_since > _PATIENCE:
            what, fix = "the Dask scheduler has no workers", "start workers, and run the same command again"
            raise survey_error("SL827", self._cluster, f"no worker for {_PATIENCE:.0f} s", "at least one", fix, what)
        return max(1, 2 * self._workers)

    def _submit(self, task: Task[Item, Result], item: Item) -> Future[Result]:
        """Send ``task`` with ``item`` to the cluster. Return a future of Python, which completes with Dask's future.

        The task calls what it unpickles, so that a scheduler without this package can pass it on, and a worker without
        it reports that.
        """
        key = f"{task.__name__}-{item}-{time.time_ns()}"  # it is on the dashboard
        content = pickle.dumps(partial(self._ticket.run, task, item))
        sent = self._client.get({key: (operator.call, (pickle.loads, content))}, key, sync=False)
        return asyncio.run_coroutine_threadsafe(sent._result(), self._client.loop.asyncio_loop)

    def close(self) -> None:
        """Remove the job from the workers of a running cluster and close the client, ignoring errors. End a cluster
        that this engine has started.
        """
        with contextlib.suppress(Exception):
            if self._ticket and isinstance(self._cluster, str) and self._client.status == "running":
                limits = {"on_error": "ignore", "callback_timeout": _REACH}  # Client.run has no limit of time
                self._client.sync(self._client._run, _forget_job, self._ticket.path, **limits)
        with contextlib.suppress(Exception):
            self._client.close(timeout=_REACH)
        self._opened.close()


def _begin_cluster(workers: int, device: str, opened: contextlib.ExitStack) -> Future[LocalCluster]:
    """Begin to start a Dask cluster of ``workers`` processes on this machine, and return its future. For a ``device``
    that is a GPU each process has several threads, and otherwise one. The cluster ends when ``opened`` is closed. If it
    is still starting then, the processes that have started end at once.
    """
    place, threads = "distributed.nanny.pre-spawn-environ", tasks.THREADS if device.startswith("cuda") else 1
    # Dask sets each of these to 1, unless the environment has another value. Torch takes the number of MKL.
    cores = os.environ.get("OMP_NUM_THREADS", max(1, CPU_COUNT // workers))
    numbers = {f"{place}.{each}_NUM_THREADS": cores for each in ("OMP", "MKL")}
    # The profile, taken a hundred times a second, and the ticks, fifty times for each process, take processor time and
    # Python's lock from the threads that run a network.
    quiet = {"distributed.worker.profile.enabled": False, "distributed.admin.tick.interval": "1s"}
    opened.enter_context(dask.config.set({**quiet, **numbers}))
    scratch = opened.enter_context(work_folder("survey"))
    # Other users of this machine can reach the ports, and a task is any program: so the cluster has certificates.
    options: dict[str, Any] = {"security": True, "memory_limit": None, "silence_logs": logging.CRITICAL}
    options |= {"n_workers": workers, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    # Workers import the tasks, and PyTorch with them, while the client checks the model.
    loaded = dask.config.get("distributed.worker.preload", [])
    loaded = [*([loaded] if isinstance(loaded, str) else loaded), tasks.__name__]
    options |= {"threads_per_worker": threads, "local_directory": str(scratch), "preload": loaded}
    # Workers inherit this mask, so that Ctrl-C, which goes to all processes of a terminal, is the client's alone.
    before, mask = {*multiprocessing.active_children()}, (signal.SIG_BLOCK, {signal.SIGINT})
    # The start of the resource tracker, which the first worker needs, would take the mask away.
    multiprocessing.resource_tracker.ensure_running()
    # In a thread of its own: this one gets Ctrl-C, and has other work while the processes start.
    starting = ThreadPoolExecutor(1, "", signal.pthread_sigmask, mask).submit(LocalCluster, **options)
    opened.callback(_end_cluster, starting, before)
    return starting


def _end_cluster(starting: Future[LocalCluster], before: set[Any]) -> None:
    """End the cluster ``starting``, now or as soon as it has started. Before that, end its workers at once, even if
    they are starting or running a task. While the cluster is starting, these are taken to be the child processes of
    this process that are not in ``before``. A task that is not finished has written nothing that counts.
    """
    if starting.done() and starting.exception() is None:
        for nanny in starting.result().workers.values():
            nanny.status = Status.closing_gracefully  # it starts no new worker
            with contextlib.suppress(ProcessLookupError, TypeError):  # it has ended, or has no number
                os.kill(nanny.pid, signal.SIGKILL)
    else:
        for child in {*multiprocessing.active_children()} - before:
            child.kill()
    starting.add_done_callback(_close_cluster)


def _close_cluster(started: Future[LocalCluster]) -> None:
    """Close the cluster ``started``, unless its start has failed. Ignore errors."""
    with contextlib.suppress(Exception):
        started.result().close()
