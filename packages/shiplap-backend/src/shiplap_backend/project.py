"""A project of ``shiplap backend new``: its settings, and the generation of its files."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch

from shiplap import ShiplapError
from shiplap.codegen import render_source
from shiplap.plugin_api import error
from shiplap.torch_private import host_device
from shiplap.torch_private.aten_operators import AtenDeclaration, aten_declarations
from shiplap_backend import bodies, lock
from shiplap_backend.expression import suggest_nearest
from shiplap_backend.generate import GeneratedWrappers, generate_wrappers, write_generated
from shiplap_backend.metadata import Metadata, load_metadata
from shiplap_backend.runtime import COMMON, Runtime
from shiplap_backend.runtimes import find_runtime, is_path

_MOST_UNITS = 256


@dataclass(frozen=True)
class Project:
    """A project of a generated backend, with its directory ``root`` and the settings in its ``backend.toml``.
    ``device`` is the name of the device, and ``runtime`` the vendor's runtime.

    ``units`` is the number of C++ files over which the generated wrappers are spread.
    """

    root: Path
    device: str
    runtime: Runtime
    units: int

    @property
    def package(self) -> Path:
        """The folder of the device's Python package in the project."""
        return self.root / f"torch_{self.device}"

    @property
    def generated(self) -> Path:
        """The folder of the generated C++ files."""
        return self.root / "generated"

    @property
    def bodies(self) -> Path:
        """The folder of hand-written C++ bodies for generated wrappers."""
        return self.root / "csrc"

    @property
    def lock(self) -> Path:
        """The path of the schema lock, which has the operator schemas for which the project was checked."""
        return self.root / "schema.lock"

    def metadata(self) -> Metadata:
        """Return the metadata of the project, read from its ``ops.yaml``.

        Raise ``SL901`` if the file has a mistake.
        """
        return load_metadata(self.root / "ops.yaml", self.runtime)


def create_project(device: str, runtime_name: str, root: Path, *, units: int = 16) -> Project:
    """Write a project for ``device``, and return it.

    Args:
        device: The name of the device, as in ``torch.ones(2, device="mine")``.
        runtime_name: The name of a runtime, or the directory of one.
        root: The directory of the project, which must be new or empty.
        units: The number of C++ files over which the generated wrappers are spread.

    Raises:
        BackendError: ``SL905`` if the device's name is taken or invalid, or if ``root`` is not empty. ``SL907``,
            ``SL909`` or ``SL910`` if the runtime does not exist or cannot be used.
    """
    chosen = find_runtime(runtime_name)
    if not _is_name(device) or _is_taken(device):
        raise error(
            "SL905",
            where=device,
            got=f"device name {device!r}",
            expected="a lower-case word that is neither a device nor an attribute of torch",
            fix="choose another name",
        )
    _make_directory(root)
    project = Project(root, device, chosen, units)
    where = Path(runtime_name).expanduser().resolve()
    named = Path(os.path.relpath(where, root.resolve())).as_posix() if is_path(runtime_name) else chosen.name
    context = {"device": device, "runtime": chosen.name, "named": named, "units": units, "requires": chosen.requires}
    # Templates by the path of the file in the project.
    files = {
        "backend.toml": "backend.toml",
        "ops.yaml": "ops.yaml",
        "setup.py": "setup.py",
        "pyproject.toml": "pyproject.toml",
        "test_opinfo.py": "test_opinfo.py",
        f"torch_{device}/__init__.py": "package.py",
    }
    for name, template in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            render_source(f"project/{template}.jinja", package="shiplap_backend", **context), encoding="utf-8"
        )
    project.bodies.mkdir()
    return project


def _is_name(device: str) -> bool:
    """Return whether ``device`` can be the name of a device.

    The name must be a lower-case identifier and no keyword of Python.
    """
    return bool(re.fullmatch(r"[a-z][a-z0-9_]*", device)) and not iskeyword(device)


def _is_taken(device: str) -> bool:
    """Return whether torch has a device or an attribute called ``device``.

    The name of a generated package that is loaded in this process does not count as taken.
    """
    here = torch.device("privateuseone").type  # the name that it has by now
    # A package of this name has registered the device in this process.
    if device == here and here != "privateuseone":
        return False
    try:
        torch.device(device)
    except RuntimeError:
        # The device gets a module ``torch.<name>``, in the place of such an attribute.
        return hasattr(torch, device)
    return True


def _make_directory(root: Path) -> None:
    """Create the directory ``root`` unless it exists.

    Raise ``SL905`` if it cannot be created or is not empty.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        got = "a directory that is not empty" if any(root.iterdir()) else ""
    except OSError as e:
        got = e.strerror or str(e)
    if got:
        raise error("SL905", where=str(root), got=got, expected="a new directory", fix="name another directory")


def open_project(root: Path) -> Project:
    """Return the project in the directory ``root``.

    Raise ``SL905`` with file and line if ``backend.toml`` is missing or invalid.
    """
    path = root / "backend.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise error(
            "SL905", where=str(root), got="no backend.toml", expected="a directory that 'shiplap backend new' wrote"
        ) from None
    except UnicodeDecodeError as e:
        raise _settings_error(f"{path}:1", f"no UTF-8: {e.reason}") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        # At the end of the file tomllib gives no line number.
        number = re.search(r"line (\d+)", str(e))
        raise _settings_error(f"{path}:{number[1] if number else text.count(chr(10)) + 1}", str(e)) from None

    def at(key: str) -> str:
        """Return ``file:line`` of the setting ``key`` in the project's ``backend.toml``."""
        lines = [n for n, line in enumerate(text.splitlines(), 1) if re.match(rf"\s*\[*[\"']?{re.escape(key)}\b", line)]
        return f"{path}:{lines[0] if lines else 1}"

    for key, got in _settings_problems(data):
        raise _settings_error(at(key), got)
    try:
        chosen = find_runtime(data["runtime"], root)
    except ShiplapError as e:
        if e.id == "SL907":  # no such runtime: the line that names it is ours
            raise _settings_error(at("runtime"), f"runtime {data['runtime']!r}: {e.got}") from None
        raise
    return Project(root, data["device"], chosen, data.get("units", 16))


def _settings_problems(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and the problem of each invalid or missing setting in ``data``, the content of ``backend.toml``."""
    fields = {"device": str, "runtime": str, "units": int}
    for key in data:
        if key not in fields:
            yield key, f"unknown key {key!r}{suggest_nearest(key, fields)}"
    for key, kind in fields.items():
        if key not in data and key != "units":
            yield key, f"no {key!r}"
        elif key in data and type(data[key]) is not kind:
            yield key, f"{key} = {data[key]!r}, not {'a number' if kind is int else 'a text'}"
    # The caller raises at the first problem, so the keys exist from here on.
    if not _is_name(data["device"]) or _is_taken(data["device"]):
        yield "device", f"device {data['device']!r}"
    if not 1 <= data.get("units", 16) <= _MOST_UNITS:
        yield "units", f"units {data['units']}"


def _settings_error(where: str, got: str) -> ShiplapError:
    """Return the error ``SL905`` for an invalid setting at the file and line ``where``. ``got`` is the mistake."""
    return error(
        "SL905",
        where=where,
        got=got,
        expected=(
            "device (a lower-case word that torch does not have), runtime (a name, or a directory) and units "
            f"(1 to {_MOST_UNITS})"
        ),
        fix="correct backend.toml",
    )


def require_built(project: Project) -> None:
    """Raise ``SL905`` if ``project`` has not been built.

    A built project has a compiled library and its manifest, the file with the versions that it was built for.
    """
    if not (project.package / "_C.so").is_file() or not (project.package / "_manifest.json").is_file():
        raise error(
            "SL905",
            where=str(project.root),
            got="a project that is not built",
            expected="a built one",
            fix=f"run 'shiplap backend build {project.root}'",
        )


def generate_project(project: Project, *, accept_drift: bool = False) -> tuple[GeneratedWrappers, list[str]]:
    """Generate the C++ and Python files of ``project``, and return the wrappers and the names of changed files.

    If ``accept_drift`` is true, torch's schemas may differ from the locked ones. Otherwise a difference raises
    ``SL904``. Nothing is written before all checks have passed. Raise ``SL901``, ``SL902`` or ``SL903`` for wrong
    metadata, ``SL904`` for changed schemas, and ``SL908`` for hand-written bodies of a wrong signature.
    """
    metadata = project.metadata()
    # All checks come before the first write, so that an error leaves the project as it was.
    schemas = lock.update_lock(project.lock, metadata, accept=accept_drift)
    made = generate_wrappers(metadata, project.runtime, units=project.units)
    custom = [w for w in made.wrappers if w.family.file == "custom"]
    bodies.check_bodies(project.bodies, custom)
    every = aten_declarations().values()
    declared = {
        "bodies.h": render_source("bodies.h.jinja", package="shiplap_backend", wrappers=custom),
        "device_checks.h": render_source(
            "device_checks.h.jinja",
            package="shiplap_backend",
            unchecked=sorted(d.name for d in every if not d.compares_devices),
            made_of_out=sorted((d.name, d.delegate) for d in every if d.delegate and _compares_tensors(d)),
        ),
        "manifest.json": _build_manifest(project, made),
    }
    touched = write_generated(project.generated, {**made.files, **declared})
    touched += write_generated(project.package, _device_modules())
    # The lock comes last: after an interruption the next run compares with the old one.
    touched += write_generated(project.root, {project.lock.name: schemas.text()})
    return made, touched


def _compares_tensors(d: AtenDeclaration) -> bool:
    """Return whether the generated wrapper of the overload ``d`` must check that all its tensors are on one device.

    Torch requires this check of most overloads with more than one tensor.
    """
    return d.compares_devices and sum(a.tensor for a in d.inputs) > 1


def _build_manifest(project: Project, made: GeneratedWrappers) -> str:
    """Return the manifest of ``project`` with the generated wrappers ``made``, as a JSON string.

    It has the device, the versions of torch and of the vendor, and a digest of each overload's schema.
    ``build_extension`` writes it next to the library.
    """
    schemas = {d.name: lock.schema_digest(d.schema) for w in made.wrappers for d in (w.declaration, *w.derived)}
    manifest = {
        "device": project.device,
        "runtime": project.runtime.name,
        # Builds of one release, such as ``+cpu``, have the same schemas.
        "torch": torch.__version__.partition("+")[0],
        "vendor": project.runtime.version(),
        "schemas": dict(sorted(schemas.items())),
    }
    return json.dumps(manifest, indent=1) + "\n"


def _device_modules() -> Mapping[str, str]:
    """Return the source code of the device's Python files by file name.

    They are copied next to the library, which then does not need shiplap.
    """
    modules = {p.name: p.read_text(encoding="utf-8") for p in sorted((COMMON / "package").glob("*.py"))}
    modules["_inductor.py"] = Path(host_device.__file__).read_text(encoding="utf-8")  # private torch stays in one room
    return modules
