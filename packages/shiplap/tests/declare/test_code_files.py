"""The text by which a tensor that code holds is known."""

import importlib.util
import re
from functools import partial

import pytest
import torch

from shiplap.declare import code_files
from shiplap.declare.code_files import _file_has_function_code, shiplap_digest, tensor_text


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
    assert re.fullmatch(r"[0-9a-f]{32}", shiplap_digest())
