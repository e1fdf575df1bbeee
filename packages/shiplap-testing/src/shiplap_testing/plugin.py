"""Fixtures of all tests: names that no other test declares, compilers and settings left as they were."""

import ast
import os
import random
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from glob import glob
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest
import typer.testing
from _pytest.compat import NOTSET
from typer.main import get_command

from shiplap_testing import compilers, nearest
from shiplap_testing.definitions import absolute
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

from shiplap_testing import launchers, private, schedule, workers
from shiplap_testing.forked import IMPORTED, WITH_FAMILIES, WITH_VERBS, place, python, settle, shared, use_huge_pages

sys.path[:0] = [str(folder) for folder in SEARCHED]
import_module("tests")  # the namespace of all packages, before pytest makes a module of one folder of that name
pytest_plugins = ["shiplap_testing.nearest", "shiplap_testing.cost"]
# A call of a verb in a test builds the commands of all verbs, 0.05 s; a program does so once, and so does a worker.
vars(typer.testing)["_get_command"] = cache(get_command)
_FAILED = pytest.StashKey[bool]()
_LOADED = pytest.StashKey[frozenset[str]]()  # the modules that were imported before a test
_loaded = [frozenset[str]()]  # those of the last test
_WORKERS = pytest.StashKey[workers.Workers]()
_TOGETHER = pytest.StashKey[int]()  # in a worker: how many workers use its device

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
    "gpu/test_cuda_sources",
    "gpu/test_installed_cuda",
    "sparse3d/gpu/test_flexgemm_graphs",
    "sparse3d/gpu/test_steps",
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
    """Yield a namespace for the ops of this test alone, as in ``@sl.op(f"{ns}::scale")``.

    It is the same in each run, so that cached results of compilers can be used again. After the test, its ops are
    removed from the registry.
    """
    from shiplap.dispatch import registry

    name = f"test{zlib.crc32(request.node.nodeid.encode()):x}"
    yield name
    for op in [op.spec.name for op in registry.declared_op_list() if op.spec.namespace == name]:
        registry.forget_op(op)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Reset torch's compiler before and after the test. Compiled code and counters of other tests do not affect it."""
    from shiplap import torch_private

    torch_private.reset_compiler()
    yield
    torch_private.reset_compiler()


@pytest.fixture
def fresh_graphs(fresh_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile graphs anew in this test, without caches of graphs and with gradients disabled.

    Random numbers are seeded, counters are cleared, and kernel choices are kept in a folder of this test.
    """
    import torch

    from shiplap.torch_private import inductor_lowering

    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "shiplap"))
    torch.manual_seed(0)
    private.counters().clear()
    with inductor_lowering.without_graph_caches(), torch.no_grad():
        yield


@pytest.fixture(scope="session")
def onnx_operators() -> None:
    """List the operators of onnxscript only once in this process. Without this fixture, each export to ONNX would list
    them.
    """
    private.remember_onnx_operators()


@pytest.fixture
def working_forks() -> None:
    """Skip a test that runs a backward in forks of this process if autograd does not work in them. That is a fault of
    a torch for CUDA, which occurs once another test has differentiated a compiled function in this process.
    """
    from shiplap.audit.child_process import can_isolate

    if not can_isolate():
        pytest.skip("autograd does not work in forks of this process")


@pytest.fixture(autouse=True)
def forget_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let shiplap issue each notice once more in this test. A notice is a warning that a process issues only once."""
    from shiplap.errors import base

    monkeypatch.setattr(base, "_announced", set())


@pytest.fixture(scope="session", autouse=True)
def vector_instructions(request: pytest.FixtureRequest) -> None:
    """Try once in each worker which vector instructions of the CPU compile and run, so that programs started by tests
    need not.

    The try is skipped in workers that were forked from a process that has tried, in runs that have only tests for
    accelerators, and for the nearest tests to a change, of which few compile.
    """
    on_cpu = any(not item.get_closest_marker("gpu") for item in request.session.items)
    several = nearest.part(request.config) != workers.NEAREST and hasattr(request.config, "workerinput")
    if on_cpu and several and private.VECTORS not in os.environ:
        private.try_instructions()


@pytest.fixture(scope="session", autouse=True)
def quick_launchers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork the launchers of sandboxed processes in each worker from one process that has imported torch, which each of
    them would import otherwise. Do nothing in a run without workers and on a machine with an accelerator.
    """
    if not hasattr(request.config, "workerinput") or not workers.possible():
        yield
        return
    with launchers.forked_launchers():
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests ``items`` in place. The longest on accelerators come first, then files in the order of ``LONG``, a
    list of the files that take longest, then all others.

    If ``--changed`` selects the tests, nearest.py sorts them.
    """
    if nearest.is_used(config):
        return

    def place(item: pytest.Item) -> int:
        """Return the number by which ``item`` is sorted.

        It is negative for the longest tests on accelerators. Otherwise it is the position of the test's file in
        ``LONG``, a list of the files that take longest.
        """
        if (alone := schedule.place_alone(item.nodeid)) is not None:
            return alone - len(schedule.ALONE)
        return _place_of(item.nodeid.partition("::")[0].removesuffix(".py"))

    items.sort(key=place)


@cache
def _place_of(file: str) -> int:
    """Return the position of the test file ``file`` (without ``.py``) in ``LONG``, a list of the files that take
    longest. Return the length of ``LONG`` if the file is not in it.
    """
    return next((number for number, name in enumerate(LONG) if f"/{file}".endswith(f"/{name}")), len(LONG))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of a run with ``--dist loadfile``, which gives each unit of tests to one worker. Return None
    for other runs.
    """
    return schedule.make_scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt all objects that exist after the import of the tests from garbage collection. In the first worker, name
    the tests that load a device for the process that distributes the tests.
    """
    settle()
    if getattr(session.config, "workerinput", {}).get("workerid") == "gw0":
        schedule.keep_tests_on_device(item.nodeid for item in session.items if item.get_closest_marker("device"))


# What is raised where a program of a test, or Inductor, finds no compiler. Shiplap's own calls raise SL405 or SL423.
COMPILER = shutil.which("c++")  # now: tests change the PATH
NO_COMPILER = re.compile(r"No such file or directory: '(cc|c\+\+)'|InvalidCxxCompiler")


@contextmanager
def _skipped_without_compiler() -> Iterator[None]:
    """Return a context that skips the test if its code finds no C or C++ compiler on a machine that has none."""
    try:
        yield
    except Exception as problem:
        if COMPILER is None and NO_COMPILER.search(str(problem)):
            pytest.skip("needs a C++ compiler")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Skip a test that finds no C or C++ compiler on a machine that has none."""
    with _skipped_without_compiler():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Seed the generators of random numbers before the fixtures of a test are set up, by the name of the test and by
    the number of ``--hypothesis-seed``, if there is one. Limit the device memory of this worker before a test on an
    accelerator, to an equal share of 80 % if several workers use the device. Skip a test whose fixtures find no C or
    C++ compiler on a machine that has none.

    A worker that needs more memory then gets an error itself, so that the other workers do not.
    """
    drawn = item.config.getoption("--hypothesis-seed", None)
    _seed_generators(zlib.crc32(item.nodeid.encode() if drawn is None else f"{item.nodeid} {drawn}".encode()))
    item.stash[_LOADED] = _loaded_modules()
    together = item.config.stash.get(_TOGETHER, 1)
    if together > 1 and item.get_closest_marker("gpu"):
        import torch

        if torch.cuda.is_available():  # the rest is for contexts, and for the programs that tests start
            torch.cuda.set_per_process_memory_fraction(0.8 / together)
    with _skipped_without_compiler():
        yield


def _loaded_modules() -> frozenset[str]:
    """Return the names of the modules that are imported now. The set is a new one only after an import, so that the
    tests of a worker, each of which keeps its set, have few of them: a set has a quarter of a megabyte.
    """
    if not _are_loaded(_loaded[0]):
        _loaded[0] = frozenset(sys.modules)
    return _loaded[0]


def _are_loaded(names: Collection[str]) -> bool:
    """Return whether ``names``, a set of names of modules, are those that are imported now. Their number and the last
    one are compared, since Python keeps the order of imports.
    """
    return len(names) == len(sys.modules) and next(reversed(sys.modules)) in names


def _seed_generators(seed: int) -> None:
    """Seed the generators of Python, torch (on the CPU) and numpy, as far as they are imported. Values that a test
    draws then depend neither on the run nor on the tests before it in the same worker, unless a fixture that several
    tests share draws from them as well: it does so in the first of these tests alone.
    """
    random.seed(seed)
    if "torch" in sys.modules:
        # ``torch.manual_seed`` seeds all devices, and keeps a trace of each call for those that are not in use.
        sys.modules["torch"].default_generator.manual_seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed)


def release_patches(patch: pytest.MonkeyPatch, loaded: Collection[str]) -> list[str]:
    """Replace what ``patch`` has set by the original in modules of Shiplap that were imported while it was set. Return
    the replaced names.

    A module that imports a patched name from another one keeps it when the patch is undone, so that a later test of the
    same worker would see it. Its source says from where it has a name: a module that has the same value from elsewhere
    keeps it, such as a function of torch that a test has put in the place of another one. A function that the test has
    made exists nowhere else, and is replaced under each name. ``loaded`` are the names of the modules that were
    imported before the test.
    """
    if _are_loaded(loaded):  # most tests import nothing
        return []
    late = {n: m for n, m in list(sys.modules.items()) if n not in loaded and n.startswith("shiplap")}
    released = []
    for target, name, original, values in _list_patches(patch) if late else ():
        homes, before = {(getattr(target, "__name__", ""), name)}, -1
        while before < len(released):  # a module may have the name from another one of them
            before = len(released)
            for module_name, module in late.items():
                copies = [k for k, v in vars(module).items() if any(v is each for each in values)]
                for kept in copies if module is not target else ():
                    if _is_made_by_test(vars(module)[kept]) or kept in _imported_names(module, homes):
                        setattr(module, kept, original)
                        homes.add((module_name, kept))
                        released.append(f"{module_name}.{kept}")
    return released


def _list_patches(patch: pytest.MonkeyPatch) -> list[tuple[Any, str, Any, list[Any]]]:
    """Return (target, name, original, values) of each attribute that ``patch`` has replaced. The values are those that
    it has had since, the present one last. An attribute that did not exist before is left out.
    """
    listed: dict[tuple[int, str], tuple[Any, str, list[Any]]] = {}
    for target, name, before in patch._setattr:
        listed.setdefault((id(target), name), (target, name, []))[2].append(before)
    return [
        (target, name, first, [v for v in (*values, getattr(target, name)) if v is not first])
        for target, name, (first, *values) in listed.values()
        if hasattr(target, name) and first is not NOTSET
    ]


def _is_made_by_test(value: Any) -> bool:
    """Return whether ``value`` is a callable that no module has under its name, as one that a test has made."""
    home = sys.modules.get(getattr(value, "__module__", None) or "")
    return callable(value) and getattr(home, getattr(value, "__qualname__", ""), None) is not value


def _imported_names(module: ModuleType, homes: Collection[tuple[str, str]]) -> set[str]:
    """Return the names under which the source of ``module`` imports one of ``homes``, which are pairs of a module and a
    name in it. An import from a package around that module counts as well.
    """
    file, package = Path(module.__file__ or ""), module.__package__ or ""
    tree = ast.parse(file.read_bytes() if file.suffix == ".py" else b"")
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {
        alias.asname or alias.name
        for node in found
        for alias in node.names
        if any(alias.name == name and f"{home}.".startswith(f"{absolute(node, package)}.") for home, name in homes)
    }


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Release patches from modules that the test has imported. After the last test of a file, move what this process
    has allocated to huge pages if it has grown by 64 MB.
    """
    patch = getattr(item, "funcargs", {}).get("monkeypatch")
    if patch is not None:
        release_patches(patch, item.stash.get(_LOADED, frozenset()))
    if nextitem is not None and nextitem.path != item.path:
        use_huge_pages()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Return the report of one phase of a test. If the device no longer works after a failed test, end this worker, and
    pytest-xdist starts a new one. Without workers, end the run instead.

    An illegal access leaves the CUDA context of a process unusable, so each later test of the worker would fail.
    """
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    if report.when == "teardown" and item.stash.get(_FAILED, False) and item.get_closest_marker("gpu"):
        broken = _device_error()
        if broken and hasattr(item.config, "workerinput"):
            # Failing tests take no time, so that this worker would take most of the remaining files.
            os._exit(70)
        if broken:
            item.session.shouldfail = f"the device stopped answering after {item.nodeid}: {broken}"
    return report


def _device_error() -> str:
    """Return the first line of the error that synchronising the CUDA device raises. Return an empty string if it raises
    none or CUDA is not in use.
    """
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def _take_one_device(config: pytest.Config) -> None:
    """Make one CUDA device the only one of this worker, a process of pytest-xdist, and of the programs that it starts,
    if the machine has several: workers take them in turn. Write the number of workers that use the same device to the
    stash of ``config``.

    Tests that need two devices are marked ``whole_device``: they run without workers and find all of them.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    # CUDA numbers the devices that it finds from 0 on. The numbers of their files can have gaps in a container.
    found = range(len(glob("/dev/nvidia[0-9]*")))
    devices = named.split(",") if named is not None else [str(number) for number in found]
    several = max(len(devices), 1)
    worker: dict[str, str] = getattr(config, "workerinput", {})
    turn = int(worker["workerid"].removeprefix("gw")) % several
    if several > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[turn]
    config.stash[_TOGETHER] = len(range(turn, int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), several))


def pytest_configure(config: pytest.Config) -> None:
    """Set up the run of tests in this process.

    If the process runs tests itself, shiplap's notices are ignored, such as that a call runs the reference. If it
    distributes tests to workers, it creates the folder that they share. Hypothesis gets no deadlines in either case.
    """
    if hasattr(config, "workerinput"):
        _take_one_device(config)
    if config.getoption("dist", "no") == "no":
        config.addinivalue_line("filterwarnings", "ignore::shiplap.errors.ShiplapNotice")
        if getattr(config, "workerinput", {}).get("workerid") == "gw0" and not workers.possible():
            compilers.headers()
    else:
        shared()  # one folder for all workers
    # A busy machine is no failure, and neither is an example that no change has to do with. With a number as
    # --hypothesis-seed, Hypothesis and the tests' own generators draw other examples, the same for the same number.
    fixed = config.getoption("--hypothesis-seed", None) is None
    hypothesis.settings.register_profile("shiplap", deadline=None, derandomize=fixed)
    hypothesis.settings.load_profile("shiplap")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Start the process from which workers are forked, and make pytest-xdist fork each worker of ``specs`` from it. Do
    nothing on a machine on which workers cannot be forked.
    """
    if not workers.possible():
        return
    environment = {**os.environ, private.VECTORS: "1"}
    programs = {"": place(environment)}
    programs |= {modules: place({**environment, IMPORTED: modules}) for modules in (WITH_VERBS, WITH_FAMILIES)}
    arguments = [str(argument) for argument in config.invocation_params.args]
    config.stash[_WORKERS] = workers.Workers(arguments, Path(shared(), "workers"), programs, len(specs))
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = config.stash[_WORKERS].python()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process from which workers were forked, if there is one."""
    if forked := config.stash.get(_WORKERS, None):
        forked.end()


Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that calls the command ``shiplap`` in this process, as in ``run("env", "--json")``.

    The function returns a result with ``exit_code``, ``stdout`` and ``stderr``. The current folder is the repository.
    """
    from shiplap.cli.app import app

    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "path", list(sys.path))  # targets extend it
    return lambda *args: typer.testing.CliRunner().invoke(app, [str(a) for a in args])


@pytest.fixture
def process() -> Run:
    """Return a function that runs the command ``shiplap`` in a process of its own, as in ``process("env")``. The
    function returns the ended process with ``returncode``, ``stdout`` and ``stderr``.
    """

    def start(*args: object, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
        """Run ``shiplap`` with ``args`` in the folder ``cwd``, and return the ended process with its output."""
        return python("-m", "shiplap.cli", *args, cwd=cwd, imported=WITH_VERBS)

    return start
