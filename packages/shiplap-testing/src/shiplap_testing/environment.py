"""Environments for tests of packaging: they hold the named distributions of this environment, and nothing else.

Third-party packages are linked and not copied, so that an environment takes a second and nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

from shiplap_testing.paths import REPOSITORY

BUILD = ("build", "cmake", "hatchling", "ninja", "scikit-build-core")  # what builds our distributions; no torch


class Environment:
    """A virtual environment in a folder, into which installed distributions are linked. ``python`` is the path of its
    Python interpreter, and ``packages`` that of its ``site-packages``.
    """

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        """Create a virtual environment in ``folder``, and link the files of the installed distributions ``names`` into
        it.
        """
        # pip of this process installs into it, with --python.
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        for name in names:
            package = distribution(name)
            for top in {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "__pycache__")}:
                link = self.packages / top
                if not link.exists():
                    link.symlink_to(Path(str(package.locate_file(top))).resolve())

    def install(self, *wheels: Path) -> None:
        """Install ``wheels`` with pip, without the distributions that they require."""
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", "install"]
        subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", *wheels], check=True)

    def run(
        self, *arguments: str | Path, cwd: Path, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the Python interpreter of this environment with ``arguments`` in the folder ``cwd``, and return the ended
        process with its output.

        The program does not get the module path and the environment variables of this process. Its environment
        variables are ``env``, or none if that is None.
        """
        command = [str(self.python), "-I", *map(str, arguments)]
        return subprocess.run(command, cwd=cwd, env=env or {}, capture_output=True, text=True, check=False)


def build(packages: Iterable[str], folder: Path) -> dict[str, Path]:
    """Build each of ``packages`` from its source distribution, and return a mapping from the name of a package to the
    path of its wheel. The package ``shiplap-headers`` is built in any case. Source distributions and wheels are left in
    ``folder/dist``. Raise ``RuntimeError`` if a build fails.

    A package is built in an environment that holds only :data:`BUILD`, what these require, and the wheel of
    shiplap-headers.
    """
    environment, dist = Environment(folder / "builder", with_requirements(*BUILD)), folder / "dist"
    path = {"PATH": os.environ["PATH"]}
    wheels: dict[str, Path] = {}
    # Headers first, since the others are built with them.
    for package in sorted({"shiplap-headers", *packages}, key=lambda p: p != "shiplap-headers"):
        project = REPOSITORY / "packages" / package
        done = environment.run("-m", "build", "--no-isolation", "--outdir", dist, project, cwd=folder, env=path)
        if done.returncode:
            raise RuntimeError(f"{package}\n{done.stdout}{done.stderr}")
        (wheels[package],) = dist.glob(f"{package.replace('-', '_')}-[0-9]*.whl")
        if package == "shiplap-headers":  # the others are built with it
            environment.install(wheels[package])
    return wheels


def ours(package: str) -> list[str]:
    """Return the names of those distributions of this repository that ``package`` requires, directly or through others.
    They are in an order in which each comes after those that it requires, with ``package`` itself last.
    """
    project = tomllib.loads((REPOSITORY / "packages" / package / "pyproject.toml").read_text(encoding="utf-8"))
    required = (Requirement(text).name for text in project["project"].get("dependencies", ()))
    names = [name for first in required if first.startswith("shiplap") for name in ours(first)]
    return [*dict.fromkeys(names), package]


def with_requirements(*names: str) -> set[str]:
    """Return the names of the distributions ``names`` and of those that they require, directly or through others, in
    canonical form. Requirements of extras, and distributions that are not installed, are left out.
    """
    closure: set[str] = set()
    left = [_canonical(name) for name in names]
    while left:
        name = left.pop()
        if name in closure:
            continue
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:  # for another platform, say
            continue
        closure.add(name)
        wanted = (Requirement(text) for text in required)
        left += [_canonical(r.name) for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    return closure


def others() -> Iterator[str]:
    """Yield the names of all installed distributions that are not of this repository, in lower case with hyphens."""
    return (name for package in distributions() if not (name := _name(package)).startswith("shiplap"))


def _name(package: Distribution) -> str:
    """Return the name of ``package``, an installed distribution, in lower case with single hyphens as separators."""
    return _canonical(package.metadata["Name"])


def _canonical(name: str) -> str:
    """Return ``name``, the name of a distribution, in lower case with single hyphens as separators."""
    return re.sub(r"[-_.]+", "-", name).lower()
