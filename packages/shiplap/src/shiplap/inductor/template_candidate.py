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
from shiplap.inductor.bound_call import Call
from shiplap.inductor.size_range import Sizes
from shiplap.sampling.symbols import state_of
from shiplap.torch_private import inductor_choices_ahead, inductor_lowering
from shiplap.torch_private.size_ranges import evaluate
from shiplap.tuning.candidate import Candidate

Memory = tuple[tuple[int, ...], tuple[int, ...], int]  # sizes, strides, offset from the start of the buffer


TORCHS = {"at", "c10", "torch", "std"}  # namespaces whose variables are not a template's


@dataclass
class TemplateCandidate(Candidate):
    """``config`` of ``template`` for ``call``. It is rendered while Inductor lowers the graph, and can be run
    afterwards.
    """

    call: Call
    template: Template
    config: Config
    fixed = True
    opaque = True
    compiles = True
    _choice: Any = field(default=None, repr=False)
    _slots: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    _run: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.kernel = self.template.name

    @property
    def label(self) -> str:
        return f"{self.template.name}({self.config})" if self.config.items else self.template.name

    def refuses(self) -> str:
        """The reason why the template cannot be used for this call, or an empty text."""
        supports = self.template.supports
        verdict = True if supports is None else supports(self.call.hints, self.call.dtypes, self.config.as_dict())
        return "" if verdict is True else (verdict or "supports() returned False")

    def render(self) -> Any:
        """The candidate as an Inductor choice. Raises the error of a failed rendering."""
        if self._choice is None:
            buffers = self.call.buffers(self.template)
            self._slots = tuple((name, inductor_lowering.memory(node)) for name, node in buffers.items())
            self._choice = _render(self.call, self.template, self.config, buffers, self.split_k)
        return self._choice

    @property
    def digest(self) -> str:
        """Of the kernel as it is rendered for this call, alone, and of the memory that it reads."""
        text = inductor_choices_ahead.source(self.render())
        memory = [(name, _memory(expressions, {})) for name, expressions in self._slots]
        return hashlib.sha256(f"{text}|{self._slots}|{memory}|{self.split_k}".encode()).hexdigest()[:32]

    def compile_apart(self) -> bool:
        """Start compiling the kernel beside this thread, after it has been rendered; whether that is done."""
        return inductor_choices_ahead.compile_apart(self.render())

    def precompile(self, args: tuple[Any, ...]) -> None:
        """Compile the kernel alone, after it has been rendered. Any thread may do so."""
        inductor_choices_ahead.precompile(self.render())

    def prepare(self, args: tuple[Any, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Compile the kernel alone, and return a function that runs it on ``args`` into a poisoned output.

        The candidates of one call share inputs and output, and each ``prepare`` fills them anew.

        Raises:
            Exception: whatever the compiler of the kernel raises.
        """
        self.render()
        inputs, out = self._inputs(args, {}, self.call.scratch), self.call.scratch(f"out {self.split_k}", self._output)
        _poison(out)
        if self._run is None:
            self.precompile(args)
            self._run = inductor_choices_ahead.run_function(self._choice, inputs, out, {})
        return self._launched(self._run, inputs, out)

    def prepare_at(self, args: tuple[Any, ...], sizes: Sizes) -> Callable[[], tuple[Tensor, ...]]:
        """The same kernel on ``args`` of other sizes, as the compiled graph may call it, in memory of their own."""
        self.render()
        if self._run is None:
            self.precompile(args)
        inputs, out = self._inputs(args, sizes, _anew), self._output(sizes)
        _poison(out)
        return self._launched(inductor_choices_ahead.run_function(self._choice, inputs, out, sizes), inputs, out)

    def _launched(self, run: Any, inputs: list[Tensor], out: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        def call(_alive: list[Tensor] = inputs) -> tuple[Tensor, ...]:  # a C++ kernel was given their addresses only
            inductor_lowering.launch(run)
            return (_sum(self.call, out) if self.split_k > 1 else out,)

        return call

    def state(self) -> str:
        """What the compiled kernel keeps from one call to the next, in variables of its own. Empty without any."""
        choice = self.render()
        library = inductor_choices_ahead.library(choice)
        if library is None:
            return ""
        words = set(re.findall(r"\w+", inductor_choices_ahead.source(choice)))
        return ", ".join(str(symbol) for symbol in state_of(library).symbols if _is_named(symbol.name, words))

    def _inputs(self, args: tuple[Any, ...], sizes: Sizes, room: Callable[..., Tensor]) -> list[Tensor]:
        """Memory with the strides of the buffers that the kernel was rendered for, filled with ``args``."""
        given = {a.name: v for a, v in zip(self.call.op.spec.args, args, strict=True) if isinstance(v, Tensor)}
        tables = dict(self.template.tables)
        tensors = []
        for name, expressions in self._slots:
            memory = _memory(expressions, sizes)
            value = given[name] if name in given else tables[name](self.call.numbers(sizes)).to(self.call.device)
            flat = room(f"{name} {memory}", _room, memory, value)
            if value.numel():
                flat.as_strided(*memory).copy_(value)
            tensors.append(flat)
        return tensors

    def _output(self, sizes: Sizes = MappingProxyType({})) -> Tensor:
        shape = self.call.shape(sizes)
        if self.split_k > 1:
            return torch.empty((self.split_k, *shape), dtype=torch.float32, device=self.call.device)
        return torch.empty(shape, dtype=self.call.output.dtype, device=self.call.device)

    def node(self, fusion: bool = True) -> Any:
        """The kernel as the lowered result. With ``fusion``, Inductor may put neighbours into it, if that pays.

        A pointwise operation after the kernel adds partial sums. Inductor then fuses neighbours into that operation.
        """
        pays = self.template.fuses is None or self.template.fuses(self.call.hints)
        node = inductor_lowering.choice_node(self.render(), fusion and pays)
        if self.split_k == 1:
            return node
        partial_sums = inductor_lowering.fake((self.split_k, *self.call.output.shape), torch.float32, self.call.device)
        return inductor_lowering.inline(inductor_lowering.trace(lambda p: _sum(self.call, p), [partial_sums]), [node])

    @cached_property
    def split_k(self) -> int:
        """The split-K factor: the number of partial sums that the kernel stores."""
        declared = self.template.split_k
        if declared is None:
            return 1
        return int(declared(Fixed(self.call.env), self.config.as_dict()))


def _is_named(symbol: str, words: set[str]) -> bool:
    """Whether the source of a kernel has the name of a variable, or of a function that the variable is in.

    The headers of torch have constants that are variables in code that no compiler optimises. No template names them.
    """
    names, rest = [symbol.partition(".")[0]], symbol
    while found := re.search(r"\d+", rest):
        length, rest = int(found[0]), rest[found.end() :]
        names.append(rest[:length])
        rest = rest[length:] if re.fullmatch(r"[A-Za-z_]\w*", rest[:length]) else rest
    return not TORCHS & set(names) and bool(words & set(names))


class Fixed(Mapping[str, Any]):
    """Sizes as numbers, of which each that is looked at becomes part of the compiled code."""

    def __init__(self, env: Mapping[str, Any]) -> None:
        self.env = env

    def __getitem__(self, name: str) -> Any:
        value = self.env[name]
        return inductor_lowering.static(value) if isinstance(value, torch.SymInt) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.env)

    def __len__(self) -> int:
        return len(self.env)


def _sum(call: Call, partial_sums: Tensor) -> Tensor:
    return partial_sums.sum(0).to(call.output.dtype)


def _render(call: Call, template: Template, config: Config, buffers: dict[str, Any], split_k: int) -> Any:
    layout = inductor_lowering.fixed_layout(call.output)
    if split_k > 1:
        layout = inductor_lowering.fixed_layout(
            inductor_lowering.fake((split_k, *call.output.shape), torch.float32, call.device)
        )
    if shared := inductor_lowering.shared(list(buffers.values())):
        raise NotImplementedError(f"two arguments are views of buffer {shared}")
    name = f"{call.op.spec.namespace}_{call.op.spec.opname}_{template.name}"
    if template.language == "cpp":
        from shiplap.torch_private import inductor_cpp_template

        return inductor_cpp_template.choice(name, template.source, buffers, layout, call.constants, config.as_dict())
    from shiplap.torch_private import inductor_triton_template

    assert template.grid is not None
    source = triton_source(template.source, buffers)
    unique = f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:8]}_{code_digest(template.grid)[:8]}"
    sizes = {k: v for k, v in call.env.items() if isinstance(v, (int, torch.SymInt))}
    grid = _grid(template, tuple(sizes))
    expressions = [inductor_lowering.expression(v) for v in sizes.values()]
    constants = {
        **call.constants,
        **call.facts(buffers),
        "ALLOW_TF32": torch.backends.cuda.matmul.allow_tf32,
        **({"SPLIT_K": split_k} if template.split_k else {}),
        **config.as_dict(),
    }
    return inductor_triton_template.choice(unique, source, grid, expressions, list(buffers.values()), layout, constants)


def _grid(template: Template, names: tuple[str, ...]) -> Callable[..., tuple[Any, Any, Any]]:
    """``template.grid`` as Inductor calls it: sizes by position, then the config."""
    assert template.grid is not None
    declared = template.grid

    def grid(*given: Any, cdiv: Callable[[Any, Any], Any]) -> tuple[Any, Any, Any]:
        *sizes, config = given
        return declared(dict(zip(names, sizes, strict=True)), config, cdiv)

    return grid


def _poison(out: Tensor) -> None:
    """Fill an output with what no kernel computes by accident."""
    if out.is_floating_point():
        out.fill_(float("nan"))
    elif out.numel():
        out.reshape(-1).view(torch.uint8).fill_(0x7B)


def _memory(expressions: tuple[Any, ...], sizes: Sizes) -> Memory:
    """Sizes, strides and offset as numbers."""
    shape, strides, offset = expressions
    return tuple(evaluate(n, sizes) for n in shape), tuple(evaluate(n, sizes) for n in strides), evaluate(offset, sizes)


def _anew(name: str, make: Callable[..., Tensor], *args: Any) -> Tensor:
    """Memory that no other run has had the addresses of."""
    return make(*args)


def _room(memory: Memory, value: Tensor) -> Tensor:
    """Memory that starts where a buffer of these sizes, strides and offset starts."""
    sizes, strides, offset = memory
    length = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1 if value.numel() else 0
    return torch.empty(length, dtype=value.dtype, device=value.device)
