"""Nodes of FX graphs in Inductor's passes: their values, operators and signatures, and how new nodes are made.

``make_fx`` records every program, and takes 10 ms and more for a few calls, because of proxies and of operators that
are decomposed for their shapes. :func:`record_graph` records simple programs as Dynamo writes them ahead of autograd,
and returns None for the others. The compiler is imported when the first graph is handled.
"""

from __future__ import annotations

import inspect
import operator
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from shiplap.torch_private.graph_objects import leaves

if TYPE_CHECKING:
    from torch._ops import OpOverload


# --- a function of tensors recorded as a graph ------------------------------------------------------------------------


FACTS = frozenset({"size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "__len__"})
FACTS |= {"is_contiguous", "is_floating_point", "is_complex"}
FACTORIES = frozenset({"full", "zeros", "ones", "empty", "arange"})
VIEW_ATTRIBUTES = frozenset({"T", "mT"})  # attributes that are tensors
RECORDED_OPERATORS = {"__eq__": operator.eq, "__ne__": operator.ne, "__or__": operator.or_, "__and__": operator.and_}
REFLECTED = {"__rsub__": operator.sub, "__rtruediv__": operator.truediv, "__rdiv__": operator.truediv}
PLAIN = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class _Unusual(Exception):
    """An error that says that ``record_graph`` cannot record a call."""


def record_graph(fn: Callable[..., Any], values: Sequence[Any]) -> Graph | None:
    """Return an FX graph recorded from the torch functions that ``fn`` calls on ``values``, or None if a call is not
    recorded.

    ``values`` are fake tensors of fixed sizes. The graph's output is a list of the results. A call is not recorded if
    it is unknown, writes to a tensor, switches a mode or makes a tensor of constants. The errors of ``fn`` are raised.
    """
    if not all(isinstance(v, Tensor) and all(type(n) is int for n in v.shape) for v in values):
        return None
    held = _Recorder(values)
    try:
        with held:
            results = leaves(fn(*values))
        if held.switched:
            return None
        held.graph.output([held.node(r) for r in results])
    except _Unusual:
        return None
    return held.graph


class _Recorder(TorchFunctionMode):
    """A torch mode that records the calls of torch functions as the nodes of a graph."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        """Start a graph with one placeholder for each of the tensors ``values``."""
        super().__init__()
        self.graph = Graph()
        self.switched = False  # whether something else than tensors came of a call, as of one that switches a mode
        self.nodes: dict[int, tuple[Tensor, Node]] = {}  # by identity, which lasts while the tensor is held
        for number, given in enumerate(values):
            self._hold(given, self.graph.placeholder(f"arg{number}_1"))

    def _hold(self, made: Tensor, node: Node) -> None:
        """Store ``node`` as the node that computes the tensor ``made``."""
        node.meta["val"] = made
        self.nodes[id(made)] = made, node

    def node(self, given: Any) -> Any:
        """Return the node of a tensor, or any other value itself. Raise ``_Unusual`` if no graph can hold it."""
        if isinstance(given, Tensor):
            if id(given) not in self.nodes:
                raise _Unusual("a tensor from elsewhere")
            return self.nodes[id(given)][1]
        if not isinstance(given, PLAIN) and given is not Ellipsis:
            raise _Unusual(f"{type(given).__name__} as an argument")
        return given

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call the torch function ``func`` and record it as a node of the graph. Raise ``_Unusual`` for a call that
        writes to a tensor or is unknown.
        """
        named = kwargs or {}
        name = str(getattr(func, "__name__", ""))
        # Recorded graphs are functional. A write would need the aliases of the tensor, which are not tracked here.
        writes = (name.endswith("_") and not name.endswith("__")) or "out" in named or named.get("inplace")
        if writes:
            raise _Unusual(f"{name} writes")
        result = func(*args, **named)
        if isinstance(result, Tensor):
            self._hold(result, self._call(func, name, args, named))
        elif isinstance(result, (tuple, list)) and result and all(isinstance(r, Tensor) for r in result):
            whole = self._call(func, name, args, named)
            whole.meta["val"] = result
            for number, part in enumerate(result):
                self._hold(part, self.graph.call_function(operator.getitem, (whole, number)))
        elif name != "__get__" and name not in FACTS:
            self.switched = True  # nothing is raised: a mode that a statement has entered would stay in force
        return result

    def _call(self, func: Any, name: str, args: Sequence[Any], named: dict[str, Any]) -> Node:
        """Append a node for a call of a torch function and return it. The node calls a function, a method or an
        operator, or reads an attribute, as users write the call. Raise ``_Unusual`` if the call cannot be recorded.
        """
        given = map_aggregate((tuple(args), dict(named)), self.node)
        assert isinstance(given, tuple)
        passed, named = given
        if name == "__get__" and (attribute := str(func.__self__.__name__)) in VIEW_ATTRIBUTES:
            return self.graph.call_function(getattr, (passed[0], attribute))
        if name == "__getitem__":
            return self.graph.call_function(operator.getitem, passed)
        if name in RECORDED_OPERATORS:
            return self.graph.call_function(RECORDED_OPERATORS[name], passed)
        if name in REFLECTED and len(passed) == 2:
            # ``1 - x`` arrives as ``x.__rsub__(1)``.
            return self.graph.call_function(REFLECTED[name], (passed[1], passed[0]))
        if name.startswith("__"):
            raise _Unusual(name)
        if isinstance(func, types.MethodDescriptorType) or getattr(Tensor, name, None) is func:
            return self.graph.call_method(name, passed, named)
        if any(func is f for f in _public_functions(name)) and (name in FACTORIES or _has_nodes(passed, named)):
            return self.graph.call_function(func, passed, named)
        raise _Unusual(name)


def _public_functions(name: str) -> Iterator[Any]:
    """Yield the attribute ``name``, or None if missing, of each public module of torch with functions of tensors."""
    for module in (torch, torch.nn.functional, torch.special, torch.linalg):
        yield getattr(module, name, None)


def _has_nodes(passed: Any, named: Any) -> bool:
    """Return whether a node is among the positional arguments ``passed`` or the keyword arguments ``named``."""
    nodes: list[Node] = []
    map_aggregate((passed, named), lambda n: nodes.append(n) if isinstance(n, Node) else None)
    return bool(nodes)


# --- nodes ------------------------------------------------------------------------------------------------------------


def node_value(node: Node) -> Any:
    """Return the fake value of a node, or None if it has none. The key of ``node.meta`` with this value depends on the
    stage of the compiler.
    """
    return node.meta.get("val", node.meta.get("example_value"))


def set_value(node: Node, value: Any, level: str) -> None:
    """Store the fake value of ``node`` under the key of ``node.meta`` that torch's compiler reads at the stage
    ``level``.

    The key is ``example_value`` for ``"pre-grad"``, and ``val`` for other stages.
    """
    node.meta["example_value" if level == "pre-grad" else "val"] = value


def overload_of(node: Node) -> OpOverload | None:
    """Return the operator overload that ``node`` calls, or None if it calls a method or a Python function."""
    target = node.target
    return target if node.op == "call_function" and isinstance(target, torch._ops.OpOverload) else None


def schemas_of(node: Node) -> list[Any]:
    """Return the schemas of the operator that ``node`` calls. An overload has one, a packet of overloads several, and a
    method or Python function none.
    """
    target: Any = node.target if node.op == "call_function" else None
    if isinstance(target, torch._ops.OpOverloadPacket):
        return list(target._schemas.values())
    return [target._schema] if isinstance(target, torch._ops.OpOverload) else []


def is_aten(node: Node) -> bool:
    """Return whether ``node`` calls an overload or packet of ATen. A packet may have overloads that write to tensors
    and others that do not.
    """
    return any(schema.name.startswith("aten::") for schema in schemas_of(node))


def whole_mutation(node: Node) -> tuple[Any, dict[str, Any]] | None:
    """Return the operator and its arguments by name if ``node`` is a functionalised call that writes to whole tensors.
    Otherwise return None. Such a call is torch's ``auto_functionalized`` or ``auto_functionalized_v2``. No two of its
    written tensors are views of one base.
    """
    from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

    bases = node.kwargs.get("_all_bases")
    if node.target not in (auto_functionalized, auto_functionalized_v2):
        return None
    operator_: Any = node.args[0]
    # A graph has the defaults of arguments that were left out, a pattern has what its author wrote.
    defaults = {a.name: a.default_value for a in operator_._schema.arguments if a.has_default_value()}
    if node.target is auto_functionalized:
        return operator_, defaults | node.kwargs
    if not isinstance(bases, (list, tuple)):
        return None
    names = [a.name for a in operator_._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    # Only where each tensor that is written to is a base of its own, results of both forms have the same numbers.
    numbers = [node.kwargs.get(f"_{name}_base_index") for name in names]
    known = {"_all_bases", *(f"_{name}_base_index" for name in names)}
    plain = {k: v for k, v in node.kwargs.items() if k not in known}
    if numbers != list(range(len(bases))) or any(k.startswith("_") for k in plain):
        return None
    return operator_, {**defaults, **plain, **dict(zip(names, bases, strict=True))}


def separate_written_views(graph: Graph, operators: Collection[Any], level: str) -> None:
    """Change functionalised calls of ``operators`` that write to a tensor through a view of all its elements. They then
    write to the view itself.

    ``level`` is the compiler's stage of the graph. The original call (torch's ``auto_functionalized_v2``) holds the
    shapes of the view as numbers and returns the base. After the change, nodes that view the result again read it
    directly. Views of the graph's arguments are left, since Inductor writes to an argument in place only if the
    argument is the base.
    """
    from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

    reshape = torch.ops.aten.reshape.default
    # A list, since the loop adds and erases nodes.
    for node in list(graph.nodes):
        if node.target is not auto_functionalized_v2 or node.args[0] not in operators:
            continue
        schema, kwargs, values = node.args[0]._schema, dict(node.kwargs), list(node_value(node))
        names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        bases, first = list(kwargs["_all_bases"]), max(1, len(schema.returns))
        if [kwargs.get(f"_{name}_base_index") for name in names] != list(range(len(bases))):
            continue
        seen = {
            at: view
            for at, name in enumerate(names)
            if bases[at].op.startswith("call")
            if (view := _view_of_all(kwargs, name, bases[at])) is not None
        }
        for at, (size, held) in seen.items():
            with graph.inserting_before(node):
                bases[at] = graph.call_function(reshape, (bases[at], size))
            set_value(bases[at], held, level)
            # The result has memory of its own: with that of the base, Inductor would see later reads of the base.
            whole = values[first + at]
            values[first + at] = whole.view(held.shape)
            for part in ("size", "stride", "storage_offset"):
                del kwargs[f"_{names[at]}_{part}"]
            for result in [u for u in node.users if u.target is operator.getitem and u.args[1] == first + at]:
                readers = list(result.users)
                set_value(result, values[first + at], level)
                with graph.inserting_after(result):
                    back = graph.call_function(reshape, (result, list(whole.shape)))
                set_value(back, whole, level)
                same = [r for r in readers if operator_name(r.target) in ("aten.view", "aten.reshape")]
                same = [r for r in same if [*map(str, node_value(r).shape)] == [*map(str, held.shape)]]
                for reader in same:
                    reader.replace_all_uses_with(result)
                    graph.erase_node(reader)
                for reader in [r for r in readers if r not in same]:
                    reader.replace_input_with(result, back)
                if not back.users:
                    graph.erase_node(back)
        if seen:
            node.kwargs = {**kwargs, "_all_bases": bases}
            set_value(node, tuple(values), level)
            if eager := node.meta.get("eager_input_vals"):  # torch pairs them with the arguments of the call
                kept = {n: v for n, v in eager[1].items() if n in kwargs}
                of_bases = [seen[i][1] if i in seen else base for i, base in enumerate(kept["_all_bases"])]
                kept["_all_bases"] = type(kept["_all_bases"])(of_bases)
                node.meta["eager_input_vals"] = eager[0], kept


def _view_of_all(kwargs: Mapping[str, Any], name: str, base: Node) -> tuple[Any, Tensor] | None:
    """Return the size and fake value of the view through which a functionalised call writes to its argument ``name``.

    ``kwargs`` are those of the call. Return None unless the view has all elements of ``base`` in their order.
    """
    size = kwargs.get(f"_{name}_size")
    if size is None:
        return None
    sizes, strides = (
        [node_value(n) if isinstance(n, Node) else n for n in kwargs[f"_{name}_{part}"]] for part in ("size", "stride")
    )
    try:
        held: Tensor = node_value(base).view(sizes)
    except RuntimeError:  # the view has fewer elements
        return None
    whole = [*map(str, held.stride())] == [*map(str, strides)] and kwargs[f"_{name}_storage_offset"] == 0
    return (list(size), held) if whole else None


def operator_name(target: Any) -> str:
    """Return the name of an operator as users write it, such as ``aten.gelu``, or that of a Python function."""
    if not isinstance(target, torch._ops.OpOverload):
        return str(getattr(target, "__name__", target))
    namespace, _, name = target._schema.name.partition("::")
    return f"aten.{name}" if namespace in ("aten", "prims") else f"{namespace}::{name}"


def size_hint_of(size: Any) -> int:
    """Return the value of a size in the call for which the graph is compiled. Return 0 for a data-dependent size."""
    if isinstance(size, int):
        return size
    value = size.node.hint
    return int(value) if value is not None else 0


def carry_over(new: Node, old: Node) -> None:
    """Copy source line, module stack and the partitioner's tags from ``old`` to ``new``, which replaces it."""
    # Without these, error messages and profiles would not show the user's line for the new node.
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr", "partitioner_tag", "custom"):
        if key in old.meta:
            new.meta.setdefault(key, old.meta[key])


@contextmanager
def autocast_at(node: Node) -> Iterator[None]:
    """Return a context under the autocast that is active at ``node`` in a graph from before autograd."""
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

    entered: dict[Node, tuple[Any, ...]] = {}
    for before in takewhile(lambda n: n is not node, node.graph.nodes):
        if before.target is _enter_autocast:
            entered[before] = before.args
        elif before.target is _exit_autocast:
            # An exit has the node of its entry as argument.
            entered.pop(before.args[0])
    with ExitStack() as stack:
        for args in entered.values():
            stack.enter_context(torch.autocast(*args))
        yield


def trace_to_nodes(fn: Callable[..., Any], values: Sequence[Any], level: str) -> Graph:
    """Return ``fn``, traced on the fake tensors ``values`` under their own fake mode, as a graph.

    The nodes call the operators that Inductor's graphs have at ``level``, a stage of the compilation such as
    ``"pre-grad"``. At the stage before autograd no operator is decomposed. The output is the flattened list of results.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    ahead = level == "pre-grad"
    table = None if ahead else select_decomp_table()

    def flat(*args: Any) -> list[Any]:
        """Return the results of the traced function as a flat list."""
        return leaves(fn(*args))

    mode = next(v.fake_mode for v in values if hasattr(v, "fake_mode"))
    if ahead:
        with mode, torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = record_graph(fn, values)
        if graph is not None:
            graph.eliminate_dead_code()
            return graph
    with mode, enable_python_dispatcher(), torch.set_grad_enabled(ahead), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = make_fx(flat, table, tracing_mode="real", pre_dispatch=ahead)(*values)
    made.graph.eliminate_dead_code()
    return made.graph


def count_rewrite(rewrite: str, nodes: int) -> None:
    """Add one application of the rewrite named ``rewrite``, which replaced ``nodes`` nodes, to Inductor's counters."""
    from torch._dynamo.utils import counters

    for name, more in (("pattern_matcher_count", 1), ("pattern_matcher_nodes", nodes), (f"shiplap_{rewrite}", 1)):
        counters["inductor"][name] += more


# --- the operator of a node, in any spelling of torch, and the names of its arguments ---------------------------------


class OperatorParameter(NamedTuple):
    """A parameter of an operator.

    ``default`` is ``inspect.Parameter.empty`` if there is none. ``numbers`` is the length of a list that may be given
    as one number (``stride=2`` of a ``conv2d``), and 0 for other parameters.
    """

    default: Any = inspect.Parameter.empty
    numbers: int = 0


OperatorSignature = dict[str, OperatorParameter]

VIEWS = frozenset({"view", "reshape", "_unsafe_view"})  # the same elements in the same order
OPERATORS = {"truediv": "div", "mod": "remainder", "and_": "bitwise_and", "or_": "bitwise_or", "invert": "bitwise_not"}
NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}  # torch takes these for its own
_C: Any = torch._C  # its stubs lack some modules
HOMES = (torch, torch.nn.functional, _C._nn, _C._linalg, torch.Tensor)


def operator_of(node: Node) -> Any:
    """Return what ``node`` calls, independent of how the call is written.

    The result is a name such as ``"linear"`` for torch's own operators, and a name ``"ns::name"`` for other ops. For
    any other call it is the called object.
    """
    target = node.target
    if node.op == "call_method":
        return _canonical_name(str(target))
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet = target if isinstance(target, torch._ops.OpOverloadPacket) else target.overloadpacket
        namespace, _, name = packet._qualified_op_name.partition("::")
        return _canonical_name(name) if namespace == "aten" else f"{namespace}::{name}"
    name = getattr(target, "__name__", "")
    # A function of the same name from elsewhere is not torch's operator, so identity decides.
    own = getattr(operator, name, None) is target or any(getattr(home, name, None) is target for home in HOMES)
    return _canonical_name(name) if name and own else target


def _canonical_name(name: str) -> str:
    """Return the name under which all variants of a torch operator are compared. It is ``"view"`` for all operators
    that only change the shape.
    """
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    name = OPERATORS.get(name, name)
    return "view" if name in VIEWS else name


def signature_of(node: Node, args: Sequence[Any]) -> OperatorSignature:
    """Return the parameters, by name and in order, of the overload or function that ``node`` calls with ``args``.

    Return an empty mapping if they are not known.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _signature_of_schema(target)
    if node.op == "call_function" and inspect.isfunction(target):
        parameters = inspect.signature(target).parameters.values()
        return (
            {}
            if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
            else {p.name: OperatorParameter(p.default) for p in parameters}
        )
    packet = target if isinstance(target, torch._ops.OpOverloadPacket) else aten_packet(str(operator_of(node)))
    for overload in _python_overloads(packet):
        if _overload_fits(overload, args, node.kwargs):
            return _signature_of_schema(overload)
    return {}


def aten_packet(name: str) -> Any:
    """Return ``torch.ops.aten.<name>``, which holds all overloads of an operator, or None if it does not exist."""
    # The namespace is a Python object, whose own methods such as __le__ are no operators.
    packet = getattr(torch.ops.aten, name, None)
    return packet if isinstance(packet, torch._ops.OpOverloadPacket) else None


@cache
def _python_overloads(packet: Any) -> tuple[Any, ...]:
    """Return the overloads of a packet that Python may call, by ascending number of arguments. Those with ``out=`` or
    named dims are left out.
    """
    names = packet.overloads() if packet is not None else ()
    overloads = [o for o in (getattr(packet, n) for n in names if "out" not in n) if "Dimname" not in str(o._schema)]
    return tuple(sorted(overloads, key=lambda o: len(o._schema.arguments)))


@cache
def _signature_of_schema(overload: Any) -> OperatorSignature:
    """Return the parameters of an overload by name, each with its default and the fixed length of a list."""
    empty = inspect.Parameter.empty
    return {
        a.name: OperatorParameter(a.default_value if a.has_default_value() else empty, a.N or 0)
        for a in overload._schema.arguments
    }


def _overload_fits(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an overload accepts the arguments ``args`` and ``kwargs``. Only their number, their names and
    whether they are tensors are compared.
    """
    # Keyword-only arguments can never take a positional value.
    positional = [a for a in overload._schema.arguments if not a.kwarg_only]
    names = {"input" if a.name == "self" else a.name for a in overload._schema.arguments}
    if len(args) > len(positional) or not {NUMPY_NAMES.get(k, k) for k in kwargs} <= names:
        return False
    pairs = zip(positional, args, strict=False)
    return all(_type_accepts(str(a.type), v) for a, v in pairs if v is not None)


def _type_accepts(kind: str, v: Any) -> bool:
    """Return whether a schema type named ``kind`` takes ``v``. Only whether both are tensors is compared."""
    if isinstance(v, torch.dtype):  # of x.view(dtype), whose other form takes sizes
        return "List" not in kind
    return _is_tensor(v) == (kind in ("Tensor", "Optional[Tensor]"))


def _is_tensor(v: Any) -> bool:
    """Return whether ``v`` is a node whose value is a tensor."""
    return isinstance(v, Node) and isinstance(node_value(v), Tensor)


@cache
def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions, a mapping from an operator to a function that computes it from plainer operators.

    The mapping is empty if this torch has none.
    """
    try:
        from torch._decomp import core_aten_decompositions

        return dict(core_aten_decompositions())
    # The table is private. Without it, callers go without decompositions.
    except (ImportError, AttributeError, RuntimeError):
        return {}


# --- assertions of exported programs ----------------------------------------------------------------------------------


@contextmanager
def asserting_results(program: torch.export.ExportedProgram, checked: Any) -> Iterator[None]:
    """Return a context in which each tensor that ``program`` returns passes through ``checked(value, holds, message)``.

    ``holds`` and ``message`` are those of the program's assertions, which are then not removed as unused results.
    """
    graph, specs = program.graph, program.graph_signature.output_specs
    (output,) = graph.find_nodes(op="output")
    asserted = [n.args[:2] for n in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_async.msg)]
    results, plain, made = output.args[0], [spec.arg for spec in specs], list[Node]()

    def check(value: Node, holds: Any, message: Any) -> Node:
        """Append a call ``checked(value, holds, message)`` to the graph and return its node. ``checked`` is the
        function given to the context.
        """
        made.append(graph.call_function(checked._opoverload, (value, holds, message)))
        # A size that depends on data belongs to the node that computes it, and to no other one.
        made[-1].meta.update({key: held for key, held in value.meta.items() if key != "unbacked_bindings"})
        return made[-1]

    if asserted:
        with graph.inserting_before(output):
            (last, message), kept = asserted[-1], list(results)
            # Chained, so that one check of a result depends on all conditions.
            for each in asserted[:-1]:
                last = check(last, *each)
            for i, result in enumerate(results):
                if isinstance(result, Node) and isinstance(node_value(result), Tensor):
                    kept[i] = check(result, last, message)
                    specs[i].arg = replace(plain[i], name=kept[i].name)
        output.args = (tuple(kept),)
        program.graph_module.recompile()
    try:
        yield
    finally:
        output.args = (results,)
        for spec, arg in zip(specs, plain, strict=True):
            spec.arg = arg
        # A node can be erased only after those that use it.
        for node in reversed(made):
            graph.erase_node(node)
        program.graph_module.recompile()
