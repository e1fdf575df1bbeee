"""Candidates: kernel × config, and how one is run. Templates that Inductor compiles are candidates as well.

``Candidate`` is a protocol: a name, a config, and ``prepare(args)``, which does what is done once (compile, check,
refuse) and returns what is timed. Its calls are made under ``torch.no_grad()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from shiplap.op import Op
from shiplap.op.binding import Binding
from shiplap.op.choices import REFERENCE
from shiplap.op.config import NO_CONFIG, Config
from shiplap.op.launch import Kernel, fit_outputs

__all__ = ["Candidate", "KernelCandidate", "ReferenceCandidate", "Refused", "candidates", "default_of", "label"]

Run = Callable[[], tuple[Tensor, ...]]


class Refused(Exception):
    """A candidate that does not take these arguments: not wrong, not in the race."""


@runtime_checkable
class Candidate(Protocol):
    """What can be verified and timed.

    Two optional attributes, both False by default: ``fixed`` says that it serves only the sizes at hand, so that it is
    not asked about others; ``opaque`` that its outputs are not allocated in Python, where they could be poisoned. An
    optional method, ``precompile(args)``, or None, does what takes long in the first ``prepare`` and launches nothing;
    it runs in any thread, beside others.
    """

    @property
    def kernel(self) -> str: ...

    @property
    def config(self) -> Config: ...

    def prepare(self, args: tuple[Any, ...]) -> Run:
        """Get ready for ``args`` (all arguments, in order); raises Refused, or whatever goes wrong."""
        ...


def label(candidate: Candidate) -> str:
    """``tiled(BLOCK=64)``."""
    return f"{candidate.kernel}({candidate.config})" if candidate.config.items else candidate.kernel


@dataclass(frozen=True)
class KernelCandidate:
    """A kernel bound to an op, with one of its configs; runs below autograd and the dispatcher."""

    op: Op
    bound: Kernel

    @property
    def kernel(self) -> str:
        return self.bound.name

    @property
    def config(self) -> Config:
        return self.bound.config

    def prepare(self, args: tuple[Any, ...]) -> Run:
        call = self.op.bind(args)
        if reason := self.bound.refuses(call):
            raise Refused(reason)
        return partial(self.bound.run, call)

    @property
    def precompile(self) -> Callable[[tuple[Any, ...]], None] | None:
        """None where the kernel does not say how it is compiled without a launch."""
        compile_only: Callable[[Binding], None] | None = getattr(self.bound.run, "compile", None)
        return None if compile_only is None else partial(self._precompile, compile_only)

    def _precompile(self, compile_only: Callable[[Binding], None], args: tuple[Any, ...]) -> None:
        call = self.op.bind(args)
        if not self.bound.refuses(call):
            compile_only(call)


@dataclass(frozen=True)
class ReferenceCandidate:
    """The reference, as the floor: it is right by definition, so that there is always a choice."""

    op: Op
    kernel: str = REFERENCE
    config: Config = NO_CONFIG

    def prepare(self, args: tuple[Any, ...]) -> Run:
        call = self.op.bind(args)
        return lambda: fit_outputs(self.op.spec, call, self.op.run_reference(call.args))


def candidates(op: Op, device: str, env: Mapping[str, Any]) -> list[Candidate]:
    """Every kernel × config of ``op`` for a device type and sizes: the reference first, then the declared default."""
    found: list[Candidate] = [ReferenceCandidate(op)]
    for kernel in op.kernels.get(torch.device(device).type, ()):
        configs = kernel.space.configs(env) if kernel.space else (NO_CONFIG,)
        found += [KernelCandidate(op, kernel.variant(config)) for config in configs]
    return found


def default_of(op: Op, call: Binding, device: str) -> tuple[str, Config]:
    """What runs without a choice on a device type; ``call`` may be one without values."""
    for kernel in op.eager(torch.device(device).type):
        try:
            serving = kernel.serving(call)
        except Exception:  # supports= may look at values, or at the device
            serving = kernel if kernel.space is None else kernel.variant(kernel.space.default(call.env))
        if isinstance(serving, Kernel):
            return serving.name, serving.config
    return REFERENCE, NO_CONFIG
