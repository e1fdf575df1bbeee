"""Attacks through what `shiplap package` and the build backend read: metadata, answers, libraries, pyproject.toml."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import zipfile

import pytest

from shiplap.errors import ShiplapError, error
from shiplap.errors.base import error_parts
from shiplap.packaging import WheelRequest, backend, package, worker
from shiplap.packaging.tags import platform_tag
from shiplap_testing.build import compile_c
from shiplap_testing.forked import python
from shiplap_testing.mutate import mutated
from shiplap_testing.support import fails
from tests.safe_io.storm import SOURCE, declare

INFO = "mylib-1.0.dist-info"
WHEEL = f"{INFO}/WHEEL"
RIGHT = {"mylib/__init__.py": b"", WHEEL: b"Wheel-Version: 1.0\nTag: py3-none-any\n", f"{INFO}/RECORD": b""}


def wheel(folder, files, name="mylib-1.0-py3-none-any.whl"):
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in {**RIGHT, **files}.items():
            archive.writestr(each, content)
    return WheelRequest(path)


NAMES = {
    "a NUL": b"a = x\0y\n",
    "nothing": b"a =\n",
    "dots": b"a = ..x\n",
    "an option": b"a = -c\n",
    "as long as a file": b"a = " + b"x" * 300_000 + b"\n",
    "more than a command line holds": b"".join(b"a%d = module_%d_%s\n" % (i, i, b"x" * 30) for i in range(60_000)),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_modules_that_no_process_could_be_given(name, tmp_path):
    """A NUL, or more than the system takes as arguments, was an error of ``subprocess``."""
    with fails("SL601"):
        package(wheel(tmp_path, {f"{INFO}/entry_points.txt": b"[shiplap.families]\n" + NAMES[name]}))


ANSWERS = {
    "none": lambda at: None,
    "half of one": lambda at: at.write_text("[{"),
    "another form": lambda at: at.write_text("[5]"),
    "a number": lambda at: at.write_text("5"),
    "an error that there is not": lambda at: at.write_text(json.dumps(dict.fromkeys(worker.ERROR_PARTS, "SL999"))),
    "an error of another form": lambda at: at.write_text('{"id": 5, "code": []}'),
    "deeper than a stack": lambda at: at.write_text("[" * 100_000),
    "longer than any": lambda at: at.write_text(" " * (1 << 24) + "[]"),
    "a FIFO": os.mkfifo,
    "a link to what is no answer": lambda at: at.symlink_to("/proc/self/environ"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_an_import_has_written_is_data(name, tmp_path):
    """The module of a wheel runs in the process that answers, and may write there."""
    ANSWERS[name](tmp_path / "answer.json")
    with fails("SL308", "last words"):
        worker.read_answer(tmp_path / "answer.json", ["mylib"], "last words")


@pytest.mark.parametrize("id", ["SL202", "SL308", "SL502", "SL617", "SL801"])
def test_an_error_of_the_worker_is_raised_whatever_class_it_has(id, tmp_path):
    """Most classes of the catalogue are ValueErrors, and those were replaced by SL308."""
    written = error(id, where="mylib::scale", got="3 columns", expected="4 columns", what="too few", fix="add one")
    (tmp_path / "answer.json").write_text(json.dumps(error_parts(written)))
    with pytest.raises(type(written)) as caught:
        worker.read_answer(tmp_path / "answer.json", ["mylib"], "last words")
    assert error_parts(caught.value) == error_parts(written)


@pytest.mark.long
def test_an_import_that_ends_the_process_is_an_error_of_the_catalogue(tmp_path):
    source = "import json, os, sys\nopen(json.load(open(sys.argv[1]))[1], 'w').write('[{')\n"
    source += "sys.stderr.write('last words'); sys.stderr.flush(); os._exit(0)\n"
    with fails("SL308", "last words"):
        package(wheel(tmp_path, {"mylib/__init__.py": source}))


def test_a_process_that_an_import_leaves_behind_is_not_waited_for(tmp_path):
    """It held the pipe open, and ``shiplap package`` waited for it to end."""
    pid = tmp_path / "pid"
    source = f"import subprocess\nopen({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '300']).pid))\n"
    with fails("SL308", "no op is declared"):
        package(wheel(tmp_path, {"mylib/__init__.py": source}))
    os.kill(int(pid.read_text()), signal.SIGKILL)  # ProcessLookupError if it had been waited for


@pytest.mark.parametrize("name", ["mylib-1.0-py3\nRoot: x-none-any.whl", "my lib-1.0-py3-none-any.whl"])
def test_a_file_name_adds_no_line_to_the_metadata(name, tmp_path):
    with fails("SL310"):
        package(wheel(tmp_path, {}, name))


# --- libraries --------------------------------------------------------------------------------------------------------


def test_a_damaged_library_gives_a_tag_or_a_reason(tmp_path):
    """Its headers are changed by bytes: sizes, offsets and counts that lead out of the file, or around in it."""
    whole = compile_c(tmp_path, "storm", {"twice": declare(None)}, SOURCE, configs={"twice": ["tile"]}).read_bytes()
    path, rng = tmp_path / "library.so", random.Random(17)
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            start = rng.choice([0, 0, 64, len(whole) - 2000, rng.randrange(len(whole))])
            content[min(len(whole) - 1, start + rng.randrange(2000 if start else 64))] = rng.randrange(256)
        path.write_bytes(mutated(rng, bytes(content)) if rng.random() < 0.2 else content)
        tag, why = platform_tag([path])
        assert tag.startswith(("manylinux_2_", "linux_")), why
        assert why.isprintable()


def test_a_library_that_needs_a_control_sequence_does_not_control_the_terminal(tmp_path):
    path = tmp_path / "library.so"
    linked = ["-shared", "-x", "c", "/dev/null", "-Wl,--no-as-needed", "-lm"]
    subprocess.run(["cc", *linked, "-o", path], check=True)
    whole = path.read_bytes()
    assert b"libm.so.6\0" in whole
    path.write_bytes(whole.replace(b"libm.so.6\0", b"\x1b[2J\x1b[1m\0"))
    tag, why = platform_tag([path])
    assert tag.startswith("linux_")
    assert "\x1b" not in why


# --- the backend ------------------------------------------------------------------------------------------------------

PROJECTS = {
    "not UTF-8": b"\xff\xfe",
    "a number for a table": b"tool = 5",
    "a number for the inner table": b"[tool]\nshiplap = 5",
    "a list for the table": b"[tool.shiplap]\npackage = []",
    "deeper than a stack": b"a = " + b"[" * 50_000,
    "tables deeper than a stack": b"a = " + b"{a = " * 50_000,
    "no name": b"[tool.shiplap.package]\nbackend = ''",
    "no module": b"[tool.shiplap.package]\nbackend = 'no_such_backend'",
    "a relative module": b"[tool.shiplap.package]\nbackend = '.x'",
    "a NUL": b'[tool.shiplap.package]\nbackend = "a\\u0000b"',
    "no attribute": b"[tool.shiplap.package]\nbackend = 'os:nothing.x'",
    "no backend": b"[tool.shiplap.package]\nbackend = 'os'",
    "longer than any": b"#" * (1 << 21),
}


DEEP = """
from shiplap.packaging import backend
from shiplap_testing.support import fails
with fails("SL308"):
    backend.build_wheel("dist")
"""


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_of_another_form_is_an_error_of_the_catalogue(name, tmp_path, monkeypatch):
    """AttributeError, UnicodeDecodeError, RecursionError and ImportError came out of the hook."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_bytes(PROJECTS[name])
    if "deeper" not in name:
        with fails("SL308"):
            backend.build_wheel("dist")
    else:
        # In a process of its own: behind other tests of a worker, the error of a RecursionError could not be pickled.
        done = python("-c", DEEP, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    with pytest.raises((ShiplapError, AttributeError)):
        backend.build_sdist  # noqa: B018


def test_a_project_that_is_a_fifo_hangs_nobody(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pyproject.toml")
    with fails("SL308", "no regular file"):
        backend.build_wheel("dist")
