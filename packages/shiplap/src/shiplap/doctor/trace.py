"""Torch's structured trace as events, from the files of other processes or from this process.

A trace file holds one line per event, a JSON object after a log prefix. An event's payload follows, indented by a tab.
Verified on the files of torch 2.13. Kinds of events that are not listed here are not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shiplap import torch_private

# The prefix of torch's logging, with the process id, before the JSON of an event.
_EVENT_LINE = re.compile(r"^[VDIWEC]\d{4} \S+ (\d+) [^\]]*\] (\{.*)$")
_ARTIFACT_KINDS = ("dynamo_graph_break_reason", "dynamo_error")
# The starts of the lines that are read, as torch's JSON writer prints them.
_PREFIXES_OF_EVENTS = ('{"artifact": ', '{"compilation_metrics": ', '{"dynamo_start": ', '{"dynamo_output_graph": ')


@dataclass(frozen=True)
class TraceEvent:
    """An event of torch's trace in the process ``process``.

    ``kind`` is the key of the event, such as ``compilation_metrics``, and ``data`` has its fields. An artifact is an
    event that consists of a text. Its ``kind`` is its name and ``payload`` the text. ``compile_id`` is
    ``"frame/version"``.
    """

    kind: str
    process: int
    compile_id: str
    data: dict[str, Any] = field(default_factory=dict)
    payload: str = ""


@dataclass
class EventTrace:
    """The events of one run that the diagnosis uses. They are in the order in which torch wrote them, process by
    process.
    """

    events: list[TraceEvent] = field(default_factory=list)

    def events_of_kind(self, kind: str) -> Iterator[TraceEvent]:
        """Yield the events of one kind, such as ``compilation_metrics``, in the order in which torch wrote them."""
        return (e for e in self.events if e.kind == kind)

    def add(self, process: int, metadata: dict[str, Any], payload: Callable[[], str]) -> None:
        """Append the event with the fields ``metadata`` of torch's trace, unless the diagnosis does not use its kind.

        ``process`` is the id of the process of the event. ``payload()`` returns the event's text, and is only called if
        the text is needed.
        """
        kind = _kind_of_event(metadata)
        if kind is None:
            return
        # An artifact has its text in the payload, any other event its fields in the metadata.
        data = metadata[kind] if kind not in _ARTIFACT_KINDS else {}
        text = payload() if kind in _ARTIFACT_KINDS else ""
        self.events.append(
            TraceEvent(kind, process, _compile_id(metadata), data if isinstance(data, dict) else {}, text)
        )


def _kind_of_event(metadata: dict[str, Any]) -> str | None:
    """Return the kind of the event with the fields ``metadata``, or None for a kind that the diagnosis does not use."""
    artifact = metadata.get("artifact")
    if isinstance(artifact, dict):
        return artifact["name"] if artifact.get("name") in _ARTIFACT_KINDS else None
    return next((k for k in ("compilation_metrics", "dynamo_start", "dynamo_output_graph") if k in metadata), None)


def _compile_id(metadata: dict[str, Any]) -> str:
    """Return the id of the compilation to which the event with the fields ``metadata`` belongs, such as ``0/1``. It
    consists of a frame and a version, and is unique within a process.
    """
    prefix = f"{metadata['compiled_autograd_id']}/" if "compiled_autograd_id" in metadata else ""
    return f"{prefix}{metadata.get('frame_id', '')}/{metadata.get('frame_compile_id', '')}"


def read_trace_files(directory: Path) -> EventTrace:
    """Return the events in the trace files ``*.log`` of a directory, from the oldest file on. A line that a crash has
    cut off is left out.
    """
    trace = EventTrace()
    # torch writes one file per process and rank.
    for path in sorted(directory.glob("*.log"), key=lambda p: (p.stat().st_mtime, p.name)):
        with path.open(encoding="utf-8", errors="replace") as lines:
            _read_file(lines, trace)
    return trace


def _read_file(lines: Iterator[str], trace: EventTrace) -> None:
    """Append the events in the lines of one trace file to ``trace``."""
    header: tuple[int, dict[str, Any]] | None = None
    payload: list[str] = []

    def keep() -> None:
        """Append the event in ``header`` and ``payload`` of the enclosing function to its ``trace``. Do nothing if
        there is no event.
        """
        if header is not None:
            trace.add(*header, lambda: "".join(payload))

    for line in lines:
        # torch indents the lines of a payload by a tab.
        if line.startswith("\t"):
            if header is not None:
                payload.append(line[1:])
            continue
        keep()
        header, payload = _parse_header(line), []
    keep()


def _parse_header(line: str) -> tuple[int, dict[str, Any]] | None:
    """Return ``(process id, fields)`` of ``line``, the first line of an event. Return None for any other line or an
    event that the diagnosis does not use.
    """
    match = _EVENT_LINE.match(line)
    # Most lines of a trace are of other kinds, so the start of the text is compared before JSON is parsed.
    if match is None or not match[2].startswith(_PREFIXES_OF_EVENTS):
        return None
    try:
        return int(match[1]), json.loads(match[2])
    except json.JSONDecodeError:
        return None


@contextmanager
def record_events() -> Iterator[EventTrace]:
    """Return a context whose value collects the events of torch's trace in this process. A trace that the user has
    switched on continues.
    """
    import os

    trace = EventTrace()
    with torch_private.structured_trace(lambda metadata, payload: trace.add(os.getpid(), metadata, lambda: payload)):
        yield trace
