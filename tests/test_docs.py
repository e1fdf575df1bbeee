"""Pages that are written by a tool are as the tool would write them now, and pages say only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from shiplap_testing.forked import python
from shiplap_testing.paths import REPOSITORY

pytestmark = pytest.mark.docs


def test_generated_pages_are_current() -> None:
    tool = REPOSITORY / "tools" / "generate_docs.py"
    done = python(tool, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs").rglob("*.md")), ids=lambda p: p.stem)
def test_snippets_exist(page: Path) -> None:
    assert "--8 <" not in page.read_text(), "a formatter took a snippet for Python: write ``` { .python }"
    for file, name in re.findall(r'--8<-- "([^":]+):(\w+)"', page.read_text()):
        text = (REPOSITORY / file).read_text()
        assert f"--8<-- [start:{name}]" in text, f"{page.name}: {file}:{name}"
        assert f"--8<-- [end:{name}]" in text, f"{page.name}: {file}:{name}"


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs").rglob("*.md")), ids=lambda p: p.stem)
def test_ids_and_verbs_exist(page: Path) -> None:
    from shiplap.cli.app import app
    from shiplap.cli.families import load_families
    from shiplap.errors import CATALOGUE

    load_families()  # with them, and with the verbs of the app, come errors of their own
    text = page.read_text()
    added = set(re.findall(r'^ +"(SL\d{3})",$', text, re.MULTILINE))  # by the guide that adds an error
    assert set(re.findall(r"\bSL\d{3}\b", text)) - added <= CATALOGUE.keys()
    verbs = {command.name for command in (*app.registered_commands, *app.registered_groups)}
    assert set(re.findall(r"^\$ shiplap (\w+)", text, re.MULTILINE)) <= verbs


def named(nav: object) -> set[str]:
    """The pages that a navigation names, at any depth."""
    if isinstance(nav, str):
        return {nav}
    return {page for part in (nav.values() if isinstance(nav, dict) else nav) for page in named(part)}  # type: ignore[attr-defined]


def test_the_navigation_has_every_page_and_no_other() -> None:
    """The hook of tools/mkdocs_nav.py adds the design notes."""
    text = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    docs = REPOSITORY / "docs"
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    notes = {page for page in pages if page.startswith("design/")}
    assert named(yaml.safe_load(text)) == pages - notes
