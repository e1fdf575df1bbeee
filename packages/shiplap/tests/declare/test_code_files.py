"""The text by which a tensor that code holds is known."""

import hashlib
import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import shiplap as sl
from shiplap.declare import code_files
from shiplap.declare.code_files import _file_has_function_code, shiplap_digest, tensor_text
from shiplap.declare.code_parts import (
    applied_class,
    closure_cell_value,
    defining_module,
    instance_dict,
    shortened_text,
)


def test_a_tensor_is_known_by_its_form_and_its_values():
    one, alike, other = torch.arange(3.0), torch.arange(3.0), torch.ones(3)
    text, readable = tensor_text(one)
    assert readable
    assert text.startswith("Tensor torch.float32 cpu (3,) ")
    assert tensor_text(alike) == (text, True)
    assert tensor_text(one) == (text, True), "what was read is kept"
    assert tensor_text(other)[0] != text
    assert tensor_text(alike.view(3, 1))[0] != text
    one[0] = 5
    assert tensor_text(one)[0] != text, "values that were written are read again"
    assert tensor_text(torch.zeros(0))[1]


def test_values_that_cannot_be_read_are_left_out(monkeypatch):
    assert tensor_text(torch.empty(2, device="meta")) == ("Tensor torch.float32 meta (2,)", True)
    text, readable = tensor_text(torch.eye(2).to_sparse())
    assert (text, readable) == ("Tensor torch.float32 cpu (2, 2) torch.sparse_coo", False)

    def refuse(value):
        raise RuntimeError("a capture is running")

    monkeypatch.setattr(code_files, "_tensor_values_text", refuse)
    assert tensor_text(torch.full((2,), 7.0)) == ("Tensor torch.float32 cpu (2,)", False)


@pytest.mark.parametrize("most", [1, 2])
def test_few_tensors_are_held(monkeypatch, most):
    monkeypatch.setattr(code_files, "_tensors", held := {})
    monkeypatch.setattr(code_files, "_MOST_TENSORS", most)
    for number in range(4):
        tensor_text(torch.full((2,), float(number)))
        assert 1 <= len(held) <= most


def test_a_file_that_was_edited_after_its_import_does_not_have_the_code_of_its_functions(tmp_path):
    """Functions of other files, which a module has imported, do not count."""
    file = tmp_path / "edited.py"
    file.write_text("from re import escape\ndef f(x):\n    return x + 1\n")
    spec = importlib.util.spec_from_file_location("edited", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    holds = partial(_file_has_function_code, str(file))
    assert holds(module)
    assert holds(None)
    file.write_text("from re import escape\ndef f(x):\n    return x + 2\n")
    assert not holds(module)


def test_shiplap_has_a_digest_of_its_own_code():
    files = sorted(Path(sl.__file__).parent.rglob("*.py"))
    assert shiplap_digest() == hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:32]


def test_versions_stand_for_the_code_of_well_known_libraries(monkeypatch):
    version_text = code_files.version_text.__wrapped__
    assert version_text("_pytest") == f"_pytest {pytest.__version__}"
    assert version_text("unheard_of") == "unheard_of"
    monkeypatch.setattr(code_files, "VERSIONED", frozenset({"cupy_of_a_device"}))
    assert version_text("cupy_of_a_device") == "cupy_of_a_device"
    monkeypatch.setitem(sys.modules, "cupy_of_a_device", SimpleNamespace())
    assert version_text("cupy_of_a_device") == "cupy_of_a_device"
    monkeypatch.setitem(sys.modules, "cupy_of_a_device", SimpleNamespace(__version__="2"))
    assert version_text("cupy_of_a_device") == "cupy_of_a_device 2"
    assert [code_files.top_package(name) for name in ("a.b.c", "a", None)] == ["a", "a", ""]


def test_the_code_of_pythons_own_modules_is_covered_by_its_version(monkeypatch):
    covers = code_files.version_covers_code.__wrapped__
    assert [covers(top) for top in ("torch", "json", "sys", "numba", "mine")] == [True, True, True, True, False]
    for file, covered in (
        ("/home/me/json.py", False),
        (str(Path(code_files.STANDARD[0], "site-packages", "json.py")), False),
    ):
        module = ModuleType("json")
        module.__file__ = file
        monkeypatch.setitem(sys.modules, "json", module)
        assert covers("json") is covered


def test_the_files_of_a_module(tmp_path, monkeypatch):
    file = tmp_path / "alone.py"
    file.write_text("def f(x):\n    return x + 1\n")
    spec = importlib.util.spec_from_file_location("alone_module", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "alone_module", module)
    assert code_files.module_files("alone_module") == [("alone.py", code_files.file_digest(file))]
    file.write_text("def f(x):\n    return x + 2\n")
    assert code_files.module_files("alone_module") == []
    assert code_files.module_files("sys") == code_files.module_files("never.imported") == []
    assert code_files.extension_file("alone_module") is code_files.extension_file(None) is None
    monkeypatch.setitem(sys.modules, "compiled_module", made := ModuleType("compiled_module"))
    made.__file__ = "/x/compiled_module.so"
    assert code_files.extension_file("compiled_module") == "/x/compiled_module.so"


class Doubled(torch.autograd.Function):
    @classmethod
    def other(cls): ...


class Applied:
    @classmethod
    def apply(cls): ...


def test_the_parts_of_objects():
    assert applied_class(Doubled.apply) is Doubled
    for value in (Doubled.other, Doubled, Applied.apply, Applied().apply, len, "apply"):
        assert applied_class(value) is None
    assert [defining_module(v) for v in (applied_class, Applied, 3)] == [applied_class.__module__, __name__, ""]
    assert defining_module(eval("lambda: 0", {"__name__": 3})) == ""

    def around():
        return late

    assert closure_cell_value(around.__closure__[0]) is None
    late = 3
    assert closure_cell_value(around.__closure__[0]) == late
    assert (instance_dict(SimpleNamespace(a=1)), instance_dict(3)) == ({"a": 1}, {})
    assert shortened_text("a" * 399) == "a" * 399
    assert shortened_text("a" * 400) == hashlib.sha256(b"a" * 400).hexdigest()
