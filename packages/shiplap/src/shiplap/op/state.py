"""``OpState``: a declared op as data - its declaration, its reference, and what has been attached to it since."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

from shiplap.op.autograd import Backward, floating_outputs
from shiplap.op.batch import Batching
from shiplap.op.binding import Binding
from shiplap.op.bucket import Rule, read_rule
from shiplap.op.kernel import Kernel
from shiplap.op.native import NativeBinding
from shiplap.op.plan import CallPlan
from shiplap.op.source import source_digest
from shiplap.op.spec import OpSpec
from shiplap.op.template import Template
from shiplap.op.values import Args, Returned, Value

__all__ = ["OpState", "Sampler"]

Sampler: TypeAlias = Callable[..., Args]  # fn(rng, sizes, dtype, device) -> all arguments
_NONE: list[Kernel] = []


class OpState:
    """What ``Op`` knows; nothing here asks torch's dispatcher.

    Attributes:
        spec: the declaration as data.
        reference: the decorated function in plain PyTorch, which defines the right result of kernels and gradients.
        kernels: implementations by device type, first one first.
        templates: kernel sources by device type, into which compiled code fuses its neighbours.
        gradient: the declared backward, or None.
        sampler: builds arguments for the audit, or None: then they are drawn from the declaration.
        rule: which calls share a choice. ``batching``: dims along which several calls may be made as one.
        native: the native binding in force, or None: then Python serves.
        plan: what is done with the arguments of a call.
        differentiable: whether an output could carry a gradient, so that autograd stands in front.
    """

    def __init__(self, spec: OpSpec, reference: Callable[..., Returned]) -> None:
        self.spec, self.reference = spec, reference
        self.signature = inspect.signature(reference)
        self.kernels: dict[str, list[Kernel]] = {}
        self.templates: dict[str, list[Template]] = {}
        self.gradient: Backward | None = None
        self.sampler: Sampler | None = None
        self.rule: Rule = read_rule(spec)
        self.batching: tuple[Batching, ...] = ()
        self.native: NativeBinding | None = None
        self.plan = CallPlan(spec)
        self.differentiable = not spec.mutated and floating_outputs(spec)
        self._source = source_digest(reference)
        self._eager: dict[str, tuple[list[Kernel], list[Kernel]]] = {}  # the list that it was made from, and `eager`

    def bind(self, args: Sequence[Value]) -> Binding:
        """Check all arguments, in declared order, real tensors or fakes; trailing defaults may be left out.

        Raises:
            ArgumentError: SL201 to SL210, what the declaration refuses.
        """
        return self.plan.bind(args)

    def run_reference(self, args: Args) -> Returned:
        """The reference on all arguments, in declared order; what it returns is not looked at."""
        positional, named = self.spec.split(args)
        return self.reference(*positional, **named)

    @property
    def file(self) -> str:
        """Where the op is declared."""
        return os.path.abspath(self.reference.__code__.co_filename)

    def own(self, device: str) -> list[Kernel]:
        """The kernels for a device type that are no templates."""
        return [k for k in self.kernels.get(device, ()) if k.template is None]

    def eager(self, device: str) -> list[Kernel]:
        """What is tried in this order where nothing was chosen; then the reference runs.

        A reference that is a library call there (``library=``) comes before templates; one that is no ``default`` is
        run where it was chosen only.
        """
        bound = self.kernels.get(device, _NONE)
        known = self._eager.get(device)
        if known is None or known[0] is not bound:
            library = device in self.spec.library
            ready = [k for k in bound if k.template is None or (k.template.default and not library)]
            known = self._eager[device] = bound, ready
        return known[1]

    def attach(self, kernel: Kernel) -> None:
        """One of the author's goes before all others; a template's behind them, and in nobody's place."""
        others = [k for k in self.kernels.get(kernel.device, []) if k.name != kernel.name or k.template is None]
        if kernel.template is None:
            self.kernels[kernel.device] = [kernel, *(k for k in others if k.name != kernel.name)]
        elif kernel.name not in [k.name for k in others]:
            self.kernels[kernel.device] = [*others, kernel]

    @property
    def identity(self) -> str:
        """What compiled artefacts depend on: declaration, reference, gradient and kernels."""
        parts = [self.spec.digest, self._source, *([str(self.rule)] if self.rule != read_rule(self.spec) else [])]
        parts += [f"{self.gradient.source}/{self.gradient.saves}"] if self.gradient else []
        parts += [f"{d}/{k.name}/{k.identity}" for d, ks in sorted(self.kernels.items()) for k in ks]
        parts += [f"{d}/{t.name}/{t.identity}" for d, ts in sorted(self.templates.items()) for t in ts]
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
