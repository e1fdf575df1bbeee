"""A survey on Dask writes the bytes of one process, whatever happens to workers and scheduler, or says what is wrong.

Most clusters here are threads of this process, which start at once; benchmarks/survey_faults.py kills processes.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import os
import pickle
import pickletools
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shiplap import ShiplapError
from shiplap_sparse3d.survey import SurveyModel, survey, tasks
from shiplap_sparse3d.survey import run as running
from shiplap_sparse3d.survey.folder import SurveyFolder
from shiplap_testing.effort import sampled
from tests.survey.models import build

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")
psutil = pytest.importorskip("psutil")
pytest.importorskip("laspy")
pytest.importorskip("lazrs")
clusters = pytest.importorskip("shiplap_sparse3d.survey.cluster")

SLOW = """
import multiprocessing, time
from tests.survey.models import build

model = build()
model.net.register_forward_pre_hook(lambda *_: time.sleep(0.3) if multiprocessing.parent_process() else None)
"""
SMALL: dict[str, Any] = {"tile": 20, "segment": 4000}


def start(port: int = 0, workers: int = 2) -> Any:
    return distributed.LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=False,
        protocol="tcp",
        host="127.0.0.1",
        scheduler_port=port,
        dashboard_address=None,
        silence_logs=50,
    )


@pytest.fixture
def cluster() -> Iterator[Any]:
    with start() as made:
        yield made


@pytest.fixture(scope="module")
def alone(corner: Path, model: SurveyModel, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("alone") / "out.laz"
    survey(corner, out, model, tile=20)
    return out.read_bytes()


class Once:
    """A progress function that calls ``action`` once, in the middle of a stage, and keeps the notes of the workers."""

    def __init__(self, stage: str, action: Callable[[], object]) -> None:
        self.stage, self.action, self.called = stage, action, False
        self.notes: list[str] = []

    def __call__(self, stage: str, done: int, total: int, note: str) -> None:
        if stage == "workers":
            self.notes.append(note)
        if stage == self.stage and 0 < done < total and not self.called:
            self.called = True
            self.action()


def test_two_workers_write_the_bytes_of_one(cluster: Any, corner: Path, alone: bytes, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int, str]] = []
    result = survey(
        corner,
        tmp_path / "out.laz",
        build(),
        scheduler=cluster.scheduler_address,
        progress=lambda *args: seen.append(args),
        **SMALL,
    )
    assert (tmp_path / "out.laz").read_bytes() == alone
    assert [path.name for path in tmp_path.iterdir()] == ["out.laz"]
    assert result.predicted == result.tiles == sum(name == "predict" for name, *_ in seen) - 1
    assert seen[0][:3] == ("workers", 0, 0)
    assert seen[0][3].startswith("dashboard of the workers: http://127.0.0.1:")
    assert all(worker.extensions["shiplap-survey"] == {} for worker in cluster.workers.values())


@pytest.mark.parametrize("stage", sampled(["read", "predict", "write"], long=["read", "write"]))
def test_a_worker_that_ends(
    stage: str, cluster: Any, corner: Path, alone: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end() -> None:
        cluster.sync(next(iter(cluster.workers.values())).close, executor_wait=False, nanny=False)

    monkeypatch.setitem(tasks.TOGETHER, "cpu", 40_000)  # it has several tiles then, as on a GPU
    out, progress = tmp_path / "out.laz", Once(stage, end)
    survey(corner, out, build(), scheduler=cluster.scheduler_address, progress=progress, **SMALL)
    assert progress.called
    assert out.read_bytes() == alone


@pytest.mark.long
@pytest.mark.parametrize("stage", sampled(["read", "predict"], long=["read"]))
def test_a_scheduler_that_is_started_again(
    stage: str, corner: Path, alone: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The survey says once that it waits, and Dask logs no traceback. Tasks after the first end after the scheduler,
    so that some are lost with it.
    """
    shown: list[Any] = []
    started, ended, real = itertools.count(), threading.Event(), clusters.JobTicket.run

    def run(ticket: Any, task: Any, item: Any) -> Any:
        if task.__name__ == {"read": "sort_segment", "predict": "predict_group"}[stage] and next(started):
            assert ended.wait(60)
        return real(ticket, task, item)

    monkeypatch.setattr(clusters.JobTicket, "run", run)
    monkeypatch.setattr(logging.getLogger("distributed.client"), "handle", shown.append)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = [start(port)]

    def restart() -> None:
        old = made.pop()
        for worker in [*old.workers.values()]:  # does not wait for its tasks
            old.sync(worker.close, executor_wait=False, nanny=False)
        old.close()
        ended.set()
        made.append(start(port))

    out, progress = tmp_path / "out.laz", Once(stage, restart)
    try:
        survey(corner, out, build(), scheduler=f"tcp://127.0.0.1:{port}", progress=progress, **SMALL)
    finally:
        made.pop().close()
    assert progress.called
    assert out.read_bytes() == alone
    assert sum(note.startswith("the scheduler does not answer; waiting for it") for note in progress.notes) == 1
    assert shown == []


def test_a_scheduler_that_is_gone(
    cluster: Any, corner: Path, alone: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says so, and another engine finishes the survey."""
    monkeypatch.setattr(clusters, "_PATIENCE", 0.5)
    out, address = tmp_path / "out.laz", cluster.scheduler_address
    with pytest.raises(ShiplapError, match="SL827") as caught:
        survey(corner, out, build(), scheduler=address, progress=Once("predict", cluster.close), **SMALL)
    assert caught.value.where == address
    result = survey(corner, out, build(), **SMALL)
    assert 0 < result.predicted < result.tiles
    assert out.read_bytes() == alone


@pytest.fixture
def refused(corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ShiplapError]:
    def call(address: str) -> ShiplapError:
        """Return the error for ``address``, after which no client is open, for whose end Dask would wait."""
        monkeypatch.setattr(clusters, "_REACH", 0.2)
        with pytest.raises(ShiplapError, match="SL827: the Dask scheduler cannot be used") as caught:
            survey(corner, tmp_path / "out.laz", build(), scheduler=address, **SMALL)
        clients = [each for each in gc.get_objects() if issubclass(type(each), distributed.Client)]
        assert {each.status for each in clients} <= {"closed"}
        assert caught.value.where == address
        assert list(tmp_path.iterdir()) == []
        return caught.value

    return call


@pytest.mark.parametrize("address", sampled(["tcp://127.0.0.1:9", "nowhere.invalid:8786"], 1))
def test_an_address_without_a_scheduler(address: str, refused: Callable[[str], ShiplapError]) -> None:
    assert str(refused(address).fix).startswith("start the scheduler")


@pytest.mark.parametrize("address", sampled(["127.0.0.1", "http://127.0.0.1:9", "tls://127.0.0.1:9"], 1))
def test_an_address_that_no_scheduler_has(address: str, refused: Callable[[str], ShiplapError]) -> None:
    assert "Scheduler at:" in str(refused(address).fix)


@pytest.mark.long
def test_the_address_of_a_worker_and_of_another_server(cluster: Any, refused: Callable[[str], ShiplapError]) -> None:
    """The dashboard accepts a connection, and waits for a request that ends, as this server does."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = refused(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
    assert error.got == "TimeoutError: no answer"
    assert "Scheduler at:" in str(error.fix)
    assert "Scheduler at:" in str(refused(next(iter(cluster.workers.values())).address).fix)


def test_a_cluster_without_workers(corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_PATIENCE", 0.5)
    progress = Once("", list)
    with start(workers=0) as empty, pytest.raises(ShiplapError, match="SL827: the Dask scheduler has no workers"):
        survey(corner, tmp_path / "out.laz", build(), scheduler=empty.scheduler_address, progress=progress, **SMALL)
    assert sum(note.startswith("no workers; waiting for them") for note in progress.notes) == 1


def test_a_worker_with_other_versions(
    cluster: Any, corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is here on the main thread, and workers are on others."""
    real = tasks.installed_versions

    def versions() -> dict[str, str]:
        here = real()
        return here if threading.current_thread() is threading.main_thread() else {**here, "torch": "1.0"}

    monkeypatch.setattr(tasks, "installed_versions", versions)
    with pytest.raises(ShiplapError, match="SL828") as caught:
        survey(corner, tmp_path / "out.laz", build(), scheduler=cluster.scheduler_address, **SMALL)
    assert caught.value.got == "torch 1.0"
    assert caught.value.expected.startswith("torch ")
    assert caught.value.where.startswith("worker tcp://127.0.0.1:")


def test_a_worker_decides_whether_tiles_are_batched(
    cluster: Any, corner: Path, alone: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client may have another device, or none. Who continues the survey, predicts the same batches."""
    out, folder, workers = tmp_path / "out.laz", tmp_path / "kept", list[str]()

    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SurveyModel, "check", lambda model: model.field)
    monkeypatch.setitem(tasks.TOGETHER, "cpu", 10**9)
    monkeypatch.setattr(tasks, "takes_batches", lambda *_: workers.append(distributed.get_worker().address) is None)
    call: dict[str, Any] = {"folder": folder, "keep": True, **SMALL}
    with pytest.raises(KeyboardInterrupt):
        survey(corner, out, build(), scheduler=cluster.scheduler_address, progress=Once("predict", stop), **call)
    assert len(workers) == 1
    monkeypatch.setattr(tasks, "takes_batches", lambda *_: False)
    survey(corner, out, build(), **call)
    assert out.read_bytes() == alone
    assert json.loads((folder / "survey.json").read_text())["points at a time"] == 10**9


@pytest.mark.parametrize("part", sampled(["folder", "input", "rights"], 1))
def test_a_worker_that_does_not_see_the_files(
    part: str, cluster: Any, corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are elsewhere, or they are another user's."""
    real, access = clusters.DaskEngine.share, os.access
    if part == "rights":
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "job.bin" and access(path, mode))

    def share(self: Any, job: Any) -> None:
        real(self, replace(job, source=tmp_path / "elsewhere" / "in.laz") if part == "input" else job)
        if part == "folder":
            self._ticket = self._ticket._replace(path=tmp_path / "elsewhere" / "job.bin")

    monkeypatch.setattr(clusters.DaskEngine, "share", share)
    with pytest.raises(ShiplapError, match="SL828") as caught:
        survey(corner, tmp_path / "out.laz", build(), scheduler=cluster.scheduler_address, **SMALL)
    assert "at the same path" in caught.value.expected
    assert caught.value.where.startswith("worker tcp://127.0.0.1:")
    assert str(tmp_path / "out.laz.survey" if part == "rights" else tmp_path / "elsewhere") in caught.value.got


def test_tasks_that_are_lost_again_and_again(
    cluster: Any, corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that is there, and has no result: the survey does not connect to it for ever."""

    def lose(*arguments: Any) -> None:
        raise clusters.CommClosedError

    monkeypatch.setattr(clusters.DaskEngine, "_submit", lose)
    with pytest.raises(ShiplapError, match="SL827") as caught:
        survey(corner, tmp_path / "out.laz", build(), scheduler=cluster.scheduler_address, **SMALL)
    assert "4 times" in caught.value.got


class Unsendable(torch.nn.Module):
    def __reduce__(self) -> Any:
        return __import__, ("no_such_module",)


def test_a_model_that_a_worker_cannot_import(
    cluster: Any, corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    monkeypatch.setattr(clusters, "deepcopy", lambda model: replace(model, net=Unsendable()))
    with pytest.raises(ShiplapError, match="SL828") as caught:
        survey(corner, tmp_path / "out.laz", model, scheduler=cluster.scheduler_address, **SMALL)
    assert "no_such_module" in caught.value.got


def test_a_scheduler_needs_no_shiplap_and_a_worker_reports_that_it_has_none(
    cluster: Any, corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler and the message of a worker unpickle the graph, of which a failure would end the worker."""
    sent, real = list[Any](), distributed.Client._graph_to_futures

    def record(client: Any, *arguments: Any, **options: Any) -> Any:
        sent.append(options.get("expr", arguments[:1]))
        return real(client, *arguments, **options)

    monkeypatch.setattr(distributed.Client, "_graph_to_futures", record)
    unknown = SimpleNamespace(loads=pickle.loads, dumps=lambda call: b"cno_such_module\nname\n.")
    monkeypatch.setattr(clusters, "pickle", unknown)
    with pytest.raises(ShiplapError, match="SL828") as caught:
        survey(corner, tmp_path / "out.laz", build(), scheduler=cluster.scheduler_address, **SMALL)
    assert caught.value.got == "ModuleNotFoundError: No module named 'no_such_module'"
    needed = {name for _, name, _ in pickletools.genops(pickle.dumps(sent)) if isinstance(name, str)}
    assert not any(name.startswith("shiplap") for name in needed)


def test_local_workers_that_do_not_start(corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script that starts the survey again in each worker, which imports it."""

    def fail(**options: Any) -> None:
        raise RuntimeError("Nanny failed to start.")

    monkeypatch.setattr(clusters, "LocalCluster", fail)
    with pytest.raises(ShiplapError, match="SL828") as caught:
        survey(corner, tmp_path / "out.laz", build(), workers=2, **SMALL)
    assert caught.value.got == "RuntimeError: Nanny failed to start."
    assert "__main__" in str(caught.value.fix)


@pytest.mark.parametrize("own", ["mine", ["mine", "of_the_site"], []])
def test_local_workers_import_the_tasks_when_they_start(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the modules that the user's configuration of Dask names, so that no task waits for the import."""
    monkeypatch.setattr(clusters, "LocalCluster", lambda **options: SimpleNamespace(workers={}, options=options))
    with contextlib.ExitStack() as opened, dask.config.set({"distributed.worker.preload": own}):
        loaded = clusters._begin_cluster(2, "cpu", opened).result().options["preload"]
    assert loaded == [*([own] if own == "mine" else own), "shiplap_sparse3d.survey.tasks"]


def test_a_link_of_the_dashboard_with_an_unknown_variable(cluster: Any) -> None:
    """The user's configuration has it for another machine; the survey goes on without the note."""
    notes: list[Any] = []
    with dask.config.set({"distributed.dashboard.link": "{NO_SUCH_VARIABLE}/{port}"}):
        clusters.DaskEngine(None, cluster.scheduler_address, "cpu", lambda *note: notes.append(note)).close()
    assert notes == []


def test_a_damaged_tile_and_a_full_disk(
    cluster: Any, corner: Path, alone: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, folder = tmp_path / "out.laz", tmp_path / "kept"

    def damaged(*arguments: Any) -> None:
        path = next((folder / "classes").iterdir())
        path.write_bytes(path.read_bytes()[1:])
        real(*arguments)

    def full(*arguments: Any) -> None:
        raise OSError(28, os.strerror(28), str(folder / "classes"))

    call: dict[str, Any] = {"scheduler": cluster.scheduler_address, "folder": folder, **SMALL}
    real = running.write_cloud
    with monkeypatch.context() as patched:
        patched.setattr(running, "write_cloud", damaged)
        with pytest.raises(ShiplapError, match="SL824: the survey is not complete"):
            survey(corner, out, build(), **call)
    with monkeypatch.context() as patched:
        patched.setattr(SurveyFolder, "write_result", full)
        with pytest.raises(ShiplapError, match="SL602: the survey cannot be written") as caught:
            survey(corner, out, build(), **call)
        assert caught.value.got == "No space left on device"
    assert survey(corner, out, build(), **call).predicted == 1
    assert out.read_bytes() == alone


def test_arguments_that_contradict_each_other(corner: Path, tmp_path: Path) -> None:
    for wrong in ({"workers": 2, "scheduler": "tcp://127.0.0.1:9"}, {"workers": 0}):
        with pytest.raises(ShiplapError, match="SL613"):
            survey(corner, tmp_path / "out.laz", build(), **wrong)  # type: ignore[arg-type]


def test_without_dask(corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ShiplapError, match="SL603") as caught:
        survey(corner, tmp_path / "out.laz", build(), workers=2)
    assert caught.value.got == "no distributed"


def test_a_job_that_a_worker_reads(corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network arrives on the device that was asked for, in evaluation mode, and the client's stays as it was.

    A worker reads a job once, and another one of the same folder again.
    """
    worker = type("Worker", (), {"address": "here", "name": 3, "extensions": {}})()
    monkeypatch.setattr(clusters, "get_worker", lambda: worker)
    job = running.open_job(corner, tmp_path, build(), ())
    job.model.net.train()
    tickets = []
    for segment in (100, 200):
        engine = type("Engine", (), {"_device": "meta", "_cluster": "an address"})()
        clusters.DaskEngine.share(engine, replace(job, segment=segment))
        tickets.append(engine._ticket)
        opened = engine._ticket.open_job()
        assert opened is engine._ticket.open_job()
        assert (opened.segment, opened.model.device.type) == (segment, "meta")
        assert not opened.model.net.training
    assert job.model.net.training
    assert job.model.device.type == "cpu"
    with pytest.raises(ShiplapError, match="SL828"):
        tickets[0].open_job()
    clusters._forget_job(tickets[0].path, worker)
    assert worker.extensions["shiplap-survey"] == {}


@pytest.mark.slow
@pytest.mark.long
def test_ctrl_c_ends_a_survey_with_one_line(corner: Path, alone: bytes, tmp_path: Path) -> None:
    """The terminal sends SIGINT to all processes, also in the middle of a tile; the same command continues."""
    out, slow = tmp_path / "out.laz", tmp_path / "slow.py"
    slow.write_text(SLOW)
    command = [sys.executable, "-m", "shiplap.cli", "survey", str(corner), str(out), "--model", f"{slow}:model"]
    process = subprocess.Popen(
        [*command, "--tile", "20", "--workers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )
    while not (tmp_path / "out.laz.survey" / "classes").exists() and process.poll() is None:
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 130, text
    assert text.splitlines()[-1] == "the survey was stopped; the same command continues it"
    assert "Traceback" not in text
    assert psutil.wait_procs(children, 60)[1] == []
    result = survey(corner, out, build(), tile=20)
    assert 0 < result.predicted < result.tiles
    assert out.read_bytes() == alone


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_workers_on_gpus_write_the_bytes_of_one_process_on_a_gpu(corner: Path, tmp_path: Path) -> None:
    """Two workers take the GPUs of this machine in turn; the model of the client stays on the CPU."""
    model, out = build(), tmp_path / "out.laz"
    survey(corner, out, model, workers=2, device="cuda", **SMALL)
    assert model.device.type == "cpu"
    survey(corner, tmp_path / "alone.laz", build(), device="cuda", **SMALL)
    assert out.read_bytes() == (tmp_path / "alone.laz").read_bytes()


@pytest.mark.slow
@pytest.mark.long
def test_a_model_that_is_refused_ends_local_workers_that_start(corner: Path, tmp_path: Path) -> None:
    """The model is checked meanwhile; nothing of the cluster stays, and no survey is written."""
    before, model = {*psutil.Process().children(recursive=True)}, build()
    model.net.register_forward_hook(
        lambda net, args, out: out.replace(out.feats + out.feats.mean(0))
    )  # it looks beyond its layers
    with pytest.raises(ShiplapError, match="SL820"):
        survey(corner, tmp_path / "out.laz", model, workers=2)
    begun = {*psutil.Process().children(recursive=True)} - before
    workers = [child for child in begun if "spawn_main" in str(child.cmdline())]
    assert psutil.wait_procs(workers, 30)[1] == []
    assert not (tmp_path / "out.laz.survey").exists()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("asked", [None, "3"], ids=["of-the-cores", "of-the-user"])
def test_the_threads_of_local_workers(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has its share of the cores, although Dask's default is 1, unless the user has set a number."""
    monkeypatch.setattr(clusters, "CPU_COUNT", 4)
    for name in ("OMP", "MKL"):
        monkeypatch.setenv(f"{name}_NUM_THREADS", "")  # Dask changes it, and it is restored
        monkeypatch.delenv(f"{name}_NUM_THREADS")
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    with contextlib.ExitStack() as opened:
        cluster = clusters._begin_cluster(2, "cpu", opened).result()
        with distributed.Client(cluster, set_as_default=False) as client:
            found = client.run(lambda: [os.environ[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL")])
    assert [*found.values()] == [[asked or "2"] * 2] * 2


@pytest.mark.slow
@pytest.mark.long
def test_a_local_worker_that_is_killed(corner: Path, alone: bytes, tmp_path: Path) -> None:
    """Processes, of which one is killed while it predicts; Dask starts it again."""

    def kill() -> None:
        workers = [child for child in psutil.Process().children(recursive=True) if "spawn_main" in str(child.cmdline())]
        workers[0].send_signal(signal.SIGKILL)

    out, progress = tmp_path / "out.laz", Once("predict", kill)
    survey(corner, out, build(), workers=2, progress=progress, **SMALL)
    assert progress.called
    assert out.read_bytes() == alone
