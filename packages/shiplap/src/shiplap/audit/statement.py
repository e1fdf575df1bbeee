"""The statement of an audit: the code that was examined with the distributions and libraries on which it depends, the
samples of each check, and its finding.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

import msgspec
import torch

from shiplap.audit.checks.stateless import find_libraries
from shiplap.declare.code_digest import code_digest
from shiplap.declare.code_walk import libraries_used
from shiplap.declare.schema import schema_text
from shiplap.dispatch import Op
from shiplap.render.facts import facts, nvidia_driver
from shiplap.render.findings import CostCardFields, Report, findings_json
from shiplap.render.statement import write_statement
from shiplap.sampling.finding import Finding
from shiplap.sampling.run import is_adopted
from shiplap.sampling.symbols import compilers_of_library

AUDIT_PREDICATE_TYPE = "urn:shiplap:audit:1"
PACKAGES_IN_FACTS = ("shiplap", "torch")  # their versions are among the facts


class ExaminedSamples(msgspec.Struct, frozen=True):
    """A summary of the samples that one check examined. ``samples`` is their number. The other fields list what
    occurred among the arguments that the op received: dtypes, sizes by name of the dim, kinds of values, memory
    layouts, and names of arguments that were None.
    """

    samples: int
    dtypes: list[str]
    sizes: dict[str, list[str]]
    values: list[str]
    layouts: list[str]
    absent: list[str]


class SampleCollector:
    """A collector of descriptions of the samples that checks examine. It can be passed to ``audit`` as ``examined``."""

    def __init__(self) -> None:
        """Start without any descriptions."""
        self.seen: dict[str, list[dict[str, Any]]] = {}

    def __call__(self, check: str, seen: dict[str, Any]) -> None:
        """Add ``seen``, the description of a sample that the check named ``check`` has examined."""
        self.seen.setdefault(check, []).append(seen)

    def rows(self) -> dict[str, ExaminedSamples]:
        """Return a dict from the name of each check to a summary of the samples that it has examined. The names are
        sorted.
        """
        return {check: _unite_samples(seen) for check, seen in sorted(self.seen.items())}


def _unite_samples(seen: list[dict[str, Any]]) -> ExaminedSamples:
    """Return a summary of ``seen``, descriptions of the samples that one check examined. It has their number and the
    union of their sizes, dtypes, values, layouts and absent arguments.
    """

    def union(name: str) -> list[str]:
        """Return the values under the key ``name`` in all descriptions in ``seen``, sorted and without repetitions."""
        return sorted({value for s in seen for value in s[name]})

    names = sorted({name for s in seen for name in s["sizes"]})
    sizes = {name: {s["sizes"][name] for s in seen if name in s["sizes"]} for name in names}
    return ExaminedSamples(
        samples=len(seen),
        dtypes=union("dtypes"),
        sizes={name: sorted(values, key=_sort_key_numbers_first) for name, values in sizes.items()},
        values=union("values"),
        layouts=union("layouts"),
        absent=union("absent"),
    )


def _sort_key_numbers_first(value: str) -> tuple[bool, int, str]:
    """Return a sort key by which numbers come first, in ascending order, and other strings follow."""
    return not value.isdigit(), int(value) if value.isdigit() else 0, value


def write_audit_statement(
    path: Path,
    ops: Sequence[Op],
    findings: Sequence[Finding],
    samples: Mapping[str, SampleCollector],
    costs: Sequence[CostCardFields],
    reports: Sequence[Report],
    **about: object,
) -> None:
    """Write the statement of an audit of ``ops`` to ``path``. It is a JSON record of code digests, samples, findings
    and costs. Raise ``SL602`` if it cannot be written.

    It is about each op, and about the file of each C library that a kernel calls. It holds no path of this machine and
    no script that reproduces a finding. ``about`` are further facts, such as the seed.
    """
    parts = {op.spec.name: part_digests(op) for op in ops}
    files = {file.name: file for op in ops for file in find_libraries(op)[0]}
    subjects = {name: op_digest(digests) for name, digests in parts.items()}
    subjects |= {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    found = json.loads(findings_json(findings, facts(**about), costs, reports=reports))
    # A reproducer holds paths of this machine.
    for finding in found["findings"]:
        del finding["reproducer"]
    rows = {
        op.spec.name: {
            "schema": f"{op.spec.namespace}::{schema_text(op.spec)}",
            "tolerance": {"relative": op.spec.tolerance[0], "reason": op.spec.tolerance[1]}
            if op.spec.tolerance
            else None,
            "digests": parts[op.spec.name],
            "samples": samples[op.spec.name].rows() if op.spec.name in samples else {},
        }
        for op in ops
    }
    if "cuda" in found["facts"].get("device", ""):
        found["facts"] |= {"cuda": str(torch.version.cuda), "driver": nvidia_driver()}
    compiled_by = sorted({text for file in files.values() for text in compilers_of_library(file)})
    write_statement(path, subjects, AUDIT_PREDICATE_TYPE, {**found, "compilers": compiled_by, "ops": rows})


def op_digest(parts: Mapping[str, str]) -> str:
    """Return the SHA-256 digest of an op. It is computed from ``parts``, the digests that :func:`part_digests` returns,
    and does not depend on their order.
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def part_digests(op: Op) -> dict[str, str]:
    """Return a dict from names to digests of everything on which the results of an audit of ``op`` depend. They cover
    code, kernels, packages and libraries, and are sorted by name.
    """
    by_part = {"declaration": op.spec.digest, "op": op.identity, "reference": code_digest(op.reference)}
    if op.gradient is not None:
        by_part["gradient"] = code_digest(op.gradient)
    if op.sampler is not None:
        by_part["builder"] = code_digest(op.sampler)
    for device, kernels in op.kernels.items():
        for kernel in kernels:
            by_part[f"kernel {device}/{kernel.name}"] = kernel.identity
    by_part |= {
        f"package {name}": text for name, text in versions_of_packages_used(op).items() if name not in PACKAGES_IN_FACTS
    }
    there, absent = find_libraries(op)
    by_part |= {f"library {file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in there}
    # Listed too, since the evidence leaves these libraries out.
    by_part |= {f"library {name}": "not on this machine" for name in absent}
    if is_adopted(op):
        # torch does not record which library has registered an op.
        loaded = digests_of_op_libraries()
        by_part |= {f"library {name}": text for name, text in loaded.items()}
        if not loaded:
            by_part["implementation"] = "another library's: not in any digest"
    return dict(sorted(by_part.items()))


@lru_cache(maxsize=2)
def _owners(searched: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Return a mapping from each top-level package of the installed distributions to the names of the distributions
    that provide it. The result is cached, since reading all metadata takes 0.3 s. ``searched`` must be the folders of
    ``sys.path``, and is the key of the cache.
    """
    return packages_distributions()


def versions_of_packages_used(op: Op) -> dict[str, str]:
    """Return a dict from names of installed distributions to their versions. It has those whose code the op or its
    builder of samples uses.
    """
    modules = libraries_used(op, op.sampler)
    owners = _owners(tuple(sys.path))
    versions = {}
    for distribution in sorted({d for m in modules for d in owners.get(m, ())}):
        try:
            versions[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    return versions


def digests_of_op_libraries() -> dict[str, str]:
    """Return a dict from file name to SHA-256 digest for the libraries that registered operators in this process. All
    of them are needed, because an op that is only declared here may come from any of them.
    """
    paths = sorted(Path(p) for p in torch.ops.loaded_libraries)
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in paths if p.is_file()}
