"""The candidates of a call, and PyTorch code as one of them. Such code computes a call with other operations in the
graph.

Inductor tunes and fuses it there as it does the user's own code. The choice therefore includes the kernels that
Inductor generates or calls, in addition to the op's own kernels and its fallback.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shiplap.declare.config import Config
from shiplap.dispatch.outputs import flatten_op_results
from shiplap.inductor.bound_call import LoweredCall
from shiplap.inductor.size_range import Sizes
from shiplap.inductor.template_candidate import TemplateCandidate
from shiplap.torch_private import inductor_lowering


@dataclass(frozen=True)
class StandaloneFunction:
    """A function of a call's tensors, compiled by itself and without tuning.

    ``run`` is the compiled function. ``like`` holds a pair of sizes and strides for each tensor, which the tensor must
    have.
    """

    run: Callable[..., Any]
    like: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # sizes and strides of each tensor

    @staticmethod
    def compile_for_call(call: LoweredCall, function: Callable[..., Any]) -> StandaloneFunction:
        """Return ``function`` compiled by Inductor without tuning, for tensors of the sizes and strides of ``call``.
        Inductor must be lowering the graph of ``call`` at that time.
        """
        # With fixed sizes: it is measured at those of the call alone.
        values = [inductor_lowering.fixed_fake(v) for v in call.values if isinstance(v, Tensor)]
        with inductor_lowering.no_autotuning():
            compiled = inductor_lowering.compile_graph(inductor_lowering.trace_to_aten(function, values), values)
        return StandaloneFunction(compiled, tuple((tuple(v.shape), tuple(v.stride())) for v in values))

    def bind_copies(self, args: tuple[Any, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function without parameters that runs the compiled function on copies of the tensors among ``args``
        and returns its results as a tuple. The tensors are copied once, to the layouts in ``like``.
        """
        tensors = [a for a in args if isinstance(a, Tensor)]
        laid = [_copy_with_layout(t, *like) for t, like in zip(tensors, self.like, strict=True)]
        return partial(run_graph, self.run, laid)


@dataclass
class TracedCandidate(TemplateCandidate):
    """A candidate of a template that is a function of PyTorch operations. For tests and measurements it is compiled
    alone and without tuning. In the graph, Inductor may tune it.
    """

    compiles = False
    _alone: StandaloneFunction | None = field(default=None, repr=False)

    def render(self) -> StandaloneFunction:
        """Return the template's function, compiled by Inductor as a graph of its own at the first request. Errors of
        the compilation are passed on.
        """
        if self._alone is None:
            self._alone = StandaloneFunction.compile_for_call(self.call, self._function)
        return self._alone

    @property
    def _function(self) -> Callable[..., Any]:
        """The template's PyTorch function as a function of only those tensors that are not None in this call."""
        assert self.template.function is not None
        return self.call.function_of_tensors(self.template.function)

    @property
    def digest(self) -> str:
        """A digest of everything on which the results depend. It covers the template's function, the version of
        PyTorch, and the sizes and strides of the call's tensors.
        """
        memory = [(list(v.shape), list(v.stride())) for v in self.call.tensors.values()]
        text = f"{self.template.identity}|{memory}|{torch.version.git_version}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def compile_apart(self) -> bool:
        """Return False. A PyTorch function has no kernel that another process could compile."""
        return False

    def precompile(self, args: tuple[Any, ...]) -> None:
        """Raise ``NotImplementedError``, since a PyTorch function is not compiled in parallel with other candidates."""
        raise NotImplementedError(f"{self.label} compiles nothing beside others")

    def prepare(self, args: tuple[Any, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function without parameters that runs the compiled function on copies of the tensors in ``args`` and
        returns the outputs.
        """
        return self.render().bind_copies(args)

    def prepare_at(self, args: tuple[Any, ...], sizes: Sizes) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function without parameters that runs the template's PyTorch operations eagerly on ``args`` and
        returns the outputs. ``sizes``, the values of the size symbols, is ignored.
        """
        assert self.template.function is not None
        # Eagerly, since compiling for each size of a proof would take too long.
        positional, named = self.call.op.spec.split(args)
        return lambda: flatten_op_results(self.template.function(*positional, **named))  # type: ignore[misc]

    def state(self) -> str:
        """Return an empty string, since PyTorch operations keep no values between calls."""
        return ""

    def node(self, fusion: bool = True) -> Any:
        """Return the Inductor node of the template's function, traced into the current graph. If ``fusion`` is true,
        Inductor may fuse neighbours with the node. If it is false, the node is excluded from fusion.
        """
        graph = inductor_lowering.trace_to_aten(self._function, list(self.call.tensors.values()))
        node = inductor_lowering.inline_graph(graph, self.call.nodes)
        return node if fusion else inductor_lowering.exclude_from_fusion(node)


def template_candidates(call: LoweredCall) -> tuple[list[TemplateCandidate], dict[str, str]]:
    """Return the candidates that can run ``call``, and a dict from the label of each other candidate to the reason
    against it. A candidate is a template with one of its configs.

    Both are stored in ``call.memo``, so each candidate is rendered only once. Copies are returned.
    """
    if "candidates" not in call.memo:
        call.memo["candidates"] = _list_template_candidates(call)
    valid, refused = call.memo["candidates"]
    return list(valid), dict(refused)


def _list_template_candidates(call: LoweredCall) -> tuple[list[TemplateCandidate], dict[str, str]]:
    """Return a list of candidates that can run ``call``, one for each template and config. Return also a dict from the
    label of each other candidate to the reason against it.
    """
    valid: list[TemplateCandidate] = []
    refused: dict[str, str] = {}
    for template in call.op.templates.get(call.device.type, ()):
        kind = TemplateCandidate if template.function is None else TracedCandidate
        for config in template.candidates(call.hints):
            candidate = kind(call, template, Config.of(config))
            if reason := candidate.why_refused():
                refused[candidate.label] = reason
            else:
                valid.append(candidate)
    return valid, refused


def _copy_with_layout(tensor: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return a copy of ``tensor`` in new memory with the given sizes and strides. ``tensor`` must have these sizes."""
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def run_graph(compiled: Callable[..., Any], args: list[Any]) -> tuple[Tensor, ...]:
    """Return the results of a compiled graph on ``args`` as a tuple. Such a graph takes and returns lists."""
    return tuple(compiled(*args))
