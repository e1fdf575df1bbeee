"""``Key``: all facts that a choice depends on, as named texts. Two keys can be compared field by field."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from shiplap import torch_private
from shiplap.dispatch import Op
from shiplap.tuning.inputs import Inputs

CALL = ("op", "device", "bucket", "dtypes", "layout")
MACHINE = ("device_name", "capability", "threads")
VERSIONS = ("driver", "cuda", "cublas", "triton", "torch", "shiplap")


@dataclass(frozen=True)
class Key:
    """All facts on which a choice depends, as a tuple of (name, value) pairs sorted by name. The names are those in
    ``CALL``, ``MACHINE`` and ``VERSIONS``, ``source`` (the digest of the op), and any that begin with ``extra.``.
    """

    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Key:
        """Return a key with the given fields, sorted by name, so that keys with equal fields are equal."""
        return cls(tuple(sorted(fields.items())))

    def __getitem__(self, name: str) -> str:
        """Return the value of the field ``name``, or an empty string if the key lacks it."""
        return dict(self.fields).get(name, "")

    def as_dict(self) -> dict[str, str]:
        """Return the fields as a dict. Those that describe the call come first, followed by the source, the machine,
        the versions and all other fields.
        """
        order = {n: i for i, n in enumerate((*CALL, "source", *MACHINE, *VERSIONS))}
        return dict(sorted(self.fields, key=lambda pair: (order.get(pair[0], 99), pair[0])))

    @property
    def digest(self) -> str:
        """The first 32 hexadecimal digits of the SHA-256 digest of all fields. The store of tuning choices uses it as
        the name of a file.
        """
        return hashlib.sha256(json.dumps(self.fields).encode()).hexdigest()[:32]


@cache
def rooms_digest(*rooms: str) -> str:
    """Return the digest of all Python files in the subpackages ``rooms`` of Shiplap, such as ``"dispatch"``. As a field
    of a key, it prevents the use of results that other code of Shiplap made.
    """
    package = Path(__file__).parents[1]
    files = sorted(f for room in rooms for f in (package / room).rglob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:32]


def key_for(op: Op, inputs: Inputs, extra: Mapping[str, str] | None = None) -> Key:
    """Return the key of a choice for these inputs on this machine. Each field in ``extra`` is added with the prefix
    ``extra.``.
    """
    fields = {
        "op": op.spec.name,
        "device": torch.device(inputs.device).type,
        "bucket": str(inputs.bucket),
        "dtypes": inputs.dtypes,
        "layout": inputs.layout,
        "source": inputs.identity,
        **key_environment(inputs.device),
        **{f"extra.{name}": str(value) for name, value in (extra or {}).items()},
    }
    return Key.of(fields)


def key_environment(device: str) -> dict[str, str]:
    """Return the key fields that describe the machine and the versions of its libraries, as seen from ``device``. The
    driver is queried at this call, and never at import.
    """
    versions = dict(_library_versions())
    if torch.device(device).type != "cuda":
        name = _processor_name() if torch.device(device).type == "cpu" else torch.device(device).type
        # The number of threads is part of the machine on a CPU: which kernel is fastest depends on the number.
        capability = str(torch.backends.cpu.get_cpu_capability())
        return {**versions, "device_name": name, "capability": capability, "threads": str(torch.get_num_threads())}
    about = torch.cuda.get_device_properties(device)
    return {
        **versions,
        "device_name": about.name,
        "capability": f"{about.major}.{about.minor}",
        "threads": "-",
        "driver": _driver_version(),
        "cuda": torch.version.cuda or torch.version.hip or "-",
        "cublas": _package_version("nvidia-cublas", "nvidia-cublas-cu12") or f"of torch {torch.__version__}",
    }


@cache
def _library_versions() -> tuple[tuple[str, str], ...]:
    """Return (name, version) pairs of the libraries on which a choice depends.

    The version is ``-`` for a library that is not installed. It is also ``-`` for the driver and the CUDA libraries,
    which only the keys of a GPU name.
    """
    versions = {
        "triton": _package_version("triton") or "-",
        "torch": torch.__version__,
        "shiplap": _package_version("shiplap") or "-",
        "driver": "-",
        "cuda": "-",
        "cublas": "-",
    }
    return tuple(versions.items())


@cache
def _package_version(*names: str) -> str:
    """Return the version of the first installed package of ``names``, or an empty string if none is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


@cache
def _processor_name() -> str:
    """Return the model name of the processor, or the name or architecture that Python's module ``platform`` gives if it
    is not known.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware")))
    return next(named, "") or platform.processor() or platform.machine()


@cache
def _driver_version() -> str:
    """Return the version of the NVIDIA kernel driver if its file exists. Otherwise return the version of CUDA that the
    driver supports.
    """
    try:
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
        return next(w for w in words if w[:1].isdigit() and "." in w)
    except (OSError, IndexError, StopIteration):
        return torch_private.cuda_driver_version()


def key_differences(a: Mapping[str, str], b: Mapping[str, str], only: tuple[str, ...] = ()) -> list[str]:
    """Return a list of strings ``name: A → B``, one for each field in which the keys ``a`` and ``b`` differ, with the
    field's values. A missing field is shown as ``(none)``. If ``only`` is not empty, other fields are not compared.
    """
    names = [n for n in {**a, **b} if not only or n in only]
    return [f"{n}: {a.get(n, '(none)')} → {b.get(n, '(none)')}" for n in names if a.get(n) != b.get(n)]
