"""The command ``shiplap backend diff``: the changes in torch's schemas."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shiplap.plugin_api import verbs

if TYPE_CHECKING:
    from shiplap_backend.lock import SchemaLock

EPILOG = """\b
Examples:
  shiplap backend diff torch-openvino              the project's lock against the installed torch
  shiplap backend diff --all --write 2.13.lock     every schema of the installed torch, into a file
  shiplap backend diff 2.11.lock 2.13.lock         two such files

\b
Exit status:
  0  no difference
  1  they differ
  2  a lock cannot be read"""


def command(
    old: Annotated[Path | None, typer.Argument(metavar="OLD", help="A project or a lock file.")] = None,
    new: Annotated[Path | None, typer.Argument(metavar="NEW", help="The same; by default the installed torch.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All overloads of torch, not only the project's.")] = False,
    write: Annotated[Path | None, typer.Option("--write", help="Write the installed torch's lock here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON value: the changes.")] = False,
) -> None:
    """Compare the schemas that a project was generated for with those of another torch."""
    from shiplap.plugin_api import error
    from shiplap_backend import lock

    if write is not None:
        verbs.write_text(write, lock.snapshot_schemas().text())
        verbs.note(f"wrote {write}")
    if old is None:
        if write is None:
            raise error("SL613", where="shiplap backend diff", got="nothing to compare", expected="OLD or --write")
        return
    before = lock.read_lock(old / "schema.lock" if old.is_dir() else old)
    after = (
        lock.read_lock(new / "schema.lock" if new.is_dir() else new)
        if new
        else _read_installed_schemas(before, everything)
    )
    changes = lock.diff_schemas(before, after)
    if json:
        verbs.emit_json({"old": before.torch, "new": after.torch, "changes": [vars(c) for c in changes]})
    else:
        verbs.out().print(f"torch {before.torch} -> {after.torch}: {len(changes)} changes", markup=False)
        for change in changes:
            verbs.out().print(str(change), markup=False)
    if changes:
        raise typer.Exit(verbs.FAILED)


def _read_installed_schemas(before: SchemaLock, everything: bool) -> SchemaLock:
    """Return the operator schemas of the installed torch.

    If ``everything`` is true, these are all schemas. Otherwise they are those of the overloads that ``before`` has.
    """
    from shiplap_backend.lock import SchemaLock, snapshot_schemas

    now = snapshot_schemas()
    names = now.schemas if everything else {n: s for n, s in now.schemas.items() if n in before.schemas}
    return SchemaLock(now.torch, names)
