"""Candidates: a kernel with a config, and the way to run it. Templates that Inductor compiles are candidates as
well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shiplap.declare.binding import Binding
from shiplap.declare.config import NO_CONFIG, Config
from shiplap.declare.kernel import Kernel
from shiplap.dispatch import Op
from shiplap.dispatch.outputs import check_outputs
from shiplap.dispatch.tuned_choices import REFERENCE

CandidateRun = Callable[[], tuple[Tensor, ...]]


class CandidateRefused(Exception):
    """The error that a candidate does not support these arguments. Such a candidate is not wrong, but it is not
    timed.
    """


class Candidate(ABC):
    """Code that can be verified and timed. The name ``kernel`` and the values in ``config`` identify it among the
    candidates of an op.

    Attributes:
        fixed: whether the candidate supports only the sizes of this call.
        opaque: whether the outputs are allocated outside Python, where Shiplap cannot fill them with a byte first.
        copies: whether :meth:`prepare` copies the arguments, so that a later write to them does not reach the run.
        compiles: whether :meth:`precompile` can be called.
    """

    kernel: str
    config: Config
    fixed: bool = False
    opaque: bool = False
    copies: bool = False
    compiles: bool = False

    @abstractmethod
    def prepare(self, args: tuple[Any, ...]) -> CandidateRun:
        """Compile the candidate for ``args`` (all arguments in schema order) and check that it supports them. Return a
        function without arguments, which is timed and returns the outputs.

        Raises:
            CandidateRefused: the candidate does not support the arguments.
            Exception: the error of a failed compilation.
        """

    def precompile(self, args: tuple[Any, ...]) -> None:
        """Compile what :meth:`prepare` needs for ``args`` without launching anything. Raise ``NotImplementedError`` if
        the candidate compiles nothing.

        Several threads may call this method in parallel.
        """
        raise NotImplementedError(f"{candidate_label(self)} compiles nothing")

    def compile_apart(self) -> bool:
        """Start the work of :meth:`precompile` in another process, and return whether it was started. This base class
        starts nothing and returns False.

        Unlike a thread, another process does not compete for Python's global lock.
        """
        return False

    def estimate(self, env: Mapping[str, Any]) -> float | None:
        """Return the author's estimate of the time of a call, in any unit, or None if there is none. ``env`` maps names
        of dims and scalars to their values in the call.
        """
        return None


def candidate_label(candidate: Candidate) -> str:
    """Return the name of a candidate's kernel with its config, such as ``tiled(BLOCK=64)``."""
    return candidate.config.label(candidate.kernel)


@dataclass(frozen=True)
class KernelCandidate(Candidate):
    """A kernel that is bound to an op, with one of its configs, as a candidate. It is called without autograd and
    without torch's dispatcher.
    """

    op: Op
    bound: Kernel
    kernel: str = field(init=False)
    config: Config = field(init=False)
    compiles: bool = field(init=False)

    def __post_init__(self) -> None:
        """Set the fields ``kernel``, ``config`` and ``compiles`` from the bound kernel."""
        for name, value in (
            ("kernel", self.bound.name),
            ("config", self.bound.config),
            ("compiles", self.bound.compiles),
        ):
            # A frozen dataclass forbids plain assignment, even to its own fields.
            object.__setattr__(self, name, value)

    def prepare(self, args: tuple[Any, ...]) -> CandidateRun:
        """Return a function that runs the kernel on ``args``. Raise ``CandidateRefused`` if the kernel refuses the
        arguments.
        """
        call = self.op.bind(args)
        if reason := self.bound.why_refused(call):
            raise CandidateRefused(reason)
        return partial(self.bound.run_call, call)

    def precompile(self, args: tuple[Any, ...]) -> None:
        """Compile the kernel for a call with ``args`` without running it. Do nothing if the kernel refuses such
        a call.
        """
        call = self.op.bind(args)
        if not self.bound.why_refused(call):
            self.bound.compile(call)

    def estimate(self, env: Mapping[str, Any]) -> float | None:
        """Return the estimate of the kernel's function ``prior`` for a call, in any unit, or None if the kernel has
        none. ``env`` maps names of dims and scalars to their values in the call.
        """
        space = self.bound.space
        return None if space is None or space.prior is None else space.prior(env, self.config.as_dict())


@dataclass(frozen=True)
class ReferenceCandidate(Candidate):
    """The op's reference as a candidate. It is correct by definition, so every op has a valid candidate."""

    op: Op
    kernel: str = REFERENCE
    config: Config = NO_CONFIG

    def prepare(self, args: tuple[Any, ...]) -> CandidateRun:
        """Return a function without parameters that runs the op's reference on ``args``, checks its outputs and returns
        them as a tuple. Raise the errors of a call of the op if ``args`` do not fit the declaration.
        """
        call = self.op.bind(args)
        return lambda: check_outputs(self.op.spec, call, self.op.run_reference(call.args))


def kernel_candidates(op: Op, device: str, env: Mapping[str, Any]) -> list[Candidate]:
    """Return the candidates of ``op`` on a device. They are its reference, then each kernel with each config that fits
    the sizes in ``env``. The first kernel with its first config is what runs if nothing was tuned.
    """
    valid: list[Candidate] = [ReferenceCandidate(op)]
    for kernel in op.kernels.get(torch.device(device).type, ()):
        configs = kernel.space.configs(env) if kernel.space else (NO_CONFIG,)
        valid += [KernelCandidate(op, kernel.with_config(config)) for config in configs]
    return valid


def declared_default(op: Op, call: Binding, device: str) -> tuple[str, Config]:
    """Return the name and config of the kernel that runs for ``call`` on this device if nothing was tuned. Return those
    of the reference if no kernel takes the call.

    The tensors of ``call`` may have no values, as on the meta device.
    """
    for kernel in op.eager_kernels(torch.device(device).type):
        try:
            serving = kernel.variant_for_call(call)
        except Exception:  # supports= may look at values, or at the device
            serving = kernel if kernel.space is None else kernel.with_config(kernel.space.default(call.env))
        if not isinstance(serving, str):
            return serving.name, serving.config
    return REFERENCE, NO_CONFIG
