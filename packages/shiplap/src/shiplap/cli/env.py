"""``shiplap env``: the installed versions, the capabilities of this torch, and the kernel libraries."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiplap.cli import console
from shiplap.cli.families import families
from shiplap.cli.target import ops_of
from shiplap.errors import ShiplapError

if TYPE_CHECKING:
    from shiplap.declare.native_interface import NativeForm

EPILOG = """\b
Examples:
  shiplap env
  shiplap env --json > environment.json

\b
Exit status:
  0  always, also when a library is missing: this verb describes, it does not judge
  2  an unexpected failure"""

# Programs that an import does not need, and the features that need them.
ABSENT = {
    "compiler": "none: torch.compile raises InvalidCxxCompiler for the CPU, and Python serves C kernels whose package "
    "brings no binding along (SL405)",
}
# These packages change behaviour or results. Others are in the user's own list of packages.
PACKAGES = ("torch", "triton", "numpy", "jaxtyping", "typer", "rich", "Jinja2", "msgspec")


def command(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, devices, settings, kernel libraries and what this torch can do.

    Put its output into a bug report. Devices are queried by this command only, and not when Shiplap is imported.
    """
    with console.own_stdout():
        environment = environment_report()
    if json:
        console.emit_json(environment)
    else:
        _print_report(environment)


def environment_report() -> dict[str, Any]:
    """Return the report on the environment as a dict that JSON can hold, which both the text and the JSON output print.
    It covers versions, devices, the uses of private torch, settings, kernel libraries and native bindings.
    """
    from shiplap import torch_private
    from shiplap.settings import describe

    return {
        "versions": installed_versions(),
        "devices": list_devices(),
        "capabilities": [
            {
                "name": c.name,
                "known": c.known,
                "uses": c.uses,
                "verified": list(c.verified),
                "otherwise": c.otherwise,
            }
            for c in torch_private.CAPABILITIES
        ],
        "settings": [{"variable": v, "value": value, "meaning": meaning} for v, value, meaning in describe()],
        "libraries": kernel_libraries(),
        "bindings": op_bindings(),
    }


def installed_versions() -> dict[str, str | None]:
    """Return a dict from the names of packages, Python, the platform and the C++ compiler to their versions. The
    version of a missing package or compiler is None. Nothing is imported.
    """
    from shiplap import __version__

    by_package: dict[str, str | None] = {"shiplap": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_package[package.lower()] = importlib.metadata.version(package)
        # Optional packages may be missing, and a bug report has to show that.
        except importlib.metadata.PackageNotFoundError:
            by_package[package.lower()] = None
    return {**by_package, "platform": platform.platform(), "compiler": _compiler_version()}


def _compiler_version() -> str | None:
    """Return the first line that ``$CXX --version`` (or ``c++ --version``) prints. Return the path of the compiler if
    it prints none, and None if there is no compiler.
    """
    path = shutil.which(os.environ.get("CXX") or "c++")
    if path is None:
        return None
    try:
        # A wrapper of a compiler may wait for a server. The report must not wait with it.
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return path
    return (shown.splitlines() or [path])[0]


def list_devices() -> list[dict[str, Any]]:
    """Return the CPU and each accelerator that torch finds. Each is a dict with its name and properties such as memory
    and runtime.
    """
    import torch

    cpu = {"device": "cpu", "name": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    listed: list[dict[str, Any]] = [cpu]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        listed.append(
            {
                "device": f"cuda:{index}",
                "name": about.name,
                "capability": f"{about.major}.{about.minor}",
                "memory_gib": round(about.total_memory / 2**30, 1),
                "runtime": torch.version.cuda or torch.version.hip,
            }
        )
    # CUDA devices are listed above, with more details than torch.accelerator has.
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if other is not None and other.type != "cuda":
        listed += [{"device": f"{other.type}:{i}", "name": other.type} for i in range(torch.accelerator.device_count())]
    return listed


def kernel_libraries() -> list[dict[str, Any]]:
    """Return a dict for each C library of the ops of all installed families (packages of ops). The dict has the
    library's path, the problem if it cannot be loaded, and how many of its symbols agree with the declarations.
    """
    return [entry for family in families() for entry in _libraries_of(family.module)]


def _libraries_of(family: str) -> list[dict[str, Any]]:
    """Return a dict, as in ``kernel_libraries``, for each C library of the ops of ``family``, a package of ops. If the
    package cannot be imported, return one dict with this problem.
    """
    try:
        ops = ops_of(importlib.import_module(family))
    except Exception as e:
        return [_library_entry(family, "", f"cannot be imported: {type(e).__name__}: {e}")]
    libraries: dict[str, dict[str, Any]] = {}
    for kernel in (k for op in ops for kernels in op.kernels.values() for k in kernels):
        # The library of a generated binding is built when it is needed, so its absence is no defect.
        if (form := kernel.native) is not None and not form.generated:
            # Several kernels of an op, and several ops, usually are in one library.
            entry = libraries.setdefault(str(form.library), _locate_library(family, form.library))
            _count_symbol(entry, form)
    return list(libraries.values())


def op_bindings() -> list[dict[str, str]]:
    """Return a dict for each op of the installed families (packages of ops). It says whether a native C++ or a Python
    binding calls the op's C kernel on this machine, and why. Families that cannot be imported are left out.
    """
    from shiplap.kernels.native import binding
    from shiplap.kernels.native.build_plan import PlanInputs

    rows, inputs = [], PlanInputs()
    for family in families():
        try:
            ops = ops_of(importlib.import_module(family.module))
        except Exception:  # libraries() reports the error
            continue
        for op in ops:
            kind, why = binding.state(op, inputs=inputs)
            rows.append({"op": op.spec.name, "binding": kind, "why": why})
    return rows


def _library_entry(family: str, path: str, problem: str | None) -> dict[str, Any]:
    """Return the dict of a library of the package ``family`` for the report, with its path and its problem, or None for
    no problem. No symbols are counted yet.
    """
    return {"family": family, "path": path, "found": not problem, "symbols": 0, "ok": 0, "problem": problem}


def _locate_library(family: str, library: Any) -> dict[str, Any]:
    """Return the dict of a library of the package ``family`` for the report. It has the path of the library, or the
    problem if it cannot be found.
    """
    from shiplap.kernels.c.library import locate_library

    try:
        return _library_entry(family, str(locate_library(library)), None)
    except ShiplapError as e:
        return _library_entry(family, str(library), f"{e.id}: {e.what}; {e.fix}")


def _count_symbol(entry: dict[str, Any], form: NativeForm) -> None:
    """Load the C function of ``form`` from its library and count it in ``entry``, the library's dict in the report. The
    first problem is stored there.
    """
    from shiplap.kernels.c.library import load_symbol

    entry["symbols"] += 1
    if not entry["found"]:
        return
    try:
        load_symbol(form)
        entry["ok"] += 1
    except ShiplapError as e:
        entry["problem"] = entry["problem"] or f"{e.id}: {e.what} ({e.where}); {e.fix}"


def _print_report(environment: dict[str, Any]) -> None:
    """Print the report on the environment on stdout as text, with a section in columns for each key."""
    screen, versions_of = console.out(), environment["versions"]
    sections: tuple[tuple[str, list[tuple[str, ...]]], ...] = (
        ("versions", [(name, value or ABSENT.get(name, "not installed")) for name, value in versions_of.items()]),
        ("devices", [(d["device"], _describe_device(d)) for d in environment["devices"]]),
        (
            "capabilities on this torch",
            [(c["name"], _describe_capability(c), c["uses"]) for c in environment["capabilities"]],
        ),
        ("settings", [(s["variable"], s["value"] or "(empty)", s["meaning"]) for s in environment["settings"]]),
        ("kernel libraries", [(v["family"], _describe_library(v), v["path"]) for v in environment["libraries"]]),
        ("bindings", [(b["op"], b["binding"], b["why"]) for b in environment["bindings"]]),
    )
    for title, rows in sections:
        screen.print(title, style="bold")
        for row in rows or [("none",)]:
            screen.print("  " + "  ".join(_pad_cells(rows, row)), markup=False)
        screen.print()


def _pad_cells(rows: list[tuple[str, ...]], row: tuple[str, ...]) -> list[str]:
    """Return the cells of ``row`` padded to the widths of the columns in ``rows``. The last cell is not padded."""
    return [*(cell.ljust(max(len(r[i]) for r in rows)) for i, cell in enumerate(row[:-1])), row[-1]]


def _describe_device(device: dict[str, Any]) -> str:
    """Return the name and the properties of a device as one line of text."""
    return ", ".join(str(v) if k == "name" else f"{k} {v}" for k, v in device.items() if k != "device")


def _describe_capability(capability: dict[str, Any]) -> str:
    """Return a text about a capability, a use of private torch. The text says whether this version of torch is known to
    have the capability, and what replaces it otherwise.
    """
    if capability["known"]:
        return "known"
    runs = f"run on {', '.join(capability['verified'])}" if capability["verified"] else "no run"
    return f"unverified ({runs}); {capability['otherwise'] or 'used all the same: torch has no public way'}"


def _describe_library(library: dict[str, Any]) -> str:
    """Return a text with the problem of a library, or with the number of its symbols that loaded."""
    if library["problem"]:
        return str(library["problem"])
    return f"{library['ok']} of {library['symbols']} symbols loaded, signatures agree"
