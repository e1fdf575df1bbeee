"""Compile what tests compile in every run: ``python -m shiplap_testing.prebuild``, at the end of ``make install``.

Compiled headers, the generated device, and what the tests of :data:`BODIES` and their fixtures compile go into
``build/test-compilers`` (compile_cache.py), from which each run of ``make test`` takes them, as long as their sources
are the same. What another test compiles in its body gets there in a first run.
"""

from __future__ import annotations

import os
import subprocess
import sys

from shiplap_testing import compilers, private
from shiplap_testing.changed import Graph
from shiplap_testing.nearest import KEPT
from shiplap_testing.paths import REPOSITORY

DEVICE = "packages/shiplap-backend/tests/backend/runtime/test_load.py"  # its fixture builds the device
CORE, DENSE, SPARSE3D = (
    "packages/shiplap/tests",
    "packages/shiplap-dense/tests/dense",
    "packages/shiplap-sparse3d/tests",
)
# Each compiles two kernels of Inductor or more, or a library, and takes little time beside that.
BODIES = (
    f"{CORE}/inductor",
    f"{CORE}/kernels",
    f"{CORE}/rewrite/test_engine_fusions.py",
    f"{CORE}/rewrite/test_engine_patterns.py",
    f"{CORE}/rewrite/test_batched_trace.py",
    f"{CORE}/rewrite/test_pattern.py",
    f"{CORE}/rewrite/test_scope.py",
    f"{CORE}/dispatch/test_fake.py",
    f"{CORE}/dispatch/test_launch.py",
    f"{CORE}/dispatch/test_nondifferentiable.py",
    f"{CORE}/dispatch/test_nothing_is_zero.py",
    f"{CORE}/dispatch/test_no_results.py",
    f"{CORE}/dispatch/test_written.py",
    f"{CORE}/audit/test_compiler.py",
    f"{CORE}/cli/test_explain.py",
    f"{CORE}/cli/test_rewrite.py",
    f"{CORE}/packaging/test_extras.py",
    f"{DENSE}/test_fuse_cpp.py",
    f"{DENSE}/test_micro.py",
    f"{DENSE}/rewrite/test_loss.py",
    f"{SPARSE3D}/sparse3d/fuse/test_fuse_cpu.py",
    f"{SPARSE3D}/sparse3d/test_compile.py",
    f"{SPARSE3D}/sparse3d/test_hash.py",
)
MARKS = "not long and not docs and not gpu"


def main() -> int:
    """Compile what many tests need, so that later runs of ``make test`` find it in the cache. These are C++ headers,
    the generated device backend and the libraries of fixtures. The graph of files and definitions that ``--changed``
    reads is kept, too.

    Return the exit status of pytest, which builds the device. That of the tests is not looked at, as ``make test`` runs
    them again.
    """
    Graph(REPOSITORY, KEPT)
    os.environ[compilers.ASKED] = "1"
    os.environ["PATH"] = compilers.path()
    for process in (compilers.headers(), compilers.kernels()):
        if process is not None:
            process.wait()
    import pytest

    private.compile_headers_singly()  # as in the workers of make test: their calls of the compiler are the same
    os.chdir(REPOSITORY)
    status = int(pytest.main(["-qq", "--setup-only", "--no-header", "-m", MARKS, DEVICE]))
    spread = ["-n", str(os.cpu_count() or 1), "--dist", "loadfile", "--no-loadscope-reorder"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-qq", *spread, "-m", f"{MARKS} and not device", *BODIES], check=False
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
