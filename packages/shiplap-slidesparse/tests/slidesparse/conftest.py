"""The double of the vendors' libraries, compiled once, and our library opened on it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shiplap_slidesparse.lt import libraries, native


@pytest.fixture(scope="session")
def vendor_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("vendor_double.cpp")
    file = tmp_path_factory.mktemp("vendor") / libraries.NAME
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler")
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", "-o", file, source], check=True)
    return file


@pytest.fixture
def vendor(vendor_file: Path) -> Iterator[ctypes.CDLL]:
    """The double, reset; whatever our library made with it is destroyed afterwards, and nothing may be left."""
    library = ctypes.CDLL(str(vendor_file))
    library.double_count.restype = ctypes.c_long
    library.double_stream.restype = ctypes.c_void_p
    native.destroy_plans()
    library.double_reset()
    yield library
    library.double_reset()
    native.destroy_plans()
    assert library.double_alive() == 0


@pytest.fixture
def opened(vendor: ctypes.CDLL, vendor_file: Path) -> ctypes.CDLL:
    """The double, opened in all three roles."""
    native.open_libraries(*[str(vendor_file)] * 3, libraries.OLDEST)
    return vendor
