"""What is installed is enough: the wheel holds C++, templates and metadata, and a project installs itself with it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from shiplap_testing.paths import REPOSITORY

NEEDED = ("shiplap-headers", "shiplap", "shiplap-backend")
WHEEL = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheels that a machine needs which generates backends, as pip builds them."""
    pytest.importorskip("hatchling")
    where, paths = tmp_path_factory.mktemp("wheels"), []
    for name in NEEDED:
        project, command = REPOSITORY / "packages" / name, [sys.executable, "-c", WHEEL, where]
        built = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
        paths.append(where / built.stdout.split()[-1])
    return paths


def test_the_wheels_hold_all_that_backends_are_made_of(wheels: list[Path]) -> None:
    packed = {n for wheel in wheels for n in zipfile.ZipFile(wheel).namelist() if not n.endswith("/")}
    for package, folder in (("shiplap-backend", "shiplap_backend"), ("shiplap", "shiplap/codegen/templates")):
        source = REPOSITORY / "packages" / package / "src"
        files = [p for p in (source / folder).rglob("*") if p.is_file() and p.suffix != ".pyc"]
        assert len(files) >= 3
        assert {p.relative_to(source).as_posix() for p in files} <= packed


@pytest.mark.slow
@pytest.mark.skipif("SHIPLAP_TEST_INSTALL" not in os.environ, reason="compiles a device: SHIPLAP_TEST_INSTALL=1")
def test_a_project_is_installed_and_found_by_torch(wheels: list[Path], tmp_path: Path) -> None:
    """From the wheel alone: new, pip install (its build hook generates and compiles), `import torch`."""
    pytest.importorskip("openvino")
    venv.create(tmp_path / "venv", with_pip=True)
    python, clean = (
        str(tmp_path / "venv" / "bin" / "python"),
        {k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    site = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    def run(*arguments: object) -> str:
        command = [python, *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=clean)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-m", "pip", "uninstall", "--yes", "setuptools")  # the one that venv brings is too old to build a wheel
    run("-m", "pip", "install", "--no-deps", "--no-index", *wheels)
    assert str(tmp_path) in run("-c", "import shiplap; print(shiplap.__file__)")
    run("-m", "shiplap.cli", "backend", "new", "openvino", "--runtime", "openvino")
    project = tmp_path / "torch-openvino"
    (project / "ops.yaml").write_text("extends: openvino\nonly: [add.out]\n")
    run("-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", project)
    project.rename(tmp_path / "elsewhere")  # nothing of the project is needed any more
    assert run("-c", "import torch; print(torch.ones(2, device='openvino') + 1)") == (
        "tensor([2., 2.], device='openvino:0')\n"
    )
