"""Count the comments that exempt code from the formatter, the linter and the type checker, and hold them to a budget.

Counted in the sources of all packages: ``fmt: off`` and ``skip``, ``noqa``, ``type: ignore``, ``mypy:``, ``ruff:``,
``isort:``, ``pylint:`` and ``pragma:`` in comments of Python, ``clang-format off`` and ``NOLINT`` in C++ and in
templates. Texts do not count: a draft that is written for a user may hold one. ``size-budget.toml`` has the number, as
``limits.exemptions``.

Usage: ``exemptions.py [ROOT]``, by default this repository; exit status 1 if there are more than the budget grants, or
an ignored type error that does not say which.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

PYTHON = re.compile(r"#\s*(fmt:|noqa|type:\s*ignore|mypy:|ruff:|isort:|pylint:|pragma:)")
BARE = re.compile(r"#\s*(type:\s*ignore(?!\[)|noqa(?!:))")
CPP = re.compile(r"clang-format off|NOLINT")
CPP_FILES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".jinja"}


def comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def exemptions(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each exemption in ``file``."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        yield from ((line, text) for line, text in comments(source) if PYTHON.search(text))
    else:
        yield from ((i, line.strip()) for i, line in enumerate(source.splitlines(), 1) if CPP.search(line))


def main(arguments: list[str]) -> int:
    """Print what is wrong; return 1 if anything is, else 0."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]
    budget = tomllib.loads((root / "size-budget.toml").read_text(encoding="utf-8"))["limits"]["exemptions"]
    files = [f for f in sorted(root.glob("packages/*/src/**/*")) if f.suffix in {".py", *CPP_FILES}]
    listed = [(f.relative_to(root).as_posix(), *e) for f in files if "CMakeFiles" not in f.parts for e in exemptions(f)]
    bare = [f"{path}:{line}: say what is exempted: {text}" for path, line, text in listed if BARE.search(text)]
    lines = bare
    if len(listed) > budget:
        lines += [f"{path}:{line}: {text}" for path, line, text in listed]
        lines += [f"{len(listed)} exemptions, the budget is {budget}"]
    print("\n".join(lines), end="\n" if lines else "")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
