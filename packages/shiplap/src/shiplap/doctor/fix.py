"""The remedy for a graph break: one sentence and, where it helps, a declaration that removes the break.

Examples are code to start from. A declaration of a foreign call is drafted from its signature, as ``shiplap init``
drafts it. A line that needs the author's knowledge is marked FILL.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from shiplap.doctor.causes import BREAK_CAUSES, BreakMessage, find_call_at
from shiplap.doctor.diagnosis import SourcePlace
from shiplap.errors import ShiplapError
from shiplap.scaffold.signature import DraftSignature, signature_of_call, signatures_of_function
from shiplap.scaffold.skeleton import Draft, render_draft

_BOUND_EXAMPLE = """\
import shiplap as sl
from jaxtyping import Bool, Float
from torch import Tensor


@sl.op("mylib::select", bounds={"m": "n"})  # m depends on values; it never exceeds n, and each call asserts that
def select(x: Float[Tensor, "n c"], keep: Bool[Tensor, "n"]) -> Float[Tensor, "m c"]:
    return x[keep]  # instead of: __AT__


# once, before the first call: let Dynamo keep ops whose output size depends on data
torch._dynamo.config.capture_dynamic_output_shape_ops = True"""

_ITEM_EXAMPLE = """\
# instead of: __AT__
y = x * scale  # a value: a tensor without dims does what the number did

# a size: the op that needs it computes it, and declares its bound
@sl.op("mylib::take", bounds={"m": "n"})  # each call asserts m <= n
def take(x: Float[Tensor, "n c"], count: Int64[Tensor, ""]) -> Float[Tensor, "m c"]:
    return x[: int(count)].clone()

# once, before the first call: let Dynamo keep ops whose output size depends on data
torch._dynamo.config.capture_dynamic_output_shape_ops = True"""

_BRANCH_EXAMPLE = """\
y = torch.where(condition, if_true, if_false)  # instead of: __AT__
y = torch.cond(condition, fn_true, fn_false, (x,))  # when one side alone is to be computed"""

_FUNCTION_EXAMPLE = '''\
@sl.op("mylib::name")
def name(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    """What forward() computes, in plain PyTorch."""

@name.backward
def _(grad, saved, needs):
    return {"x": ...}  # what backward() returns'''

_PRINT_EXAMPLE = """\
if not torch.compiler.is_compiling():
    __AT__"""

# Only the owner of a marker can remove it.
_DISABLED_ELSEWHERE = {
    "torch": "torch breaks the graph here on purpose: call it outside the compiled function, or compile it by itself",
    "": "{owner} breaks the graph here on purpose: call it outside the compiled function, or ask {owner} about it",
}

ExampleWriter = Callable[[BreakMessage, SourcePlace, str, tuple[Path, ...]], str]


def remedy_for_break(
    cause: str, message: BreakMessage, place: SourcePlace, call: str, owner: str, paths: tuple[Path, ...] = ()
) -> tuple[str, str]:
    """Return ``(sentence, example code)`` that say how to remove a graph break with the cause ``cause`` and the call at
    fault ``call``. ``owner`` is whose code breaks the graph. ``paths`` are folders in which modules of the program are
    found.

    The code is an empty string if there is none or if the line is not the user's own.
    """
    if cause == "disabled" and owner != "yours":
        return _DISABLED_ELSEWHERE.get(owner, _DISABLED_ELSEWHERE[""]).format(owner=owner), ""
    # Nobody edits a line of an installed package.
    example = _EXAMPLE_WRITERS.get(cause) if owner == "yours" else None
    return BREAK_CAUSES[cause].fix, example(message, place, call, paths) if example else ""


def _example_from_template(template: str) -> ExampleWriter:
    """Return a function that takes the description of a graph break and returns an example of a fix as source code. The
    example is ``template`` with the line of source code at which the graph breaks in place of ``__AT__``.
    """
    return lambda message, place, call, paths: template.replace("__AT__", place.code)


def _draft_declaration(message: BreakMessage, place: SourcePlace, call: str, paths: tuple[Path, ...]) -> str:
    """Return the source code of a draft of an op declaration for ``call``, the call at fault in the line ``place``.
    Return an empty string if no declaration can bind it.

    The called function is also searched for in the folders ``paths``.
    """
    module, _, name = call.rpartition(".")
    fn = _import_function(module, name, paths) if "qualname" in message.context else None
    if fn is None and module in ("", "self"):
        return ""  # a built-in, or a method of an object that only the program has: no declaration can bind it
    # Extension modules are often called _C, and a namespace must not be empty.
    namespace = (module or "mylib").split(".")[0].strip("_") or "mylib"
    signatures = _signatures_of_function(fn, f"{module}:{name}") if fn is not None else []
    # The call as written shows the arguments where the function has no readable signature.
    signatures = signatures or _signatures_of_call(place)
    if not signatures:
        return ""
    return render_draft(
        Draft(
            f"{call} at {place.short}",
            namespace if namespace.isidentifier() else "mylib",
            "op",
            signatures,
            f"import {module}\n" if fn else "",
            f"{module}.{name}" if fn else "",
            by="shiplap doctor",
        )
    ).rstrip()


def _signatures_of_function(fn: object, where: str) -> list[DraftSignature]:
    """Return the signatures of the function ``fn`` for a draft of a declaration, or an empty list if none can be read.
    ``where`` is the function's location, such as ``module:name``.
    """
    try:
        return [s for s in signatures_of_function(fn, where) if callable(fn)] if callable(fn) else []
    except ShiplapError:  # its signature cannot be read: the call as written says more
        return []


def _signatures_of_call(place: SourcePlace) -> list[DraftSignature]:
    """Return a list with the signature of the call as it is written at ``place``. The list is empty if there is no
    call.
    """
    call = find_call_at(place, "foreign")
    if not isinstance(call, ast.Call):
        return []
    signature = signature_of_call(call)
    name = re.sub(r"\W", "_", signature.name) or "kernel"
    return [DraftSignature(name, signature.parameters, signature.returns, signature.text)]


def _import_function(module: str, name: str, paths: tuple[Path, ...]) -> object:
    """Return the function ``name`` of the module ``module`` of the diagnosed program, or None if it cannot be imported.
    The module is found in ``paths`` or installed.
    """
    if not module:
        return None
    # An import may print, and stdout is the doctor's report.
    with _extended_sys_path(paths), contextlib.redirect_stdout(sys.stderr):
        try:
            return getattr(importlib.import_module(module), name, None)
        except BaseException as e:  # a module may even exit
            if isinstance(e, KeyboardInterrupt):
                raise
            return None


@contextlib.contextmanager
def _extended_sys_path(paths: tuple[Path, ...]) -> Iterator[None]:
    """Return a context in which ``paths`` come first on ``sys.path``."""
    before = list(sys.path)
    sys.path[:0] = [str(p) for p in paths]
    try:
        yield
    finally:
        sys.path[:] = before


_EXAMPLE_WRITERS: dict[str, ExampleWriter] = {
    "item": _example_from_template(_ITEM_EXAMPLE),
    "shape": _example_from_template(_BOUND_EXAMPLE),
    "branch": _example_from_template(_BRANCH_EXAMPLE),
    "autograd_function": _example_from_template(_FUNCTION_EXAMPLE),
    "print": _example_from_template(_PRINT_EXAMPLE),
    "foreign": _draft_declaration,
    "launcher": _draft_declaration,
    "numpy": _draft_declaration,
}
