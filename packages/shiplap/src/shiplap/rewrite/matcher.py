"""Compare a pattern with a place in a graph. One walk returns the match, or the part that fits and the obstacle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from shiplap.cached_property import cached_property
from shiplap.rewrite.graph import describe_node, fake_value, is_view_call, operator_name, written_arguments
from shiplap.rewrite.match import Obstacle
from shiplap.rewrite.normalize_call import (
    COMMUTATIVE_OPERATORS,
    DimNumber,
    base_and_exponent,
    canonical_arguments,
    canonical_name,
)
from shiplap.rewrite.obstacle import RewriteObstacle, obstacle_of_reader
from shiplap.rewrite.passthrough_ops import keeps_tensor
from shiplap.torch_private.symbolic_sizes import SizeBindings, is_number, is_size

# For the hint of a near miss: a weight that is stored transposed is a common difference.
TRANSPOSING_OPERATORS = frozenset({"permute", "t", "transpose", "mT", "T"})
MATRIX_PRODUCTS = frozenset({"matmul", "mm", "bmm", "addmm"})
MOST_WAYS = 32  # of one pattern at one place: each sum of two arguments doubles them


@dataclass(frozen=True)
class PatternGraph:
    """A function traced as a graph at one stage of compilation.

    Attributes:
        inputs: for each placeholder, the name of the argument that it stands for.
        results: the results of the function as a flat list. If it was traced with gradients, those of ``grads`` follow.
        scalars: for each constant that stands for an argument, the name of the argument.
        fixed: the value of each argument that is no tensor and has a fixed value in this graph, such as None.
        casts: whether the function casts to a dtype. Its graph then depends on the dtypes of its arguments.
        grads: names of the arguments whose gradients are computed.
        tangents: for each input that is the gradient of a result, its name.
    """

    graph: Graph
    inputs: Mapping[Node, str]
    results: Sequence[Any]
    scalars: Mapping[float, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    grads: tuple[str, ...] = ()
    tangents: tuple[str, ...] = ()
    casts: bool = False

    @cached_property
    def picked(self) -> list[int]:
        """The positions in the list ``results`` of those results that the pattern computes. Results that are None, or
        an argument returned unchanged, are left out.
        """
        return [i for i, n in enumerate(self.results) if isinstance(n, Node) and n not in self.inputs]

    @cached_property
    def outputs(self) -> list[Node]:
        """The nodes of ``graph`` that are results which the pattern computes. Results that are None, or an argument
        returned unchanged, are left out.
        """
        return [self.results[i] for i in self.picked]

    @property
    def calls(self) -> list[Node]:
        """The nodes of the pattern for which a graph must have a counterpart. They are its calls, except those that
        compute only sizes.
        """
        return [n for n in self.graph.nodes if n.op.startswith("call") and not is_number(fake_value(n))]


@dataclass
class PartialMatch:
    """A pattern matched to a part of a graph, completely or up to an obstacle.

    Attributes:
        nodes: for each node of the pattern, the node of the graph.
        args: for each argument of the pattern, its value in the graph.
        sizes: sizes that are still to be compared, as tuples of the size in the pattern, the size in the graph, the
            call that reads it, and the name of the call's argument.
        stop: the first obstacle, or None.
        passed: nodes of the graph between the matched ones that return their argument unchanged, such as idle casts.
    """

    nodes: dict[Node, Node] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    sizes: list[tuple[Any, Any, Node, str]] = field(default_factory=list)
    stop: RewriteObstacle | None = None
    passed: tuple[Node, ...] = ()

    def copy(self) -> PartialMatch:
        """Return a copy whose dicts and lists can be extended without changing this match."""
        return PartialMatch(dict(self.nodes), dict(self.args), list(self.sizes), self.stop, self.passed)

    @property
    def replaced(self) -> list[Node]:
        """The nodes of the user's graph that the replacement replaces. They are the nodes matched to the pattern, and
        calls between them that return their argument unchanged.
        """
        return [*self.nodes.values(), *self.passed]


class _PatternWalker:
    """A recursive comparison of ``pattern`` with parts of graphs.

    The methods that return a list of partial matches return all matches that fit. If none fits, the list holds only the
    match that covers the most nodes, with its obstacle.
    """

    def __init__(self, pattern: PatternGraph) -> None:
        """Set the pattern that is compared with graphs."""
        self.pattern = pattern

    def match_node(self, fit: PartialMatch, want: Node, actual: Any, user: Node) -> list[PartialMatch]:
        """Return the extensions of the partial match ``fit`` in which the pattern's node ``want`` is matched to
        ``actual``. ``actual`` is a value of the graph that the node ``user`` reads. If no extension fits, the list
        holds only the one that covers the most nodes, with its obstacle.
        """
        # A cast to the dtype that a value already has is stepped over, unless the pattern has the same call there.
        if keeps_tensor(actual) and (want in self.pattern.inputs or canonical_name(actual) != canonical_name(want)):
            fit = fit.copy()
            fit.passed += (actual,)
            return self.match_node(fit, want, actual.args[0], actual)
        if want in self.pattern.inputs:
            return [self._input(fit, want, actual, user)]
        # The pattern reads this value twice, so the graph has to read one node twice.
        if want in fit.nodes:
            same = fit.nodes[want] is actual
            reason = f"{operator_name(user)} reads {_operand_name(actual)}, the pattern {fit.nodes[want].name} again"
            return [fit if same else self._stop_at(fit, user, "operator", reason)]
        # x * x and x.pow(2) are one power: the bases are compared instead of the calls.
        if isinstance(actual, Node) and (bases := _bases_of_equal_power(want, actual)) is not None:
            fit = fit.copy()
            fit.nodes[want] = actual
            return self.match_node(fit, *bases, actual)
        if (
            not isinstance(actual, Node)
            or not actual.op.startswith("call")
            or canonical_name(actual) != canonical_name(want)
        ):
            reason = (
                f"{_operand_name(actual)} is {_kind_of_value(actual)}; "
                f"the pattern has {operator_name(want)} there{_transpose_hint(want, actual)}"
            )
            return [self._stop_at(fit, actual if isinstance(actual, Node) else user, "operator", reason)]
        fit = fit.copy()
        fit.nodes[want] = actual
        return self._writers(self._arguments(fit, want, actual), want, actual)

    def _writers(self, fits: list[PartialMatch], want: Node, actual: Node) -> list[PartialMatch]:
        """Return extensions of the partial matches ``fits`` by the calls of custom ops that write to ``want`` in the
        pattern. They are matched in order to the calls that write to ``actual`` in the graph. If none fits, the
        returned matches have an obstacle.
        """
        ours, theirs = ([u for u in n.users if n in written_arguments(u)] for n in (want, actual))
        if len(theirs) < len(ours):
            reason = f"{_operand_name(actual)} is written to {len(theirs)} times, in the pattern {len(ours)} times"
            return [self._stop_at(fit, actual, "mutation", reason) for fit in fits]
        # Later writes of the graph are no part of the pattern.
        for wanted, writer in zip(ours, theirs, strict=False):
            fits = _best_matches([more for fit in fits for more in self.match_node(fit, wanted, writer, actual)])
        return fits

    def _input(self, fit: PartialMatch, want: Node, actual: Any, user: Node) -> PartialMatch:
        """Return the partial match ``fit`` with the pattern's input ``want`` bound to ``actual``, a value of the graph
        that ``user`` reads. If that input is bound to another value already, return the match with an obstacle.
        """
        name = self.pattern.inputs[want]
        if name not in fit.args:
            fit = fit.copy()
            fit.args[name] = actual
            return fit
        if fit.args[name] is actual:
            return fit
        return self._stop_at(
            fit,
            user,
            "argument",
            f"the pattern uses {name} more than once; here it would be both {_operand_name(fit.args[name])} "
            f"and "
            f"{_operand_name(actual)}",
        )

    def _arguments(self, fit: PartialMatch, want: Node, actual: Node) -> list[PartialMatch]:
        """Return the extensions of the partial match ``fit`` in which the arguments of the pattern's call ``want`` and
        the graph's call ``actual`` agree. If the operator is commutative, both orders are tried. If no extension fits,
        the list holds only the one that covers the most nodes, with its obstacle.
        """
        wanted, given = canonical_arguments(want), canonical_arguments(actual)
        # The graph may leave out an argument that has its default, while the pattern states it.
        if not wanted.keys() <= given.keys():
            given = canonical_arguments(actual, wanted)
        if wanted.keys() != given.keys():
            return [self._stop_at(fit, actual, "argument", _describe_argument_names(actual, wanted, given))]
        orders = [list(wanted)]
        # Models write a + b and b + a.
        if canonical_name(want) in COMMUTATIVE_OPERATORS and {"input", "other"} <= wanted.keys():
            orders.append([{"input": "other", "other": "input"}.get(n, n) for n in wanted])
        tried: list[PartialMatch] = []
        for order in orders:
            tried += self._match_pairs(
                fit, [(n, wanted[n], given[o]) for n, o in zip(wanted, order, strict=True)], actual
            )
        return _best_matches(tried)

    def _match_pairs(self, fit: PartialMatch, pairs: Sequence[tuple[str, Any, Any]], user: Node) -> list[PartialMatch]:
        """Return the extensions of the partial match ``fit`` in which all ``pairs`` agree. Each pair holds the name of
        an argument of the graph's call ``user``, its value in the pattern and its value in the graph. If no extension
        fits, the list holds only the one that covers the most nodes, with its obstacle.
        """
        fits = [fit]
        # The ways of one argument restrict the ways of the next, so the list is trimmed after each: else it would
        # double with every sum.
        for name, want, given in pairs:
            fits = _best_matches([more for fit in fits for more in self._match_argument(fit, want, given, name, user)])
        return fits

    def _match_argument(self, fit: PartialMatch, want: Any, given: Any, name: str, user: Node) -> list[PartialMatch]:
        """Return the extensions of the partial match ``fit`` in which the argument ``name`` of the graph's call
        ``user`` agrees. ``want`` is its value in the pattern, and ``given`` its value in the graph. If no extension
        fits, the list holds only the one that covers the most nodes, with its obstacle.
        """
        if isinstance(want, (list, tuple)):
            if not isinstance(given, (list, tuple)) or len(want) != len(given):
                return [self._differs(fit, user, name, given, _operand_name(want))]
            return self._match_pairs(fit, [(name, w, g) for w, g in zip(want, given, strict=True)], user)
        # The bounds of a slice may be sizes that the graph computes.
        if isinstance(want, slice) and isinstance(given, slice):
            parts = [(name, getattr(want, part), getattr(given, part)) for part in ("start", "stop", "step")]
            return self._match_pairs(fit, parts, user)
        held = fake_value(want) if isinstance(want, Node) else want
        # Sizes are compared at the end, when every symbol of the pattern is bound.
        if is_number(held) and not (type(given) is float and type(held) is int and held == given):  # 2 and 2.0 are one
            return [self._size(fit, held, given, name, user)]
        if isinstance(want, Node):
            return self.match_node(fit, want, given, user)
        if type(want) is float and want in self.pattern.scalars and type(given) in (int, float):
            return [self._scalar(fit, self.pattern.scalars[want], given, user)]
        return [fit if _equal_constants(want, given) else self._differs(fit, user, name, given, _operand_name(want))]

    def _size(self, fit: PartialMatch, want: Any, given: Any, name: str, user: Node) -> PartialMatch:
        """Return the partial match ``fit`` after comparing ``given``, the argument ``name`` of the graph's call
        ``user``, with ``want``, the size in the pattern. If they differ, the returned match has an obstacle. If
        ``want`` is a symbol, the pair is kept in ``sizes``, and :func:`check_sizes` compares it at the end.
        """
        if isinstance(given, (list, tuple)) and len(given) == 1:  # torch.roll(x, 2, -1) has shifts=[2]
            given = given[0]
        actual = fake_value(given) if isinstance(given, Node) else given
        # A symbol of the pattern stands for a size, and never for another number.
        if not (is_size(actual) if is_size(want) else is_number(actual) or isinstance(actual, float)):
            return self._differs(fit, user, name, given, "a size")
        if isinstance(want, int):  # known already: which one of several results a getitem picks, say
            same = isinstance(actual, int) and (
                want.fits_dim(actual) if isinstance(want, DimNumber) else want == actual
            )
            return fit if same else self._differs(fit, user, name, given, str(want))
        fit = fit.copy()
        fit.sizes.append((want, actual, user, name))
        return fit

    def _scalar(self, fit: PartialMatch, name: str, given: float, user: Node) -> PartialMatch:
        """Return the partial match ``fit`` with the pattern's number argument ``name`` bound to ``given``, a constant
        of the graph's call ``user``. If another number is bound already, return the match with an obstacle.
        """
        fit = fit.copy()
        if fit.args.setdefault(name, given) == given:
            return fit
        return self._stop_at(fit, user, "constant", f"{name} would be both {fit.args[name]} and {given}")

    def _differs(self, fit: PartialMatch, user: Node, name: str, given: Any, want: str) -> PartialMatch:
        """Return the partial match ``fit`` with an obstacle. It says that the argument ``name`` of the graph's call
        ``user`` is ``given``, and that the pattern has ``want`` there.
        """
        return self._stop_at(
            fit,
            user,
            "constant",
            f"{operator_name(user)} has {name}={_operand_name(given)}, the pattern {want}",
        )

    def _stop_at(self, fit: PartialMatch, node: Node, obstacle: Obstacle, reason: str) -> PartialMatch:
        """Return a copy of the partial match ``fit`` with an obstacle of the given kind and reason at ``node``. If
        ``fit`` has an obstacle already, that one is kept. The comparison then continues, in order to count the nodes
        that fit.
        """
        stopped = fit.copy()
        stopped.stop = fit.stop or RewriteObstacle(node, obstacle, reason)
        return stopped


def _bases_of_equal_power(want: Node, actual: Node) -> tuple[Node, Node] | None:
    """Return the bases of the powers that ``want`` and ``actual`` compute if their exponents are equal. The powers are
    written differently, such as ``x.pow(2)`` and ``x * x``. Return None for other calls.
    """
    if not actual.op.startswith("call") or canonical_name(want) == canonical_name(actual):
        return None
    ours, theirs = base_and_exponent(want), base_and_exponent(actual)
    return (ours[0], theirs[0]) if ours is not None and theirs is not None and ours[1] == theirs[1] else None


def match_output(
    pattern: PatternGraph, at: Node, known: PartialMatch | None = None, output: int = 0
) -> list[PartialMatch]:
    """Return the partial matches in which output number ``output`` of ``pattern`` is the node ``at`` of a graph. If
    ``known`` is given, they are extensions of this partial match.

    If arguments commute, there may be several matches, of which a later comparison keeps one. If no match fits, the
    list holds one match whose ``stop`` is the obstacle.
    """
    return _PatternWalker(pattern).match_node(known or PartialMatch(), pattern.outputs[output], at, at)


def match_first_way(pattern: PatternGraph, at: Node) -> PartialMatch:
    """Return the first of the matches in which the first output of ``pattern`` is the node ``at`` of a graph. If there
    is none, return the partial match that covers the most nodes, with its obstacle.
    """
    return match_output(pattern, at)[0]


def _best_matches(tried: Sequence[PartialMatch]) -> list[PartialMatch]:
    """Return at most 32 of ``tried`` that have no obstacle and bind arguments to different values. If all have an
    obstacle, return the partial match that covers the most nodes.
    """
    fitting: list[PartialMatch] = []
    for way in tried:
        if way.stop is None and all(way.args != other.args for other in fitting):
            fitting.append(way)
    # Among misfits the longest is kept, because its obstacle is the most useful to report.
    return fitting[:MOST_WAYS] or [max(tried, key=lambda way: len(way.nodes))]


def match_other_outputs(pattern: PatternGraph, fit: PartialMatch, graph: Graph) -> PartialMatch:
    """Return the partial match ``fit``, which covers the first output of the pattern, extended by nodes of ``graph``
    that compute all further outputs.

    If no node computes one of these outputs from the same arguments, return a match with an obstacle. It is the one of
    all that were tried that covers the most nodes.
    """
    for index, output in enumerate(pattern.outputs[1:], 1):
        if output in fit.nodes:
            continue
        places = [n for n in graph.nodes if n.op.startswith("call") and canonical_name(n) == canonical_name(output)]
        # The inputs are bound already, so only the place with the same arguments fits.
        tried = [way for n in places for way in match_output(pattern, n, fit, index)]
        fitting = [t for t in tried if t.stop is None]
        if not fitting:
            # The obstacle that came farthest is the one to report.
            nearest = max(tried, key=lambda t: len(t.nodes), default=None)
            at = fit.nodes[pattern.outputs[0]]
            reason = f"nothing computes result {pattern.picked[index]} of the pattern from the same arguments"
            if nearest and len(nearest.nodes) > len(fit.nodes):
                return nearest
            fit.stop = RewriteObstacle(at, "operator", reason)
            return fit
        fit = fitting[0]
    return fit


def check_sizes(pattern: PatternGraph, fit: PartialMatch, *, any_rank: bool) -> RewriteObstacle | None:
    """Compare the sizes of the complete match ``fit`` with each other and with the pattern. Return the first obstacle,
    or None if they agree.

    If ``any_rank`` is true, arguments may have more or fewer dims than in the pattern, and the sizes of such arguments
    are not compared. Otherwise another number of dims is an obstacle.
    """
    sizes, at = SizeBindings(), fit.nodes[pattern.outputs[0]]
    for want, name in pattern.inputs.items():
        size, wanted = fit.args.get(name), fake_value(want)
        held = fake_value(size) if isinstance(size, Node) else size
        if not (isinstance(held, Tensor) and isinstance(wanted, Tensor)):
            continue
        # Annotations with a variadic dim admit any rank; the declaration checks them then.
        if held.dim() != wanted.dim():
            if not any_rank:
                return RewriteObstacle(
                    at, "shape", f"{name} is {describe_node(size)}: {held.dim()} dims, the pattern has {wanted.dim()}"
                )
            continue
        for dim, (w, g) in enumerate(zip(wanted.shape, held.shape, strict=True)):
            if not sizes.bind(w, g):
                return RewriteObstacle(
                    at,
                    "shape",
                    f"{name} is {describe_node(size)}: dim {dim} is {g}, the pattern has {sizes.format_size(w)} there",
                )
    for want, actual, user, name in fit.sizes:
        if not sizes.same(want, actual):
            return RewriteObstacle(
                user, "shape", f"{operator_name(user)} has {name}={actual}, the pattern {sizes.format_size(want)}"
            )
    return None


def check_users(pattern: PatternGraph, fit: PartialMatch) -> RewriteObstacle | None:
    """Return the obstacle if a node outside of the match ``fit`` reads a value that the replacement no longer computes.
    Return None if there is no such reader.
    """
    inside, outputs = set(fit.replaced), {fit.nodes[o] for o in pattern.outputs if o in fit.nodes}
    # Views cost nothing, so they may stay for other readers.
    free = _views_of_inputs(pattern, fit)
    for node in fit.nodes.values():
        stranger = next((u for u in node.users if u not in inside), None)
        if stranger is not None and node in outputs and (writer := _writer_behind(node, stranger, inside)) is not None:
            reason = f"{stranger.name} reads {node.name} before {writer.name} writes to it"
            return RewriteObstacle(node, "mutation", reason)
        if stranger is not None and node not in outputs and node not in free:
            return obstacle_of_reader(node, stranger)
    return None


def _views_of_inputs(pattern: PatternGraph, fit: PartialMatch) -> set[Node]:
    """Return the matched nodes of the graph that compute views of the pattern's arguments, also through other views. A
    node may return one view or a tuple of views. They may stay in the graph for other readers, because views cost
    nothing.
    """
    free: set[Node] = set()
    for want in pattern.graph.nodes:
        if (actual := fit.nodes.get(want)) is None or not (is_view_call(actual) or _splits(actual)):
            continue
        if all(n in pattern.inputs or fit.nodes.get(n) in free for n in want.all_input_nodes):
            free.add(actual)
    return free


def _splits(node: Node) -> bool:
    """Return whether ``node`` returns several views of its argument, such as ``split`` or ``chunk``."""
    return canonical_name(node) in ("split", "chunk", "unbind", "split_with_sizes", "tensor_split")


def _writer_behind(node: Node, reader: Node, inside: set[Node]) -> Node | None:
    """Return a call among the matched nodes ``inside`` that writes to ``node`` after ``reader`` has read it. Return
    None if there is none.
    """
    return next((u for u in node.users if u in inside and node in written_arguments(u) and reader < u), None)


def _describe_argument_names(actual: Node, wanted: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return a sentence about the names of arguments in which the graph's call ``actual`` and the pattern's call
    differ. ``given`` holds the arguments of the graph's call by name, and ``wanted`` those of the pattern's call.
    """
    more, less = [n for n in given if n not in wanted], [n for n in wanted if n not in given]
    call = operator_name(actual)
    if len(more) == len(less) == 1 and (isinstance(wanted[less[0]], Node) or wanted[less[0]] == given[more[0]]):
        return f"{call} is given {more[0]}={_operand_name(given[more[0]])}; the pattern calls this argument {less[0]}"
    if more:
        values = ", ".join(f"{n}={_operand_name(given[n])}" for n in more)
        return f"{call} is also given {values}; the pattern leaves that out"
    values = ", ".join(f"{n}={_operand_name(wanted[n])}" for n in less)
    return f"{call} is not given {values}, which the pattern has"


def _equal_constants(want: Any, given: Any) -> bool:
    """Return whether two constants are equal. 1 and 1.0 are equal, as are two NaNs. 0.0 and -0.0 are not."""
    if type(want) is type(given) is float:
        return repr(want) == repr(given)
    return want == given and (type(want) is type(given) or isinstance(want, (int, float)))


def _operand_name(actual: Any) -> str:
    """Return the name of a node, or the ``repr`` of a constant, for use in the reasons of obstacles. A list is written
    in brackets.
    """
    if isinstance(actual, (list, tuple)):
        return f"[{', '.join(map(_operand_name, actual))}]"
    return actual.name if isinstance(actual, Node) else repr(actual)


def _transpose_hint(want: Node, actual: Any) -> str:
    """Return a hint that a weight is transposed in only one of the two calls, such as ``: it is not transposed here``.
    Return an empty string if there is no sign of this.

    ``want`` is the pattern's call, and ``actual`` the graph's value. The hint is appended to the reason of an obstacle.
    """
    if canonical_name(want) in TRANSPOSING_OPERATORS:
        return ": it is not transposed here"
    if isinstance(actual, Node) and canonical_name(actual) in TRANSPOSING_OPERATORS:
        return ": it is transposed here"
    near = [actual, *actual.all_input_nodes] if isinstance(actual, Node) else []
    product = next((n for n in near if n.op.startswith("call") and canonical_name(n) in MATRIX_PRODUCTS), None)
    if canonical_name(want) != "linear" or product is None:
        return ""
    if canonical_name(product.all_input_nodes[-1]) in TRANSPOSING_OPERATORS:
        return f": {product.name} says the same in other words, which is another pattern"
    return f": {product.name} multiplies by the weight as it is, linear by its transpose"


def _kind_of_value(actual: Any) -> str:
    """Return the kind of a value in words. Examples are ``a constant``, ``an input of the graph`` and ``a call of
    aten.mm``.
    """
    if not isinstance(actual, Node):
        return "a constant"
    if actual.op == "placeholder":
        return "an input of the graph"
    return f"a call of {operator_name(actual)}" if actual.op.startswith("call") else actual.op
