"""Choices among configs that no declaration can list, since a vendor's library has others for each size.

The configs of most kernels are written beside their declaration, and ``sl.tune`` chooses among them. A library such as
cuSPARSELt numbers its algorithms for each problem: a :class:`ConfigSource` asks it. What is chosen is an ordinary
choice of the op (``Choice``), which ``shiplap freeze`` writes and no call ever looks for. ``Value`` is what a parameter
of a kernel may be.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shiplap.op import Op
from shiplap.op.config import Config
from shiplap.selection.candidate import Candidate, KernelCandidate, ReferenceCandidate, Refused, Run
from shiplap.selection.choice import Choice
from shiplap.selection.engine import recipe_for
from shiplap.selection.inputs import Inputs
from shiplap.selection.isolate import Isolation
from shiplap.selection.selector import Options, select

__all__ = ["Choice", "ConfigSource", "Value"]

Value = int | float | bool | str


class ConfigSource(ABC):
    """Lists configs of a kernel for the sizes at hand, and tunes an op with them.

    Candidates are verified and timed in a process of their own, which imports the source by name: make one instance at
    the top of a module.

    Args:
        home: where that instance is, ``"package.module:NAME"``.
        device_type, kernel: of the kernel that the configs are for: ``op.kernel(device_type, ..., name=kernel)``.
    """

    def __init__(self, home: str, device_type: str, kernel: str) -> None:
        self.home, self.device_type, self.kernel = home, device_type, kernel

    @abstractmethod
    def configs(self, op: Op, device: torch.device, sizes: Mapping[str, Any]) -> Iterable[Mapping[str, Value]]:
        """Configs to try for a call of these sizes and scalars, the one that runs untuned first.

        The same sizes have to give the same configs in every process.
        """

    def refusal(self, op: Op, config: Mapping[str, Value], args: tuple[Any, ...]) -> str:
        """Why the kernel with ``config`` does not take ``args``, or empty; what has to be prepared once is done here.

        A config that is refused is left out of the race, and nobody calls it wrong.
        """
        return ""

    def tune(
        self,
        op: Op,
        samples: Iterable[Mapping[str, Value]],
        *,
        device: str,
        seconds: float = 20.0,
        remeasure: bool = False,
    ) -> list[Choice]:
        """Choose for each of ``samples`` (sizes and scalars by name), and put the choices into force.

        Args:
            device: where candidates run.
            seconds: for one choice; ``remeasure`` measures what is in the store, too.
        """
        options = Options(seconds=seconds, remeasure=remeasure)
        with Isolation() as isolation:
            bench = isolation.bench(f"{self.home}.candidates")
            return [
                select(
                    op,
                    recipe_for(op, sample),
                    device=device,
                    candidates_of=self.candidates,
                    bench=bench,
                    options=options,
                )
                for sample in samples
            ]

    def candidates(self, op: Op, drawn: Inputs) -> list[Candidate]:
        """The reference, then the kernel with each config; called by the tuner, in both processes."""
        listed = self.configs(op, torch.device(drawn.device), drawn.call.env)
        return [ReferenceCandidate(op), *(self._candidate(op, config) for config in listed)]

    def _candidate(self, op: Op, config: Mapping[str, Value]) -> _Listed:
        (kernel,) = (k for k in op.kernels[self.device_type] if k.name == self.kernel)
        return _Listed(self, KernelCandidate(op, kernel.variant(Config.of(config))))


class _Listed(Candidate):
    """The kernel with a config that the source listed."""

    def __init__(self, source: ConfigSource, inner: KernelCandidate) -> None:
        self.source, self.inner = source, inner
        self.kernel, self.config = inner.kernel, inner.config

    def prepare(self, args: tuple[Any, ...]) -> Run:
        if reason := self.source.refusal(self.inner.op, self.config.as_dict(), args):
            raise Refused(reason)
        return self.inner.prepare(args)
