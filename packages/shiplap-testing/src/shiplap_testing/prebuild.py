"""Compile what tests compile in every run: ``python -m shiplap_testing.prebuild``, at the end of ``make install``.

Compiled headers, the generated device and the libraries of fixtures go into ``build/test-compilers``
(compile_cache.py), from which each run of ``make test`` takes them, as long as their sources are the same. What a test
compiles in its body gets there in a first run.
"""

from __future__ import annotations

import os
import sys

from shiplap_testing import compilers, private
from shiplap_testing.paths import REPOSITORY

# The device, and the bindings, launchers and packaged models of the kernels' tests: half of what those take.
FIXTURES = ("packages/shiplap-backend/tests/backend/runtime/test_load.py", "packages/shiplap/tests/kernels")


def main() -> int:
    """Compile what many tests need, so that later runs of ``make test`` find it in the cache. These are C++ headers,
    the generated device backend and the libraries of fixtures.

    Return the exit status of pytest, which sets up the fixtures and runs no test.
    """
    os.environ[compilers.ASKED] = "1"
    os.environ["PATH"] = compilers.path()
    for process in (compilers.headers(), compilers.kernels()):
        if process is not None:
            process.wait()
    import pytest

    private.compile_headers_singly()  # as in the workers of make test: their calls of the compiler are the same
    os.chdir(REPOSITORY)
    return int(
        pytest.main(["-qq", "--setup-only", "--no-header", "-m", "not long and not docs and not gpu", *FIXTURES])
    )


if __name__ == "__main__":
    sys.exit(main())
