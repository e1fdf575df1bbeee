"""Error texts are read by people who have never heard of shiplap: a title states a failure, a fix is an action.

A title such as "layout" or "budget" names a topic, and its reader has to guess what went wrong. A list of forbidden
topics would only catch the topics that somebody thought of. A sentence, however, has a finite verb, and the verbs that
say that something failed are few. The tests therefore require one of these verbs in each title, and one of the listed
imperatives at the start of each fix. A new verb is added to its list here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shiplap.cli.families import load_families, verbs
from shiplap.errors import CATALOGUE
from shiplap_testing.paths import REPOSITORY

VERBS = set(
    re.findall(
        r"\w+",
        """is are was were has have had can cannot could does do did must needs differs disagree disagrees exceeds
        exists refused failed overlaps belongs names falls declares lists comes fails look looks would mixes fit fits
        follows""",
    )
)
ACTIONS = set(
    re.findall(
        r"\w+",
        """add annotate apply bind build call check choose compare compress compute convert copy correct declare define
        delete enlarge fill fold follow give import install issue judge keep leave let load make move name omit pack
        pad pair pass prune quantise read rebuild record redistribute regenerate reinstall remove rename repair
        report reshape restore return review run save set split start take tune use wait work write""",
    )
)
SOURCES = sorted(REPOSITORY.glob("packages/*/src/**/*.py"))


def a_sentence(text: str) -> bool:
    return bool(VERBS & set(re.findall(r"[a-z]+", text.lower())))


def an_action(text: str) -> bool:
    return text.split(maxsplit=1)[0].rstrip(":()") in ACTIONS


def entries() -> list[str]:
    load_families()  # a family's errors are in the catalogue once the family is imported
    verbs()
    return sorted(CATALOGUE)


@pytest.mark.parametrize("id", entries())
def test_a_title_states_a_failure_a_reason_is_a_sentence_and_a_fix_is_an_action(id: str) -> None:
    entry = CATALOGUE[id]
    assert a_sentence(entry.title), f"{id}: the title {entry.title!r} has no finite verb"
    assert entry.why[0].isupper() or entry.why[0] == "'", f"{id}: {entry.why!r}"
    assert entry.why.endswith(".")
    assert len(entry.why.split()) > 4, f"{id}: {entry.why!r} explains nothing"
    assert an_action(entry.fix), f"{id}: the fix {entry.fix!r} begins with no imperative"


def texts(value: ast.expr, module: ast.Module) -> Iterator[str]:
    """What an argument of :func:`shiplap.errors.error` may say, as far as its literals tell."""
    match value:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            yield text
        case ast.IfExp():
            yield from texts(value.body, module)
            yield from texts(value.orelse, module)
        case ast.Name():
            for node in ast.walk(module):
                if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [value.id]:
                    yield from texts(node.value, module)


def messages(path: Path, keyword: str) -> list[tuple[int, str]]:
    """The line and text of each ``keyword=`` of the error calls in ``path``, and of each class attribute so called."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    attribute = {"what": "title"}.get(keyword, keyword)
    rows = []
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("error", "errors.error"):
            rows += [(k.value.lineno, t) for k in node.keywords if k.arg == keyword for t in texts(k.value, module)]
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Rule" for base in node.bases):
            assigned = [a for a in node.body if isinstance(a, ast.Assign) and ast.unparse(a.targets[0]) == attribute]
            rows += [(a.lineno, t) for a in assigned for t in texts(a.value, module)]
    return [(line, text) for line, text in rows if text]


@pytest.mark.parametrize(("keyword", "holds"), [("what", a_sentence), ("fix", an_action)])
def test_what_a_call_of_error_says_in_place_of_the_entry_is_held_to_the_same(keyword, holds) -> None:
    by_place = {f"{path.name}:{line}": text for path in SOURCES for line, text in messages(path, keyword)}
    assert len(by_place) > 30, "the texts are looked for in the wrong place"
    assert not {place: text for place, text in by_place.items() if not holds(text)}


@pytest.mark.parametrize("title", ["op name", "layout", "budget", "", "wrong number of dims", "no binding"])
def test_a_topic_is_no_sentence(title: str) -> None:
    assert not a_sentence(title)


@pytest.mark.parametrize("fix", ["none needed: the Python binding serves it", "see the message", "it is on the device"])
def test_a_remark_is_no_action(fix: str) -> None:
    assert not an_action(fix)
