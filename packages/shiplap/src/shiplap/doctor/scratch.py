"""Scratch copies of a program: its Python files are copied, all other files are links, and edits go into the copy."""

from __future__ import annotations

import ast
import difflib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shiplap import safe_io
from shiplap.errors import error

# A folder with more Python files is a home or an installation, not a program.
MAX_FILES = 5000
_PASSED_OVER = ("node_modules", "site-packages", "__pycache__")


@dataclass(frozen=True)
class Edit:
    """A change of a file, in which the characters from ``start`` up to but without ``end`` are replaced by ``text``.
    ``file`` is its path, relative to the folder of the program.
    """

    file: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Program:
    """A command ``python script.py ...`` or ``python -m module ...``. ``python`` is the interpreter with its options,
    ``arguments`` are the words after these, and ``root`` is the folder that holds the program's files.
    """

    python: tuple[str, ...]
    arguments: tuple[str, ...]
    root: Path

    def in_copy(self, copy: Path) -> tuple[str, ...]:
        """Return the program's arguments for its copy in the folder ``copy``. The path of the script is replaced by
        that in the copy. A program started by ``-m`` keeps its arguments.
        """
        if self.arguments[0] == "-m":
            return self.arguments
        script = Path(self.arguments[0]).resolve().relative_to(self.root)
        return str(copy / script), *self.arguments[1:]

    def paths(self, copy: Path) -> list[str]:
        """Return the folders of the program's modules in ``copy``, in the order in which Python searches them."""
        first = Path.cwd() if self.arguments[0] == "-m" else Path(self.arguments[0]).resolve().parent
        named = [first, *(Path(p).resolve() for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
        return [str(copy / p.relative_to(self.root)) for p in named if p.is_relative_to(self.root)]

    def main_file(self) -> str | None:
        """Return the path of the file that runs first, relative to the program's folder. Return None if it is not
        known.
        """
        if self.arguments[0] != "-m":
            return str(Path(self.arguments[0]).resolve().relative_to(self.root))
        stem = self.arguments[1].replace(".", "/")
        return next((f for f in (f"{stem}.py", f"{stem}/__main__.py") if (self.root / f).is_file()), None)


def parse_program(command: Sequence[str]) -> Program:
    """Return the program that ``command`` runs, with its interpreter, arguments and folder. Raise ``SL703`` for a
    command other than Python with a script or module, or for a folder with more than ``MAX_FILES`` Python files.
    """
    name = Path(command[0]).name
    for at, word in enumerate(command[1:], 1):
        if word.endswith(".py") and Path(word).is_file():
            script, cwd = Path(word).resolve(), Path.cwd().resolve()
            # A home folder may have any number of other programs in it.
            root = cwd if script.is_relative_to(cwd) and cwd != Path.home() else script.parent
            break
        if word == "-m" and len(command) > at + 1:
            root = Path.cwd().resolve()
            break
        if not word.startswith("-"):
            at = 0
            break
    else:
        at = 0
    if not at or not name.startswith("python"):
        raise error("SL703", where=" ".join(command), got=command[0], expected="python script.py, or python -m module")
    if sum(1 for _ in list_python_files(root)) > MAX_FILES:
        raise error("SL703", where=str(root), got=f"more than {MAX_FILES} Python files", expected="a program's folder")
    return Program(tuple(command[:at]), tuple(command[at:]), root)


def list_python_files(root: Path) -> Iterator[Path]:
    """Yield the paths of the Python files below ``root``. Hidden folders, links and installations are left out. Stop
    soon after ``MAX_FILES`` files.
    """
    count = 0
    for folder, below, files in os.walk(root):
        below[:] = sorted(d for d in below if _is_copied_folder(Path(folder) / d))
        for file in sorted(files):
            if file.endswith(".py"):
                yield Path(folder) / file
                count += 1
        # The caller refuses so many files, so the walk need not go on.
        if count > MAX_FILES:
            return


def _is_copied_folder(folder: Path) -> bool:
    """Return whether a folder belongs to the program. It does if it is neither hidden nor a link nor an
    installation.
    """
    installed = folder.name in _PASSED_OVER or (folder / "pyvenv.cfg").exists()
    return not (folder.name.startswith(".") or folder.is_symlink() or installed)


def make_copy(root: Path, target: Path, changed: dict[str, str]) -> Path:
    """Copy the Python files below ``root`` to the new folder ``target``, link all other files there, and return
    ``target``.

    ``changed`` maps relative file names to new contents, which are written to the copy.
    """
    target.mkdir(parents=True)
    for entry in sorted(root.iterdir()):
        copy = target / entry.name
        if entry.is_dir() and _is_copied_folder(entry) and next(list_python_files(entry), None):
            make_copy(entry, copy, {})
        elif entry.suffix == ".py" and entry.is_file():
            safe_io.write_bytes(copy, entry.read_bytes())
        elif entry.name != "__pycache__":
            # Data files may be large, and no edit touches them.
            copy.symlink_to(entry)
    for file, text in changed.items():
        safe_io.write_text(target / file, text)
    return target


def apply_edits(texts: dict[str, str], root: Path, edits: Iterable[Edit]) -> dict[str, str] | None:
    """Return a copy of ``texts``, which maps the paths of files to their contents, with ``edits`` applied to the
    contents. No file is written. Return None if a result is not valid Python.

    Files that ``texts`` lacks are read below ``root``.
    """
    texts = dict(texts)
    # From the end of a file to its start, so that positions stay right. What is named first at a position comes first.
    for _, edit in sorted(enumerate(edits), key=lambda e: (e[1].file, -e[1].start, -e[0])):
        text = texts.get(edit.file)
        if text is None:
            text = (root / edit.file).read_text(encoding="utf-8")
        texts[edit.file] = text[: edit.start] + edit.text + text[edit.end :]
    try:
        for text in texts.values():
            ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    return texts


def with_own_newlines(file: Path, text: str) -> str:
    """Return ``text`` with the line ends of ``file``. They are CRLF if most lines of that file end in CRLF."""
    content = file.read_bytes()
    return text.replace("\n", "\r\n") if 2 * content.count(b"\r\n") > content.count(b"\n") else text


def split_lines(text: str) -> list[str]:
    """Return the lines of ``text`` with their ends, as Python counts lines: a form feed ends none."""
    return list(io.StringIO(text, newline=""))


def diff_texts(root: Path, texts: dict[str, str], against: dict[str, str] | None = None) -> str:
    """Return a unified diff from the contents in ``against`` to those in ``texts``, which both map paths to contents.
    For a file that ``against`` lacks, the diff is from its content below ``root``.
    """
    parts: list[str] = []
    for file, text in sorted(texts.items()):
        old = (against or {}).get(file)
        old = (root / file).read_text(encoding="utf-8") if old is None else old
        if old != text:
            parts += difflib.unified_diff(split_lines(old), split_lines(text), f"a/{file}", f"b/{file}", n=1)
    return "".join(parts)
