"""Which lines of some source files each test executes, so that a mutant is tried by no test that cannot reach it."""

from __future__ import annotations

import gc
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

Lines = dict[str, list[int]]  # by file, in order
TOOL = "shiplap mutants"


@contextmanager
def record_lines(files: frozenset[str]) -> Iterator[dict[str, set[int]]]:
    """Record the lines of ``files``, given by their paths, that this process executes inside the ``with``. They are in
    the yielded mapping from file to numbers of lines.
    """
    found: dict[str, set[int]] = defaultdict(set)
    yield from _monitored(files, found) if sys.version_info >= (3, 12) else _traced(files, found)


def _monitored(files: frozenset[str], found: dict[str, set[int]]) -> Iterator[dict[str, set[int]]]:
    """Yield ``found`` while ``sys.monitoring`` adds to it each line of ``files`` once, when it is first executed. Only
    the code of ``files`` is instrumented, since torch's compiler would take several times as long otherwise.
    """
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]

    def add(code: CodeType, line: int) -> object:
        found[code.co_filename].add(line)
        return monitoring.DISABLE

    if monitoring.get_tool(monitoring.COVERAGE_ID) is None:
        monitoring.use_tool_id(monitoring.COVERAGE_ID, TOOL)
        for code in _codes_of(files):
            monitoring.set_local_events(monitoring.COVERAGE_ID, code, monitoring.events.LINE)
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, add)
    monitoring.restart_events()
    try:
        yield found
    finally:
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, None)


def _codes_of(files: frozenset[str]) -> Iterator[CodeType]:
    """Yield the code of all functions of ``files`` that are loaded, and of the functions in them."""
    gc.unfreeze()  # what is frozen is not listed
    functions = [each.__code__ for each in gc.get_objects() if type(each) is FunctionType]
    left = [code for code in {*functions} if code.co_filename in files]
    while left:
        code = left.pop()
        yield code
        left += [each for each in code.co_consts if isinstance(each, CodeType)]


def _traced(files: frozenset[str], found: dict[str, set[int]]) -> Iterator[dict[str, set[int]]]:
    """Yield ``found`` while ``sys.settrace`` adds to it each executed line of ``files``."""

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        return add if frame.f_code.co_filename in files else None

    def add(frame: FrameType, event: str, arg: object) -> Any:
        found[frame.f_code.co_filename].add(frame.f_lineno)
        return add

    before = sys.gettrace()
    threading.settrace(enter)
    sys.settrace(enter)
    try:
        yield found
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]


def tests_by_line(executed: Mapping[str, Lines]) -> dict[str, dict[int, set[str]]]:
    """Return the tests that execute each line of each file, from the lines of each test."""
    tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for test, files in executed.items():
        for file, lines in files.items():
            for line in lines:
                tests[file][line].add(test)
    return tests


def tests_that_execute(by_line: Mapping[int, set[str]], lines: Iterable[int]) -> set[str]:
    """Return the tests that execute one of ``lines`` of a file, given the tests of each of its lines."""
    return set[str]().union(*(by_line.get(line, ()) for line in lines))
