"""Replace nodes of a graph. Every rewrite changes graphs through this module."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from shiplap.errors import first_line
from shiplap.rewrite.layout import readers_with_new_layout, restore_layouts, same_strides, shares_storage
from shiplap.rewrite.match import OBSTACLE_FIXES, Level, Match, NearMiss, Obstacle, Saving
from shiplap.rewrite.program import placing
from shiplap.rewrite.walk import inputs_of, users_of, walk_from
from shiplap.sampling.run import suppress_warnings
from shiplap.torch_private import graph_nodes as fx

# Ends in a separator, so that a folder named torch_something does not count as torch.
TORCH_FOLDER = os.path.join(os.path.dirname(torch.__file__), "")
FRAME_PATTERN = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')

fake_value = fx.node_value


class ReplacementRefused(Exception):
    """An error which says that a traced replacement cannot be used. Its message is the reason. The field ``obstacle``
    holds the kind of obstacle, such as ``"dtype"``.
    """

    def __init__(self, obstacle: Obstacle, reason: str) -> None:
        """Set ``obstacle``, and the reason as the message of the error."""
        self.obstacle: Obstacle = obstacle
        super().__init__(reason)


def flat_nodes(args: Any) -> list[Node]:
    """Return the nodes in ``args`` in order, without duplicates. Nested containers are searched, too."""
    nodes: dict[Node, None] = {}
    map_arg(args, lambda n: nodes.setdefault(n))
    return list(nodes)


def place_replacement(
    graph: Graph,
    level: Level,
    rewrite: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    outputs: Sequence[Node],
    nodes: Iterable[Node] = (),
    bound: Sequence[tuple[str, str]] = (),
) -> Match | NearMiss:
    """Replace the computation of ``outputs`` by ``fn(*args)`` in ``graph``, and remove the nodes that become unused.
    Return a ``Match``. If the replacement is not possible, leave the graph unchanged and return a ``NearMiss`` with the
    reason.

    ``fn`` calls PyTorch functions only. It returns as many tensors as there are ``outputs``, in that order. ``args``
    may hold nodes of tensors or sizes, constants, and lists of these. ``nodes`` are further nodes of the replaced
    computation. ``rewrite`` is the name of the rewrite. ``bound`` holds pairs of a name and a description of its value,
    which are copied to the ``Match``.

    If a result has other strides than its output, it is copied to the dim order of the output, unless no reader sees
    the difference. The graph stays unchanged if ``fn`` raises, or if a result has another shape, dtype or device than
    its output. It also stays unchanged if the strides of an output fit no dim order, or if a result is computed from
    its own output. Finally, it stays unchanged if a write to a tensor, or the start or end of a ``no_grad`` or autocast
    block, lies between the replaced nodes.
    """
    # In graph order: the first and the last of them bound what lies in between.
    replaced = sorted({*nodes, *outputs}, key=_node_positions(graph))
    miss = _near_miss_at(level, rewrite, outputs[0], len(replaced))
    inputs = flat_nodes(args)
    try:
        # The replacement is traced under the autocast state of the place, since a cast that autocast inserts is part of
        # the result's dtype.
        with suppress_warnings(), fx.autocast_at(replaced[-1]):
            made, moved, free = _trace_replacement(fn, args, inputs, outputs, level)
    except ReplacementRefused as e:
        return miss(e.obstacle, str(e))
    except Exception as e:
        return miss("operator", f"the replacement cannot be traced here: {first_line(e)[:200]}")
    results = _graph_results(made)
    writers = [n for n in replaced if written_arguments(n)]
    if problem := (
        _why_results_differ(made, results, outputs, free)
        or _find_dependency_loop([_inputs_behind(made, inputs, r) for r in results], outputs)
        or _find_barrier_between(graph, inputs, replaced)
    ):
        return miss(*problem)
    # From here on the graph changes. A rewrite whose proof waits for its first place is proven now.
    placing.get()()
    before, cost = len(graph.nodes), _bytes_of_traffic(replaced)
    placed = _insert_replacement(graph, level, made, inputs, results, outputs, writers)
    for node, held in moved:
        fx.set_value(node, held, level)
    sort_graph(graph)
    _erase_unused(replaced)
    fx.count_rewrite(rewrite, len(replaced))
    saving = Saving(nodes=before - len(graph.nodes), bytes=cost - _bytes_of_traffic(placed))
    lines = tuple(dict.fromkeys(line for n in replaced if (line := source_line(n))))
    return Match(
        rewrite,
        level,
        tuple(n.name for n in replaced),
        tuple(n.name for n in placed),
        lines,
        tuple(operator_name(n) for n in replaced),
        tuple(bound),
        saving=saving,
    )


def _trace_replacement(
    fn: Callable[..., Any], args: Sequence[Any], inputs: Sequence[Node], outputs: Sequence[Node], level: Level
) -> tuple[Graph, list[tuple[Node, Any]], set[Node]]:
    """Trace ``fn(*args)`` and return a tuple ``(made, moved, free)``.

    ``made`` is the traced graph. ``moved`` lists the readers of ``outputs`` whose layout in memory changes, each as a
    pair of the node and its new fake value. ``free`` holds the outputs whose results are not copied to the old layout.
    If the layouts differ and a reader would see the difference, ``made`` copies the result to the layout of its output.
    If ``fn`` does not return as many values as there are ``outputs``, ``moved`` and ``free`` are empty.
    """

    def flat(fn: Callable[..., Any]) -> Graph:
        """Return a traced graph of ``fn`` whose output is a flat list of results. It is traced on fake tensors like
        those of ``inputs``, the nodes among the arguments of the replacement.
        """
        return fx.trace_to_nodes(
            lambda *values: fn(*_fill_arguments(args, inputs, values)), [fake_value(n) for n in inputs], level
        )

    made = flat(fn)
    results, moved = (
        [fake_value(r) if isinstance(r, Node) else r for r in _graph_results(made)],
        list[tuple[Node, Any]](),
    )
    # Reported by the caller, with both numbers.
    if len(results) != len(outputs):
        return made, [], set()
    wanted: list[Tensor | None] = []
    for new, old in zip(results, outputs, strict=True):
        differ = _value_difference(new, fake_value(old))
        # Only before autograd: after it, a view's strides are arguments of later calls.
        behind = readers_with_new_layout(old, new) if differ and differ[0] == "layout" and level == "pre-grad" else None
        moved += behind or []
        wanted.append(fake_value(old) if differ and differ[0] == "layout" and behind is None else None)
    if any(w is not None for w in wanted):
        # Traced a second time, so that the copies are part of the graph that is placed.
        made = flat(restore_layouts(fn, wanted))
    return made, moved, {o for o, w in zip(outputs, wanted, strict=True) if w is None}


def _why_results_differ(
    made: Graph, results: Sequence[Any], outputs: Sequence[Node], free: Collection[Node]
) -> tuple[Obstacle, str] | None:
    """Return the kind of obstacle and the reason if ``results`` of the replacement ``made`` cannot stand for
    ``outputs``. Examples are another dtype, shape or layout. Return None if they can. For outputs in ``free``, the
    layout is not compared.
    """
    if constant := next((n for n in made.nodes if n.op == "get_attr"), None):
        return (
            "operator",
            f"the replacement makes a tensor of constants, {constant.name}: torch.full makes one "
            "in the graph, and an argument brings one along",
        )
    if len(results) != len(outputs):
        return "operator", f"the replacement returns {len(results)} values, {len(outputs)} are to be replaced"
    pairs = zip(results, outputs, strict=True)
    differences = (
        (_value_difference(fake_value(new) if isinstance(new, Node) else new, fake_value(old)), old)
        for new, old in pairs
    )
    # A different layout is no problem where no reader of the output sees it.
    problems = (p for p, old in differences if p is not None and not (p[0] == "layout" and old in free))
    return next(problems, None)


def _near_miss_at(level: Level, rewrite: str, at: Node, of: int) -> Callable[[Obstacle, str], NearMiss]:
    """Return a function that takes a kind of obstacle and a reason, and returns a ``NearMiss`` of ``rewrite`` at the
    node ``at``. ``of`` is the number of nodes in the rewrite's pattern.
    """
    return lambda obstacle, reason: NearMiss(
        rewrite, level, at.name, source_line(at), obstacle, reason, of, of, OBSTACLE_FIXES.get(obstacle, "")
    )


def _node_positions(graph: Graph) -> Callable[[Node], int]:
    """Return a function that takes a node and returns its position in ``graph``."""
    return {n: i for i, n in enumerate(graph.nodes)}.__getitem__


def _fill_arguments(args: Sequence[Any], inputs: Sequence[Node], values: Sequence[Any]) -> list[Any]:
    """Return a list like ``args`` in which values replace nodes. Each node that is in ``inputs`` is replaced by the
    element of ``values`` at its position. Nodes in nested lists are replaced, too.
    """
    given = dict(zip(inputs, values, strict=True))
    return list(map_arg(tuple(args), given.__getitem__))


def _graph_results(made: Graph) -> list[Any]:
    """Return the values that the graph ``made`` returns, as a list."""
    return list(next(n for n in made.nodes if n.op == "output").args[0])


def _value_difference(new: Any, old: Any) -> tuple[Obstacle, str] | None:
    """Return ``(property, reason)`` for the first property in which the fake value ``new`` differs from the fake value
    ``old``. Return None if they agree.

    The properties ``"dtype"``, ``"device"``, ``"shape"`` and ``"layout"`` are compared in this order. If only one of
    the values is a tensor, the property is ``"argument"``. Two values that are not tensors agree.
    """
    if not (isinstance(new, Tensor) and isinstance(old, Tensor)):
        return (
            None if isinstance(old, Tensor) is isinstance(new, Tensor) else ("argument", "one of the two is no tensor")
        )
    if new.dtype != old.dtype:
        return "dtype", f"the replacement is {_dtype_name(new.dtype)}, the graph has {_dtype_name(old.dtype)}"
    if new.device != old.device:
        return "device", f"the replacement is on {new.device}, the graph has {old.device}"
    if tuple(new.shape) != tuple(old.shape):
        return "shape", f"the replacement is {format_sizes(new.shape)}, the graph has {format_sizes(old.shape)}"
    # Last, since the layout is the one difference that can be repaired.
    if not same_strides(new, old):
        return (
            "layout",
            f"the replacement has strides {format_sizes(new.stride())}, the graph has {format_sizes(old.stride())}",
        )
    return None


def _inputs_behind(made: Graph, inputs: Sequence[Node], result: Any) -> set[Node]:
    """Return those of ``inputs`` from which ``result`` is computed. ``result`` is a node of the traced replacement
    ``made``, and ``inputs`` are the nodes of the user's graph that it is called with.
    """
    given = dict(zip((n for n in made.nodes if n.op == "placeholder"), inputs, strict=True))
    return {given[n] for n in walk_from(flat_nodes(result), inputs_of) if n in given}


def _find_dependency_loop(needs: Sequence[set[Node]], outputs: Sequence[Node]) -> tuple[Obstacle, str] | None:
    """Return the kind of obstacle and the reason if a replaced output would be computed from itself, directly or
    through other outputs. Return None if there is no such loop. ``needs`` holds, for each of ``outputs``, the input
    nodes from which its new value is computed.

    Loops occur in training, because gradients are computed from results.
    """
    after = [set(walk_from([o], users_of)) for o in outputs]
    # reads[i] holds the results that are computed from output i.
    reads = [{j for j, need in enumerate(needs) if need & after[i]} for i in range(len(outputs))]
    for start in range(len(outputs)):
        if start in walk_from(reads[start], reads.__getitem__):
            loop = next(n for need in needs for n in need if n in after[start])
            return "argument", f"{loop.name} is computed from what would be replaced"
    return None


def _find_barrier_between(
    graph: Graph, inputs: Sequence[Node], replaced: Sequence[Node]
) -> tuple[Obstacle, str] | None:
    """Return the kind of obstacle and the reason if the nodes ``replaced``, in graph order, cannot be merged into one
    call. Return None if they can.

    The obstacle is a node that stands between the first of ``replaced`` and the last of ``replaced`` and ``inputs``. It
    writes to a tensor, or enters or leaves a ``no_grad`` or autocast block.
    """
    order = _node_positions(graph)
    # The merged call stands at the last of these nodes, so everything in between is passed.
    first, last = order(replaced[0]), max(map(order, [*replaced, *inputs]))
    between = (n for n in list(graph.nodes)[first : last + 1] if n not in replaced)
    wall = next((n for n in between if barrier_reason(n) and not _writes_fresh_tensor(n)), None)
    if wall is None:
        return None
    obstacle, does = barrier_reason(wall) or ("mutation", "")
    return obstacle, f"{name_and_operator(wall)} {does} in between"


def barrier_reason(node: Node) -> tuple[Obstacle, str] | None:
    """Return the kind of obstacle and the reason if other calls must not be moved past ``node``. Such a node writes to
    a tensor, or enters or leaves a ``no_grad`` or autocast block. Return None for all other nodes.
    """
    if mutates_argument(node):
        return "mutation", "writes to a tensor"
    return ("mode", "switches gradients, autocast or a transform") if _switches_mode(node) else None


# Operators that always return new memory. Views and casts may return their argument.
ALLOCATING_OPERATORS = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "add", "sub", "mul", "div", "truediv", "conv1d", "conv2d"}
)


def _writes_fresh_tensor(node: Node) -> bool:
    """Return whether ``node`` writes to its first argument, that argument is the result of an operator that always
    allocates, and no other node reads it. An example is ``relu(linear(x, w), inplace=True)``. Return False for
    ``operator.setitem``.
    """
    given = node.args[0] if mutates_argument(node) and node.args else None
    # setitem is left out: it writes to a part, and the rest of the tensor is read by its other users.
    name = getattr(given.target, "__name__", "") if isinstance(given, Node) and given.op == "call_function" else ""
    return (
        isinstance(given, Node)
        and name in ALLOCATING_OPERATORS
        and len(given.users) == 1
        and node.target is not operator.setitem
    )


def _switches_mode(node: Node) -> bool:
    """Return whether ``node`` enters or leaves a mode such as ``no_grad`` or autocast. Before autograd, a graph holds
    such a block as two calls without a result.
    """
    name = getattr(node.target, "__name__", "")
    plain = node.op == "call_function" and fx.overload_of(node) is None
    return plain and re.match(r"_(?!_|check|assert|log_api)", name) is not None and fake_value(node) is None


def mutates_argument(node: Node) -> bool:
    """Return whether ``node`` writes to one of its arguments, in place or through ``out=``."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")
    if node.op != "call_function":
        return False
    if (schemas := fx.schemas_of(node)) and not fx.is_aten(node):
        return any(schema.is_mutable for schema in schemas)
    if (overload := fx.overload_of(node)) is not None:
        return bool(overload._schema.is_mutable)
    name = getattr(node.target, "__name__", "")
    # A function of torch that ends in an underscore writes to its first argument; the four of the operator module do
    # not.
    inplace = name.endswith("_") and not name.startswith("__") and node.target not in _NAMED_LIKE_WRITERS
    return inplace or node.target in _WRITERS or bool(node.kwargs.get("inplace")) or "out" in node.kwargs


def written_arguments(node: Node) -> list[Node]:
    """Return the nodes of the arguments that the call ``node`` writes to, in the order of the operator's schema. If
    ``node`` calls a method or a Python function, which have no schema, return an empty list.
    """
    written: list[Node] = []
    for schema in fx.schemas_of(node)[:1]:
        for position, argument in enumerate(schema.arguments):
            given = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None)
            if argument.is_write and isinstance(given, Node):
                written.append(given)
    return written


def is_written(node: Node) -> bool:
    """Return whether ``node`` is a call that writes to an argument, or another call writes to the tensor of ``node`` or
    to a view of it.
    """
    held = fake_value(node)
    views = walk_from([node], lambda n: [u for u in n.users if shares_storage(fake_value(u), [held])])
    written = (mutates_argument(u) and n in (*u.args[:1], *u.kwargs.values()) for n in views for u in n.users)
    return mutates_argument(node) or any(written)


# Functions of Python's operator module whose names end in an underscore because the word is a keyword.
_NAMED_LIKE_WRITERS = (operator.and_, operator.or_, operator.not_, operator.is_)
_WRITERS = (
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.imatmul,
    operator.ilshift,
    operator.irshift,
)


def _insert_replacement(
    graph: Graph,
    level: Level,
    made: Graph,
    inputs: Sequence[Node],
    results: Sequence[Any],
    outputs: Sequence[Node],
    writers: Sequence[Node] = (),
) -> list[Node]:
    """Copy the nodes of the traced replacement ``made`` into ``graph`` and return the copies. Users of ``outputs`` then
    read the copies of ``results``. The copies stand before the last of ``outputs``, or behind the last of ``writers``
    if that comes later. ``inputs`` are the nodes of ``graph`` that take the place of the inputs of ``made``.
    """
    order = _node_positions(graph)
    given = iter(inputs)
    env: dict[Node, Node] = {}
    placed: list[Node] = []
    # Ahead of the last output all inputs exist, since no input is computed from an output.
    last = max((*outputs, *writers), key=order)
    with graph.inserting_before(last.next if last in writers else last):
        for node in made.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op != "output":
                env[node] = graph.node_copy(node, env.__getitem__)
                # The value is set for the level of this graph: before autograd its key is "example_value", later "val".
                env[node].meta = {k: v for k, v in node.meta.items() if k not in ("val", "example_value")}
                fx.set_value(env[node], fake_value(node), level)
                fx.carry_over(env[node], outputs[0])
                placed.append(env[node])
    for new, old in zip(results, outputs, strict=True):
        if isinstance(new, Node):
            # Debuggers and near misses find the user's line by the stack trace in the meta.
            fx.carry_over(env[new], old)
            old.replace_all_uses_with(env[new], delete_user_cb=lambda user: user not in writers)
    return placed


def sort_graph(graph: Graph) -> None:
    """Move nodes of ``graph`` in place until every node stands behind its inputs. If a graph is in such an order
    already, no node is moved.
    """
    done: set[Node] = set()
    # Nodes are moved behind the last placed node, so a graph that is in order is not changed at all.
    cursor = None
    for start in list(graph.nodes):
        stack = [start]
        while stack:
            node = stack[-1]
            waiting = [n for n in node.all_input_nodes if n not in done]
            if node in done:
                stack.pop()
            elif waiting:
                stack.extend(reversed(waiting))
            else:
                stack.pop()
                done.add(node)
                if cursor is not None and cursor.next is not node:
                    cursor.append(node)
                cursor = node


def _erase_unused(replaced: Sequence[Node]) -> None:
    """Remove nodes of ``replaced`` from their graph. A node is removed if it has no users and writes to no tensor. A
    node without users is also removed if an operator's schema says what it writes to, and it writes only to nodes of
    ``replaced``.
    """
    made = set(replaced)
    for node in replaced:
        # What a library's op writes to was made for the computation that is replaced, and is read by nobody else.
        if (written := written_arguments(node)) and not node.users and made.issuperset(written):
            node.graph.erase_node(node)
            made.discard(node)
    # From the last to the first, so that a node has lost its users when its turn comes.
    for node in reversed([n for n in replaced if n in made]):
        if not node.users and not mutates_argument(node):
            node.graph.erase_node(node)


def remove_dead_calls(graph: Graph) -> None:
    """Remove from ``graph``, in place, the calls that have no effect and whose results no node reads. Otherwise they
    would count as readers of a value that a rewrite replaces.
    """
    for node in reversed(list(graph.nodes)):
        if not node.users and _has_no_effect(node):
            graph.erase_node(node)


def _has_no_effect(node: Node) -> bool:
    """Return whether a call may be removed if no node reads its result. Such a call returns tensors of known sizes and
    writes to nothing. It draws no random numbers, and raises no error that depends on data.
    """
    held = fake_value(node)
    known = isinstance(held, Tensor) or (
        isinstance(held, (tuple, list)) and bool(held) and all(isinstance(h, Tensor) for h in held)
    )
    if node.op not in ("call_function", "call_method") or not known or mutates_argument(node) or _switches_mode(node):
        return False
    if getattr(node.target, "__name__", "") in _UNTOLD_WRITERS:
        return False
    if getattr(node.target, "__module__", "") == "_operator" or node.target is getattr:
        return True
    tags = _tags_of_aten_operator(fx.overload_of(node) or node.target)
    return tags is not None and tags.isdisjoint(_TAGS_OF_EFFECTS)


# Their schemas do not say that they write: to running statistics, and to rows of weights that are too long.
_UNTOLD_WRITERS = frozenset(
    {"batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "instance_norm"}
    | {"embedding", "embedding_bag"}
)
_TAGS_OF_EFFECTS = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)


@cache
def _tags_of_aten_operator(target: Any) -> frozenset[torch.Tag] | None:
    """Return the tags of the ATen operator that ``target`` calls. Return None if ``target`` is not an operator of
    torch.

    The tags of an overload are its own. For a function, or for a method given by its name, the tags of all overloads of
    the ATen operator with that name are united.
    """
    if (schema := getattr(target, "_schema", None)) is not None:
        return frozenset(target.tags) if schema.name.startswith(("aten::", "prims::")) else None
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    # A method is named by a text, and belongs to a tensor of torch.
    home = "torch." if isinstance(target, str) else str(getattr(target, "__module__", "") or "torch.")
    packet = fx.aten_packet(name) if name and f"{home}.".startswith("torch.") else None
    if packet is None:
        return None
    return frozenset(tag for overload in packet.overloads() for tag in getattr(packet, overload).tags)


def operator_name(node: Node) -> str:
    """Return the name of the operator that a node calls, as users write it. Examples are ``aten.addmm``, ``linear``,
    and ``.view`` for a method.
    """
    return f".{node.target}" if node.op == "call_method" else fx.operator_name(node.target)


def name_and_operator(node: Node) -> str:
    """Return the name of a node and the operator that it calls, such as ``mm_1 (aten.mm)``. For a node that calls
    nothing, the parentheses hold ``node.op``, such as ``x (placeholder)``.
    """
    return f"{node.name} ({operator_name(node) if node.op.startswith('call') else node.op})"


def fake_tensor(node: Any) -> Tensor | None:
    """Return the fake tensor of ``node``. Return None if ``node`` is no node of a graph or stands for no tensor."""
    held = fake_value(node) if isinstance(node, Node) else None
    return held if isinstance(held, Tensor) else None


def source_line(node: Node) -> str:
    """Return ``file:line`` of the user's call that made ``node``. It is taken from the last recorded frame outside
    torch, or from the last frame if all are in torch. Return an empty string if the compiler recorded no frames.
    """
    frames = FRAME_PATTERN.findall(node.meta.get("stack_trace") or "")
    # The last frame of the user is the line to edit; frames of torch below it are the same for all callers.
    own = [f for f in frames if not f[0].startswith(TORCH_FOLDER)]
    return ":".join((own or frames)[-1]) if frames else ""


def describe_node(node: Any) -> str:
    """Return a node as text for people, such as ``float32[8, 64] of linear_1``. For a node without a tensor, return its
    name. For any other value, return its ``repr``.
    """
    if not isinstance(node, Node):
        return repr(node)
    held = fake_tensor(node)
    return node.name if held is None else f"{describe_tensor(held)} of {node.name}"


def describe_tensor(held: Tensor) -> str:
    """Return the dtype and the sizes of a tensor as text, such as ``float32[8, 64]``."""
    return f"{_dtype_name(held.dtype)}{format_sizes(held.shape)}"


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def format_sizes(sizes: Iterable[Any]) -> str:
    """Return sizes as text, such as ``[8, 64]``."""
    return f"[{', '.join(map(str, sizes))}]"


def _bytes_of_traffic(nodes: Iterable[Node]) -> int:
    """Return the number of bytes that the nodes read and write if each runs as a kernel of its own. Nodes that return
    views do not count. A symbolic size has the value that it has in the call being compiled.
    """
    # Views move no bytes. What fusion would save is not modelled here: the survey measures it.
    return sum(sum(map(_bytes_of_node, (n, *n.all_input_nodes))) for n in nodes if not is_view_call(n))


def is_view_call(node: Node) -> bool:
    """Return whether the result of ``node`` shares memory with one of its inputs, or ``node`` calls
    ``operator.getitem``. A call that writes to an argument is no view call.
    """
    given = (fake_value(n) for n in node.all_input_nodes)
    return node.target is operator.getitem or (not mutates_argument(node) and shares_storage(fake_value(node), given))


def _bytes_of_node(node: Node) -> int:
    """Return the size of the tensor of ``node`` in bytes, or 0 if the node stands for no tensor."""
    held = fake_tensor(node)
    # A symbol counts as in the call that is compiled for.
    return 0 if held is None else math.prod(fx.size_hint_of(n) for n in held.shape) * held.itemsize
