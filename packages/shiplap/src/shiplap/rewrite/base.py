"""``Rewrite``: the interface of every rewrite, whether it is a pair of functions or a pass over the graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from shiplap.rewrite import passthrough_ops
from shiplap.rewrite.match import Level, Outcome
from shiplap.rewrite.program import Program
from shiplap.rewrite.prove import prove
from shiplap.sampling.finding import Finding

if TYPE_CHECKING:
    from torch.fx import Graph


class Rewrite(ABC):
    """One rewrite. Immutable once built; identity is the object's.

    Attributes:
        name: an identifier, as it appears in findings and counters.
        level: where it runs.
        anchors: names of calls (``"softmax"``) without one of which a graph has no place for it. Empty where any graph
            may have one.
    """

    name: str
    level: Level
    anchors: frozenset[str] = frozenset()

    @property
    def proven_late(self) -> bool:
        """Whether the proof waits for the first place in a graph. Those of Shiplap wait: most are never met.

        What a user wrote is proven when it is put into force, where an error names the line.
        """
        return bool(self.anchors) and self.self_contained and type(self).__module__.startswith("shiplap.rewrite.")

    def may_match(self, graph: Graph) -> bool:
        """Whether ``graph`` has a call that the rewrite is about."""
        return not self.anchors or any(passthrough_ops.named(n) in self.anchors for n in graph.nodes)

    @property
    def self_contained(self) -> bool:
        """Whether ``digest`` and Shiplap's code decide all that a proof sees: only then is it kept.

        That is so for the passes of Shiplap itself, and for a subclass elsewhere that says so.
        """
        return type(self).__module__.startswith("shiplap.rewrite.")

    @property
    @abstractmethod
    def digest(self) -> str:
        """The digest of everything that decides what :meth:`apply` does: source, helpers, guards, options."""

    @abstractmethod
    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Change ``graph`` in place where the rewrite matches and is faster. Yields a value per place and per near
        miss.

        The caller lints and recompiles. New nodes get their meta from ``shiplap.rewrite.graph.insert``.
        """

    @abstractmethod
    def programs(self) -> Iterable[Program]:
        """The programs that the proof runs. The rewrite must apply in at least one of them."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the proof, one for each check. Run once in a process, or read from the cache."""
        return prove(self)
