"""A Python function as a kernel, run with the call's device as the current one.

Kernels come in two styles, told apart by their signature. *Out-style* takes the outputs' names as keywords and fills
tensors that shiplap allocated. *Functional* returns its outputs. They are then made fresh, contiguous and shown to fit.
Either may ask for ``workspace`` (uint8) by keyword.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shiplap.declare.binding import Binding
from shiplap.declare.code_digest import source_digest
from shiplap.declare.config import Values
from shiplap.declare.kernel import Implementation, Kernel, Refill, Rerun, Terms
from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Args, Outputs, Result, Returned, Value
from shiplap.dispatch.check_results import places_of, require_places
from shiplap.dispatch.launch import allocate_workspace, is_current, scratch, workspace_size
from shiplap.dispatch.outputs import empty_outputs, fit_outputs
from shiplap.dispatch.refit import fitting, may_repeat
from shiplap.errors import error
from shiplap.plan.outputs import scratch_name


class PythonFunction(Implementation):
    """What ``Op.kernel`` makes of a function."""

    def __init__(self, function: Callable[..., Returned]) -> None:
        self.function = function

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "kernel")

    @property
    def identity(self) -> str:
        return source_digest(self.function)

    def bind(self, spec: OpSpec, terms: Terms) -> PythonKernel:
        kernel = (WritingPythonKernel if spec.mutated else PythonKernel)(spec, terms, self.function)
        kernel.require_parameters()
        return kernel

    def keywords(self, spec: OpSpec) -> frozenset[str] | None:
        """The keywords that the function has left for a config. None where it takes any."""
        parameters = inspect.signature(self.function).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return None
        positional = sum(not a.keyword_only for a in spec.args)
        named = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY][positional:]
        given = {*(a.name for a in spec.args if a.keyword_only), *(o.name for o in spec.outputs), scratch_name(spec)}
        return frozenset({*named, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)} - given)


class PythonKernel(Kernel):
    """See the module."""

    def __init__(self, spec: OpSpec, terms: Terms, function: Callable[..., Returned]) -> None:
        super().__init__(spec, terms)
        self.function: Callable[..., Returned] = function
        keywords = inspect.signature(function).parameters
        self.outputs = tuple(o.name for o in spec.outputs)
        self.out_style = bool(self.outputs) and {*self.outputs} <= keywords.keys() and not spec.dynamic
        self.repeats = self.out_style or may_repeat(spec)  # all that it needs is known once it has run
        self.scratch = scratch_name(spec)
        self.wants_workspace = self.scratch in keywords
        self.named = [a.name for a in spec.args if a.keyword_only]  # the last ones
        self.values: Values = {}

    def require_parameters(self) -> None:
        """SL122 unless the function can be called as :meth:`_call` calls it."""
        positional = [a.name for a in self.spec.args if not a.keyword_only]
        keywords = [*self.named, *(self.outputs if self.out_style else ()), *([self.scratch] * self.wants_workspace)]
        if self.space is not None:  # where sizes decide about the configs, they may give whatever the function takes
            keywords += self.space.names or self.space.keywords or ()
        takes = inspect.signature(self.function)
        try:
            takes.bind(*positional, **dict.fromkeys(keywords))
        except TypeError as e:
            named = [*self.named, *(() if self.spec.dynamic else self.outputs)]
            expected = ", ".join([*positional, *(["*"] if named else []), *named])
            where, got = f"{self.spec.name}, kernel {self.name}", f"{self.name}{takes}: {e}"
            raise error("SL122", where=where, got=got, expected=f"{self.name}({expected})") from None

    def configure(self, values: Values) -> None:
        """The function gets the values by keyword."""
        self.values = values

    def run(self, call: Binding) -> Outputs:
        given = allocate_workspace(self.workspace, call) if self.wants_workspace else None
        if not self.out_style:
            return fit_outputs(self.spec, call, self._call(call.args, call.device, given, {}))
        outs = empty_outputs(self.spec, call)
        self._call(call.args, call.device, given, dict(zip(self.outputs, outs, strict=True)))
        return outs

    def into(self, call: Binding, outs: Sequence[Tensor], scratch: Tensor | None) -> None:
        """Fill ``outs``. A functional kernel's outputs are copied into them."""
        if scratch is None and self.wants_workspace:
            scratch = allocate_workspace(self.workspace, call)
        if self.out_style:
            self._call(call.args, call.device, scratch, dict(zip(self.outputs, outs, strict=True)))
            return
        made = fit_outputs(self.spec, call, self._call(call.args, call.device, scratch, {}))
        for out, value in zip(outs, made, strict=True):
            out.copy_(value)

    def start(self, call: Binding) -> tuple[Outputs, Rerun | None]:
        outs = self.run(call)
        if not self.repeats or (self.workspace is not None and "threads" in self.workspace.names):
            return outs, None
        if not self.out_style:
            return outs, self._returning(call, outs)
        made = [(name, o.shape, o.dtype) for name, o in zip(self.outputs, outs, strict=True)]
        return outs, self._rerun(made, call.device, workspace_size(self.workspace, call))

    def fill(self, call: Binding, outs: Outputs) -> Refill | None:
        self.into(call, outs, None)
        if not self.out_style or (self.workspace is not None and "threads" in self.workspace.names):
            return None
        room, device = workspace_size(self.workspace, call), call.device

        def refill(args: Args, given: Outputs) -> None:
            workspace = scratch(room, device) if self.wants_workspace else None
            self._call(args, device, workspace, dict(zip(self.outputs, given, strict=True)))

        return refill

    def _returning(self, call: Binding, outs: Outputs) -> Rerun:
        """Run, and hold what the function returns to what ``call`` returned."""
        fit, device, room = fitting(self.spec, call, outs), call.device, workspace_size(self.workspace, call)

        def rerun(args: Args) -> Result:
            given = scratch(room, device) if self.wants_workspace else None
            return fit(args, self._call(args, device, given, {}))

        return rerun

    def _rerun(self, made: list[tuple[str, torch.Size, torch.dtype]], device: torch.device, room: int) -> Rerun:
        """Allocate the outputs ``made``, by name with shape and dtype, and run."""

        def rerun(args: Args) -> Result:
            outs = tuple([torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in made])
            given = scratch(room, device) if self.wants_workspace else None
            self._call(args, device, given, dict(zip(self.outputs, outs, strict=True)))
            return outs

        if len(made) > 1:
            return rerun
        ((name, shape, dtype),) = made

        def rerun_one(args: Args) -> Tensor:  # most ops have one output: not a frame more than that takes
            out = torch.empty(shape, dtype=dtype, device=device)
            self._call(args, device, scratch(room, device) if self.wants_workspace else None, {name: out})
            return out

        return rerun_one

    def _call(self, args: Args, device: torch.device, scratch: Tensor | None, keywords: dict[str, Value]) -> Returned:
        """The function, given outputs by keyword, then its config, the workspace and keyword-only arguments."""
        if self.values:
            keywords.update(self.values)
        if self.wants_workspace:
            keywords[self.scratch] = scratch
        if self.named:
            keywords.update(zip(self.named, args[-len(self.named) :], strict=True))
            args = args[: -len(self.named)]
        if is_current(device):
            return self.function(*args, **keywords)
        with torch.cuda.device(device):
            return self.function(*args, **keywords)


class WritingPythonKernel(PythonKernel):
    """A Python function of an op that writes to arguments, which has to leave them where they are."""

    def _call(self, args: Args, device: torch.device, scratch: Tensor | None, keywords: dict[str, Value]) -> Returned:
        places = places_of(self.spec, args)
        result = super()._call(args, device, scratch, keywords)
        require_places(f"{self.spec.name}, kernel {self.name}", places)
        return result
