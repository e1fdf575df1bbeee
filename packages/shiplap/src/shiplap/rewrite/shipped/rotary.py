"""Rewrite rotary position embeddings, ``x * cos + rotate_half(x) * sin``, to a computation by halves.

The computation by halves reads each element of ``x`` once. The embedding is recognised by its computation (see
``shiplap.rewrite.match_by_value``). The calls between ``x`` and a result of its shape are a rotary embedding if they
turn each pair of elements by its own angle. Pairs are the two halves of the last dim (Llama, GPT-NeoX) or neighbours
(GPT-J, Cohere). Cosines and sines are as wide as ``x`` or as a half of it. They are two tensors or one of complex
numbers.

The rewrite is proven on the ways in which models write it, which are at the beginning of this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph, Node

from shiplap.declare.code_digest import code_digest
from shiplap.rewrite.base import Rewrite, short_digest
from shiplap.rewrite.graph import describe_node, fake_value, place_replacement, remove_dead_calls
from shiplap.rewrite.layout import dims_by_stride
from shiplap.rewrite.match import Level, NearMiss, Outcome
from shiplap.rewrite.match_by_value import (
    GraphPart,
    agree_but_for_rounding,
    candidate_starts,
    operator_names_above,
    part_between,
)
from shiplap.rewrite.obstacle import RewriteObstacle
from shiplap.rewrite.passthrough_ops import (
    CAST_OPERATORS,
    keeps_values,
    positional_then_named,
    skip_idle_calls,
    tensor_argument,
    torch_call_name,
)
from shiplap.rewrite.program import Program, proving, seeded_draw
from shiplap.rewrite.walk import without_other_readers


def _rotate_half(x: Tensor) -> Tensor:
    """Return ``x`` with the halves of its last dim exchanged and the new first half negated."""
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def _rotate_as_llama(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the sigmoid of ``x``, rotated by halves as Llama writes it. ``cos`` and ``sin`` are the cosines and sines
    of the angles.
    """
    return ((x * cos.unsqueeze(1)) + (_rotate_half(x) * sin.unsqueeze(1))).sigmoid()


def _of_a_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x`` with the first 8 elements of its last dim rotated by halves. The other elements are unchanged.
    ``cos`` and ``sin`` are the cosines and sines of the angles.
    """
    turned, rest = x[..., :8], x[..., 8:]
    return torch.cat(((turned * cos) + (_rotate_half(turned) * sin), rest), dim=-1)


def _in_float32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x`` rotated by halves in float32 and cast back to its own dtype. ``cos`` and ``sin`` are the cosines and
    sines of the angles.
    """
    a, b = x.float().chunk(2, dim=-1)
    mixed = torch.cat((-b, a), -1)
    return (sin * mixed + cos * x.float()).to(x.dtype)


def _rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x``, of four dims, rotated in pairs of neighbours. ``cos`` and ``sin`` hold one number for each pair,
    which is repeated for both elements.
    """
    cos, sin = (torch.repeat_interleave(t[:, :, None, :], 2, 3) for t in (cos, sin))
    mixed = torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), dim=-1).flatten(-2)
    return (x * cos) + (mixed * sin)


def _rotate_backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x``, whose last dim has 8 elements, rotated by halves in the opposite direction. ``cos`` and ``sin`` are
    the cosines and sines of the angles.
    """
    mixed = torch.cat((x[..., 4:], -x[..., :4]), -1)
    return x * cos + mixed * sin


def rotary_programs() -> Iterator[Program]:
    """Yield the programs on which the rewrite is proven. A program is a function with arguments. Together they compute
    a rotary embedding in the ways in which models write it, with several dtypes and layouts.
    """
    drawn = seeded_draw()
    x, cos, sin = drawn((2, 5, 3, 8), (2, 5, 8), (2, 5, 8))
    yield Program(_rotate_as_llama, (x.transpose(1, 2), cos, sin), "halves, transposed")
    yield Program(_of_a_part, drawn((2, 3, 5, 12), (5, 8), (5, 8)), "a part of each head")
    yield Program(_in_float32, drawn((2, 3, 5, 8), (5, 8), (5, 8), dtype=torch.bfloat16), "bfloat16 in float32")
    yield Program(_rotate_neighbours, drawn((2, 5, 3, 8), (2, 5, 4), (2, 5, 4)), "neighbours")
    yield Program(_rotate_backwards, drawn((3, 8), (3, 8), (3, 8), dtype=torch.float16), "backwards, float16")


# A rotation ends in a sum, in joined halves, or in a view or a cast of these.
LAST_OPERATORS = frozenset(
    {"add", "sub", "addcmul", "cat", "concat", "concatenate", "flatten", "view", *CAST_OPERATORS}
)
# Calls that put pairs together again. A part without any of them is no rotation.
JOINING_OPERATORS = frozenset({"cat", "concat", "concatenate", "stack", "roll", "flip", "view_as_complex"})
# Views that split the last dim into pairs.
SPLITTING_OPERATORS = frozenset({"view", "unflatten"})
# Some models write both halves into a new tensor instead of joining them.
EMPTY_FACTORIES = frozenset({"empty_like", "empty", "new_empty", "zeros_like", "new_zeros"})
MULTIPLY_OPERATORS = frozenset({"mul", "multiply", "addcmul", "einsum"})
MOST_TRIED_STARTS = 6  # values of the shape of a result from which it may be computed

PairLayout = Literal["halves", "neighbours"]
PAIR_LAYOUTS: tuple[PairLayout, ...] = ("halves", "neighbours")


@dataclass(frozen=True)
class PairRotation:
    """A function that rotates pairs of elements in the last dim of a tensor, each pair by its own angle.

    Attributes:
        pairs: ``"neighbours"`` if a pair is two neighbours in the last dim, ``"halves"`` if it has one element of each
            half.
        cosines: the position of the cosines in ``sides``, 0 or 1. It is None if ``sides`` is one complex tensor.
        sign: the direction of the rotation, 1 or -1.
    """

    pairs: PairLayout
    cosines: int | None
    sign: int

    def __call__(self, x: Tensor, sides: Sequence[Tensor]) -> Tensor:
        """Return ``x`` with each pair of elements of its last dim rotated. ``sides`` holds two tensors, the cosines and
        the sines of the angles, or one tensor of complex numbers. ``cosines`` states which of them has the cosines.
        """
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
        """Return the first elements and the second elements of the pairs in the last dim of ``given``, as two tensors.
        ``width`` is the size of the last dim of ``x``.

        If the last dim of ``given`` has another size than ``width``, each element of ``given`` belongs to a whole pair.
        ``given`` is then returned twice.
        """
        if given.shape[-1] != width:
            return given, given
        if self.pairs == "halves":
            return given[..., : width // 2], given[..., width // 2 :]
        return given[..., ::2], given[..., 1::2]


class Rotary(Rewrite):
    """A rewrite of rotary embeddings that rotates pairs of elements directly. The replaced calls first build a copy of
    ``x`` in which the elements of each pair are exchanged.
    """

    name = "rotary"
    level: Level = "pre-grad"
    anchors = JOINING_OPERATORS | EMPTY_FACTORIES | SPLITTING_OPERATORS

    def __init__(self, *, always: bool = False) -> None:
        """Set the option ``always``. If it is true, rotations are replaced even if Inductor's code for them is
        as fast.
        """
        self.always = always

    @property
    def digest(self) -> str:
        """A digest of the code that finds and replaces rotations, and of the option ``always``."""
        of = code_digest(
            Rotary.apply,
            Rotary._replace_rotation,
            PairRotation.__call__,
            PairRotation._pair,
            _RotaryReplacement.__call__,
            _why_not_faster,
        )
        return short_digest(of, self.always)

    def programs(self) -> Iterator[Program]:
        """Return an iterator over the programs on which the rewrite is proven. A program is a function with arguments.
        Each computes a rotary embedding in one of the ways in which models write it.
        """
        return rotary_programs()

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Replace calls in ``graph``, in place, that rotate pairs of elements by cosines and sines. Yield a ``Match``
        for each replaced rotation, or a ``NearMiss`` if the replacement is not faster. Then yield a ``NearMiss`` for
        each computation that combines the elements of pairs in another way.
        """
        gone: set[Node] = set()
        strange: list[GraphPart] = []
        remove_dead_calls(graph)
        for out in reversed(list(graph.nodes)):  # the largest part first, with the casts behind it
            if out in gone or torch_call_name(out) not in LAST_OPERATORS or not _may_end_rotation(out):
                continue
            piece = _find_rotation(out)
            # Reported later, and only if no match covers its calls.
            if isinstance(piece, GraphPart):
                strange.append(piece)
            elif piece is not None:
                # Its calls are no further rotations.
                gone.update(piece[0].nodes)
                yield self._replace_rotation(graph, *piece)
        for piece in strange:  # what belongs to a match, or to a part that was reported, is no miss of its own
            if gone.isdisjoint(piece.nodes):
                gone.update(piece.nodes)
                yield self._mixed_pairs_miss(piece)
        for node in graph.nodes:
            if torch_call_name(node) in EMPTY_FACTORIES and (writers := _half_writers(node)):
                yield self._written(writers)

    def _replace_rotation(self, graph: Graph, piece: GraphPart, turn: PairRotation) -> Outcome:
        """Replace ``piece``, the calls that rotate pairs of elements as ``turn`` describes, by one function. Return the
        ``Match``, or a ``NearMiss`` with the reason if it is not replaced.
        """
        why = "" if self.always or proving.get() else _why_not_faster(piece, turn)
        if why:
            return self._near(piece.out, "cost", why, "leave it: Inductor's own code is used")
        bound = [("x", describe_node(piece.x)), *((f"side {i}", describe_node(s)) for i, s in enumerate(piece.sides))]
        plan = _RotaryReplacement(turn, _dtype_of_products(piece), fake_value(piece.out).dtype)
        given = [piece.x, *piece.sides]
        return place_replacement(
            graph, self.level, self.name, plan, given, [piece.out], without_other_readers(piece.nodes, piece.out), bound
        )

    def _mixed_pairs_miss(self, piece: GraphPart) -> NearMiss:
        """Return a ``NearMiss`` for ``piece``, calls that combine the two elements of each pair in another way than a
        rotation by cosines and sines.
        """
        others = f"{len(piece.sides)} other tensor{'s' * (len(piece.sides) != 1)}"
        why = f"pairs of {piece.x.name} are mixed with {others}, but not turned by angles"
        fix = "write it as x * cos + rotate_half(x) * sin, with cos and sin that broadcast to x"
        return self._near(piece.out, "operator", why, fix)

    def _written(self, writers: Sequence[Node]) -> NearMiss:
        """Return a ``NearMiss`` for a rotation whose halves the calls ``writers`` write into a new tensor. This rewrite
        does not replace such a rotation.
        """
        into = tensor_argument(writers[0]).name
        why = f"the two parts of each pair are written into {into}; a part of a graph that is compared writes nothing"
        fix = "join them: torch.stack((a, b), -1).flatten(-2) for neighbours, torch.cat((a, b), -1) for halves"
        return self._near(writers[0], "mutation", why, fix)

    def _near(self, at: Node, obstacle: Any, reason: str, fix: str) -> NearMiss:
        """Return a ``NearMiss`` which says that a rotation at the node ``at`` is not replaced. It has the given kind of
        obstacle, reason and fix.
        """
        return self.near_miss(RewriteObstacle(at, obstacle, reason, fix, fitting=4), of=5)


def _half_writers(empty: Node) -> list[Node]:
    """Return the two calls that write sums or differences into slices of the last dim of the new tensor ``empty``. A
    term of each must be a product. Return an empty list if there are no such calls.
    """
    writers = [u for u in empty.users if torch_call_name(u) == "setitem" and u.args[0] is empty]
    if len(writers) != 2:
        return []
    for writer in writers:
        index = writer.args[1] if isinstance(writer.args[1], tuple) else (writer.args[1],)
        made = skip_idle_calls(writer.args[2])
        if not isinstance(index[-1], slice) or torch_call_name(made) not in ("add", "sub"):
            return []
        if not any(
            torch_call_name(skip_idle_calls(term)) in MULTIPLY_OPERATORS for term in positional_then_named(made)
        ):
            return []
    return writers


def _may_end_rotation(out: Node) -> bool:
    """Return whether ``out`` may be the result of a rotation. It must be a floating-point tensor of at least two dims
    and even width. It must be computed by a product, and by a call that joins or splits parts of a tensor.
    """
    held = fake_value(out)
    if not isinstance(held, Tensor) or not held.is_floating_point() or held.dim() < 2:
        return False
    width = held.shape[-1]
    # Pairs need an even width.
    if not isinstance(width, int) or width % 2 or width < 2:
        return False
    # A quick look, since comparing parts by value runs them.
    names = operator_names_above(out)
    return bool(names & (JOINING_OPERATORS | SPLITTING_OPERATORS)) and bool(names & MULTIPLY_OPERATORS)


def _find_rotation(out: Node) -> tuple[GraphPart, PairRotation] | GraphPart | None:
    """Return the calls that compute ``out`` by rotating pairs of elements, and the rotation. If calls combine the
    elements of pairs in another way, return these calls alone. Return None if neither is found.
    """
    strange = None
    for x in candidate_starts(out)[:MOST_TRIED_STARTS]:
        if (piece := part_between(x, out)) is None:
            continue
        if (turn := _rotation_of_part(piece)) is not None:
            return piece, turn
        if strange is None and _mixes_pairs(piece):
            strange = piece
    return strange


def _mixes_pairs(piece: GraphPart) -> bool:
    """Return whether the calls ``piece`` combine the two elements of each pair of their input ``x``. Two elements of
    the result must depend on both elements of a pair, and no other element may. This is found for the first pair, by
    running the calls on random numbers.
    """
    width = fake_value(piece.x).shape[-1]
    if width < 4 or not piece.sides:
        return False
    rng = torch.Generator().manual_seed(1)
    for x, sides in piece.draw_inputs(rng):
        try:
            before = piece.run(x, sides)
            # One pair at a time is changed, at the first position of the leading dims.
            layouts = [(0, width // 2), (0, 1)]
            first = (0,) * (x.dim() - 1)
            for pair in layouts:
                moved = [_changed_elements(piece, x, sides, before, (*first, at)) for at in pair]
                if moved[0] == moved[1] == {(*first, at) for at in pair}:
                    return True
            return False
        except Exception:  # sizes are written into a view: the next ones are those of the graph
            continue
    return False


def _changed_elements(
    piece: GraphPart, x: Tensor, sides: Sequence[Tensor], before: Tensor, at: tuple[int, ...]
) -> set[tuple[int, ...]]:
    """Return the positions at which the result of ``piece``, calls of a graph, changes if 1 is added to the element
    ``at`` of their input ``x``. ``before`` is the result for the unchanged ``x``, and ``sides`` are the other inputs.
    """
    other = x.clone()
    other[at] += 1.0
    return {tuple(p) for p in (piece.run(other, sides) != before).nonzero().tolist()}


def _rotation_of_part(piece: GraphPart) -> PairRotation | None:
    """Return the rotation that the calls ``piece`` compute, or None if they compute none. It is found by comparing
    results on random numbers.
    """
    width, held = fake_value(piece.x).shape[-1], [_of_pairs(fake_value(s)) for s in piece.sides]
    turns: list[PairRotation] = []
    if len(held) == 1 and held[0].is_complex():
        # A complex product has one direction; the sign is in the numbers.
        turns = [PairRotation(pairs, None, 1) for pairs in PAIR_LAYOUTS]
    elif len(held) == 2 and all(s.dim() and s.is_floating_point() and s.shape[-1] in (width, width // 2) for s in held):
        turns = [PairRotation(p, c, s) for p, c, s in product(PAIR_LAYOUTS, (0, 1), (1, -1))]
    if not turns:
        return None
    # Fixed numbers, so that the same graph is always recognised in the same way.
    rng = torch.Generator().manual_seed(0)
    for x, sides in piece.draw_inputs(rng):
        try:
            got = piece.run(x, sides)
            held = [_of_pairs(s) for s in sides]
            return next((t for t in turns if agree_but_for_rounding(got, t(x, held))), None)
        except Exception:  # sizes are written into a view: the next ones are those of the graph
            continue
    return None


def _of_pairs(side: Tensor) -> Tensor:
    """Return ``side``, a tensor of cosines or sines, without its last dim if the size of that dim is 1 and there are
    others. In such a tensor, each element belongs to a whole pair. Any other tensor is returned unchanged.
    """
    return side.squeeze(-1) if side.dim() > 1 and isinstance(side.shape[-1], int) and side.shape[-1] == 1 else side


def _dtype_of_products(piece: GraphPart) -> torch.dtype:
    """Return the dtype in which a replacement of the calls ``piece`` has to multiply. It is the promoted dtype of their
    products and of their result, where complex numbers count as pairs of real ones.
    """
    held = [fake_value(n).dtype for n in piece.nodes if torch_call_name(n) in MULTIPLY_OPERATORS]
    real = [torch.float64 if d == torch.complex128 else torch.float32 if d.is_complex else d for d in held]
    # Computed in the widest dtype that the model multiplies in, so that the rewrite is not less exact.
    wide: torch.dtype = fake_value(piece.out).dtype
    for dtype in real:
        wide = torch.promote_types(wide, dtype)
    return wide


# Microseconds before and after the rewrite. torch 2.13, one CPU thread, 8 heads of 64, 256 tokens, 2026-11-23:
#                                     forward   transposed | with backward   transposed
#   float32, halves                    108  60     111  74 |      572  718     409  299
#   float32, neighbours                186 123     222 132 |      913  635     761  595
#   bfloat16, halves                    83 117     112  60 |                   562  354
#   bfloat16, neighbours               277 365
#   complex numbers                    113 123
def _why_not_faster(piece: GraphPart, turn: PairRotation) -> str:
    """Return the reason why replacing ``piece`` is not faster than Inductor's code for the model's own calls. ``piece``
    holds the calls that rotate as ``turn`` describes. Return an empty string if it is faster. The times that decide on
    a CPU are in the table above.
    """
    x = fake_value(piece.x)
    if x.device.type == "cuda":
        return _why_not_faster_on_cuda(piece, turn)
    if x.device.type != "cpu":
        return f"not measured on {x.device.type}"
    if turn.cosines is None:
        return "complex numbers are as fast on a CPU"
    if not any(
        torch_call_name(n) in MULTIPLY_OPERATORS and fake_value(n).shape[-1] == x.shape[-1] for n in piece.nodes
    ):
        return "the model multiplies each half of the last dim on its own already"
    moved = dims_by_stride(x) != list(range(x.dim()))
    wide = _dtype_of_products(piece) in (torch.float32, torch.float64) and fake_value(piece.out).dtype == x.dtype
    if turn.pairs == "halves" and not moved and torch.is_grad_enabled() and x.requires_grad:
        return "with gradients it is slower on a CPU for a tensor that is not transposed"
    if wide or (x.dtype == torch.bfloat16 and turn.pairs == "halves" and moved):
        return ""
    kind = str(x.dtype).removeprefix("torch.")
    return f"on a CPU the rewrite is slower for {kind} with pairs of {turn.pairs}"


# Measured in models of four layers. bfloat16, 16,384 tokens, H100, torch 2.11, 2026-11-26: with the rewrite, Qwen3 is
# 1.05 times as fast, Llama and Gemma 2 0.98 times, and ModernBERT 0.95 times. Only Qwen3 norms its queries and keys
# first.
def _why_not_faster_on_cuda(piece: GraphPart, turn: PairRotation) -> str:
    """Return the reason why replacing the calls ``piece``, which rotate as ``turn`` describes, is not faster on CUDA.
    Return an empty string if it is faster, which is the case for halves behind an RMS norm.
    """
    if turn.cosines is None or turn.pairs != "halves":
        return "not measured on cuda for complex numbers or neighbours"
    x = piece.x
    while keeps_values(x) or torch_call_name(x) == "transpose":
        x = tensor_argument(x)
    return "" if torch_call_name(x) == "rms_norm" else "on a GPU it pays behind a norm of each head alone"


class _RotaryReplacement:
    """The function that is traced in place of the calls that rotate. ``turn`` is the rotation, ``inside`` the dtype in
    which it is computed, and ``out`` the dtype of the result. It computes in the dim order in which ``x`` lies in
    memory.
    """

    def __init__(self, turn: PairRotation, inside: torch.dtype, out: torch.dtype) -> None:
        """Set the rotation, the dtype ``inside`` in which it is computed, and the dtype ``out`` of the result."""
        self.turn, self.inside, self.out = turn, inside, out

    def __call__(self, x: Tensor, *sides: Tensor) -> Tensor:
        """Return ``x`` rotated by the cosines and sines, or the complex numbers, in ``sides``. The result has the dim
        order of ``x`` in memory and the dtype ``out``.
        """
        order = dims_by_stride(x)
        # The last dim is split into pairs, so it has to stay the last one of the permuted tensor.
        if order[-1] != x.dim() - 1:
            order = list(range(x.dim()))
        wide = [s if s.is_complex() else s.to(self.inside) for s in map(_of_pairs, sides)]
        spread = [s.expand(*x.shape[:-1], s.shape[-1]).permute(order) for s in wide]
        turned = self.turn(x.to(self.inside).permute(order), spread)
        return turned.permute([order.index(d) for d in range(x.dim())]).to(self.out)


rotary = Rotary()
