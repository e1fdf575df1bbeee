"""Give all distributions a new version: ``release.py VERSION [--date YYYY-MM-DD]``, by default today.

``release.py --check-tag v0.2.0`` changes nothing, and fails unless the tag names the version of all distributions.

The distributions have one version, and require each other by it. Every place that names the version is changed: the
``pyproject.toml`` of each package, ``shiplap.__version__``, and the how-to pages, which show this version and the next
one. The first release keeps the version that stands there already. The section ``## Unreleased`` of each changelog
becomes that of the version. Nothing is committed, tagged or uploaded.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
import tomllib
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
CORE = Path("packages", "shiplap")
UNRELEASED = "## Unreleased\n"


def current(root: Path) -> str:
    """The version that the core has."""
    project = tomllib.loads((root / CORE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def refused(root: Path, old: str, new: str) -> str:
    """Why there cannot be a release of this version, or nothing. The first one has the version that stands there."""
    try:
        later = Version(new) > Version(old)
    except InvalidVersion:
        return f"{new} is no version of Python's scheme, such as 0.2.0 or 0.2.0rc1"
    first = new == old and not any("\n## 0." in f.read_text("utf-8") for f in root.glob("packages/*/CHANGELOG.md"))
    return "" if later or first else f"{new} does not come after {old}"


def renumber(root: Path, old: str, new: str) -> list[Path]:
    """Write the new version wherever the old one stands; the files that were changed."""
    named = re.compile(rf'(?m)(^version = "|^__version__ = "|"shiplap[\w-]*(?:\[[\w,]+\])?==){re.escape(old)}(?=")')
    files = [*sorted(root.glob("packages/*/pyproject.toml")), root / CORE / "src" / "shiplap" / "__init__.py"]
    changed = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        renamed = named.sub(rf"\g<1>{new}", text)
        if renamed != text:
            file.write_text(renamed, encoding="utf-8")
            changed.append(file)
    for page in sorted((root / "docs" / "contributing").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        renamed = text.replace(following(old), following(new)).replace(old, new)
        if renamed != text:
            page.write_text(renamed, encoding="utf-8")
            changed.append(page)
    return changed


def following(version: str) -> str:
    """The next minor version: the one that the how-to of a release makes."""
    parsed = Version(version)
    return f"{parsed.major}.{parsed.minor + 1}.0"


def name_section(package: Path, version: str, date: str) -> bool:
    """Give the entries below ``## Unreleased`` the version as their heading; False where there are none."""
    file = package / "CHANGELOG.md"
    if not file.is_file():
        return False
    head, heading, rest = file.read_text(encoding="utf-8").partition(UNRELEASED)
    if not heading or not rest.partition("\n## ")[0].strip():
        return False
    file.write_text(f"{head}{heading}\n## {version} ({date})\n{rest}", encoding="utf-8")
    return True


def problems_of_tag(root: Path, tag: str) -> list[str]:
    """The distributions whose version is not that of the tag, and those whose changelog has no section of it."""
    found = []
    for file in sorted(root.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        changelog = file.with_name("CHANGELOG.md")
        if f"v{project['version']}" != tag:
            found.append(f"{project['name']} has version {project['version']}, and the tag is {tag}")
        elif changelog.is_file() and f"## {project['version']} (" not in changelog.read_text(encoding="utf-8"):
            found.append(f"{changelog.relative_to(root)} has no section of {project['version']}")
    return found


def main(arguments: list[str]) -> int:
    """Renumber, and name the new section of each changelog; 1 where that version cannot be."""
    parser = argparse.ArgumentParser(description="Give all distributions a new version.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("version", nargs="?")
    what.add_argument("--check-tag", metavar="TAG", help="only compare a tag with the versions")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    given = parser.parse_args(arguments)
    if given.check_tag:
        problems = problems_of_tag(ROOT, given.check_tag)
        print(*problems, sep="\n", file=sys.stderr)
        return 1 if problems else 0
    old = current(ROOT)
    if problem := refused(ROOT, old, given.version):
        print(problem, file=sys.stderr)
        return 1
    for file in renumber(ROOT, old, given.version):
        print(f"{file.relative_to(ROOT)}: {old} -> {given.version}")
    for package in sorted((ROOT / "packages").iterdir()):
        if name_section(package, given.version, given.date):
            print(f"{(package / 'CHANGELOG.md').relative_to(ROOT)}: {given.version} ({given.date})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
