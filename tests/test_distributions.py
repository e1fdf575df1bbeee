"""Each distribution builds from its source distribution without torch, holds what it should, and installs alone."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from tests.projects import COMPILED, PUBLISHED

from shiplap_testing.environment import BUILD, Environment, build, ours, with_requirements
from shiplap_testing.paths import REPOSITORY

pytestmark = pytest.mark.docs
PURE = tuple(name for name in PUBLISHED if name not in COMPILED)
BESIDE = {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"}

compiles = pytest.mark.skipif("SHIPLAP_TEST_WHEELS" not in os.environ, reason="minutes: nox -s distributions")


class Built:
    """What was built: a wheel and a source distribution for each package, as lists of names and as files."""

    def __init__(self, folder: Path, packages: tuple[str, ...]) -> None:
        self.wheels = build(packages, folder)
        self.folder = folder

    def wheel(self, package: str) -> set[str]:
        with zipfile.ZipFile(self.wheels[package]) as file:
            return set(file.namelist())

    def text(self, package: str, name: str) -> str:
        """A file of the wheel's metadata."""
        with zipfile.ZipFile(self.wheels[package]) as file:
            (member,) = (n for n in file.namelist() if n.endswith(f".dist-info/{name}"))
            return file.read(member).decode()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("built"), PURE)


def sources(package: str) -> set[str]:
    """The files under ``src`` that git tracks, relative to it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"]
    done = subprocess.run(command, cwd=REPOSITORY / "packages" / package, capture_output=True, text=True, check=True)
    listed = (PurePosixPath(line) for line in done.stdout.splitlines())
    return {p.relative_to("src").as_posix() for p in listed if (REPOSITORY / "packages" / package / p).exists()}


def unpacked(archive: Path) -> Iterator[str]:
    """Names of a source distribution, without its own folder."""
    with tarfile.open(archive) as file:
        yield from (name.partition("/")[2] for name in file.getnames())


@pytest.mark.parametrize("package", PURE)
def test_a_wheel_has_every_file_of_its_package(built: Built, package: str) -> None:
    """Templates, headers, metadata and the mark that the code is typed; and nothing that was built."""
    names = {n for n in built.wheel(package) if ".dist-info/" not in n}
    assert names == sources(package)
    assert f"{package.replace('-', '_')}/py.typed" in names
    assert built.wheels[package].name.endswith("-py3-none-any.whl")
    assert "Apache License" in built.text(package, "licenses/LICENSE")


@pytest.mark.parametrize("package", PURE)
def test_a_source_distribution_has_what_is_beside_the_code(built: Built, package: str) -> None:
    (archive,) = (built.folder / "dist").glob(f"{package.replace('-', '_')}-[0-9]*.tar.gz")
    names = set(unpacked(archive))
    assert names >= BESIDE | {f"src/{name}" for name in sources(package)}
    assert not [n for n in names if n.endswith((".so", ".pyc"))]


def test_the_core_is_pure_and_registers_nothing_with_vllm(built: Built) -> None:
    suffixes = {PurePosixPath(name).suffix for name in built.wheel("shiplap") if ".dist-info/" not in name}
    assert suffixes == {".py", ".jinja", ".json", ".typed"}  # JSON: the table of verified releases of torch
    entry_points = configparser.ConfigParser()
    entry_points.read_string(built.text("shiplap", "entry_points.txt"))
    assert set(entry_points.sections()) == {"console_scripts", "pytest11", "torch_dynamo_backends"}
    assert "Requires-Dist: shiplap-headers" in built.text("shiplap", "METADATA")


def test_what_builds_our_distributions_has_no_torch() -> None:
    assert not with_requirements(*BUILD) & {"torch", "numpy"}
    for package in COMPILED:
        assert set(ours(package)) == {"shiplap-headers", "shiplap", package}


@pytest.mark.long
@pytest.mark.parametrize("package", COMPILED)
def test_a_family_configures_from_its_source_distribution(built: Built, tmp_path: Path, package: str) -> None:
    """CMake finds the module of shiplap-headers and every source; ``nox -s distributions`` also compiles them."""
    environment = Environment(tmp_path / "builder", with_requirements(*BUILD))
    environment.install(built.wheels["shiplap-headers"])
    path = {"PATH": os.environ["PATH"]}
    project = REPOSITORY / "packages" / package
    done = environment.run(
        *("-m", "build", "--no-isolation", "--sdist", "--outdir", tmp_path, project), cwd=tmp_path, env=path
    )
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert {p.name for p in source.iterdir()} >= BESIDE | {"CMakeLists.txt", "src", "tests"}
    assert not [*source.rglob("*.so"), *source.rglob("CMakeFiles")]
    modules = environment.run("-m", "shiplap_headers", "--cmake", cwd=tmp_path).stdout.strip()
    done = environment.run(
        *("-m", "cmake", "-S", source, "-B", tmp_path / "build", f"-DCMAKE_MODULE_PATH={modules}"),
        cwd=tmp_path,
        env=path,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("package", COMPILED)
def test_a_family_compiles_without_torch(tmp_path: Path, package: str) -> None:
    made = Built(tmp_path, (package,))
    names = {n for n in made.wheel(package) if ".dist-info/" not in n}
    assert {n for n in names if n.endswith((".py", ".typed", ".jinja", ".laz", ".npy"))} == {
        n for n in sources(package) if n.endswith((".py", ".typed", ".jinja", ".laz", ".npy"))
    }
    home = package.replace("-", "_")
    assert f"{home}/lib{home}.so" in names
    assert not [n for n in names if n.endswith((".cpp", "CMakeLists.txt", ".cmake"))]
    assert re.search(r"-py3-none-(manylinux|linux)\w+\.whl$", made.wheels[package].name)


# --- the core alone ---------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from importlib.metadata import distributions, entry_points

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl


@sl.op("alone::scale")
def scale(x: Float[Tensor, "n c"], by: float) -> Float[Tensor, "n c"]:
    return x * by


@scale.kernel("cpu")
def _(x, by, *, out):
    torch.mul(x, by, out=out)


x = torch.arange(6.0).view(2, 3)
assert torch.equal(scale(x, 2.0), 2 * x)
try:
    scale(x.view(6), 2.0)
except sl.ShiplapError as e:
    assert e.id == "SL201" or e.id.startswith("SL2"), e
assert not list(entry_points(group="vllm.general_plugins"))
assert not list(entry_points(group="shiplap.families"))
print(*sorted(name for d in distributions() if (name := d.metadata["Name"].lower()).startswith("shiplap")))
print(sl.__file__)
"""


@pytest.fixture(scope="module")
def alone(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The core and its headers, from wheels, beside what they require."""
    required = {name for name in with_requirements("shiplap") if not name.startswith("shiplap")}
    environment = Environment(tmp_path_factory.mktemp("alone") / "environment", required)
    environment.install(built.wheels["shiplap-headers"], built.wheels["shiplap"])
    return environment


def nowhere(folder: Path) -> dict[str, str]:
    """Variables of a program that finds no compiler, and no home but ``folder``."""
    (folder / "bin").mkdir()
    return {"PATH": str(folder / "bin"), "HOME": str(folder)}


@pytest.mark.long
def test_the_core_declares_and_calls_an_op_without_a_compiler(alone: Environment, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = alone.run(tmp_path / "program.py", cwd=tmp_path, env=nowhere(tmp_path))
    assert done.returncode == 0, done.stderr
    names, file = done.stdout.splitlines()
    assert names == "shiplap shiplap-headers"
    assert Path(file).is_relative_to(alone.packages)


@pytest.mark.long
def test_its_verbs_work_and_those_of_others_are_not_there(alone: Environment, tmp_path: Path) -> None:
    env = nowhere(tmp_path)
    done = alone.run("-m", "shiplap.cli", "env", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout
    done = alone.run("-m", "shiplap.cli", "demo", "--quick", cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith("SL614: shiplap has no command of this name\n")
    assert "install that package" in done.stderr
