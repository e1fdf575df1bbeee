"""Search of native code, without compiling it, for decisions by what differs in later calls and processes."""

from __future__ import annotations

import re
from collections.abc import Iterator

JUDGED_CALLS = 1000  # a judgement makes more calls than this
MOST_COUNTS = 256  # counted variables that are looked at
# No part of a pattern is longer than some number of characters: a candidate chooses the text.
LASTING = re.compile(
    r"\b(?:static|thread_local)\s{1,8}[\w:<>\s]{0,80}?\b(\w{1,64})\s{0,8}(?:=[^;]{0,200}|\{[^;]{0,200})?;"
)
WORDS = r"(?:\w[\w:<>]{0,63}[^\S\n]{1,8}){1,6}"
GLOBAL = re.compile(rf"(?:^|[;}}])[^\S\n]{{0,8}}{WORDS}(\w{{1,64}})[^\S\n]{{0,8}}(?:=[^;(\n]{{0,200}})?;", re.MULTILINE)
INCLUDE = re.compile(r"#\s{0,8}include\b")
SOURCE = re.compile(rf"{INCLUDE.pattern}|\bvoid\b|\bTensor\b")
NAMESPACE = re.compile(r"\b(?:namespace\b[\w:\s]{0,80}|extern\s{0,8}\"C\"\s{0,8})\{")
CHANGED = re.compile(r"(?:\+\+|--)\s{0,8}(\w{1,64})|\b(\w{1,64})\s{0,8}(?:\+\+|--|[+-]=|\.fetch_add)")
# Memory that native code gets, such as ``s[0]``, ``*s`` and ``s->n``.
GAP, NAME = r"\s{0,4}", r"\w{1,64}"
PLACE = rf"(?:\(?{GAP}\*{GAP}{NAME}{GAP}\)?|\b{NAME}{GAP}\[{GAP}{NAME}{GAP}\]|\b{NAME}{GAP}->{GAP}{NAME})"
STEPPED = re.compile(rf"(?:\+\+|--){GAP}({PLACE})|({PLACE}){GAP}(?:\+\+|--|[+-]={GAP}1\b)")
COMPARED = re.compile(rf"({PLACE}){GAP}(?:\+\+|--)?{GAP}\)?{GAP}(?:[<>]=?|[!=]=|%){GAP}(\d{{4,9}})")
UNSTEADY = re.compile(
    r"\b(steady_clock|high_resolution_clock|getpid|random_device|mt19937\w*|__?rdtsc|clock64|globaltimer)\b"
    r"|\b(s?rand|clock)\s*\(\s*\)"
)


def native_decisions(text: str, line: int, *, whole: bool = True) -> Iterator[tuple[int, str]]:
    """Yield (line, reason) for native code in ``text``, which begins at ``line``, that reads a clock, a chance or the
    number of its process, or that counts its calls in a variable or in memory that outlives a call, and compares it.

    Set ``whole`` to false for a part of a text that code puts together. It may begin inside of a function, so that
    nothing shows which variables are global, unless it includes headers.
    """
    if "{" not in text or ";" not in text:  # no code
        return
    if found := UNSTEADY.search(text):
        yield line, f"{found.group(0)} in native code"
    changed = {name for found in CHANGED.finditer(text) for name in found.groups() if name}
    outside = _outside_of_functions(text) if (SOURCE if whole else INCLUDE).search(text) else ""
    lasting = {found.group(1) for found in (*LASTING.finditer(text), *GLOBAL.finditer(outside))}
    counted = sorted(changed & lasting)
    if len(counted) > MOST_COUNTS:
        yield line, f"more than {MOST_COUNTS} variables that native code counts"
    for name in counted[:MOST_COUNTS]:
        if re.search(rf"\b{name}\b[^;{{}}]{{0,400}}?([<>%]|[!=]=)|[<>%]\s{{0,8}}{name}\b", text):
            yield line, f"the variable {name} in native code"
    stepped = {_without_blanks(place) for found in STEPPED.finditer(text) for place in found.groups() if place}
    limits = [(_without_blanks(found.group(1)), int(found.group(2))) for found in COMPARED.finditer(text)]
    for place in dict.fromkeys(place for place, limit in limits if place in stepped and limit >= JUDGED_CALLS):
        yield line, f"{place} in native code"


def _without_blanks(place: str) -> str:
    """Return a place of native code without blanks and parentheses."""
    return re.sub(r"[\s()]", "", place)


def _outside_of_functions(text: str) -> str:
    """Return native code without what stands in braces, other than those of namespaces and of ``extern "C"``. Return an
    empty string if more braces are closed than opened, or fewer: then the text is no whole source.
    """
    text, spaces = NAMESPACE.subn(";", text)
    kept, depth = [], 0
    for part in re.split(r"([{}])", text):
        if part in ("{", "}"):
            depth += 1 if part == "{" else -1
        elif depth == 0:
            kept.append(part)
        if depth < -spaces:
            return ""
        if depth < 0:  # the end of a namespace
            depth, spaces = 0, spaces - 1
    return ";".join(kept) if depth == 0 else ""
