"""A C++ compiler that keeps what it made: ``compile_cache.py FOLDER COMPILER CONSTANT ARGUMENT...``.

Tests compile the same text in each run of the suite. The key of a result is the SHA-256 of the compiler, its arguments,
and the content of the sources, libraries and headers that they name. Paths of sources and results are no part of it, as
tests have another folder in each run. Headers below ``CONSTANT`` folders, which are those of the system and of
installed packages, count by the path and the age of their folder. Calls of another form go to the compiler.

A run makes a thousand such calls: what a hit does not need is imported by the others.
"""

from __future__ import annotations

import hashlib
import os
import sys

TYPE_CHECKING = False  # typing takes as long to import as all of a hit
if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = (".cpp", ".cc", ".cxx", ".c")
OBJECTS = (".o", ".a", ".so")
HEADERS = (".h", ".hpp", ".inc", ".cuh")
INCLUDES = ("-I", "-isystem", "-iquote", "-include")
MOST = 400  # headers below one folder; with more the call is not kept
UNKNOWN = ("-S", "-M", "-MM", "-H", "-v", "-###", "--version", "-dumpversion", "-", "-save-temps")


class NotKept(Exception):
    """The exception that is raised if the result of a call of the compiler cannot be cached. Either its options are not
    known, or its result depends on too many files.
    """


class Call:
    """A call of the compiler, and the key of its result in the cache.

    Attributes:
        out: The file that the call writes.
        dependencies: The file in which the call lists the headers that it read, or an empty string.
        header: Whether the call compiles a header or only expands its source.
        key: The digest of everything on which the result depends.
    """

    def __init__(self, compiler: str, arguments: list[str], constant: tuple[str, ...]) -> None:
        """Read the ``arguments`` of ``compiler`` and compute the key of the result in the cache. Raise ``NotKept`` for
        a call that cannot be cached.

        Files below the folders ``constant`` count as unchanging. A folder of headers in one of them enters the key by
        its path and modification time.
        """
        self.out = self.dependencies = ""
        self._constant = constant
        self._digest = hashlib.sha256()
        self._add(f"{os.path.realpath(compiler)} {os.stat(compiler).st_mtime_ns}")
        for name in ("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "SOURCE_DATE_EPOCH"):
            self._add(os.environ.get(name, ""))
        self._inputs: list[str] = []
        self.header = header = "c++-header" in arguments or "-E" in arguments  # any name may be that of a source
        if "-E" in arguments and "-P" not in arguments:
            raise NotKept  # its lines tell where the source lies
        rest = iter(arguments)
        for argument in rest:
            self._argument(argument, rest, header)
        if not self.out or not self._inputs:
            raise NotKept
        for folder in {os.path.dirname(os.path.abspath(name)) for name in self._inputs if name.endswith(SOURCES)}:
            self._headers(folder)
        self.key = self._digest.hexdigest()

    def placed(self, text: str, *, back: bool = False) -> str:
        """Return ``text``, a list of dependencies that the compiler wrote, with its folders replaced. If ``back`` is
        false, the placeholders ``@source@`` and ``@here@`` take the place of the folder of the first input and the
        current folder. Another call can then use the cached list. If ``back`` is true, these two folders of this call
        take the place of the placeholders.
        """
        marks = {os.path.dirname(os.path.abspath(self._inputs[0])): "@source@", os.getcwd(): "@here@"}
        for folder, mark in marks.items():
            text = text.replace(mark, folder) if back else text.replace(folder, mark)
        return text

    def _argument(self, argument: str, rest: Iterator[str], header: bool) -> None:
        """Add ``argument``, an argument of the compiler, to the key of the cached result.

        If it is an option with a value, take the value from ``rest``, the arguments after it. If ``header`` is true,
        any existing file counts as an input. Otherwise only a file with the suffix of a source or an object does. Raise
        ``NotKept`` for an option that cannot be cached.
        """
        if argument in UNKNOWN or argument.startswith("@"):
            raise NotKept
        if argument == "-o":
            self.out = next(rest, "")
        elif argument in ("-MF", "-MT", "-MQ"):
            value = next(rest, "")
            self.dependencies = value if argument == "-MF" else self.dependencies
        elif argument in INCLUDES:
            self._include(argument, next(rest, ""))
        elif argument.startswith("-I") or argument.startswith("-L"):
            self._include(argument[:2], argument[2:])
        elif argument.endswith(SOURCES + OBJECTS) or (header and os.path.isfile(argument)):
            self._inputs.append(argument)
            # The suffix is the language of the source: its path is no part of the key.
            self._add(os.path.splitext(argument)[1])
            self._source(argument)
        else:
            self._add(argument)

    def _include(self, option: str, place: str) -> None:
        """Add the folder or file ``place`` of the option ``option``, such as ``-I``, to the key of the cached result.

        Raise ``NotKept`` for a folder of libraries that does not count as unchanging, since the call cannot be cached
        then.
        """
        self._add(option)
        if option == "-L":
            self._add(os.path.realpath(place) if self._is_constant(place) else "")
            if not self._is_constant(place):
                raise NotKept  # a library beside the test
        elif os.path.isfile(place):
            self._file(place)
        else:
            self._headers(place)

    def _is_constant(self, place: str) -> bool:
        """Return whether ``place`` is, or lies below, one of the folders that count as unchanging. These are folders of
        the system and of installed packages.
        """
        real = os.path.realpath(place)
        return any(real == folder or real.startswith(folder + os.sep) for folder in self._constant)

    def _headers(self, folder: str) -> None:
        """Add the paths and contents of all headers below ``folder`` to the key of the cached result.

        For a folder that counts as unchanging, add its path and modification time instead. Raise ``NotKept`` if there
        are more than ``MOST`` headers, since the call cannot be cached then.
        """
        if self._is_constant(folder):
            self._add(f"{os.path.realpath(folder)} {os.stat(folder).st_mtime_ns if os.path.isdir(folder) else 0}")
            return
        count = 0
        for place, folders, files in os.walk(folder):
            # os.walk yields folders in the order of the file system, which may differ between two equal trees.
            folders.sort()
            for name in sorted(files):
                if name.endswith(HEADERS):
                    count += 1
                    if count > MOST:
                        raise NotKept
                    self._add(os.path.relpath(os.path.join(place, name), folder))
                    self._file(os.path.join(place, name))

    def _source(self, name: str) -> None:
        """Add the content of the file ``name`` to the key of the cached result. If it is a source file, also add the
        source files that it includes. Headers are added by :meth:`_headers`.
        """
        self._file(name)
        for line in _read(name).splitlines() if name.endswith(SOURCES) else ():
            if line.startswith(b'#include "') and line.rstrip(b'" \t').endswith(tuple(s.encode() for s in SOURCES)):
                self._source(os.path.join(os.path.dirname(name), os.fsdecode(line.split(b'"')[1])))

    def _file(self, name: str) -> None:
        """Add the digest of the content of the file ``name`` to the key of the cached result."""
        self._digest.update(hashlib.sha256(_read(name)).digest())

    def _add(self, text: str) -> None:
        """Add ``text`` and its length to the key of the cached result. Because of the length, two strings added one
        after the other give another key than their concatenation.
        """
        self._digest.update(f"{len(text)} {text}\n".encode())


def main(cache: str, compiler: str, constant: str, arguments: list[str]) -> int:
    """Run ``compiler`` with ``arguments``, or copy its result from the folder ``cache``, and return the exit status.

    If the cache has the result, write it to the file that the compiler would write, print its warnings and return 0.
    Otherwise run the compiler and, if it succeeds, store its result and warnings. ``constant`` has the folders that
    count as unchanging, joined by ``os.pathsep``. If the call cannot be cached, replace this process by the compiler.
    """
    try:
        call = Call(compiler, arguments, tuple(constant.split(os.pathsep)))
    except (NotKept, OSError):
        # The process becomes the compiler, so that nothing of the call is changed.
        os.execv(compiler, [compiler, *arguments])
    kept = os.path.join(cache, call.key[:2], call.key)
    try:
        _write(call.out, _read(kept), os.stat(kept).st_mode)
        if call.dependencies:
            _write(call.dependencies, call.placed(_read(f"{kept}.d").decode(), back=True).encode())
        os.write(2, _read(f"{kept}.txt") if os.path.exists(f"{kept}.txt") else b"")
        os.utime(kept)  # so that what nobody uses is the oldest
        return 0
    except OSError:
        return _compile(call, kept, [compiler, *arguments])


def _compile(call: Call, kept: str, command: list[str]) -> int:
    """Run the compiler by ``command``, and return its exit status.

    If it succeeds, copy the file that ``call`` writes to the path ``kept`` in the cache. Its list of dependencies and
    its warnings are stored beside it. If the copy fails, nothing is raised.
    """
    # Imported here, since a hit does not need it and must be quick.
    import subprocess

    done = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    os.write(2, done.stderr)
    if done.returncode == 0:
        try:
            os.makedirs(os.path.dirname(kept), exist_ok=True)
            if done.stderr:  # of each kernel of Inductor, about a header of torch
                _write(f"{kept}.txt", done.stderr)
            if call.dependencies:
                _write(f"{kept}.d", call.placed(_read(call.dependencies).decode()).encode())
            _copy_into_cache(call.out, kept)
        except OSError:  # a full disk is no reason to fail
            pass
    return done.returncode


def _read(name: str) -> bytes:
    """Return the content of the file ``name`` as bytes."""
    with open(name, "rb") as file:
        return file.read()


def _write(name: str, content: bytes, mode: int | None = None) -> None:
    """Write ``content`` to the file ``name``. If ``mode`` is given, set the permissions of the file to it."""
    with open(name, "wb") as file:
        file.write(content)
    if mode is not None:
        os.chmod(name, mode & 0o7777)


def _copy_into_cache(file: str, kept: str) -> None:
    """Copy ``file`` to the path ``kept`` in the cache. The copy gets that name only when it is complete, so that no
    other process reads a part of it.
    """
    # Beside the target, since a rename across file systems is a copy.
    new = f"{kept}.{os.getpid()}"
    _write(new, _read(file), os.stat(file).st_mode)
    os.replace(new, kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
