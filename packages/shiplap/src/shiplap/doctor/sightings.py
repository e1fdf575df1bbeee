"""The occurrences of graph breaks in torch's events, each with its message, stack, compilation and compile time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shiplap.doctor import registry
from shiplap.doctor.causes import BreakMessage
from shiplap.doctor.diagnosis import SourcePlace
from shiplap.doctor.places import make_place, parse_frames
from shiplap.doctor.probe import OBSERVED
from shiplap.doctor.trace import EventTrace, TraceEvent

_BREAK_LOCATION = re.compile(r"^Graph break in user code at (.+):(\d+)$", re.MULTILINE)
# torch heads the printed stack in one of two ways.
_STACK_START = re.compile(r"User code traceback:|The graph break occurred in the following user code:")
_TRACEBACK_START = re.compile(r"^(?:Traceback \(most recent call last\):|NoneType: None)$", re.MULTILINE)
# Texts that torch appends to a message. Everything behind the first of them is left out.
_MESSAGE_ENDS = (
    "\nStack variable source attribution:",
    "\nUser code traceback:",
    "\nfrom user code:",
    "\n*** While handling",
    "\nSet TORCHDYNAMO_VERBOSE",
    "\nThe above exception",
)
_SECTION_START = re.compile(r"^  (Explanation|Hint|Developer debug context): ?", re.MULTILINE)
# The id is only found in the address of the page to which a message refers.
_REGISTRY_ID = re.compile(r"/gb/(gb\d+)\.html")
# torch writes this where a whole function runs uncompiled.
SKIPPED_TEXT = "Skipping the function and falling back to eager"


@dataclass(frozen=True)
class Compilation:
    """One compilation of one function. ``process`` is the id of the process and ``compile_id`` torch's id of the
    compilation. The function begins at ``line`` of ``file``. ``seconds`` is the time that the compilation took.
    ``metrics`` are torch's figures about it. ``observer`` is the name of the frame of the observed call in which it was
    compiled (see ``Probe``), or an empty string.
    """

    process: int
    compile_id: str
    function: str
    file: str
    line: int
    seconds: float
    metrics: dict[str, Any] = field(default_factory=dict, repr=False)
    observer: str = ""

    @property
    def frame(self) -> tuple[int, str]:
        """The identity of the compiled function, which is the id of its process and torch's frame id. It is equal for
        all compilations of the function.
        """
        return self.process, self.compile_id.partition("/")[0]

    @property
    def operations(self) -> int:
        """The number of operations in the graph of this compilation."""
        return int(self.metrics.get("graph_op_count") or 0)

    @property
    def resumes_at(self) -> int:
        """The line at which this compilation continues a function after a break. It is 0 for a compilation that starts
        at the function's beginning.
        """
        match = re.fullmatch(r"torch_dynamo_resume_in_.+_at_(\d+)", self.function)
        return int(match[1]) if match else 0

    @property
    def key(self) -> tuple[int, str]:
        """The identity of this compilation, which is the id of its process and its compile id."""
        return self.process, self.compile_id


@dataclass(frozen=True)
class Sighting:
    """One occurrence of a graph break in torch's log. It has torch's message and the stack of source lines at the
    break. It also has the process, the id and the seconds of the compilation.
    """

    message: BreakMessage
    stack: tuple[SourcePlace, ...]
    process: int
    compile_id: str
    seconds: float = 0.0


def list_compilations(trace: EventTrace) -> list[Compilation]:
    """Return the compilations of functions that ``trace`` records, in its order. Compilations of backward graphs are
    left out.
    """
    compiled: list[Compilation] = []
    observers = _find_observers(trace)
    for event in trace.events_of_kind("compilation_metrics"):
        m = event.data
        frame, _, version = str(m.get("compile_id") or "").rpartition("/")
        # Backward graphs and runtime entries have metrics of their own, but are no compilations of a function.
        if not version or m.get("is_runtime") or (m.get("co_name") is None and m.get("fail_type") is None):
            continue
        known = next((c for c in compiled if c.frame == (event.process, frame)), None)  # past the limit it has no name
        compiled.append(
            Compilation(
                event.process,
                f"{frame}/{version}",
                m.get("co_name") or (known.function if known else ""),
                m.get("co_filename") or (known.file if known else ""),
                m.get("co_firstlineno") or (known.line if known else 0),
                float(m.get("entire_frame_compile_time_s") or 0.0),
                m,
                observers.get((event.process, f"{frame}/{version}"), ""),
            )
        )
    return compiled


def _find_observers(trace: EventTrace) -> dict[tuple[int, str], str]:
    """Return, by process id and compile id, the name of the innermost frame of an observed call in which each
    compilation started. Compilations outside of such a call are left out.
    """
    found = {}
    for event in trace.events_of_kind("dynamo_start"):
        names = [str(frame.get("name")) for frame in event.data.get("stack") or ()]
        found[_compilation_key(event)] = next((n for n in reversed(names) if n.startswith(OBSERVED)), "")
    return found


def find_sightings(trace: EventTrace, compiled: list[Compilation]) -> Iterator[Sighting]:
    """Yield the occurrences of graph breaks in a trace.

    The first are those that torch logged. Then follow those of compilations in ``compiled`` that failed without a
    logged break.
    """
    seconds = {c.key: c.seconds for c in compiled}
    logged = list(trace.events_of_kind("dynamo_graph_break_reason"))
    count = Counter(map(_compilation_key, logged))
    for event in logged:  # several breaks of one compilation share its time
        yield _sighting_of_log(event, seconds.get(_compilation_key(event), 0.0) / count[_compilation_key(event)])
    for c in compiled:
        if c.metrics.get("fail_type") and c.key not in count:
            yield _sighting_of_failure(c)


def _compilation_key(event: TraceEvent) -> tuple[int, str]:
    """Return the process id and the compile id of an event, which identify the compilation that it belongs to."""
    return event.process, event.compile_id


def _sighting_of_log(event: TraceEvent, seconds: float) -> Sighting:
    """Return the occurrence of a graph break that torch logged as ``event``, with its message and stack.

    ``seconds`` is its share of the compile time.
    """
    text = event.payload
    match = _STACK_START.search(text)
    tail = text[match.end() :] if match else ""
    cut = _TRACEBACK_START.search(tail)
    stack = parse_frames(tail[: cut.start()] if cut else tail)
    at = _BREAK_LOCATION.search(text)
    # The message names the line of the break, which the printed stack may lack.
    if at and not (stack and (stack[-1].file, stack[-1].line) == (at[1], int(at[2]))):
        stack.append(make_place(at[1], int(at[2])))
    head = text[: match.start()] if match else text
    return Sighting(parse_break_message(head or text), tuple(stack), event.process, event.compile_id, seconds)


def _sighting_of_failure(c: Compilation) -> Sighting:
    """Return the occurrence of a graph break for the compilation ``c``, which failed without logging a break.

    This happens with ``fullgraph=True`` or after too many recompiles.
    """
    m = c.metrics
    message = parse_break_message(str(m.get("fail_reason") or m["fail_type"]), str(m["fail_type"]))
    # There is no printed stack: the function and the failing line are all that the metrics have.
    stack = [make_place(c.file, c.line, c.function)] if c.file else []
    if m.get("fail_user_frame_filename"):
        stack.append(make_place(m["fail_user_frame_filename"], int(m.get("fail_user_frame_lineno") or 0)))
    return Sighting(message, tuple(stack), c.process, c.compile_id, c.seconds)


def parse_break_message(text: str, kind: str = "") -> BreakMessage:
    """Return torch's message about a graph break, split into reason, explanation, hints and context. If the message has
    no reason, ``kind`` becomes the reason.
    """
    skipped = SKIPPED_TEXT in text or "graph break in loop" in text or "results in a skip" in text
    # A skipped frame reports its reason inside of a longer message.
    body = re.sub(r"\A.*?^Graph Break Reason: [^\n]*?(?::\n\n?|\Z)", "", text, count=1, flags=re.DOTALL | re.MULTILINE)
    if body == text:
        body = text.partition("Graph Break Reason: ")[2] or text
    id = _REGISTRY_ID.search(body)
    for end in _MESSAGE_ENDS:
        body = body.partition(end)[0]
    parts = _SECTION_START.split(body.partition("\n For more details")[0])
    reason = next((line.strip() for line in parts[0].splitlines() if line.strip()), kind or "unknown reason")
    named = list(zip(parts[1::2], (_strip_lines(p) for p in parts[2::2]), strict=True))
    # Messages of other exceptions have no id.
    entry = registry.entry_by_id(id[1]) if id else registry.entry_by_type(reason)
    return BreakMessage(
        reason,
        next((v for n, v in named if n == "Explanation"), ""),
        tuple(v for n, v in named if n == "Hint"),
        next((v for n, v in named if n.startswith("Developer")), ""),
        entry.id if entry else (id[1].upper() if id else ""),
        skipped or "recompile limit exceeded" in reason,
    )


def _strip_lines(text: str) -> str:
    """Return the lines of ``text`` that are not empty, without indentation, as one string."""
    return "\n".join(line.strip() for line in text.strip().splitlines() if line.strip())
