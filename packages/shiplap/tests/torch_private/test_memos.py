"""What is computed once and kept is built outside of torch's modes; a memo of tensors that is not is found here."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import shiplap.torch_private as compat
from shiplap.kernels.triton.async_errors import LateErrors
from shiplap.kernels.triton.template_key import DeviceTable
from shiplap.torch_private.dispatcher_calls import built_outside_modes, outside_modes
from shiplap_testing.paths import REPOSITORY

GUARDS = {"outside_modes", "built_outside_modes"}
NOT_BUILT_HERE = {
    "shiplap/declare/code_files.py": "tensors that code holds, by identity, with the text of their values",
    "shiplap/dispatch/second_derivative.py": "the tensors of one backward, by identity",
    "shiplap/torch_private/graph_nodes.py": "the tensors of one trace, by identity",
    "shiplap/tuning/verify.py": "the references of one tuning run, which ends before its caller's mode does",
    "shiplap/tuning/inputs.py": "the arguments of one tuning run",
    "shiplap/inductor/bound_call.py": "memory of one lowering, overwritten before each use",
}


def memos_of(tree: ast.AST) -> Iterator[int]:
    """Lines of memos whose annotation names tensors: cached functions and properties, dicts and lists that are kept."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            cached = any("cache" in ast.unparse(d) for d in node.decorator_list)
            if cached and node.returns is not None and re.search(r"\bTensor\b", ast.unparse(node.returns)):
                yield node.lineno
        elif isinstance(node, ast.AnnAssign) and isinstance(node.value, (ast.Dict, ast.Call)):
            held = ast.unparse(node.annotation)
            kept = isinstance(node.target, ast.Attribute) or node.col_offset == 0
            if kept and re.search(r"dict\[.*\bTensor\b", held, re.IGNORECASE) and "Callable" not in held:
                yield node.lineno


def unguarded(path: Path) -> list[int]:
    tree = ast.parse(path.read_text())
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return [] if named & GUARDS else [*memos_of(tree)]


@pytest.mark.docs
def test_every_memo_of_tensors_is_built_outside_of_modes() -> None:
    sources = [p for p in REPOSITORY.glob("packages/*/src/**/*.py") if "shiplap-testing" not in p.parts]
    assert len(sources) > 300
    found = {p.as_posix().partition("/src/")[2]: lines for p in sources if (lines := unguarded(p))}
    assert {name: lines for name, lines in found.items() if name not in NOT_BUILT_HERE} == {}


def test_an_unguarded_memo_is_found(tmp_path: Path) -> None:
    file = tmp_path / "memo.py"
    file.write_text("@cache\ndef table(n: int) -> Tensor: ...\n_kept: dict[int, Tensor] = {}\n")
    assert unguarded(file) == [2, 3]


class Wrapped(Tensor):
    """A subclass that a mode of a user might return."""


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference": torch.inference_mode,
    "fake": lambda: compat.fake_mode(symbolic=False),
    "device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_value_is_built_outside_of_a_mode(mode: str) -> None:
    weight = torch.ones(2, 2, requires_grad=True)

    @built_outside_modes
    def build(weight: Tensor) -> Tensor:
        return weight @ weight + torch.ones(2, 2)

    with MODES[mode]():
        made = build(weight)
    assert (type(made), made.dtype, made.device.type) == (Tensor, torch.float32, "cpu")
    assert not made.is_inference()
    assert not made.requires_grad
    assert made.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_a_value_is_built_outside_of_a_transform() -> None:
    kept: list[Tensor] = []
    constant = torch.ones(3)

    def loss(x: Tensor) -> Tensor:
        with outside_modes(constant):
            kept.append(constant * 2)
        return (x * kept[0]).sum()

    assert torch.func.grad(loss)(torch.zeros(3)).tolist() == [2.0, 2.0, 2.0]
    assert kept[0].tolist() == [2.0, 2.0, 2.0]
    kept[0].requires_grad_().sum().backward()


def test_what_belongs_to_a_mode_stays_in_it() -> None:
    with compat.fake_mode(symbolic=False) as mode, torch.inference_mode():
        fake = mode.from_tensor(torch.ones(2))
        with outside_modes(fake):
            assert type(fake * torch.ones(2)) is type(fake)
            assert not torch.is_inference_mode_enabled()


def test_a_tensor_in_a_list_stays_in_its_mode() -> None:
    @built_outside_modes
    def build(tensors: list[Tensor], pairs: tuple[tuple[Tensor, int], ...]) -> Tensor:
        return torch.ones(2)

    with compat.fake_mode(symbolic=False) as mode:
        fake = mode.from_tensor(torch.ones(2))
        assert type(build([fake], ())) is type(build([], ((fake, 1),))) is type(fake)
        assert type(build([], ())) is Tensor


@pytest.mark.parametrize("mode", ["inference", "device"])
def test_the_tables_of_a_template_are_values_for_every_mode(mode: str) -> None:
    table = DeviceTable("here", lambda sizes: torch.arange(sizes["n"]))
    with MODES[mode]():
        first = table({"n": 3}, torch.device("cpu"))
    assert first.tolist() == [0, 1, 2]
    assert not first.is_inference()
    assert table({"n": 3}, torch.device("cpu")) is first


def test_a_table_of_the_default_dtype_is_built_for_each() -> None:
    table = DeviceTable("here", lambda sizes: torch.ones(sizes["n"]))
    assert table({"n": 2}, torch.device("cpu")).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert table({"n": 2}, torch.device("cpu")).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_word_of_late_errors_has_memory_whatever_the_default_device() -> None:
    errors = LateErrors()
    with torch.device("meta"):
        assert errors.word(torch.device("cpu"))
