"""Inductor's templates, one choice per config, and choices before their turn.

Buffers that are not lowered yet have stand-ins, and Inductor's workers compile the kernels of choices. IR nodes,
choices and graphs are opaque to callers.
"""

from __future__ import annotations

import ctypes
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.autotune_process import TritonBenchmarkRequest
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.cpp_gemm_template import gen_2d_view_of_epilogue_buf
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, TritonTemplateKernel
from torch._inductor.utils import parallel_num_threads
from torch._inductor.virtualized import V

from shiplap.torch_private.inductor_lowering import evaluate_size, size_expression

WORD = re.compile(r"[A-Za-z_]\w*")

# --- C++ templates ----------------------------------------------------------------------------------------------------


def cpp_choice(
    name: str,
    source: str,
    arguments: Mapping[str, Any],
    layout: Any,
    values: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Any:
    """Return a candidate kernel that renders the C++ template ``source``. Inductor chooses among such candidates.

    ``name`` is the name of the template, and ``layout`` that of the output. ``arguments`` holds input buffers by name.
    ``values`` and ``config`` are variables of the template. The candidate has an attribute ``sized``, a function that
    returns the last arguments of the kernel, which are sizes. Its argument is a function that evaluates a size, such as
    ``evaluate_size`` with values.
    """
    template = _Template(name, source, dict(arguments), layout, {**values, **config})
    made = CppTemplate.generate(template)
    sizes = tuple(template.alone.args.sizevars)  # as the kernel takes them, after the buffers
    made.sized = lambda evaluate: [ctypes.c_ulonglong(evaluate(size)) for size in sizes]
    return made


class _Template(CppTemplate):
    """A template that is rendered twice. The first rendering has no epilogues, and is verified and timed. The second
    has epilogues, and is made for Inductor's scheduler.
    """

    def __init__(self, name: str, source: str, arguments: dict[str, Any], layout: Any, values: dict[str, Any]) -> None:
        """Make a C++ template from its source, its input buffers, the layout of its output and its variables."""
        super().__init__(name, list(arguments.values()), layout, parallel_num_threads())
        self.source, self.arguments, self.values = source, arguments, values
        self.alone: Any = None  # the kernel of the first rendering, which has no neighbours

    def render(  # type: ignore[override]
        self,
        kernel: Any,
        template_buffer_node: Any = None,
        flag_template_buffer_has_other_users: bool | None = None,
        epilogue_nodes: list[Any] | None = None,
        **_: Any,
    ) -> str:
        """Return the C++ source of the kernel, rendered from the template for Inductor's scheduler.

        ``template_buffer_node`` is the buffer of the result in the second rendering, and None in the first.
        ``flag_template_buffer_has_other_users`` is true if nodes outside of the kernel read the result as well.
        ``epilogue_nodes`` are the fused neighbours that are computed when the result is stored.
        """
        self.alone = self.alone or kernel
        # The scheduler passes the buffer in its second rendering only.
        raw = self.output_node if template_buffer_node is None else template_buffer_node
        store = _Store(kernel, raw, list(epilogue_nodes or []), bool(flag_template_buffer_has_other_users))

        def def_kernel() -> str:
            """Return the C++ definition line of the kernel with its inputs and outputs."""
            text: str = kernel.def_kernel(inputs=self.arguments, outputs=store.outputs, aliases=store.aliases)
            return text

        helpers = {
            "header": self.header().getvalue,
            "def_kernel": def_kernel,
            "store_output": store.output,
            "tile": store.tile,
            "size": lambda n, d: kernel.size(self._buffer(n, raw), d),
            "stride": lambda n, d: kernel.stride(self._buffer(n, raw), d),
            "index": lambda n, *at: kernel.index(self._buffer(n, raw), list(at)),
            "rank": lambda n: len(self._buffer(n, raw).get_size()),
            "adjacent": lambda n, d: _is_one(self._buffer(n, raw).get_stride()[d]),
            "divisible": lambda n, d, by: _always_divisible(self._buffer(n, raw).get_size()[d], by),
            "dtype": lambda n: kernel.dtype(self._buffer(n, raw)),
            "num_threads": self.num_threads,
        }
        text: str = self._template_from_string(self.source).render(**helpers, **self.values)
        return text

    def _buffer(self, name: str, raw: Any) -> Any:
        """Return the buffer of the argument ``name``. For ``"out"``, the name of the output, return ``raw``."""
        return raw if name == "out" else self.arguments[name]


class _Store:
    """The output of a C++ template's kernel, from which the C++ that stores a tile of results is generated.

    The tile is stored as computed, or after the fused epilogues, or both. If the results as computed have another
    reader, they are stored first, and the epilogues read them back. If the epilogues got the tile itself, Inductor
    would remove that buffer as unused.
    """

    def __init__(self, kernel: Any, raw: Any, epilogues: list[Any], keep_raw: bool) -> None:
        """Prepare to store the kernel's result ``raw`` with the fused ``epilogues``.

        If ``keep_raw`` is true, the result without them is stored as well. Otherwise only the fused result is stored.
        """
        self.kernel, self.raw, self.epilogues = kernel, raw, epilogues
        self.keep_raw = keep_raw and bool(epilogues)
        self.last = epilogues[-1] if epilogues else raw
        self.outputs = {"raw": raw, "out": self.last} if self.keep_raw else {"out": self.last}
        self.aliases = {raw.get_name(): self.last.get_name()} if epilogues and not self.keep_raw else {}

    def tile(self, name: str, *sizes: Any, dtype: str = "float32") -> str:
        """Return C++ that declares a buffer ``name`` with the dims ``sizes`` and the dtype ``dtype`` on the stack.
        :meth:`output` can store it.
        """
        text: str = self.kernel.define_stack_allocated_buffer(name, list(sizes), getattr(torch, dtype))
        return text

    def output(self, name: str, *ranges: tuple[str, str]) -> str:
        """Return C++ that stores the tile ``name`` into the output, with the fused neighbours applied to it. ``ranges``
        has a pair of C++ expressions for each dim, the start and the end of the tile.

        If there are fewer ranges than the output has dims, its leading dims are merged.
        """
        aliases, renamed = rename_sympy_names(ranges)
        return f"{{ {aliases}{self._stores(name, renamed)} }}"

    def _stores(self, name: str, ranges: Sequence[tuple[str, str]]) -> str:
        """Return the C++ statements that store the tile ``name`` into the output, with the fused neighbours applied.
        ``ranges`` is as for :meth:`output`. A result that is also needed without the neighbours is stored as well.
        """
        kernel = self.kernel
        result = self.raw if len(self.raw.get_size()) == len(ranges) else _merge_leading_dims(self.raw, len(ranges))
        view, reindexers = result, list[Any]()
        if self.epilogues:  # an epilogue may see the result under another shape
            none: list[Any] = [None] * len(self.epilogues)
            view, reindexers = gen_2d_view_of_epilogue_buf(self.last, result, self.epilogues, [], none)
        tile = kernel.slice_nd(kernel.local_buffers[name], [("0", f"{end} - {start}") for start, end in ranges])
        out = kernel.slice_nd(view, list(ranges))
        common = {"offsets": tuple(start for start, _ in ranges), "reindexers": reindexers}
        if self.keep_raw:
            raw = kernel.slice_nd(result, list(ranges))
            first = kernel.store_output(raw, tile)
            second = kernel.store_output(out, raw, self.raw, self.epilogues, **common)
            return f"{{ {first} }}\n{{ {second} }}"
        return str(kernel.store_output(out, tile, self.raw, self.epilogues, **common))


def rename_sympy_names(ranges: Sequence[tuple[str, str]]) -> tuple[str, list[tuple[str, str]]]:
    """Return C++ that defines second names for some variables in ``ranges``, and ``ranges`` with the second names.

    Inductor parses ranges by sympy, in which some names mean something else (``N``, ``E``, ``beta``). Variables with
    such names are renamed.
    """
    taken = {word for pair in ranges for text in pair for word in WORD.findall(str(text)) if hasattr(sympy, word)}
    if not taken:
        return "", list(ranges)
    pattern = re.compile(rf"\b({'|'.join(sorted(taken))})\b")
    renamed = [(pattern.sub(r"\1_of_template", str(a)), pattern.sub(r"\1_of_template", str(b))) for a, b in ranges]
    return "".join(f"const auto {n}_of_template = {n}; " for n in sorted(taken)), renamed


def _always_divisible(size: Any, by: int) -> bool:
    """Return whether ``by`` is known to divide ``size`` in every call of the compiled code. Fixed tiles then leave no
    tail.
    """
    return bool(V.graph.sizevars.statically_known_multiple_of(size, by))


def _is_one(stride: Any) -> bool:
    """Return whether a stride is known to be 1 in every call of the compiled code."""
    return bool(V.graph.sizevars.statically_known_equals(stride, 1))


def _merge_leading_dims(buffer: Any, rank: int) -> Any:
    """Return an IR view of the contiguous buffer ``buffer`` with ``rank`` dims. Its leading dims are merged into the
    first.
    """
    sizes = list(buffer.get_size())
    cut = len(sizes) - rank + 1
    sizes = [sympy.Mul(*sizes[:cut]), *sizes[cut:]]
    layout = ir.FixedLayout(buffer.get_device(), buffer.get_dtype(), sizes)
    return ir.ReinterpretView(data=ir.StorageBox(buffer), layout=layout)


# --- Triton templates: without a GPU, Triton's interpreter runs them --------------------------------------------------


class _Quoted(str):
    """The value of a compile-time constant, as a string that ``format`` returns with quotes. Inductor writes such
    values into the kernel by ``format``.
    """

    def __format__(self, spec: str) -> str:
        """Return the ``repr`` of the text. A string value is then written into Triton code with quotes."""
        return repr(str(self))


AXES = 3  # of a grid
SPREAD = re.compile(r"tl\.load\((\w+) \+ \(tl\.broadcast_to\((\w+), \[[\w, ]+\]\)\), mask\b")


class _Kernel(TritonTemplateKernel):
    """A template kernel that loads values of one row or one column once, not once for each element of the tile.

    Inductor broadcasts every index of an epilogue to the tile. The scale and shift of a batch norm, spread over all
    lanes, take 70 registers and up to a third of the kernel's time (H200, 2026-11-21). An index ``i`` is not broadcast
    if the template defines its bound, in ``i_mask``.
    """

    bounded: frozenset[str] = frozenset()
    latest: Any = None  # the one that was rendered last

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the kernel and store it as the latest one of its template."""
        super().__init__(*args, **kwargs)
        type(self).latest = self

    def size(self, name: str | None, index: int) -> Any:
        """Return the source code of a tensor's size at ``index``. It is in brackets unless it is one name or number."""
        return _bracketed(super().size(self._named(name), index))

    def stride(self, name: str | None, index: int | None = None) -> Any:
        """Return the source code of a tensor's stride at ``index``, in brackets unless it is one name or number. If
        ``index`` is None, return torch's source code of all strides.
        """
        parent: Any = super()
        text = parent.stride(self._named(name), index)
        return text if index is None else _bracketed(text)

    def _named(self, name: str | None) -> str | None:
        """Return the name by which torch knows a tensor. For the output, which templates call ``out``, it is None,
        unless an input is called ``out``.
        """
        return None if name == "out" and name not in self.named_input_nodes else name

    def _register_hook(self, hook_name: str, hook_fn: Callable[[], str], *args: Any, **kwargs: Any) -> Any:
        """Register ``hook_fn``, which returns the code for a placeholder of the rendered source. For the placeholder of
        the output, narrow the loads in that code by ``narrow_loads``.
        """
        if hook_name.startswith("<STORE_OUTPUT"):
            return super()._register_hook(hook_name, lambda: narrow_loads(hook_fn(), self.bounded), *args, **kwargs)
        return super()._register_hook(hook_name, hook_fn, *args, **kwargs)


def _bracketed(text: str) -> str:
    """Return ``text``, the source code of a size, in brackets unless it is one name or number. An expression such as
    ``at % {{size("out", 0)}}`` in a template then uses it as one value.
    """
    return text if re.fullmatch(r"\w+", text) else f"({text})"


def narrow_loads(code: str, bounded: frozenset[str]) -> str:
    """Return the Triton code ``code`` in which loads of single rows or columns are not broadcast to a tile first. Only
    loads at an index variable named in ``bounded`` change. Each index ``i`` of these has its bound in ``i_mask``.
    """

    def one(match: re.Match[str]) -> str:
        """Return the matched load of Triton code without the broadcast to a tile. Return it unchanged if its index is
        not in ``bounded``.
        """
        pointer, index = match.groups()
        return f"tl.load({pointer} + ({index}), {index}_mask" if index in bounded else match[0]

    return SPREAD.sub(one, code)


def triton_choice(
    name: str,
    source: str,
    grid: Callable[..., tuple[Any, Any, Any]],
    sizes: Sequence[Any],
    inputs: Sequence[Any],
    layout: Any,
    config: Mapping[str, Any],
) -> Any:
    """Return a candidate kernel for Inductor's choice that renders the Triton template ``source`` for these inputs and
    this config.

    The attribute ``sized`` of the candidate is a function. It gets a function that evaluates a size, and returns the
    last arguments of the kernel. ``grid(*sizes, config, cdiv=)`` is evaluated on numbers and on expressions. Template
    names are global to the process and asserted unique, so a ``name`` must always be used with one source.

    Raises:
        NotImplementedError: with torch's message, if the template cannot serve these inputs.
    """
    template = TritonTemplate.all_templates.get(name)
    if template is None:
        template = TritonTemplate(name, grid=SymbolicGridFn(grid), source=source)
        bounded = frozenset(re.findall(r"^ *(\w+)_mask = ", source, re.MULTILINE))
        # A class of its own, since ``bounded`` and ``latest`` belong to one template.
        template.kernel_type = type("Kernel", (_Kernel,), {"bounded": bounded})
    options: dict[str, Any] = {"num_stages": 2, "num_warps": 4}
    options |= {k: _Quoted(v) if isinstance(v, str) else v for k, v in config.items()}
    choices: list[Any] = []
    problem = template.maybe_append_choice(
        choices, input_nodes=tuple(inputs), layout=layout, call_sizes=list(sizes), **options
    )
    if problem is not None:
        raise problem
    if not choices:
        raise NotImplementedError("a size of zero")
    made, numbers = choices[0], tuple(template.kernel_type.latest.args.sizevars)  # as the kernel takes them

    def sized(evaluate: Callable[[Any], int]) -> list[Any]:
        """Return the last arguments of the kernel (sizes, workspace and grid), with sizes computed by ``evaluate``."""
        workspace = made.bmreq.extra_args[len(numbers) : -AXES]
        programs = template.grid(*map(evaluate, sizes), options)
        return [*map(evaluate, numbers), *workspace, *programs]

    made.sized = sized
    return made


# --- choices before their turn ----------------------------------------------------------------------------------------


log = logging.getLogger(__name__)
PATIENCE = 60.0  # seconds for the worker processes to start
_futures: dict[str, Any] = {}  # futures; None once it is done
_loaded: set[str] = set()  # of those, the kernels that a worker process has compiled


def current_graph() -> Any:
    """Return Inductor's graph that is being lowered. It is the same object for all of its nodes, and weak references to
    it are possible.
    """
    return V.graph


def nodes_behind(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the nodes after ``node`` that call operators, in the order in which they are lowered."""
    while (node := node.next).op != "root":
        if node.op == "call_function":
            yield node


@contextmanager
def lowering_at(node: torch.fx.Node) -> Iterator[None]:
    """Return a context in which ``node`` is the node being lowered. Lowerings read the fake tensors of their arguments
    from it.
    """
    # Lowerings read the current node, for example to find the fakes of their arguments.
    before = V.graph.current_node
    V.graph.current_node = node
    try:
        yield
    finally:
        V.graph.current_node = before


@contextmanager
def stand_ins(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return a context that yields a mapping from name to IR input, one for each of the fake tensors in ``values``.

    The IR inputs are buffers of the sizes, strides and dtypes of these tensors, with which a kernel can be rendered on
    its own. They are removed from the graph at the end.
    """
    made, known = {}, V.graph.name_to_buffer
    for name, value in values.items():
        if isinstance(value, Tensor):
            sizes, strides = ([size_expression(s) for s in of] for of in (value.shape, value.stride()))
            layout = ir.FixedLayout(value.device, value.dtype, sizes, strides)
            # Inductor finds the dtype of a buffer in the graph, by its name.
            known[f"shiplap_ahead_{name}"] = buffer = ir.InputBuffer(name=f"shiplap_ahead_{name}", layout=layout)
            made[name] = ir.TensorBox.create(buffer)
    try:
        yield made
    finally:
        for name in made:
            known.pop(f"shiplap_ahead_{name}", None)


def kernel_source(choice: Any) -> str:
    """Return the source code of the kernel of ``choice``, a candidate of Inductor's autotuning, as it is compiled."""
    request = choice.bmreq
    return Path(request.module_path).read_text() if _is_triton(choice) else str(request.source_code)


def _is_triton(choice: Any) -> bool:
    """Return whether ``choice``, a candidate kernel of Inductor's autotuning, is a Triton kernel and not one in C++."""
    return isinstance(choice.bmreq, TritonBenchmarkRequest)


def compile_apart(choice: Any) -> bool:
    """Start to compile the kernel of ``choice``, a candidate of Inductor's autotuning, in the background, unless that
    was started before.

    Return whether it was started, now or before. It is not started if Inductor has no worker processes or threads for
    it. Triton's compiler runs in a worker process of Inductor. The compiler of C++ is a process itself, for which a
    thread waits.
    """
    name = _kernel_name(choice)
    # A name stays in the table after its result was taken, so that no kernel is compiled twice.
    if name in _futures:
        return True
    if not _is_triton(choice):
        future: Any = AsyncCompile.pool().submit(choice.precompile) if get_compile_threads() > 1 else None
    elif choice.layout.device.type != "cpu" and _has_workers():  # the CPU's would be interpreted
        future = AsyncCompile().triton(kernel_name=choice.bmreq.kernel_name, source_code=kernel_source(choice))
    else:
        future = None
    if future is not None:
        _futures[name] = future
    return future is not None


def _kernel_name(choice: Any) -> str:
    """Return a string that is the same for choices with the same kernel. It is the path of a Triton kernel's source, or
    the hash of a C++ kernel's source.
    """
    return str(choice.bmreq.module_path if _is_triton(choice) else hash(choice.bmreq.source_code))


def _has_workers() -> bool:
    """Return whether Inductor has worker processes to compile in. They get at most ``PATIENCE`` seconds to start."""
    if get_compile_threads() < 2:
        return False
    # Inductor starts its workers in the background, so the first graph may be lowered before they are ready.
    end = time.monotonic() + PATIENCE
    while not AsyncCompile.use_process_pool():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def precompile_kernel(choice: Any) -> None:
    """Compile the kernel of ``choice``, a candidate of Inductor's autotuning, now. If ``compile_apart`` has compiled it
    in the background, load that one.
    """
    name = _kernel_name(choice)
    kernel = _compiled_kernel(name)
    if kernel is not None:
        request = choice.bmreq
        module = PyCodeCache.load_by_key_path(request.module_cache_key, request.module_path)
        setattr(module, request.kernel_name, kernel)
        _loaded.add(name)
    elif name not in _loaded:
        choice.precompile()


def run_function(choice: Any, inputs: Sequence[Tensor], out: Tensor, sizes: Mapping[Any, int]) -> Callable[[], Any]:
    """Return a function without arguments that runs the compiled kernel of ``choice`` on the tensors ``inputs`` and
    writes ``out``.

    ``choice`` is a candidate of Inductor's autotuning. Size symbols have the values in ``sizes``, or else those of the
    compiled call.
    """
    request = choice.bmreq
    if sizes:
        request = copy(request)
        request.extra_args = choice.sized(lambda size: evaluate_size(size, sizes))
    if not _is_triton(choice) and request.DLL is not None:  # looking for the library again takes 10 ms
        addresses = [t.data_ptr() for t in (*inputs, out)]
        return partial(getattr(request.DLL, request.kernel_name), *addresses, *request.extra_args)
    run: Callable[[], Any] = request.make_run_fn(*inputs, out=out)
    return run


def kernel_library(choice: Any) -> Path | None:
    """Return the path of the shared library of a compiled C++ choice. Return None for a Triton choice, or before
    compiling.
    """
    loaded = None if _is_triton(choice) else choice.bmreq.DLL
    return None if loaded is None else Path(loaded._name)


def _compiled_kernel(name: str) -> Any:
    """Return the Triton kernel that a worker process has compiled, or None if there is none or it failed. A C++ kernel
    is found in the cache instead.
    """
    future = _futures.get(name)
    if future is None:
        return None
    _futures[name] = None
    try:
        return future.result()
    except Exception:  # compiling here raises the same error again
        log.debug("not compiled apart: %s", name, exc_info=True)
        return None
