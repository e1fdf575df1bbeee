"""A search for calls that an op takes: calls whose refusal is new are changed further."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from shiplap.audit.child_process import SendEvent
from shiplap.audit.installed.checks import NotApplicable, call_op
from shiplap.audit.installed.recipes import CallDraws, CallRecipe, evaluate
from shiplap.audit.installed.tensors import map_tensors, tensors_in
from shiplap.scaffold.schema import SchemaForm

NO_KERNEL = "Could not run"  # the dispatcher's error where a device has no kernel
WANTED_CALLS = 6  # different calls of one op, on which the checks run
_FRONTIER = 24  # calls with the newest refusals, from which the next are drawn


def refusal_form(text: str) -> str:
    """Return the message ``text`` of an exception with its numbers replaced by ``#``, cut after 200 characters.
    Messages that one line of the op raises then become equal.
    """
    return re.sub(r"[-\d.]+", "#", text)[:200]


def search_calls(
    op: Any, form: SchemaForm, seed: int, seconds: float, avoided: Sequence[str], send: SendEvent
) -> list[CallRecipe]:
    """Return up to six calls that the op accepts, found by random changes within ``seconds``. Every tensor ends
    directly before memory that cannot be accessed, so that a read beyond its end is a crash.

    Each call is sent by ``send`` before it is made. If a call ends the process, the parent process starts the search
    again, with the text of this call in ``avoided``. Such calls are not made again.
    """
    draws = CallDraws(form, seed)
    frontier, forms, found, kinds = list[CallRecipe](), set[str](), list[CallRecipe](), set[str]()
    end = time.monotonic() + seconds
    while time.monotonic() < end and len(found) < WANTED_CALLS:
        restart = not frontier or draws.random.random() < 0.15
        call = draws.first() if restart else draws.changed(draws.random.choice(frontier[-_FRONTIER:]))
        texts = call.texts("guarded")
        if repr(texts) in avoided:
            continue
        send({"kind": "try", "texts": texts})
        if refusal := why_refused(op, call):
            # No change of the arguments gives the op a kernel for the CPU, so the search ends.
            if NO_KERNEL in refusal:
                send({"kind": "unreached", "reason": f"no kernel for the CPU: {refusal}"[:160]})
                return []
            draws.hint(refusal)
            # A refusal in a new form may come from a later check of the op, so its call is worth changing further.
            if refusal_form(refusal) not in forms:
                forms.add(refusal_form(refusal))
                frontier.append(call)
            continue
        kind = repr([(n, t.dtype, len(t.shape)) for n, t in call.tensors()])
        frontier.append(call)
        # Few calls are wanted, so those that repeat known dtypes and ranks are mostly dropped.
        if kind not in kinds or draws.random.random() < 0.1:
            kinds.add(kind)
            found.append(call)
    return found


def why_refused(op: Any, call: CallRecipe, wrap: str = "guarded") -> str:
    """Return why the op or its fake implementation refuses a call, or a message that says that the result is empty.
    Return an empty string if the call is accepted.

    ``wrap`` names the function that places each tensor in memory, by default next to memory that cannot be accessed.
    """
    try:
        arguments = evaluate(call.texts(wrap))
    except (RuntimeError, ValueError, IndexError) as e:
        return f"no such argument: {e}"
    try:
        result = call_op(op, arguments)
    except NotApplicable as e:
        return str(e)
    written = [n for n, v in arguments.items() if tensors_in(v)]
    if not any(t.numel() for t in tensors_in(result)) and not (tensors_in(result) == [] and written):
        return "an empty result"
    return _why_fake_refuses(op, evaluate(call.texts()))


def _why_fake_refuses(op: Any, arguments: dict[str, Any]) -> str:
    """Return the error with which the fake implementation refuses ``arguments``, which the kernel has accepted, or an
    empty string if it accepts them. Many kernels do not check their arguments, so the fake implementation is called,
    too.
    """
    try:
        call_op(op, map_tensors(arguments, lambda t: t.to("meta")))
    except NotApplicable as e:
        cause = e.__cause__
        if isinstance(cause, NotImplementedError) or type(cause) not in (
            RuntimeError,
            ValueError,
            TypeError,
            IndexError,
        ):
            return ""
        # Such an error means that there is no fake implementation, or that it works only in a trace.
        return "" if "meta" in str(cause) or "get_ctx" in str(cause) else f"its fake implementation: {cause}"
    return ""
