"""Programs captured in one trace are what each is alone; shipped rewrites are proven when a graph calls for it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

import shiplap as sl
from shiplap.rewrite import Program, Rewrite, prove_rewrite
from shiplap.rewrite.batched_trace import capture_program, capture_together, group_for_tracing, record_calls
from shiplap.rewrite.normalize_call import canonical_arguments, canonical_name
from shiplap.rewrite.shipped import attention, everything, rms_norm, rotary
from shiplap.torch_private.graph_nodes import node_value
from shiplap.torch_private.inductor_passes import CapturedGraph
from shiplap_testing.effort import sampled


def written(captured: CapturedGraph) -> list[str]:
    """A graph without its names: inputs by their number, in order; then calls, shapes and strides of results."""
    calls = [n for n in captured.graph.nodes if n.op != "placeholder"]
    names: dict[Node, str] = {n: f"call {i}" for i, n in enumerate(calls)}
    names |= {n: f"input {role}" for n, role in captured.roles.items()}
    rows = [f"{names[n]}: {_held(n)}" for n in captured.roles]
    for node in calls:
        given = map_arg((node.args, dict(node.kwargs)), names.__getitem__)
        rows.append(f"{node.op} {node.target if node.op != 'output' else ''} {given} {_held(node)}")
    return sorted(rows[: len(captured.roles)]) + rows[len(captured.roles) :]


def _held(node: Node) -> str:
    held = node_value(node)
    return f"{held.dtype} {tuple(held.shape)} {held.stride()}" if isinstance(held, Tensor) else ""


@pytest.mark.parametrize(
    "made", sampled([attention[0], rms_norm, rotary], long=["attention"], name=lambda r: r.name), ids=lambda r: r.name
)
def test_a_piece_of_one_trace_is_the_trace_of_the_program(made: Rewrite) -> None:
    batch = max(group_for_tracing(iter(made.programs()), made.level), key=len)
    assert len(batch) > 3
    pieces = capture_together(batch, made.level)
    assert pieces is not None
    for program, piece in list(zip(batch, pieces, strict=True))[:: max(1, len(batch) // 3)]:
        piece.graph.lint()
        assert written(piece) == written(capture_program(program, made.level, program.train)), program.label


def _in_one_form(captured: CapturedGraph) -> list[str]:
    """What a graph computes, in the one form of calls: by what, of what, and what comes out."""
    names: dict[Node, str] = {n: f"input {role}" for n, role in captured.roles.items()}
    rows = []
    for node in captured.graph.nodes:
        if node.op.startswith("call"):
            names[node] = f"call {len(rows)}"
            given = map_arg(canonical_arguments(node), names.__getitem__)
            rows.append(f"{canonical_name(node)} {sorted(given.items(), key=str)} {_held(node)}")
    return rows


@pytest.mark.parametrize("made", sampled(everything, 4), ids=lambda r: r.name)
def test_what_is_noted_of_a_program_is_what_dynamo_writes(made: Rewrite) -> None:
    """The proofs of shipped rewrites rest on it: a torch that writes other calls shows here."""
    for batch in group_for_tracing((p for p in made.programs() if not p.dynamic), made.level):
        pieces = capture_together(batch, made.level)
        assert pieces is not None
        for program, piece in zip(batch, pieces, strict=True):
            mine = record_calls(program, made.level)
            assert mine is not None, program.label
            assert sorted(_in_one_form(mine)) == sorted(_in_one_form(piece)), program.label


def test_what_is_not_noted_is_left_to_dynamo() -> None:
    x = torch.randn(2, 3)
    assert record_calls(Program(lambda x: x.sin(), (x,)), "joint") is None
    assert record_calls(Program(lambda x: x.sin(), (x,), dynamic=True), "pre-grad") is None
    assert record_calls(Program(lambda x: x, (x,)), "pre-grad") is None
    assert record_calls(Program(lambda x: x.sin().add_(1), (x,)), "pre-grad") is None
    assert record_calls(Program(lambda x: x @ x, (x,)), "pre-grad") is None  # whose error is that of Dynamo


def test_programs_that_share_a_mode_are_captured_alone() -> None:
    def frozen(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.sin()

    programs = [Program(frozen, (torch.randn(2, 3),)), Program(lambda x: x.cos(), (torch.randn(2, 3),))]
    assert capture_together(programs, "pre-grad") is None


def test_a_program_that_is_no_graph_is_named() -> None:
    made = sl.rewrite(lambda x: torch.relu(x), lambda x: x.relu(), name="odd", samples=lambda: [(torch.ones(3),)])

    def broken(x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x

    programs = [Program(lambda x: torch.relu(x), (torch.ones(2),), "good"), Program(broken, (torch.ones(2),), "bad")]
    made.programs = lambda: iter(programs)  # type: ignore[method-assign]
    with pytest.raises(sl.ShiplapError, match=r"SL804(.|\n)*bad"):
        prove_rewrite(made)


def test_what_ships_is_proven_when_a_graph_calls_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    proven: list[str] = []

    def noted(rewrite: Rewrite) -> Rewrite:
        proven.append(rewrite.name)
        return rewrite

    monkeypatch.setattr(sys.modules["shiplap.rewrite.scope"], "require_proof", noted)
    scope = sl.rewrites(*everything)
    assert proven == []
    torch._dynamo.reset()
    with scope, torch.no_grad():
        torch.compile(lambda x: (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).sin())(torch.randn(3, 8))
    assert proven == ["rms_norm"]
    torch._dynamo.reset()
    with scope, torch.no_grad():  # a root, and no norm
        torch.compile(lambda x: (x * torch.rsqrt(x.sin() + 2)).cos())(torch.randn(3, 8))
    assert proven == ["rms_norm"]


def test_no_gradient_is_asked_of_a_constant() -> None:
    program = Program(lambda x, mask: x + mask, (torch.ones(2), torch.ones(2)), constants=(1,))
    assert [t.requires_grad for t in program.leaves(program.args, True)] == [True, False]
    assert not any(t.requires_grad for t in program.leaves(program.args, False))
