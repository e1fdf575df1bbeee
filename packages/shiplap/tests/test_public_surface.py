"""The public surface is the one of the committed list: a change of it is seen in a review.

``SHIPLAP_WRITE_SURFACE=1 python -m pytest packages/shiplap/tests/test_public_surface.py`` writes the list anew.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import rlcompleter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.audit import Report
from shiplap.cli.app import app
from shiplap.declare.kernel import KernelKeywords
from shiplap.declare.signature import DeclarationKeywords
from shiplap.declare.template import TemplateKeywords
from shiplap.errors import CATALOGUE
from shiplap.judge import JudgeResult
from shiplap.settings import describe
from shiplap.tuning import TuneResult
from shiplap_testing.paths import REPOSITORY

LIST = Path(__file__).with_name("public_surface.txt")


def parameters(function: Any) -> str:
    """The parameters of a function without annotations and values of defaults."""
    texts = []
    for p in inspect.signature(function).parameters.values():
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        optional = "" if p.default is p.empty else "="
        only = "keyword " if p.kind is p.KEYWORD_ONLY else ""
        texts.append(f"{only}{star}{p.name}{optional}")
    return f"({', '.join(t for t in texts if t != 'self')})"


def members(cls: type) -> Iterator[str]:
    """The public names of a class and of its bases in Shiplap, with parameters where they are methods."""
    fields = {n for base in cls.__mro__ for n in vars(base).get("__annotations__", {})}
    for name in sorted({n for n in dir(cls) if not hasattr(Exception, n)} | fields):
        value = inspect.getattr_static(cls, name, None)
        if not name.startswith("_"):
            yield f"{cls.__name__}.{name}{parameters(value) if inspect.isfunction(value) else ''}"


def verbs() -> Iterator[str]:
    """Each verb of Shiplap itself with its arguments, options and exit statuses."""
    command: Any = typer.main.get_command(app)
    for name, verb in sorted(command.commands.items()):
        if not getattr(verb.callback, "__module__", "").startswith("shiplap.cli"):
            continue  # of a family that is installed
        options = sorted(
            {option for p in verb.params for option in (p.opts if p.opts[0].startswith("-") else [p.name])}
        )
        statuses = re.findall(r"^ *(\d+) ", (verb.epilog or "").partition("Exit status:")[2], re.MULTILINE)
        yield f"shiplap {name}: {' '.join(options)}; exit {' '.join(statuses)}"


def module_names() -> Iterator[tuple[str, str]]:
    """Each module of the table in the page on stability, with each name of it."""
    page = (REPOSITORY / "docs" / "stability.md").read_text(encoding="utf-8")
    table = page.partition("### Names in modules\n")[2].partition("\n## ")[0]
    for module, names in re.findall(r"^\| `(shiplap[\w.]+)` \| (.*) \|$", table, re.MULTILINE):
        yield from ((module, name) for name in re.findall(r"`(\w+)`", names))


def surface() -> list[str]:
    lines = []
    for name in sl.__all__:
        value = getattr(sl, name)
        lines.append(f"sl.{name}{parameters(value) if inspect.isfunction(value) else ''}")
    for module, name in module_names():
        value = getattr(importlib.import_module(module), name)
        assert not inspect.ismodule(value), (module, name)
        lines.append(f"{module}.{name}{parameters(value) if inspect.isfunction(value) else ''}")
    for cls in (Report, JudgeResult, TuneResult, sl.Finding, sl.ShiplapError):
        lines += members(cls)
    for keywords in (DeclarationKeywords, KernelKeywords, TemplateKeywords):
        lines.append(f"{keywords.__name__}: {', '.join(inspect.get_annotations(keywords))}")
    lines += [variable for variable, _, _ in describe()]
    return [*lines, *verbs()]


def test_the_public_surface_is_the_committed_list() -> None:
    now = "\n".join(surface()) + "\n"
    if os.environ.get("SHIPLAP_WRITE_SURFACE") == "1":
        LIST.write_text(now, encoding="utf-8")
    assert LIST.read_text(encoding="utf-8").splitlines() == now.splitlines(), (
        "the public surface has changed: set SHIPLAP_WRITE_SURFACE=1 to write the list, and change the pages with it"
    )


def test_all_lists_what_is_there_and_is_sorted() -> None:
    assert sorted(sl.__all__) == sl.__all__
    assert set(sl.__all__) <= set(dir(sl))


def test_the_page_on_the_process_lists_every_setting() -> None:
    page = (REPOSITORY / "docs" / "process.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(SHIPLAP_\w+)`", page, re.MULTILINE) == [variable for variable, _, _ in describe()]


# Words of earlier designs: no file but the changelogs has one. A word behind a dot is one of a result.
OLD_WORDS = (
    r"\blibrary=",
    r"\bstatic=",
    r"sizes=[\"']reference",
    r"(?<!all_)\bat_least\b",
    r"(?i)\bruling\b",
    r"(?:result|verdict|judged|report)\.word\b",
)
# Names for families, each with the pages that may have it.
FAMILY_WORDS = {
    r"\blaunch_program\b": ("docs/extend.md",),
    r"\btriton_launcher\b": ("docs/extend.md", "docs/design/0004-native.md", "docs/design/0006-fuse.md"),
}


def _files(*patterns: str) -> dict[str, str]:
    """The texts of the files of the repository that match, by path."""
    found = {p for pattern in patterns for p in REPOSITORY.glob(pattern)} - {Path(__file__)}
    return {str(p.relative_to(REPOSITORY)): p.read_text(encoding="utf-8") for p in sorted(found)}


PAGES = ("README.md", "packages/*/README.md", "docs/**/*.md", "examples/**/*.py", "docs/**/*.py")
SOURCES = ("packages/*/src/**/*.py", "packages/*/src/**/*.jinja", "packages/*/tests/**/*.py", "t*s/*.py")


@pytest.mark.docs
def test_nothing_has_a_word_of_earlier_designs() -> None:
    files = _files(*PAGES, *SOURCES, "benchmarks/*.py", "CONTRIBUTING.md")
    assert len(files) > 1000
    assert [(path, word) for path, text in files.items() for word in OLD_WORDS if re.search(word, text)] == []


@pytest.mark.parametrize("word", FAMILY_WORDS)
def test_pages_and_errors_have_no_name_for_families(word: str) -> None:
    found = [path for path, text in _files(*PAGES).items() if re.search(word, text)]
    assert [page for page in found if page not in FAMILY_WORDS[word]] == []
    advice = [text for e in CATALOGUE.values() for text in (e.title, e.why, e.fix)]
    assert [text for text in advice if re.search(word, text)] == []
    fixes = [
        path for path, text in _files("packages/*/src/**/*.py").items() if re.search(f'fix ?= ?"[^"]*{word}', text)
    ]
    assert fixes == []


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of a parent that is a name in a module
        return False


def mentioned(text: str) -> Iterator[tuple[str, str]]:
    """Each module of Shiplap from which a page imports a name, or that it names with an attribute in it."""
    for module, names in re.findall(r"^ *from (shiplap(?:\.\w+)*) import ([\w, ]+)", text, re.MULTILINE):
        for name in names.split(", "):
            inner = f"{module}.{name}" if is_module(f"{module}.{name}") else ""
            yield from (
                ((inner, each) for each in re.findall(rf"\b{name}\.(\w+)\(", text)) if inner else [(module, name)]
            )
    for dotted, call in re.findall(r"`(shiplap(?:\.\w+)+)(\(?)[^`]*`", text):
        module, _, name = dotted.rpartition(".")
        while not is_module(module):
            module, _, name = module.rpartition(".")
        if call or not is_module(dotted):
            yield module, name


def test_pages_import_names_that_are_public() -> None:
    """What a user copies from a page is in ``shiplap.__all__``, in the plugin API, or in the table of modules."""
    public, families = {*module_names()}, ("shiplap.plugin_api", "shiplap.rewrite.shipped", "shiplap.audit.checks")
    pages = [REPOSITORY / "README.md", *REPOSITORY.glob("packages/*/README.md"), *REPOSITORY.glob("docs/*.md")]
    pages += REPOSITORY.glob("examples/**/*.py")
    internal = set()
    for page in pages:
        for module, name in mentioned(page.read_text(encoding="utf-8")):
            if module == "shiplap":
                assert name in (*sl.__all__, "__all__", "families"), (page, name)
            elif not f"{module}.{name}".startswith(families):
                internal |= {(page.name, module, name)} - {(page.name, *known) for known in public}
    assert internal == set()


def test_an_op_lists_the_names_of_the_page_of_concepts(ns: str) -> None:
    @sl.op(f"{ns}::declared")
    def declared(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x

    names = [name for name in dir(declared) if not name.startswith("_")]
    assert len(names) <= 15
    # What completes, documents or inspects an op sees no other name, also where it looks at the classes one by one.
    completer, shown = rlcompleter.Completer({"op": declared}), set()
    while found := completer.complete("op.", len(shown)):
        shown.add(found.removeprefix("op.").rstrip("()"))
    assert {name for name in shown if not name.startswith("_")} <= {*names}
    for cls in type(declared).__mro__:
        assert {name for name in dir(cls) if not name.startswith("_")} <= {*names}, cls
    assert {name for name, _ in inspect.getmembers(declared) if not name.startswith("_")} == {*names}
    assert all(hasattr(declared, name) for name in names)
    page = (REPOSITORY / "docs" / "concepts.md").read_text(encoding="utf-8")
    section = page.partition("## The names of an op\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in rows))) == names
