"""``Rewrite``: what every rewrite offers, whether it is a pair of functions or a pass over the graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shiplap.rewrite.match import Level, Outcome

if TYPE_CHECKING:
    from torch.fx import Graph

__all__ = ["Program", "Rewrite"]


@dataclass(frozen=True)
class Program:
    """A function with arguments on which a rewrite must fire, and after which the results must be the same.

    Attributes:
        fn: plain PyTorch, as a model would contain it.
        args: tensors and scalars; never changed.
        label: says which sample this is, for findings: ``b=3 k=16 n=8 float32``.
        dynamic: whether sizes are traced as symbols.
        train: whether gradients of the floating tensors are compared as well.
        exact: names of the checks that are excused, with the reason, such as ``{"strides": "..."}``.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    label: str = ""
    dynamic: bool = False
    train: bool = True
    excused: tuple[tuple[str, str], ...] = field(default=())


class Rewrite(ABC):
    """One rewrite. Immutable once built; identity is the object's.

    Attributes:
        name: an identifier, unique among the rewrites of a scope, as it appears in findings and counters.
        level: where it runs.
    """

    name: str
    level: Level

    @property
    @abstractmethod
    def digest(self) -> str:
        """Of everything that decides what :meth:`apply` does: source, helpers, guards, options. No addresses."""

    @abstractmethod
    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Change ``graph`` in place where the rewrite fits *and pays*; yield a value per place and per near miss.

        The caller lints and recompiles. New nodes get their meta from ``shiplap.rewrite.graph.insert``.
        """

    @abstractmethod
    def programs(self) -> Iterable[Program]:
        """What the proof runs: at least one program in which the rewrite fires."""
