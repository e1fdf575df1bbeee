"""A search for calls that an op takes: calls whose refusal is new are changed further."""

from __future__ import annotations

import math
import re
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shiplap.audit.child_process import ChildEvent, SendEvent
from shiplap.audit.installed.checks import NotApplicable, call_op, on_cpu_alone
from shiplap.audit.installed.draws import CallDraws
from shiplap.audit.installed.python_function import PythonFunction
from shiplap.audit.installed.recipes import CallRecipe, TakenCall, evaluate, recipe_from_text
from shiplap.audit.installed.result import device_name
from shiplap.audit.installed.tensors import map_tensors, tensors_in
from shiplap.scaffold.schema import SchemaForm

# Errors of torch, of Triton and of packages where a device is missing.
_NO_DEVICE = re.compile(
    "not compiled with CUDA|compiled with GPU support|NVIDIA driver|active drivers?|CUDA is not available|"
    "requires? (a )?(CUDA|GPU)|be a cuda device|non-CUDA DeviceType"
)
# The dispatcher's error where another op inside of the op has no kernel for the device.
_NO_KERNEL_INSIDE = re.compile(r"Could not run '[\w:.]+' with arguments from the '(CPU|CUDA)' backend")
# A tensor that is quantised or sparse has a backend of its own, for which most ops have no kernel.
_MISSING_KERNEL = re.compile(
    r"Could not run '(?P<op>[^']+)' with arguments from the '(?!Quantized|Sparse|Nested|Mkldnn)\w+' backend"
)
_REFUSES_DEVICE = re.compile(r"not supported (by|on) (the )?CPU\b")  # an error of kernels, which a dtype may also cause
# Words that name a type of elements: refusals that differ only in them come from one line of the op.
_TYPE_WORDS = re.compile(
    r"\b(c10::|torch\.|CPU)?(u?int\d*|long|short|char|byte|bool|half|double|b?float\w*|complex\w*)"
    r"(tensor|type|<\w+>)?\b",
    re.IGNORECASE,
)
_NO_ARGUMENT = "no such argument"
WANTED_CALLS = 6  # different calls of one op, on which the checks run
_FRONTIER = 24  # calls with the newest refusals, from which the next are drawn
_MOST_CRASHES = 2  # of calls that were made from one call, which is then left alone
_WAITING = 20  # times as long as its processor time may be, a search also waits, as for a network


def refusal_form(text: str) -> str:
    """Return the message ``text`` of an exception with its numbers and names of dtypes replaced, cut after 200
    characters. Messages that one line of the op raises then become equal.
    """
    return re.sub(r"[-\d.]+", "#", _TYPE_WORDS.sub("@", text))[:200]


def has_no_kernel(op: str, refusal: str) -> bool:
    """Return whether ``refusal`` says that the op ``op`` has no kernel for the device of its arguments. The
    dispatcher's error may also come from another op inside of it.
    """
    missing = _MISSING_KERNEL.search(refusal)
    own = missing is not None and missing["op"] == op.removesuffix(".default")
    return own or bool(_NO_DEVICE.search(refusal))


def is_withdrawn(op: str, refusal: str) -> bool:
    """Return whether ``refusal`` says that the op ``op`` as a whole is deprecated or was removed, so that it raises for
    all arguments. A sentence that goes on may limit that to some of them.
    """
    name = re.escape(op.rpartition("::")[2].partition(".")[0])
    return bool(re.search(rf"\b{name}(\(\))? (is|was|has been) (deprecated|removed)(?=[.,;:!]|$)", refusal))


@dataclass
class SearchState:
    """The state of a search in the parent process, so that a search whose call ended the process goes on from it.

    ``found`` are the calls that the op took, and ``frontier`` the calls whose refusals were new. ``refusals`` are these
    refusals, in the same order. ``avoided`` are the texts of calls that ended the process, and ``crashes`` counts them
    by the text of the call from which they were made. ``siblings`` are calls that other ops of the package took.
    ``device`` is the type of the device of the tensors.
    """

    siblings: Sequence[TakenCall] = ()
    device: str = "cpu"
    found: list[TakenCall] = field(default_factory=list)
    frontier: list[CallRecipe] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    avoided: set[str] = field(default_factory=set)
    crashes: dict[str, int] = field(default_factory=dict)
    absent: str = ""

    def take(self, event: ChildEvent) -> None:
        """Store the event of a search: a call that was taken, a new refusal, or the absence of a kernel."""
        if event["kind"] == "found":
            results = tuple((dtype, tuple(shape)) for dtype, shape in event["results"])
            self.found.append(TakenCall(event["op"], recipe_from_text(event["call"]), results))
        elif event["kind"] == "refused":
            self.refusals.append(event["refusal"])
            self.frontier.append(recipe_from_text(event["call"]))
        elif event["kind"] == "absent":
            self.absent = event["reason"]

    def avoid(self, tried: ChildEvent) -> None:
        """Store that the call of the event ``tried`` ended the process, so that it is not made again."""
        self.avoided.add(tried["call"])
        self.crashes[tried["origin"]] = self.crashes.get(tried["origin"], 0) + 1

    @property
    def reason(self) -> str:
        """Why no call was taken: the last new refusal is the one that a call came furthest with. If a call came as far
        as another op that has no kernel for the device, so would every call that the op takes.
        """
        if self.absent or self.found:
            return self.absent
        inside = [r for r in self.refusals if _NO_KERNEL_INSIDE.search(r)]
        # On another device, such an error is about a single argument.
        if not inside and self.device == "cpu":
            inside = [r for r in self.refusals[-1:] if _REFUSES_DEVICE.search(r)]
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
    return {"kind": "try", "call": repr(call), "texts": texts, "by": call.origin, "origin": repr(source), "used": used}


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
    frontier, forms = list(zip(state.frontier, state.refusals, strict=True)), set(map(refusal_form, state.refusals))
    frontier += [(t.call, "") for t in state.found]
    kinds, left = {_kind_of_call(t.call) for t in state.found}, WANTED_CALLS - len(state.found)
    latest = time.monotonic() + _WAITING * seconds
    # Time of the processor, so that other work on the machine does not shorten the search. The import of a package does
    # not count, which a process that was not forked from one with the package has made.
    since = used_seconds()
    while used_seconds() - since < seconds and time.monotonic() < latest and left > 0:
        usable = [c for c in frontier[-_FRONTIER:] if state.crashes.get(repr(c[0]), 0) < _MOST_CRASHES]
        source, why = draws.random.choice(usable) if usable and draws.random.random() > 0.15 else (None, "")
        if source is None:
            call = draws.first()
        else:
            call = draws.repaired(source, why) if why and draws.random.random() < 0.5 else draws.changed(source)
        if repr(call) in state.avoided:
            continue
        send(_tried(call, "guarded", source, since))
        if refusal := why_refused(op, call):
            # No change of the arguments gives the op a kernel for the device, so the search ends.
            if has_no_kernel(form.name, refusal):
                send({"kind": "absent", "reason": f"no kernel for {device_name(device)}: {refusal}"[:160]})
                return
            if is_withdrawn(form.name, refusal):
                send({"kind": "absent", "reason": f"the op refuses every call: {refusal}"[:160]})
                return
            if refusal.startswith(_NO_ARGUMENT) or f"Could not run '{form.name}'" in refusal:
                continue  # this says nothing about other arguments
            draws.hint(refusal)
            # A refusal in a new form may come from a later check of the op, so its call is worth changing further.
            if refusal_form(refusal) not in forms:
                forms.add(refusal_form(refusal))
                frontier.append((call, refusal))
                send({"kind": "refused", "call": repr(call), "refusal": refusal[:400]})
            continue
        frontier.append((call, ""))
        # Few calls are wanted, so those that repeat known dtypes and ranks are mostly dropped.
        if _kind_of_call(call) not in kinds or draws.random.random() < 0.1:
            kinds.add(_kind_of_call(call))
            left -= 1
            send(_found(op, form, call))
        if not form.arguments:
            return  # there is one call


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
        return "an empty result"
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
        # Such an error means that there is no fake implementation, or that it works only in a trace.
        if on_cpu_alone(cause) or "meta" in str(cause) or "get_ctx" in str(cause):
            return ""
        return f"its fake implementation: {cause}"
    return ""
