"""What the distributions say of themselves follows from one setting, and an index would take it."""

from __future__ import annotations

import ctypes
import platform
import re
import runpy
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from tests.projects import COMPILED, PROJECTS, PUBLISHED

from shiplap.packaging.tags import platform_tag
from shiplap_testing.forked import python
from shiplap_testing.paths import REPOSITORY

pytestmark = pytest.mark.docs

LINKS = REPOSITORY / "tools" / "project_links.py"
DISTRIBUTIONS = REPOSITORY / "tools" / "distributions.py"
HOME = "https://example.org/shiplap"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the files that name the home of the project."""
    for name in ("README.md", "CITATION.cff", "mkdocs.yml", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("assets"))
    for package in PUBLISHED:
        (tmp_path / "packages" / package).mkdir(parents=True)
        for name in ("README.md", "CHANGELOG.md", "pyproject.toml"):
            shutil.copy(REPOSITORY / "packages" / package / name, tmp_path / "packages" / package / name)
    return tmp_path


def set_home(root: Path, home: str) -> None:
    text = (root / "pyproject.toml").read_text("utf-8")
    (root / "pyproject.toml").write_text(re.sub(r'(?m)^home = ".*"$', f'home = "{home}"', text), "utf-8")


def test_files_are_what_the_setting_says() -> None:
    done = python(LINKS, "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    pages = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["tool"]["shiplap"]["pages"]
    assert pages.keys() == set(PUBLISHED)


def test_one_setting_gives_every_distribution_its_addresses(repository: Path) -> None:
    before = {p: p.read_bytes() for p in repository.rglob("*") if p.is_file()}
    set_home(repository, HOME + "/")
    assert python(LINKS, "--check", "--root", repository).returncode == 1
    assert python(LINKS, "--root", repository).returncode == 0
    assert python(LINKS, "--check", "--root", repository).returncode == 0
    for package in PUBLISHED:
        folder = repository / "packages" / package
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
        assert project["project"]["urls"]["Homepage"] == HOME
        assert project["project"]["urls"].keys() >= {"Documentation", "Source", "Changelog", "Issues"}
        assert {k: v for k, v in project["project"].items() if k != "urls"} == PROJECTS[package]["project"]
        assert f"]({HOME}/blob/main/packages/{package}/CHANGELOG.md)" in (folder / "README.md").read_text("utf-8")
        assert "in the repository\n" not in (folder / "README.md").read_text("utf-8")
    assert "pip install shiplap\n" in (repository / "README.md").read_text("utf-8")
    assert f"repository-code: {HOME}\n" in (repository / "CITATION.cff").read_text("utf-8")
    set_home(repository, "")
    assert python(LINKS, "--root", repository).returncode == 0
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize("package", PUBLISHED)
def test_a_distribution_describes_itself(package: str) -> None:
    project = PROJECTS[package]["project"]
    classifiers = set(project["classifiers"])
    assert {
        "Typing :: Typed",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
    } <= classifiers
    assert ("Programming Language :: C++" in classifiers) or package not in COMPILED
    assert project["keywords"]
    for name in project["license-files"]:
        assert (REPOSITORY / "packages" / package / name).is_file(), name
    module = package.replace("-", "_")
    assert (REPOSITORY / "packages" / package / "src" / module / "py.typed").is_file()


@pytest.mark.parametrize("package", PUBLISHED)
def test_a_long_description_stands_alone(package: str) -> None:
    """It has an example and an installation, and no link that only the repository could follow."""
    text = (REPOSITORY / "packages" / package / "README.md").read_text("utf-8")
    prose = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not link.startswith("https:")] == []
    assert re.search(r"^```(python|yaml|c)$", text, re.MULTILINE)
    assert re.search(rf'^\$ pip install "?{package}', text, re.MULTILINE)


def test_the_first_release_has_the_version_that_stands_there(repository: Path) -> None:
    tool = runpy.run_path(str(REPOSITORY / "tools" / "release.py"))
    version = tool["current"](repository)
    assert tool["refused"](repository, version, version) == ""
    assert all(tool["name_section"](repository / "packages" / name, version, "2026-12-01") for name in PUBLISHED)
    assert tool["problems_of_tag"](repository, f"v{version}") == []
    assert tool["refused"](repository, version, version) == f"{version} does not come after {version}"
    assert tool["refused"](repository, version, "99.0.0") == ""


# --- tools/distributions.py -------------------------------------------------------------------------------------------

METADATA = "Metadata-Version: 2.4\nName: {0}\nVersion: 1.0\nClassifier: Typing :: Typed\n\n# {0}\n\n{1}\n"


def wheel(folder: Path, name: str, tag: str, *files: str, text: str = "") -> Path:
    """A wheel with empty files, as far as the check reads it."""
    stem = name.replace("-", "_")
    path = folder / f"{stem}-1.0-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{stem}-1.0.dist-info/METADATA", METADATA.format(name, text))
        for file in (f"{stem}/py.typed", f"{stem}-1.0.dist-info/licenses/LICENSE", *files):
            archive.writestr(file, "")
    return path


@pytest.mark.parametrize(
    ("compiled", "tag", "files", "text", "found"),
    [
        (False, "any", (), "[a](https://example.org)", []),
        (False, "any", (), "[guide](../../docs/x.md)", ["a relative link: ../../docs/x.md"]),
        (False, "linux_x86_64", (), "", ["not a wheel for every platform"]),
        (True, "manylinux_2_28_x86_64", ("x/_shiplap/a/binding.so",), "", ["x/_shiplap/a/binding.so fits linux_"]),
        (True, "manylinux_2_28_x86_64", (), "", ["no native binding"]),
        (True, "linux_x86_64", ("x/_shiplap/a/binding.so",), "", ["no manylinux tag"]),
        (True, "manylinux_2_34_x86_64", ("x/_shiplap/a/binding.py",), "", ["no native binding", "needs glibc 2.34"]),
    ],
)
def test_a_wheel_that_an_index_or_a_user_could_not_use_is_named(
    tmp_path: Path, compiled: bool, tag: str, files: tuple[str, ...], text: str, found: list[str]
) -> None:
    path = wheel(tmp_path, "some-name", tag, *files, text=text)
    program = (
        "import runpy, sys\nfrom pathlib import Path\n"
        f"tool = runpy.run_path({str(DISTRIBUTIONS)!r})\n"
        f"print(*tool['problems_of_wheel'](Path({str(path)!r}), {compiled}), sep='\\n')\n"
    )
    (tmp_path / "program.py").write_text(program)
    done = python(tmp_path / "program.py")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert len(lines) == len(found)
    assert all(line.startswith(begin) for line, begin in zip(lines, found, strict=True)), lines


NEWER = """
#include <dlfcn.h>
#include <memory>
#include <sstream>
#include <thread>
#include <vector>
#ifdef STAT
#include <sys/stat.h>
#endif
extern "C" int count(int n, const char* path) {
  std::stringstream text;
  text << n;
  std::vector<int> values(n);
  auto shared = std::make_shared<int>(n);
  std::thread([&, copy = shared] { values[0] = *copy; }).join();
  if (void* there = dlopen(path, RTLD_NOW)) dlclose(there);
#ifdef STAT
  struct stat about;
  if (stat(path, &about) == 0) return 0;
#endif
  return values[0] + static_cast<int>(std::move(text).str().size());
}
#ifdef MAIN
int main() { return count(30, "") == 32 ? 0 : 1; }
#endif
"""


def test_a_compiler_for_older_systems_takes_no_newer_symbols(tmp_path: Path) -> None:
    """Of the C++ library neither, although its headers are new; what an older C library lacks is refused."""
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        pytest.skip("the compiler is for GCC on x86-64")
    compiler = runpy.run_path(str(REPOSITORY / "tools" / "older_glibc.py"))["write_folder"](tmp_path / "older")
    (tmp_path / "a.cpp").write_text(NEWER)

    def link(program: Path | str, name: str, *more: str) -> subprocess.CompletedProcess[str]:
        kind = () if "-DMAIN" in more else ("-shared", "-fPIC")
        call = [program, "-std=c++20", *kind, *more, tmp_path / "a.cpp", "-o", tmp_path / name]
        return subprocess.run(call, capture_output=True, text=True, check=False)

    assert link("g++", "here.so").returncode == link(compiler, "older.so").returncode == 0
    here, older = (int(platform_tag([tmp_path / f"{name}.so"])[0].split("_")[2]) for name in ("here", "older"))
    assert older <= 28 < here, "this system is an old one itself" if here <= 28 else ""
    assert ctypes.CDLL(str(tmp_path / "older.so")).count(30, b"") == 32
    assert link(compiler, "program", "-DMAIN").returncode == 0  # CMake tries a compiler so
    assert subprocess.run([tmp_path / "program"], check=False).returncode == 0
    refused = link(compiler, "stat.so", "-DSTAT")
    assert refused.returncode != 0
    assert re.search("undefined reference to .stat'", refused.stderr), refused.stderr


def test_every_published_distribution_is_built_after_what_it_requires() -> None:
    program = REPOSITORY / "tools" / "distributions.py"
    import runpy

    names = runpy.run_path(str(program))["published"]()
    assert sorted(names) == sorted(PUBLISHED)
    assert names[:2] == ["shiplap-headers", "shiplap"]


def test_a_tag_is_compared_with_versions_and_changelogs() -> None:
    tool = REPOSITORY / "tools" / "release.py"
    version = PROJECTS["shiplap"]["project"]["version"]
    done = python(tool, "--check-tag", "v99.0.0")
    assert done.returncode == 1
    assert f"shiplap has version {version}, and the tag is v99.0.0" in done.stderr
    unnamed = [
        p for p in PUBLISHED if f"## {version} (" not in (REPOSITORY / "packages" / p / "CHANGELOG.md").read_text()
    ]
    assert python(tool, "--check-tag", f"v{version}").returncode == (1 if unnamed else 0)
