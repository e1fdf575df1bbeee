"""``Rewrite``, the interface of every rewrite: a pair of functions or a pass over the graph."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from shiplap.rewrite.graph import source_line
from shiplap.rewrite.match import Level, NearMiss, Outcome
from shiplap.rewrite.obstacle import RewriteObstacle
from shiplap.rewrite.passthrough_ops import torch_call_name
from shiplap.rewrite.program import Program
from shiplap.rewrite.prove import prove_rewrite
from shiplap.sampling.finding import Finding

if TYPE_CHECKING:
    from torch.fx import Graph


def short_digest(*parts: object) -> str:
    """Return a digest, 16 hexadecimal digits, of the texts of ``parts``, which together decide what a rewrite does."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


class Rewrite(ABC):
    """A change of graphs with a proof. A rewrite is immutable once built, and two are equal only if they are one
    object.

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
    def prove_on_first_match(self) -> bool:
        """Whether the proof of this rewrite (a comparison of results before and after it) waits until a graph has a
        first place for it, instead of running when the rewrite is switched on.

        The rewrites of Shiplap wait, since most graphs have no place for most of them. A rewrite of a user is proven
        when it is put into force, where an error names the user's line.
        """
        return bool(self.anchors) and self.code_is_fully_hashed and type(self).__module__.startswith("shiplap.rewrite.")

    def may_match(self, graph: Graph) -> bool:
        """Whether ``graph`` has a call of one of this rewrite's ``anchors``, operator names without which the rewrite
        has no place in a graph.
        """
        return not self.anchors or any(torch_call_name(n) in self.anchors for n in graph.nodes)

    @property
    def code_is_fully_hashed(self) -> bool:
        """Whether ``digest`` and the code of Shiplap cover everything that the result of this rewrite's proof depends
        on. Only then is that result kept for other processes.

        True for the passes of Shiplap itself, and for a subclass elsewhere that overrides this.
        """
        return type(self).__module__.startswith("shiplap.rewrite.")

    @property
    @abstractmethod
    def digest(self) -> str:
        """The digest of everything that decides what :meth:`apply` does to a graph: source, helper functions, guards,
        options.
        """

    @abstractmethod
    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Change ``graph`` in place where the rewrite matches and is faster. Yield a ``Match`` for each changed place
        and a ``NearMiss`` for each place where all but one thing fits.

        The caller lints and recompiles. New nodes get their meta from ``shiplap.rewrite.graph.place_replacement``.
        """

    @abstractmethod
    def programs(self) -> Iterable[Program]:
        """Return the programs, that is functions with example arguments, on which the rewrite is proven: their results
        before and after it are compared. It must apply in at least one of them.
        """

    def near_miss(self, at: RewriteObstacle, of: int) -> NearMiss:
        """Return the record of a place where this rewrite fits but for one thing, the obstacle ``at``. ``of`` is how
        many nodes the pattern has, to which the obstacle's number of fitting nodes is compared.
        """
        # The line of the user, who has to change it.
        line = source_line(at.node)
        return NearMiss(self.name, self.level, at.node.name, line, at.obstacle, at.reason, at.fitting, of, at.fix)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the proof of this rewrite, one for each check. The proof runs once in a process, or its
        findings are read from the cache.
        """
        return prove_rewrite(self)
