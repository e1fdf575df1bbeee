"""A Triton template as a kernel: rendered with nothing in its holes, compiled by Triton, launched like any kernel.

What its text depends on - which arguments are there, scalars, alignments, strides of 1, the width of offsets - is
looked at in each call by one generated function, as far as the template mentions it. Renderings that come out alike
share one compiled kernel. Sizes and strides are arguments of that kernel, so that a new size compiles nothing.
"""

from __future__ import annotations

import copy
import hashlib
import linecache
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shiplap.bind.facts import Run, adjacent, compile_key, compile_run, inner
from shiplap.bind.planes import add_planes
from shiplap.bind.tables import Table
from shiplap.bind.triton import Launcher, triton_launcher
from shiplap.codegen.triton import DESCRIBED, WORD, Rendered, constants, render
from shiplap.op import template as templates
from shiplap.op.binding import Binding, shape_of
from shiplap.op.config import Config
from shiplap.op.launch import is_current
from shiplap.op.spec import OpSpec
from shiplap.op.template import Template

__all__ = ["TemplateKernel"]

LIMIT = 4096  # calls and renderings remembered: each may have sizes or scalars of its own
Again = Callable[[tuple[Any, ...]], Tensor]  # all arguments of a call → its output
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")  # of a config: Triton's own


class TemplateKernel:
    """``template`` of the op ``spec`` with one config. Nothing is imported, rendered or compiled before a call."""

    def __init__(self, spec: OpSpec, template: Template) -> None:
        self.spec, self.template = spec, template
        self.values: Mapping[str, Any] = {}
        where = f"{spec.name}, template {template.name}"
        self.tables = {name: Table(f"{where}, table {name}", build) for name, build in template.tables}
        self.adjacent = _axes(spec, dict(template.innermost))
        self.words = frozenset(WORD.findall(template.source))
        self.reads = tuple(a for a in spec.tensors if a.name in self.words)
        self.described = frozenset(DESCRIBED.findall(template.source))
        self.jitted: dict[str, Launcher] = {}  # by text, of all configs
        inners = {a.name for a in spec.tensors if f"{a.name.upper()}_INNER" in self.words}
        self._key = compile_key(spec, self.described | inners if self.described else ())
        self._texts: dict[Any, Rendered] = {}
        self._firsts: dict[Any, Config | str] = {}
        self._reset()

    def _reset(self) -> None:
        self._refusals: dict[Any, str] = {}
        self._launches: dict[Any, Callable[..., None]] = {}
        self._run: Run | None = None

    @property
    def fn(self) -> Callable[..., Any] | None:
        """A function of the module that binds the template: the worker of ``sl.tune`` imports that."""
        return self.template.grid

    def with_config(self, config: Config) -> TemplateKernel:
        """The same template with the values of ``config``."""
        configured = copy.copy(self)
        configured.values = config.as_dict()
        configured._reset()
        return configured

    def __call__(self, call: Binding) -> tuple[Tensor, ...]:
        out = self._empty(call)
        self.into(call, (out,), None)
        return (out,)

    def _empty(self, call: Binding) -> Tensor:
        (output,) = self.spec.outputs
        return torch.empty(shape_of(output, call.env), dtype=call.dtype_of(output.tensor), device=call.device)

    def start(self, call: Binding) -> tuple[tuple[Tensor, ...], Again | None]:
        """Run ``call``; and how to run calls that differ from it in addresses alone, as aligned as these."""
        out, kept = self._empty(call), list[Any]()
        self.into(call, (out,), None, kept)
        return (out,), self._again(call, out, kept)

    def _again(self, call: Binding, out: Tensor, kept: Sequence[Any]) -> Again | None:
        """None where a launch reads what the call did not bring: tables, and copies made for it."""
        if not kept or self.tables or "ALLOW_TF32" in self.words:
            return None
        places = [self.spec.args.index(a) for a in self.reads]
        launch, grid, *rest = kept
        if any(t is not call.args[i] for t, i in zip(rest[::3], places, strict=True)):
            return None
        return _repeated(launch, grid, places, rest, out, self._planes(call, self.values))

    def into(
        self, call: Binding, outs: Sequence[Tensor], scratch: Tensor | None, kept: list[Any] | None = None
    ) -> None:
        """Fill the output, which is contiguous, on the current stream of the call's device."""
        if self._run is None:
            self._run = self._runner(self._launches, self.launch_for)
        device = call.device
        assert device is not None
        if is_current(device):
            self._launch(call, outs[0], kept)
            return
        with torch.cuda.device(device):
            self._launch(call, outs[0], kept)

    def compile(self, call: Binding) -> None:
        """Compile what ``call`` launches, and launch nothing; in any thread, beside others."""
        assert call.device is not None
        planes, (output,) = self._planes(call, self.values), self.spec.outputs
        sizes, dtype = shape_of(output, call.env), call.dtype_of(output.tensor)
        if planes > 1:
            sizes, dtype = [planes, *sizes], torch.float32
        out = torch.empty(sizes, dtype=dtype, device="meta")
        with nullcontext() if is_current(call.device) else torch.cuda.device(call.device):
            self._runner({}, partial(self.launch_for, verb="compile"))(call, out, planes)

    def _runner(self, launches: dict[Any, Callable[..., None]], launch_for: Callable[..., Callable[..., None]]) -> Run:
        return compile_run(
            self.spec,
            self.words,
            self.reads,
            self.adjacent,
            tuple(self.tables.values()),
            grid=self.template.grid,
            config=self.values,
            launches=launches,
            launch_for=launch_for,
        )

    def _launch(self, call: Binding, out: Tensor, kept: list[Any] | None) -> None:
        assert self._run is not None
        if (planes := self._planes(call, self.values)) == 1:
            self._run(call, out, 1, kept)
            return
        summands = torch.empty((planes, *out.shape), dtype=torch.float32, device=out.device)
        self._run(call, summands, planes, kept)
        add_planes(summands, out)

    def _planes(self, call: Binding, values: Mapping[str, Any]) -> int:
        """Into how many summands the kernel cuts the output."""
        if self.template.planes is None:
            return 1
        return self.template.planes(call.env, values)

    # --- which config takes a call ------------------------------------------------------------------------------------

    def first(self, call: Binding) -> Config | str:
        """The first config that takes ``call``, or why none does."""
        key = self._key(call)
        found = self._firsts.get(key)
        if found is None:
            found = _bounded(self._firsts)[key] = self._first(call)
        return found

    def _first(self, call: Binding) -> Config | str:
        env, reason = _plain_env(call.env), ""
        takes = self._takes(call, env)
        for values in self.template.candidates(env):
            if not (why := takes(values)):
                return Config.of(values)
            reason = reason or why
        return reason or "no config for these sizes"

    def refuses(self, call: Binding) -> str:
        """Empty when the template takes this call with this config, else the reason."""
        key = self._key(call)
        found = self._refusals.get(key)
        if found is None:
            found = self._takes(call, _plain_env(call.env))(self.values)
            _bounded(self._refusals)[key] = found
        return found

    def _takes(self, call: Binding, env: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
        """A function of a config: empty when the template takes ``call`` with it, else the reason."""
        if not _triton_is_there():
            return lambda values: "Triton is not installed"
        if 0 in shape_of(self.spec.outputs[0], call.env):
            return lambda values: ""  # nothing to compute
        supports, given = self.template.supports, self._given(call)
        dtypes = {name: t.dtype for name, t in given.items()} | {"out": call.dtype_of(self.spec.outputs[0].tensor)}

        def reason(values: Mapping[str, Any]) -> str:
            verdict = True if supports is None else supports(env, dtypes, values)
            if verdict is not True:
                return verdict or "supports() returned False"
            return self._indescribable(call, values) if self.described else ""

        return reason

    def _indescribable(self, call: Binding, values: Mapping[str, Any]) -> str:
        """Empty when the tensors that the kernel makes descriptors of can have some, else the reason."""
        present = self._present(call)
        for name in self.render(call, present, values).described:
            if (tensor := present.get(name)) is None:
                continue
            rows = [s * tensor.itemsize % 16 for s in tensor.stride() if s != 1]
            if tensor.data_ptr() % 16 or any(rows) or len(rows) == tensor.dim():
                return f"{name} with strides {tuple(tensor.stride())}: rows of a tensor descriptor start at 16 bytes"
        return ""

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
        self, call: Binding, present: Mapping[str, Tensor], values: Mapping[str, Any], wide: bool = False
    ) -> Rendered:
        """The kernel for ``call`` with the config ``values``, for tensors laid out like those of ``present``."""
        name = "_".join(dict.fromkeys((self.spec.opname, self.template.name)))
        facts: dict[str, Any] = {
            **constants(self.spec, call.args),
            **{f"{k.upper()}_ALIGN": _alignment(v) for k, v in call.env.items() if f"{k.upper()}_ALIGN" in self.words},
            **{
                f"{k.upper()}_INNER": inner(t.stride())
                for k, t in present.items()
                if f"{k.upper()}_INNER" in self.words
            },
            "ALLOW_TF32": torch.backends.cuda.matmul.allow_tf32,
            "PLANES": (planes := self._planes(call, values)),
            **values,
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
        self, key: tuple[Any, ...], call: Binding, tensors: Sequence[Tensor | None], wide: bool, verb: str = "launch"
    ) -> Callable[..., None]:
        """``launch(grid, out, out.shape, out.stride(), then of each tensor itself, its shape and its strides)``.

        With the verb ``compile``, a function of the same arguments that compiles what it would launch.
        """
        names = [*(a.name for a in self.reads), *self.tables]
        places = {name: i for i, (name, t) in enumerate(zip(names, tensors, strict=True)) if t is not None}
        present = {name: t for name, t in zip(names, tensors, strict=True) if t is not None}
        rendered = self.render(call, present, self.values, wide)
        if rendered.text not in self.jitted:
            _bounded(self.jitted)[rendered.text] = _jitted(rendered)
        given = [*(f"t{places[name]}" for name in rendered.tensors), "out"]
        for kind, name, axis in rendered.numbers:
            given.append(f"{'s' if kind == 'size' else 'd'}{'out' if name is None else places[name]}[{axis}]")
        options = [f"{k}={v!r}" for k, v in self.values.items() if k in OPTIONS]
        parameters = ["grid", "out", "sout", "dout", *(f"{p}{i}" for i in range(len(names)) for p in "tsd")]
        start = "kernel[grid](" if verb == "launch" else "kernel.compile(grid, "
        text = f"lambda {', '.join(parameters)}: {start}{', '.join([*given, *options])})"
        launch: Callable[..., None] = eval(text, {"kernel": self.jitted[rendered.text]})
        if verb != "launch":
            return launch
        launch = _with_memory(launch) if rendered.described else launch
        _bounded(self._launches)[key] = launch
        return launch


def _repeated(
    launch: Callable[..., None], grid: Any, places: Sequence[int], rest: Sequence[Any], out: Tensor, planes: int
) -> Again:
    """Allocate and launch as was done for ``out``; ``rest`` is each tensor with its shape and strides."""
    shape, dtype, device, sizes = out.shape, out.dtype, out.device, (planes, *out.shape)
    target, strides = (out.shape, out.stride()) if planes == 1 else (sizes, (out.numel(), *out.stride()))
    known = {
        f"{kind}{i}": value
        for i, at in enumerate(range(0, len(rest), 3))
        for kind, value in zip("sd", rest[at + 1 : at + 3], strict=True)
    }
    each = "".join(f", args[{place}], s{i}, d{i}" for i, place in enumerate(places))
    scope = {"launch": launch, "grid": grid, "target": target, "strides": strides, **known}
    go = eval(f"lambda args, out: launch(grid, out, target, strides{each})", scope)

    def again(args: tuple[Any, ...]) -> Tensor:
        if not is_current(device):
            with torch.cuda.device(device):
                return again(args)
        result = torch.empty(shape, dtype=dtype, device=device)
        if planes == 1:
            go(args, result)
        else:
            summands = torch.empty(sizes, dtype=torch.float32, device=device)
            go(args, summands)
            add_planes(summands, result)
        return result

    return again


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


def _alignment(size: int) -> int:
    """The largest power of two up to 256 that divides a size."""
    return (size | 256) & -(size | 256)


def _plain_env(env: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and scalars as templates see them: lists as tuples."""
    return {k: tuple(v) if type(v) is list else v for k, v in env.items()}


def _bounded(memory: dict[Any, Any]) -> dict[Any, Any]:
    if len(memory) >= LIMIT:
        memory.clear()
    return memory


templates.runnable = TemplateKernel
