"""oneDNN: a graph is a list of primitives, run one after another. Headers and library come from oneDNN's CPU wheels."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from shiplap.plugin_api import error
from shiplap_backend.runtime import CONTRACT, RUNTIMES, Runtime

__all__ = ["RUNTIME"]

_HERE = Path(__file__).parent
_LIBRARY, _HEADERS = "onednn-cpu-gomp", "onednn-devel-cpu-gomp"


@cache
def _installed_file(package: str, name: str) -> Path:
    """Return the path of the file ``name`` of the installed ``package``.

    The package's wheel puts files outside site-packages. Raise ``SL907`` if the package or the file is missing.
    """
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        raise error(
            "SL907",
            where="onednn",
            got=f"no package {package!r}",
            expected=f"{_LIBRARY} and {_HEADERS}",
            fix="install them: pip install 'shiplap-backend[onednn]'",
        ) from None
    file = next((f for f in files if f.name == name), None)
    if file is None:
        raise error(
            "SL907",
            where="onednn",
            got=f"{package} without {name}",
            expected="an intact installation",
            fix=f"reinstall it: pip install --force-reinstall {package}",
        )
    return Path(str(file.locate())).resolve()


def _library_version() -> str:
    """Return the version of oneDNN's wheel.

    Raise ``SL907`` if it is not installed.
    """
    _installed_file(_LIBRARY, "libdnnl.so.3")
    return distribution(_LIBRARY).version


def _link_args() -> list[str]:
    """Return the linker's arguments for oneDNN's library."""
    library = _installed_file(_LIBRARY, "libdnnl.so.3")
    return [str(library), f"-Wl,-rpath,{library.parent}"]


RUNTIME = Runtime(
    name="onednn",
    contract=CONTRACT,
    directory=_HERE,
    metadata=RUNTIMES.parent / "metadata" / "onednn.yaml",
    requires={_LIBRARY: ">=2023.2", _HEADERS: ">=2023.2"},
    system_dirs=lambda: [_installed_file(_HEADERS, "dnnl.hpp").parent],
    link_args=_link_args,
    version=_library_version,
)
