"""CONTRIBUTING.md and the how-tos name only files, folders, links and targets of make that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.contributing.howto import PAGES, blocks

from shiplap_testing.paths import REPOSITORY

pytestmark = pytest.mark.docs

CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
EVERY = [CONTRIBUTING, *PAGES.values()]
each = pytest.mark.parametrize("page", EVERY, ids=lambda page: page.stem)


def prose(page: Path) -> str:
    """The text without blocks of code."""
    return re.sub(r"^(`{3,}).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@each
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose(page)):
        assert (page.parent / target).is_file(), target


@each
def test_files_and_folders_exist(page: Path) -> None:
    """But those that the page itself adds. A command in the text names some, too."""
    added = tuple(block.file for block in blocks(page) if block.file)
    words = [word for code in re.findall(r"`([^`\n]+)`", prose(page)) for word in code.split()]
    place = re.compile(r"(?:packages|docs|tests|tools|benchmarks|examples|\.ci|\.github)(?:/[\w.+-]+)*/?")
    places = [word for word in words if place.fullmatch(word)]
    for place in places:
        if not any(file.startswith(place) for file in added):
            assert (REPOSITORY / place).exists(), place


@each
def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:`|\$ )make ((?:[a-z-]+ ?)+)", page.read_text(encoding="utf-8"))
    assert {target for line in named for target in line.split()} <= targets


def test_every_how_to_is_linked() -> None:
    linked = re.findall(r"\(docs/contributing/([\w-]+)\.md\)", CONTRIBUTING.read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(PAGES)
    assert len(PAGES) == 11


def test_every_package_has_its_place_on_the_map() -> None:
    """On the page to which CONTRIBUTING.md sends its reader."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert {p.name for p in (REPOSITORY / "packages").iterdir()} <= set(
        re.findall(r"^\| `packages/([\w-]+)`", text, re.M)
    )


def test_every_part_of_the_core_has_a_task() -> None:
    """On the page to which CONTRIBUTING.md sends its reader."""
    assert "(docs/architecture.md)" in CONTRIBUTING.read_text(encoding="utf-8")
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    core = REPOSITORY / "packages" / "shiplap" / "src" / "shiplap"
    parts = {p.name for p in core.iterdir() if (p / "__init__.py").is_file()}
    assert parts <= set(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE))
