"""``shiplap cache``: list the store of choices, explain why an entry cannot be used, move entries between machines.

The verb also manages the compiled bindings and the proofs of rewrites and templates beside the store.
"""

from __future__ import annotations

import os
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiplap.cli import console
from shiplap.errors import error

if TYPE_CHECKING:
    from shiplap.tuning.store import ChoiceStore, StoredEntry

EPILOG = """\b
Examples:
  shiplap cache ls                       all entries, and whether they serve here
  shiplap cache why mylib::rms_norm      which key field differs from what is asked now
  shiplap cache why mylib.ops:rms_norm   the same, and whether a kernel has changed
  shiplap cache export all.json          shiplap cache import all.json
  shiplap cache rm mylib::rms_norm       one op; 'rm all' removes every entry
  shiplap cache ls proofs                the kept proofs; 'rm proofs' removes them
  shiplap cache gc                       stale and damaged files, old compiled bindings and proofs

\b
Exit status:
  0  the command is done; 'why': an entry serves the call
  1  'ls': an entry is damaged; 'why': no entry serves the call; 'rm', 'gc': a file remains
  2  the action or the file does not exist, or the file cannot be written"""


PROOFS = "proofs"  # no op has this name: names of ops have a namespace


class CacheAction(StrEnum):
    """The actions of ``shiplap cache``."""

    ls = "ls"
    why = "why"
    export = "export"
    import_ = "import"
    rm = "rm"
    gc = "gc"


def command(
    action: Annotated[CacheAction, typer.Argument(metavar="ls|why|export|import|rm|gc")],
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="An op (ls, why, rm), 'proofs' (ls, rm) or a file (export, import).")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> None:
    """List, explain, move and remove tuned choices and the files beside them.

    Each choice is a readable JSON file in SHIPLAP_CACHE_DIR/tuned. Compiled bindings lie beside that directory in
    native, and proofs of rewrites and templates in proofs.

    Entries are compared with this machine, its driver and its library versions, and with the op's kernels where the op
    can be imported.
    """
    if not what and action not in (CacheAction.ls, CacheAction.gc):
        expected = "a file" if action in (CacheAction.export, CacheAction.import_) else "an op, or 'all' for rm"
        # The check precedes the imports, so that a wrong command fails at once.
        raise error("SL613", where=f"shiplap cache {action}", got="no argument", expected=expected)
    with console.own_stdout():
        from shiplap.tuning.store import ChoiceStore

        run = {
            CacheAction.ls: _list_entries,
            CacheAction.why: _explain_misses,
            CacheAction.export: _export_entries,
            CacheAction.import_: _import_entries,
            CacheAction.rm: _remove_entries,
            CacheAction.gc: _collect_garbage,
        }[action]
        result, lines, status = run(ChoiceStore(), what)
    console.show(result, lines, as_json=json)
    if status:
        raise typer.Exit(status)


# The JSON value, the lines for a terminal, and the exit status.
Result = tuple[Any, list[str], int]


def _stale_fields(entry: StoredEntry) -> list[str]:
    """Return the reasons why a stored choice cannot be used on this machine. A reason is a text such as ``device: no
    CUDA device here``, or a version with the old and the new value. The list is empty if the choice can be used.
    """
    import torch

    from shiplap.dispatch import registry
    from shiplap.tuning.key import MACHINE, VERSIONS, key_differences, key_environment

    if entry.problem or entry.key is None:
        return [entry.problem]
    device = entry.key["device"]
    # The fields of a machine without the device cannot be computed, so there is nothing to compare.
    if device == "cuda" and not torch.cuda.is_available():
        return ["device: no CUDA device here"]
    differing = key_differences(entry.key.as_dict(), key_environment(device), (*MACHINE, *VERSIONS))
    op = registry.find_declared_op(entry.key["op"])
    # An op that is not declared in this process cannot be compared. Its entry counts as usable.
    if op is not None and op.identity != entry.key["source"]:
        differing.insert(0, f"source: {entry.key['source']} → {op.identity} (the op or one of its kernels has changed)")
    return differing


def _entry_json(entry: StoredEntry) -> dict[str, Any]:
    """Return a stored choice as a dict that JSON can hold, with the reasons why it cannot be used on this machine."""
    key = entry.key.as_dict() if entry.key else {}
    return {"file": str(entry.path), "key": key, "value": dict(entry.value or {}), "differs": _stale_fields(entry)}


def _entry_line(entry: StoredEntry) -> str:
    """Return the line of text that shows a stored choice. It says whether the choice can be used on this machine. It
    also has the op, the bucket (the sizes for which the choice holds), the dtypes, the kernel and the config.
    """
    if entry.key is None or entry.value is None:
        return f"damaged  {entry.path.name}: {entry.problem}"
    config = ", ".join(f"{n}={v}" for n, v in entry.value["config"].items())
    state = "serves" if not (differs := _stale_fields(entry)) else "other "
    why = f"  ({'; '.join(differs)})" if differs else ""
    kernel = f"{entry.value['kernel']}({config})" if config else entry.value["kernel"]
    return f"{state}  {entry.key['op']}  {entry.key['bucket']}  {entry.key['dtypes']}  {kernel}{why}"


def _list_entries(store: ChoiceStore, what: str) -> Result:
    """Return ``(JSON value, lines, exit status)`` of ``shiplap cache ls``. The value and the lines list the stored
    choices, compiled bindings and proofs.

    If ``what`` is an op, only its choices are listed. If it is ``proofs``, only proofs are. If it is empty, everything
    is.
    """
    if what == PROOFS:
        return _list_proofs()
    entries = list(store.entries(_name_of_target(what)))
    lines = [_entry_line(e) for e in entries] or [f"no entries in {store.root}"]
    # Bindings belong to libraries of several ops, so that a list of one op leaves them out.
    compiled = _compiled_bindings(store) if not what else []
    lines += [
        f"compiled {b['file']}: {b['bytes'] / 2**20:.1f} MiB{b['problem'] and '  ' + b['problem']}" for b in compiled
    ]
    kept = _list_proofs()[0]["proofs"] if not what else []
    lines += [f"proofs: {len(kept)} kept, {sum(not p['problem'] for p in kept)} may serve"] if kept else []
    result = {
        "root": str(store.root),
        "entries": [_entry_json(e) for e in entries],
        "compiled": compiled,
        "proofs": kept,
    }
    return result, lines, int(any(e.problem for e in entries) or any(b["problem"] for b in compiled))


def _list_proofs() -> Result:
    """Return ``(JSON value, lines, exit status)`` for the stored proofs of rewrites and templates. If a proof cannot be
    used on this machine, the reason is included. The status is 0.
    """
    from shiplap.tuning.proof_cache import kept_proofs

    rows = [
        {"file": str(entry.path), "rewrite": entry.key["op"] if entry.key else "", "problem": problem}
        for entry, problem in kept_proofs()
    ]
    lines = [f"{'other ' if r['problem'] else 'proven'}  {r['rewrite'] or r['file']}  {r['problem']}" for r in rows]
    return {"proofs": rows}, [line.rstrip() for line in lines] or ["no proofs are kept"], 0


def _remove_proofs(*, stale: bool) -> tuple[int, list[str]]:
    """Remove stored proofs, the results of tests that a rewrite or template is right. Return how many were removed, and
    the paths of those that could not be removed.

    If ``stale`` is true, only proofs that cannot be used on this machine are removed. Otherwise all are removed.
    """
    from shiplap.tuning.proof_cache import kept_proofs, remove_proof

    removable = [entry for entry, problem in kept_proofs() if problem or not stale]
    stuck = [str(entry.path) for entry in removable if not remove_proof(entry)]
    return len(removable) - len(stuck), stuck


def _compiled_bindings(store: ChoiceStore) -> list[dict[str, Any]]:
    """Return a dict for each compiled native binding, with its file, its bytes and its problem. The problem is empty if
    the binding can be loaded. The bindings lie in the folder ``native`` beside that of ``store``.
    """
    from shiplap.kernels.native import cache

    bindings = cache.cached_artefacts(store.root.parent / "native")
    return [{"file": str(a.path), "bytes": a.size, "problem": cache.artefact_problem(a)} for a in bindings]


def _name_of_target(what: str) -> str:
    """Return the name of the op that the command line argument ``what`` names. A module in the argument is imported, so
    that the op's kernels can be compared. For an empty string, return an empty string.
    """
    from shiplap.cli.target import resolve_targets, split_target

    if not what:
        return ""
    home, name = split_target(what)
    return resolve_targets([what])[0].spec.name if home else name


def _explain_misses(store: ChoiceStore, what: str) -> Result:
    """Return ``(JSON value, lines, exit status)`` of ``shiplap cache why``. The value and the lines say which fields of
    an op's stored choices, such as versions and device, differ from those of this process. ``what`` names the op. The
    status is 0 if a choice can be used, and otherwise 1.
    """
    name = _name_of_target(what)
    entries = list(store.entries(name))
    lines = [_entry_line(e) for e in entries] or [f"nothing is stored for {name} in {store.root}: tune it"]
    # Entries of several machines and versions lie side by side, of which one is enough.
    serves = any(not _stale_fields(e) for e in entries)
    if entries and not serves:
        fields = sorted({d.partition(":")[0] for e in entries if not e.problem for d in _stale_fields(e)})
        why = f": {', '.join(fields)} changed; tune again, or freeze on the other machine" if fields else ": tune again"
        lines.append(f"no entry serves here{why}")
    return {"op": name, "serves": serves, "entries": [_entry_json(e) for e in entries]}, lines, int(not serves)


def _export_entries(store: ChoiceStore, what: str) -> Result:
    """Write all stored choices to the file ``what``, a frozen table. Programs read choices from such a table instead of
    measuring. Return ``(JSON value, lines, exit status)``.
    """
    from shiplap.tuning.frozen_table import dump_table

    exported = [(e.key, e.value) for e in store.entries() if e.key is not None and e.value is not None]
    dump_table(Path(what), exported)
    return {"file": what, "entries": len(exported)}, [f"wrote {what}: {len(exported)} entries"], 0


def _import_entries(store: ChoiceStore, what: str) -> Result:
    """Store the choices of the file ``what``, a frozen table written by an export. Return ``(JSON value, lines, exit
    status)``. Raise ``SL602`` if not all can be written.
    """
    from shiplap.tuning.frozen_table import read_frozen_table

    entries = read_frozen_table(Path(what))
    # Entries are written one by one: those that could be written before a failure stay valid.
    kept = sum(store.put(key, value) for key, value in entries)
    if kept < len(entries):
        raise error(
            "SL602",
            where=str(store.root),
            what="entries of the cache cannot be written",
            got=f"{kept} of {len(entries)}",
            expected="a writable cache directory",
        )
    return {"root": str(store.root), "entries": kept}, [f"{kept} entries in {store.root}"], 0


def _remove_entries(store: ChoiceStore, what: str) -> Result:
    """Remove the stored choices of the op ``what``. For ``all`` remove all choices and proofs, and for ``proofs`` all
    proofs. Return ``(JSON value, lines, exit status)``.
    """
    gone, stuck = _remove_proofs(stale=False) if what in ("all", PROOFS) else (0, [])
    # 'all' removes the proofs as well, but not the bindings, which cost a compiler's run each.
    paths = [] if what == PROOFS else [e.path for e in store.entries("" if what == "all" else _name_of_target(what))]
    return _with_proofs(_remove_files(store, paths), gone, stuck)


def _with_proofs(done: Result, gone: int, stuck: list[str]) -> Result:
    """Return ``done``, the result of removing choices, with the result of removing proofs added to it. ``gone`` is the
    number of removed proofs, and ``stuck`` has the paths of the proofs that could not be removed.
    """
    result, lines, status = done
    lines = [*lines, *([f"removed {gone} proofs"] if gone else []), *(f"cannot remove {path}" for path in stuck)]
    return {**result, "proofs": gone, "stuck": [*result["stuck"], *stuck]}, lines, int(bool(status or stuck))


def _collect_garbage(store: ChoiceStore, what: str) -> Result:
    """Remove choices that cannot be used on this machine, damaged native bindings, temporary files of killed processes,
    and proofs that cannot be used. Return ``(JSON value, lines, exit status)``.

    If ``what`` names an op, only its unusable choices and half-written files of the store are removed.
    """
    from shiplap.kernels.native import cache
    from shiplap.safe_io.work_folders import remove_left_folders

    stale = [e.path for e in store.entries(_name_of_target(what)) if _stale_fields(e)]
    root = store.root.parent / "native"
    # If an op is named, only its choices are removed.
    broken = [Path(b["file"]) for b in _compiled_bindings(store) if b["problem"]] if not what else []
    rubbish = [*broken, *cache.stale_build_files(root)] if not what else []
    swept, stuck = remove_left_folders() if not what else (0, [])
    stuck += [str(path) for path in rubbish if not cache.remove_artefact(path)]
    # Bindings are evicted as well if they take too much space together, those unused for longest first.
    gone = sum(not os.path.lexists(path) for path in rubbish) + (len(cache.evict_artefacts(root)) if not what else 0)
    result, lines, status = _remove_files(store, [*stale, *store.half_written_files()])
    lines += [f"removed {gone} from {root}"] if gone else []
    lines += [f"removed {swept} folders of runs that were killed from {tempfile.gettempdir()}"] if swept else []
    lines += [f"cannot remove {path}" for path in stuck]
    done = {**result, "compiled": gone, "stuck": [*result["stuck"], *stuck]}, lines, int(bool(status or stuck))
    return _with_proofs(done, *(_remove_proofs(stale=True) if not what else (0, [])))


def _remove_files(store: ChoiceStore, paths: list[Path]) -> Result:
    """Remove the files ``paths`` of the store. Return ``(JSON value, lines, exit status)``. The value has the number of
    removed files and the paths that could not be removed. The status is 1 if there are any such paths.
    """
    stuck = [str(p) for p in paths if not store.remove(p)]
    lines = [f"removed {len(paths) - len(stuck)} files from {store.root}", *(f"cannot remove {p}" for p in stuck)]
    return {"root": str(store.root), "removed": len(paths) - len(stuck), "stuck": stuck}, lines, int(bool(stuck))
