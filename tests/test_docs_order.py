"""Pages are sorted and linked as a stranger needs them: the navigation, links, states of notes."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import yaml

from shiplap_testing.paths import REPOSITORY

pytestmark = pytest.mark.docs

DOCS = REPOSITORY / "docs"
README = REPOSITORY / "README.md"
NOTES = sorted((DOCS / "design").glob("*.md"))
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
READERS = ("Start here", "Kernel authors", "Model engineers", "Sparse 3D", "New devices", "Judges of kernels")
SECTIONS = (*READERS, "Reference", "Explanation", "Contributing")
CORE = REPOSITORY / "packages" / "shiplap" / "src" / "shiplap"


def name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def without_code(text: str) -> str:
    return re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """The targets of a page's links: ``kernel[grid](...)`` in code is none."""
    prose = re.sub(r"(?<!\[)`[^`\n]+`(?!\])", "", without_code(text))
    return re.findall(r"\]\(([^)\s]+)\)", prose)


# ---------------------------------------------------------------------------------------------------------- order


def navigation() -> dict[str, list[str]]:
    """The pages of each section of ``mkdocs.yml``, in order."""
    listed: list[dict[str, Any]] = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text("utf-8"))["nav"]
    sections = {title: part for entry in listed for title, part in entry.items() if isinstance(part, list)}
    return {title: [page for entry in part for page in entry.values()] for title, part in sections.items()}


def test_every_page_is_in_one_section_of_the_navigation() -> None:
    sections = navigation()
    assert tuple(sections)[: len(SECTIONS)] == SECTIONS
    pages = [page for part in sections.values() for page in part]
    assert len(pages) == len(set(pages))
    assert all((DOCS / page).is_file() for page in pages)
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= set(pages)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_index_lists_the_pages_of_each_section(section: str) -> None:
    text = (DOCS / "index.md").read_text("utf-8")
    part = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert set(navigation()[section]) <= set(re.findall(r"\]\(([\w./-]+\.md)", part))


# ---------------------------------------------------------------------------------------------------------- links


def anchors(text: str) -> set[str]:
    """The places of a page that links may name, as Python-Markdown and GitHub name headings."""
    names = set(re.findall(r"<\w+ id=['\"]([^'\"]+)['\"]", text))
    for heading in re.findall(r"^#+ +(.+?) *$", without_code(text), re.MULTILINE):
        plain = unicodedata.normalize("NFKD", re.sub(r"[`*]", "", heading)).encode("ascii", "ignore").decode()
        names.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return names


@pytest.mark.parametrize("page", [*PAGES, *sorted((REPOSITORY / "packages").glob("*/README.md"))], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page.read_text("utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text("utf-8")), f"{name(page)}: {link}"


def test_anchors_are_those_of_the_headings() -> None:
    assert anchors("# A `b` c\n\n## What *proven* means\n\n```c\n# no heading\n```\n<a id='x'></a>\n") == {
        "a-b-c",
        "what-proven-means",
        "x",
    }


# ---------------------------------------------------------------------------------------------------------- notes


@pytest.mark.parametrize("note", NOTES, ids=name)
def test_a_design_note_says_its_state(note: Path) -> None:
    number = note.name[:4]
    title, empty, state = note.read_text("utf-8").splitlines()[:3]
    assert title.startswith(f"# {number}. ")
    assert empty == ""
    assert re.match(r"> \*\*State: (current|superseded by .+|partly superseded by .+)\.\*\* \w", state), state


@pytest.mark.parametrize("page", [DOCS / "architecture.md", *NOTES], ids=name)
def test_paths_on_a_page_about_the_code_exist(page: Path) -> None:
    """Each path with a folder in it is one of the repository, or of the sources of one package."""
    text = page.read_text("utf-8")
    if "State: superseded" in text:
        return
    roots = [REPOSITORY, *(REPOSITORY / "packages").glob("*"), *(REPOSITORY / "packages").glob("*/src/*")]
    roots += [f for root in (REPOSITORY / "packages").glob("*/src/*") for f in (root / "csrc", root / "include")]
    roots += (REPOSITORY / "packages").glob("*/src/*/include/shiplap")
    paths = set(re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|h|cpp|jinja|json|toml|yaml))`", text))
    gone = [path for path in sorted(paths) if not any((root / path).exists() for root in roots)]
    assert gone == []


def test_the_architecture_page_has_every_room() -> None:
    text = (DOCS / "architecture.md").read_text("utf-8")
    rooms = {p.name for p in CORE.iterdir() if p.is_dir() and (p / "__init__.py").is_file()}
    assert rooms
    assert [room for room in sorted(rooms) if f"| `{room}/` |" not in text] == []
    packages = {p.name for p in (REPOSITORY / "packages").iterdir() if (p / "pyproject.toml").is_file()}
    assert [package for package in sorted(packages) if f"| `packages/{package}` |" not in text] == []
