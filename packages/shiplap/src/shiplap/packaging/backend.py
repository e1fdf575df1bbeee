"""The build backend of a package with kernels: another backend makes the wheel, and native code is put into it.

In ``pyproject.toml``::

    [build-system]
    requires = ["shiplap", "scikit-build-core", "shiplap-headers"]
    build-backend = "shiplap.packaging.backend"

    [tool.shiplap.package]
    backend = "scikit_build_core.build"   # or setuptools.build_meta, hatchling.build, ...
    ops = ["mylib.ops"]                   # the modules that declare ops, by default the top packages
    platform = "manylinux_2_28_x86_64"    # by default what the libraries need
    tuned = "tuned.json"                  # choices to go along: a file of shiplap freeze
    cubins = [90]                         # Triton kernels to go along, compiled for these architectures ...
    calls = "calls.jsonl"                 # ... and for these calls: a file of SHIPLAP_RECORD

Every hook of the backend is passed on, so source distributions and editable installs are what they were.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

from shiplap import safe_io
from shiplap.errors import error
from shiplap.packaging.contents import PackageExtras
from shiplap.packaging.wheel import WheelRequest, package

# The hooks of PEP 517 and PEP 660 that are passed on to the other backend.
HOOKS = (
    "build_editable",
    "build_sdist",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
)
# The keys of the table, and below those that hold lists, with the type of an item.
KEYS = ("backend", "ops", "platform", "tuned", "cubins", "calls")
LISTS = {"ops": str, "cubins": int}
LIMIT = 1 << 20  # bytes of pyproject.toml


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel with native code, and return its file name in ``wheel_directory``. This is the hook of PEP 517,
    which defines the parameters. ``config_settings`` and ``metadata_directory`` are optional.

    Raises:
        ShippingError: ``SL308`` for a table ``[tool.shiplap.package]`` that is missing or wrong.
    """
    asked = _read_package_table()
    # The other backend runs first and unchanged, so a project builds with its own settings.
    name = _import_backend(asked).build_wheel(wheel_directory, config_settings, metadata_directory)
    tuned, calls = (Path(asked[key]) if key in asked else None for key in ("tuned", "calls"))
    extras = PackageExtras(tuned, tuple(asked.get("cubins", ())), calls)
    modules, platform = tuple(asked.get("ops", ())), asked.get("platform", "")
    request = WheelRequest(Path(wheel_directory) / name, None, modules, platform, extras)
    packed = package(request, lambda line: print(f"shiplap: {line}", file=sys.stderr))
    if packed.warning:
        print(f"shiplap: package indexes will refuse the wheel: {packed.warning}", file=sys.stderr)
    return packed.wheel.name


def __getattr__(name: str) -> Any:
    """Return the hook ``name`` of the configured backend. Raise ``AttributeError`` for a name that the backend does not
    offer, since PEP 517's frontends look up hooks by name.
    """
    if name not in HOOKS:
        # PEP 517 regards a missing attribute as a hook that the backend does not offer.
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_backend(_read_package_table()), name)


def _import_backend(asked: dict[str, Any]) -> Any:
    """Return the build backend that the table ``asked`` configures, a module or an object in one. Raise ``SL308`` if it
    cannot be imported or builds no wheels.
    """
    module, _, inner = str(asked["backend"]).partition(":")
    try:
        backend = import_module(module)
        for part in filter(None, inner.split(".")):
            backend = getattr(backend, part)
    # A backend is foreign code, whose import may raise anything.
    except Exception as e:
        raise _table_error(f"backend = {asked['backend']!r}, which cannot be imported: {e}") from e
    if not hasattr(backend, "build_wheel"):
        raise _table_error(f"backend = {asked['backend']!r}, which builds no wheels")
    return backend


def _read_package_table() -> dict[str, Any]:
    """Return the table ``[tool.shiplap.package]`` of the ``pyproject.toml`` in the working folder. PEP 517 runs hooks
    in the folder of the project.

    Raise ``SL308`` if the table is missing or wrong.
    """
    path = Path("pyproject.toml")
    try:
        # NAMED: the sources of a project may belong to another user than the one who builds.
        asked: Any = tomllib.loads(safe_io.read_file(path, LIMIT, safe_io.NAMED).decode())
    except (OSError, ValueError, RecursionError) as e:
        raise _table_error(safe_io.unsafe_reason(e)) from None
    for name in ("tool", "shiplap", "package"):
        asked = asked.get(name) if isinstance(asked, dict) else None
    if not isinstance(asked, dict) or "backend" not in asked:
        raise _table_error("no table [tool.shiplap.package] with backend")
    for key, value in asked.items():
        if key not in KEYS:
            raise _table_error(f"the key {key!r}")
        listed = value if key in LISTS else [value]
        # The exact type, since a bool is an int, too.
        if not isinstance(listed, list) or not all(type(each) is LISTS.get(key, str) for each in listed):
            raise _table_error(f"{key} = {value!r}")
    return asked


def _table_error(got: str) -> Exception:
    """Return the error ``SL308`` about ``[tool.shiplap.package]`` in pyproject.toml. ``got`` describes the defect."""
    return error(
        "SL308",
        where=str(Path("pyproject.toml").absolute()),
        got=got,
        expected=f"[tool.shiplap.package] with {', '.join(KEYS)}",
        fix='write [tool.shiplap.package] with backend = "setuptools.build_meta" or another backend',
    )
