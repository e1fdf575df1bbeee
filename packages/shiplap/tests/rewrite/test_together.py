"""Programs captured in one trace are what each is alone; shipped rewrites are proven when a graph calls for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

import shiplap as sl
from shiplap.compat.nodes import node_value
from shiplap.compat.passes import Captured
from shiplap.rewrite import Program, Rewrite, prove
from shiplap.rewrite.shipped import attention, everything, rms_norm, rotary
from shiplap.rewrite.together import alone, apart, batches


def written(captured: Captured) -> list[Any]:
    """A graph without its names: calls, arguments by number, shapes and strides, and which input is which."""
    numbers: dict[Node, int] = {n: i for i, n in enumerate(captured.graph.nodes)}
    rows = []
    for node in captured.graph.nodes:
        held = node_value(node)
        kind = (held.dtype, tuple(held.shape), held.stride()) if isinstance(held, Tensor) else None
        target = node.target if node.op.startswith("call") else ""
        given = map_arg((node.args, dict(node.kwargs)), lambda n: f"%{numbers[n]}") if node.op != "placeholder" else ()
        rows.append((node.op, str(target), str(given), kind, captured.roles.get(node)))
    return rows


def ordered(rows: list[Any]) -> list[str]:
    """Placeholders come in the order in which a trace meets them, which is that of the program in either."""
    return [str(r) for r in rows]


@pytest.mark.parametrize("made", [attention[0], rms_norm, rotary], ids=lambda r: r.name)
def test_a_piece_of_one_trace_is_the_trace_of_the_program(made: Rewrite) -> None:
    batch = max(batches(iter(made.programs()), made.level), key=len)
    assert len(batch) > 3
    pieces = apart(batch, made.level, batch[0].train)
    assert pieces is not None
    for program, piece in list(zip(batch, pieces, strict=True))[:: max(1, len(batch) // 3)]:
        piece.graph.lint()
        assert ordered(written(piece)) == ordered(written(alone(program, made.level, program.train))), program.label


def test_programs_that_share_a_mode_are_captured_alone() -> None:
    def frozen(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.sin()

    programs = [Program(frozen, (torch.randn(2, 3),)), Program(lambda x: x.cos(), (torch.randn(2, 3),))]
    assert apart(programs, "pre-grad", True) is None


def test_a_program_that_is_no_graph_is_named() -> None:
    made = sl.rewrite(lambda x: torch.relu(x), lambda x: x.relu(), name="odd", samples=lambda: [(torch.ones(3),)])

    def broken(x: Tensor) -> Tensor:
        return x + float(x.sum().item() > 0 and open("/nowhere"))  # noqa: SIM115

    programs = [Program(lambda x: torch.relu(x), (torch.ones(2),), "good"), Program(broken, (torch.ones(2),), "bad")]
    made.programs = lambda: iter(programs)  # type: ignore[method-assign]
    with pytest.raises(sl.ShiplapError, match="SL804(.|\n)*bad"):
        prove(made)


def test_what_ships_is_proven_when_a_graph_calls_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    proven: list[str] = []

    def noted(rewrite: Rewrite) -> Rewrite:
        proven.append(rewrite.name)
        return rewrite

    monkeypatch.setattr("shiplap.rewrite.scope.proven", noted)
    scope = sl.rewrites(*everything)
    assert proven == []
    torch._dynamo.reset()
    with scope, torch.no_grad():
        torch.compile(lambda x: (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).sin())(torch.randn(3, 8))
    assert proven == ["rms_norm"]
