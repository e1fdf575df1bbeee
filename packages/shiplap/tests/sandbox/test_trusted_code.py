"""Code is somebody's by what it is, and not by the file that it names."""

from __future__ import annotations

import contextlib
import math
import os
import posixpath
import types

import pytest
import torch

from shiplap.sandbox import trusted_code
from shiplap.sandbox.trusted_code import OURS, TRUSTED, is_genuine_code, is_trusted_file
from shiplap.sandbox.trusted_objects import is_trusted_function


def compiled(file: str) -> types.FunctionType:
    names: dict[str, types.FunctionType] = {}
    exec(compile("def it(*args, **rest):\n    return True\n", file, "exec"), names)
    return names["it"]


@pytest.mark.parametrize("file", [os.__file__, torch.__file__, "<frozen os>", "<frozen none>", trusted_code.__file__])
def test_a_name_makes_nothing_genuine(file, monkeypatch):
    monkeypatch.setattr(trusted_code, "_began", math.inf)  # files may be edited while tests run
    assert not is_genuine_code(compiled(file).__code__)
    assert not is_trusted_function(compiled(file))


@pytest.mark.parametrize("own", [os.fsdecode, posixpath.join, torch.nn.functional.gelu.__class__, is_genuine_code])
def test_what_a_file_holds_is_genuine(own):
    code = getattr(own, "__code__", None) or torch.nn.Linear.forward.__code__
    assert is_genuine_code(code)


@pytest.mark.parametrize(
    "wrap",
    [torch.no_grad(), contextlib.contextmanager, torch.compile, torch.jit.ignore, staticmethod, property],
    ids=["no_grad", "contextmanager", "compile", "ignore", "staticmethod", "property"],
)
def test_a_decorator_makes_nothing_theirs(wrap):
    assert not is_trusted_function(wrap(lambda *args: True))


def test_code_of_theirs_with_names_of_others_is_not_theirs():
    other = types.FunctionType(posixpath.join.__code__, {"os": None, "__name__": "posixpath"}, "join")
    assert is_genuine_code(other.__code__)
    assert not is_trusted_function(other)
    assert is_trusted_function(posixpath.join)


def test_a_file_that_was_written_since_is_not_read(tmp_path, monkeypatch):
    """It holds something else than what this process runs."""
    file = tmp_path / "it.py"
    file.write_text("x = 1\n")
    monkeypatch.setattr(trusted_code, "OURS", os.path.join(os.path.realpath(tmp_path), ""))
    monkeypatch.setattr(trusted_code, "_began", os.stat(file).st_mtime - 1)
    assert is_genuine_code(compiled(str(file)).__code__)
    monkeypatch.setattr(trusted_code, "_began", os.stat(file).st_mtime + 1)
    assert not is_genuine_code(compiled(str(file)).__code__)


def test_a_folder_that_begins_with_the_name_of_a_trusted_one_is_not_trusted(tmp_path, monkeypatch):
    """A candidate in ``shiplap_mine`` beside ``shiplap`` held its own code, and was genuine."""
    near, ours = tmp_path / "shiplap_mine", os.path.join(os.path.realpath(tmp_path), "shiplap", "")
    near.mkdir()
    (near / "it.py").write_text("def it(*args, **rest):\n    return True\n")
    monkeypatch.setattr(trusted_code, "OURS", ours)
    monkeypatch.setattr(trusted_code, "TRUSTED", (ours,))
    assert is_trusted_file(ours)
    assert not is_trusted_file(str(near))
    assert not is_genuine_code(compiled(str(near / "it.py")).__code__)
    assert all(place.endswith(os.sep) for place in (*TRUSTED, OURS))
