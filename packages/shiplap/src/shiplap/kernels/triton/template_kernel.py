"""A Triton template as a kernel. It is rendered with empty hooks, compiled by Triton and launched like any kernel.

Its text depends on which arguments are there, on scalars, alignments, strides of 1 and the width of offsets. One
generated function reads these in each call, as far as the template mentions them. Equal renderings share one compiled
kernel. Sizes and strides are arguments of that kernel, so that a new size requires no compilation.
"""

from __future__ import annotations

import hashlib
import itertools
import linecache
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from functools import cache, partial
from importlib.util import find_spec
from typing import Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from shiplap.codegen.triton import DESCRIBED, WORD, RenderedKernel, render_kernel, template_constants
from shiplap.declare.binding import Binding, declared_output_shape
from shiplap.declare.config import Config, Values
from shiplap.declare.generated_code import define_lambda
from shiplap.declare.kernel import Kernel, KernelTerms, Rerun
from shiplap.declare.spec import OpSpec
from shiplap.declare.template import Template
from shiplap.declare.values import Args, Env, EnvValue, Outputs
from shiplap.dispatch import registry
from shiplap.dispatch.launch import is_current_device
from shiplap.dispatch.outputs import empty_outputs
from shiplap.kernels.triton import replay
from shiplap.kernels.triton.launcher import Launcher, triton_launcher
from shiplap.kernels.triton.replay import CompiledTritonKernel
from shiplap.kernels.triton.template_key import (
    DeviceTable,
    KeptLaunch,
    Key,
    Launch,
    RunTemplate,
    adjacent_along,
    compile_template_key,
    compile_template_run,
    innermost_axis,
)

MOST_REMEMBERED_RENDERINGS = 4096  # calls and renderings remembered: each may have sizes or scalars of its own
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")  # of a config: Triton's own
BLOCK = 2048  # elements of a sum of partial sums that one program of the kernel adds
K = TypeVar("K")
T = TypeVar("T")
LaunchFor: TypeAlias = Callable[..., Launch]


class TemplateKernel(Kernel):
    """The kernel of a template of the op ``spec`` with one config. Nothing is imported, rendered or compiled before a
    call.

    The default config of a call is the first one that the template's ``supports`` accepts.
    """

    compiles = True
    can_repeat = True
    template: Template

    def __init__(self, spec: OpSpec, terms: KernelTerms, template: Template) -> None:
        """Bind the template to the declaration, with the names that its text mentions. Nothing is rendered."""
        super().__init__(spec, terms)
        self.template, self.function = template, template.grid  # of the module that binds the template
        self.values: Values = {}
        where = f"{spec.name}, template {template.name}"
        self.tables = {name: DeviceTable(f"{where}, table {name}", build) for name, build in template.tables}
        self.adjacent = _innermost_axes(spec, dict(template.innermost))
        self.words = frozenset(WORD.findall(template.source))
        self.reads = tuple(a for a in spec.tensors if a.name in self.words)
        self.described = frozenset(DESCRIBED.findall(template.source))
        self.jitted: dict[str, Launcher] = {}  # by text, of all configs
        inners = {a.name for a in spec.tensors if f"{a.name.upper()}_INNER" in self.words}
        self._key = compile_template_key(spec, self.described | inners if self.described else ())
        self._texts: dict[Key, RenderedKernel] = {}
        self._firsts: dict[Key, Config | str] = {}
        self._reset()

    def _reset(self) -> None:
        """Forget the launches, refusals of calls and compiled functions of the previous config."""
        self._refusals: dict[Key, str] = {}
        self._launches: dict[Key, Launch] = {}
        self._passed: dict[Key, Callable[..., tuple[object, ...]]] = {}  # what a launch gives the kernel
        self._run: RunTemplate | None = None

    def configure(self, values: Values) -> None:
        """Use the values of a config, by name, for kernels that are rendered later."""
        self.values = values
        self._reset()

    def run_call(self, call: Binding) -> Outputs:
        """Return the outputs of a call, allocated and filled by the template."""
        outs = empty_outputs(self.spec, call)
        self.run_into(call, outs, None)
        return outs

    def run_first_call(self, call: Binding) -> tuple[Outputs, Rerun | None]:
        """Run ``call``. Return its outputs and a function that repeats the call for tensors that differ only in their
        addresses and have the same alignment. The function is None if the launch depends on more than the call's
        tensors.
        """
        outs, kept = empty_outputs(self.spec, call), KeptLaunch()
        self._fill(call, outs[0], kept)
        return outs, self._rerun(call, outs[0], kept)

    def _rerun(self, call: Binding, out: Tensor, kept: KeptLaunch) -> Rerun | None:
        """Return a function that repeats the recorded launch ``kept`` for tensors at other addresses, by C++ or Python.
        Return None if the launch depends on more than the call's tensors.

        Such a launch reads a lookup table or a copy of a strided tensor, or multiplies float32 with the precision that
        a setting of torch states.
        """
        if kept.launch is None or self.tables or ("ALLOW_TF32" in self.words and kept.float32):
            return None
        places = [self.spec.args.index(a) for a in self.reads]
        # A copy was made for the launch, whose address the next call does not have.
        if any(t is not call.args[i] for (t, _, _), i in zip(kept.tensors, places, strict=True)):
            return None
        plain, op = (
            _repeat_launch(kept, places, out, self._split_k(call, self.values)),
            registry.find_declared_op(self.spec.name),
        )
        if op is None or kept.compiled is None or not replay.is_replay_wanted():
            return plain
        there = [place for place, (tensor, _, _) in zip(places, kept.tensors, strict=True) if tensor is not None]
        return replay.choose_rerun(op, plain, self._recording(kept, len(there), out), there, out)

    def _recording(self, kept: KeptLaunch, count: int, out: Tensor) -> replay.LaunchRecording:
        """Return the launches ``kept`` as a recording that C++ can repeat, for an output like ``out``. ``count`` is the
        number of tensors that each call passes.
        """
        made, added, target = replay.LaunchRecording(out.get_device(), count + 1), None, out
        result = replay.BroughtTensor(count)
        if kept.sums is not None:
            target, added = kept.sums
            made.share_scratch(target)
        numbers, each = itertools.count(), list[object]()
        for tensor, shape, strides in kept.tensors:
            each += [None if tensor is None else replay.BroughtTensor(next(numbers)), shape, strides]
        # With split-K the kernel stores partial sums, and the second launch adds them into the result.
        stored = result if kept.sums is None else target
        given = self._passed[kept.key](kept.grid, stored, target.shape, target.stride(), *each)
        assert kept.compiled is not None
        made.add_launch(kept.compiled, kept.grid, given)
        if kept.sums is not None and added is not None:
            total = out.numel()
            made.add_launch(added, [-(-total // BLOCK)], [target, result, total, target.shape[0], BLOCK])
        made.close()
        return made

    def run_into(self, call: Binding, outs: Sequence[Tensor], scratch: Tensor | None) -> None:
        """Fill the one output in ``outs``, which is contiguous, on the current stream of the call's device. ``scratch``
        is ignored.
        """
        self._fill(call, outs[0], None)

    def _fill(self, call: Binding, out: Tensor, kept: KeptLaunch | None) -> None:
        """Launch the template into ``out`` on the device of ``call``. If ``kept`` is given, record the launch in it."""
        if self._run is None:
            self._run = self._runner(self._launches, self.launch_for)
        if is_current_device(call.device):
            self._launch(self._run, call, out, kept)
            return
        # Triton launches on the current device.
        with torch.cuda.device(call.device):
            self._launch(self._run, call, out, kept)

    def compile(self, call: Binding) -> None:
        """Compile the kernels that ``call`` launches without launching them. Several threads may do so in parallel."""
        split_k, (output,) = self._split_k(call, self.values), self.spec.outputs
        sizes, dtype = declared_output_shape(output, call.env), call.dtype_of(output.tensor)
        if split_k > 1:
            sizes, dtype = [split_k, *sizes], torch.float32
        out = torch.empty(sizes, dtype=dtype, device="meta")
        with nullcontext() if is_current_device(call.device) else torch.cuda.device(call.device):
            self._runner({}, partial(self.launch_for, verb="compile"))(call, out, split_k)

    def _runner(self, launches: dict[Key, Launch], launch_for: LaunchFor) -> RunTemplate:
        """Return the generated function that runs a call of the template. It looks up the call's launch in ``launches``
        by the call's properties, or makes it with ``launch_for``, and runs it.
        """
        return compile_template_run(
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

    def _launch(self, run: RunTemplate, call: Binding, out: Tensor, kept: KeptLaunch | None) -> None:
        """Run the template into ``out``. With split-K, run it into partial sums and write their sum into ``out``. If
        ``kept`` is not None, record the launches in it.
        """
        if (split_k := self._split_k(call, self.values)) == 1:
            run(call, out, 1, kept)
            return
        partial_sums = torch.empty((split_k, *out.shape), dtype=torch.float32, device=out.device)
        run(call, partial_sums, split_k, kept)
        added = add_partial_sums(partial_sums, out)
        if kept is not None:
            kept.sums = partial_sums, added

    def _split_k(self, call: Binding, values: Values) -> int:
        """Return the split-K factor for a call and config, that is the number of partial sums that the kernel stores.
        It is 1 without split-K.
        """
        if self.template.split_k is None:
            return 1
        return self.template.split_k(call.env, values)

    # --- which config takes a call ------------------------------------------------------------------------------------

    def variant_for_call(self, call: Binding) -> Self | str:
        """Return a kernel like this one with the first config (tuning parameters) that supports ``call``. If no config
        does, return the reason. The result is stored for equal calls.
        """
        key = self._key(call)
        kernel = self._firsts.get(key)
        if kernel is None:
            # supports= may be slow, and equal calls have one answer.
            kernel = _clear_when_full(self._firsts)[key] = self._first_config(call)
        return kernel if isinstance(kernel, str) else self.with_config(kernel)

    def _first_config(self, call: Binding) -> Config | str:
        """Return the first of the template's configs (tuning parameters) that its ``supports`` accepts for the call. If
        it accepts none, return the reason.
        """
        env, reason = _env_for_template(call.env), ""
        takes = self._config_refusal(call, env)
        for values in self.template.each_candidate(env):
            if not (why := takes(values)):
                return Config.of(values)
            reason = reason or why
        return reason or "no config for these sizes"

    def why_refused(self, call: Binding) -> str:
        """Return the reason why the template does not support this call with the current config, or an empty string if
        it does. The result is stored for equal calls.
        """
        key = self._key(call)
        reason = self._refusals.get(key)
        if reason is None:
            reason = self._config_refusal(call, _env_for_template(call.env))(self.values)
            _clear_when_full(self._refusals)[key] = reason
        return reason

    def _config_refusal(self, call: Binding, env: Env) -> Callable[[Values], str]:
        """Return a function that takes a config and returns the reason why the template does not support ``call`` with
        it. The reason is an empty string if the template supports it.
        """
        # A machine without Triton uses the other kernels of the op.
        if not _is_triton_installed():
            return lambda values: "Triton is not installed"
        if 0 in declared_output_shape(self.spec.outputs[0], call.env):
            return lambda values: ""  # nothing to compute
        supports, given = self.template.supports, self._tensor_arguments(call)
        dtypes = {name: t.dtype for name, t in given.items()} | {"out": call.dtype_of(self.spec.outputs[0].tensor)}

        def reason(values: Values) -> str:
            """Return the reason why the template does not support the call with the config ``values``, or an empty
            string if it does.
            """
            verdict = True if supports is None else supports(env, dtypes, values)
            if verdict is not True:
                return verdict or "supports() returned False"
            return self._indescribable(call, values) if self.described else ""

        return reason

    def _indescribable(self, call: Binding, values: Values) -> str:
        """Return the reason why a tensor cannot have the tensor descriptor that the kernel makes of it. Return an empty
        string if all tensors can. A tensor descriptor needs a dim of stride 1 and rows that start at multiples of 16
        bytes.
        """
        present, odd = self._tensors_read(call), dict[str, str]()
        for name in self.described & present.keys():
            # If no dim has stride 1, all dims are in ``rows``.
            rows = [s * present[name].itemsize % 16 for s in present[name].stride() if s != 1]
            if present[name].data_ptr() % 16 or any(rows) or len(rows) == present[name].dim():
                strides = tuple(present[name].stride())
                odd[name] = f"{name} with strides {strides}: rows of a tensor descriptor start at 16 bytes"
        # Most calls have no such tensor, and need no look at which ones the rendered kernel describes.
        described = self.render(call, present, values).described if odd else ()
        return next((odd[name] for name in described if name in odd), "")

    def _tensor_arguments(self, call: Binding) -> dict[str, Tensor]:
        """Return a mapping from name to value of the arguments of a call that are tensors. Lists of tensors and None
        are left out.
        """
        return {a.name: v for a, v in zip(self.spec.args, call.args, strict=True) if isinstance(v, Tensor)}

    def _tensors_read(self, call: Binding) -> dict[str, Tensor]:
        """Return a mapping from name to value of the tensors that the template reads, arguments followed by lookup
        tables. An argument is copied if a dim that must have stride 1 has another stride.
        """
        given = {name: t for name, t in self._tensor_arguments(call).items() if name in self.words}
        for name, axis in self.adjacent.items():
            if name in given:
                given[name] = adjacent_along(given[name], axis)
        return given | {name: table(call.env, call.device) for name, table in self.tables.items()}

    # --- rendering ----------------------------------------------------------------------------------------------------

    def render(
        self, call: Binding, present: Mapping[str, Tensor], values: Values, wide: bool = False
    ) -> RenderedKernel:
        """Return the template rendered for ``call`` with the config ``values``, as source code of a Triton kernel and
        its list of arguments. ``present`` holds the tensors by name, of which the numbers of dims and the dims of
        stride 1 are read. If ``wide`` is true, offsets have 64 bits, and otherwise 32 bits.
        """
        name = "_".join(dict.fromkeys((self.spec.opname, self.template.name)))
        facts: dict[str, EnvValue] = {
            **template_constants(self.spec, call.args),
            **{
                f"{k.upper()}_ALIGN": _size_alignment(v)
                for k, v in call.env.items()
                if f"{k.upper()}_ALIGN" in self.words and isinstance(v, int)
            },
            **{
                f"{k.upper()}_INNER": innermost_axis(t.stride())
                for k, t in present.items()
                if f"{k.upper()}_INNER" in self.words
            },
            "ALLOW_TF32": torch.backends.cuda.matmul.allow_tf32,
            "SPLIT_K": (split_k := self._split_k(call, values)),
            **values,
        }
        ranks = {k: t.dim() for k, t in present.items()}
        # A constant that the template does not name is left out, so that calls that differ in it alone share a text.
        known = tuple([(k, v) for k, v in facts.items() if k in self.words])
        out_rank = len(declared_output_shape(self.spec.outputs[0], call.env)) + (split_k > 1)
        key = known, tuple(ranks.items()), out_rank, wide
        text = self._texts.get(key)
        if text is None:
            text = render_kernel(self.template.source, name, ranks, out_rank, facts, wide)
            _clear_when_full(self._texts)[key] = text
        return text

    def launch_for(
        self, key: Key, call: Binding, tensors: Sequence[Tensor | None], wide: bool, verb: str = "launch"
    ) -> Launch:
        """Return a function that launches the rendered kernel for ``call`` and for all calls with the same ``key``, and
        store it under ``key``. If ``verb`` is ``"compile"``, the function compiles the kernel instead of launching it,
        and is not stored.

        The arguments of the function are ``grid, out, out.shape, out.stride()``, then each of ``tensors`` with its
        shape and strides. If ``wide`` is true, the kernel uses 64-bit offsets, and otherwise 32-bit offsets.
        """
        names = [*(a.name for a in self.reads), *self.tables]
        places = {name: i for i, (name, t) in enumerate(zip(names, tensors, strict=True)) if t is not None}
        present = {name: t for name, t in zip(names, tensors, strict=True) if t is not None}
        rendered = self.render(call, present, self.values, wide)
        if rendered.text not in self.jitted:
            _clear_when_full(self.jitted)[rendered.text] = _jit_rendered_source(rendered)
        given = [*(f"t{places[name]}" for name in rendered.tensors), "out"]
        for kind, name, axis in rendered.numbers:
            given.append(f"{'s' if kind == 'size' else 'd'}{'out' if name is None else places[name]}[{axis}]")
        options = [f"{k}={v!r}" for k, v in self.values.items() if k in OPTIONS]
        parameters = ["grid", "out", "sout", "dout", *(f"{p}{i}" for i in range(len(names)) for p in "tsd")]
        start = "kernel[grid](" if verb == "launch" else "kernel.compile(grid, "
        text = f"lambda {', '.join(parameters)}: {start}{', '.join([*given, *options])})"
        launch: Launch = define_lambda(text, {"kernel": self.jitted[rendered.text]})
        if verb != "launch":
            return launch
        launch = _with_descriptor_memory(launch) if rendered.described else launch
        _clear_when_full(self._launches)[key] = launch
        passed = f"lambda {', '.join(parameters)}: ({', '.join(given)},)"
        _clear_when_full(self._passed)[key] = define_lambda(passed, {})
        return launch


def _repeat_launch(kept: KeptLaunch, places: Sequence[int], out: Tensor, split_k: int) -> Rerun:
    """Return a function of a call's arguments that allocates an output like ``out`` and repeats the recorded launch
    ``kept`` from Python. ``places`` are the positions of the tensors among the arguments. ``split_k`` is the number of
    partial sums.
    """
    shape, dtype, device, sizes = out.shape, out.dtype, out.device, (split_k, *out.shape)
    target, strides = (out.shape, out.stride()) if split_k == 1 else (sizes, (out.numel(), *out.stride()))
    scope: dict[str, object] = {"launch": kept.launch, "grid": kept.grid, "target": target, "strides": strides}
    for i, (_, sizes_of, strides_of) in enumerate(kept.tensors):
        scope |= {f"s{i}": sizes_of, f"d{i}": strides_of}
    each = "".join(f", args[{place}], s{i}, d{i}" for i, place in enumerate(places))
    go: Callable[[Args, Tensor], None] = define_lambda(
        f"lambda args, out: launch(grid, out, target, strides{each})", scope
    )

    def rerun(args: Args) -> Tensor:
        """Return a new output of the template for ``args``. They are the arguments of a call that differs from the
        recorded one only in the addresses of tensors.
        """
        # The current device may have changed since the launch was recorded.
        if not is_current_device(device):
            with torch.cuda.device(device):
                return rerun(args)
        result = torch.empty(shape, dtype=dtype, device=device)
        if split_k == 1:
            go(args, result)
        else:
            partial_sums = torch.empty(sizes, dtype=torch.float32, device=device)
            go(args, partial_sums)
            add_partial_sums(partial_sums, result)
        return result

    return rerun


@cache
def _is_triton_installed() -> bool:
    """Return whether Triton is installed. It is not imported."""
    return find_spec("triton") is not None


def _jit_rendered_source(rendered: RenderedKernel) -> Launcher:
    """Return the launcher of the Triton kernel whose source code is ``rendered.text``.

    The lines of the source are stored in ``linecache``, from which Triton, debuggers and tracebacks read them.
    """
    import triton
    import triton.language as tl

    digest = hashlib.sha256(rendered.text.encode()).hexdigest()[:12]
    file = f"<template {rendered.name} {digest}>"
    # No time of change: linecache never drops such an entry.
    linecache.cache[file] = (len(rendered.text), None, rendered.text.splitlines(keepends=True), file)
    scope: dict[str, object] = {"__name__": f"shiplap.templates.{rendered.name}", "triton": triton, "tl": tl}
    if "libdevice" in rendered.text:
        from triton.language.extra import libdevice

        scope["libdevice"] = libdevice
    exec(compile(rendered.text, file, "exec"), scope)
    return triton_launcher(triton.jit(scope[rendered.name], do_not_specialize_on_alignment=rendered.unaligned))


def _with_descriptor_memory(launch: Launch) -> Launch:
    """Return a function that calls ``launch`` with its arguments while PyTorch's allocator provides the memory of
    tensor descriptors.

    The call runs in a copy of the current context (``contextvars``), because the user may have set another allocator in
    the current one.
    """
    import triton

    def memory(size: int, alignment: int, stream: int | None) -> Tensor:
        """Return a tensor of ``size`` bytes on the GPU, in which Triton places tensor descriptors. ``alignment`` and
        ``stream`` are not read.
        """
        return torch.empty(size, dtype=torch.int8, device="cuda")

    def inside(args: tuple[object, ...]) -> replay.CompiledTritonKernel | None:
        """Return ``launch(*args)``, called in a context in which Triton allocates memory for tensor descriptors by
        PyTorch's allocator.
        """
        triton.set_allocator(memory)
        return launch(*args)

    # Triton keeps its allocator in a context variable.
    return lambda *args: copy_context().run(inside, args)


def _innermost_axes(spec: OpSpec, innermost: Mapping[str, str]) -> dict[str, int]:
    """Return a mapping from argument name to the axis of the dim that must have stride 1. The axis counts from the end,
    as a negative number, if the type has a variadic dim.
    """
    axes = {}
    for name, dim in innermost.items():
        tensor = spec.arg(name).tensor
        assert tensor is not None
        axis = [d.text for d in tensor.dims].index(dim)
        axes[name] = axis - len(tensor.dims) if tensor.variadic else axis
    return axes


def _size_alignment(size: int) -> int:
    """Return the largest power of two up to 256 that divides ``size``."""
    return (size | 256) & -(size | 256)


def _env_for_template(env: Env) -> dict[str, EnvValue]:
    """Return the sizes and scalars of a call by name, as a new mapping for a template. Lists become tuples."""
    return {k: tuple(v) if type(v) is list else v for k, v in env.items()}


def _clear_when_full(memory: dict[K, T]) -> dict[K, T]:
    """Return the same dict ``memory``, emptied first if it has 4096 items."""
    if len(memory) >= MOST_REMEMBERED_RENDERINGS:
        # All at once: what is still used is rendered again.
        memory.clear()
    return memory


def add_partial_sums(partial_sums: Tensor, out: Tensor) -> CompiledTritonKernel | None:
    """Write ``partial_sums.sum(0)``, added in float32 in a fixed order, into ``out``. The two tensors must be
    contiguous. Return the compiled kernel, or None if ``out`` has no elements.
    """
    total = out.numel()
    if not total:
        return None
    compiled: CompiledTritonKernel | None = _partial_sums_kernel()[(-(-total // BLOCK),)](
        partial_sums, out, total, partial_sums.shape[0], BLOCK=BLOCK
    )
    return compiled


@cache
def _partial_sums_kernel() -> Launcher:
    """Return the launcher of the summing kernel. It is made at the first request, since importing Shiplap must not
    import Triton.
    """
    import triton
    import triton.language as tl

    def add(partial_sums, out, total, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Write the sums of ``count`` rows of ``total`` float32 numbers to ``out``. Each program adds one block of
        columns.
        """
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < total
        acc = tl.zeros((BLOCK,), dtype=tl.float32)
        # One after the other, so that the sum does not depend on the launch.
        for split in range(count):
            acc += tl.load(partial_sums + tl.cast(split, tl.int64) * total + at, mask=inside, other=0.0)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)

    add.__globals__["tl"] = tl  # where Triton looks names up
    return triton_launcher(triton.jit(add))
