"""The recorded measurements: of which a measured file has changed since, and how to measure them again.

A record (``benchmarks/results/NAME.json``, written by ``benchmarks/NAME.py``) says on which device, on which day, at
which commit and of which files it was measured. It is stale if git has a change of one of these files after that
commit. Comments, docstrings and, of a file of which it names definitions, all others do not count. It is listed here,
the documentation says so beside its figures, and no test fails. ``benchmarks/results/stale.toml`` has the reason for
each that was not measured again.

    python tools/records.py             list them; so does ``make records``
    python tools/records.py --json      the same as one JSON value
    python tools/records.py --update    renew the lines below the figures of PAGES
    python tools/records.py --check     exit status 1 if a stale record has no reason, or a fresh one has
    python tools/records.py --renew gpu --limit 300 --seconds 900
                                        measure stale records again whose names have "gpu" (none: all of them), each
                                        for 300 seconds at most. Run it again for those that 900 seconds left
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import shlex
import subprocess
import sys
import time
import tomllib
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
        reason: why a stale record was not measured again; empty if nobody has said.
    """

    name: str
    file: str
    device: str
    date: str
    commit: str
    changed: tuple[str, ...]
    command: str
    reason: str = ""

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
        reason = f" {self.reason}" if self.reason else ""
        return f"*{self.measured}; **the measured sources have changed since**: {files}.{reason} Run `{self.command}`.*"

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

    A file of which only comments or docstrings are others by now has not changed, nor one of which the record names
    definitions that are as they were. Without git, or where the commit is unknown to it and the record has no date, no
    file counts as changed.
    """
    patterns = [str(pattern) for pattern in record.get("sources", ())]
    gone = [pattern for pattern in patterns if not [*root.glob(pattern.partition("::")[0])]]
    paths = [f":(glob){pattern.partition('::')[0]}" for pattern in patterns]
    commit = str(record.get("commit", ""))
    if commit and _git(root, "merge-base", "--is-ancestor", commit, "HEAD") is not None:
        names = _definitions_by_file(patterns, root)
        differing = _git(root, "diff", "--name-only", "--no-renames", commit, "--", *paths) or ""
        files = [file for file in differing.split("\n") if file]
        listed = "\n".join(f for f in files if not _has_equal_code(root, commit, f, names.get(f, frozenset())))
    else:
        since = f"--since={record.get('date', '')} 23:59"
        listed = _git(root, "log", "--name-only", "--no-renames", "--format=", since, "--", *paths)
    return (*sorted(set((listed or "").split("\n")) - {""}), *gone)


def _definitions_by_file(patterns: Sequence[str], root: Path) -> dict[str, frozenset[str]]:
    """Return the definitions that ``FILE::NAME`` patterns name, by file; no file that another pattern names whole."""
    whole = {file for p in patterns if "::" not in p for file in (x.relative_to(root).as_posix() for x in root.glob(p))}
    named: dict[str, set[str]] = {}
    for file, _, name in (pattern.partition("::") for pattern in patterns if "::" in pattern):
        named.setdefault(file, set()).add(name)
    return {file: frozenset(names) for file, names in named.items() if file not in whole}


def _has_equal_code(root: Path, commit: str, file: str, names: frozenset[str] = frozenset()) -> bool:
    """Return whether a file of ``commit`` and the file of today have the same code, comments and docstrings aside.

    Args:
        root: the repository.
        commit: the one that was measured.
        file: a path relative to ``root``; of other languages than Python, C and C++ no comment is recognized.
        names: of a Python file, the definitions to compare; none for the whole file.
    """
    now = root / file
    text = CODE_TEXTS.get(now.suffix)
    before = _git(root, "show", f"{commit}:{file}")
    if text is None or before is None or not now.is_file():
        return False
    after = text(now.read_text(encoding="utf-8"), names)
    return text(before, names) == after and (after != "" or not names)  # a definition that is gone has changed


@cache
def code_text(text: str, names: frozenset[str] = frozenset()) -> str:
    """Return the syntax tree of Python source as text, without docstrings, comments and places.

    Args:
        text: the source.
        names: functions, classes, methods (``Class.method``) and assigned names at the top level, to which the result
            is limited; none for all of the source.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree) if not names else "\n".join(ast.dump(node) for node in _named_nodes(tree, names))


def _named_nodes(tree: ast.Module, names: frozenset[str]) -> Iterator[ast.AST]:
    """Yield the definitions of ``names`` in a module: functions, classes, methods and assignments, in their order."""
    for node in tree.body:
        inner = [(f"{node.name}.", part) for part in node.body] if isinstance(node, ast.ClassDef) else []
        for owner, part in [("", node), *inner]:
            targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", part)]
            if names & {f"{owner}{getattr(target, 'name', getattr(target, 'id', ''))}" for target in targets}:
                yield part


@cache
def c_code_text(text: str, names: frozenset[str] = frozenset()) -> str:
    """Return C or C++ source without comments, and with one space for any run of spaces; ``names`` is not used."""
    del names
    return " ".join(_C_COMMENT.sub(lambda found: found[1] or " ", text).split())


_C_COMMENT = re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|//[^\n]*|/\*.*?\*/""", re.DOTALL)
CODE_TEXTS = {".py": code_text} | dict.fromkeys((".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"), c_code_text)


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
    listed, reasons = [], load_reasons(root)
    for path in sorted((root / "benchmarks" / "results").glob("*.json")):
        for name, part in parts(path.stem, json.loads(path.read_text(encoding="utf-8"))):
            device, date, commit = (str(part.get(field, "")) for field in ("device", "date", "commit"))
            file = path.relative_to(root).as_posix()
            changed, reason = changed_files(part, root), reasons.get(name, "")
            listed.append(Record(name, file, device, date, commit, changed, _command(path, root), reason))
    return listed


def load_reasons(root: Path = ROOT) -> dict[str, str]:
    """Return the reason for each stale record that ``benchmarks/results/stale.toml`` names, by the record's name.

    The file has tables of a ``reason`` and of the ``records`` that it is true of.
    """
    path = root / "benchmarks" / "results" / "stale.toml"
    if not path.is_file():
        return {}
    groups = tomllib.loads(path.read_text(encoding="utf-8")).values()
    return {name: group["reason"] for group in groups for name in group["records"]}


def find_unexplained(listed: Sequence[Record], reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each stale record without a reason, and for each reason of a record that is fresh or gone."""
    stale = {record.name for record in listed if record.changed}
    return [
        *(f"{name}: stale, without a reason in benchmarks/results/stale.toml" for name in sorted(stale - {*reasons})),
        *(f"{name}: not stale, but has a reason there" for name in sorted({*reasons} - stale)),
    ]


def renew(listed: Sequence[Record], parts_of_names: Sequence[str], limit: float, seconds: float) -> int:
    """Run the commands of stale records, each command once, and return how many failed or were not begun.

    Args:
        listed: all records.
        parts_of_names: the names of records, or parts of names; with none, all records.
        limit: seconds after which a command is ended.
        seconds: after these no further command begins.
    """
    wanted = [record for record in listed if record.changed]
    if parts_of_names:
        wanted = [record for record in wanted if any(part in record.name for part in parts_of_names)]
    end, left = time.monotonic() + seconds, 0
    for command in dict.fromkeys(record.command for record in wanted):
        if time.monotonic() > end:
            print(f"left     {command}", flush=True)
            left += 1
            continue
        begin = time.monotonic()
        words = [sys.executable if word == "python" else word for word in shlex.split(command)]
        try:
            status = subprocess.run(words, cwd=ROOT, check=False, timeout=limit).returncode
            outcome = f"failed ({status})" if status else "renewed"
        except subprocess.TimeoutExpired:
            outcome = "too slow"
        left += outcome != "renewed"
        print(f"{outcome}  {time.monotonic() - begin:.0f} s  {command}", flush=True)
    return left


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
            yield f"       reason: {record.reason}" if record.reason else "       reason: none given"
            yield f"       measure again: {record.command}"
    yield f"{len(records)} records, {sum(bool(record.changed) for record in records)} stale"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--renew", nargs="*", metavar="NAME", help="names of records, or parts of them")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one command of --renew")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after these --renew begins no command")
    options = parser.parse_args()
    listed = load_records()
    if options.renew is not None:
        sys.exit(renew(listed, options.renew, options.limit, options.seconds) > 0)
    if options.check:
        lines = find_unexplained(listed, load_reasons())
        print("\n".join(lines))
        sys.exit(bool(lines))
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
