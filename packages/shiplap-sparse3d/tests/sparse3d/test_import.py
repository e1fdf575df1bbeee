"""The import of the package loads what a program needs that only calls its layers."""

import subprocess
import sys

import pytest

LATE = "torch._dynamo", "torch._inductor", "triton", "scipy", "matplotlib"  # each takes long to import


@pytest.mark.long
def test_the_import_loads_no_compiler() -> None:
    program = f"import sys, shiplap_sparse3d.spconv, shiplap.cli.app; print(*(m for m in {LATE} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
