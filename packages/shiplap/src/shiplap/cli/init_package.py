"""``shiplap init --package``: import a package, run a script under a recorder, and draft all ops of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shiplap.cli import console
from shiplap.cli.recording import run_recorded
from shiplap.cli.target import import_home
from shiplap.scaffold.calls import DispatchedCall, DispatchRecorder
from shiplap.scaffold.module import write_module_source
from shiplap.scaffold.package import DraftedPackage, draft_ops, find_package_ops, installed_version
from shiplap.scaffold.skeleton import fill_lines
from shiplap.tuning.engine import tuning_progress


@dataclass
class PackageDraft:
    """The draft of a module that declares a package's ops. ``text`` is its source code. ``calls`` has the calls of each
    op that the script ``script`` made, and ``counts`` their numbers. ``failure`` says how that script failed. It is
    empty if the script ran through.
    """

    package: str
    drafted: DraftedPackage
    text: str
    script: str = ""
    failure: str = ""
    calls: dict[str, list[DispatchedCall]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Return the drafted ops, the ops left out and the lines to fill in, as a dict that JSON can hold."""
        ops = [
            {
                "op": e.form.name,
                "calls": self.counts.get(e.form.name, 0),
                "inferred": {k: w for k, w in e.known.where.items() if not w.startswith("not inferred")},
            }
            for e in self.drafted.entries
        ]
        return {
            "origin": self.package,
            "version": installed_version(self.package),
            "script": self.script or None,
            "failure": self.failure or None,
            "ops": ops,
            "not_drafted": [{"op": n, "reason": why} for n, why in self.drafted.left_out.items()],
            "fill": fill_lines(self.text),
        }

    def notes(self, file: str) -> Iterator[str]:
        """Yield the lines of text that describe the draft in the file ``file`` to the user. They state how many ops
        were inferred, called and left out, and how many lines are to be filled in.
        """
        if self.failure:
            yield f"{self.script} failed: {self.failure}"
            yield "  the draft is of the calls before that; mend the script and run again with --force for the others"
        inferred = sum(not _not_inferred(e.known.where.get("return", "")) for e in self.drafted.entries)
        yield f"{file}: {len(self.drafted.entries)} ops, of {inferred} of them dims are inferred"
        if self.script:
            unseen = [e.form.name for e in self.drafted.entries if e.form.name not in self.counts]
            yield f"  {len(self.counts)} ops were called in {self.script}" + (
                f"; not called: {', '.join(unseen)}" if unseen else ""
            )
        for name, why in self.drafted.left_out.items():
            yield f"  not drafted: {name}: {why}"
        yield f"  {len(fill_lines(self.text))} lines to fill in, marked FILL; confirm what is marked inferred"


def _not_inferred(where: str) -> bool:
    """Return whether a size or type has no source. ``where`` names the source from which it was inferred. If there is
    none, it is empty or begins with ``not inferred``.
    """
    return not where or where.startswith("not inferred")


def draft_package(
    package: str,
    namespaces: Sequence[str],
    script: Path | None,
    arguments: Sequence[str],
    keep: Callable[[str], None] = lambda text: None,
) -> PackageDraft:
    """Return drafts of declarations of all ops of ``package``. If ``namespaces`` is not empty, the ops of these
    namespaces are drafted instead. Sizes and types are inferred from the calls that ``script`` makes with the arguments
    ``arguments``. If ``script`` is None, no calls are recorded.

    Each op is drafted in a separate process. ``keep`` is called after each op with the source code of the module so
    far.

    Raises:
        ShiplapError: ``SL501`` if there is no such package or no op in it. ``SL601`` if it cannot be imported.
    """
    ops = find_package_ops(package, import_home, namespaces)
    recorder = DispatchRecorder(ops, lambda name: console.note(f"recording {name}"))
    failure = run_recorded(script, arguments, recorder.mode()) if script is not None else ""
    command = f"shiplap init --package {package}" + (f" --record {script}" if script else "")
    version = installed_version(package)

    def write(drafted: DraftedPackage) -> str:
        """Return the source code of the module of declarations, made from ``drafted``. A comment at its head states how
        it was made.
        """
        head = [
            f"{len(drafted.entries)} ops of {package}{f' {version}' if version else ''}, drafted by `{command}`.",
            "Import this module, then audit its ops: shiplap audit <this file>. What is marked inferred was seen in",
            "calls and promised by nobody: confirm it. Until the lines marked FILL are written there is no reference,",
            "and whatever would be compared with one stays incomplete.",
        ]
        return write_module_source(drafted.entries, drafted.left_out, head=head, home=package)

    with tuning_progress(None) as report:
        drafted = draft_ops(
            ops, recorder.calls, package, report, isolate=_isolate_work, keep=lambda drafted: keep(write(drafted))
        )
    text = write(drafted)
    return PackageDraft(
        package, drafted, text, str(script) if script else "", failure, recorder.calls, dict(recorder.counts)
    )


def _isolate_work(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the dict that ``work()`` returns in a separate process. It must be of data that can be sent between
    processes. If that process dies, return the reason under the key ``left_out``. If no such process can be made, call
    ``work`` in this one.
    """
    from shiplap.audit.child_process import ChildDeath, can_isolate, run_isolated

    if not can_isolate():
        return work()
    drafted = run_isolated(lambda send: work())
    return {"left_out": f"its meta kernel ends the process: {drafted}"} if isinstance(drafted, ChildDeath) else drafted
