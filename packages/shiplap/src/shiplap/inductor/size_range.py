"""The range of sizes at which a compiled graph may run, and the sizes at which a candidate is proven for it.

A graph of symbolic sizes runs one kernel at many sizes. A proof at one size shows little about others, since a kernel
may omit the last incomplete tile, or branch on a size. A candidate is therefore run at the edges of its tiles, next to
each number with which code or a guard compares a size, at the ends of the range, and at sizes like those of the call.
The range ends where a proof would take too long. The graph is guarded against larger sizes. For those, torch compiles
another graph, with another proof.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from shiplap.declare.binding import declared_output_shape
from shiplap.dispatch import Op
from shiplap.sampling.boundary_sizes import sizes_near_constants
from shiplap.sampling.code_constants import CodeConstants
from shiplap.sampling.sizes import EDGE_SIZES, MAX_RESULT_ELEMENTS
from shiplap.sampling.work_estimate import estimate_operations
from shiplap.torch_private import dynamo, inductor_lowering
from shiplap.torch_private.inductor_lowering import SizeSymbol

Sizes = Mapping[Any, int]  # a value for each symbol
# The end of a range of small calls, where proving it costs little: on the CPU, and on other devices.
FAR, FAR_ON_DEVICE = 1024, 1 << 17
# Operations of the reference for one of many samples, for a large one, and for one that has to be (without a guard).
SMALL, LARGE, NEEDED = 1 << 20, 1 << 27, 1 << 34
ELEMENT = 32  # operations that take as long as an element that is drawn, copied and compared
FASTER = 64  # times that on another device than the CPU
# The same for an element of a range beyond FAR: the host draws it (40 to 65 ns, one core, 2026-11-29), whatever the
# device, and a proof holds it some ten times, partly in float64.
DRAWN = 256
INTERPRETED = 1 << 14  # operations of a sample, and samples of a proof, where Triton's interpreter runs the kernel
MANY, FEW = 72, 10
PADDED = 16  # elements of which a stride that is free is a multiple
TALL, SPENT = 64, 24  # times the work of the smallest sample that one may take, and times that which all may take
SIZES = (2, 3, 5, 7, 9, 64, 65, 127)  # beside EDGES


class SizedCall(Protocol):
    """The part of a :class:`LoweredCall`, a call of an op in a graph, that :func:`size_range` reads."""

    @property
    def op(self) -> Op:
        """The declared op of the call."""

    @property
    def env(self) -> Mapping[str, Any]:
        """The dims and scalars of the call by name. They may be symbolic."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The fake tensors of the call by argument name."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors of the call."""

    def numbers(self, sizes: Sizes) -> dict[str, Any]:
        """Return the dims and scalars of the call by name, as numbers. A size symbol gets its value from ``sizes``. A
        symbol that ``sizes`` lacks has the value that it has in the call being compiled.
        """


@dataclass(frozen=True)
class SizeRange:
    """The sizes of one call at which a compiled graph may run.

    Attributes:
        symbols: the symbols of the sizes of the call. The ``upper`` of each is the end of the range that is proven.
        guarded: the symbols whose end needs a guard, since the graph might otherwise run beyond it. They may be symbols
            of other sizes that limit a symbol of the call.
        text: the range for people and for keys. It is empty for a call of fixed sizes.
        problem: the reason why a template cannot be proven for all sizes, or an empty string.
        others: the symbols that occur only in strides.
        conditions: the conditions of the graph on its sizes.
        work: a function from sizes to the approximate number of operations of a sample.
        interpreted: whether Triton's interpreter runs the kernels.
        memory: for each tensor, its sizes with their strides, from the smallest stride outwards.
    """

    symbols: tuple[SizeSymbol, ...] = ()
    guarded: tuple[SizeSymbol, ...] = ()
    text: str = ""
    problem: str = ""
    others: tuple[SizeSymbol, ...] = ()
    conditions: tuple[Any, ...] = field(default=(), repr=False)
    work: Callable[[Sizes], int] = field(default=lambda sizes: 0, repr=False)
    interpreted: bool = False
    memory: tuple[tuple[tuple[Any, Any], ...], ...] = field(default=(), repr=False)

    def limit_graph(self) -> bool:
        """Add guards to the graph that is being lowered, so that it does not run at sizes beyond this range. Stop at
        the first guard that cannot be set. Return whether all were set.
        """
        return all(inductor_lowering.limit_size(s.symbol, s.upper or 0) for s in self.guarded)

    def points(self, mined: CodeConstants, tiles: Sequence[int] = ()) -> Iterator[Sizes]:
        """Yield the sizes at which a candidate is run for its proof, as dicts from symbols to values. ``mined`` holds
        constants of the candidate's source code, and ``tiles`` holds tile sizes from its config.
        """
        seen: list[Sizes] = []
        for together in (*self._end_sizes(), *self._edge_sizes(mined, tiles)):
            # Sizes that do not fit together are tried one by one.
            for sizes in [together] if self._admits(together) else filter(self._admits, self._vary_each(together)):
                if sizes not in seen and (laid := self._with_strides(sizes)) is not None:
                    seen.append(sizes)
                    yield laid

    def complete(self, sizes: Sizes) -> Sizes | None:
        """Return ``sizes``, values of the size symbols, with values for the symbols of strides. Return None if they are
        outside of the range, or if the graph does not run at them.
        """
        own = {s.symbol: sizes[s.symbol] for s in self.symbols}
        within = all(s.lower <= own[s.symbol] <= (s.upper or own[s.symbol]) for s in self.symbols)
        return self._with_strides(own) if within and self._admits(own) else None

    def _admits(self, sizes: Sizes) -> bool:
        """Return whether the graph may run at ``sizes``, values of size symbols. Its conditions must hold for them, and
        tensors of such sizes must fit in memory without elements that share an address.
        """
        laid = self._with_strides(sizes)
        return laid is not None and inductor_lowering.conditions_admit(self.conditions, laid)

    def _with_strides(self, sizes: Sizes) -> Sizes | None:
        """Return ``sizes`` completed with values for the symbols that occur only in strides. A value is that of the
        call, or a larger one if elements of a tensor would otherwise share an address.

        Return None if elements share an address all the same, or if a tensor spans more memory than a test input may.
        """
        whole, free = {**sizes, **{s.symbol: s.hint for s in self.others}}, {s.symbol for s in self.others}
        for dims in self.memory:
            reach = 0  # the place of the last element of the dims so far
            for size, stride in dims:
                symbol = inductor_lowering.size_expression(stride)
                if symbol in free and whole[symbol] <= reach:
                    whole[symbol] = (reach // PADDED + 1) * PADDED
                steps = inductor_lowering.evaluate_size(size, whole) - 1
                step = inductor_lowering.evaluate_size(stride, whole)
                if steps > 0 and 0 < step <= reach:
                    return None
                reach += max(0, steps) * step
            if reach > MAX_RESULT_ELEMENTS:  # a stride may be a size, and an offset in 32 bits would overflow
                return None
        return whole

    def _vary_each(self, sizes: Sizes) -> Iterator[Sizes]:
        """Yield one dict of sizes for each symbol. In it, that symbol has its value in ``sizes``, and all other symbols
        have the values of the call.
        """
        for s in self.symbols:
            yield {o.symbol: sizes[o.symbol] if o is s else o.hint for o in self.symbols}

    def _end_sizes(self) -> Iterator[Sizes]:
        """Yield sizes at the ends of the range. Each symbol takes its upper and its lower end while all other symbols
        are small. In the last dict, all symbols are as large as the cost of a sample allows.
        """
        if not self.symbols:
            return
        for s in self.symbols:
            yield self._fill_others({s.symbol: s.upper or s.hint}, 0)
            yield self._fill_others({s.symbol: s.lower}, 1)
        together = {s.symbol: s.upper or s.hint for s in self.symbols}
        while self.work(together) > self._work_of_large and any(v > s.lower for s, v in self._symbol_values(together)):
            together = {s.symbol: max(s.lower, v // 2) for s, v in self._symbol_values(together)}
        yield together

    def _edge_sizes(self, mined: CodeConstants, tiles: Sequence[int]) -> Iterator[Sizes]:
        """Yield dicts of sizes with values where errors are likely, such as the ends of tiles and constants of the
        source code. Each dict takes a new value for as many symbols as the cost of a sample allows. Stop when the
        symbols have no values left or the samples have taken too much work.
        """
        limit = max(
            self._work_of_many, TALL * self.work(self._fill_others({}, 0))
        )  # where other sizes are fixed, and large
        left = {s.symbol: self._edge_values(s, mined, tiles, limit) for s in self.symbols}
        spent = 0
        for turn in range(FEW if self.interpreted else MANY):
            taken: dict[Any, int] = {}
            # The symbol with the most values left determines the number of turns.
            for symbol in sorted(left, key=lambda s: -len(left[s])):
                values = left[symbol]
                if values and (not taken or self.work(self._fill_others({**taken, symbol: values[0]}, turn)) <= limit):
                    taken[symbol] = values.pop(0)
            sizes = self._fill_others(taken, turn)
            spent += self.work(sizes)
            if not taken or (turn >= FEW and spent > SPENT * limit):
                return
            yield sizes

    def _edge_values(self, s: SizeSymbol, mined: CodeConstants, tiles: Sequence[int], limit: int) -> list[int]:
        """Return values of the size symbol ``s`` at which a kernel is worth testing, those most likely to reveal an
        error first.

        They lie around the tile sizes ``tiles``, the constants ``mined`` from the kernel's source code, the size of the
        call, and the bounds of guards. Values outside the range, and values whose sample takes more than ``limit``
        operations, are left out.
        """
        upper = s.upper if s.upper is not None else s.hint
        compared, divisors = inductor_lowering.edges_of(self.conditions, s.symbol)
        first = [v + step for v in (*tiles, *sorted(compared)) for step in (1, -1, 0)]
        own = [v + step for v in mined.ints if v > 3 for step in (1, -1, 0)]
        near = [s.hint - 1, s.hint + 1, s.hint]
        listed = [
            s.lower,
            s.lower + 1,
            *first,
            *near,
            *EDGE_SIZES,
            *SIZES,
            upper - 1,
            *own,
            *sizes_near_constants(mined),
        ]
        # A guard demands multiples, so values are moved to the multiples beside them.
        for divisor in sorted(divisors):
            listed = [n for v in listed for n in (v // divisor * divisor, (v // divisor + 1) * divisor)]
        fitting = [v for v in dict.fromkeys(listed) if s.lower <= v <= upper]
        return [v for v in fitting if self.work(self._fill_others({s.symbol: v}, 0)) <= limit]

    def _fill_others(self, sizes: Sizes, turn: int) -> Sizes:
        """Return ``sizes`` completed with small values for the size symbols that it lacks. Different symbols get
        different values if their ranges allow it. ``turn`` is a counter by which the values vary.
        """
        small = [5, 17, 3, 33, 2, 9]
        whole = dict(sizes)
        for place, s in enumerate(self.symbols):
            if s.symbol not in whole:
                _, divisors = inductor_lowering.edges_of(self.conditions, s.symbol)
                # Different sizes for different symbols, so that exchanged dims show.
                value = small[(turn + place) % len(small)] * prod(divisors)
                whole[s.symbol] = min(max(value, s.lower), s.upper if s.upper is not None else s.hint)
        return whole

    def _symbol_values(self, sizes: Sizes) -> Iterator[tuple[SizeSymbol, int]]:
        """Return an iterator over pairs of a symbol of the range and its value in ``sizes``."""
        return ((s, sizes[s.symbol]) for s in self.symbols)

    @property
    def _work_of_many(self) -> int:
        """The largest number of operations of one sample among many small ones."""
        return INTERPRETED if self.interpreted else SMALL

    @property
    def _work_of_large(self) -> int:
        """The largest number of operations of a sample whose sizes are all large."""
        return INTERPRETED if self.interpreted else LARGE


def size_range(call: SizedCall) -> SizeRange:
    """Return the range of sizes at which a candidate for ``call`` is proven. It has no symbols if all sizes of the call
    are fixed.

    It is the range of sizes at which the graph may run, cut to those that a proof can cover.
    """
    sizes = [n for value in call.env.values() for n in (value if isinstance(value, (list, tuple)) else [value])]
    symbols = inductor_lowering.symbols_of([n for n in sizes if isinstance(n, torch.SymInt)])
    if not symbols:
        return SizeRange()
    strides = [n for t in call.tensors.values() for n in (*t.stride(), t.storage_offset())]
    own = {s.symbol for s in symbols}
    others = tuple(s for s in inductor_lowering.symbols_of(strides) if s.symbol not in own)
    conditions = tuple(inductor_lowering.graph_conditions())
    interpreted = call.device.type == "cpu" and any(t.language == "triton" for t in call.op.templates.get("cpu", ()))
    memory = tuple(_dims_outwards(t) for t in call.tensors.values())
    free = SizeRange(symbols, (), "", "", others, conditions, _work_of(call), interpreted, memory)
    return _with_ends(call, free)


def _count_elements(tensor: Tensor, sizes: Sizes) -> int:
    """Return the number of elements of ``tensor`` at ``sizes``. If the distance in memory between its first and its
    last element is larger, return that distance.
    """
    dims = [tuple(inductor_lowering.evaluate_size(n, sizes) for n in of) for of in (tensor.shape, tensor.stride())]
    spanned = sum(max(0, n - 1) * step for n, step in zip(*dims, strict=True))
    return int(max(prod(dims[0]), spanned))


def _dims_outwards(tensor: Tensor) -> tuple[tuple[Any, Any], ...]:
    """Return the pairs of size and stride of the dims of ``tensor``, from the smallest stride to the largest. Symbolic
    strides are compared by their values in the call being compiled.
    """
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(sorted(dims, key=lambda dim: inductor_lowering.size_hint(dim[1])))


def _work_of(call: SizedCall, element: int = ELEMENT, absent: Collection[str] = ()) -> Callable[[Sizes], int]:
    """Return a function that takes the sizes of a sample of ``call`` and returns the approximate number of its
    operations. Each element of the inputs and outputs counts as at least ``element`` operations. The dims of the
    arguments named in ``absent`` do not count as dims that are summed over.
    """

    def work(sizes: Sizes) -> int:
        """Return the approximate number of operations that a sample of ``call`` costs at ``sizes``. It is the number of
        the op's operations, or ``element`` times the number of elements, whichever is larger. If a tensor is too large
        for a sample, the number is above every limit.
        """
        env = call.numbers(sizes)
        outputs = int(sum(prod(declared_output_shape(out, env)) for out in call.op.spec.outputs))
        inputs = sum(_count_elements(t, sizes) for t in call.tensors.values())
        # Beyond what a sample may have at all.
        if max(outputs, inputs) > MAX_RESULT_ELEMENTS:
            return NEEDED * FASTER + 1
        return max(estimate_operations(call.op.spec, env, absent), element * (outputs + inputs))

    return work


def _with_ends(call: SizedCall, free: SizeRange) -> SizeRange:
    """Return ``free``, the range of ``call``, with an upper end for each size symbol. The end is the symbol's own if a
    proof can cover it. Otherwise it is a smaller size to which a guard limits the graph. If neither is possible,
    ``problem`` of the result holds the reason.
    """
    faster, far = (1, FAR) if call.device.type == "cpu" else (FASTER, FAR_ON_DEVICE)
    drawn = free.work if far == FAR else _work_of(call, DRAWN)
    # Without a guard a size that seems too costly costs the template, so the dims of absent arguments do not count.
    # With one it costs a graph for larger sizes, while a larger range would make each proof slower.
    passed = _work_of(call, absent=[a.name for a in call.op.spec.tensors if a.name not in call.tensors])
    ended, guarded, problem = list(free.symbols), list[SizeSymbol](), ""
    # The cost of a size is computed with at most 64 for the others, so that the order of the symbols does not matter.
    for place, s in enumerate(free.symbols):

        def cost(size: int, s: SizeSymbol = s, work: Callable[[Sizes], int] = free.work) -> int:
            """Return the operations of a sample with ``size`` for the symbol ``s`` and at most 64 for each other
            symbol. ``work`` computes the operations from sizes.
            """
            return work({**{o.symbol: min(o.hint, 64) for o in free.symbols}, s.symbol: size})

        # No guard can check such a size: data decides it, or there is no other graph to go to.
        if not s.backed or dynamo.is_packaging():
            upper, needed = _end_by_conditions(free, s)
            guarded += needed
            if upper is None or cost(upper, work=passed) > NEEDED * faster:
                problem = problem or _describe_unlimited(call, s, upper)
        elif s.upper is not None and cost(s.upper) <= LARGE * faster:
            upper = s.upper
        else:
            limit = LARGE * faster if not free.interpreted else INTERPRETED
            further = _affordable_end(s, partial(cost, work=drawn), limit, far)
            upper = max(_affordable_end(s, cost, limit, FAR), further)
            guarded.append(replace(s, upper=upper))
        ended[place] = replace(s, upper=upper)
    free = replace(free, symbols=tuple(ended), guarded=tuple(dict.fromkeys(guarded)), problem=problem)
    return replace(free, text=_show_range(call, free))


def _affordable_end(s: SizeSymbol, cost: Callable[[int], int], limit: int, far: int) -> int:
    """Return the largest size of the symbol ``s`` that a proof covers.

    It starts at ``far`` and is halved until ``cost``, the operations of a sample of that size, is at most ``limit``. It
    stays at least twice the size of the call, rounded up to a power of two. It is at most the upper end of ``s``.
    """
    # Else the graph would be compiled again for a call that is a little larger.
    least = 1 << (2 * s.hint - 1).bit_length() if s.hint > 0 else 1
    upper = max(far, least)
    while upper > least and cost(upper) > limit:
        upper //= 2
    return min(upper, s.upper) if s.upper is not None else upper


def _end_by_conditions(free: SizeRange, s: SizeSymbol) -> tuple[int | None, list[SizeSymbol]]:
    """Return the upper end of the size symbol ``s``, which no guard can limit directly, or None if there is none.
    Return also the other symbols, with upper ends, on which guards are needed for it. The end follows from conditions
    of the graph.
    """
    if s.upper is not None or dynamo.is_packaging():
        return s.upper, []
    for bound in inductor_lowering.bounds_of(free.conditions, s.symbol):
        parts = inductor_lowering.symbols_of([bound])
        ends: list[SizeSymbol] = []
        for part in parts:
            if part.upper is None and not part.backed:
                break
            ends.append(part if part.upper is not None else replace(part, upper=max(FAR, 2 * part.hint)))
        else:
            upper = inductor_lowering.largest_value(bound, {e.symbol: (e.lower, e.upper) for e in ends})
            if upper is not None:
                return upper, [e for e, part in zip(ends, parts, strict=True) if part.upper is None]
    return None, []


def _describe_unlimited(call: SizedCall, s: SizeSymbol, upper: int | None) -> str:
    """Return a sentence for users that states why a template cannot be proven for all sizes of the symbol ``s``.
    ``upper`` is the upper end of ``s``, or None if it has none.
    """
    name = _name_symbol(call, s)
    if dynamo.is_packaging():
        return f"{name} may be {'any size' if upper is None else f'up to {upper}'} in this package, too many to prove"
    return f"{name} depends on data and may be {'any size' if upper is None else f'up to {upper}'}, too many to prove"


def _name_symbol(call: SizedCall, s: SizeSymbol) -> str:
    """Return the name of the op's dim or scalar that is the size symbol ``s``. If there is none and one named ``m`` is
    computed from ``s``, return ``part of m``. Otherwise return ``a size``.
    """
    named = [(k, v) for k, v in call.env.items() if isinstance(v, torch.SymInt)]
    exact = next((k for k, v in named if v.node.expr == s.symbol), None)
    part = next((f"part of {k}" for k, v in named if s.symbol in v.node.expr.free_symbols), None)
    return exact or part or "a size"


def _show_range(call: SizedCall, free: SizeRange) -> str:
    """Return the range of each symbol as one line, such as ``m 2..1024, n 2..4096``. A symbol without an upper end is
    shown as ``m 2..``.
    """
    shown: Sequence[tuple[str, SizeSymbol]] = [(_name_symbol(call, s), s) for s in free.symbols]
    return ", ".join(f"{name} {s.lower}..{'' if s.upper is None else s.upper}" for name, s in shown)
