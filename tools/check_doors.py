"""There is one door for writing files, one for temporary folders and one for printing with styles: flag every other one
in the core.

Files are written by ``shiplap.safe_io``, which follows no link of another user; folders for the work of one run are
made by ``shiplap.safe_io.work_folders``, so that they are found if the run is killed; consoles are made by
``shiplap.render.console``, which prints no control characters of foreign texts. Flagged are ``open`` for writing,
``write_text`` and ``write_bytes`` of a path, ``os.open`` with a flag that writes, copies by ``shutil``, ``mkdtemp``,
``TemporaryDirectory``, ``Console(``, and ``typer.echo(``. Each use that is no way around a door is listed in
``ALLOWED`` with its reason, and an entry that excuses nothing is flagged too.

Usage: ``check_doors.py [ROOT]``, by default this repository; exit status 1 on a finding.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

HOME = Path("packages/shiplap/src/shiplap")
DOORS = ("safe_io/files.py", "safe_io/work_folders.py", "render/console.py")
ALLOWED = {
    ("kernels/native/build.py", "write_text"): "a new folder of its own; it runs without Shiplap as well",
    ("kernels/native/build.py", "mkdtemp"): "in the cache, of whose folders `shiplap cache gc` removes unfinished ones",
    ("doctor/examine.py", "mkdtemp"): "in the folder of traces that the user has named, where it stays",
    ("doctor/probe.py", "write_text"): "a new folder of its own; it runs without Shiplap",
    ("sandbox/landlock.py", "write_text"): "a setting of the process itself in /proc",
    ("plugin_api/files.py", "open"): "a new file, never an existing one",
    ("audit/checks/process.py", "open"): "the descriptor of stdout, to watch what a kernel prints",
    ("cli/app.py", "os.open"): "/dev/null in place of a stdout whose reader has ended",
    ("cli/app.py", "typer.echo"): "its own version",
}
WRITING = frozenset({"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC"})
COPIES = frozenset({"copy", "copy2", "copyfile", "copytree", "move"})


def uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each use of another door."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (name := _other_door(node)):
            yield node.lineno, name


def _other_door(call: ast.Call) -> str:
    """Return the name of another door that ``call`` goes through, or nothing."""
    function = call.func
    owner = function.value.id if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) else ""
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    if (owner, name) == ("os", "open"):
        flags = {n.attr for a in call.args for n in ast.walk(a) if isinstance(n, ast.Attribute)}
        return "os.open" if flags & WRITING else ""
    if name == "open" and owner not in ("zipfile", "safe_io"):
        return "open" if any(_is_writing_mode(a) for a in (*call.args, *(k.value for k in call.keywords))) else ""
    if (
        name in ("write_text", "write_bytes")
        and owner not in ("safe_io", "console")
        and isinstance(function, ast.Attribute)
    ):
        return name
    if owner == "shutil" and name in COPIES:
        return f"shutil.{name}"
    if name in ("mkdtemp", "TemporaryDirectory"):
        return name
    return name if name == "Console" else "typer.echo" if (owner, name) == ("typer", "echo") else ""


def _is_writing_mode(argument: ast.expr) -> bool:
    """Whether an argument of ``open`` is a mode for writing."""
    value = argument.value if isinstance(argument, ast.Constant) else None
    return isinstance(value, str) and set(value) <= set("rwaxbt+") and bool(set(value) & set("wax+"))


def findings(root: Path) -> Iterator[str]:
    """Yield a line for each use that is not allowed, and for each permission that is not used."""
    used = set()
    for path in sorted((root / HOME).rglob("*.py")):
        place = path.relative_to(root / HOME).as_posix()
        if place in DOORS:
            continue
        for line, name in uses(path.read_text(encoding="utf-8")):
            if (place, name) in ALLOWED:
                used.add((place, name))
            else:
                doors = "safe_io for files and folders, render.console or cli.console for texts"
                yield f"{HOME / place}:{line}: {name}: use {doors}"
    for place, name in sorted(ALLOWED.keys() - used):
        yield f"tools/check_doors.py: nothing in {place} needs {name} any more: remove the entry"


def main(arguments: list[str]) -> int:
    """Print the findings. Return the exit status."""
    found = list(findings(Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]))
    print("\n".join(found) or "one door for writing, one for temporary folders, one for printing")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
