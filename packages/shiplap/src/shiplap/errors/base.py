"""The classes of errors, and the catalogue itself: ``register`` adds to it, ``error`` reads it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from textwrap import shorten
from types import FrameType, MappingProxyType

from shiplap.errors.foreign_text import replace_controls


class ShiplapError(Exception):
    """The base class of all errors of the catalogue, which :func:`error` makes.

    The class has no constructor of its own. ``torch.compile`` cannot trace a call of one, and would report that instead
    of the error.

    ``id`` is the id, such as ``SL202``, and ``what`` says what failed. ``got`` is the wrong value, and ``expected``
    says what is accepted. ``where`` names the op, argument or file, and ``fix`` says how to correct it.
    """

    id: str
    what: str
    got: str
    expected: str
    where: str
    fix: str

    def __str__(self) -> str:
        """Return the text of the error as Python prints it, without control characters of a foreign file that it
        quotes.
        """
        return replace_controls(super().__str__())


class ShiplapNotice(UserWarning):
    """A warning that Shiplap uses a slower or more restricted implementation. :func:`notice` gives it once per process
    for each key.
    """


@dataclass(frozen=True)
class Entry:
    """One error of the catalogue. It holds the id such as ``SL202``, the exception class ``kind``, the title, the
    reason why the error exists, and the usual fix.
    """

    id: str
    kind: type[ShiplapError]
    title: str
    why: str
    fix: str


_entries: dict[str, Entry] = {}
# A view, so that only register() can add entries.
CATALOGUE: Mapping[str, Entry] = MappingProxyType(_entries)
"""Every entry of the packages that are loaded, by its id. The documentation page and the tests come from it."""


def register(kind: type[ShiplapError], rows: Iterable[tuple[str, str, str, str]]) -> None:
    """Add errors to the catalogue, given as tuples ``(id, title, why, fix)``. :func:`error` then returns errors of
    these ids as instances of ``kind``.

    A family of kernels declares its own errors in this way, in a module that is imported with the family. An id stands
    for one failure, whichever packages are installed. If an id is taken, ValueError is raised and nothing is added.
    """
    # All ids are checked before any is added, so that a failed call leaves the catalogue unchanged.
    entries = [Entry(id, kind, title, why, fix) for id, title, why, fix in rows]
    seen: dict[str, Entry] = dict(_entries)
    for entry in entries:
        if entry.id in seen:
            taken = seen[entry.id]
            raise ValueError(f"error id {entry.id} is taken: {taken.title!r}, a {taken.kind.__name__}")
        seen[entry.id] = entry
    _entries.update((entry.id, entry) for entry in entries)


def error(
    id: str, *, where: str, got: object = "", expected: object = "", what: str = "", fix: str = ""
) -> ShiplapError:
    """Return the catalogue error ``id`` as an exception, without raising it.

    ``where`` names the op, argument or file. ``got`` is the wrong value, and ``expected`` says what is accepted. If
    ``what`` or ``fix`` is an empty string, the catalogue's title or fix takes its place. An unknown ``id`` raises
    KeyError.
    """
    entry = CATALOGUE[id]
    what, fix = what or entry.title, fix or entry.fix
    text = f"{id}: {what}"
    for name, value in (("where   ", where), ("got     ", str(got)), ("expected", str(expected)), ("fix     ", fix)):
        if value:
            text += f"\n  {name} {value}"
    made = entry.kind(text)
    made.id, made.what, made.got, made.expected, made.where, made.fix = id, what, str(got), str(expected), where, fix
    return made


# The names of the parameters of error(), as which an error is sent between processes.
ERROR_PARTS = ("id", "what", "where", "got", "expected", "fix")


def error_parts(e: ShiplapError) -> dict[str, str]:
    """Return the arguments of :func:`error` that make an error equal to ``e``, as a dict from parameter name to string.
    The dict can be sent to another process, which calls ``error(**parts)``.
    """
    return {name: getattr(e, name) for name in ERROR_PARTS}


def first_line(e: BaseException) -> str:
    """Return ``Type: text`` for the exception ``e``, with the first non-empty line of its message. If the message is
    empty, return the type's name alone.
    """
    lines = [line for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {lines[0].strip()}" if lines else type(e).__name__


def error_line(e: BaseException) -> str:
    """Return ``Type: message`` of the exception ``e`` on one line, as at the end of a traceback. For an error of
    Shiplap's catalogue, the line has its id, its message, ``where``, ``got`` and ``expected``.
    """
    if isinstance(e, ShiplapError):
        return f"{e.id}: {e.what}; {e.where}: got {e.got}" + f", expected {e.expected}" * bool(e.expected)
    text = " ".join(line.strip() for line in str(e).strip().splitlines()[:5])
    return f"{type(e).__name__}: {text}"[:400]


def short_error_line(e: BaseException) -> str:
    """Return the first 200 characters of ``Type: message`` of ``e`` on one line, cut between two words."""
    return shorten(error_line(e), 200, placeholder=" ...")


# Python's own once-filter would count by text, which may hold sizes.
_announced: set[str] = set()


def notice(key: str, message: str) -> None:
    """Issue ``message`` as a ShiplapNotice warning, and attribute it to the line of the user's code that led to the
    call. Only the first call with each ``key`` in a process warns.
    """
    if key not in _announced:
        _announced.add(key)
        frame = _of_the_user(sys._getframe(1))
        # warn_explicit attributes the warning to the user's line, by which filters of warnings select.
        text = replace_controls(message)  # Python prints it as it is
        module, seen = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, ShiplapNotice, frame.f_code.co_filename, frame.f_lineno, module, seen)


def _of_the_user(frame: FrameType) -> FrameType:
    """Return the frame of the user's code that is nearest to ``frame``, going from callee to caller. This is the first
    frame whose module belongs neither to Shiplap nor to torch. If there is none, return the outermost frame.

    A call of an op passes through torch's dispatcher and generated functions, so that no fixed number of frames lies
    between a notice and the line of the user. Generated functions have no module.
    """
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("", "torch", "shiplap") and not package.startswith("shiplap_"):
            break
        frame = frame.f_back
    return frame
