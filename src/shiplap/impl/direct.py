"""A Triton template as a kernel: rendered with nothing in its holes, compiled by Triton, launched like any kernel.

What its text depends on - which arguments are there, scalars, alignments, strides of 1, the width of offsets - is
looked at in each call by one generated function, as far as the template mentions it. Renderings that come out alike
share one compiled kernel. Sizes and strides are arguments of that kernel, so that a new size compiles nothing.
"""

from __future__ import annotations

import copy
import hashlib
import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shiplap.codegen.triton import WORD, Rendered, constants, render
from shiplap.impl.facts import Run, adjacent, compile_run, inner
from shiplap.impl.planes import add_planes
from shiplap.impl.tables import Table
from shiplap.impl.triton import Launcher, triton_launcher
from shiplap.op import template as templates
from shiplap.op.check import Binding, shape_of
from shiplap.op.config import NO_CONFIG, Config
from shiplap.op.spec import OpSpec
from shiplap.op.template import Template

__all__ = ["TemplateKernel"]

LIMIT = 4096  # calls and renderings remembered: each may have sizes or scalars of its own
DESCRIBED = re.compile(r"make_tensor_descriptor\(\s*(\w+)")  # the tensors that the bulk copy engine reads
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")  # of a config: Triton's own


class TemplateKernel:
    """``template`` of the op ``spec`` with one config. Nothing is imported, rendered or compiled before a call."""

    def __init__(self, spec: OpSpec, template: Template) -> None:
        self.spec, self.template = spec, template
        self.config: Config = NO_CONFIG
        where = f"{spec.name}, template {template.name}"
        self.tables = {name: Table(f"{where}, table {name}", build) for name, build in template.tables}
        self.adjacent = _axes(spec, dict(template.innermost))
        self.words = frozenset(WORD.findall(template.source))
        self.reads = tuple(a for a in spec.tensors if a.name in self.words)
        self.described = DESCRIBED.search(template.source) is not None
        self.jitted: dict[str, Launcher] = {}  # by text, of all configs
        self._texts: dict[Any, Rendered] = {}
        self._firsts: dict[Any, Config | str] = {}
        self._reset()

    def _reset(self) -> None:
        self._refusals: dict[Any, str] = {}
        self._launches: dict[Any, Callable[..., None]] = {}
        self._run: Run | None = None

    def with_config(self, config: Config) -> TemplateKernel:
        """The same template with the values of ``config``."""
        configured = copy.copy(self)
        configured.config = config
        configured._reset()
        return configured

    def __call__(self, call: Binding) -> tuple[Tensor, ...]:
        (output,) = self.spec.outputs
        out = torch.empty(shape_of(output, call.env), dtype=call.dtype_of(output.tensor), device=call.device)
        self.into(call, (out,), None)
        return (out,)

    def into(self, call: Binding, outs: Sequence[Tensor], scratch: Tensor | None) -> None:
        """Fill the output, which is contiguous, on the current stream of the call's device."""
        if self._run is None:
            self._run = compile_run(
                self.spec, self.words, self.reads, self.adjacent, tuple(self.tables.values()),
                grid=self.template.grid, config=self.config.as_dict(), launches=self._launches,
                launch_for=self.launch_for,
            )  # fmt: skip
        device = call.device
        assert device is not None
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            self._launch(call, outs[0])
            return
        with torch.cuda.device(device):
            self._launch(call, outs[0])

    def _launch(self, call: Binding, out: Tensor) -> None:
        assert self._run is not None
        if (planes := self._planes(call)) == 1:
            self._run(call, out, 1)
            return
        summands = torch.empty((planes, *out.shape), dtype=torch.float32, device=out.device)
        self._run(call, summands, planes)
        add_planes(summands, out)

    def _planes(self, call: Binding, config: Config | None = None) -> int:
        """Into how many summands the kernel cuts the output."""
        if self.template.planes is None:
            return 1
        return self.template.planes(call.env, (self.config if config is None else config).as_dict())

    # --- which config takes a call ------------------------------------------------------------------------------------

    def first(self, call: Binding) -> Config | str:
        """The first config that takes ``call``, or why none does."""
        key = self._key(call)
        found = self._firsts.get(key)
        if found is None:
            found = _bounded(self._firsts)[key] = self._first(call)
        return found

    def _first(self, call: Binding) -> Config | str:
        reason = ""
        for values in self.template.candidates(_plain_env(call.env)):
            config = Config.of(values)
            if not (why := self._why_not(call, config)):
                return config
            reason = reason or why
        return reason or "no config for these sizes"

    def refuses(self, call: Binding) -> str:
        """Empty when the template takes this call with this config, else the reason."""
        key = self._key(call)
        found = self._refusals.get(key)
        if found is None:
            found = _bounded(self._refusals)[key] = self._why_not(call, self.config)
        return found

    def _why_not(self, call: Binding, config: Config) -> str:
        if not _triton_is_there():
            return "Triton is not installed"
        if 0 in shape_of(self.spec.outputs[0], call.env):
            return ""  # nothing to compute
        if (supports := self.template.supports) is not None:
            verdict = supports(_plain_env(call.env), self._dtypes(call), config.as_dict())
            if verdict is not True:
                return verdict or "supports() returned False"
        return self._indescribable(call, config) if self.described else ""

    def _indescribable(self, call: Binding, config: Config) -> str:
        """Empty when the tensors that the kernel makes descriptors of can have some, else the reason."""
        present = self._present(call)
        for name in dict.fromkeys(DESCRIBED.findall(self.render(call, present, config).text)):
            tensor = present[name]
            rows = [s * tensor.itemsize % 16 for s in tensor.stride() if s != 1]
            if tensor.data_ptr() % 16 or any(rows) or len(rows) == tensor.dim():
                return f"{name} with strides {tuple(tensor.stride())}: rows of a tensor descriptor start at 16 bytes"
        return ""

    def _key(self, call: Binding) -> Any:
        """All that configs and ``supports`` may look at, and what a descriptor depends on."""
        env = tuple([(k, tuple(v) if type(v) is list else v) for k, v in call.env.items()])
        dtypes = tuple([v.dtype if isinstance(v, Tensor) else None for v in call.args])
        if not self.described:
            return env, dtypes
        return env, dtypes, tuple([(v.stride(), v.data_ptr() & 15) for v in call.args if isinstance(v, Tensor)])

    def _dtypes(self, call: Binding) -> dict[str, torch.dtype]:
        found = {name: t.dtype for name, t in self._given(call).items()}
        return found | {"out": call.dtype_of(self.spec.outputs[0].tensor)}

    def _given(self, call: Binding) -> dict[str, Tensor]:
        """The tensor arguments that are there."""
        return {a.name: v for a, v in zip(self.spec.args, call.args, strict=True) if isinstance(v, Tensor)}

    def _present(self, call: Binding) -> dict[str, Tensor]:
        """What the template reads: arguments, then tables."""
        assert call.device is not None
        given = {name: t for name, t in self._given(call).items() if name in self.words}
        for name, axis in self.adjacent.items():
            if name in given:
                given[name] = adjacent(given[name], axis)
        return given | {name: table(call.env, call.device) for name, table in self.tables.items()}

    # --- rendering ----------------------------------------------------------------------------------------------------

    def render(
        self, call: Binding, present: Mapping[str, Tensor], config: Config | None = None, wide: bool = False
    ) -> Rendered:
        """The kernel for ``call``, for tensors laid out like those of ``present``."""
        name = "_".join(dict.fromkeys((self.spec.opname, self.template.name)))
        facts: dict[str, Any] = {
            **constants(self.spec, call.args),
            **{f"{k.upper()}_ALIGN": (v | 256) & -(v | 256) for k, v in call.env.items() if type(v) is int},
            **{f"{k.upper()}_INNER": inner(t.stride()) for k, t in present.items()},
            "ALLOW_TF32": torch.backends.cuda.matmul.allow_tf32,
            "PLANES": (planes := self._planes(call, config)),
            **(self.config if config is None else config).as_dict(),
        }
        ranks = {k: t.dim() for k, t in present.items()}
        known = tuple([(k, v) for k, v in facts.items() if k in self.words])
        out_rank = len(shape_of(self.spec.outputs[0], call.env)) + (planes > 1)
        key = known, tuple(ranks.items()), out_rank, wide
        found = self._texts.get(key)
        if found is None:
            found = render(self.template.source, name, ranks, out_rank, facts, wide)
            _bounded(self._texts)[key] = found
        return found

    def launch_for(
        self, key: tuple[Any, ...], call: Binding, tensors: Sequence[Tensor | None], wide: bool
    ) -> Callable[..., None]:
        """``launch(grid, out, out.shape, out.stride(), then of each tensor itself, its shape and its strides)``."""
        names = [*(a.name for a in self.reads), *self.tables]
        places = {name: i for i, (name, t) in enumerate(zip(names, tensors, strict=True)) if t is not None}
        present = {name: t for name, t in zip(names, tensors, strict=True) if t is not None}
        rendered = self.render(call, present, None, wide)
        if rendered.text not in self.jitted:
            _bounded(self.jitted)[rendered.text] = _jitted(rendered)
        given = [*(f"t{places[name]}" for name in rendered.tensors), "out"]
        for kind, name, axis in rendered.numbers:
            given.append(f"{'s' if kind == 'size' else 'd'}{'out' if name is None else places[name]}[{axis}]")
        options = [f"{k}={v!r}" for k, v in self.config.items if k in OPTIONS]
        parameters = ["grid", "out", "sout", "dout", *(f"{p}{i}" for i in range(len(names)) for p in "tsd")]
        text = f"lambda {', '.join(parameters)}: kernel[grid]({', '.join([*given, *options])})"
        launch: Callable[..., None] = eval(text, {"kernel": self.jitted[rendered.text]})
        launch = _with_memory(launch) if DESCRIBED.search(rendered.text) else launch
        _bounded(self._launches)[key] = launch
        return launch


@cache
def _triton_is_there() -> bool:
    return find_spec("triton") is not None


def _jitted(rendered: Rendered) -> Launcher:
    """The text as a Triton function; ``linecache`` knows its lines, for Triton, debuggers and tracebacks ask there."""
    import triton
    import triton.language as tl

    digest = hashlib.sha256(rendered.text.encode()).hexdigest()[:12]
    file = f"<template {rendered.name} {digest}>"
    linecache.cache[file] = (len(rendered.text), None, rendered.text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"__name__": f"shiplap.templates.{rendered.name}", "triton": triton, "tl": tl}
    if "libdevice" in rendered.text:
        from triton.language.extra import libdevice

        scope["libdevice"] = libdevice
    exec(compile(rendered.text, file, "exec"), scope)
    return triton_launcher(triton.jit(scope[rendered.name]))


def _with_memory(launch: Callable[..., None]) -> Callable[..., None]:
    """``launch`` where Triton gets memory for descriptors from PyTorch: in a context of its own, for the allocator is
    the user's to set elsewhere."""
    import triton

    def memory(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device="cuda")

    def inside(args: tuple[Any, ...]) -> None:
        triton.set_allocator(memory)
        launch(*args)

    return lambda *args: copy_context().run(inside, args)


def _axes(spec: OpSpec, innermost: Mapping[str, str]) -> dict[str, int]:
    """By argument the axis of the dim that has to be adjacent in memory."""
    found = {}
    for name, dim in innermost.items():
        tensor = spec.arg(name).tensor
        assert tensor is not None
        axis = [d.text for d in tensor.dims].index(dim)
        found[name] = axis - len(tensor.dims) if tensor.variadic else axis
    return found


def _plain_env(env: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and scalars as templates see them: lists as tuples."""
    return {k: tuple(v) if type(v) is list else v for k, v in env.items()}


def _bounded(memory: dict[Any, Any]) -> dict[Any, Any]:
    if len(memory) >= LIMIT:
        memory.clear()
    return memory


templates.runnable = TemplateKernel
