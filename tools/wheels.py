"""Test one package against wheels of it and of what it requires: ``wheels.py PACKAGE [PYTEST ARGUMENT ...]``.

The wheels are built from source distributions, without torch, and installed into an environment that has the
third-party packages of this one and no other distribution of ours but shiplap-testing. No source tree is on its path.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from shiplap_testing.environment import Environment, build, others, ours
from shiplap_testing.paths import REPOSITORY


def main(package: str, *arguments: str) -> int:
    """Build, install, test: the exit status of pytest."""
    with tempfile.TemporaryDirectory(prefix="shiplap-wheels-") as name:
        folder = Path(name)
        wheels = build([*ours(package), "shiplap-testing"], folder)
        environment = Environment(folder / "environment", others())
        environment.install(*wheels.values())
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"SHIPLAP_TEST_ROOT": str(REPOSITORY)}
        tests = f"packages/{package}/tests"
        command = [environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, *arguments]
        return subprocess.run(command, cwd=REPOSITORY, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
