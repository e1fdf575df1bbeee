"""A template with a config, rendered for one call. It can run on tensors of its own, or become a node of the graph."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shiplap.cached_property import cached_property
from shiplap.codegen.triton import triton_source
from shiplap.declare.code_digest import source_digest
from shiplap.declare.config import Config
from shiplap.declare.template import Template
from shiplap.inductor.bound_call import Call
from shiplap.torch_private import inductor_lowering
from shiplap.tuning.candidate import Candidate

Memory = tuple[tuple[int, ...], tuple[int, ...], int]  # sizes, strides, offset from the start of the buffer


@dataclass
class TemplateCandidate(Candidate):
    """``config`` of ``template`` for ``call``, rendered while Inductor lowers the graph, and run at that time or
    later.
    """

    call: Call
    template: Template
    config: Config
    fixed = True
    opaque = True
    compiles = True
    _choice: Any = field(default=None, repr=False)
    _slots: tuple[tuple[str, Memory], ...] = ()
    _run: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.kernel = self.template.name

    @property
    def label(self) -> str:
        return f"{self.template.name}({self.config})" if self.config.items else self.template.name

    def refuses(self) -> str:
        """Return the reason why the template cannot be used for this call, or an empty text."""
        supports = self.template.supports
        verdict = True if supports is None else supports(self.call.hints, self.call.dtypes, self.config.as_dict())
        return "" if verdict is True else (verdict or "supports() returned False")

    def render(self) -> Any:
        """Return the candidate as an Inductor choice. Raises the error of a failed rendering."""
        if self._choice is None:
            buffers = self.call.buffers(self.template)
            self._slots = tuple((name, inductor_lowering.memory(node)) for name, node in buffers.items())
            self._choice = _render(self.call, self.template, self.config, buffers, self.split_k)
        return self._choice

    @property
    def digest(self) -> str:
        """The digest of the kernel as it is rendered for this call, alone, and of the memory that it reads."""
        from shiplap.torch_private import inductor_choices_ahead

        text = inductor_choices_ahead.source(self.render())
        return hashlib.sha256(f"{text}|{self._slots}|{self.split_k}".encode()).hexdigest()[:32]

    def compile_apart(self) -> bool:
        """Start compiling the kernel in another process, after it has been rendered, and return whether it was
        started.
        """
        from shiplap.torch_private import inductor_choices_ahead

        return inductor_choices_ahead.compile_apart(self.render())

    def precompile(self, args: tuple[Any, ...]) -> None:
        """Compile the kernel alone, after it has been rendered. Any thread may call this method."""
        from shiplap.torch_private import inductor_choices_ahead

        inductor_choices_ahead.precompile(self.render())

    def prepare(self, args: tuple[Any, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Compile the kernel alone, and return a function that runs it on ``args`` into a poisoned output.

        The candidates of one call share inputs and output, and each ``prepare`` fills them again.

        Raises:
            Exception: any error of the compiler of the kernel.
        """
        choice = self.render()
        inputs, out = self._inputs(args), self.call.scratch(f"out {self.split_k}", _output, self.call, self.split_k)
        _poison(out)
        if self._run is None:
            self.precompile(args)
            self._run = choice.bmreq.make_run_fn(*inputs, out=out)
        run = self._run

        def call(_alive: list[Tensor] = inputs) -> tuple[Tensor, ...]:  # a C++ kernel was given their addresses only
            inductor_lowering.launch(run)
            return (_sum(self.call, out) if self.split_k > 1 else out,)

        return call

    def _inputs(self, args: tuple[Any, ...]) -> list[Tensor]:
        """Return memory with the strides of the buffers that the kernel was rendered for, filled with ``args``."""
        given = {a.name: v for a, v in zip(self.call.op.spec.args, args, strict=True) if isinstance(v, Tensor)}
        tables = dict(self.template.tables)
        tensors = []
        for name, memory in self._slots:
            value = given[name] if name in given else tables[name](self.call.hints).to(self.call.device)
            flat = self.call.scratch(f"{name} {memory}", _room, memory, value)
            if value.numel():
                flat.as_strided(*memory).copy_(value)
            tensors.append(flat)
        return tensors

    def node(self, fusion: bool = True) -> Any:
        """Return the kernel as the lowered result. With ``fusion``, Inductor may fuse neighbours into it, if that pays.

        With split-K, a pointwise operation after the kernel adds partial sums. Inductor then fuses neighbours into that
        operation.
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


class Fixed(Mapping[str, Any]):
    """Sizes as numbers. Each size that is read becomes a constant of the compiled code."""

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
    # Inductor caches templates by name, so the name has to change with the source and with the grid.
    unique = f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:8]}_{source_digest(template.grid)[:8]}"
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
    """Return ``template.grid`` in the form that Inductor calls: sizes by position, then the config."""
    assert template.grid is not None
    declared = template.grid

    def grid(*given: Any, cdiv: Callable[[Any, Any], Any]) -> tuple[Any, Any, Any]:
        *sizes, config = given
        return declared(dict(zip(names, sizes, strict=True)), config, cdiv)

    return grid


def _output(call: Call, split_k: int) -> Tensor:
    if split_k > 1:
        return torch.empty((split_k, *call.shape), dtype=torch.float32, device=call.device)
    return torch.empty(call.shape, dtype=call.output.dtype, device=call.device)


def _poison(out: Tensor) -> None:
    """Fill an output with values that no kernel computes by accident."""
    if out.is_floating_point():
        out.fill_(float("nan"))
    elif out.numel():
        out.reshape(-1).view(torch.uint8).fill_(0x7B)


def _room(memory: Memory, value: Tensor) -> Tensor:
    """Return memory that starts where a buffer of these sizes, strides and offset starts."""
    sizes, strides, offset = memory
    length = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1 if value.numel() else 0
    return torch.empty(length, dtype=value.dtype, device=value.device)
