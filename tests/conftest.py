"""Fixtures of all tests: names that no other test declares, compilers and settings left as they were."""

import itertools
import os
from collections.abc import Iterator

import pytest

# Before torch is loaded. Workers of pytest-xdist have as many threads each as there are cores: threads that spin while
# they wait for work take the cores from the other workers (half of the time of small convolutions).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The C++ around the kernels of a package is compiled for seconds; how fast it runs, no test asks.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")

from shiplap import compat, errors
from shiplap.op import registry
from tests.forked import settle

_numbers = itertools.count()

# Files of 15 s and more, the longest first: whatever comes last, the workers of `make test` end at about the same time.
LONG = (
    "test_examples",
    "fuse/test_cpp",
    "fuse/test_lower",
    "kernels/test_sparse3d_audit",
    "rewrite/test_models",
    "impl/test_native",
    "kernels/test_sparse3d_compile",
    "kernels/test_dense_audit",
    "fuse/test_sparse3d_cpu",
    "audit/test_zoo",
    "fuse/test_sparse3d_triton",
    "doctor/test_real",
    "tune/test_isolate",
    "kernels/test_sparse3d_flexgemm",
    "impl/test_direct",
    "kernels/test_sparse3d_lowlevel_triton",
    "kernels/test_sparse3d_maps",
    "fuse/test_triton",
    "rewrite/test_scope",
    "doctor/test_examine",
    "kernels/test_spconv_compile",
    "rewrite/test_triton",
    "cli/test_explain",
    "impl/test_tvm_ffi",
    "fuse/test_seed_source",
    "kernels/test_sparse3d_modules",
)


@pytest.fixture
def ns() -> Iterator[str]:
    """A namespace of this test alone: ``@sl.op(f"{ns}::scale")``. Its ops go with it: no other test meets them."""
    name = f"test{next(_numbers)}"
    yield name
    if mine := [op for op in registry._ops if op.startswith(f"{name}::")]:
        for op in mine:
            registry.refresh(registry._ops.pop(op))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code or counters from another test."""
    compat.reset_compiler()
    yield
    compat.reset_compiler()


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notice comes once per process; each test counts as one, whatever ran before it in the worker."""
    monkeypatch.setattr(errors, "_said", set())


@pytest.fixture(scope="session", autouse=True)
def vector_instructions(request: pytest.FixtureRequest) -> None:
    """A worker of a whole run tries once what its compiler and CPU can do, and the processes that tests start do not.

    Inductor tries it in each process, and without a cache from the past that is 3 s.
    """
    if hasattr(request.config, "workerinput"):
        from torch._inductor.cpu_vec_isa import valid_vec_isa_list

        best = next(iter(valid_vec_isa_list()), None)
        if best:  # it compiles, loads and runs
            os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {f"tests/{name}.py": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))  # stable


def pytest_collection_finish() -> None:
    settle()


def pytest_configure(config: pytest.Config) -> None:
    """Most tests run references on purpose; those about the notice catch it themselves."""
    config.addinivalue_line("filterwarnings", "ignore::shiplap.errors.ShiplapNotice")
