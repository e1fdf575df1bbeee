"""``Program``, the unit of a rewrite's proof, and ``Provable``, the interface that the proof needs of a rewrite."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from shiplap.rewrite.match import Level, Outcome
from shiplap.sampling.layouts import clone_exactly
from shiplap.sampling.values import draw_values

if TYPE_CHECKING:
    from torch.fx import Graph

proving: ContextVar[bool] = ContextVar("shiplap_proving", default=False)
"""Set while a proof runs: what a replacement gains is not asked then, samples are small."""

placing: ContextVar[Callable[[], object]] = ContextVar("shiplap_placing", default=lambda: None)
"""Called before a graph is changed: a rewrite that is proven late is proven then. Most graphs have no place for it."""


def seeded_draw() -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that draws the arguments of programs. It takes shapes, and ``dtype`` as a keyword. It returns a
    tensor of normally distributed numbers for each shape.
    """
    # With a fixed seed, the proof of one digest has one result.
    rng = torch.Generator().manual_seed(0)
    return lambda *shapes, dtype=torch.float32: tuple(torch.randn(s, generator=rng).to(dtype) for s in shapes)


@dataclass(frozen=True)
class Program:
    """A function with arguments in which a rewrite applies, and which must compute the same results afterwards.

    Attributes:
        fn: the function of PyTorch operations, as a model would contain it.
        args: its arguments, which are tensors, scalars or None. They are never changed.
        label: the name of the sample in findings.
        dynamic: whether sizes are traced as symbols. True stands for all sizes, a tuple for the sizes that it lists. In
            a model, for example, the batch and the tokens are symbols, and the heads and widths are numbers.
        train: whether gradients of the floating-point tensors are compared as well.
        fires: whether the rewrite must apply. With sizes of 0 or 1, the compiler may remove the pattern entirely.
        kinds: further kinds of values (see ``shiplap.sampling.values``) with which the function is run.
        constants: positions of the tensors for which no gradient is computed, such as the mask of a model.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    label: str = ""
    dynamic: bool | tuple[int, ...] = False
    train: bool = True
    fires: bool = True
    kinds: tuple[str, ...] = ()
    constants: tuple[int, ...] = ()

    def of_tensors(self) -> tuple[Callable[..., Any], list[Tensor]]:
        """Return a pair of a function and the list of the tensors in ``args``. The function takes these tensors and
        calls ``fn`` with them and the other arguments.
        """
        at = [i for i, a in enumerate(self.args) if isinstance(a, Tensor)]

        def of_tensors(*tensors: Tensor) -> Any:
            """Return the result of the program's function with ``tensors`` in place of the tensors in ``args``."""
            given = list(self.args)
            for i, t in zip(at, tensors, strict=True):
                given[i] = t
            return self.fn(*given)

        return of_tensors, [self.args[i] for i in at]

    def leaves(self, tensors: Sequence[Tensor], train: bool) -> list[Tensor]:
        """Return detached views of ``tensors``, which stand for the tensors in ``args``. If ``train`` is true, those
        that are floating-point and not listed in ``constants`` require gradients.
        """
        asked = (train and t.is_floating_point() and i not in self.constants for i, t in enumerate(tensors))
        return [t.detach().requires_grad_(needs) for t, needs in zip(tensors, asked, strict=True)]

    def others(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield copies of the list ``tensors``, one for each kind of values in ``kinds``, in which floating-point
        tensors have new values of that kind. Sizes, dtypes and strides stay the same. Integers keep their values.
        """
        for seed, kind in enumerate(self.kinds):
            rng = torch.Generator().manual_seed(seed)
            yield [_redraw_values(t, kind, rng) if t.is_floating_point() else t for t in tensors]


def _redraw_values(t: Tensor, kind: str, rng: torch.Generator) -> Tensor:
    """Return a copy of ``t`` with random values of ``kind``, drawn with ``rng``. An expanded tensor keeps its values,
    since it cannot be written to.
    """
    copy = clone_exactly(t)
    if all(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):  # expanded ones cannot be written to
        copy.copy_(draw_values(tuple(t.shape), t.dtype, kind, 1, rng))
    return copy


class Provable(Hashable, Protocol):
    """The interface of a change of graphs that can be proven. :class:`shiplap.rewrite.base.Rewrite` documents each
    member.
    """

    name: str
    level: Level

    @property
    def digest(self) -> str:
        """A digest of everything on which the effect of :meth:`apply` depends."""

    @property
    def code_is_fully_hashed(self) -> bool:
        """Whether ``digest`` and the code of Shiplap cover everything on which the result of the proof depends. If they
        do not, the result is not kept for other processes.
        """

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Change ``graph`` in place wherever the change applies. Yield a ``Match`` for each change, and a ``NearMiss``
        for each part of the graph where one obstacle prevents it.
        """

    def programs(self) -> Iterable[Program]:
        """Return the functions with example arguments on which the change is proven. The proof compares their results
        before and after the change.
        """
