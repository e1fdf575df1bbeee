"""A wheel with native code: made by a build backend, installed where there is no compiler and nothing in the cache."""

import base64
import csv
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

import shiplap as sl
from shiplap.dispatch import registry
from shiplap.dispatch.package_folder import FOLDER
from shiplap.kernels.native import binding, prebuilt
from shiplap.kernels.native.build import LIBRARY, SEAL
from shiplap.packaging import WheelRequest, backend, package
from shiplap.packaging.contents import fill_packages
from shiplap.packaging.tags import platform_tag
from shiplap.packaging.wheel import _choose_platform
from shiplap_testing import forked
from shiplap_testing.paths import REPOSITORY
from shiplap_testing.support import fails

HOOK = "import sys; from shiplap.packaging import backend; print(backend.build_wheel(sys.argv[1]))"


def build(project: Path) -> Path:
    """The wheel of ``project``, through the hook that a frontend calls, in a process of its own as it does."""
    done = subprocess.run(
        [sys.executable, "-c", HOOK, "dist"], cwd=project, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return project / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shipping")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_CACHE_DIR", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def wheel(folder):
    """That of the example, built by scikit-build-core."""
    project = folder / "project"
    shutil.copytree(REPOSITORY / "examples" / "wheel", project)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        return project / "dist" / backend.build_wheel("dist")


@pytest.fixture(scope="module")
def site(folder, wheel):
    """The wheel, installed."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def scale(site):
    """The op of the installed package, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield importlib.import_module("rowscale").scale
        registry.forget_op("rowscale::scale")
        del sys.modules["rowscale"]


@pytest.fixture
def copied(tmp_path, site, scale, monkeypatch):
    """The folder of the library, in a copy of the package, which the op is asked to look into."""
    shutil.copytree(site / "rowscale", tmp_path / "rowscale")
    about = sys.modules["rowscale"].__spec__
    monkeypatch.setattr(about, "submodule_search_locations", [str(tmp_path / "rowscale")])
    (place,) = (tmp_path / "rowscale" / FOLDER).iterdir()
    return place


# --- at the user's --------------------------------------------------------------------------------------------------

USE = """
import os, shutil, warnings
warnings.simplefilter("error")
import torch, rowscale
assert not [name for name in ("c++", "g++", "cc", "gcc") if shutil.which(name)]
from shiplap.kernels.native import binding as native
x, factor = torch.randn(5, 3), torch.randn(5)
for _ in range(40):  # more calls than start a compiler
    assert torch.equal(rowscale.scale(x, factor), x * factor[:, None])
    assert rowscale.scale.native is not None
    assert torch.equal(torch.ops.rowscale.scale(x, factor), x * factor[:, None])
print(native.state(rowscale.scale)[1])
assert not os.path.exists(os.environ["SHIPLAP_CACHE_DIR"])
"""


def test_the_op_is_native_from_the_first_call_without_a_compiler(site, tmp_path):
    env = {**os.environ, "PATH": str(tmp_path), "SHIPLAP_CACHE_DIR": str(tmp_path / "cache")}
    env["PYTHONPATH"] = os.pathsep.join([str(site), env.get("PYTHONPATH", "")])
    env.pop("CXX", None)
    done = forked.python("-c", USE, env=env)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(site / "rowscale" / FOLDER)


def test_what_is_chosen_does_not_depend_on_the_compiler(scale, tmp_path, monkeypatch):
    """The digest of the cache, too: a compiler of another name, size and age."""
    plan = binding.make_plan(scale)
    other = tmp_path / "cxx"
    other.write_text('#!/bin/sh\nexec c++ "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    assert binding.make_plan(scale).place == plan.place
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert binding.make_plan(scale).place == plan.place
    monkeypatch.setenv("CXX", "c++ -DNDEBUG")
    assert binding.make_plan(scale).place != plan.place, "flags are part of what a library is made from"


def test_the_library_is_chosen_by_what_the_op_needs(scale, copied):
    plan, why = prebuilt.find_prebuilt_library(scale)
    assert (plan.place, why) == (copied, "")
    assert [(e.op, e.device) for e in plan.entries.values()] == [(scale, "cpu")]


def rewritten(place, **fields):
    about = json.loads((place / prebuilt.MANIFEST).read_text())
    (place / prebuilt.MANIFEST).write_text(json.dumps(about | fields))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda place: rewritten(place, machine="linux-sparc"), "it is for linux-sparc, and this is linux-"),
        (lambda place: rewritten(place, format="shiplap-binding/9"), "is not of format shiplap-binding/1"),
        (lambda place: rewritten(place, ops=[{"name": "x"}]), "lists something else than ops"),
        (
            lambda place: rewritten(place, ops=[{"op": "rowscale::scale", "device": "cpu", "needs": "0" * 32}]),
            "its code for cpu was made for another declaration of rowscale::scale",
        ),
        (lambda place: (place / LIBRARY).write_bytes(b"\x7fELF"), "its seal does not fit"),
        (lambda place: (place / SEAL).unlink(), "its seal does not fit"),
        (lambda place: (place / LIBRARY).chmod(0o666), "it can be written by others (mode 666)"),
        (lambda place: place.chmod(0o777), "it can be written by others (mode 777)"),
    ],
)
def test_a_library_that_does_not_fit_is_not_used(scale, copied, damage, reason):
    damage(copied)
    plan, why = prebuilt.find_prebuilt_library(scale)
    assert plan is None
    assert reason in why


def test_a_torch_without_the_stable_abi_is_not_given_it(scale, copied, monkeypatch):
    monkeypatch.setattr(prebuilt, "takes_torch", lambda: False)
    plan, why = prebuilt.find_prebuilt_library(scale)
    assert plan is None
    assert "it is for torch ['2.11', '3.0'], and this is " in why


def test_a_library_that_cannot_be_used_is_said_once_and_python_serves(scale, copied, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "empty"))
    (copied / LIBRARY).write_bytes(b"")
    scale.drop_native()
    x, factor = torch.randn(5, 3), torch.randn(5)
    with pytest.warns(sl.ShiplapNotice, match=r"rowscale::scale does not use the binding of its package: (SL309)"):
        assert torch.equal(scale(x, factor), x * factor[:, None])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(scale(x, factor), x * factor[:, None])
    assert binding.state(scale)[0] == "python"
    assert "its seal does not fit" in binding.state(scale)[1]


# --- the wheel ------------------------------------------------------------------------------------------------------


def test_the_wheel_is_one_for_this_platform_and_every_python(wheel, folder):
    assert wheel.name.startswith("rowscale-1.0-py3-none-manylinux_2_")
    assert [path.name for path in wheel.parent.iterdir()] == [wheel.name], "what the backend made is gone"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = archive.read("rowscale-1.0.dist-info/WHEEL").decode().splitlines()
        rows = list(csv.reader(archive.read("rowscale-1.0.dist-info/RECORD").decode().splitlines()))
        for name, digest, size in rows[:-1]:
            content = archive.read(name)
            hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={hashed}", str(len(content)))
    assert f"Tag: {wheel.name.removeprefix('rowscale-1.0-').removesuffix('.whl')}" in about
    assert "Root-Is-Purelib: false" in about
    assert sorted(row[0] for row in rows) == sorted(names)
    assert len([name for name in names if name.endswith((".so", "/seal", "/manifest.json"))]) == 4


@pytest.mark.long
def test_a_wheel_that_is_packed_again_is_the_same(wheel, tmp_path):
    packed = package(WheelRequest(wheel, tmp_path))
    assert packed.wheel.name == wheel.name
    assert packed.wheel.read_bytes() == wheel.read_bytes()
    (contents,) = packed.contents
    assert [(b.op, b.devices) for b in contents.bound] == [("rowscale::scale", ("cpu",))]
    assert contents.libraries == ("librowscale.so",)


def test_a_tag_is_raised_to_what_the_bindings_need(wheel, site):
    libraries = [*site.rglob("*.so")]
    needed = platform_tag(libraries)[0]
    newer, older = needed.replace("manylinux_2_", "manylinux_2_9"), re.sub(r"_2_\d+_", "_2_5_", needed)
    for now, then in ((older, needed), (f"{older}.{newer}", needed), (newer, newer), ("linux_armv7l", "linux_armv7l")):
        assert _choose_platform(WheelRequest(wheel), now, libraries) == (then, "")
    assert _choose_platform(WheelRequest(wheel, platform=older), newer, libraries) == (older, "")


@pytest.mark.long
def test_setuptools_makes_it_as_well(site, tmp_path):
    home = tmp_path / "src" / "rowscale"
    shutil.copytree(site / "rowscale", home, ignore=shutil.ignore_patterns("_shiplap", "__pycache__"))
    (tmp_path / "pyproject.toml").write_text(
        """[project]
name = "rowscale"
version = "2.0"
[tool.setuptools.package-data]
rowscale = ["*.so"]
[tool.shiplap.package]
backend = "setuptools.build_meta"
ops = ["rowscale"]
platform = "manylinux_2_40_x86_64"
"""
    )
    made = build(tmp_path)
    assert made.name == "rowscale-2.0-py3-none-manylinux_2_40_x86_64.whl"
    with zipfile.ZipFile(made) as archive:
        assert any(name.endswith(f"/{LIBRARY}") for name in archive.namelist())


@pytest.mark.parametrize(
    ("table", "got"),
    [
        ("", "no table [tool.shiplap.package] with backend"),
        ("backend = 3", "backend = 3"),
        ('backend = "x"\nop = ["y"]', "the key 'op'"),
        ('backend = "x"\nops = [1]', "ops = [1]"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, monkeypatch, table, got):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(f"[tool.shiplap.package]\n{table}\n")
    with fails("SL308", got=got):
        backend.build_wheel("dist")


def test_other_hooks_are_those_of_the_backend(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.shiplap.package]\nbackend = "setuptools.build_meta"\n')
    from setuptools import build_meta

    assert backend.build_sdist == build_meta.build_sdist
    assert not hasattr(backend, "no_such_hook")


def test_a_file_that_is_no_wheel_is_refused(tmp_path):
    path = tmp_path / "mylib-1.0-py3-none-any.whl"
    for got in ("No such file", "File is not a zip file", "no file *.dist-info/WHEEL"):
        with fails("SL310", got):
            package(WheelRequest(path))
        if path.exists():
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("mylib/__init__.py", "")
        else:
            path.write_text("no zip")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../mylib/__init__.py", "")
    with fails("SL310", got="the name '../mylib/__init__.py' in it"):
        package(WheelRequest(path))
    with fails("SL310", got="No such file or directory"):
        package(WheelRequest(tmp_path / "dist" / "*.whl"))  # a shell passes a pattern on that fits no file
    path.rename(tmp_path / "mylib.zip")
    with fails("SL310", got="the name mylib.zip"):
        package(WheelRequest(tmp_path / "mylib.zip"))


def test_what_cannot_be_given_native_code_is_refused(tmp_path, monkeypatch, ns):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("empty", "outside"):
        (tmp_path / f"{ns}_{name}").mkdir()
    (tmp_path / f"{ns}_empty" / "__init__.py").write_text("")
    (tmp_path / f"{ns}_single.py").write_text("")
    text = (REPOSITORY / "examples/wheel/src/rowscale/__init__.py").read_text().replace("rowscale::", f"{ns}::")
    outside = text.replace('Path(__file__).with_name("librowscale.so")', '"/usr/lib/librowscale.so"')
    (tmp_path / f"{ns}_outside" / "__init__.py").write_text(outside)
    with fails("SL308", got="no op is declared when it is imported"):
        fill_packages([f"{ns}_empty"], tmp_path)
    with fails("SL308", got="a module of one file"):
        fill_packages([f"{ns}_single"], tmp_path)
    with fails("SL308", got="the kernel library /usr/lib/librowscale.so"):
        fill_packages([f"{ns}_outside"], tmp_path)
    with fails("SL308", expected=f"the package in {tmp_path / 'other'}"):
        fill_packages([f"{ns}_outside"], tmp_path / "other")
    with fails("SL601", where=f"{ns}_missing"):
        fill_packages([f"{ns}_missing"], tmp_path)


def test_the_platform_is_what_the_libraries_need(site, tmp_path):
    tag, why = platform_tag(site.rglob("*.so"))
    assert tag.startswith("manylinux_2_")
    assert not why
    source = tmp_path / "other.c"
    source.write_text("int f(void) { return 0; }")
    for name, uses in (("libinner.so", []), ("libother.so", ["-Wl,--no-as-needed", "-linner"])):
        command = ["cc", "-shared", "-fPIC", "-o", tmp_path / name, source, f"-L{tmp_path}", *uses]
        subprocess.run(command, check=True)
    tag, why = platform_tag([tmp_path / "libother.so"])
    assert tag.startswith("linux_")
    assert why == "libother.so needs libinner.so"
