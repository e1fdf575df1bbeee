"""Compile what tests compile in every run: ``python -m shiplap_testing.prebuild``, at the end of ``make install``.

The compiled headers and the generated device go into ``build/test-compilers`` (compile_cache.py), from which each run
of ``make test`` takes them, as long as their sources are the same. Other libraries of tests get there in a first run.
"""

from __future__ import annotations

import os
import sys

from shiplap_testing import compilers
from shiplap_testing.paths import REPOSITORY

DEVICE = REPOSITORY / "packages" / "shiplap-backend" / "tests" / "backend" / "runtime" / "test_load.py"


def main() -> int:
    """Compile, and return the status of pytest, which sets up the device and runs no test."""
    os.environ[compilers.ASKED] = "1"
    os.environ["PATH"] = compilers.path()
    for process in (compilers.headers(), compilers.kernels()):
        if process is not None:
            process.wait()
    import pytest

    os.chdir(REPOSITORY)
    return int(pytest.main(["-qq", "--setup-only", "--no-header", str(DEVICE)]))


if __name__ == "__main__":
    sys.exit(main())
