"""A template with a config, rendered for one call. It can run on tensors of its own, or become a node of the graph."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shiplap.cached_property import cached_property
from shiplap.codegen.triton import triton_source
from shiplap.declare.code_digest import code_digest
from shiplap.declare.config import Config
from shiplap.declare.template import Template
from shiplap.inductor.bound_call import LoweredCall
from shiplap.inductor.size_range import Sizes
from shiplap.sampling.symbols import read_library_state
from shiplap.torch_private import inductor_lowering, inductor_templates
from shiplap.torch_private.inductor_lowering import evaluate_size
from shiplap.tuning.candidate import Candidate

Memory = tuple[tuple[int, ...], tuple[int, ...], int]  # sizes, strides, offset from the start of the buffer


TORCHS = {"at", "c10", "torch", "std"}  # namespaces whose variables are not a template's


@dataclass
class TemplateCandidate(Candidate):
    """A candidate that is ``template`` with ``config``, a set of tuning parameters. It is rendered to a kernel for
    ``call`` while Inductor lowers the graph, and run at that time or later.
    """

    call: LoweredCall
    template: Template
    config: Config
    fixed = True
    opaque = True
    copies = True
    compiles = True
    _choice: Any = field(default=None, repr=False)
    _slots: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    _run: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Set the field ``kernel`` to the name of the template."""
        self.kernel = self.template.name

    @property
    def label(self) -> str:
        """The name of the candidate. It is the name of its template, followed by its config, the tuning parameters, in
        parentheses if it has any.
        """
        return f"{self.template.name}({self.config})" if self.config.items else self.template.name

    def why_refused(self) -> str:
        """Return the reason why the template's ``supports`` function refuses this call with this config. Return an
        empty string if it accepts the call, or if there is no such function.
        """
        supports = self.template.supports
        verdict = True if supports is None else supports(self.call.hints, self.call.dtypes, self.config.as_dict())
        return "" if verdict is True else (verdict or "supports() returned False")

    def render(self) -> Any:
        """Return the candidate as an Inductor choice, that is a kernel rendered for this call. It is rendered at the
        first request. Errors of the rendering are passed on.
        """
        if self._choice is None:
            buffers = self.call.buffers(self.template)
            self._slots = tuple((name, inductor_lowering.memory_layout(node)) for name, node in buffers.items())
            self._choice = _render_template(self.call, self.template, self.config, buffers, self.split_k)
        return self._choice

    @property
    def digest(self) -> str:
        """A digest of the kernel's source code as it is rendered for this call, and of the memory layout of the buffers
        that it reads.
        """
        text = inductor_templates.kernel_source(self.render())
        memory = [(name, _memory_of_slot(expressions, {})) for name, expressions in self._slots]
        return hashlib.sha256(f"{text}|{self._slots}|{memory}|{self.split_k}".encode()).hexdigest()[:32]

    def compile_apart(self) -> bool:
        """Start compiling the rendered kernel in another process. Return whether the compilation was started."""
        return inductor_templates.compile_apart(self.render())

    def precompile(self, args: tuple[Any, ...]) -> None:
        """Compile the rendered kernel alone, in this process and outside of a compiled graph. Any thread may call this
        method. ``args`` is ignored.
        """
        inductor_templates.precompile_kernel(self.render())

    def prepare(self, args: tuple[Any, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Compile the kernel alone, outside of a compiled graph. Return a function without parameters that runs it on
        copies of ``args`` and returns the outputs.

        The output is first filled with NaN, or with a byte pattern for other dtypes. An element that the kernel does
        not write then differs from the reference. The candidates of one call share inputs and output, and each
        ``prepare`` fills them again. Errors of the kernel's compiler are passed on.
        """
        self.render()
        inputs, out = self._inputs(args, {}, self.call.scratch), self.call.scratch(f"out {self.split_k}", self._output)
        # The output of another candidate must not pass for that of this one.
        _poison_output(out)
        if self._run is None:
            self.precompile(args)
            self._run = inductor_templates.run_function(self._choice, inputs, out, {})
        return self._make_launcher(self._run, inputs, out)

    def prepare_at(self, args: tuple[Any, ...], sizes: Sizes) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function without parameters that runs the compiled kernel on copies of ``args`` in new memory and
        returns the outputs. The size symbols have the values in ``sizes``.
        """
        self.render()
        if self._run is None:
            self.precompile(args)
        inputs, out = self._inputs(args, sizes, _fresh_memory), self._output(sizes)
        _poison_output(out)
        return self._make_launcher(inductor_templates.run_function(self._choice, inputs, out, sizes), inputs, out)

    def _make_launcher(self, run: Any, inputs: list[Tensor], out: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function that launches the compiled kernel ``run`` and returns a tuple of one tensor. The tensor is
        ``out`` or, with split-K, the sum of the partial outputs in ``out``. The function keeps ``inputs`` alive, since
        ``run`` holds only their addresses.
        """

        def call(_alive: list[Tensor] = inputs) -> tuple[Tensor, ...]:  # a C++ kernel was given their addresses only
            """Launch the compiled kernel and return its output as a tuple of one tensor. With split-K, the output is
            the sum of the partial outputs. ``_alive`` is not read. Its default value keeps the input tensors alive.
            """
            inductor_lowering.launch_run(run)
            return (_sum_partials(self.call, out) if self.split_k > 1 else out,)

        return call

    def state(self) -> str:
        """Return the names of the global variables in which the compiled kernel keeps values between calls, joined by
        commas. Return an empty string if there are none, or if the kernel is no library on disk.
        """
        choice = self.render()
        library = inductor_templates.kernel_library(choice)
        if library is None:
            return ""
        words = set(re.findall(r"\w+", inductor_templates.kernel_source(choice)))
        return ", ".join(str(symbol) for symbol in read_library_state(library).symbols if _is_named(symbol.name, words))

    def _inputs(self, args: tuple[Any, ...], sizes: Sizes, room: Callable[..., Tensor]) -> list[Tensor]:
        """Return input tensors for the kernel in the order of its buffers, with the strides and offsets for which it
        was rendered. They are copies of ``args`` and of the template's tables, which are tensors computed from sizes.

        ``room(name, make, *args)`` returns the memory for each tensor. Size symbols have the values in ``sizes``.
        """
        given = {a.name: v for a, v in zip(self.call.op.spec.args, args, strict=True) if isinstance(v, Tensor)}
        tables = dict(self.template.tables)
        tensors = []
        for name, expressions in self._slots:
            memory = _memory_of_slot(expressions, sizes)
            value = given[name] if name in given else tables[name](self.call.numbers(sizes)).to(self.call.device)
            flat = room(f"{name} {memory}", _allocate_buffer, memory, value)
            # An empty tensor may have no valid strided view.
            if value.numel():
                flat.as_strided(*memory).copy_(value)
            tensors.append(flat)
        return tensors

    def _output(self, sizes: Sizes = MappingProxyType({})) -> Tensor:
        """Return uninitialised memory for the output. The size symbols have the values in ``sizes``. A symbol that
        ``sizes`` lacks has the value of the call. With split-K, the memory is for float32 partial sums, and its first
        dim is their number.
        """
        shape = self.call.shape(sizes)
        if self.split_k > 1:
            return torch.empty((self.split_k, *shape), dtype=torch.float32, device=self.call.device)
        return torch.empty(shape, dtype=self.call.output.dtype, device=self.call.device)

    def node(self, fusion: bool = True) -> Any:
        """Return the Inductor node that runs the kernel as the result of the call. If ``fusion`` is true, Inductor may
        fuse neighbours into it, unless the template's ``fuses`` function returns false. If it is false, nothing is
        fused.

        With split-K, a pointwise operation after the kernel adds the partial sums, and neighbours are fused into that
        operation.
        """
        pays = self.template.fuses is None or self.template.fuses(self.call.hints)
        node = inductor_lowering.choice_node(self.render(), fusion and pays)
        if self.split_k == 1:
            return node
        partial_sums = inductor_lowering.fake_contiguous(
            (self.split_k, *self.call.output.shape), torch.float32, self.call.device
        )
        return inductor_lowering.inline_graph(
            inductor_lowering.trace_to_aten(lambda p: _sum_partials(self.call, p), [partial_sums]), [node]
        )

    @cached_property
    def split_k(self) -> int:
        """The number of partial sums into which the kernel splits the reduction (split-K). It is 1 if the template does
        not split it.
        """
        declared = self.template.split_k
        if declared is None:
            return 1
        return int(declared(SpecialisedSizes(self.call.env), self.config.as_dict()))


def _is_named(symbol: str, words: set[str]) -> bool:
    """Return whether ``words``, the words of a kernel's source code, contain a name within ``symbol``, the mangled C++
    name of a variable. Such names are those of the variable, its functions and its namespaces.

    Return False if a namespace is one of torch or ``std``. Their headers have constants that are variables in
    unoptimised code.
    """
    names, rest = [symbol.partition(".")[0]], symbol
    # A mangled name has each part behind its length.
    while found := re.search(r"\d+", rest):
        length, rest = int(found[0]), rest[found.end() :]
        names.append(rest[:length])
        rest = rest[length:] if re.fullmatch(r"[A-Za-z_]\w*", rest[:length]) else rest
    return not TORCHS & set(names) and bool(words & set(names))


class SpecialisedSizes(Mapping[str, Any]):
    """A mapping from names to sizes and scalars as numbers. Each symbolic size that is read becomes a constant of the
    compiled code.
    """

    def __init__(self, env: Mapping[str, Any]) -> None:
        """Set ``env``, which holds the sizes by name. They may be symbolic."""
        self.env = env

    def __getitem__(self, name: str) -> Any:
        """Return the size or scalar ``name`` as a number. A guard then limits the graph to that number."""
        value = self.env[name]
        return inductor_lowering.static_size(value) if isinstance(value, torch.SymInt) else value

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the names of the sizes."""
        return iter(self.env)

    def __len__(self) -> int:
        """Return the number of sizes. No size is read."""
        return len(self.env)


def _sum_partials(call: LoweredCall, partial_sums: Tensor) -> Tensor:
    """Return the sum of ``partial_sums`` along the first dim, in the dtype of the call's output."""
    return partial_sums.sum(0).to(call.output.dtype)


def _render_template(
    call: LoweredCall, template: Template, config: Config, buffers: dict[str, Any], split_k: int
) -> Any:
    """Return the kernel of ``template`` as one of Inductor's choices, rendered for ``call``, ``config`` (tuning
    parameters) and the input buffers by name. Raise ``NotImplementedError`` if two arguments are views of one buffer.
    """
    layout = inductor_lowering.fixed_layout(call.output)
    if split_k > 1:
        layout = inductor_lowering.fixed_layout(
            inductor_lowering.fake_contiguous((split_k, *call.output.shape), torch.float32, call.device)
        )
    if shared := inductor_lowering.shared_buffer(list(buffers.values())):
        raise NotImplementedError(f"two arguments are views of buffer {shared}")
    # The name appears in profiles and in generated code, so it begins with that of the op.
    name = f"{call.op.spec.namespace}_{call.op.spec.opname}_{template.name}"
    if template.language == "cpp":
        from shiplap.torch_private import inductor_templates

        return inductor_templates.cpp_choice(name, template.source, buffers, layout, call.constants, config.as_dict())
    from shiplap.torch_private import inductor_templates

    assert template.grid is not None
    source = triton_source(template.source, buffers)
    # Inductor caches templates by name, so the name has to change with the source and with the grid.
    unique = f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:8]}_{code_digest(template.grid)[:8]}"
    sizes = {k: v for k, v in call.env.items() if isinstance(v, (int, torch.SymInt))}
    grid = _positional_grid(template, tuple(sizes))
    expressions = [inductor_lowering.size_expression(v) for v in sizes.values()]
    constants = {
        **call.constants,
        **call.facts(buffers),
        "ALLOW_TF32": torch.backends.cuda.matmul.allow_tf32,
        **({"SPLIT_K": split_k} if template.split_k else {}),
        **config.as_dict(),
    }
    return inductor_templates.triton_choice(
        unique, source, grid, expressions, list(buffers.values()), layout, constants
    )


def _positional_grid(template: Template, names: tuple[str, ...]) -> Callable[..., tuple[Any, Any, Any]]:
    """Return ``template.grid`` as a function with the parameters that Inductor passes. They are the sizes by position,
    in the order of ``names``, and then the config.
    """
    assert template.grid is not None
    declared = template.grid

    def grid(*given: Any, cdiv: Callable[[Any, Any], Any]) -> tuple[Any, Any, Any]:
        """Return the template's launch grid as three numbers of programs. ``given`` are the sizes by position, followed
        by the config. ``cdiv`` divides and rounds up.
        """
        *sizes, config = given
        return declared(dict(zip(names, sizes, strict=True)), config, cdiv)

    return grid


def _poison_output(out: Tensor) -> None:
    """Fill ``out`` in place with values that no kernel computes by accident. They are NaN for floating-point dtypes,
    and bytes 0x7B for other dtypes.
    """
    if out.is_floating_point():
        # NaN in one element that the kernel does not write makes the comparison fail.
        out.fill_(float("nan"))
    elif out.numel():
        out.reshape(-1).view(torch.uint8).fill_(0x7B)


def _memory_of_slot(expressions: tuple[Any, ...], sizes: Sizes) -> Memory:
    """Return the sizes, strides and offset of a buffer as numbers, computed from ``expressions`` of size symbols. A
    symbol gets its value from ``sizes``. A symbol that ``sizes`` lacks has the value that it has in the call being
    compiled.
    """
    shape, strides, offset = expressions
    return (
        tuple(evaluate_size(n, sizes) for n in shape),
        tuple(evaluate_size(n, sizes) for n in strides),
        evaluate_size(offset, sizes),
    )


def _fresh_memory(name: str, make: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return ``make(*args)``, which allocates new memory. ``name`` is ignored."""
    return make(*args)


def _allocate_buffer(memory: Memory, value: Tensor) -> Tensor:
    """Return a new tensor of one dim, of the dtype and device of ``value``. It is long enough for a buffer with the
    sizes, strides and offset ``memory``, and uninitialised. If ``value`` is empty, it is empty.
    """
    sizes, strides, offset = memory
    length = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1 if value.numel() else 0
    return torch.empty(length, dtype=value.dtype, device=value.device)
