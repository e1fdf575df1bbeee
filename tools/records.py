"""The recorded measurements: of which a measured file has changed since, and how to measure them again.

A record (``benchmarks/results/NAME.json``, written by ``benchmarks/NAME.py``) says on which device, on which day, at
which commit and of which files it was measured. It is stale if git has a change of one of these files after that
commit. Comments and docstrings of Python do not count. It is listed here, the documentation says so beside its
figures, and no test fails.

    python tools/records.py             list them; so does ``make records``
    python tools/records.py --json      the same as one JSON value
    python tools/records.py --update    renew the lines below the figures of PAGES
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIELDS = "device", "versions", "date", "commit", "sources"
PAGES = "README.md", "docs/benchmarks.md"  # pages that are read in the repository as well, where no hook runs


@dataclass(frozen=True)
class Record:
    """One measurement and what has become of its sources.

    Attributes:
        name: as pages name it; ``NAME PART`` for a part of a record that was measured on another day or device.
        commit: one that has the measured sources; empty if unknown.
        changed: the measured files that have changed since, and the patterns that name nothing any more.
        command: the command that measures again.
    """

    name: str
    file: str
    device: str
    date: str
    commit: str
    changed: tuple[str, ...]
    command: str

    @property
    def measured(self) -> str:
        """When, where and at which commit."""
        return f"Measured {self.date} on {self.device}, commit {self.commit or 'unknown'}"

    @property
    def caption(self) -> str:
        """The line of the documentation below the figures."""
        if not self.changed:
            return f"*{self.measured}.*"
        files = self.name_changed([f"`{name}`" for name in self.changed])
        return f"*{self.measured}; **the measured sources have changed since**: {files}. Run `{self.command}`.*"

    def name_changed(self, names: Sequence[str]) -> str:
        """Return the first three of ``names``, one for each changed file, and how many follow."""
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def link(self, page: str) -> str:
        """The line of ``page``, one of ``PAGES``, below the figures: nothing that changes with the sources."""
        up = "../" * page.count("/")
        return f"*{self.measured}: [{Path(self.file).name}]({up}{self.file}).*"


# --------------------------------------------------------------------------------------------------------- sources


def files_of(pattern: str, root: Path = ROOT) -> list[str]:
    """Return the files that a pattern of sources names, where ``FILE::NAME`` names the file.

    Raises:
        FileNotFoundError: there is none.
    """
    files = sorted(path.relative_to(root).as_posix() for path in root.glob(pattern.partition("::")[0]))
    if not files:
        raise FileNotFoundError(pattern)
    return files


def changed_files(record: Mapping[str, Any], root: Path = ROOT) -> tuple[str, ...]:
    """Return the files of a record whose code has changed since it was measured, and patterns that name nothing.

    A Python file of which only comments or docstrings are others by now has not changed. Without git, or where the
    commit is unknown to it and the record has no date, no file counts as changed.
    """
    patterns = [str(pattern) for pattern in record.get("sources", ())]
    gone = [pattern for pattern in patterns if not [*root.glob(pattern.partition("::")[0])]]
    paths = [f":(glob){pattern.partition('::')[0]}" for pattern in patterns]
    commit = str(record.get("commit", ""))
    if commit and _git(root, "merge-base", "--is-ancestor", commit, "HEAD") is not None:
        differing = _git(root, "diff", "--name-only", "--no-renames", commit, "--", *paths) or ""
        listed = "\n".join(file for file in differing.split("\n") if not _has_equal_code(root, commit, file))
    else:
        since = f"--since={record.get('date', '')} 23:59"
        listed = _git(root, "log", "--name-only", "--no-renames", "--format=", since, "--", *paths)
    return (*sorted(set((listed or "").split("\n")) - {""}), *gone)


def _has_equal_code(root: Path, commit: str, file: str) -> bool:
    """Whether a Python file of ``commit`` and the file of today have the same code, docstrings and comments aside."""
    now = root / file
    if not file.endswith(".py") or not now.is_file():
        return False
    before = _code_at(root, commit, file)
    return before is not None and before == code_text(now.read_text(encoding="utf-8"))


@cache
def _code_at(root: Path, commit: str, file: str) -> str | None:
    """Return :func:`code_text` of a file of ``commit``, or None if it was not there."""
    text = _git(root, "show", f"{commit}:{file}")
    return None if text is None else code_text(text)


@cache
def code_text(text: str) -> str:
    """Return the syntax tree of Python source as text, without docstrings, comments and places."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


def clean_commit(patterns: Sequence[str], root: Path = ROOT) -> str:
    """Return the commit that is checked out; empty if it has not these sources as they are, or there is no git."""
    files = [pattern.partition("::")[0] for pattern in patterns]
    if _git(root, "status", "--porcelain", "--", *(f":(glob){file}" for file in files)) != "":
        return ""
    return _git(root, "rev-parse", "--short=10", "HEAD") or ""


def _git(root: Path, *arguments: str) -> str | None:
    """Return what git prints; None if it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# --------------------------------------------------------------------------------------------------------- records


def load_records(root: Path = ROOT) -> list[Record]:
    """Return all records and their parts, by name."""
    listed = []
    for path in sorted((root / "benchmarks" / "results").glob("*.json")):
        for name, part in parts(path.stem, json.loads(path.read_text(encoding="utf-8"))):
            device, date, commit = (str(part.get(field, "")) for field in ("device", "date", "commit"))
            file = path.relative_to(root).as_posix()
            listed.append(Record(name, file, device, date, commit, changed_files(part, root), _command(path, root)))
    return listed


def parts(name: str, result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A record, and the parts of it that have sources and a date of their own."""
    yield name, result
    for key, value in result.items():
        if isinstance(value, dict) and "sources" in value:
            yield f"{name} {key}", value


def _command(path: Path, root: Path) -> str:
    """How the script says that it is run, with the option that records."""
    script = f"benchmarks/{path.stem}.py"
    plain = f"python {script} --json {path.relative_to(root).as_posix()}"
    if not (root / script).is_file():
        return plain
    text = (root / script).read_text(encoding="utf-8")
    if '"--json", action="store_true"' in text:  # it knows where its record is
        return f"python {script} --json"
    about = ast.get_docstring(ast.parse(text)) or ""
    usage = re.search(rf"^ *(python {re.escape(script)}.*\[--json [^]]*\].*)$", about, re.MULTILINE)
    if usage is None:
        return plain
    return re.sub(r" *\[[^]]*\]", "", re.sub(r"\[(--json [^]]*)\]", r"\1", usage[1])).rstrip(" ;.,")


# ----------------------------------------------------------------------------------------------------------- pages

LINE = re.compile(r"^(<!-- /([a-z0-9_]+(?: [^>]*)?) -->\n)(?:\*Measured .*\n)?", re.MULTILINE)


def find_record(block: str, records: Sequence[Record]) -> Record | None:
    """The record of the figures between ``<!-- BLOCK -->`` and ``<!-- /BLOCK -->``: the longest name it begins with."""
    fitting = [record for record in records if block == record.name or block.startswith(f"{record.name} ")]
    return max(fitting, key=lambda record: len(record.name), default=None)


def captioned(markdown: str, records: Sequence[Record]) -> str:
    """Return ``markdown`` with the caption of each record below its figures, in place of a line of ``linked``."""

    def caption(block: re.Match[str]) -> str:
        record = find_record(block[2], records)
        return f"{block[1]}\n{record.caption}\n" if record else block[0]

    return LINE.sub(caption, markdown if markdown.endswith("\n") else markdown + "\n")


def linked(markdown: str, records: Sequence[Record], page: str = "README.md") -> str:
    """Return ``markdown`` of ``page`` with the link of each record below its figures."""

    def link(block: re.Match[str]) -> str:
        record = find_record(block[2], records)
        return f"{block[1]}{record.link(page)}\n" if record else block[0]

    return LINE.sub(link, markdown)


# ---------------------------------------------------------------------------------------------------- command line


def show(records: Sequence[Record]) -> Iterator[str]:
    """A line for each record, two more for a stale one."""
    wide = max((len(record.name) for record in records), default=0)
    for record in records:
        state = "stale" if record.changed else "fresh"
        yield f"{state}  {record.name:{wide}}  {record.date}  {record.commit or 'commit unknown'}  {record.device}"
        if record.changed:
            yield f"       changed since: {record.name_changed(record.changed)}"
            yield f"       measure again: {record.command}"
    yield f"{len(records)} records, {sum(bool(record.changed) for record in records)} stale"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    listed = load_records()
    if options.update:
        for page in PAGES:
            text = (ROOT / page).read_text(encoding="utf-8")
            (ROOT / page).write_text(linked(text, listed, page), encoding="utf-8")
    if options.json:
        print(json.dumps([asdict(record) for record in listed], indent=1))
    else:
        print("\n".join(show(listed)))


if __name__ == "__main__":
    main()
