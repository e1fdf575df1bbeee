"""Code on pages runs, or is marked as a fragment; commands have the options that pages give them.

A fenced block of Python or of a console in ``docs`` or in a README, those of distributions included, is one of these:

* snippets of files that tests run: ``--8<-- "examples/first_op.py:declare"``;
* marked by the line above it, ``<!-- tested: FILE::TEST -->``, with the test that runs it;
* marked by the line above it, ``<!-- fragment: WHY -->``, because nobody can run it as it stands;
* without a mark, and then it is run here.

Pages of ``docs/contributing`` are followed to the letter, on a copy of the repository, by tests of their own.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shiplap_testing.effort import sampled
from shiplap_testing.forked import python
from shiplap_testing.paths import REPOSITORY

pytestmark = pytest.mark.docs

FOLLOWED = REPOSITORY / "docs" / "contributing"
READMES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "packages").glob("*/README.md"))]
PAGES = [*READMES, *(p for p in sorted((REPOSITORY / "docs").rglob("*.md")) if p.parent != FOLLOWED)]
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?(?P<fence>`{3,})[ {.]*(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
PYTHON, CONSOLE = ("python", "py"), ("console", "bash", "sh", "shell")
SNIPPET = re.compile(r'^ *--8<-- "([^":]+)(?::\w+)?"$')
SHOWN = re.compile(r'^ *--8<-- "([^":]+)(?::(\w+))?"$', re.MULTILINE)
SOURCES = ("c", "cpp", "yaml", "toml")  # beside Python
WIDE = {  # shown as they are: a template that ships, and code that Inductor wrote
    "packages/shiplap-dense/src/shiplap_dense/mm.triton.jinja",
    "docs/assets/relu_mm.txt",
}
PROJECTS = {  # built and used as a whole
    "examples/wheel/": "packages/shiplap/tests/packaging/test_wheel.py",
    "examples/runtime-tinyc/discrete/": "packages/shiplap-backend/tests/backend/test_discrete.py",
}
GENERATED = {"docs/assets/relu_mm.txt"}  # compared with what Inductor generates: test_seed_source.py


@dataclass(frozen=True)
class Block:
    """One fenced block. ``kind`` is the word of its mark, ``told`` what follows it."""

    page: str
    line: int
    language: str
    code: str
    kind: str
    told: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def snippets(self) -> list[str]:
        """The files that the block shows, if it shows nothing else."""
        matches = [SNIPPET.match(line) for line in self.code.splitlines() if line.strip()]
        return [match[1] for match in matches if match] if all(matches) else []


def blocks_of(text: str, page: str = "page.md") -> list[Block]:
    blocks = []
    for match in BLOCK.finditer(text):
        kind, _, told = (match["mark"] or "").partition(": ")
        kind = kind if kind in ("tested", "fragment") else ""
        line = text.count("\n", 0, match.start("fence")) + 1
        blocks.append(Block(page, line, match["language"], match["code"], kind, told))
    return blocks


BLOCKS = [b for p in PAGES for b in blocks_of(p.read_text("utf-8"), p.relative_to(REPOSITORY).as_posix())]
CODE = [block for block in BLOCKS if block.language in PYTHON + CONSOLE]
UNMARKED = [block for block in CODE if not block.kind and not block.snippets]
TESTS = "\n".join(p.read_text("utf-8") for p in (REPOSITORY / "tests").glob("*.py"))
RUNTIMES = (REPOSITORY / "packages/shiplap-backend/tests/backend/examples.py").read_text("utf-8")


def name(block: Block) -> str:
    return block.where


def test_blocks_are_found_as_they_are_written() -> None:
    text = (
        "<!-- fragment: no GPU -->\n```python\na\n```\n\n"
        '``` { .python }\n--8<-- "examples/a.py:b"\n```\n'
        "```console\n$ x\n```\n"
    )
    marked, snippet, console = blocks_of(text)
    assert (marked.language, marked.kind, marked.told, marked.code) == ("python", "fragment", "no GPU", "a\n")
    assert (snippet.language, snippet.kind, snippet.snippets) == ("python", "", ["examples/a.py"])
    assert (console.language, console.kind, console.snippets, console.line) == ("console", "", [], 9)
    fences = [line for p in PAGES for line in p.read_text("utf-8").splitlines() if line.startswith("```")]
    assert len(fences) == 2 * len(BLOCKS), "a fence that this test does not read"
    assert len(CODE) > 80


def test_code_fits_into_the_columns_of_a_page() -> None:
    """Of Python, and of commands: what a program prints is as wide as it is."""
    written = [block for block in CODE if "what the command writes" not in block.told]
    lines = [
        (block.where, line)
        for block in written
        for line in block.code.splitlines()
        if line.startswith("$ ") or (block.language in PYTHON and not SNIPPET.match(line))
    ]
    assert len(lines) > 600
    assert [each for each in lines if len(each[1]) > 88] == []


def test_shown_files_fit_into_the_columns_of_a_page() -> None:
    """Code of other languages, and the shown parts of files: on the pages of users, not on those of contributors."""
    lines = []
    for block in (b for b in BLOCKS if not b.page.startswith("docs/design/")):
        shown = block.code.splitlines() if block.language in SOURCES else []
        for file, section in SHOWN.findall(block.code):
            if file not in WIDE:
                shown += section_of((REPOSITORY / file).read_text("utf-8"), section)
        lines += [(block.where, line) for line in shown if not SNIPPET.match(line)]
    assert len(lines) > 1500
    assert [each for each in lines if len(each[1]) > 88] == []


def test_wider_output_wraps() -> None:
    """The site shows every column of what a program prints, by a style sheet that the build includes."""
    sheets = re.search(r"^extra_css: \[(.*)\]$", (REPOSITORY / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sheets is not None
    styles = "".join((REPOSITORY / "docs" / sheet.strip()).read_text("utf-8") for sheet in sheets[1].split(","))
    assert re.search(r"\.md-typeset pre > code \{[^}]*white-space: pre-wrap;", styles)


def test_links_stay_among_the_pages() -> None:
    """A strict build refuses other links. The lines of records are written anew when the pages are built."""
    docs = REPOSITORY / "docs"
    links = [
        (page.relative_to(docs).as_posix(), target)
        for page in docs.rglob("*.md")
        for line in page.read_text("utf-8").splitlines()
        if not line.startswith("*Measured ")
        for target in re.findall(r"\]\((\.\.?/[^)#]+)", line)
        if not (page.parent / target).resolve().is_relative_to(docs)
    ]
    assert links == []


def section_of(text: str, section: str) -> list[str]:
    """The lines between the marks of ``section``, or all lines."""
    if section:
        text = text.partition(f"[start:{section}]")[2].partition(f"[end:{section}]")[0]
        assert text, section
    return text.splitlines()


@pytest.mark.parametrize("block", [b for b in CODE if b.snippets], ids=name)
def test_a_snippet_is_of_a_file_that_tests_run(block: Block) -> None:
    for file in block.snippets:
        path = REPOSITORY / file
        assert path.is_file(), file
        example = path.parent.name == "examples" and f"def test_{path.stem}(" in TESTS
        example |= any(file.startswith(home) and (REPOSITORY / test).is_file() for home, test in PROJECTS.items())
        example |= path.parents[1].name == "examples" and path.parent.name in RUNTIMES
        assert example or "tests" in path.parts or file in GENERATED, f"{block.where}: no test runs {file}"


@pytest.mark.parametrize("block", [b for b in CODE if b.kind == "tested"], ids=name)
def test_a_named_test_exists(block: Block) -> None:
    file, _, test = block.told.partition("::")
    assert (REPOSITORY / file).is_file(), f"{block.where}: {file}"
    assert f"\ndef {test}(" in (REPOSITORY / file).read_text("utf-8"), f"{block.where}: {block.told}"


@pytest.mark.parametrize("block", [b for b in CODE if b.kind == "fragment"], ids=name)
def test_a_fragment_says_why_and_is_python(block: Block) -> None:
    assert block.told, f"{block.where}: <!-- fragment: why nobody can run it -->"
    if block.language in PYTHON:
        ast.parse(block.code)


# The long page compiles and proves three rewrites, of which rewrite/test_published.py has samples.
@pytest.mark.parametrize(
    "page",
    sampled(sorted({block.page for block in UNMARKED}), 2, long=["docs/rewrite-published.md"]),
)
def test_pages_run(page: str, tmp_path: Path) -> None:
    """Python of a page runs in one process, from the top to the bottom; each command in one of its own."""
    of_page = [block for block in UNMARKED if block.page == page]
    if source := "\n\n".join(block.code for block in of_page if block.language in PYTHON):
        (tmp_path / "page.py").write_text(source, "utf-8")
        done = python(tmp_path / "page.py")
        assert done.returncode == 0, f"run it, or mark it as a fragment: {page}\n{done.stderr}"
    for block in of_page:
        for words in commands(block):
            assert words[0] == "shiplap", f"{block.where}: only commands of shiplap are run here; mark it as a fragment"
            done = python("-m", "shiplap.cli", *words[1:])
            assert done.returncode == 0, f"{block.where}: {words}\n{done.stdout}{done.stderr}"


def commands(block: Block) -> Iterator[list[str]]:
    """The command lines of a block for a console, as words, without assignments to variables."""
    if block.language not in CONSOLE:
        return
    for line in re.findall(r"^\$ (.*)$", block.code.replace("\\\n", ""), re.MULTILINE):
        for part in re.split(r" && ", line):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


@pytest.mark.parametrize("block", [b for b in BLOCKS if any(w[0] == "shiplap" for w in commands(b))], ids=name)
def test_commands_have_these_options(block: Block) -> None:
    """Of fragments, too: a page must not show an option that is not there."""
    for words in commands(block):
        if words[0] == "shiplap":
            command, rest = verb(words[1:])
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
            assert given <= known | {"--help"}, f"{block.where}: {' '.join(words)}"


def verb(words: list[str]) -> tuple[Any, list[str]]:
    """The command that ``words`` name, and what they give it; what follows ``--`` is another program's."""
    import typer

    from shiplap.cli.app import app
    from shiplap.cli.families import load_families

    load_families()
    command: Any = typer.main.get_command(app)
    while hasattr(command, "get_command"):
        part = command.get_command(None, words[0])
        assert part is not None, f"no such command: {words}"
        command, words = part, words[1:]
    return command, words[: words.index("--")] if "--" in words else words
