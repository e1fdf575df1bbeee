"""``rewrite`` declares a pattern and its replacement. Both are plain functions of the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from shiplap.declare.code_digest import first_unfollowed
from shiplap.declare.keyword_values import with_checked_arguments
from shiplap.dispatch import compile_cache_key as digest
from shiplap.errors import error, error_line
from shiplap.rewrite.base import Rewrite, short_digest
from shiplap.rewrite.graph import ReplacementRefused, describe_node, place_replacement, remove_dead_calls
from shiplap.rewrite.guard import Guard
from shiplap.rewrite.match import LEVELS, OBSTACLE_FIXES, Level, Match, NearMiss, Outcome
from shiplap.rewrite.matcher import (
    PartialMatch,
    PatternGraph,
    check_sizes,
    check_users,
    match_other_outputs,
    match_output,
)
from shiplap.rewrite.normalize_call import canonical_name
from shiplap.rewrite.obstacle import RewriteObstacle
from shiplap.rewrite.pattern_samples import PatternSamples
from shiplap.rewrite.program import Program, proving
from shiplap.rewrite.signature import PatternSignature
from shiplap.rewrite.walk import as_list
from shiplap.torch_private import graph_nodes, symbolic_sizes

DEFAULT_NO_GAIN_REASON = "it does not pay here"


class PatternRewrite(Rewrite):
    """A rewrite that puts ``replacement`` where a graph computes the function ``pattern``.

    Attributes:
        pattern: the function that models compute.
        replacement: the function to compute instead, with the same arguments.
        guards: conditions on the values that the arguments are bound to.
        pays: a function of fake arguments. It returns True if the replacement is worth it, or the reason why not.
    """

    def __init__(
        self,
        name: str,
        pattern: Callable[..., Any],
        replacement: Callable[..., Any],
        level: Level,
        where: Iterable[str],
        samples: Any,
        pays: Callable[..., bool | str] | None,
    ) -> None:
        """Read the signature of ``pattern``, parse the guards in ``where``, and store the other arguments. Neither
        function is traced yet.
        """
        self.name, self.level, self.pattern, self.replacement, self.pays = name, level, pattern, replacement, pays
        self.signature = PatternSignature(name, pattern)
        known = frozenset(self.signature.parameters) | self.signature.dims
        self.guards = tuple(Guard.parse(w, known, f"rewrite {name!r}") for w in where)
        self._drawn = PatternSamples(pattern, self.signature, self.guards, samples, replacement)

    def __repr__(self) -> str:
        """Return ``<rewrite NAME at LEVEL>``."""
        return f"<rewrite {self.name} at {self.level}>"

    @property
    def _functions(self) -> tuple[Callable[..., Any] | None, ...]:
        """The functions of the user on which the effect of the rewrite depends. They are the pattern, the replacement,
        ``pays`` and ``samples``, in this order, with None for one that was not given.
        """
        return self.pattern, self.replacement, self.pays, self._drawn.given

    @property
    def code_is_fully_hashed(self) -> bool:
        """Whether the digest covers all code of the user's functions. If it does not, the result of the proof is not
        kept for other processes.
        """
        return not any(first_unfollowed(f) for f in self._functions if f)

    @property
    def digest(self) -> str:
        """A digest of the name, the level, the user's functions, the guards and the annotated arguments."""
        functions = [digest.op_cache_key(f) if f else "" for f in self._functions]
        parts = [self.name, self.level, *functions, *(g.source for g in self.guards), *map(repr, self.signature.args)]
        return short_digest(*parts)

    def programs(self) -> Iterator[Program]:
        """Return an iterator over the programs on which the rewrite is proven. A program is the pattern with example
        arguments. They are drawn from the pattern's annotations or returned by the function ``samples``.
        """
        return self._drawn.programs(self.pattern, self.level)

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Replace the pattern's computation wherever it matches in ``graph``. Yield a ``Match`` for each replacement,
        in graph order. Then yield a ``NearMiss`` for each node at which at least half of the pattern fits and an
        obstacle remains.
        """
        from shiplap.torch_private.inductor_passes import preserving_state

        with preserving_state():
            patterns = self._drawn.patterns(self.pattern, self.level, graph)
        # They would be readers that keep a value from being replaced.
        remove_dead_calls(graph)
        names = [canonical_name(call) for p in patterns for call in p.calls]
        graph_nodes.separate_written_views(graph, {name[1] for name in names if isinstance(name, tuple)}, self.level)
        # Only nodes with the operator of a pattern's first output can be its result.
        roots = {canonical_name(p.outputs[0]) for p in patterns}
        gone: set[str] = set()
        misses: list[tuple[str, NearMiss]] = []
        for node in list(graph.nodes):
            if node.op.startswith("call") and canonical_name(node) in roots and node.name not in gone:
                outcome = self._replace_match(graph, node, patterns)
                if isinstance(outcome, Match):
                    gone.update(outcome.nodes)
                    yield outcome
                elif outcome is not None:
                    misses.append((node.name, outcome))
        yield from (miss for root, miss in misses if root not in gone)  # what belongs to a match is no miss

    def _replace_match(self, graph: Graph, node: Node, patterns: Sequence[PatternGraph]) -> Match | NearMiss | None:
        """Replace the computation of ``node`` by the first of ``patterns`` that matches there. ``patterns`` are the
        graphs to which the pattern may be traced.

        Return the ``Match``. If none of ``patterns`` matches, return the ``NearMiss`` of the one that fits the most
        nodes. Return None if less than half of its nodes fit.
        """
        best: tuple[PatternGraph, PartialMatch, RewriteObstacle] | None = None
        # Forms are tried in the order of pattern_samples: the usual one first.
        for pattern, fit in ((p, way) for p in patterns for way in match_output(p, node)):
            if fit.stop is None:
                fit = match_other_outputs(pattern, fit, graph)
            stop = fit.stop or self._why_refused(pattern, fit)
            if stop is None:
                match = self._place(graph, pattern, fit)
                if isinstance(match, Match):
                    return match
                stop = RewriteObstacle(node, match.obstacle, match.reason)
            if best is None or len(fit.nodes) > len(best[1].nodes):
                best = pattern, fit, stop
        return self._near(*best) if best else None

    def _why_refused(self, pattern: PatternGraph, fit: PartialMatch) -> RewriteObstacle | None:
        """Return the obstacle if the complete match ``fit`` must not be replaced because of its arguments, its sizes,
        other readers, a guard or ``pays``. Return None if it may be replaced.
        """
        # After autograd the guards of the compiled code are fixed.
        may_guard = self.level != "post-grad"
        env, problem = self.signature.bind({**pattern.fixed, **fit.args}, may_guard=may_guard)
        if problem:
            return RewriteObstacle(fit.nodes[pattern.outputs[0]], *problem)
        # Sizes before guards: a guard may name a dim that does not fit.
        if stop := check_sizes(pattern, fit, any_rank=bool(self.signature.args)) or check_users(pattern, fit):
            return stop
        at = fit.nodes[pattern.outputs[0]]
        for guard in self.guards:
            if why := guard.why_refused(env, may_guard=may_guard):
                return RewriteObstacle(at, "guard", f"{guard.source} does not hold: {why}")
        why = "" if self.pays is None or proving.get() else self._why_not_worth_it(self.pays, env)
        return RewriteObstacle(at, "cost", why) if why else None

    def _why_not_worth_it(self, pays: Callable[..., bool | str], env: Mapping[str, Any]) -> str:
        """Return the reason if the user's function ``pays`` says that the replacement is not worth it for the arguments
        in ``env``. If ``pays`` raises, that is the reason. Return an empty string if the replacement is worth it.
        """
        try:
            answer = pays(**{n: env[n] for n in self.signature.parameters})
            if isinstance(answer, str):
                return answer or DEFAULT_NO_GAIN_REASON
            return (
                ""
                if symbolic_sizes.condition_holds(answer, may_guard=self.level != "post-grad")
                else DEFAULT_NO_GAIN_REASON
            )
        except symbolic_sizes.data_dependent():
            return "whether it pays depends on a size that only the data knows"
        except Exception as e:  # nothing was asked for: a guard that raises does not hold either
            return f"pays= raises {error_line(e)}"

    def _place(self, graph: Graph, pattern: PatternGraph, fit: PartialMatch) -> Match | NearMiss:
        """Replace the nodes that ``fit`` matches in ``graph`` by the replacement. Return the ``Match``. If the
        replacement is not possible there, return a ``NearMiss`` with the reason.
        """
        args = {**pattern.fixed, **fit.args}
        names = self.signature.parameters
        given = [args[n] for n in (*names, *pattern.tangents)]
        return place_replacement(
            graph,
            self.level,
            self.name,
            make_replacement(pattern, self.replacement, names),
            given,
            [fit.nodes[o] for o in pattern.outputs],
            _nodes_to_replace(fit),
            [(n, describe_node(args[n])) for n in names],
        )

    def _near(self, pattern: PatternGraph, fit: PartialMatch, stop: RewriteObstacle) -> NearMiss | None:
        """Return the ``NearMiss`` of ``fit``, a match that ended at the obstacle ``stop``. Return None if less than
        half of the pattern's calls are matched.
        """
        fitting, of = len(fit.nodes), len(pattern.calls)
        # A match of less than half of the pattern is no near miss: every product would be one of attention.
        if 2 * fitting < of:
            return None
        stop.fitting, stop.fix = fitting, OBSTACLE_FIXES.get(stop.obstacle, "")
        return self.near_miss(stop, of)


def _nodes_to_replace(fit: PartialMatch) -> list[Node]:
    """Return the nodes that a match replaces. They are the matched nodes, and calls between them that return their
    argument unchanged, unless other nodes read these calls.
    """
    inside = set(fit.replaced)
    return [*fit.nodes.values(), *(n for n in fit.passed if all(u in inside for u in n.users))]


def make_replacement(
    pattern: PatternGraph, replacement: Callable[..., Any], names: Sequence[str]
) -> Callable[..., list[Any]]:
    """Return a function that computes the outputs of ``pattern`` through ``replacement``. ``names`` are the parameters
    of ``replacement``.

    The function takes the arguments of ``replacement`` and returns its results as a list. For a pattern that was traced
    with gradients, it also takes the gradients of the results, and the list ends with the gradients of the arguments.
    """

    def forward(*args: Any) -> list[Any]:
        """Return the results of ``replacement(*args)`` as a list. Results that the pattern does not compute, such as
        None, are left out.
        """
        results = replacement(*args)
        flat = as_list(results)
        return [flat[i] for i in pattern.picked]

    def both(*given: Any) -> list[Any]:
        """Return a list of the results of the replacement, then of the gradients of its arguments. Values that the
        pattern does not compute are left out. ``given`` holds the arguments, then the gradients of the results. Raise
        ``ReplacementRefused`` if an argument gets no gradient.
        """
        args, tangents = list(given[: len(names)]), given[len(names) :]
        with torch.enable_grad():
            leaves = {n: args[i].detach().requires_grad_() for i, n in enumerate(names) if n in pattern.grads}
            outputs = replacement(*(leaves.get(n, a) for n, a in zip(names, args, strict=True)))
            flat = as_list(outputs)
            # A result without a gradient has no tangent in the joint graph either.
            live = [r for r in flat if isinstance(r, Tensor) and r.requires_grad]
            grads = torch.autograd.grad(live, [leaves[n] for n in pattern.grads], tangents, allow_unused=True)
        for name, grad in zip(pattern.grads, grads, strict=True):
            if grad is None:
                raise ReplacementRefused("gradient", f"the replacement gives {name} no gradient, the pattern does")
        # In the joint graph results and gradients are outputs of one graph without autograd.
        results = [r.detach() for r in flat] + list(grads)
        return [results[i] for i in pattern.picked]

    return both if pattern.tangents else forward


@with_checked_arguments
def rewrite(
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    *,
    name: str = "",
    level: Level = "pre-grad",
    where: Iterable[str] | str = (),
    samples: Callable[[], Iterable[Sequence[Any]]] | None = None,
    pays: Callable[..., bool | str] | None = None,
) -> PatternRewrite:
    """Return a rewrite that puts ``replacement`` where a model computes ``pattern``.

    Args:
        pattern: the computation of models, as a function. Its annotations are those of an op, such as ``x:
            Float[Tensor, "*b k"]``. They state the dtypes and sizes from which the proof draws samples.
        replacement: the computation to put there, as a function with the same parameters.
        name: an identifier. The default is the name of ``replacement``.
        level: ``"pre-grad"`` (torch functions, before autograd), ``"joint"`` or ``"post-grad"`` (ATen operators).
        where: guards, such as ``"x.shape[-1] % 16 == 0"`` or ``"k >= 64"``. :class:`Guard` describes their language.
        samples: a function that returns a list with a tuple of arguments for each sample of the proof. It is needed if
            the annotations do not state which values are valid.
        pays: a function of the arguments, which are fake tensors. It returns True, or the reason why the replacement is
            not worth it.

    Raises:
        ShiplapError: ``SL802`` if an argument other than ``where`` is invalid, ``SL803`` if a guard is. ``SL140`` if
            the arguments do not fit the signature.

    ``rewrites`` proves the results when the rewrite is switched on.
    """
    _require_callables(pattern=pattern, replacement=replacement, samples=samples or list, pays=pays or bool)
    name = name or replacement.__name__
    # One guard may be given without a list; other objects are rejected below with their value.
    where = (where,) if isinstance(where, str) else tuple(where) if isinstance(where, Iterable) else (where,)
    here = f"sl.rewrite({name!r})"
    if strange := [w for w in where if not isinstance(w, str)]:
        raise error("SL803", where=here, got=repr(strange[0])[:80], expected='text, such as "x.shape[-1] % 16 == 0"')
    if not name.isidentifier():
        raise error("SL802", where=here, got=f"name {name!r}", expected="an identifier", fix='give name="..."')
    if level not in LEVELS:
        raise error(
            "SL802",
            where=here,
            got=f"level {level!r}",
            expected=", ".join(LEVELS),
            fix="name one of the expected values",
        )
    parameters = [inspect.signature(f).parameters for f in (pattern, replacement)]
    if named := [str(p) for of in parameters for p in of.values() if p.kind is not p.POSITIONAL_OR_KEYWORD]:
        raise error(
            "SL802",
            where=here,
            got=named[0],
            expected="arguments that may be passed by position",
            fix="remove '*', '**' and '/' from the parameters",
        )
    ours, theirs = map(list, parameters)
    if ours != theirs:
        raise error("SL802", where=here, got=f"replacement({', '.join(theirs)})", expected=f"({', '.join(ours)})")
    return PatternRewrite(name, pattern, replacement, level, where, samples, pays)


def _require_callables(**functions: Any) -> None:
    """Raise ``SL802`` if one of ``functions`` is not callable. The keywords are the parameters that the error names."""
    fix = "give a function of the pattern's arguments; samples= takes a function that returns a list of tuples of them"
    for name, given in functions.items():
        if not callable(given):
            raise error("SL802", where=f"sl.rewrite({name}=...)", got=repr(given)[:80], expected="a function", fix=fix)
