"""The recorded measurements: which are still of the sources as they are, and how to renew the others.

A record (``benchmarks/results/NAME.json``, written by ``benchmarks/NAME.py``) says on what device, on what day and at
which commit it was measured, and holds a digest of each source that it depends on (``meaning.py``). One whose sources
have changed since is stale: it is listed here, the documentation says so beside its figures, and no test fails.

    python tools/records.py             list them; so does ``make records``
    python tools/records.py --json      the same as one JSON value
    python tools/records.py --update    enter commits that were unknown where it was measured; renew the lines on PAGES
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from meaning import Repository, combined, digests

__all__ = [
    "FIELDS",
    "PAGES",
    "ROOT",
    "Record",
    "captioned",
    "clean_commit",
    "digest_of",
    "find",
    "records",
    "sources_of",
]

ROOT = Path(__file__).resolve().parents[1]
FIELDS = "device", "versions", "date", "commit", "sources", "digest"
PAGES = "README.md", "docs/benchmarks.md"  # pages that are read in the repository as well, where no hook runs


@dataclass(frozen=True)
class Record:
    """One measurement and what has become of its sources.

    Attributes:
        name: as pages name it; ``NAME PART`` for a part of a record that was measured on another day or device.
        commit: one that has the measured sources; empty if unknown.
        changed: files that are not among the measured sources as they are now.
        gone: patterns of sources of which there is nothing any more.
        command: what measures again.
    """

    name: str
    file: str
    device: str
    date: str
    commit: str
    changed: tuple[str, ...]
    gone: tuple[str, ...]
    command: str

    @property
    def stale(self) -> bool:
        return bool(self.changed or self.gone)

    @property
    def measured(self) -> str:
        """When, where and at which commit."""
        return f"Measured {self.date} on {self.device}, commit {self.commit or 'unknown'}"

    @property
    def caption(self) -> str:
        """What a page of the documentation says below its figures."""
        if not self.stale:
            return f"*{self.measured}.*"
        files = *self.changed, *self.gone
        what = ", ".join(f"`{name}`" for name in files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        return f"*{self.measured}; **the measured sources have changed since**: {what}. Run `{self.command}`.*"

    def link(self, page: str) -> str:
        """What ``page``, one of ``PAGES``, says below its figures: nothing that changes with the sources."""
        up = "../" * page.count("/")
        return f"*{self.measured}: [{Path(self.file).name}]({up}{self.file}).*"


# --------------------------------------------------------------------------------------------------------- digests


def sources_of(
    patterns: Sequence[str], root: Path = ROOT, repository: Repository | None = None
) -> dict[str, list[str]]:
    """For each pattern the digests of what it names; FileNotFoundError if it names nothing.

    A ``repository`` that was given before knows the digests of then.
    """
    repository = repository or Repository(root)
    return {pattern: sorted(digests(pattern, repository).values()) for pattern in patterns}


def digest_of(sources: Mapping[str, Sequence[str]]) -> str:
    """One digest of what ``sources_of`` found, whichever pattern found it."""
    return combined(part for parts in sources.values() for part in parts)


def clean_commit(patterns: Sequence[str], root: Path = ROOT) -> str:
    """The commit that is checked out; empty if it has not these sources as they are, or there is no git."""
    files = [pattern.partition("::")[0] for pattern in patterns]
    if _git(root, "status", "--porcelain", "--", *(f":(glob){file}" for file in files)) != "":
        return ""
    return _git(root, "rev-parse", "--short=10", "HEAD") or ""


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# --------------------------------------------------------------------------------------------------------- records


def records(root: Path = ROOT, repository: Repository | None = None) -> list[Record]:
    """All of them, by name."""
    repository = repository or Repository(root)
    listed = []
    for path in sorted((root / "benchmarks" / "results").glob("*.json")):
        for name, part in parts(path.stem, json.loads(path.read_text(encoding="utf-8"))):
            changed, gone = _moved(part, repository)
            device, date, commit = (str(part.get(field, "")) for field in ("device", "date", "commit"))
            file = path.relative_to(root).as_posix()
            listed.append(Record(name, file, device, date, commit, changed, gone, _command(path, root)))
    return listed


def parts(name: str, result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A record, and the parts of it that have sources and a date of their own."""
    yield name, result
    for key, value in result.items():
        if isinstance(value, dict) and "digest" in value:
            yield f"{name} {key}", value


def _moved(part: dict[str, Any], repository: Repository) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which files are others than those measured, and which patterns name nothing any more."""
    measured: dict[str, list[str]] = part.get("sources", {})
    known = {digest for digests in measured.values() for digest in digests}
    now: dict[str, dict[str, str]] = {}
    gone = []
    for pattern in measured:
        try:
            now[pattern] = digests(pattern, repository)
        except FileNotFoundError:
            gone.append(pattern)
    if combined(digest for files in now.values() for digest in files.values()) == part.get("digest"):
        return (), tuple(gone)
    changed = []
    for pattern, files in now.items():
        others = [file for file, digest in files.items() if digest not in known]
        if others:
            changed += [pattern] if "::" in pattern else others
        elif set(measured[pattern]) - set(files.values()):
            changed.append(f"{pattern} (fewer files)")
    return tuple(changed or ([] if gone else ["the list of sources"])), tuple(gone)


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

BLOCK = re.compile(r"^<!-- /((?!native )[a-z0-9_]+(?: [^>]*)?) -->\n", re.MULTILINE)  # `native`: generate_docs.py's
LINE = re.compile(r"^(<!-- /([a-z0-9_]+(?: [^>]*)?) -->\n)(?:\*Measured .*\n)?", re.MULTILINE)


def find(block: str, of: Sequence[Record]) -> Record | None:
    """The record of the figures between ``<!-- BLOCK -->`` and ``<!-- /BLOCK -->``: the longest name it begins with."""
    fitting = [record for record in of if block == record.name or block.startswith(f"{record.name} ")]
    return max(fitting, key=lambda record: len(record.name), default=None)


def captioned(markdown: str, of: Sequence[Record]) -> str:
    """``markdown`` with a line below the figures of each record that says what they are of, and whether still.

    The line takes the place of one that ``linked`` wrote.
    """

    def caption(block: re.Match[str]) -> str:
        record = find(block[2], of)
        return f"{block[1]}\n{record.caption}\n" if record else block[0]

    return LINE.sub(caption, markdown if markdown.endswith("\n") else markdown + "\n")


def linked(markdown: str, of: Sequence[Record], page: str = "README.md") -> str:
    """``markdown`` of ``page`` with the line below the figures of each record as it has to be."""

    def link(block: re.Match[str]) -> str:
        record = find(block[2], of)
        return f"{block[1]}{record.link(page)}\n" if record else block[0]

    return LINE.sub(link, markdown)


# ---------------------------------------------------------------------------------------------------- command line


def update(root: Path = ROOT) -> None:
    """Enter the commit in fresh records that lack one of this history, then renew the lines on ``PAGES``."""
    fresh = {record.name for record in records(root) if not record.stale}
    for path in sorted((root / "benchmarks" / "results").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        for name, part in parts(path.stem, result):
            held = part.get("commit") and _git(root, "merge-base", "--is-ancestor", part["commit"], "HEAD") is not None
            if name in fresh and not held:
                part["commit"] = clean_commit(list(part["sources"]), root) or part.get("commit", "")
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for page in PAGES:
        if (root / page).is_file():
            text = linked((root / page).read_text(encoding="utf-8"), records(root), page)
            (root / page).write_text(text, encoding="utf-8")


def show(of: Sequence[Record]) -> Iterator[str]:
    """A line for each record, three more for a stale one."""
    wide = max((len(record.name) for record in of), default=0)
    for record in of:
        state = "stale" if record.stale else "fresh"
        yield f"{state}  {record.name:{wide}}  {record.date}  {record.commit or 'commit unknown'}  {record.device}"
        if record.changed:
            yield f"       changed since: {', '.join(record.changed)}"
        if record.gone:
            yield f"       measured a source that is gone: {', '.join(record.gone)}"
        if record.stale:
            yield f"       measure again: {record.command}"
    stale = sum(record.stale for record in of)
    yield f"{len(of)} records, {stale} stale"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    if options.update:
        update()
    listed = records()
    if options.json:
        print(json.dumps([asdict(record) | {"stale": record.stale} for record in listed], indent=1))
    else:
        print("\n".join(show(listed)))


if __name__ == "__main__":
    main()
