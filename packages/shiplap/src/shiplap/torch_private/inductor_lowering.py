"""Inductor's lowering, for ``shiplap.inductor``: register lowerings, read the current node, build and run choices.

Importing this module imports Inductor, at the first trace of an op that has templates. IR nodes and choices are opaque
to callers.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch import SymInt, Tensor
from torch._inductor import config, ir, lowering
from torch._inductor.lowering import empty_strided
from torch._inductor.virtualized import V
from torch._library.utils import get_layout_constraint_tag
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_map
from torch.utils._sympy.functions import Mod, PythonMod
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from shiplap.torch_private.dispatcher_calls import placed_arguments

# --- calls of ops in the Python that Inductor writes ------------------------------------------------------------------

_names: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()  # of each wrapper, by torch's text


class _NamedFallback(ir.FallbackKernel):
    """A call of an op as a whole in the code that Inductor writes, through a variable of the written module.

    ``torch.ops.ns.op.raw(...)`` looks up five attributes at each call and enters ``OpOverload.__call__``. That takes a
    third of the time of a call of a short C++ kernel (two busy cores of an AMD EPYC, torch 2.13, 2026-11-28). Only
    torch's Python wrapper gets the variable. Others get torch's own text.
    """

    def get_kernel_name(self) -> str:
        """Return the name by which the generated wrapper calls the op. In Python wrappers it is that of a function that
        calls the op below autograd.
        """
        written = super().get_kernel_name()
        graph: Any = V.graph
        if graph.cpp_wrapper or graph.aot_mode or graph.fx_wrapper or written != self.python_kernel_name:
            return written
        return _name_in_wrapper(graph.wrapper_code, written)


def _name_in_wrapper(wrapper: Any, written: str) -> str:
    """Return the name of a variable in Inductor's generated wrapper that holds the function to call for an op. The
    first use adds a line that assigns the variable to the wrapper's imports. ``written`` is torch's source code for the
    op, such as ``torch.ops.ns.name.default``. It is returned if the wrapper has no imports.
    """
    while hasattr(wrapper, "parent_wrapper"):  # a part of a graph, whose functions are in the module of the whole
        wrapper = wrapper.parent_wrapper
    if not hasattr(wrapper, "imports"):
        return written
    names = _names.setdefault(wrapper, {})
    if written not in names:
        if not names:
            wrapper.imports.writeline("from shiplap.torch_private.dispatcher_calls import in_code")
        names[written] = f"{re.sub(r'[^0-9A-Za-z_]', '_', written.removeprefix('torch.ops.'))}_{len(names)}"
        wrapper.imports.writeline(f"{names[written]} = in_code({written})")
    return names[written]


def call_lowering(overload: Any, *, known: bool = True) -> Callable[..., Any]:
    """Return a lowering (Inductor's function from IR arguments to IR nodes) that calls ``overload`` as a whole. If
    ``known`` is true, the op is added to torch's set of ops without a lowering of their own, else it is not.
    """
    plain = lowering.fallback_handler(overload, add_to_fallback_set=known)

    @wraps(plain)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        """Return the IR node, or nested nodes, of a call of the op as a whole with these arguments."""
        placed, named = placed_arguments(overload, args, kwargs)
        return tree_map(_lowered, _NamedFallback.create(overload, *placed, **named))

    return lowered


def _lowered(value: Any) -> Any:
    """Return an IR node wrapped as lowerings return it, and any other value unchanged."""
    if not isinstance(value, ir.IRNode):
        return value
    return value.wrap_for_lowering() if hasattr(value, "wrap_for_lowering") else ir.TensorBox.create(value)


# --- symbolic sizes of the graph being lowered: nothing here adds a guard, except for `limit_size` --------------------


@dataclass(frozen=True)
class SizeSymbol:
    """A symbol of a graph's sizes.

    Attributes:
        symbol: the sympy symbol, which callers only pass on.
        lower, upper: the range in which the graph may run. ``upper`` is None if there is no upper limit.
        hint: the value in the call for which the graph is compiled.
        backed: whether the size comes from an input, so that a guard can check it. Other sizes depend on data.
    """

    symbol: Any
    lower: int
    upper: int | None
    hint: int
    backed: bool


def _simplified_size(size: Any) -> Any:
    """Return a size as a simplified sympy expression, with precomputed expressions in place of their symbols."""
    expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.sympify(size)
    sizes = V.graph.sizevars
    return sizes.simplify(expr.xreplace(sizes.inv_precomputed_replacements))


def evaluate_size(size: Any, values: Mapping[Any, int]) -> int:
    """Return a size as an int. A symbol without a value in ``values`` has that of the call that is compiled."""
    if isinstance(size, int | sympy.Integer):  # also where nothing is compiled, as when a worker runs a candidate
        return int(size)
    expr = _simplified_size(size).xreplace({symbol: sympy.Integer(n) for symbol, n in values.items()})
    return int(expr) if expr.is_number else int(V.graph.sizevars.optimization_hint(expr, fallback=8192))


def symbols_of(sizes: Iterable[Any]) -> tuple[SizeSymbol, ...]:
    """Return the symbols in ``sizes`` with their bounds and hints, in the order of their first use. Each symbol occurs
    once.
    """
    met: dict[Any, None] = {}
    for size in sizes:
        met.update(dict.fromkeys(sorted(_simplified_size(size).free_symbols, key=str)))
    return tuple(_describe_symbol(symbol) for symbol in met)


def _describe_symbol(symbol: Any) -> SizeSymbol:
    """Return ``symbol`` with its bounds, its value in the compiled call, and whether an input determines it."""
    env = V.graph.sizevars.shape_env
    bounds = env.var_to_range.get(symbol)
    lower = int(bounds.lower) if bounds is not None and bounds.lower.is_Integer else 0
    upper = int(bounds.upper) if bounds is not None and bounds.upper.is_Integer else None
    backed = not free_unbacked_symbols(symbol)
    return SizeSymbol(symbol, max(0, lower), upper, evaluate_size(symbol, {}), backed)


def graph_conditions() -> list[Any]:
    """Return the guards and assertions on sizes that the graph has by now, as sympy conditions on symbols."""
    env = V.graph.sizevars.shape_env
    asserted = [a.expr for listed in env.deferred_runtime_asserts.values() for a in listed]
    return [env.replace(expr) for expr in (*(guard.expr for guard in env.guards), *asserted)]


def conditions_admit(conditions: Iterable[Any], values: Mapping[Any, int]) -> bool:
    """Return whether the sizes in ``values`` meet all conditions. Symbols without a value count as meeting theirs."""
    given = {symbol: sympy.Integer(value) for symbol, value in values.items()}
    return all(expr.xreplace(given) != sympy.false for expr in conditions)


def edges_of(conditions: Iterable[Any], symbol: Any) -> tuple[set[int], set[int]]:
    """Return two sets of numbers from those ``conditions`` in which ``symbol`` occurs. The first has the absolute
    values above 1 of their constants, and the second the divisors above 1 of their remainders.
    """
    compared, divisors = set[int](), set[int]()
    for expr in conditions:
        if symbol in expr.free_symbols:
            compared |= {abs(int(n)) for n in expr.atoms(sympy.Integer) if abs(n) > 1}
            rests = [mod.args[1] for mod in expr.atoms(Mod, PythonMod, sympy.Mod)]
            divisors |= {int(by) for by in rests if by.is_Integer and by > 1}
    return compared, divisors


def bounds_of(conditions: Iterable[Any], symbol: Any) -> Iterator[Any]:
    """Yield upper bounds of ``symbol`` from the linear inequalities in ``conditions``, in terms of other symbols."""
    for expr in conditions:
        if not isinstance(expr, (sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)):
            continue
        excess = expr.lhs - expr.rhs if isinstance(expr, (sympy.Le, sympy.Lt)) else expr.rhs - expr.lhs
        excess = sympy.expand(excess)
        factor = excess.coeff(symbol)
        rest = sympy.expand(excess - factor * symbol)
        if factor.is_Integer and factor > 0 and symbol not in rest.free_symbols:
            yield -rest / factor


def largest_value(bound: Any, ranges: Mapping[Any, tuple[int, int | None]]) -> int | None:
    """Return the largest value of ``bound``, whose symbols lie in ``ranges``, or None if it is not bounded."""
    known: dict[Any, Any] = {}
    for symbol in bound.free_symbols:
        low, high = ranges.get(symbol, (0, None))
        if high is None:
            return None
        known[symbol] = ValueRanges(sympy.Integer(low), sympy.Integer(high))
    upper = bound_sympy(bound, known).upper
    return int(sympy.floor(upper)) if upper.is_number else None


def limit_size(symbol: Any, upper: int) -> bool:
    """Add a guard to the graph that ``symbol`` is at most ``upper``. Return whether the guard holds.

    A larger size then recompiles the graph. No guard can be added to a packaged graph or for a symbol that depends on
    data.
    """
    env = V.graph.sizevars.shape_env
    if env.frozen or V.graph.aot_mode or free_unbacked_symbols(symbol):
        return False
    if not V.graph.sizevars.evaluate_expr(sympy.Le(symbol, upper)):
        return False
    bounds = env.var_to_range.get(symbol)
    return bounds is not None and bool(bounds.upper <= upper)


# --- lowerings, nodes and graphs --------------------------------------------------------------------------------------


def replace_lowering(overload: Any, lower: Callable[..., Any]) -> None:
    """Register ``lower`` as Inductor's lowering of ``overload``, in place of an earlier one.

    Since torch 2.13, Inductor calls lowerings of users first. If one returns None, the next lowering is called. An op
    without results would then be called twice, so such an op is not registered among those of users.
    """
    if hasattr(lowering, "user_lowerings"):
        lowering.user_lowerings.pop(overload, None)
        if overload._schema.returns:
            lowering.user_lowerings[overload] = lower
    # An earlier registration, such as torch's own fallback for the op, is removed first.
    lowering.lowerings.pop(overload, None)
    lowering.register_lowering(overload, type_promotion_kind=None)(lower)


def call_below(overload: Any, raw: Any) -> None:
    """Make the code that Inductor generates call the op ``raw`` for graph nodes of ``overload``.

    ``raw`` is the part of ``overload`` below autograd. Generated code records no gradients, so it does not need the
    Python code of ``overload``. The layouts that inputs must have stay those of ``overload``.
    """
    constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(overload, with_default=True))
    lowering.add_needs_realized_inputs(overload)
    if constraint is not None:
        lowering.add_layout_constraint(overload, constraint)
    replace_lowering(overload, call_lowering(raw))


def lower_storage_offsets() -> None:
    """Register a lowering of ``aten.sym_storage_offset`` unless torch has one (at least up to 2.13 it has none).

    A graph of dynamic sizes reads the offset of a mutated view. Inductor's fallback answers 0, so the op would write to
    the beginning of the tensor.
    """
    overload = torch.ops.aten.sym_storage_offset.default
    if overload in lowering.lowerings and overload not in lowering.fallbacks:
        return

    def storage_offset(_node: Any) -> Any:
        """Return the storage offset of the node being lowered, as a sympy expression or a number."""
        value = current_node().meta["val"]
        return size_expression(value) if isinstance(value, SymInt) else int(value)

    lowering.register_lowering(overload, type_promotion_kind=None)(storage_offset)


def lower_lone_results() -> None:
    """Make Inductor accept ``call[0]`` of an op with one result, by a lowering of ``getitem`` that returns the result
    itself.

    The functional form of a call returns the result and each tensor that was written to. If an argument that the op may
    write was None, there may be no such tensor. Up to 2.13 at least, torch then keeps ``[0]`` on the result.
    """

    def lone_result(value: Any, index: Any) -> Any:
        """Return ``value``. Raise ``AssertionError`` unless ``index`` is 0 and an op that writes made ``value``."""
        source = current_node().args[0]
        target = source.target if isinstance(source, torch.fx.Node) else None
        if index != 0 or not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            raise AssertionError(f"{target} has no result {index}")
        return value

    lowering.lowerings.setdefault(operator.getitem, lone_result)


def is_autotuning() -> bool:
    """Return whether this compilation measures candidate kernels (``mode="max-autotune"``)."""
    return bool(config.max_autotune or config.max_autotune_gemm)


def current_node() -> torch.fx.Node:
    """Return the FX node being lowered."""
    node = V.graph.current_node
    assert isinstance(node, torch.fx.Node)
    return node


def size_expression(size: Any) -> Any:
    """Return a size of a fake tensor as a sympy expression of the graph's symbols."""
    return size.node.expr if isinstance(size, SymInt) else sympy.Integer(int(size))


def size_hint(size: Any) -> int:
    """Return the value of a size in the call for which the graph is compiled."""
    return size if isinstance(size, int) else _expression_hint(size_expression(size))


def _expression_hint(size: Any) -> int:
    """Return the value of a sympy size in the call that is compiled. A data-dependent size has torch's default."""
    return int(V.graph.sizevars.optimization_hint(size, fallback=config.unbacked_symint_fallback))


def static_size(size: Any) -> int:
    """Return the value of a size in the call that is compiled. Specialise the graph to that value by a guard."""
    return size if isinstance(size, int) else int(V.graph.sizevars.guard_int(size_expression(size)))


def realize_buffer(node: Any) -> Any:
    """Return an IR node as a buffer, or a view of one, that is computed and whose strides no longer change."""
    realized = ir.ExternKernel.realize_input(node)
    realized.freeze_layout()
    return realized


def shared_buffer(nodes: Sequence[Any]) -> str:
    """Return the name of a buffer of which two or more of ``nodes`` are views, or an empty string if there is none."""
    names = [node.get_name() for node in nodes]
    return next((name for name in names if names.count(name) > 1), "")


def memory_layout(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """Return the sizes, strides and storage offset of an IR node, in elements and as Inductor's expressions."""
    layout = node.get_layout()
    return tuple(layout.size), tuple(layout.stride), layout.offset


def launch_run(run: Callable[[], None]) -> None:
    """Run ``run``, a function that Inductor's ``make_run_fn`` prepared to launch a kernel, on the current stream. Up to
    torch 2.13 ``run`` holds the stream that was current when it was prepared. In 2.15 it reads the current stream.
    """
    named = dict(run.keywords) if isinstance(run, partial) else {}
    if "stream" not in named:
        run()
        return
    assert isinstance(run, partial)
    if torch.cuda.is_available():
        named["stream"] = torch.cuda.current_stream().cuda_stream
    run.func(*run.args, **named)


def choice_node(choice: Any, fusion: bool) -> Any:
    """Return the IR node of a chosen kernel's result. Other nodes may be fused into it only if ``fusion`` is true."""
    node = choice.output_node()
    if not fusion:
        V.graph.no_fuse_buffer_names.add(node.get_name())
    return node


def exclude_from_fusion(node: Any) -> Any:
    """Realize the IR node as a buffer and return it. Nothing is fused into the buffer's kernel."""
    node.realize()
    V.graph.no_fuse_buffer_names.add(node.get_name())
    return node


def known_alignment(size: Any) -> int:
    """Return the largest power of two up to 256 that divides ``size`` in every call."""
    expr, known = size_expression(size), V.graph.sizevars.statically_known_multiple_of
    return next(p for p in (256, 128, 64, 32, 16, 8, 4, 2, 1) if p == 1 or known(expr, p))


def inner_axis(node: Any) -> int:
    """Return the last axis of an IR node whose stride is 1 in every call, or -1 if there is none."""
    strides, known = node.get_stride(), V.graph.sizevars.statically_known_equals
    return next((i for i in reversed(range(len(strides))) if known(strides[i], 1)), -1)


def with_inner_dim(node: Any, dim: int) -> Any:
    """Return the IR node with stride 1 in ``dim``. A node with another stride there is copied."""
    strides = node.get_stride() if node.maybe_get_stride() is not None else None
    if strides is not None and V.graph.sizevars.statically_known_equals(strides[dim], 1):
        return node
    rank = len(node.get_size())
    rest = [d for d in range(rank) if d != dim]
    order = [0] * rank
    for place, d in enumerate((dim, *reversed(rest))):
        order[d] = place
    return ir.ExternKernel.require_stride_order(node, order)


def layout_key(node: Any) -> tuple[str, ...]:
    """Return the dims of an IR node by ascending stride, as strings for a cache key. A string is the index of the dim,
    followed by ``=`` and the stride if that is 0 or 1. Return an empty tuple if the layout of the node is not decided
    yet. The speed of a kernel depends on these strides.
    """
    # The layout of such a node is not decided yet, so it must not be part of a key.
    if node.maybe_get_stride() is None:
        return ()
    strides = [_expression_hint(s) for s in node.get_stride()]
    order = sorted(range(len(strides)), key=lambda i: (strides[i], i))
    return tuple(f"{i}={strides[i]}" if strides[i] <= 1 else str(i) for i in order)


def fixed_layout(value: Tensor) -> Any:
    """Return Inductor's fixed layout for a result like the fake ``value``. Declarations promise that it is
    contiguous.
    """
    return ir.FixedLayout(value.device, value.dtype, [size_expression(s) for s in value.shape])


def add_table(table: Tensor, name: str) -> Any:
    """Add ``table``, a tensor computed while compiling, as a constant of the graph. Return its IR node."""
    return V.graph.add_tensor_constant(table, name)


def extern_call(overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the IR node of a call of ``overload`` as a whole, which Inductor treats as an opaque kernel."""
    return call_lowering(overload, known=False)(*args, **kwargs)


def trace_to_aten(fn: Callable[..., Any], values: Sequence[Any]) -> torch.fx.GraphModule:
    """Return an FX graph of ``fn`` on the fake tensors ``values``, functional and decomposed into ATen operators."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    # The fakes belong to this mode. Tensors made under another one cannot be combined with them.
    with V.fake_mode, torch.no_grad():
        return make_fx(torch.func.functionalize(fn), select_decomp_table(), tracing_mode="real")(*values)


def fixed_fake(value: Any) -> Any:
    """Return a fake tensor with the sizes and strides of the call that is compiled, as numbers. A symbolic number
    becomes its number in that call. Other values are returned unchanged.
    """
    if not isinstance(value, Tensor):
        return size_hint(value) if isinstance(value, SymInt) else value
    with V.fake_mode:
        return torch.empty_strided(
            [size_hint(s) for s in value.shape],
            [size_hint(s) for s in value.stride()],
            dtype=value.dtype,
            device=value.device,
        )


def fake_contiguous(shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a contiguous fake tensor of the sizes ``shape``, which may be symbolic, in the fake mode of the graph."""
    with V.fake_mode:
        return torch.empty(tuple(shape), dtype=dtype, device=device)


def real_tensor_like(value: Any, given: Tensor | None) -> Any:
    """Return a real tensor like the fake tensor ``value``, filled with ``given``, or with random values if ``given`` is
    None.

    It has the sizes, strides, dtype and device of ``value``. A symbolic number becomes that of the call that is
    compiled. Any other value is returned unchanged.
    """
    if not isinstance(value, Tensor):
        return size_hint(value) if isinstance(value, SymInt) else value
    sizes, strides = [size_hint(s) for s in value.shape], [size_hint(s) for s in value.stride()]
    made = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    if given is not None:
        return made.copy_(given)
    return made.normal_() if made.is_floating_point() else made.random_(0, 2)


def with_values(graph: torch.fx.GraphModule, values: Sequence[Any]) -> torch.fx.GraphModule:
    """Return ``graph`` with the fake result of each node for the inputs ``values`` stored in its ``meta``."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(graph, mode=V.fake_mode).propagate_dont_convert_inputs(*values)
    return graph


def inline_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Lower the nodes of ``graph`` with these inputs into the current graph and return the results."""
    from torch._inductor.codegen.subgraph import inline_subgraph_to_ir_nodes

    return inline_subgraph_to_ir_nodes(graph, list(inputs), "shiplap_reference")


def compile_graph(graph: torch.fx.GraphModule, values: Sequence[Any]) -> Callable[..., Any]:
    """Compile ``graph`` as :func:`write_graph` does, at once in this thread. Return it as a function of tensors."""
    return write_graph(graph, values)()


def write_graph(graph: torch.fx.GraphModule, values: Sequence[Any]) -> Callable[[], Callable[..., Any]]:
    """Lower ``graph`` and write its code in this thread. Return a function without parameters that compiles and loads
    the code in any thread, and returns it as a function of tensors. ``values`` are fake inputs of static sizes.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.graph import GraphLowering

    outer = V.graph
    nested = GraphLowering(
        gm=graph,
        example_inputs=list(values),
        shape_env=outer._shape_env,
        cpp_wrapper=False,
        aot_mode=False,
        is_inference=outer.is_inference,
        is_backward=outer.is_backward,
        name="shiplap_trial",
    )
    # Both settings would time kernels during a trial that is itself about to be timed.
    quiet = {"benchmark_fusion": False, "pipeline_max_autotune_gemm": False}
    with V.set_graph_handler(nested), config.patch({k: v for k, v in quiet.items() if hasattr(config, k)}):
        nested.run(*values)
        code, _ = nested.codegen()
    key, path = PyCodeCache.write(code.value)

    def load() -> Callable[..., Any]:
        """Compile and load the written code, and return it as a function of tensors."""
        module = PyCodeCache.load_by_key_path(key, path, attrs=dict(nested.constants))
        return lambda *args: module.call(list(args))

    return load


@contextmanager
def no_autotuning() -> Iterator[None]:
    """Return a context in which Inductor does not measure candidate kernels."""
    with config.patch(max_autotune=False, max_autotune_gemm=False):
        yield


@contextmanager
def without_graph_caches() -> Iterator[None]:
    """Return a context in which torch compiles graphs without its graph caches. Shiplap's lowering does not run for a
    cached graph. Kernels are still reused.
    """
    from torch._functorch import config as autograd

    graphs = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    with config.patch(graphs), autograd.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
        yield


# --- plain Triton functions as nodes ----------------------------------------------------------------------------------


# Since torch 2.13 Inductor may fuse later operations into a plain Triton function. The flag is off by default. Torch
# rewrites the one `tl.store` of a kernel, where the result is read by pointwise operations without other inputs.
FLAG = "epilogue_fusion_user_defined_triton_kernel"


def user_kernels_fuse() -> bool:
    """Return whether the installed torch can fuse into Triton kernels of users, and its flag for that is on."""
    return hasattr(config, FLAG) and bool(config.epilogue_fusion_user_defined_triton_kernel)


def emits_python_wrapper() -> bool:
    """Return whether Inductor writes a Python wrapper for this graph, and not a C++ wrapper or a package."""
    return not V.graph.cpp_wrapper and not V.graph.aot_mode


def user_kernel_node(
    kernel: Any,
    grid: Sequence[int],
    options: Mapping[str, int],
    arguments: Mapping[str, Any],
    tensors: Mapping[str, tuple[Any, Tensor]],
    output: tuple[str, Tensor],
) -> Any:
    """Add a launch of the Triton kernel to the graph, and return the IR node of its output.

    Args:
        kernel: a ``@triton.jit`` function, or one that Triton's interpreter runs.
        grid: the number of programs along each axis.
        options: the launch options of Triton, such as ``num_warps``.
        arguments: numbers and compile-time values by parameter.
        tensors: for each parameter, the node of a tensor and a fake tensor with the strides that it must have.
        output: the parameter to which the kernel writes, and a fake tensor like the result.
    """
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    name, fake = output
    # The kernel writes into a buffer of the graph, so that Inductor can plan its memory.
    out = empty_strided(list(fake.shape), list(fake.stride()), dtype=fake.dtype, device=fake.device)
    with_strides = ir.ExternKernel.require_exact_strides
    given = {parameter: with_strides(value, list(like.stride())) for parameter, (value, like) in tensors.items()}
    # Torch's lowering of a launch, since the parameters of its IR node differ from release to release.
    lowering.triton_kernel_wrap_(
        kernel_idx=kernel_side_table.add_kernel(_with_options(kernel, options)),
        constant_args_idx=kernel_side_table.add_constant_args(dict(arguments)),
        grid=[tuple([*grid, 1, 1][:3])],
        tma_descriptor_metadata={},
        kwargs={**given, name: out},
    )
    return out


def _with_options(kernel: Any, options: Mapping[str, int]) -> Any:
    """Return a Triton kernel with the launch options as its only autotuning config, as Dynamo passes kernels."""
    import triton
    from triton.runtime import JITFunction

    jitted = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn)
    return triton.autotune(configs=[triton.Config({}, **options)], key=[])(jitted) if options else jitted
