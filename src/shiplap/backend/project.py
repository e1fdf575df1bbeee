"""A project that ``shiplap backend new`` wrote: its settings, and generating into it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shiplap.backend import lock
from shiplap.backend.generate import Generated, generate, write
from shiplap.backend.metadata import Metadata, load
from shiplap.backend.runtime import COMMON, Runtime, runtime
from shiplap.codegen import render
from shiplap.compat import host_device
from shiplap.errors import error

__all__ = ["Project", "gen", "new", "open_project"]


@dataclass(frozen=True)
class Project:
    """A project's directory and what ``backend.toml`` says: device name, runtime, number of translation units."""

    root: Path
    device: str
    runtime: Runtime
    units: int

    @property
    def package(self) -> Path:
        return self.root / f"torch_{self.device}"

    @property
    def generated(self) -> Path:
        return self.root / "generated"

    @property
    def bodies(self) -> Path:
        return self.root / "csrc"

    @property
    def lock(self) -> Path:
        return self.root / "schema.lock"

    def metadata(self) -> Metadata:
        return load(self.root / "ops.yaml")


def new(device: str, runtime_name: str, root: Path, *, units: int = 16) -> Project:
    """Write a project for ``device``. SL905 if the name is no identifier or ``root`` holds something already."""
    chosen = runtime(runtime_name)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", device) or hasattr(torch, device):
        raise error("SL905", where=device, got=f"device name {device!r}",
                    expected="a lower-case word that is no attribute of torch", fix="choose another name")  # fmt: skip
    if root.exists() and any(root.iterdir()):
        raise error("SL905", where=str(root), got="a directory that is not empty", expected="a new directory",
                    fix="name another one")  # fmt: skip
    project = Project(root, device, chosen, units)
    context = {"device": device, "runtime": chosen.name, "units": units, "requires": chosen.requires}
    files = {
        "backend.toml": "backend.toml", "ops.yaml": "ops.yaml", "setup.py": "setup.py",
        "pyproject.toml": "pyproject.toml", "test_opinfo.py": "test_opinfo.py",
        f"torch_{device}/__init__.py": "package.py",
    }  # fmt: skip
    for name, template in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(f"backend/project/{template}.jinja", **context), encoding="utf-8")
    project.bodies.mkdir()
    return project


def open_project(root: Path) -> Project:
    """The project in ``root``. SL905 if there is none, or its ``backend.toml`` is damaged."""
    path = root / "backend.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return Project(root, str(data["device"]), runtime(str(data["runtime"])), int(data.get("units", 16)))
    except FileNotFoundError:
        raise error(
            "SL905", where=str(root), got="no backend.toml", expected="a directory that 'shiplap backend new' wrote"
        ) from None
    except (tomllib.TOMLDecodeError, KeyError, ValueError) as e:
        raise error("SL905", where=str(path), got=f"{type(e).__name__}: {e}", expected="device, runtime and units",
                    fix="correct backend.toml") from None  # fmt: skip


def gen(project: Project, *, accept_drift: bool = False) -> tuple[Generated, list[str]]:
    """Generate into ``project``; returns what was made and the files touched. SL904 where schemas have drifted."""
    metadata = project.metadata()
    lock.hold(project.lock, metadata, accept=accept_drift)
    made = generate(metadata, project.runtime, units=project.units)
    touched = write(project.generated, {**made.files, **_custom(project, made)})
    touched += write(project.package, _package_files(project, made))
    return made, touched


def _package_files(project: Project, made: Generated) -> Mapping[str, str]:
    """What the Python package needs at load: the manifest that refuses a drifted torch, and the device module."""
    schemas = {d.name: lock.digest(d.schema) for w in made.wrappers for d in (w.declaration, *w.derived)}
    manifest = {
        "device": project.device, "runtime": project.runtime.name, "torch": torch.__version__.partition("+")[0],
        "vendor": project.runtime.version(), "schemas": dict(sorted(schemas.items())),
    }  # fmt: skip
    modules = {p.name: p.read_text(encoding="utf-8") for p in sorted((COMMON / "package").glob("*.py"))}
    modules["_inductor.py"] = Path(host_device.__file__).read_text(encoding="utf-8")  # private torch stays in compat/
    return {"_manifest.json": json.dumps(manifest, indent=1) + "\n", **modules}


def _custom(project: Project, made: Generated) -> Mapping[str, str]:
    """Declarations of hand-written bodies, and a scaffold for each one that is not there yet."""
    custom = [w for w in made.wrappers if w.family.file == "custom"]
    for w in custom:
        body = project.bodies / f"{w.id}.cpp"
        if not body.exists():
            body.write_text(render("backend/scaffold.cpp.jinja", w=w), encoding="utf-8")
    return {"bodies.h": render("backend/bodies.h.jinja", wrappers=custom)}
