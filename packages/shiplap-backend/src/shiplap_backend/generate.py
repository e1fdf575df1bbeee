"""The generator of a project's C++ files from metadata: deterministic, and written only where the text changed."""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from shiplap.codegen import render_source
from shiplap.torch_private.aten_operators import AtenDeclaration, aten_declarations
from shiplap_backend.entries import MetadataEntry, metadata_error
from shiplap_backend.expression import suggest_nearest
from shiplap_backend.families import FAMILIES
from shiplap_backend.mapping import build_vocabulary, map_entry
from shiplap_backend.metadata import Metadata
from shiplap_backend.runtime import Runtime
from shiplap_backend.versions import range_allows
from shiplap_backend.wrapper import Wrapper

# Fields that say nothing to a template: the body of `custom` is C++, and shapes of structured ops are ATen's.
_UNREAD = {
    "custom": ("graph", "let", "compute", "output", "shape_only", "redundant", "empty"),
    "structured": ("output",),
}


@dataclass(frozen=True)
class SkippedEntry:
    """A metadata entry for another version of torch or of the vendor's package. ``name`` is its overload, and
    ``reason`` says which version it needs.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class GeneratedWrappers:
    """The C++ wrappers of one vendor's runtime for the installed torch.

    ``files`` has the C++ source code by file name. ``skipped`` has the metadata entries that are for other versions.
    """

    wrappers: tuple[Wrapper, ...]
    skipped: tuple[SkippedEntry, ...]
    files: Mapping[str, str]


def generate_wrappers(metadata: Metadata, runtime: Runtime, *, units: int = 16) -> GeneratedWrappers:
    """Return the C++ wrappers of the operators in ``metadata`` for the installed torch and the vendor's ``runtime``.

    The wrappers are spread over at most ``units`` files. Raise ``SL901``, ``SL902`` or ``SL903`` with file and line if
    an entry is wrong.
    """
    declared = aten_declarations()
    if metadata.target.runtime != runtime.name:
        got = f"a target of runtime {metadata.target.runtime!r}"
        raise metadata_error(metadata.places[("runtime",)], got, f"runtime {runtime.name!r}, which the project names")
    _check_patterns(metadata, declared)
    words = build_vocabulary(metadata, runtime.functions(), runtime.enums())
    wrappers: list[Wrapper] = []
    skipped: list[SkippedEntry] = []
    # A fixed order gives the same text in each run, so that unchanged files are not compiled again.
    for name in sorted(metadata.entries):
        entry = metadata.entries[name]
        reason = _check_entry(name, entry, metadata, declared, runtime)
        if reason:
            skipped.append(SkippedEntry(name, reason))
        else:
            wrapper = map_entry(name, declared[name], metadata, words)
            wrapper.derived = _derived_overloads(wrapper.declaration, metadata, declared)
            wrappers.append(wrapper)
    return GeneratedWrappers(tuple(wrappers), tuple(skipped), _render_files(wrappers, units))


def _check_patterns(metadata: Metadata, declared: Mapping[str, AtenDeclaration]) -> None:
    """Raise ``SL901`` if a pattern under ``falls_back`` in ``metadata`` applies to no overload of torch.

    These patterns name the overloads that run on the CPU. A pattern applies to none if it matches none of ``declared``,
    torch's overloads by name. It also applies to none if earlier patterns match all that it matches.
    """
    left, patterns = set(declared), tuple(metadata.target.falls_back)
    for pattern, fitting in zip(patterns, _match_names(patterns, tuple(declared)), strict=True):
        if left.isdisjoint(fitting):
            hint = "; earlier patterns fit all of these overloads" if fitting else suggest_nearest(pattern, declared)
            got = f"falls_back: {pattern!r}{hint}"
            raise metadata_error(
                metadata.places[("falls_back", pattern)], got, "a pattern that fits an overload of torch"
            )
        # The first pattern that fits an overload gives the reason, so later patterns must fit others.
        left.difference_update(fitting)


@lru_cache(maxsize=4)
def _match_names(patterns: tuple[str, ...], names: tuple[str, ...]) -> list[frozenset[str]]:
    """Return, for each of ``patterns``, those of ``names`` that it matches. A few results are kept, since a comparison
    of each pattern with each of torch's overloads takes longer than the rest of a small project.
    """
    return [frozenset(fnmatch.filter(names, pattern)) for pattern in patterns]


def _check_entry(
    name: str, entry: MetadataEntry, metadata: Metadata, declared: Mapping[str, AtenDeclaration], runtime: Runtime
) -> str:
    """Return the reason why ``entry``, the metadata of the overload ``name``, is skipped. Return an empty string if it
    applies.

    The reason is a range of versions that excludes the installed torch or the vendor package of ``runtime``.
    ``declared`` has torch's overloads by name. Raise ``SL901`` with the entry's file and line if the entry is wrong.
    """
    where = metadata.where[name]
    if entry.template not in FAMILIES:
        raise metadata_error(
            where,
            f"{name}: template {entry.template!r}{suggest_nearest(entry.template, FAMILIES)}",
            f"one of {', '.join(FAMILIES)}",
        )
    for unread in _UNREAD.get(FAMILIES[entry.template].file, ()):
        # A rule of mode ``meta`` only adds a memory format, which structured templates do read.
        of_meta = unread == "output" and all(rule.mode == "meta" for rule in entry.output.values())
        if getattr(entry, unread) and not of_meta:
            raise metadata_error(
                where, f"{name}: {unread!r}, which template {entry.template!r} does not read", "an entry without it"
            )
    if not range_allows(entry.torch, torch.__version__):
        return f"needs torch {entry.torch}, here is {torch.__version__}"
    if entry.vendor and not range_allows(entry.vendor, runtime.version()):
        return f"needs {runtime.name} {entry.vendor}, here is {runtime.version()}"
    if name not in declared:
        raise metadata_error(
            where, f"{name!r}{suggest_nearest(name, declared)}", f"an overload that torch {torch.__version__} declares"
        )
    if name in runtime.registers:
        raise metadata_error(where, f"{name!r}", "an overload that the runtime does not register itself")
    # Torch calls the delegate instead, so a wrapper of this overload would never run.
    if (delegate := declared[name].delegate) and declared[name].kind != "functional":
        raise metadata_error(
            where, f"{name}: an overload that torch hands to {delegate!r}", f"an entry for {delegate!r}"
        )
    if declared[name].view and entry.template != "custom":
        expected = "an overload whose result has memory of its own; views are made by the device core"
        raise metadata_error(where, f"{name}: the result is a view of an argument", expected)
    structured = declared[name].structured
    if FAMILIES[entry.template].file == "structured" and structured is None:
        primary = next((d.name for d in declared.values() if name in d.group), "")
        expected = (
            f"its group's primary overload, {primary!r}" if primary else "a structured out= overload; this one has none"
        )
        raise metadata_error(where, f"{name}: template {entry.template!r}", expected)
    return ""


def _derived_overloads(
    d: AtenDeclaration, metadata: Metadata, declared: Mapping[str, AtenDeclaration]
) -> tuple[AtenDeclaration, ...]:
    """Return the in-place and ``out=`` variants that get a wrapper together with the functional overload ``d``.

    Their wrappers assign the result of ``d``. A variant with an entry of its own in ``metadata`` is left out.
    ``declared`` has torch's overloads by name.
    """
    if d.kind != "functional":
        return ()
    # An entry of its own takes the place of the derived overload.
    group = [declared[n] for n in d.group if n not in metadata.entries]
    return tuple(o for o in group if o.cpu and not o.composite and o.kind in ("inplace", "out"))


def _render_files(wrappers: Iterable[Wrapper], units: int) -> dict[str, str]:
    """Return the C++ source code of each file by file name. The generated ``wrappers`` are spread over at most
    ``units`` files.

    The name of an operator alone determines its file. A change of one operator therefore changes only one file.
    """
    shares: dict[int, list[Wrapper]] = {i: [] for i in range(units)}
    for w in wrappers:
        # A hash of the name keeps the unit of an op stable, which a position in the sorted list would not. Python's own
        # hash differs from process to process.
        shares[zlib.crc32(w.declaration.name.encode()) % units].append(w)
    return {f"wrappers_{i:02d}.cpp": _render_unit(share) for i, share in shares.items() if share}


def _render_unit(share: list[Wrapper]) -> str:
    """Return the C++ source of one file, with the generated wrappers ``share`` and the code that registers them with
    torch.
    """
    # A set has another order in each process, and a file that differs is compiled again.
    headers = sorted({h for w in share for h in w.headers})
    bodies = [render_source(f"{w.family.file}.cpp.jinja", package="shiplap_backend", w=w) for w in share]
    registered = [d for w in share for d in (w.declaration, *w.derived)]
    return render_source(
        "unit.cpp.jinja",
        package="shiplap_backend",
        torch=torch.__version__.partition("+")[0],
        headers=headers,
        wrappers=bodies,
        registered=registered,
    )


def write_generated(directory: Path, files: Mapping[str, str]) -> list[str]:
    """Write the changed ones of ``files`` into ``directory``, and remove old files of wrappers that are not in
    ``files``.

    ``files`` maps file names to contents. Return the names of the files that were written or removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    touched = []
    for name, text in files.items():
        path = directory / name
        # An unchanged file keeps its time, so that it is not compiled again.
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            touched.append(name)
    for stale in sorted(directory.glob("wrappers_*.cpp")):
        if stale.name not in files:
            stale.unlink()
            touched.append(stale.name)
    return touched
