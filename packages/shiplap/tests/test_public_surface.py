"""The public surface is the one of the committed list: a change of it is seen in a review.

``SHIPLAP_WRITE_SURFACE=1 python -m pytest packages/shiplap/tests/test_public_surface.py`` writes the list anew.
"""

from __future__ import annotations

import inspect
import os
import re
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


def surface() -> list[str]:
    lines = []
    for name in sl.__all__:
        value = getattr(sl, name)
        lines.append(f"sl.{name}{parameters(value) if inspect.isfunction(value) else ''}")
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


# Words of earlier designs, and names for families only, each with the pages that may have it.
OLD_WORDS = {
    r"\blibrary=": (),
    r"\bstatic=": (),
    r'sizes="reference"': (),
    r"(?<!all_)at_least\b": (),
    r"\.word\b": (),
    r"\bRuling\b": (),
    r"\blaunch_program\b": ("docs/extend.md",),
    r"\btriton_launcher\b": ("docs/extend.md", "docs/design/0004-native.md", "docs/design/0006-fuse.md"),
}


@pytest.mark.parametrize("word", OLD_WORDS)
def test_pages_and_examples_have_no_word_of_earlier_designs(word: str) -> None:
    pages = [REPOSITORY / "README.md", *REPOSITORY.glob("packages/*/README.md"), *REPOSITORY.glob("docs/**/*.md")]
    pages += [*REPOSITORY.glob("examples/**/*.py"), *REPOSITORY.glob("docs/**/*.py")]
    assert len(pages) > 60
    found = [str(page.relative_to(REPOSITORY)) for page in pages if re.search(word, page.read_text(encoding="utf-8"))]
    assert [page for page in found if page not in OLD_WORDS[word]] == []


def test_an_op_lists_the_names_of_the_page_of_concepts(ns: str) -> None:
    @sl.op(f"{ns}::declared")
    def declared(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x

    names = [name for name in dir(declared) if not name.startswith("_")]
    assert len(names) <= 15
    assert all(hasattr(declared, name) for name in names)
    page = (REPOSITORY / "docs" / "concepts.md").read_text(encoding="utf-8")
    section = page.partition("## The names of an op\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in rows))) == names
