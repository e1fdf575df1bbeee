"""Rotary position embedding, ``x * cos + rotate_half(x) * sin``: the same by halves, each element of ``x`` read once.

Recognised by what it computes (see ``shiplap.rewrite.match_by_value``): whatever calls lie between ``x`` and a result
of its shape, if that is each pair of elements turned by an angle of its own, it is a rotary embedding. Pairs are the
two halves of the last dim (Llama, GPT-NeoX) or neighbours (GPT-J, Cohere), cosines and sines are as wide as ``x`` or as
a half, two tensors or one of complex numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph, Node

from shiplap.declare.code_digest import code_digest
from shiplap.rewrite import passthrough_ops
from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.graph import describe, place, source_line, value
from shiplap.rewrite.layout import dim_order
from shiplap.rewrite.match import Level, NearMiss, Outcome
from shiplap.rewrite.match_by_value import Part, above, agree, part, starts
from shiplap.rewrite.program import Program, proving
from shiplap.rewrite.shipped.rotary_programs import programs

ENDS = frozenset({"add", "sub", "cat", "concat", "concatenate", "flatten", "view", *passthrough_ops.CASTS})
JOINS = frozenset({"cat", "concat", "concatenate", "stack", "roll", "flip", "view_as_complex"})
EMPTY = frozenset({"empty_like", "empty", "new_empty", "zeros_like", "new_zeros"})
PRODUCTS = frozenset({"mul", "multiply"})
TRIED = 6  # values of the shape of a result from which it may be computed

Pairs = Literal["halves", "neighbours"]
PAIRS: tuple[Pairs, ...] = ("halves", "neighbours")


@dataclass(frozen=True)
class Turn:
    """How a rotation takes its arguments: which of two sides are the cosines, which way it turns, what the pairs are.

    ``cosines`` is None where one side holds complex numbers.
    """

    pairs: Pairs
    cosines: int | None
    sign: int

    def __call__(self, x: Tensor, sides: Sequence[Tensor]) -> Tensor:
        if self.cosines is None:
            cos, sin = torch.view_as_real(sides[0]).unbind(-1)
        else:
            cos, sin = sides[self.cosines], sides[1 - self.cosines]
        width = x.shape[-1]
        (a, b), (c, d), (s, t) = (self._pair(v, width) for v in (x, cos, sin))
        first, second = (a * c - b * s, b * d + a * t) if self.sign > 0 else (a * c + b * s, b * d - a * t)
        if self.pairs == "halves":
            return torch.cat((first, second), -1)
        return torch.stack((first, second), -1).flatten(-2)

    def _pair(self, given: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The first and the second of each pair; what is half as wide serves both."""
        if given.shape[-1] != width:
            return given, given
        if self.pairs == "halves":
            return given[..., : width // 2], given[..., width // 2 :]
        return given[..., ::2], given[..., 1::2]


class Rotary(Rewrite):
    """Turns pairs by halves where a graph builds a turned copy of ``x`` first."""

    name = "rotary"
    level: Level = "pre-grad"
    anchors = JOINS | EMPTY

    def __init__(self, *, always: bool = False) -> None:
        """``always``: also where what Inductor makes of the original is as fast."""
        self.always = always

    @property
    def digest(self) -> str:
        of = code_digest(Rotary.apply, Rotary._at, Turn.__call__, Turn._pair, _Plan.__call__, _declined)
        return hashlib.sha256(f"{of} {self.always}".encode()).hexdigest()[:16]

    def programs(self) -> Iterator[Program]:
        return programs()

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        gone: set[Node] = set()
        strange: list[Part] = []
        for out in reversed(list(graph.nodes)):  # the largest part first, with the casts behind it
            if out in gone or passthrough_ops.named(out) not in ENDS or not _may_turn(out):
                continue
            piece = _found(out)
            if isinstance(piece, Part):
                strange.append(piece)
            elif piece is not None:
                gone.update(piece[0].nodes)
                yield self._at(graph, *piece)
        for piece in strange:  # what belongs to a match, or to a part that was reported, is no miss of its own
            if gone.isdisjoint(piece.nodes):
                gone.update(piece.nodes)
                yield self._unknown(piece)
        for node in graph.nodes:
            if passthrough_ops.named(node) in EMPTY and (writers := _writers(node)):
                yield self._written(writers)

    def _at(self, graph: Graph, piece: Part, turn: Turn) -> Outcome:
        why = "" if self.always or proving.get() else _declined(piece, turn)
        if why:
            return self._near(piece.out, "cost", why, "leave it: Inductor's own code is used")
        bound = [("x", describe(piece.x)), *((f"side {i}", describe(s)) for i, s in enumerate(piece.sides))]
        plan = _Plan(turn, _products(piece), value(piece.out).dtype)
        given = [piece.x, *piece.sides]
        return place(graph, self.level, self.name, plan, given, [piece.out], _alone(piece), bound)

    def _unknown(self, piece: Part) -> NearMiss:
        sides = len(piece.sides)
        why = f"pairs of {piece.x.name} are mixed, but not turned by angles: it reads {sides} other tensors"
        fix = "write it as x * cos + rotate_half(x) * sin, with cos and sin that broadcast to x"
        return self._near(piece.out, "operator", why, fix)

    def _written(self, writers: Sequence[Node]) -> NearMiss:
        into = passthrough_ops.source(writers[0]).name
        why = f"the two parts of each pair are written into {into}; a part of a graph that is compared writes nothing"
        fix = "join them: torch.stack((a, b), -1).flatten(-2) for neighbours, torch.cat((a, b), -1) for halves"
        return self._near(writers[0], "mutation", why, fix)

    def _near(self, at: Node, obstacle: Any, reason: str, fix: str) -> NearMiss:
        return NearMiss(self.name, self.level, at.name, source_line(at), obstacle, reason, 4, 5, fix)


def _writers(empty: Node) -> list[Node]:
    """The two calls that write sums of products into slices of the last dim of ``empty``. Empty for anything else."""
    writers = [u for u in empty.users if passthrough_ops.named(u) == "setitem" and u.args[0] is empty]
    if len(writers) != 2:
        return []
    for writer in writers:
        index = writer.args[1] if isinstance(writer.args[1], tuple) else (writer.args[1],)
        made = passthrough_ops.handed_on(writer.args[2])
        if not isinstance(index[-1], slice) or passthrough_ops.named(made) not in ("add", "sub"):
            return []
        if not any(
            passthrough_ops.named(passthrough_ops.handed_on(term)) in PRODUCTS
            for term in passthrough_ops.operands(made)
        ):
            return []
    return writers


def _may_turn(out: Node) -> bool:
    """Whether products and joined parts are behind a floating result with pairs in its last dim."""
    held = value(out)
    if not isinstance(held, Tensor) or not held.is_floating_point() or held.dim() < 2:
        return False
    width = held.shape[-1]
    if not isinstance(width, int) or width % 2 or width < 2:
        return False
    names = above(out)
    return bool(names & JOINS) and bool(names & PRODUCTS)


def _found(out: Node) -> tuple[Part, Turn] | Part | None:
    """The part that ends in ``out`` and turns pairs, and how; the part alone where it mixes pairs otherwise."""
    strange = None
    for x in starts(out)[:TRIED]:
        if (piece := part(x, out)) is None:
            continue
        if (turn := _turn(piece)) is not None:
            return piece, turn
        if strange is None and _mixes(piece):
            strange = piece
    return strange


def _mixes(piece: Part) -> bool:
    """Whether ``x`` is multiplied twice, once as it is and once with its pairs exchanged and one sign changed."""
    names = [passthrough_ops.named(n) for n in piece.nodes]
    signed = any(n in ("neg", "negative") for n in names)
    return signed and "getitem" in names and bool({"cat", "stack"} & {*names}) and names.count("mul") >= 2


def _turn(piece: Part) -> Turn | None:
    """How ``piece`` turns pairs, if it does so whatever the numbers are."""
    width, held = value(piece.x).shape[-1], [value(s) for s in piece.sides]
    turns: list[Turn] = []
    if len(held) == 1 and held[0].is_complex():
        turns = [Turn(pairs, None, 1) for pairs in PAIRS]
    elif len(held) == 2 and all(s.dim() and s.is_floating_point() and s.shape[-1] in (width, width // 2) for s in held):
        turns = [Turn(p, c, s) for p, c, s in product(PAIRS, (0, 1), (1, -1))]
    if not turns:
        return None
    rng = torch.Generator().manual_seed(0)
    for x, sides in piece.drawn(rng):
        try:
            got = piece.run(x, sides)
            return next((t for t in turns if agree(got, t(x, sides))), None)
        except Exception:  # sizes are written into a view: the next ones are those of the graph
            continue
    return None


def _products(piece: Part) -> torch.dtype:
    """The dtype in which the part multiplies."""
    held = [value(n).dtype for n in piece.nodes if passthrough_ops.named(n) in PRODUCTS]
    real = [torch.float64 if d == torch.complex128 else torch.float32 if d.is_complex else d for d in held]
    wide: torch.dtype = value(piece.out).dtype
    for dtype in real:
        wide = torch.promote_types(wide, dtype)
    return wide


def _alone(piece: Part) -> list[Node]:
    """The calls of a part that nobody else reads."""
    inside = set(piece.nodes)
    for node in reversed(piece.nodes):
        if node is not piece.out and not all(u in inside for u in node.users):
            inside.discard(node)
    return [n for n in piece.nodes if n in inside]


def _declined(piece: Part, turn: Turn) -> str:
    """Where what Inductor makes of the original is as fast. Measured with torch 2.13 on one thread of a CPU, 8 heads of
    64, 256 tokens, before and after in microseconds: float32 halves 108 and 60, transposed 111 and 74; neighbours 186
    and 123, transposed 222 and 132; bfloat16 halves 83 and 117, transposed 112 and 60, neighbours 277 and 365; complex
    numbers 113 and 123. With the backward pass: halves 572 and 718, transposed 409 and 299; neighbours 913 and 635,
    transposed 761 and 595; bfloat16 transposed 562 and 354. 2026-11-23."""
    x = value(piece.x)
    if x.device.type == "cuda":
        return _declined_on_cuda(piece, turn)
    if x.device.type != "cpu":
        return f"not measured on {x.device.type}"
    if turn.cosines is None:
        return "complex numbers are as fast on a CPU"
    if not any(passthrough_ops.named(n) in PRODUCTS and value(n).shape[-1] == x.shape[-1] for n in piece.nodes):
        return "it is computed by halves already"
    moved = dim_order(x) != list(range(x.dim()))
    wide = _products(piece) in (torch.float32, torch.float64) and value(piece.out).dtype == x.dtype
    if turn.pairs == "halves" and not moved and torch.is_grad_enabled() and x.requires_grad:
        return "with gradients it is slower on a CPU for a tensor that is not transposed"
    if wide or (x.dtype == torch.bfloat16 and turn.pairs == "halves" and moved):
        return ""
    return f"on a CPU {str(x.dtype).removeprefix('torch.')} is slower by {turn.pairs}"


def _declined_on_cuda(piece: Part, turn: Turn) -> str:
    """Measured in models of four layers, bfloat16, 16,384 tokens, H100, torch 2.11, 2026-11-26: Qwen3, whose queries
    and keys are normed first, is 1.05 times as fast with it; Llama 0.98 times, Gemma 2 0.98 and ModernBERT 0.95."""
    if turn.cosines is None or turn.pairs != "halves":
        return "not measured on cuda for complex numbers or neighbours"
    x = piece.x
    while passthrough_ops.idle(x) or passthrough_ops.named(x) == "transpose":
        x = passthrough_ops.source(x)
    return "" if passthrough_ops.named(x) == "rms_norm" else "on a GPU it pays behind a norm of each head alone"


class _Plan:
    """The function that is traced in place of the part: in the memory order of ``x``, so that strides stay."""

    def __init__(self, turn: Turn, inside: torch.dtype, out: torch.dtype) -> None:
        self.turn, self.inside, self.out = turn, inside, out

    def __call__(self, x: Tensor, *sides: Tensor) -> Tensor:
        order = dim_order(x)
        if order[-1] != x.dim() - 1:
            order = list(range(x.dim()))
        wide = [s if s.is_complex() else s.to(self.inside) for s in sides]
        spread = [s.expand(*x.shape[:-1], s.shape[-1]).permute(order) for s in wide]
        turned = self.turn(x.to(self.inside).permute(order), spread)
        return turned.permute([order.index(d) for d in range(x.dim())]).to(self.out)


rotary = Rotary()
