"""Calls of a shiplap op that declares along which dims they may be joined."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.dispatch import Op, compile_cache_key
from shiplap.errors import error
from shiplap.rewrite.group.base import Group, Merged, tensor
from shiplap.rewrite.group.cost import Machine, Price, bytes_of
from shiplap.rewrite.normalize_call import called
from shiplap.rewrite.program import Program
from shiplap.sampling.samples import Samples
from shiplap.torch_private.graph_constants import folded

COUNT = 3  # calls in a program of the proof


class JoinedCalls(Group):
    """Independent calls of ``op`` that differ only in what has ``dim`` become one call, concatenated along it.

    Args:
        op: with ``op.batches(...)``. ``dim``: one of those it names.

    Raises:
        ShiplapError: SL117 if ``op`` does not declare ``dim``.
    """

    def __init__(self, op: Op, dim: str, **options: Any) -> None:
        super().__init__(**options)
        batching = next((b for b in op.batching if b.dim == dim), None)
        if batching is None:
            raise error(
                "SL117",
                where=f"JoinedCalls({op.spec.name}, {dim!r})",
                got="a dim that it does not declare",
                expected=f"one of {[b.dim for b in op.batching]}",
                fix=f"call op.batches({dim!r})",
            )
        self.op, self.batching = op, batching
        self.name = f"joined_{op.spec.namespace}_{op.spec.opname}_{dim}"

    @property
    def self_contained(self) -> bool:
        return False  # the kernels of the op decide as well

    def described(self) -> str:
        return f"{compile_cache_key.key_of(self.op)} {self.batching}"

    def key(self, node: Node) -> Hashable | None:
        if node.op != "call_function" or called(node) != self.op.spec.name:
            return None
        return tuple(_identity(v, at) for v, at in zip(self._arguments(node), self._places(), strict=True))

    def merge(self, members: Sequence[Node]) -> Merged:
        calls = [self._arguments(m) for m in members]
        joined = [
            [c[i] for c in calls] if at is not None and calls[0][i] is not None else None
            for i, at in enumerate(self._places())
        ]
        return _joined(self.op, self._places(), self.batching.outputs[0]), (joined, calls[0])

    def price(self, members: Sequence[Node], machine: Machine) -> Price | str:
        parts = [
            v
            for m in members
            for v, at in zip(self._arguments(m), self._places(), strict=True)
            if at is not None and isinstance(v, Node) and not folded(v)
        ]
        added = 2 * (bytes_of(parts) + bytes_of(members)) / machine.copy + machine.launch
        work = bytes_of({n for m in members for n in m.all_input_nodes} | set(members)) / machine.read
        count = len(members)
        return Price(count * machine.launch + work, (count - 1) * machine.launch, added, "joining arguments costs")

    def programs(self) -> Iterator[Program]:
        samples = Samples(self.op, 0)
        for case in (*samples.plain(), *samples.optionals()):
            draws = [case.fresh(), *(samples.build(case.recipe).fresh() for _ in range(COUNT - 1))]
            yield self._program(draws, case.label)

    def _program(self, draws: Sequence[tuple[Any, ...]], label: str) -> Program:
        places = self._places()
        shared = [draws[0][i] if at is None else None for i, at in enumerate(places)]
        own = [[d[i] for d in draws] if at is not None else None for i, at in enumerate(places)]
        flat = [v for v in (*shared, *(x for each in own if each for x in each)) if isinstance(v, Tensor)]
        return Program(_calls(self.op, shared, own), tuple(flat), f"{COUNT} x {label}")

    def _places(self) -> list[int | None]:
        joined = dict(self.batching.joined)
        return [joined.get(a.name) for a in self.op.spec.args]

    def _arguments(self, node: Node) -> list[Any]:
        """In declared order, absent ones as their default."""
        spec = self.op.spec.args
        given = [*node.args, *(node.kwargs.get(a.name, a.default) for a in spec[len(node.args) :])]
        return [None if v is ... else v for v in given]


def _identity(given: Any, at: int | None) -> Hashable:
    """What must be the same in calls that are joined: the value itself, or all about it but the size at ``at``."""
    held = tensor(given)
    if at is None or held is None:
        return given if isinstance(given, Node) else repr(given)
    sizes = [s for i, s in enumerate(held.shape) if i != at]
    return (held.dtype, str(held.device), *map(str, sizes))


def _joined(op: Op, places: Sequence[int | None], out: int) -> Callable[..., list[Tensor]]:
    def call(joined: list[Any], first: list[Any]) -> list[Tensor]:
        parts = list(zip(joined, first, places, strict=True))
        args = [v if own is None or at is None else torch.cat(own, at) for own, v, at in parts]
        sizes = next([t.shape[at] for t in own] for own, _, at in parts if own is not None and at is not None)
        return [part.contiguous() for part in op.overload(*args).split(sizes, out)]

    return call


def _calls(op: Op, shared: Sequence[Any], own: Sequence[Any]) -> Callable[..., Any]:
    """``COUNT`` calls of tensors that arrive one by one, since a program takes tensors and scalars only."""

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        common = [next(given) if isinstance(v, Tensor) else v for v in shared]
        single = [[next(given) if isinstance(v, Tensor) else v for v in each] if each else None for each in own]
        calls = [[c if s is None else s[k] for c, s in zip(common, single, strict=True)] for k in range(COUNT)]
        return tuple(op.overload(*call).sin() for call in calls)

    return run
