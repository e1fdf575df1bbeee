"""One call of an op in Inductor: buffers by argument name, and sizes both as expressions and as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shiplap.cached_property import cached_property
from shiplap.codegen.triton import template_constants
from shiplap.declare.template import Template, Traced
from shiplap.dispatch import Op
from shiplap.inductor.size_range import SizeRange, Sizes, size_range
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.sizes import broadcast_ones, free_dims
from shiplap.torch_private import inductor_lowering
from shiplap.torch_private.inductor_lowering import evaluate_size
from shiplap.torch_private.symbolic_sizes import is_size
from shiplap.tuning.inputs import layout_name


@dataclass(frozen=True)
class LoweredCall:
    """One call of an op in the graph that Inductor is lowering.

    ``args`` are Inductor's IR nodes and constants in schema order, and ``values`` are the fake tensors and scalars for
    them. ``env`` maps the names of dims and scalars to their values, which may be symbolic. ``output`` is the fake
    tensor of the result. ``node`` is the FX node of the call.
    """

    op: Op
    args: tuple[Any, ...]
    values: tuple[Any, ...]
    env: Mapping[str, Any]
    output: Tensor
    node: torch.fx.Node
    _scratch: dict[str, Tensor] = field(default_factory=dict, repr=False)
    memo: dict[str, Any] = field(default_factory=dict, repr=False)  # of :func:`candidates`

    def __enter__(self) -> LoweredCall:
        """Return this call. Its shared memory and its candidates are released when the ``with`` block ends."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the shared memory and the candidates of this call. The candidates refer to the call, so reference
        counting alone would not free them.
        """
        self._scratch.clear()
        self.memo.clear()

    def scratch(self, name: str, make: Callable[..., Tensor], *args: Any) -> Tensor:
        """Return the buffer that this call stores under ``name``. At the first request, ``make(*args)`` makes it.

        The possible kernels of the call, called candidates, are tested one after another, and all of them use these
        buffers.
        """
        if name not in self._scratch:
            self._scratch[name] = make(*args)
        return self._scratch[name]

    @staticmethod
    def bind(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LoweredCall:
        """Return the call of ``op`` that Inductor is lowering. ``args`` and ``kwargs`` hold Inductor's IR nodes and
        constants. The fake tensors are read from the FX node that is being lowered.
        """
        # Inductor replaces the arguments by IR nodes, which have no values. The fakes are found through the FX node.
        node = inductor_lowering.current_node()
        fakes: Any = torch.fx.map_arg(node.args, lambda n: n.meta["val"])  # also in lists: sizes may be symbols
        named: Any = torch.fx.map_arg(node.kwargs, lambda n: n.meta["val"])
        rest = op.spec.args[len(args) :]
        values = op.spec.complete(fakes, named)
        # Arguments that the graph does not pass have their defaults.
        nodes = (*args, *(kwargs.get(a.name, a.default) for a in rest))
        return LoweredCall(op, nodes, values, op.bind(values).env, node.meta["val"], node)

    @property
    def device(self) -> torch.device:
        """The device on which the output of the call lies."""
        return self.output.device

    @cached_property
    def identity(self) -> str:
        """A digest of the op with all of its kernels. It is cached here, because ``Op.identity`` is computed at each
        access.
        """
        return self.op.identity

    def reference(self, *tensors: Any) -> Any:
        """Return the result of the op's reference, its implementation in PyTorch operations. ``tensors`` replace the
        tensor arguments that are not None, in schema order. All other arguments are those of this call.
        """
        return self.op.run_reference(self._all_arguments(tensors))

    def function_of_tensors(self, function: Traced) -> Callable[..., Any]:
        """Return a function that calls ``function`` with all arguments of the op. It takes only the tensor arguments
        that are not None, in schema order. All other arguments are those of this call.
        """

        def run(*tensors: Any) -> Any:
            """Return the result of ``function``. Its arguments are those of this call, with ``tensors`` in place of the
            tensor arguments that are not None.
            """
            positional, named = self.op.spec.split(self._all_arguments(tensors))
            return function(*positional, **named)

        return run

    def _all_arguments(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all arguments of the op in schema order. ``tensors`` replace its tensors that are not None."""
        given = iter(tensors)
        return tuple(next(given) if isinstance(v, Tensor) else v for v in self.values)

    @property
    def nodes(self) -> list[Any]:
        """The IR nodes of the tensor arguments that are not None, in schema order."""
        return [n for n, v in zip(self.args, self.values, strict=True) if isinstance(v, Tensor)]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The fake tensors of the tensor arguments that are not None, by argument name."""
        pairs = zip(self.op.spec.args, self.values, strict=True)
        return {a.name: v for a, v in pairs if isinstance(v, Tensor)}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of the tensor arguments that are not None, by argument name, and the dtype of the output under
        ``out``.
        """
        return {name: t.dtype for name, t in self.tensors.items()} | {"out": self.output.dtype}

    @cached_property
    def hints(self) -> dict[str, Any]:
        """The dims and scalars of the call by name, as numbers. A symbolic size has the value that it has in the call
        being compiled.
        """
        return self.numbers({})

    def numbers(self, sizes: Sizes) -> dict[str, Any]:
        """Return the dims and scalars of the call by name, as numbers. A size symbol gets its value from ``sizes``. A
        symbol that ``sizes`` lacks has the value that it has in the call being compiled.
        """
        return {k: _as_hints(v, sizes) for k, v in self.env.items()}

    @cached_property
    def sizes(self) -> SizeRange:
        """The range of sizes at which the compiled graph may run this call. It is computed once."""
        return size_range(self)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape of the output as numbers. A size symbol gets its value from ``sizes``. A symbol that
        ``sizes`` lacks has the value that it has in the call being compiled.
        """
        return tuple(evaluate_size(s, sizes) for s in self.output.shape)

    @property
    def static(self) -> bool:
        """Whether all sizes and strides of the tensor arguments and of the output are ints rather than symbols."""
        return all(isinstance(s, int) for t in (*self.tensors.values(), self.output) for s in (*t.shape, *t.stride()))

    @property
    def constants(self) -> dict[str, Any]:
        """The compile-time constants, by name, that a kernel template gets for this call.

        They are ``HAS_BIAS`` for an optional argument ``bias``, ``STRIDE_0`` for the first item of a list ``stride``,
        and each scalar under its name in capitals. A symbolic size among them is fixed to its current value by a guard
        of the graph.
        """
        return template_constants(
            self.op.spec, self.values, lambda v: inductor_lowering.static_size(v) if isinstance(v, torch.SymInt) else v
        )

    def facts(self, buffers: Mapping[str, Any]) -> dict[str, int]:
        """Return constants for a kernel template about the memory of this call, by name. ``buffers`` holds the input
        buffers by argument name.

        ``K_ALIGN`` is a power of two that always divides the size ``k``. ``A_INNER`` is the dim along which the tensor
        ``a`` has stride 1, or -1 if there is none.
        """
        alignments = {
            f"{k.upper()}_ALIGN": inductor_lowering.known_alignment(v) for k, v in self.env.items() if is_size(v)
        }
        return alignments | {
            f"{name.upper()}_INNER": inductor_lowering.inner_axis(node) for name, node in buffers.items()
        }

    def buffers(self, template: Template) -> dict[str, Any]:
        """Return Inductor's input buffers for ``template`` by name. They are the tensor arguments in schema order, then
        the template's tables. A table is a tensor that is computed from sizes at compile time.

        A tensor is copied if the dim that the template requires to have stride 1 has another stride.
        """
        wanted, layouts = dict(template.innermost), {}
        for arg, node in zip(self.op.spec.args, self.args, strict=True):
            if arg.tensor is None or node is None:
                continue
            if arg.name in wanted:
                dim = [d.text for d in arg.tensor.dims].index(wanted[arg.name])
                node = inductor_lowering.with_inner_dim(
                    node, dim - len(arg.tensor.dims) if arg.tensor.variadic else dim
                )
            layouts[arg.name] = inductor_lowering.realize_buffer(node)
        # A table is built now, for one size, so the graph must not serve others.
        sizes = {k: _specialise_sizes(v) for k, v in self.env.items()} if template.tables else {}
        for name, build in template.tables:
            table = build(sizes).to(self.device)
            layouts[name] = inductor_lowering.realize_buffer(
                inductor_lowering.add_table(table, f"{self.op.spec.opname}_{template.name}_{name}")
            )
        return layouts

    @property
    def recipe(self) -> SampleRecipe:
        """A description from which test inputs like those of this call can be drawn. It holds the sizes, scalars,
        dtypes, memory layouts and absent arguments of the call.
        """
        return self.recipe_at({})

    def recipe_at(self, at: Sizes) -> SampleRecipe:
        """Return a description from which test inputs like those of this call can be drawn. Size symbols have their
        values in ``at``. A symbol that ``at`` lacks has the value that it has in the call being compiled.
        """
        spec, hints = self.op.spec, self.numbers(at)
        dims = free_dims(spec)
        sizes = {k: v for k, v in hints.items() if k in dims} | broadcast_ones(spec, hints)
        scalars = {a.name: hints[a.name] for a in spec.scalars}
        classes = {
            a.tensor.dtype_class: str(self.tensors[a.name].dtype).removeprefix("torch.")
            for a in spec.tensors
            if a.tensor and a.name in self.tensors and not a.tensor.concrete
        }
        # The samples of a proof leave out what the call leaves out.
        absent = tuple(a.name for a in spec.tensors if a.name not in self.tensors)
        return SampleRecipe(absent=absent).but(sizes=sizes, scalars=scalars, dtypes=classes, layouts=self._layouts())

    def _layouts(self) -> dict[str, str]:
        """Return the name of the memory layout of each tensor argument, such as ``transposed``, by argument name.
        Tensors whose layout has no name are left out.
        """
        layouts = {}
        for name, value in self.tensors.items():
            sizes, strides = ([inductor_lowering.size_hint(s) for s in of] for of in (value.shape, value.stride()))
            # On the meta device, since only sizes and strides are compared.
            layouts[name] = layout_name(torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta"))
        return {name: layout for name, layout in layouts.items() if layout}


def _as_hints(value: Any, sizes: Sizes) -> Any:
    """Return ``value`` with a number for each symbolic size. The number comes from ``sizes``. A symbol that ``sizes``
    lacks has the value that it has in the call being compiled. A list or tuple is returned as a tuple.
    """
    if isinstance(value, (list, tuple)):
        return tuple(_as_hints(v, sizes) for v in value)
    return evaluate_size(value, sizes) if isinstance(value, torch.SymInt) else value


def _specialise_sizes(value: Any) -> Any:
    """Return ``value`` with a number for each symbolic size, which is its value in the call being compiled. Each such
    number becomes a guard of the graph. A list or tuple is returned as a tuple.
    """
    if isinstance(value, (list, tuple)):
        return tuple(_specialise_sizes(v) for v in value)
    return inductor_lowering.static_size(value) if isinstance(value, torch.SymInt) else value
