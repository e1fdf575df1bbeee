"""Run a program or a function, read torch's trace of it, and return a ``Diagnosis``."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from shiplap.declare.keyword_values import require_callable
from shiplap.doctor import registry
from shiplap.doctor.causes import BREAK_CAUSES, classify_break, name_culprit, owner_of_break
from shiplap.doctor.diagnosis import Break, Diagnosis, Recompile, Skip, SourcePlace
from shiplap.doctor.fix import remedy_for_break
from shiplap.doctor.places import (
    definition_line,
    innermost_of_user,
    innermost_relevant,
    make_place,
    relevant_chain,
)
from shiplap.doctor.recompiles import group_recompiles
from shiplap.doctor.sightings import Compilation, Sighting, find_sightings, list_compilations
from shiplap.doctor.trace import EventTrace, read_trace_files, record_events
from shiplap.errors import ShiplapError, error, first_line
from shiplap.safe_io.work_folders import work_folder


def diagnose_command(command: Sequence[str], stdout: IO[Any] | int | None = None) -> Diagnosis:
    """Run ``command`` as it would run on its own, with torch's trace switched on. Return the diagnosis of all its
    processes.

    The program keeps its arguments, directory, streams and exit status. If ``stdout`` is not None, however, the
    program's standard output goes to ``stdout``. The program gets one more environment variable, ``TORCH_TRACE``.
    Ctrl-C reaches it as always, and all compilations until then are diagnosed. Raise ``SL701`` if it cannot be started.
    """
    with _trace_directory() as directory:
        try:
            process = subprocess.Popen(command, stdout=stdout, env={**os.environ, "TORCH_TRACE": str(directory)})
        except OSError as e:
            raise _start_error(command, e) from None
        status = _wait_for_exit(process)
        trace = read_trace_files(directory)
    # Python puts the folder of the script first on its path, and so must the draft of a declaration.
    scripts = [Path(a).resolve().parent for a in command[1:] if a.endswith(".py") and Path(a).is_file()]
    return diagnose_trace(trace, " ".join(command), exit_code=status, paths=(*scripts[:1], Path.cwd()))


def _start_error(command: Sequence[str], e: OSError) -> ShiplapError:
    """Return the error ``SL701`` for a command that cannot be started because of ``e``. If the command is a script
    without ``python``, the error has a fix.
    """
    where, expected = " ".join(command), "a program, such as 'python script.py'"
    if command[0].endswith(".py") and Path(command[0]).is_file():
        fix = f"let Python run the file: shiplap doctor -- python {where}"
        return error("SL701", where=where, got=f"{command[0]}, which no shell can start", expected=expected, fix=fix)
    return error("SL701", where=where, got=e.strerror or e, expected=expected)


@contextlib.contextmanager
def _trace_directory() -> Iterator[Path]:
    """Return a context whose value is a new directory for torch's trace, which is removed at the end.

    If the user has a trace directory, the new directory is made inside it and is kept.
    """
    if wanted := os.environ.get("TORCH_TRACE"):
        # The user's own tools expect the trace below the folder of the variable.
        os.makedirs(wanted, exist_ok=True)
        yield Path(tempfile.mkdtemp(prefix="shiplap-doctor-", dir=wanted))
    else:
        with work_folder("doctor") as directory:
            yield directory


def _wait_for_exit(process: subprocess.Popen[Any]) -> int:
    """Return the exit status of ``process`` as a shell reports it. Ctrl-C does not end the wait, since the program
    handles the interrupt itself.
    """
    while True:
        try:
            # A second Ctrl-C must not end the doctor either: the program may need time to write its results.
            return shell_status(process.wait())
        except KeyboardInterrupt:
            continue


def shell_status(status: int) -> int:
    """Return an exit status as a shell reports it. For a process that a signal ended, ``subprocess`` reports the
    negative number of the signal, and a shell reports 128 plus the number.
    """
    return status if status >= 0 else 128 - status


def doctor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Diagnosis:
    """Call ``fn(*args, **kwargs)`` and return a diagnosis of its graph breaks, recompiles and skipped CUDA graphs.

    Each graph break has its line, its cause and its remedy. ``fn`` is called once as it is. If nothing was compiled, it
    is called once more under ``torch.compile`` with the eager backend. That backend breaks graphs at the same lines as
    every backend. An exception that ``fn`` raises is stored in ``Diagnosis.error``. Code that is already compiled adds
    nothing, since it is not compiled again. Call ``torch.compiler.reset()`` first.

    Example::

        found = sl.doctor(model, torch.randn(2, 8))
        assert not found.breaks, found.breaks[0].fix
    """
    import torch

    require_callable("sl.doctor()", fn)
    name = getattr(fn, "__qualname__", None) or type(fn).__name__
    trace, failure = _record_call(fn, args, kwargs)
    # A function that raised is not called again: its second run could have other effects.
    if not failure and not list_compilations(trace):
        trace, failure = _record_call(torch.compile(fn, backend="eager"), args, kwargs)
    return diagnose_trace(trace, str(name), exit_code=int(bool(failure)), failure=failure)


def _record_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[EventTrace, str]:
    """Call ``fn(*args, **kwargs)`` and return ``(trace, failure)``.

    The trace has the events that torch's compiler logged during the call. The failure is the first line of an exception
    that ``fn`` raised, or an empty string.
    """
    failure = ""
    # Recorded even if the call raises: the breaks ahead of the exception are findings as well.
    with record_events() as trace:
        try:
            fn(*args, **kwargs)
        except Exception as e:
            failure = first_line(e)
    return trace, failure


def diagnose_trace(
    trace: EventTrace, target: str, *, exit_code: int = 0, failure: str = "", paths: tuple[Path, ...] = ()
) -> Diagnosis:
    """Return the diagnosis of torch's events in ``trace``, for the program or function called ``target``.

    ``exit_code`` is the exit status of the program, and ``failure`` the text of the exception that ended it. ``paths``
    are folders in which modules of the program are found. From their functions, op declarations are drafted.
    """
    compiled = list_compilations(trace)
    recompiles = tuple(group_recompiles(compiled))
    breaks = _group_breaks(find_sightings(trace, compiled), compiled, paths)
    # A crash may end a compilation before its metrics are written; its start is in the trace.
    started = {(e.process, e.compile_id.partition("/")[0]) for e in trace.events_of_kind("dynamo_start")}
    return Diagnosis(
        target=target,
        breaks=tuple(_name_consequence(b, breaks, recompiles) for b in breaks),
        recompiles=recompiles,
        skips=tuple(_cuda_graph_skips(compiled)),
        compiled=len(started | {c.frame for c in compiled}),
        graphs=len({(e.process, e.compile_id) for e in trace.events_of_kind("dynamo_output_graph")}),
        operations=sum({c.frame: c.operations for c in sorted(compiled, key=lambda c: c.operations)}.values()),
        seconds=sum(c.seconds for c in compiled),
        processes=len({e.process for e in trace.events}),
        exit_code=exit_code,
        error=failure,
    )


# torch's hint about a break that occurs because it could not continue after another one.
_CAUSED_BY_BREAK = "may have been caused by an earlier graph break"


def _name_consequence(b: Break, breaks: Sequence[Break], recompiles: tuple[Recompile, ...]) -> Break:
    """Return ``b``, a graph break. If another entry has caused it, the result names that entry in ``follows``. It is
    another break of ``breaks`` on the same line, or a recompile of its function that exceeded torch's limit.
    """
    if b.cause == "recompiles" and any(r.place == b.place and r.limit for r in recompiles):
        return replace(b, follows=f"the recompiles of {b.place.function} below")
    if _is_consequence(b) and any(o.place == b.place and not _is_consequence(o) for o in breaks):
        return replace(b, follows="the other break on this line")
    return b


def _is_consequence(b: Break) -> bool:
    """Return whether torch hints that an earlier break may have caused the break ``b``."""
    return any(_CAUSED_BY_BREAK in hint for hint in b.hints)


def _group_breaks(seen: Iterator[Sighting], compiled: list[Compilation], paths: tuple[Path, ...]) -> list[Break]:
    """Return one graph break for each line, reason and call among the occurrences ``seen``, the most costly first.

    ``compiled`` has the program's compilations, and ``paths`` the folders of its modules.
    """
    groups: dict[tuple[str, int, str, str], list[Sighting]] = {}
    for sighting in seen:
        at = innermost_relevant(sighting.stack) or SourcePlace("", 0)
        cause = classify_break(sighting.message, at)
        call = name_culprit(cause, sighting.message, at)
        # One line may break for several reasons, each with a remedy of its own.
        groups.setdefault((at.file, at.line, sighting.message.reason, call), []).append(sighting)
    found = (_make_break(rows, compiled, paths) for rows in groups.values())
    return sorted(found, key=lambda b: b.cost, reverse=True)


def _operations_around(rows: list[Sighting], compiled: list[Compilation]) -> tuple[int, int]:
    """Return the numbers of operations before and after a break, which has the occurrences ``rows``. The first is the
    sum over the graphs that end at the break. The second is that of the largest graph that begins there. ``compiled``
    has the program's compilations.
    """
    keys, at = {(s.process, s.compile_id) for s in rows}, rows[0].stack
    before = sum(c.operations for c in compiled if c.key in keys)
    ends = {(p.file, p.line) for p in at}
    after = max((c.operations for c in compiled if c.resumes_at and (c.file, c.resumes_at) in ends), default=0)
    return before, after


def _make_break(rows: list[Sighting], compiled: list[Compilation], paths: tuple[Path, ...]) -> Break:
    """Return the graph break that has the occurrences ``rows``. ``compiled`` has the program's compilations, and
    ``paths`` the folders of its modules.
    """
    longest = max(rows, key=lambda s: len(s.stack))  # resumed functions are logged without those that called them
    message, at = longest.message, innermost_relevant(longest.stack) or SourcePlace("", 0)
    cause = classify_break(message, at)
    call = name_culprit(cause, message, at)
    owner = owner_of_break(cause, message, longest.stack)
    fix, example = remedy_for_break(cause, message, at, call, owner, paths)
    before, after = _operations_around(rows, compiled)
    entry = registry.entry_by_id(message.registry) if message.registry else None
    keys = {(s.process, s.compile_id) for s in rows}
    around = [c for c in compiled if c.key in keys]
    return Break(
        place=at,
        user=innermost_of_user(longest.stack) or at,
        chain=relevant_chain(longest.stack, at),
        cause=cause,
        call=call,
        reason=message.reason,
        explanation=message.explanation,
        hints=message.hints,
        registry=message.registry,
        fix=fix,
        example=example,
        graphs=len({(s.process, s.compile_id.partition("/")[0]) for s in rows}),
        times=len(rows),
        seconds=sum(s.seconds for s in rows),
        skipped=any(s.message.skipped for s in rows),
        title=BREAK_CAUSES[cause].title,
        why=BREAK_CAUSES[cause].why,
        page=entry.url if entry else "",
        owner=owner,
        before=before,
        after=after,
        observers=tuple(dict.fromkeys(c.observer for c in around if c.observer)),
        frames=tuple(dict.fromkeys(make_place(c.file, definition_line(c.file, c.line), c.function) for c in around)),
    )


_SKIP_FIXES = (
    ("mutat", "do not write to inputs of the compiled function: return the new value, or register it as a buffer"),
    ("cpu device", "move every tensor to the GPU; a scalar on the CPU is enough to keep CUDA graphs off"),
    ("dynamic|symbolic|symint", "pad to a few fixed sizes; pad a size that depends on data to its bound"),
    ("incompatible op|unsafe", "declare it with @sl.op: outputs come from outside; then `shiplap audit` it"),
    ("multiple device", "keep each compiled function on one device"),
)


def _cuda_graph_skips(compiled: Sequence[Compilation]) -> list[Skip]:
    """Return the reasons for which torch skipped CUDA graphs that the program requested, each with its number of cases.
    The most frequent reason comes first.

    ``compiled`` has the program's compilations.
    """
    groups: dict[str, list[Compilation]] = {}
    for c in compiled:
        if reason := c.metrics.get("cudagraph_skip_reason"):
            groups.setdefault(_shorten_skip_reason(str(reason)), []).append(c)
    skips = [
        Skip(
            reason,
            make_place(rows[0].file, rows[0].line, rows[0].function) if rows[0].file else None,
            len(rows),
            next((fix for pattern, fix in _SKIP_FIXES if re.search(pattern, reason)), ""),
        )
        for reason, rows in groups.items()
    ]
    return sorted(skips, key=lambda s: s.times, reverse=True)


def _shorten_skip_reason(reason: str) -> str:
    """Return torch's reason for skipping a CUDA graph in one line. The preamble and the stack are left out."""
    first = reason.strip().splitlines()[0]
    return re.sub(r"^(skipping cudagraphs due to )+", "", first).partition(" Found from")[0].strip(" .:")
