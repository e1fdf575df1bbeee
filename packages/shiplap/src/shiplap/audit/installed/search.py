"""A search for calls that an op takes: calls whose refusal is new are changed further."""

from __future__ import annotations

import math
import re
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shiplap.audit.child_process import ChildEvent, SendEvent
from shiplap.audit.installed.checks import NotApplicable, call_op, on_cpu_alone
from shiplap.audit.installed.descent import CRASHED, Descent
from shiplap.audit.installed.draws import CallDraws
from shiplap.audit.installed.python_function import PythonFunction
from shiplap.audit.installed.recipes import CallRecipe, TakenCall, evaluate, recipe_from_text
from shiplap.audit.installed.refusals import (
    EMPTY,
    NO_KERNEL_INSIDE,
    REFUSES_DEVICE,
    has_no_kernel,
    is_withdrawn,
    refusal_form,
)
from shiplap.audit.installed.result import device_name
from shiplap.audit.installed.tensors import map_tensors, tensors_in
from shiplap.scaffold.schema import SchemaForm

_NO_ARGUMENT = "no such argument"
_MISCALLED = re.compile(r"\(\) (takes .* positional arguments? but|missing \d+ required)")  # of a Python function
WANTED_CALLS = 6  # different calls of one op, on which the checks run
_FRONTIER = 24  # calls with the newest refusals, from which the next are drawn
_PATIENCE = 5.0  # seconds of processor time of one call of a search on the CPU
_MOST_CRASHES = 2  # of calls that were made from one call, which is then left alone
_MOST_CRASHES_OF_STEP = 24  # of those from the last call of a walk, which tries each property
_MOST_CRASHED = 3  # calls that have ended a process from which others are made
_MOST_ELEMENTS = 1 << 22  # of a tensor in a call of a search: larger ones take seconds to make
_WAITING = 20  # times as long as its processor time may be, a search also waits, as for a network


@dataclass
class SearchState:
    """The state of a search in the parent process, so that a search whose call ended the process goes on from it.

    ``found`` are the calls that the op took, and ``frontier`` the calls whose refusals were new. ``refusals`` are these
    refusals, in the same order. ``avoided`` are the texts of calls that ended the process, and ``crashes`` counts them
    by the text of the call from which they were made. ``walked`` is the last call of a walk from refusal to refusal
    that has not ended, with its refusal. ``siblings`` are calls that other ops of the package took, and ``begun`` is
    the number of searches that have begun from one of them. ``device`` is the type of the device of the tensors.
    """

    siblings: Sequence[TakenCall] = ()
    begun: int = 0
    device: str = "cpu"
    found: list[TakenCall] = field(default_factory=list)
    frontier: list[CallRecipe] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    avoided: set[str] = field(default_factory=set)
    crashes: dict[str, int] = field(default_factory=dict)
    walked: tuple[CallRecipe, str] | None = None
    absent: str = ""

    def take(self, event: ChildEvent) -> None:
        """Store the event of a search: a call that was taken, a new refusal, a step of a walk or its end, a begin from
        a call of another op, or the absence of a kernel.
        """
        if event["kind"] == "found":
            results = tuple((dtype, tuple(shape)) for dtype, shape in event["results"])
            self.found.append(TakenCall(event["op"], recipe_from_text(event["call"]), results))
        elif event["kind"] == "refused":
            self.refusals.append(event["refusal"])
            self.frontier.append(recipe_from_text(event["call"]))
        elif event["kind"] == "walked":
            self.walked = (recipe_from_text(event["call"]), event["refusal"]) if event["refusal"] else None
        elif event["kind"] == "begun":
            self.begun = event["siblings"]
        elif event["kind"] == "absent":
            self.absent = event["reason"]

    def avoid(self, tried: ChildEvent) -> None:
        """Store that the call of the event ``tried`` ended the process, so that it is not made again. Searches begin
        from few of those that were drawn as a whole.
        """
        self.avoided.add(tried["call"])
        if tried["origin"] == repr(None) and self.refusals.count(CRASHED) < _MOST_CRASHED:
            self.refusals.append(CRASHED)
            self.frontier.append(recipe_from_text(tried["call"]))
        self.crashes[tried["origin"]] = self.crashes.get(tried["origin"], 0) + 1

    @property
    def reason(self) -> str:
        """Why no call was taken: the last new refusal is the one that a call came furthest with. If a call came as far
        as another op that has no kernel for the device, so would every call that the op takes.
        """
        if self.absent or self.found:
            return self.absent
        inside = [r for r in self.refusals if NO_KERNEL_INSIDE.search(r)]
        # On another device, such an error is about a single argument.
        if not inside and self.device == "cpu":
            inside = [r for r in self.refusals[-1:] if REFUSES_DEVICE.search(r)]
        if inside:
            return f"no kernel for the device inside of the op: {inside[0]}"[:300]
        if self.refusals:
            return f"no call that was tried is taken; the last new refusal: {self.refusals[-1]}"[:300]
        return "no call that was tried is taken"


def try_recorded(
    op: Any,
    form: SchemaForm,
    calls: Sequence[CallRecipe],
    state: SearchState,
    send: SendEvent,
    seconds: float = math.inf,
) -> Iterator[CallRecipe]:
    """Yield each of the recorded ``calls`` that the op takes, after an event for it was sent. A call that has ended the
    process before, according to ``state``, is not made again. If a call was taken, no more calls are made after
    ``seconds`` of processor time. Small calls come first.
    """
    known, since = {repr(t.call) for t in state.found}, used_seconds()
    for call in sorted(calls, key=lambda c: sum(math.prod(t.shape) for _, t in c.tensors())):
        if known and used_seconds() - since > seconds:
            return
        if repr(call) in known:
            yield call
        elif repr(call) not in state.avoided:
            send(_tried(call, "", None, since))
            # The program has made this call, so that a fake implementation that refuses it is at fault.
            if not why_refused(op, call, wrap="", by_fake=False):
                send(_found(op, form, call))
                known.add(repr(call))
                yield call


def used_seconds() -> float:
    """Return the seconds of processor time of this process and of those that it has started and that have ended, such
    as compilers.
    """
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _tried(call: CallRecipe, wrap: str, source: CallRecipe | None, since: float = 0.0) -> ChildEvent:
    """Return the event that ``call`` is made next. ``source`` is the call from which it was made, or None. ``since`` is
    the processor time of this process at the begin of its search.
    """
    texts, used = call.texts(wrap), used_seconds() - since
    event = {"kind": "try", "call": repr(call), "texts": texts, "by": call.origin, "origin": repr(source), "used": used}
    # A search makes many calls, and one that does not end soon is of no use. A device may compile a kernel first.
    drawn_for_cpu = wrap and all(t.device == "cpu" for _, t in call.tensors())
    return {**event, "patience": _PATIENCE} if drawn_for_cpu else event


def search_calls(
    op: Any, form: SchemaForm, seed: int, seconds: float, state: SearchState, send: SendEvent, device: str = "cpu"
) -> None:
    """Search for calls that the op accepts by random changes, within ``seconds`` of processor time, until ``state`` and
    this search have six of them. Tensors are on a device of the type ``device``. A search whose calls wait rather than
    compute ends after 20 times as long. On the CPU every tensor ends directly before memory that cannot be accessed, so
    that a read beyond its end is a crash.

    Each call is sent by ``send`` before it is made. If a call ends the process, the parent process starts the search
    again, with this call among those that ``state`` avoids.
    """
    draws = CallDraws(form, seed, state.siblings, careful=bool(state.avoided), device=device)
    for refusal in state.refusals:
        draws.hint(refusal)
    _CallSearch(op, form, state, send, draws, seconds).run()


class _CallSearch:
    """A search for calls of one op, which begins with the calls and refusals of ``state``."""

    def __init__(
        self, op: Any, form: SchemaForm, state: SearchState, send: SendEvent, draws: CallDraws, seconds: float
    ) -> None:
        """Prepare a search of ``seconds`` of processor time, which takes calls from ``draws`` and reports by
        ``send``.
        """
        self.op, self.form, self.state, self.send, self.draws, self.seconds = op, form, state, send, draws, seconds
        self.frontier = [*zip(state.frontier, state.refusals, strict=True), *((t.call, "") for t in state.found)]
        self.forms = {refusal_form(text): number for number, text in enumerate(state.refusals)}
        self.followed: set[str] = set()  # calls from which a walk has begun or at which one has ended
        self.kinds, self.left = {_kind_of_call(t.call) for t in state.found}, WANTED_CALLS - len(state.found)
        self.kept = {repr(t.call) for t in state.found}
        self.empty: CallRecipe | None = None  # the first call whose results have no elements
        # Time of the processor, so that other work on the machine does not shorten the search. The import of a package
        # does not count, which a process that was not forked from one with the package has made.
        self.since, self.latest = used_seconds(), time.monotonic() + _WAITING * seconds

    def is_open(self, part: float = 1.0) -> bool:
        """Return whether more calls are wanted and there is time for them in this ``part`` of the search's time."""
        return self.left > 0 and used_seconds() - self.since < part * self.seconds and time.monotonic() < self.latest

    def run(self) -> None:
        """Make calls until enough were taken, time is over, or the op takes none at all."""
        draws, crashes = self.draws, self.state.crashes
        # A call of the walk of an earlier process has ended that process.
        if (walked := self.state.walked) and crashes.get(repr(walked[0]), 0) < _most_crashes(CRASHED):
            self._walk(*walked)
        self._begin_from_siblings()
        while self.is_open():
            usable = [c for c in self.frontier[-_FRONTIER:] if crashes.get(repr(c[0]), 0) < _most_crashes(c[1])]
            source, why = draws.random.choice(usable) if usable and draws.random.random() > 0.15 else (None, "")
            if source is None:
                self.attempt(draws.first(), None)
            elif why and repr(source) not in self.followed:
                self._walk(source, why)
            else:
                self.attempt(draws.changed(source), source)
        # Some ops return no elements on a device that they are not made for.
        if not self.kept and self.empty is not None and [*self.forms] == [EMPTY]:
            self._keep(self.empty)

    def _begin_from_siblings(self) -> None:
        """Make one call of the arguments of each call that a similar op took, as ops of one family take equal ones. If
        none is taken, walk from each of these calls for half of the time: most ops of a family differ in few arguments.
        """
        siblings = self.draws.siblings
        for number in range(self.state.begun, 2 * len(siblings)):
            walks = number >= len(siblings)
            if not self.is_open(0.5) or (walks and self.kept):
                return
            self.send({"kind": "begun", "siblings": number + 1})
            call = self.draws.from_sibling(siblings[number % len(siblings)])
            why = self.attempt(call, None)
            if walks and why and why != CRASHED:
                self._walk(call, why, 0.5)

    def _walk(self, source: CallRecipe, why: str, part: float = 1.0) -> None:
        """Walk from refusal to refusal, from the call ``source``, which was refused by the message ``why``, in this
        ``part`` of the search's time.
        """

        def send_step(call: CallRecipe, refusal: str) -> None:
            """Send a step of the search, so that a search whose call ends the process goes on from it."""
            self.send({"kind": "walked", "call": repr(call), "refusal": refusal[:400]})

        self.followed.add(repr(source))
        is_open = partial(self.is_open, part)
        call, refusal = Descent(self.attempt, is_open, self.draws.random, send_step, self.forms).walk(source, why)
        send_step(call, "")
        if refusal and call != source:
            self.followed.add(repr(call))
            self.frontier.append((call, refusal))

    def attempt(self, call: CallRecipe, source: CallRecipe | None) -> str | None:
        """Make ``call``, which was made from ``source``, and return why it is refused: "" if it is taken, and None if
        its refusal says nothing about other arguments. A call that has ended a process is not made again, nor is one
        with a very large tensor.
        """
        if repr(call) in self.state.avoided:
            return CRASHED
        if any(math.prod(t.shape) > _MOST_ELEMENTS for _, t in call.tensors()):
            return None
        self.send(_tried(call, "guarded", source, self.since))
        refusal = why_refused(self.op, call)
        if not refusal:
            self._keep(call)
            return refusal
        self.empty = call if refusal == EMPTY and self.empty is None else self.empty
        # No change of the arguments gives the op a kernel for the device, so the search ends.
        if has_no_kernel(self.form.name, refusal):
            self._end(f"no kernel for {device_name(self.draws.device)}: {refusal}")
        elif is_withdrawn(self.form.name, refusal):
            self._end(f"the op refuses every call: {refusal}")
        elif not (refusal.startswith(_NO_ARGUMENT) or f"Could not run '{self.form.name}'" in refusal):
            self.draws.hint(refusal)
            # A refusal in a new form may come from a later check of the op, so its call is worth changing further.
            if refusal_form(refusal) not in self.forms:
                self.forms[refusal_form(refusal)] = len(self.forms)
                self.frontier.append((call, refusal))
                self.send({"kind": "refused", "call": repr(call), "refusal": refusal[:400]})
            return refusal
        return None

    def _end(self, reason: str) -> None:
        """End the search, since the op takes no call for this ``reason``."""
        self.send({"kind": "absent", "reason": reason[:160]})
        self.left = 0

    def _keep(self, call: CallRecipe) -> None:
        """Store a call that the op has taken, unless it is known. Few calls are wanted, so those that repeat known
        dtypes and ranks are mostly dropped.
        """
        if repr(call) in self.kept:
            return
        self.frontier.append((call, ""))
        if _kind_of_call(call) not in self.kinds or self.draws.random.random() < 0.1:
            self.kinds.add(_kind_of_call(call))
            self.kept.add(repr(call))
            self.left -= 1
            self.send(_found(self.op, self.form, call))
        if not self.form.arguments:
            self.left = 0  # there is one call


def _most_crashes(refusal: str) -> int:
    """Return how many of the calls that are made from a call with this ``refusal`` may end a process."""
    return _MOST_CRASHES_OF_STEP if refusal == CRASHED else _MOST_CRASHES


def _kind_of_call(call: CallRecipe) -> str:
    """Return a text that is equal for two calls with equal dtypes and numbers of dims."""
    return repr([(n, t.dtype, len(t.shape)) for n, t in call.tensors()])


def _found(op: Any, form: SchemaForm, call: CallRecipe) -> ChildEvent:
    """Return the event that the op has taken ``call``, with the dtypes and shapes of its results."""
    results = tensors_in(call_op(op, evaluate(call.texts())))
    shapes = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in results]
    return {"kind": "found", "op": form.name, "call": repr(call), "results": shapes}


def why_refused(op: Any, call: CallRecipe, wrap: str = "guarded", *, by_fake: bool = True) -> str:
    """Return why the op or its fake implementation refuses a call, or a message that says that the result is empty.
    Return an empty string if the call is accepted. If ``by_fake`` is false, the fake implementation is not called.

    ``wrap`` names the function that places each tensor in memory, by default next to memory that cannot be accessed.
    """
    try:
        arguments = evaluate(call.texts(wrap))
    except (RuntimeError, ValueError, IndexError, NotImplementedError) as e:
        return f"{_NO_ARGUMENT}: {e}"
    try:
        result = call_op(op, arguments)
    except NotApplicable as e:
        return str(e)
    made = tensors_in(result)
    # An op without tensors in its result returns a number, or writes to an argument.
    if made and not any(t.numel() for t in made):
        return EMPTY
    if result is None and not any(tensors_in(v) for v in arguments.values()):
        return "no result"
    return _why_fake_refuses(op, evaluate(call.texts())) if by_fake else ""


def _why_fake_refuses(op: Any, arguments: dict[str, Any]) -> str:
    """Return the error with which the fake implementation refuses ``arguments``, which the kernel has accepted, or an
    empty string if it accepts them. Many kernels do not check their arguments, so the fake implementation is called,
    too. A function has none.
    """
    if isinstance(op, PythonFunction) or not any(map(tensors_in, arguments.values())):
        return ""
    try:
        call_op(op, map_tensors(arguments, lambda t: t.to("meta")))
    except NotApplicable as e:
        cause = e.__cause__
        if cause is None or type(cause) not in (RuntimeError, ValueError, TypeError, IndexError):
            return ""
        # Whatever the arguments are, it is called with another number of them than it takes.
        if _MISCALLED.search(str(cause)):
            return ""
        # Such an error means that there is no fake implementation, or that it works only in a trace.
        if on_cpu_alone(cause) or any(word in str(cause) for word in ("meta", "get_ctx", "data is not allocated")):
            return ""
        return f"its fake implementation: {cause}"
    return ""
