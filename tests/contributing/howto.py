"""Follow a how-to of ``docs/contributing`` to the letter, on a copy of the repository.

A line above a code block says what to do with the block::

    **`packages/a/b.py`**, a new file:
    **`packages/a/b.py`**, at the end:
    **`packages/a/b.py`**, after the line that begins with `X = (`:
    **`packages/a/b.py`**, before the line that begins with `X = (`:
    **`packages/a/b.py`**, instead of the line that begins with `X = (`:
    **`packages/a/b.py`**, delete these lines:

A ``console`` block holds commands after ``$``, which run in the root of the repository. The lines below a command are
parts of what it prints, in this order; ``...`` alone stands for anything. A ``console`` block is not run if the line
above it begins with ``*The test of this page leaves this out``. A block of any other language without a line of this
kind is an illustration.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shiplap_testing.forked import python
from shiplap_testing.paths import REPOSITORY

PAGES = {page.stem: page for page in sorted((REPOSITORY / "docs" / "contributing").glob("*.md"))}

_RULE = r"\*\*`(?P<file>[^`]+)`\*\*, (?P<rule>[^\n]+):"
_OUT = r"(?P<out>\*The test of this page leaves this out[^\n]+\*)"
_FENCE = re.compile(
    rf"^(?:(?:{_RULE}|{_OUT})\n\n)?^(?P<fence>`{{3,}})(?: {{ \.)?(?P<language>\w+)(?: }})?\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_PLACE = re.compile(
    r"(?P<how>after|before|instead of) the line that begins with (?P<tick>`+) ?(?P<line>.+?) ?(?P=tick)"
)


@dataclass(frozen=True)
class Command:
    """A line after ``$``, and what it has to print."""

    line: str
    printed: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """A code block of a page: its language and text, the file that it changes and how, and whether it is left out."""

    language: str
    text: str
    file: str = ""
    rule: str = ""
    left_out: bool = False

    @property
    def commands(self) -> tuple[Command, ...]:
        """What to run; nothing where the block is no console, or is left out."""
        if self.language != "console" or self.left_out:
            return ()
        parts = re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]
        return tuple(Command(part.splitlines()[0], tuple(part.splitlines()[1:])) for part in parts)


def blocks(page: Path) -> Iterator[Block]:
    """The code blocks of a page in their order."""
    for fence in _FENCE.finditer(page.read_text(encoding="utf-8")):
        text = fence["text"].replace(";--8<--", "--8<--")  # escaped on the page, or MkDocs would obey
        yield Block(fence["language"], text, fence["file"] or "", fence["rule"] or "", bool(fence["out"]))


def listed(root: Path) -> list[str]:
    """The files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (root / name).is_file()]


class Copy:
    """A copy of the repository in ``root``, and which of its files were changed by whom."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in listed(REPOSITORY):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, root / name)
        (root / ".venv").symlink_to(sys.prefix)
        for command in ("init", "add --all", "-c user.name=me -c user.email=me@here commit -m start"):
            self._git(*command.split())
        self.written: set[str] = set()
        self.generated: set[str] = set()

    def restore(self) -> None:
        """Make the copy what it was, and forget what was changed."""
        self._git("reset", "--hard", "--quiet")
        self._git("clean", "-d", "-f", "-x", "--quiet")
        shutil.rmtree(self.site, ignore_errors=True)
        self.written, self.generated = set(), set()

    def follow(self, page: Path) -> None:
        """Apply the blocks of a page and run its commands, in the order in which they stand on the page."""
        for block in blocks(page):
            if block.commands:
                before = self._changed()
                for command in block.commands:
                    self.run(command)
                self.generated |= self._changed() - before
            elif block.file:
                self.write(block)

    def write(self, block: Block) -> None:
        """Do with a block what the line above it says."""
        name, rule = block.file, block.rule
        file = self.root / name
        self.written.add(name)
        if rule == "a new file":
            assert not file.exists(), f"{name} is there already: say where in it the block goes"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
            return
        text = file.read_text(encoding="utf-8")
        if rule == "at the end":
            text += block.text
        elif rule == "delete these lines":
            assert text.count(block.text) == 1, f"{name} has not these lines once:\n{block.text}"
            text = text.replace(block.text, "")
        else:
            text = _placed(text, block.text, rule, name)
        file.write_text(text, encoding="utf-8")

    def run(self, command: Command) -> None:
        """Run a command and compare what it prints.

        Raises:
            AssertionError: the command failed, or it did not print what the page says.
        """
        done = self._process(command.line)
        printed = done.stdout + done.stderr
        assert done.returncode == 0, f"$ {command.line}\n{printed}"
        at = 0
        for line in command.printed:
            if line.strip() != "...":
                place = printed.find(line.strip(), at)
                assert place >= 0, f"$ {command.line}\ndid not print, after what came before: {line}\n{printed}"
                at = place + len(line.strip())

    def _process(self, line: str) -> subprocess.CompletedProcess[str]:
        """Python starts as a fork of a process that has imported torch; everything else starts as it would for you."""
        if line == "make install":
            return self._install()
        program, *arguments = shlex.split(line)
        if program == ".venv/bin/python":
            return python(*arguments, cwd=self.root, env=self._environment())
        if program == ".venv/bin/shiplap":
            return python("-m", "shiplap.cli", *arguments, cwd=self.root, env=self._environment())
        command = ["bash", "-c", line]
        return subprocess.run(
            command, cwd=self.root, env=self._environment(), capture_output=True, text=True, check=False
        )

    def _install(self) -> subprocess.CompletedProcess[str]:
        """In place of ``make install``, which would change this environment: what the page has added, in a folder."""
        known = {path.parent.name for path in REPOSITORY.glob("packages/*/pyproject.toml")}
        new = [p.parent for p in self.root.glob("packages/*/pyproject.toml") if p.parent.name not in known]
        pip = ["pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        command = [sys.executable, "-m", *pip, "--target", str(self.site), *map(str, new)]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)

    @property
    def site(self) -> Path:
        """Where packages are installed that the environment of the tests does not have."""
        return self.root.parent / "site"

    def _environment(self) -> dict[str, str]:
        """The packages are those of the copy, but for families with compiled kernels: the copy has no libraries."""
        projects = (path.parent for path in self.root.glob("packages/*/pyproject.toml"))
        sources = sorted(str(p / "src") for p in projects if not (p / "CMakeLists.txt").is_file())
        installed = [str(self.site)] if self.site.is_dir() else []
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*installed, *sources]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SHIPLAP_CACHE_DIR": str(self.root.parent / "cache"),
            "SHIPLAP_TEST_ROOT": str(self.root),
        }

    def _changed(self) -> set[str]:
        """The files that differ from the repository; where the copy has none, the file was deleted."""
        status = self._git("status", "--porcelain", "--no-renames", "--untracked-files=all", "-z")
        return {entry[3:] for entry in status.split("\0") if entry}

    def _git(self, *arguments: str) -> str:
        """What git says of the copy, whatever its user has configured."""
        command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "commit.gpgsign=false", *arguments]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True).stdout


def _placed(text: str, added: str, rule: str, name: str) -> str:
    """``text`` with ``added`` at the only line that begins as ``rule`` says."""
    match = _PLACE.fullmatch(rule)
    assert match is not None, f"{name}: no rule for {rule!r}"
    lines = text.splitlines(keepends=True)
    at = [i for i, line in enumerate(lines) if line.strip().startswith(match["line"])]
    assert len(at) == 1, f"{name}: {len(at)} lines begin with {match['line']!r}"
    first, last = at[0] + (match["how"] == "after"), at[0] + (match["how"] != "before")
    return "".join([*lines[:first], added, *lines[last:]])
