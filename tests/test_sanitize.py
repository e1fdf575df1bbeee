"""The C++ of pool and tables under the thread sanitizer; `nox -s sanitize-threads` is the same by itself."""

from __future__ import annotations

import subprocess

import pytest
from tools.sanitize import PARTS

from shiplap_headers import include_dir
from shiplap_testing.paths import REPOSITORY

FLAGS = ("-std=c++20", "-O1", "-g", "-pthread", "-fsanitize=thread")


def test_the_tests_that_sanitizers_run_are_there():
    assert [name for part in PARTS.values() for name in part if not (REPOSITORY / name).exists()] == []


def test_pool_and_tables_have_no_data_race(tmp_path):
    program = tmp_path / "threads"
    source = REPOSITORY / "tests" / "sanitize" / "threads.cpp"
    built = subprocess.run(
        ["c++", *FLAGS, "-I", str(include_dir()), str(source), "-o", str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("this compiler has no thread sanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, "some"], capture_output=True, text=True, timeout=300, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run under this kernel's memory layout")
    assert done.returncode == 0, done.stderr[-3000:]
