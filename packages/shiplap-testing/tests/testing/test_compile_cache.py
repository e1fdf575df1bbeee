"""What was compiled before is not compiled again, and whatever a result depends on is part of its key."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shiplap_testing import compile_cache

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


class Compiler:
    """A compiler that counts its calls, and the cache before it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, folder / "cache"
        self.program = folder / "c++"
        self.program.write_text(f'#!/bin/sh\necho >> {folder}/calls\nexec {shutil.which("g++")} "$@"\n')
        self.program.chmod(0o755)

    def __call__(self, place: str, *more: str, header: str = "#define VALUE 1\n", source: str = "") -> bytes:
        """Compile in a folder of this name; the object that comes of it."""
        where = self.folder / place
        (where / "include").mkdir(parents=True, exist_ok=True)
        (where / "include" / "a.h").write_text(header)
        (where / "a.cpp").write_text(source or '#include "a.h"\nint f() { return VALUE; }\n')
        command = [sys.executable, "-I", "-S", compile_cache.__file__, self.cache, self.program, "/usr"]
        flags = ["-c", "-MMD", "-MF", where / "a.d", "-I", where / "include", *more]
        done = subprocess.run([*command, *flags, "-o", where / "a.o", where / "a.cpp"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.told = done.stderr
        return (where / "a.o").read_bytes()

    @property
    def calls(self) -> int:
        return len((self.folder / "calls").read_text().splitlines())


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path)


def test_the_same_text_in_another_folder_is_compiled_once(compiler: Compiler) -> None:
    assert compiler("one") == compiler("two")
    assert compiler.calls == 1
    dependencies = (compiler.folder / "two" / "a.d").read_text()
    assert f"{compiler.folder}/two/a.cpp" in dependencies
    assert f"{compiler.folder}/two/include/a.h" in dependencies


def test_an_included_source_is_in_the_key(compiler: Compiler) -> None:
    made = []
    for value in (1, 2):
        (compiler.folder / "b.cpp").write_text(f"int g() {{ return {value}; }}\n")
        made.append(compiler("one", source='#include "../b.cpp"\nint f() { return g(); }\n'))
    assert made[0] != made[1]
    assert compiler.calls == 2


def test_a_header_a_source_a_flag_and_the_compiler_are_in_the_key(compiler: Compiler) -> None:
    first = compiler("one")
    assert compiler("two", header="#define VALUE 2\n") != first
    assert compiler("three", source='#include "a.h"\nint g() { return VALUE; }\n') != first
    compiler("four", "-DMORE")
    os.utime(compiler.program, (1, 1))
    compiler("five")
    assert compiler.calls == 5


def test_warnings_are_repeated_and_a_call_that_fails_is_made_again(compiler: Compiler) -> None:
    for place in ("one", "two"):
        compiler(place, "-Wall", source="static int f() { return 1; }\n")
        assert "unused" in compiler.told
    assert compiler.calls == 1
    for place in ("three", "four"):
        with pytest.raises(AssertionError, match="expected"):
            compiler(place, source="int f( {\n")
    assert compiler.calls == 3


def test_an_expanded_source_is_kept_where_it_has_no_paths(compiler: Compiler) -> None:
    """Inductor expands its header in each process that compiles."""
    assert b"return 2" in compiler("one", "-E", "-P", header="#define VALUE 2\n")
    compiler("two", "-E", "-P", header="#define VALUE 2\n")
    assert compiler.calls == 1
    assert b"return 3" in compiler("three", "-E", "-P", header="#define VALUE 3\n")
    for place in ("four", "five"):
        compiler(place, "-E")
    assert compiler.calls == 4


def test_a_cache_that_cannot_be_written_is_no_error(compiler: Compiler) -> None:
    compiler.cache.write_text("")
    assert compiler("one") == compiler("two")
    assert compiler.calls == 2
