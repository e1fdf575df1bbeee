"""Fixtures of all tests: names that no other test declares, compilers and settings left as they were."""

import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import typer.testing
from typer.main import get_command

from shiplap_testing import changed, compilers
from shiplap_testing.paths import REPOSITORY, SEARCHED, searched

# Before torch is loaded. Workers of pytest-xdist have as many threads each as there are cores: threads that spin while
# they wait for work take the cores from the other workers (half of the time of small convolutions).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The C++ around the kernels of a package is compiled for seconds; how fast it runs, no test asks.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
# Each process that compiles would start a pool of processes that import torch again, 5 s of processor time; the cores
# are busy with other tests anyway.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Programs that tests start find the helpers of the tests as the tests themselves do.
os.environ["PYTHONPATH"] = searched()
os.environ["PATH"] = compilers.path()

from shiplap_testing import private, workers
from shiplap_testing.forked import place, python, settle, shared

sys.path[:0] = [str(folder) for folder in SEARCHED]
import_module("tests")  # the namespace of all packages, before pytest makes a module of one folder of that name
pytest_plugins = ["shiplap_testing.changed", "shiplap_testing.cost"]
# A call of a verb in a test builds the commands of all verbs, 0.05 s; a program does so once, and so does a worker.
vars(typer.testing)["_get_command"] = cache(get_command)
_FAILED = pytest.StashKey[bool]()
_WORKERS = pytest.StashKey[workers.Workers]()

# Files of 8 s of processor time and more (2026-11-27), the longest first: whatever comes last, the workers of
# `make test` end at about the same time.
LONG = (
    "gpu/test_audit",  # on accelerators, by what they do: audits of every op, then what compiles, captures or tunes
    "dense/gpu/test_direct_configs",
    "sparse3d/gpu/test_lowlevel",
    "sparse3d/gpu/test_maps",
    "dense/gpu/test_direct_audit",
    "sparse3d/gpu/test_graphs",
    "sparse3d/gpu/test_capture",
    "dense/gpu/test_direct",
    "dense/gpu/test_cuda",
    "slidesparse/gpu/test_graphs",
    "gpu/test_zoo_gpu",
    "sparse3d/gpu/test_package",
    "slidesparse/gpu/test_models",
    "backend/runtime/test_load",  # builds the device: files that need it would wait if they came at the same time
    "audit/test_zoo",
    "sparse3d/test_compile",
    "tests/test_examples",
    "judge/test_cheats",  # and with it the other files of the judge
    "kernels/native/test_deploy",
    "testing/test_defects",
    "dense/test_fuse_cpp",
    "kernels/triton/test_kernel",
    "tests/test_tools",
    "sparse3d/test_spconv_compile",
    "inductor/test_lower",
    "tuning/test_worker_process",
    "survey/test_survey",
    "dense/test_direct",
    "tests/test_distributions",
    "slidesparse/test_triton",
    "sparse3d/test_abi",
    "safe_io/test_lifetimes",
    "audit/test_power",
    "cli/test_audit",
    "sparse3d/fuse/test_fuse_triton",
    "rewrite/test_prove",
    "cli/test_explain",
    "inductor/test_explain",
    "rewrite/test_scope",
    "sparse3d/test_maps",
    "kernels/native/test_tvm_ffi",
    "backend/test_opinfo",
    "dense/rewrite/test_gated",
    "sandbox/test_launcher_pool",
    "audit/test_isolation",
    "audit/test_pairs",
    "cli/test_app",
    "cli/test_env",
    "audit/test_compiler",
    "dense/rewrite/test_group",
    "shiplap/tests/test_import",
    "packaging/test_extras",
    "audit/test_itself",
    "families/test_shipped_rewrites",
    "dense/test_triton",
    "cli/test_rewrite",
    "contributing/test_howtos",
    "plugin_api/test_interpreting",
    "tuning/sandboxed/test_confirm",
    "audit/test_beyond",
    "sparse3d/fuse/test_fuse_cpu",
    "cli/test_tune",
    "sparse3d/test_hopper",
    "safe_io/test_doors",
    "inductor/test_tune",
    "rewrite/test_near_miss",
    "backend/test_group",
    "dense/rewrite/test_models",
    "kernels/native/test_binding",
    "kernels/c/test_declaration",
    "backend/test_cli",
)


@pytest.fixture
def ns(request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of this test alone: ``@sl.op(f"{ns}::scale")``. Its ops go with it: no other test meets them.

    It is the same in each run, as are then the sources that are compiled for it.
    """
    from shiplap.dispatch import registry

    name = f"test{zlib.crc32(request.node.nodeid.encode()):x}"
    yield name
    for op in [op.spec.name for op in registry.declared_op_list() if op.spec.namespace == name]:
        registry.forget_op(op)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code or counters from another test."""
    from shiplap import torch_private

    torch_private.reset_compiler()
    yield
    torch_private.reset_compiler()


@pytest.fixture
def fresh_graphs(fresh_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are compiled anew, without gradients and on fixed values; choices have a store of this test's."""
    import torch

    from shiplap.torch_private import inductor_lowering

    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "shiplap"))
    torch.manual_seed(0)
    private.counters().clear()
    with inductor_lowering.without_graph_caches(), torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def forget_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the notices given so far, so that each test gets those that come once per process."""
    from shiplap.errors import base

    monkeypatch.setattr(base, "_announced", set())


@pytest.fixture(scope="session", autouse=True)
def vector_instructions(request: pytest.FixtureRequest) -> None:
    """A worker of a whole run tries once what its compiler and CPU can do, and the processes that tests start do not.

    It does so where it was not forked from a process that has. Tests that need an accelerator do without.
    """
    on_cpu = any(not item.get_closest_marker("gpu") for item in request.session.items)
    if on_cpu and hasattr(request.config, "workerinput") and private.VECTORS not in os.environ:
        private.try_instructions()


# Tests of a minute or so on an accelerator: they are spread one by one, and begin before all others.
ALONE = (
    "_audit",
    "every_config_of",
    "is_packaged",
    "is_captured_or",
    "for_eight_voxel_counts",
    "what_it_is_on_the_cpu",
    "reduce_overhead",
    "trains_on_cuda",
    "test_compiled",
)


def _is_alone(nodeid: str) -> bool:
    folder, _, name = nodeid.partition("[")[0].rpartition("/")
    return folder.endswith("/gpu") and any(part in name for part in ALONE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest tests first, then the files in the order of ``LONG``; the sort is stable.

    Tests that are near to a change keep the order in which they were selected.
    """
    if changed.is_used(config):
        return

    def place(item: pytest.Item) -> int:
        if _is_alone(item.nodeid):
            return -1
        return _place_of(item.nodeid.partition("::")[0].removesuffix(".py"))

    items.sort(key=place)


@cache
def _place_of(file: str) -> int:
    return next((number for number, name in enumerate(LONG) if f"/{file}".endswith(f"/{name}")), len(LONG))


def _unit(nodeid: str) -> str:
    """What one worker runs from its beginning to its end: tests with the same."""
    if _is_alone(nodeid):
        return nodeid
    function, file = nodeid.partition("[")[0], nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    if folder.endswith("/tests/judge"):
        return folder
    return function if folder.endswith("/gpu") and not folder.endswith("/tests/gpu") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile`` a file stays with one worker; files of families for accelerators are spread by function.

    The files about the judge stay together, since they share a process that takes seconds to start.

    All its tests in one worker would take as long as all the rest. A test that ends its worker runs once. pytest-xdist
    would give it to the next worker as well, until it has none.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit(nodeid)

        def remove_node(self, node: Any) -> str | None:
            units = self.assigned_work[node].values()
            left = [(unit, nodeid) for unit in units for nodeid, completed in unit.items() if not completed]
            if left:
                unit, crashed = left[0]
                unit[crashed] = True
            super().remove_node(node)
            return left[0][1] if left else None

    return Files(config, log)


def pytest_collection_finish() -> None:
    settle()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Workers that share a device take their part of its memory each: one that wants more is told so, and no other."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1 and item.get_closest_marker("gpu"):
        import torch

        if torch.cuda.is_available():  # the rest is for contexts, and for the programs that tests start
            torch.cuda.set_per_process_memory_fraction(0.8 / workers)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A worker whose device no longer answers ends after the test that broke it; pytest-xdist starts another one.

    An illegal access leaves the CUDA context of a process unusable. Each later test of the worker would fail for it,
    and as a failing test takes no time, the worker would take most of the remaining files.
    """
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    if report.when == "teardown" and item.stash.get(_FAILED, False) and item.get_closest_marker("gpu"):
        broken = _device_error()
        if broken and hasattr(item.config, "workerinput"):
            os._exit(70)
        if broken:
            item.session.shouldfail = f"the device stopped answering after {item.nodeid}: {broken}"
    return report


def _device_error() -> str:
    """Return the first line of the error that synchronizing the device raises, empty if it works."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def pytest_configure(config: pytest.Config) -> None:
    """Most tests run references on purpose; those about the notice catch it themselves.

    Whoever hands out tests and runs none imports neither torch nor shiplap.
    """
    if config.getoption("dist", "no") == "no":
        config.addinivalue_line("filterwarnings", "ignore::shiplap.errors.ShiplapNotice")
        if getattr(config, "workerinput", {}).get("workerid") == "gw0" and not workers.possible():
            compilers.headers()
    else:
        shared()  # one folder for all workers
    hypothesis.settings.register_profile("shiplap", deadline=None)  # a busy machine is no failure
    hypothesis.settings.load_profile("shiplap")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers are forked from a process that collects the same tests."""
    if not workers.possible():
        return
    programs = place({**os.environ, private.VECTORS: "1"})
    arguments = [str(argument) for argument in config.invocation_params.args]
    config.stash[_WORKERS] = workers.Workers(arguments, Path(shared(), "workers"), programs, len(specs))
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = config.stash[_WORKERS].python()


def pytest_unconfigure(config: pytest.Config) -> None:
    if forked := config.stash.get(_WORKERS, None):
        forked.end()


Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("env", "--json")`` → result with ``exit_code``, ``stdout``, ``stderr``; in this process."""
    from shiplap.cli.app import app

    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "path", list(sys.path))  # targets extend it
    return lambda *args: typer.testing.CliRunner().invoke(app, [str(a) for a in args])


@pytest.fixture
def process() -> Run:
    """The same in a process of its own: ``returncode``, ``stdout``, ``stderr``."""

    def start(*args: object, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
        return python("-m", "shiplap.cli", *args, cwd=cwd)

    return start
