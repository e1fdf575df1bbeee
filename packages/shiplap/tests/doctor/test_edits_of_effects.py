"""A call that is made for its effect moves into an op only where nobody can notice that the graph makes it."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shiplap.doctor.edits_of_effects import effect_in_op, writes_out_of_order
from tests.doctor.programs import CountingBackend, proposals

HOOK = """
    import torch
    norms = {}
    def watch(name):
        def hook(module, inputs, output):
            norms.setdefault(name, []).append(output.norm().item())  # HERE
        return hook
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    for name, child in net.named_children():
        child.register_forward_hook(watch(name))
"""


def test_a_hook_notes_numbers_in_the_order_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call lies in a function that the compiled one calls, where torch would lose it."""
    text, other = proposals(tmp_path, HOOK, effect_in_op, "output.norm().item", "", "hook", "item")
    assert "(count: torch.Tensor, name: str, output: torch.Tensor) -> None:" in text
    assert "name: int, output: torch.Tensor" in other
    graphs = CountingBackend()
    # The compiler imports the module of a function that it traces as a part of another one.
    module = ModuleType("hooked")
    monkeypatch.setitem(sys.modules, "hooked", module)
    exec(text, ran := vars(module))
    run = torch.compile(ran["net"], backend=graphs, fullgraph=True)
    x = torch.randn(3, 2, requires_grad=True)
    for _ in range(2):
        run(x).sum().backward()
    hidden = ran["net"][0](x).norm().item()
    assert {name: len(values) for name, values in ran["norms"].items()} == {"0": 3, "1": 2}  # one of them eager
    assert ran["norms"]["0"][0] == pytest.approx(hidden)
    assert graphs.frame_count == 1


CALLS = """
    import logging
    import torch
    log = logging.getLogger("program")
    KEPT, STEP = [], 0
    def f(x, y):
        {}  # HERE
        return x * 2
"""


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        ('log.info("%s of %s", x.mean(), y.shape)', "y: torch.Tensor, x: torch.Tensor"),
        ('print(f"{x.sum():.3f}")', "x: torch.Tensor"),
        ("KEPT.append(float(x.sum()))", "x: torch.Tensor"),
        ("KEPT.append((x.shape, y.tolist()))", "x: torch.Tensor, y: torch.Tensor"),
    ],
)
def test_what_only_takes_numbers_of_tensors(tmp_path: Path, call: str, parameters: str) -> None:
    (found,) = proposals(tmp_path, CALLS.format(call), effect_in_op, "", "", "f", "item")
    assert f"(count: torch.Tensor, {parameters}) -> None:\n    count += 1\n    {call}\n" in found


@pytest.mark.parametrize(
    "call",
    [
        "KEPT.append(x.sum())",  # the graph may use the memory again
        "y.add_(x.sum().item())",  # an object of the function
        "KEPT.append(x.cpu())",
        "KEPT.append((x.item(), time.time()))",  # a graph runs in no order by time
        "with lock: KEPT.append(x.item())",
        "try: KEPT.append(x.item())\n        except ValueError: pass",
        "total = x.sum().item()",
        "KEPT.append(*x.tolist())",
        "KEPT.append(y := x.item())",
        'print("a", logging.root, x.item())',  # an attribute of a module may have changed
        "print(y.add_(1).item())",  # the op would have to declare it
        "global STEP\n        STEP = x.item()  # HERE\n        print(STEP)",
    ],
)
def test_what_would_be_noticed_stays(tmp_path: Path, call: str) -> None:
    assert proposals(tmp_path, CALLS.format(call), effect_in_op, "", "", "f", "item") == []


@pytest.mark.parametrize("call", ["KEPT.append(x.item())", "log.info('%s', STEP + x.item())"])
def test_an_object_that_functions_use_besides_is_left_alone(tmp_path: Path, call: str) -> None:
    """What a function adds itself comes after its graph, and so behind what the graph adds."""
    imported = CALLS.format(call).replace("KEPT, STEP = [], 0", "from store import KEPT, STEP")
    other = "    def g(x):\n        return len(KEPT) + STEP\n"
    assert proposals(tmp_path, imported + other, effect_in_op, "", "", "f", "item") == []
    source = CALLS.format(call) + "    def g(x):\n        global STEP\n        STEP += len(KEPT)\n"
    assert proposals(tmp_path, source, effect_in_op, "", "", "f", "item") == []
    logged = CALLS.format("log.info('%s', x.item())") + "    def g(x):\n        log.info('g')\n"
    assert len(proposals(tmp_path, logged, effect_in_op, "", "", "f", "item")) == 1


DUMP = """
    import io
    import torch
    dumps, kept = [], []
    class Net(torch.nn.Module):
        def forward(self, x):
            h = x * 2
            if self.training:
                buffer = io.BytesIO()  # HERE
                torch.save(h.detach(), buffer)
                dumps.append(buffer.getvalue())
            return h
"""


def test_what_uses_a_variable_of_the_call_moves_with_it(tmp_path: Path) -> None:
    (found,) = proposals(tmp_path, DUMP, effect_in_op, "_io.BytesIO", "", "forward", "object")
    exec(found, ran := {})
    x = torch.randn(3, requires_grad=True)
    torch.compile(ran["Net"](), backend=CountingBackend(), fullgraph=True)(x).sum().backward()
    (dump,) = ran["dumps"]
    torch.testing.assert_close(torch.load(io.BytesIO(dump)), (x * 2).detach())


@pytest.mark.parametrize(
    "change",
    [
        ("return h", "return h * len(buffer.getvalue())"),
        ("dumps.append(buffer.getvalue())", "kept.append(buffer)\n            return buffer"),
        ("dumps.append(buffer.getvalue())", "self.buffer = buffer"),
        ("torch.save(h.detach(), buffer)", "torch.save(h, buffer)"),
    ],
)
def test_a_variable_that_is_used_behind_the_call_keeps_it_in_place(tmp_path: Path, change: tuple[str, str]) -> None:
    found = proposals(tmp_path, DUMP.replace(*change), effect_in_op, "_io.BytesIO", "", "forward", "object")
    assert [text for text in found if "h: torch.Tensor" in text] == []


def test_a_kept_tensor_is_a_copy(tmp_path: Path) -> None:
    """The graph may use the memory of its own one again."""
    (found,) = proposals(tmp_path, CALLS.format("KEPT.append(x.detach())"), effect_in_op, "", "", "f", "item")
    assert "    x = x.detach().clone()\n    KEPT.append(x.detach())\n" in found


def test_a_program_has_a_variable_count_and_an_op_in_each_file(tmp_path: Path) -> None:
    source = CALLS.format("print(count.item())").replace("x, y", "x, count")
    (found,) = proposals(tmp_path, source, effect_in_op, "", "", "f", "item")
    assert "program::print_op_of_program" in found
    exec(found, ran := {})
    run = torch.compile(ran["f"], backend=CountingBackend(), fullgraph=True)
    run(torch.ones(2), torch.tensor(5))
    assert int(ran["CALLS_OF_OPS"]) == 1


@pytest.mark.parametrize(
    ("call", "setting", "expected"),
    [
        ("print(x.item())", "print", True),
        ("log.info('%s', x.item())", "warnings.warn", True),
        ("print(x.item())", "note_later", True),
        ("print(x.item())", "keep_later", False),
        ("KEPT.append(x.item())", "print", False),
        ("print(x.item())", "", False),
    ],
)
def test_lines_of_graphs_and_lines_behind_them_have_no_common_order(
    tmp_path: Path, call: str, setting: str, expected: bool
) -> None:
    """The graph writes the one where the call stood, and torch the other when the graph has run."""
    (found,) = proposals(tmp_path, CALLS.format(call), effect_in_op, "", "", "f", "item")
    functions = "def note_later(x):\n    print(x)\ndef keep_later(x):\n    KEPT.append(x)\n"
    added = f"torch._dynamo.config.reorderable_logging_functions.add({setting})\n" if setting else ""
    assert writes_out_of_order([found, functions + added]) == expected
