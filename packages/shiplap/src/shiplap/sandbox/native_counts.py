"""Search of native code, without compiling it, for decisions by what differs in later calls and processes."""

from __future__ import annotations

import re
from collections.abc import Iterator

JUDGED_CALLS = 1000  # a judgement makes more calls than this
MOST_COUNTS = 256  # counted variables that are looked at
LASTING = re.compile(r"\b(?:static|thread_local)\s+[\w:<>\s]*?\b(\w+)\s*(?:=[^;]*|\{[^;]*)?;")
GLOBAL = re.compile(r"(?:^|[;}])[^\S\n]*(?:\w[\w:<>]*[^\S\n]+)+(\w+)[^\S\n]*(?:=[^;(]*)?;", re.MULTILINE)
NAMESPACE = re.compile(r"\b(?:namespace\b[\w:\s]{0,80}|extern\s{0,8}\"C\"\s{0,8})\{")
CHANGED = re.compile(r"(?:\+\+|--)\s*(\w+)|\b(\w+)\s*(?:\+\+|--|[+-]=|\.fetch_add)")
# Memory that native code gets, such as ``s[0]``, ``*s`` and ``s->n``.
PLACE = r"(?:\(?\s*\*\s*\w+\s*\)?|\b\w+\s*\[\s*\w+\s*\]|\b\w+\s*->\s*\w+)"
STEPPED = re.compile(rf"(?:\+\+|--)\s*({PLACE})|({PLACE})\s*(?:\+\+|--|[+-]=\s*1\b)")
COMPARED = re.compile(rf"({PLACE})\s*(?:\+\+|--)?\s*\)?\s*(?:[<>]=?|[!=]=|%)\s*(\d{{4,}})")
UNSTEADY = re.compile(
    r"\b(steady_clock|high_resolution_clock|getpid|random_device|mt19937\w*|__?rdtsc|clock64|globaltimer)\b"
    r"|\b(s?rand|clock)\s*\(\s*\)"
)


def native_decisions(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Yield (line, reason) for native code in ``text``, which begins at ``line``, that reads a clock, a chance or the
    number of its process, or that counts its calls in a variable or in memory that outlives a call, and compares it.
    """
    if "{" not in text or ";" not in text:  # no code
        return
    if found := UNSTEADY.search(text):
        yield line, f"{found.group(0)} in native code"
    changed = {name for found in CHANGED.finditer(text) for name in found.groups() if name}
    lasting = {found.group(1) for found in (*LASTING.finditer(text), *GLOBAL.finditer(_outside_of_functions(text)))}
    counted = sorted(changed & lasting)
    if len(counted) > MOST_COUNTS:
        yield line, f"more than {MOST_COUNTS} variables that native code counts"
    for name in counted[:MOST_COUNTS]:
        if re.search(rf"\b{name}\b[^;{{}}]*?([<>%]|[!=]=)|[<>%]\s*{name}\b", text):
            yield line, f"the variable {name} in native code"
    stepped = {_without_blanks(place) for found in STEPPED.finditer(text) for place in found.groups() if place}
    limits = [(_without_blanks(found.group(1)), int(found.group(2)[:9])) for found in COMPARED.finditer(text)]
    for place in dict.fromkeys(place for place, limit in limits if place in stepped and limit >= JUDGED_CALLS):
        yield line, f"{place} in native code"


def _without_blanks(place: str) -> str:
    """Return a place of native code without blanks and parentheses."""
    return re.sub(r"[\s()]", "", place)


def _outside_of_functions(text: str) -> str:
    """Return native code without what stands in braces, other than those of namespaces and of ``extern "C"``."""
    kept, depth = [], 0
    for part in re.split(r"([{}])", NAMESPACE.sub(";", text)):
        if part in ("{", "}"):
            depth = max(0, depth + (1 if part == "{" else -1))
        elif not depth:
            kept.append(part)
    return ";".join(kept)
