"""The reference of an op as exported programs: one for each way that its conditions on data can go.

A reference may ask a tensor for a truth value. It is traced with each answer. If one of them makes the reference raise,
the condition is a check: the program asserts it. If both return, the results become a tree of programs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiplap.errors import ShiplapError
from shiplap.torch_private.symbolic_sizes import DecideConditions, assert_in_graph, number_as_tensor, sizes_from_zero

# Each path costs a trace of the reference.
MAX_PATHS = 32
MAX_CONDITIONS = 64
UNKNOWN = 919191919  # stands for a number of the data in the text of an error
Finish = Callable[[Any, list[Any]], Any]  # makes the results of a trace from those of the reference and its conditions
_TORCH = os.path.dirname(torch.__file__) + os.sep


class UntraceableReference(Exception):
    """The error which says that a reference cannot be traced. Its message is the reason."""


@dataclass(frozen=True)
class Raised:
    """A leaf in the tree of a reference's paths, at which the reference raises an error with this ``message``."""

    message: str


@dataclass(frozen=True)
class Returned:
    """A leaf in the tree of a reference's paths, at which the reference returns. It holds the answers to the conditions
    on data that lead there, and the checks as (number of the condition, answer, message).
    """

    answers: tuple[bool, ...]
    checks: tuple[tuple[int, bool, str], ...] = ()


@dataclass(frozen=True)
class Branch:
    """A node in the tree of a reference's paths, at which a condition on data decides how the reference goes on.
    ``number`` is the condition's index in order, and ``answers`` are the results of the earlier conditions. The trees
    for its two results are in ``if_false`` and ``if_true``.
    """

    number: int
    answers: tuple[bool, ...]
    if_false: Path
    if_true: Path


Path = Raised | Returned | Branch


class _Finished(Exception):
    """An exception that ends a trace whose exported program is not needed."""


class _Module(torch.nn.Module):
    """A module whose ``forward`` calls a function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        """Keep the function ``call``, which ``forward`` calls."""
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> Any:
        """Return the result of the wrapped function for ``tensors``."""
        return self.call(*tensors)


class _Trace:
    """One trace of a reference, in which its conditions on data get ``answers`` in turn. The results of the trace are
    what ``finish(results, asked)`` returns for the reference's results and the list of conditions.

    Attributes:
        asked: the number of conditions.
        raised: the error that the reference itself has raised.
        guessed: whether it has read a number of a tensor in Python.
    """

    def __init__(self, call: Callable[..., Any], answers: Sequence[bool], finish: Finish) -> None:
        """Prepare one trace of ``call``, whose conditions on data get ``answers`` in turn."""
        self.call, self.answers, self.finish = call, answers, finish
        self.asked, self.guessed = 0, False
        self.raised: Exception | None = None

    def run(self, *tensors: Tensor) -> Any:
        """Run the reference on ``tensors`` in a trace and return ``finish(results, conditions)``. The conditions on
        data get this object's ``answers``.

        Record how many conditions there were and the error that the reference raised.
        """
        with DecideConditions(self.answers, MAX_CONDITIONS, UNKNOWN) as conditions:
            try:
                results = self.call(*tensors)
            except Exception as e:
                # An error of the trace itself is no behaviour of the reference.
                self.raised = e if _raised_outside_torch(e) else None
                raise
            finally:
                self.asked, self.guessed = len(conditions.asked), conditions.guessed
        return self.finish(results, conditions.asked)


def _raised_outside_torch(e: Exception) -> bool:
    """Return whether code outside torch raised the exception. If so, the reference itself raised it, and not its
    trace.
    """
    trace = e.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and not trace.tb_frame.f_code.co_filename.startswith(_TORCH)


class PathFinder:
    """A search, by traces, for the paths of a reference. A path is a series of answers to the reference's conditions on
    data, and the result or error that follows.

    ``call`` is the reference as a function of tensors. ``examples`` holds an example of each tensor. ``shapes`` are the
    dims of the tensors that vary, in the form that ``torch.export`` takes. ``paths`` counts the traced paths.
    """

    def __init__(self, call: Callable[..., Any], examples: tuple[Tensor, ...], shapes: Any) -> None:
        """Store the reference ``call``, its example tensors, and ``shapes``, the dims of these tensors that vary. No
        path has been traced.
        """
        self.call, self.examples, self.shapes, self.paths = call, examples, shapes, 0

    def find(self, answers: tuple[bool, ...] = ()) -> Path:
        """Return the tree of the paths of the reference that begin with ``answers``, the answers to its first
        conditions on data.

        Raise ``UntraceableReference`` if there are more than 32 paths.
        """
        self.paths += 1
        if self.paths > MAX_PATHS:
            raise UntraceableReference(f"its data decide more than {MAX_PATHS} ways through it")
        end, asked = self._run(answers)
        # From the last condition upwards, so that the paths behind a condition are joined before it.
        for number in reversed(range(len(answers), asked)):
            before = answers + (False,) * (number - len(answers))
            end = _join(number, before, end, self.find((*before, True)))
        return end

    def program(self, answers: tuple[bool, ...], finish: Finish) -> Any:
        """Return the exported program of one path, which is the reference with ``answers`` to its conditions on data.
        ``finish`` computes the program's results from those of the reference and the conditions.
        """
        return self._export(_Trace(self.call, answers, finish))

    def _run(self, answers: tuple[bool, ...]) -> tuple[Path, int]:
        """Trace one path of the reference. Its conditions on data get ``answers`` and then False.

        Return how the path ends (``Returned`` or ``Raised``) and how many conditions it has.
        """

        def stop(results: Any, asked: list[Any]) -> Any:
            """Raise ``_Finished`` as soon as the reference has returned. The trace is run only to count the
            conditions.
            """
            raise _Finished

        trace = _Trace(self.call, answers, stop)
        try:
            self._export(trace)
        except Exception as e:
            if trace.raised is not None:
                return Raised(_text_of(trace.raised)), trace.asked
            # The wanted end is an exception as well, which torch may have wrapped.
            if not _is_finished(e):
                raise
        # The number was a guess, so the traced path need not be the real one.
        if trace.guessed:
            raise UntraceableReference("it reads a number of a tensor in Python; keep it a tensor, or use item()")
        return Returned(answers + (False,) * (trace.asked - len(answers))), trace.asked

    def _export(self, trace: _Trace) -> Any:
        """Return the exported program of the run of the reference that ``trace`` describes. It is valid for all sizes
        of the dims that vary, including 0.
        """
        with sizes_from_zero():
            return torch.export.export(_Module(trace.run), self.examples, dynamic_shapes=(self.shapes,), strict=False)


def _is_finished(e: BaseException | None) -> bool:
    """Return whether ``e``, or an error that caused it, is a ``_Finished``. A trace is ended with it on purpose."""
    while e is not None:
        if isinstance(e, _Finished):
            return True
        # torch raises errors of its own around that of the function.
        e = e.__cause__ or e.__context__
    return False


def _text_of(e: Exception) -> str:
    """Return the type of an error of the reference, or the id of a catalogue error, and its message. They are in one
    line of at most 200 characters, with numbers of the data replaced by ``?``.
    """
    text = f"{e.id}: {e.got or e.what}" if isinstance(e, ShiplapError) else f"{type(e).__name__}: {e}"
    # The number stood for one of the data.
    return " ".join(text.replace(str(UNKNOWN), "?").split())[:200]


def _join(number: int, answers: tuple[bool, ...], if_false: Path, if_true: Path) -> Path:
    """Return the tree of paths from condition ``number`` on. ``if_false`` and ``if_true`` are the trees for its two
    answers. ``answers`` are those to the conditions before it.

    If the reference always raises an error after one of the answers, the condition becomes a check of the other tree.
    Otherwise it becomes a ``Branch``.
    """
    if isinstance(if_true, Raised):
        return if_false if isinstance(if_false, Raised) else _add_check(if_false, (number, False, if_true.message))
    if isinstance(if_false, Raised):
        return _add_check(if_true, (number, True, if_false.message))
    return Branch(number, answers, if_false, if_true)


def _add_check(path: Path, check: tuple[int, bool, str]) -> Path:
    """Return a copy of ``path``, a tree of paths of a reference, with one more check. At each leaf where the reference
    returns, ``check`` is the first check.

    ``check`` holds the number of a condition, the answer that it must have, and the message if it has another one.
    """
    if isinstance(path, Branch):
        return Branch(path.number, path.answers, _add_check(path.if_false, check), _add_check(path.if_true, check))
    assert isinstance(path, Returned)
    return Returned(path.answers, (check, *path.checks))


def with_checks(path: Returned) -> Finish:
    """Return the function that finishes the trace of ``path``, one path of a reference. It adds an assertion to the
    graph for each of the path's checks, and returns the reference's results.
    """

    def finish(results: Any, asked: list[Any]) -> Any:
        """Return ``results`` unchanged, and add an assertion to the traced graph for each check of the path. ``asked``
        holds the conditions, and ``path`` is the argument of ``with_checks``.
        """
        for number, answer, message in path.checks:
            condition = condition_tensor(asked[number])
            assert_in_graph(condition if answer else ~condition, message)
        return results

    return finish


def condition_tensor(condition: Any) -> Tensor:
    """Return a condition as a bool tensor with no dims. ``condition`` is a tensor of one element or a symbolic bool."""
    if not isinstance(condition, Tensor):
        return number_as_tensor(torch.sym_ite(condition, 1, 0)) != 0
    return condition.reshape(()) != 0
