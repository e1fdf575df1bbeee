"""The candidates of a call, and PyTorch code as one of them: it computes a call with other operations, in the graph.

Inductor tunes and fuses it there as it does the user's own code. So whatever Inductor would have made of a library's
call takes part in the choice, beside the kernels of an op and its fallback.
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
from shiplap.inductor.bound_call import Call
from shiplap.inductor.size_range import Sizes
from shiplap.inductor.template_candidate import TemplateCandidate
from shiplap.sampling.run import outputs, split
from shiplap.torch_private import inductor_lowering


@dataclass(frozen=True)
class Alone:
    """A function of a call's tensors, compiled by itself and without tuning; it takes the layouts of the call."""

    run: Callable[..., Any]
    like: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # sizes and strides of each tensor

    @staticmethod
    def of(call: Call, function: Callable[..., Any]) -> Alone:
        """Compile ``function``, while the graph of ``call`` is lowered."""
        values = [inductor_lowering.fixed_fake(v) for v in call.values if isinstance(v, Tensor)]
        with inductor_lowering.no_autotuning():
            compiled = inductor_lowering.compile_graph(inductor_lowering.trace(function, values), values)
        return Alone(compiled, tuple((tuple(v.shape), tuple(v.stride())) for v in values))

    def on(self, args: tuple[Any, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """The compiled function on copies of the tensors among ``args``."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        laid = [_laid(t, *like) for t, like in zip(tensors, self.like, strict=True)]
        return partial(run_graph, self.run, laid)


@dataclass
class TracedCandidate(TemplateCandidate):
    """A template that is a function. Alone it is compiled without tuning; in the graph Inductor may tune it."""

    compiles = False
    _alone: Alone | None = field(default=None, repr=False)

    def render(self) -> Alone:
        """The function compiled by itself. Raises what its operations raise for such arguments."""
        if self._alone is None:
            self._alone = Alone.of(self.call, self._function)
        return self._alone

    @property
    def _function(self) -> Callable[..., Any]:
        assert self.template.function is not None
        return self.call.of(self.template.function)

    @property
    def digest(self) -> str:
        """Of the function, the libraries that it calls and the memory that it reads."""
        memory = [(list(v.shape), list(v.stride())) for v in self.call.tensors.values()]
        text = f"{self.template.identity}|{memory}|{torch.version.git_version}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def compile_apart(self) -> bool:
        """Nothing is compiled apart: there is no kernel before the graph."""
        return False

    def precompile(self, args: tuple[Any, ...]) -> None:
        raise NotImplementedError(f"{self.label} compiles nothing beside others")

    def prepare(self, args: tuple[Any, ...]) -> Callable[[], tuple[Tensor, ...]]:
        return self.render().on(args)

    def prepare_at(self, args: tuple[Any, ...], sizes: Sizes) -> Callable[[], tuple[Tensor, ...]]:
        """The function as it stands: at other sizes of one graph, its operations are the same."""
        assert self.template.function is not None
        positional, named = split(self.call.op.spec, args)
        return lambda: outputs(self.template.function(*positional, **named))  # type: ignore[misc]

    def state(self) -> str:
        """Nothing: the operations of PyTorch keep nothing."""
        return ""

    def node(self, fusion: bool = True) -> Any:
        graph = inductor_lowering.trace(self._function, list(self.call.tensors.values()))
        node = inductor_lowering.inline(graph, self.call.nodes)
        return node if fusion else inductor_lowering.unfused(node)


def candidates(call: Call) -> tuple[list[TemplateCandidate], dict[str, str]]:
    """The candidates of the op's templates for this call, and a reason for each template that cannot be used.

    One that has been rendered for the call is not rendered again.
    """
    if "candidates" not in call.memo:
        call.memo["candidates"] = _listed(call)
    valid, refused = call.memo["candidates"]
    return list(valid), dict(refused)


def _listed(call: Call) -> tuple[list[TemplateCandidate], dict[str, str]]:
    valid: list[TemplateCandidate] = []
    refused: dict[str, str] = {}
    for template in call.op.templates.get(call.device.type, ()):
        kind = TemplateCandidate if template.function is None else TracedCandidate
        for config in template.candidates(call.hints):
            candidate = kind(call, template, Config.of(config))
            if reason := candidate.refuses():
                refused[candidate.label] = reason
            else:
                valid.append(candidate)
    return valid, refused


def _laid(tensor: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def run_graph(compiled: Callable[..., Any], args: list[Any]) -> tuple[Tensor, ...]:
    """What a compiled graph, which takes and returns lists, makes of ``args``."""
    return tuple(compiled(*args))
