"""``Rewrite``, the interface of every rewrite. A rewrite is a pair of functions or a pass over the graph."""

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
    """Return the first 16 hexadecimal digits of a SHA-256 digest of ``parts``. The digest covers ``str`` of each,
    joined by newlines.
    """
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


class Rewrite(ABC):
    """A change of graphs with a proof that the graphs still compute the same results. A rewrite is immutable once
    built. Two rewrites are equal only if they are one object.

    Attributes:
        name: an identifier, as it appears in findings and counters.
        level: the stage of compilation at which it runs, such as ``"pre-grad"``.
        anchors: names of calls such as ``"softmax"``. A graph without any of these calls contains nothing that the
            rewrite replaces. If there are none, any graph may match.
    """

    name: str
    level: Level
    anchors: frozenset[str] = frozenset()

    @property
    def prove_on_first_match(self) -> bool:
        """Whether the proof of this rewrite waits until a graph first contains a call that ``anchors`` names. Otherwise
        the proof runs when the rewrite is switched on.

        The proof compares results before and after the rewrite. The proofs of most of Shiplap's rewrites wait, since
        most graphs contain nothing that they replace. A rewrite of a user is proven when it is switched on, because an
        error then names the user's line.
        """
        return bool(self.anchors) and self.code_is_fully_hashed and type(self).__module__.startswith("shiplap.rewrite.")

    def may_match(self, graph: Graph) -> bool:
        """Return whether ``graph`` has a call that is named in ``anchors``. If ``anchors`` is empty, return True.

        A graph without a call that ``anchors`` names contains nothing that this rewrite replaces.
        """
        return not self.anchors or any(torch_call_name(n) in self.anchors for n in graph.nodes)

    @property
    def code_is_fully_hashed(self) -> bool:
        """Whether ``digest`` and the code of Shiplap cover everything on which the result of this rewrite's proof
        depends. The result is kept for other processes only in that case.

        The value is true for classes of Shiplap. A subclass elsewhere may override it.
        """
        return type(self).__module__.startswith("shiplap.rewrite.")

    @property
    @abstractmethod
    def digest(self) -> str:
        """A digest of everything on which the effect of :meth:`apply` depends, such as its source code, its helper
        functions, its guards and its options.
        """

    @abstractmethod
    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Change ``graph`` in place wherever the rewrite matches and the result is faster. Yield a ``Match`` for each
        replacement. Yield a ``NearMiss`` for each part of the graph that was not replaced because of a single obstacle.

        The caller checks and recompiles the graph. ``shiplap.rewrite.graph.place_replacement`` sets the meta of new
        nodes.
        """

    @abstractmethod
    def programs(self) -> Iterable[Program]:
        """Return the programs on which the rewrite is proven. A program is a function with example arguments. The proof
        compares its results before and after the rewrite. The rewrite must apply in at least one program.
        """

    def near_miss(self, at: RewriteObstacle, of: int) -> NearMiss:
        """Return a ``NearMiss`` for a part of a graph that this rewrite would replace if there were not the obstacle
        ``at``.

        ``of`` is the number of nodes in the rewrite's pattern. The record also states how many of them were found in
        the graph, which is ``at.fitting``.
        """
        # The line of the user, who has to change it.
        line = source_line(at.node)
        return NearMiss(self.name, self.level, at.node.name, line, at.obstacle, at.reason, at.fitting, of, at.fix)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the proof of this rewrite, one for each check. The proof runs at most once in a process. If
        the cache holds its findings, they are read from there.
        """
        return prove_rewrite(self)
