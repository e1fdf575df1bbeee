"""Choices among configs that a declaration cannot list, since a vendor's library offers different ones for each size.

The configs of most kernels are written beside their declaration, and ``sl.tune`` chooses among them. A library such as
cuSPARSELt numbers its algorithms for each problem, and a :class:`ConfigSource` reads the numbers from it. The result is
an ordinary choice of the op (``Choice``), which ``shiplap freeze`` writes. ``Value`` is the type of a kernel parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shiplap.declare.config import Config
from shiplap.dispatch import Op
from shiplap.tuning.candidate import Candidate, CandidateRefused, CandidateRun, KernelCandidate, ReferenceCandidate
from shiplap.tuning.choice import Choice
from shiplap.tuning.engine import recipe_of_sizes
from shiplap.tuning.inputs import Inputs
from shiplap.tuning.selector import SelectionOptions, select
from shiplap.tuning.worker_process import WorkerProcess

__all__ = ["Choice", "ConfigSource", "Value"]

Value = int | float | bool | str


class ConfigSource(ABC):
    """A source of configs of a kernel. It lists configs for the sizes of a call, and can tune an op with them. A config
    holds the kernel's tuning parameters.

    Candidates are verified and timed in a separate process, which imports the source by name. Make one instance at the
    top of a module.

    Args:
        home: the location of that instance, ``"package.module:NAME"``.
        device_type: the device type of the kernel that the configs are for.
        kernel: the name of that kernel, as in ``op.kernel(device_type, ..., name=kernel)``.
    """

    def __init__(self, home: str, device_type: str, kernel: str) -> None:
        """Store the location of this source, ``"package.module:NAME"``, and the kernel's device type and name."""
        self.home, self.device_type, self.kernel = home, device_type, kernel

    @abstractmethod
    def configs(self, op: Op, device: torch.device, sizes: Mapping[str, Any]) -> Iterable[Mapping[str, Value]]:
        """Return the configs to try for a call of ``op`` on ``device`` with the sizes and scalars ``sizes``. A config
        holds the kernel's tuning parameters by name.

        The first config is used if nothing was tuned. Equal sizes must give equal configs in every process.
        """

    def refusal(self, op: Op, config: Mapping[str, Value], args: tuple[Any, ...]) -> str:
        """Return the reason why the kernel cannot run ``args`` with ``config``, or an empty string if it can. The base
        class always returns an empty string.

        An override may also prepare what has to be prepared once for a config. A refused config is left out of the
        measurement and not reported as wrong.
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
        """Choose a config for each of ``samples``, which are sizes and scalars by name, by measurement. Return the
        choices in the order of ``samples``. They are used in this process.

        Args:
            device: the device on which candidates run.
            seconds: the time budget of one choice.
            remeasure: whether calls with a stored choice are measured again.
        """
        options = SelectionOptions(seconds=seconds, remeasure=remeasure)
        with WorkerProcess() as isolation:
            # The worker is a process of its own, which imports the source by name.
            bench = isolation.bench(f"{self.home}.candidates")
            return [
                select(
                    op,
                    recipe_of_sizes(op, sample),
                    device=device,
                    candidates_of=self.candidates,
                    bench=bench,
                    options=options,
                )
                for sample in samples
            ]

    def candidates(self, op: Op, drawn: Inputs) -> list[Candidate]:
        """Return the candidates that the tuner compares for calls like the sample inputs ``drawn``. The op's reference
        comes first, followed by the kernel with each config.

        The method is called in the tuner's process and in the worker process, and must return the same list in both.
        """
        listed = self.configs(op, torch.device(drawn.device), drawn.call.env)
        return [ReferenceCandidate(op), *(self._candidate(op, config) for config in listed)]

    def _candidate(self, op: Op, config: Mapping[str, Value]) -> _Listed:
        """Return the kernel of this source with the tuning parameters ``config``, as a candidate that the tuner can
        verify and time.
        """
        (kernel,) = (k for k in op.kernels[self.device_type] if k.name == self.kernel)
        return _Listed(self, KernelCandidate(op, kernel.with_config(Config.of(config))))


class _Listed(Candidate):
    """A candidate of the tuner that is the kernel of a :class:`ConfigSource` with one config."""

    def __init__(self, source: ConfigSource, inner: KernelCandidate) -> None:
        """Make a candidate from ``inner``, the kernel with its config, and ``source``, which may refuse the config."""
        self.source, self.inner = source, inner
        self.kernel, self.config = inner.kernel, inner.config

    def prepare(self, args: tuple[Any, ...]) -> CandidateRun:
        """Return a function that runs the kernel on ``args``. Raise ``CandidateRefused`` if the source refuses the
        config for them.
        """
        if reason := self.source.refusal(self.inner.op, self.config.as_dict(), args):
            raise CandidateRefused(reason)
        return self.inner.prepare(args)
