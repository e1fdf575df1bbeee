"""Each how-to for contributors is followed to the letter on a copy of the repository."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from tests.contributing.howto import PAGES, Command, Copy, blocks

from shiplap import __version__
from shiplap_testing.effort import sampled
from shiplap_testing.paths import REPOSITORY

pytestmark = pytest.mark.docs

# The most files that a contributor writes, and the most that a command of the page renews.
MOST = {
    "audit-check": (3, 1),
    "backend-overload": (2, 1),
    "cli-option": (3, 1),
    "cli-verb": (3, 1),
    "docs-page": (3, 0),
    "dtype": (2, 1),
    "error": (4, 1),
    "kernel-family": (8, 3),
    "rewrite": (5, 0),
    "torch-version": (3, 0),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("contributing") / "copy")


@pytest.fixture
def copy(whole: Copy) -> Iterator[Copy]:
    """The copy as it is before anybody has changed it."""
    yield whole
    whole.restore()


def production(files: set[str]) -> set[str]:
    """The files that a user installs and a person wrote."""
    return {f for f in files if "/src/" in f and not f.startswith("packages/shiplap-testing/")}


def test_every_page_is_followed() -> None:
    assert {*PAGES} == {*MOST, "release"}


@pytest.mark.parametrize("page", [*MOST, "release"])
def test_the_blocks_of_every_page_fit(copy: Copy, page: str) -> None:
    """Without the commands: each block has its place in the repository, and what it makes of a module is Python that
    is formatted as ``make lint`` demands."""
    for block in blocks(PAGES[page]):
        file = copy.root / block.file
        if block.file and (block.rule == "a new file" or file.exists()):  # else a command of the page makes it
            copy.write(block)
            if file.suffix == ".py":
                ast.parse(file.read_text(encoding="utf-8"), str(file))
    if modules := sorted(f for f in copy.written if f.endswith(".py")):
        copy.run(Command(f".venv/bin/ruff format --diff {shlex.join(modules)}", ("already formatted",)))


# Their commands run audits, compilers and tools for 10 s and more.
LONG = ("audit-check", "backend-overload", "kernel-family", "cli-verb", "docs-page", "torch-version")


@pytest.mark.parametrize("page", sampled(MOST, long=LONG))
def test_a_page_works_to_the_letter(copy: Copy, page: str) -> None:
    copy.follow(PAGES[page])
    written, generated = MOST[page]
    assert len(copy.written) <= written
    assert len(copy.generated) <= generated
    told = PAGES[page].read_text(encoding="utf-8")
    named = {file for file in copy.written | copy.generated if f"`{file}`" in told}
    assert named >= copy.written | {file for file in copy.generated if "/shiplap-toy/" not in file}
    if page in ("audit-check", "cli-verb", "dtype", "torch-version"):
        assert len(production(copy.written)) == 1
    if page == "kernel-family":
        core = {f for f in copy.written | copy.generated if f.startswith(("packages/shiplap/", "packages/shiplap-h"))}
        assert core == set()
        outside = {f for f in copy.written if not f.startswith("packages/shiplap-toy/")}
        assert outside == {"pyproject.toml", "docs/architecture.md"}


def test_a_release_is_made_to_the_letter(copy: Copy) -> None:
    """Nobody edits a file: the tool changes versions and changelogs."""
    copy.follow(PAGES["release"])
    assert copy.written == set()
    others = {PurePosixPath(f).name for f in copy.generated}
    assert others == {"CHANGELOG.md", "pyproject.toml", "__init__.py", "release.md", "kernel-family.md"}
    left = [
        f
        for f in copy.root.glob("packages/*/pyproject.toml")
        if f'"{__version__}"' in f.read_text() or f"=={__version__}" in f.read_text()
    ]
    assert left == []
    page = (copy.root / "docs" / "contributing" / "release.md").read_text()
    assert page != PAGES["release"].read_text(), "the page shows the next release"
    assert f"{__version__} ->" not in page


def test_a_release_goes_forwards(copy: Copy) -> None:
    for version, reason in (("0.0.9", f"0.0.9 does not come after {__version__}"), ("next", "next is no version")):
        page = copy.root / "page.md"
        page.write_text(f"```console\n$ .venv/bin/python tools/release.py {version}\n```\n")
        with pytest.raises(AssertionError, match=reason):
            copy.follow(page)


# --- a page that is wrong is noticed ----------------------------------------------------------------------------------

WRONG = {
    "a command that fails": ("```console\n$ grep -q nothing-like-this README.md\n```\n", "grep"),
    "a text that is not printed": ("```console\n$ echo one\ntwo\n```\n", "did not print"),
    "a text in another order": ("```console\n$ echo one two\ntwo\none\n```\n", "did not print"),
    "a new file that is there": ("**`README.md`**, a new file:\n\n```text\nx\n```\n", "is there already"),
    "a line that is not there": (
        "**`README.md`**, after the line that begins with `zzz`:\n\n```text\nx\n```\n",
        "0 lines begin",
    ),
    "a rule that is none": ("**`README.md`**, somewhere:\n\n```text\nx\n```\n", "no rule"),
    "lines that are not there": ("**`README.md`**, delete these lines:\n\n```text\nzzz\n```\n", "has not these lines"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_page_is_noticed(copy: Copy, tmp_path: Path, what: str) -> None:
    text, named = WRONG[what]
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError, match=named):
        copy.follow(page)


def test_blocks_are_put_where_the_title_says(copy: Copy, tmp_path: Path) -> None:
    file = copy.root / "list.txt"
    file.write_text("one\n  'two'\nthree\n")
    page = tmp_path / "page.md"
    rules = {
        "after the line that begins with `one`": "1.5\n",
        "before the line that begins with `three`": "2.5\n",
        "instead of the line that begins with `'two'`": "2\n",
        "at the end": "4\n",
    }
    page.write_text("".join(f"**`list.txt`**, {rule}:\n\n```text\n{text}```\n\n" for rule, text in rules.items()))
    assert len(list(blocks(page))) == len(rules)
    copy.follow(page)
    assert file.read_text() == "one\n1.5\n2\n2.5\nthree\n4\n"
    assert copy.written == {"list.txt"}


def test_the_repository_is_left_alone(copy: Copy, tmp_path: Path) -> None:
    before = (REPOSITORY / "LICENSE").read_text()
    page = tmp_path / "page.md"
    page.write_text("**`LICENSE`**, at the end:\n\n```text\nmore\n```\n")
    copy.follow(page)
    assert (REPOSITORY / "LICENSE").read_text() == before
    assert (copy.root / "LICENSE").read_text() == before + "more\n"
