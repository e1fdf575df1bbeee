"""Samples of a pattern: the programs on which it is proven, and the forms in which it is looked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from shiplap.compat.passes import capture
from shiplap.errors import error
from shiplap.op.check import Checker
from shiplap.rewrite.base import Program
from shiplap.rewrite.guard import Guard
from shiplap.rewrite.match import Level
from shiplap.rewrite.signature import Signature
from shiplap.rewrite.walk import Pattern
from shiplap.verify.samples import Case, Samples

__all__ = ["Drawn"]

SEED = 0
NARROW = ("bfloat16", "float16")


class Drawn:
    """Arguments for one pattern, drawn from its annotations or given by its author."""

    def __init__(self, signature: Signature, guards: Sequence[Guard], given: Any) -> None:
        self.signature, self.guards, self.given = signature, guards, given
        self.sampler = None  # with these three, `Samples` takes this for an op
        self.spec = signature.spec(g.source for g in guards if g.names <= signature.dims)
        self._checker = Checker(self.spec)

    def cases(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """``(label, arguments)`` that the guards admit."""
        if self.given is not None:
            yield from ((f"sample {i}", tuple(args)) for i, args in enumerate(self.given()))
            return
        if not self.signature.args:
            raise error("SL805", where=f"rewrite {self.signature.name!r}", got="neither annotations nor samples",
                        expected="one of them")  # fmt: skip
        samples = Samples(self, SEED)  # type: ignore[arg-type]
        for case in self._chosen(samples):
            yield case.label, case.fresh()

    def _chosen(self, samples: Samples) -> Iterator[Case]:
        yield from samples.plain()
        yield from samples.grown(1)

    def programs(self, fn: Callable[..., Any]) -> Iterator[Program]:
        for label, args in self.cases():
            yield Program(fn, args, label)

    def patterns(self, fn: Callable[..., Any], level: Level) -> Iterator[Pattern]:
        seen: set[str] = set()
        for _, args in self.cases():
            found = as_pattern(fn, self.signature.parameters, args, level)
            if (text := str(found.graph)) not in seen:
                seen.add(text)
                yield found


def as_pattern(fn: Callable[..., Any], names: Sequence[str], args: Sequence[Any], level: Level) -> Pattern:
    """``fn`` as a graph whose sizes are symbols."""

    at = [i for i, a in enumerate(args) if isinstance(a, Tensor)]

    def of_tensors(*tensors: Tensor) -> Any:
        given = list(args)
        for i, t in zip(at, tensors, strict=True):
            given[i] = t
        return fn(*given)

    try:
        found = capture(of_tensors, [args[i] for i in at], level, dynamic=True)
    except Exception as e:
        raise error("SL804", where=fn.__qualname__, got=f"{type(e).__name__}: {str(e).splitlines()[0]}") from e
    inputs = {n: names[at[r]] for n, r in found.roles.items() if isinstance(r, int)}
    return Pattern(found.graph, inputs, absent=tuple(n for n, a in zip(names, args, strict=True) if a is None))
