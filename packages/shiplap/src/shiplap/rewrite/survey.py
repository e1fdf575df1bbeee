"""``survey_rewrites``, which compiles a function with rewrites in force.

It returns their matches, near misses and savings.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from shiplap.errors import error
from shiplap.render.graph import GraphBox, graph_svg
from shiplap.render.lines import Line, line, plain_json
from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.graph import describe_tensor, fake_tensor, operator_name, source_line
from shiplap.rewrite.match import LEVELS, Level, Match, NearMiss, Outcome, Saving
from shiplap.rewrite.scope import Rewrites
from shiplap.sampling.case import tensors_among
from shiplap.torch_private.graph_objects import leaves
from shiplap.tuning.measure import RacePlan, clock_for, race_runs


@dataclass(frozen=True)
class GraphCall:
    """One node of a graph, as strings that do not refer to the graph.

    Attributes:
        name: the name of the node.
        operator: the operator that it calls, or its kind if it calls none.
        reads: the names of the nodes that it reads.
        shape: its dtype and sizes as text, such as ``float32[8, 64]``.
        where: the line of the user's source that it comes from.
    """

    name: str
    operator: str
    reads: tuple[str, ...]
    shape: str = ""
    where: str = ""

    def __str__(self) -> str:
        """Return the node as one line, such as ``linear: float32[8, 64] = linear(x, w)``."""
        result = f"{self.name}: {self.shape}" if self.shape else self.name
        return f"{result} = {self.operator}({', '.join(self.reads)})"


@dataclass(frozen=True)
class GraphView:
    """The nodes of one graph before and after the rewrites of one stage of compilation.

    ``number`` is the number of the graph, and ``level`` is the stage. ``before`` and ``after`` hold the nodes in graph
    order.
    """

    number: int
    level: Level
    before: tuple[GraphCall, ...]
    after: tuple[GraphCall, ...]

    @property
    def difference(self) -> str:
        """The graph before and after the rewrites as a unified diff with one line per node."""
        before, after = ([str(call) for call in calls] for calls in (self.before, self.after))
        return "\n".join(difflib.unified_diff(before, after, "before", "after", lineterm="", n=2))


@dataclass(frozen=True)
class SurveyStep:
    """The number of kernels and the time of a call without and with one rewrite. The rewrites before it are applied in
    both cases.

    Attributes:
        rewrite: the name of the rewrite.
        kernels: the number of kernels without it and with it.
        seconds: the time of a call without it and with it.
    """

    rewrite: str
    kernels: tuple[int, int]
    seconds: tuple[float, float]

    @property
    def text(self) -> str:
        """The kernels and times without and with the rewrite, such as ``5 -> 4 kernels, 0.812 -> 0.797 ms a call``."""
        return _change(self.kernels, self.seconds)


@dataclass(frozen=True)
class SurveyMeasurement:
    """The number of kernels, the times and the results of a compiled function, without and with rewrites.

    Attributes:
        kernels: the number of kernels without the rewrites and with them.
        seconds: the median time of a call without the rewrites and with them.
        error: the largest difference between results without and with the rewrites, relative to the largest result.
        eager_error: the same difference between compiled code without rewrites and eager code, for comparison.
        steps: the measurements of each rewrite that matched, in the order in which they are applied. The kernels and
            seconds with one rewrite are those without the next.
    """

    kernels: tuple[int, int]
    seconds: tuple[float, float]
    error: float
    eager_error: float
    steps: tuple[SurveyStep, ...] = ()

    @property
    def speedup(self) -> float:
        """The time of a call without the rewrites divided by the time with them."""
        return self.seconds[0] / self.seconds[1]

    @property
    def text(self) -> str:
        """The measurements as one line of text, with kernels and times without and with the rewrites, and the
        difference of results.
        """
        errors = f"results differ by {self.error:.1e}, compiled code from eager by {self.eager_error:.1e}"
        return f"{_change(self.kernels, self.seconds)} ({self.speedup:.2f}x); {errors}"


def _change(kernels: tuple[int, int], seconds: tuple[float, float]) -> str:
    """Return the numbers of kernels and the times in seconds, each without and with the rewrites, as one line of text.
    Times are printed in milliseconds.
    """
    without, with_it = (f"{s * 1e3:.3g}" for s in seconds)
    return f"{kernels[0]} -> {kernels[1]} kernels, {without} -> {with_it} ms a call"


@dataclass(frozen=True)
class RewriteSurvey:
    """The effect of rewrites on a function.

    ``target`` is the name of the function in reports. ``rewrites`` holds a pair of the name and the stage of
    compilation for each rewrite. ``outcomes`` are the matches and near misses. ``views`` are the graphs in which there
    is an outcome, before and after. ``graphs`` is the number of all compiled graphs. ``measured`` holds the kernels and
    times, or None if nothing was measured.
    """

    target: str
    rewrites: tuple[tuple[str, Level], ...]
    outcomes: tuple[Outcome, ...]
    views: tuple[GraphView, ...]
    graphs: int
    measured: SurveyMeasurement | None = None

    @property
    def matches(self) -> list[Match]:
        """The replacements that the rewrites have made in all graphs."""
        return [o for o in self.outcomes if isinstance(o, Match)]

    @property
    def near_misses(self) -> list[NearMiss]:
        """The near misses in all graphs. A near miss is a part of a graph that a rewrite would have replaced if there
        were not a single obstacle.
        """
        return [o for o in self.outcomes if isinstance(o, NearMiss)]

    def step(self, rewrite: str) -> SurveyStep | None:
        """Return the measurement of the rewrite with this name. Return None if it did not match, or if nothing was
        measured.
        """
        return next((s for s in (self.measured.steps if self.measured else ()) if s.rewrite == rewrite), None)

    @property
    def summary(self) -> str:
        """The counts of the outcomes and graphs in one line, such as ``12 matches, 2 near misses in 1 graph``."""
        counts = ((len(self.matches), "match", "es"), (len(self.near_misses), "near miss", "es"))
        text = ", ".join(f"{n} {what}{'' if n == 1 else more}" for n, what, more in counts)
        return f"{text} in {self.graphs} graph{'' if self.graphs == 1 else 's'}"

    @property
    def headline(self) -> str:
        """The value of :attr:`summary`, followed by the nodes and bytes that all matches save together. If there are no
        matches, it is :attr:`summary` alone.
        """
        saved = sum((m.saving for m in self.matches), Saving())
        return f"{self.summary}; {saved}" if self.matches else self.summary

    def lines(self, graphs: bool = False) -> Iterator[Line]:
        """Yield the lines of the printed survey. They are each rewrite with its matches and near misses, and then the
        total.

        If ``graphs`` is true, a unified diff of each graph before and after the rewrites stands before the total.
        Otherwise it is left out.
        """
        for name, level in self.rewrites:
            matches = [m for m in self.matches if m.rewrite == name]
            misses = [m for m in self.near_misses if m.rewrite == name]
            step = self.step(name)
            measured = f"; {step.text}" if step else ""
            text = f"{name} ({level}): {len(matches)} matched, {len(misses)} near{measured}"
            yield line(text, "bold" if matches else "")
            yield from _each_once((m.text for m in matches), "green")
            yield from _each_once((m.text for m in misses), "yellow")
        for view in self.views if graphs else ():
            yield line(f"\ngraph {view.number}, {view.level}", "bold")
            yield line(view.difference)
        yield line(self.headline)
        if self.measured:
            yield line(self.measured.text)

    def as_json(self, facts: Mapping[str, str]) -> dict[str, Any]:
        """Return a dict of JSON values. It holds ``facts``, the matches, the near misses, the measurements, and a
        unified diff of each graph before and after the rewrites.
        """
        measured = asdict(self.measured) | {"speedup": self.measured.speedup} if self.measured else None
        value = {
            "facts": dict(facts),
            "target": self.target,
            "summary": self.summary,
            "graphs": self.graphs,
            "rewrites": [{"name": n, "level": level} for n, level in self.rewrites],
            "matches": [asdict(m) for m in self.matches],
            "near_misses": [asdict(m) for m in self.near_misses],
            "measured": measured,
            "differences": [{"graph": v.number, "level": v.level, "text": v.difference} for v in self.views],
        }
        return plain_json(value)

    def pictures(self) -> Iterator[tuple[Match, int, str, str]]:
        """Yield a tuple for each group of matches with one rewrite and equal operators. It holds the first match, the
        number of matches, and two SVG texts that show the graph around the first match before and after.
        """
        kinds: dict[tuple[Any, ...], list[Match]] = {}
        for match in self.matches:
            kinds.setdefault((match.rewrite, match.operators), []).append(match)
        for first, *rest in kinds.values():
            view = next((v for v in self.views if v.number == first.graph), None)
            if view is not None:
                before, after = _drawing(view.before, first.nodes), _drawing(view.after, first.made)
                yield first, 1 + len(rest), before, after


def _each_once(texts: Iterator[str], style: str) -> Iterator[Line]:
    """Yield a printed line for each different string of ``texts``, in sorted order, with the number of its occurrences
    if there are several. A model repeats its layers, so most strings occur several times.
    """
    for text, same in groupby(sorted(texts)):
        number = len(list(same))
        yield line(f"  {text}" + (f"  ({number} times)" if number > 1 else ""), style)


def _drawing(calls: Sequence[GraphCall], names: Sequence[str], most: int = 40) -> str:
    """Return an SVG picture of the nodes called ``names``, as text. Only the first ``most`` of them are drawn. The
    nodes that they read or that read them are drawn, too. ``calls`` are all nodes of the graph.
    """
    # A picture of more nodes cannot be read.
    inside = set(names[:most])
    by_name = {c.name: c for c in calls}
    around = {n for c in calls if c.name in inside for n in c.reads} | {c.name for c in calls if inside & set(c.reads)}
    shown = [by_name[n] for n in by_name if n in inside | around]
    return graph_svg([GraphBox(c.name, c.operator, c.shape, c.reads, c.name in inside) for c in shown])


class _RecordingRewrites(Rewrites):
    """A ``Rewrites`` object that stores the graphs in which a rewrite has an outcome, before and after the rewrites.
    They are in ``views``. ``compiled`` is the number of compiled graphs.
    """

    def __init__(self, *rewrites: Rewrite) -> None:
        """Collect and prove the rewrites, and start without graphs."""
        super().__init__(*rewrites)
        self.views: list[GraphView] = []
        self.compiled = 0

    @property
    def levels(self) -> set[Level]:
        """All stages of compilation, including those without a rewrite. The graphs are counted at the last stage."""
        return set(LEVELS)  # graphs are counted where they end

    def run(self, level: Level, graph: Graph) -> None:
        """Apply the rewrites of the stage ``level`` to ``graph``, in place. Store the graph before and after if there
        was a match or a near miss.
        """
        seen = len(self.outcomes)
        number, before = self.graphs, list_calls(graph)
        super().run(level, graph)
        self.compiled += level == "post-grad"
        if len(self.outcomes) > seen:
            self.views.append(GraphView(number, level, before, list_calls(graph)))


def list_calls(graph: Graph) -> tuple[GraphCall, ...]:
    """Return the nodes of a graph in order, except its output, as records of strings."""
    return tuple(
        GraphCall(
            n.name,
            operator_name(n) if n.op.startswith("call") else n.op,
            tuple(a.name for a in n.all_input_nodes),
            "" if (held := fake_tensor(n)) is None else describe_tensor(held),
            source_line(n),
        )
        for n in graph.nodes
        if n.op != "output"
    )


def survey_rewrites(
    fn: Callable[..., Any],
    args: Sequence[Any] | Mapping[str, Any],
    rewrites: Sequence[Rewrite],
    *,
    train: bool = False,
    measure: bool = True,
    target: str = "",
    dynamic: bool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> RewriteSurvey:
    """Compile ``fn`` with ``rewrites`` for ``args``, run it, and return the effect of the rewrites. Nothing stays
    compiled, and no cache is read or filled.

    Args:
        fn: the function or module to compile.
        args: its arguments by position, or by name, which many models of transformers need.
        rewrites: the rewrites to apply.
        train: if true, run a backward pass as well. Otherwise gradients are off.
        measure: if true, compile also without rewrites, and with one more at a time of those that matched. Kernels,
            times and results are then compared.
        target: the name of ``fn`` in the result and in errors.
        dynamic: the argument ``dynamic`` of ``torch.compile``.
        say: a function that is called with a text before each compilation.

    Raises:
        ShiplapError: ``SL806`` if no graph was compiled, ``SL801`` if the proof of a rewrite refuses it.
    """
    from shiplap.torch_private import reset_compiler

    if isinstance(args, Mapping):
        fn, args = bind_by_name(fn, args)
    say("proving the rewrites")
    watched = _RecordingRewrites(*rewrites)
    # A function that is compiled already would run without a pass over its graphs.
    reset_compiler()
    try:
        say("compiling with them")
        changed = _CompiledVariant(fn, args, watched.options(), train, dynamic)
        if not watched.compiled:
            where = target or getattr(fn, "__qualname__", type(fn).__name__)
            raise error(
                "SL806",
                where=where,
                got="no graph was compiled",
                expected="a function of tensors that torch.compile can take",
            )
        outcomes, views, graphs = tuple(watched.outcomes), tuple(watched.views), watched.compiled
        measured = _measure_variants(fn, args, watched, changed, say) if measure else None
    finally:
        reset_compiler()
    return RewriteSurvey(
        target, tuple((watched.labels[r], r.level) for r in watched), outcomes, views, graphs, measured
    )


def bind_by_name(fn: Callable[..., Any], given: Mapping[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a pair of a function and the values of ``given`` as a tuple. The function takes these values by position,
    in this order, and passes them to ``fn`` by the names in ``given``.
    """
    names = tuple(given)

    def called(*values: Any) -> Any:
        """Return the result of ``fn`` for ``values``, which are passed by the names in ``given``, in that order."""
        return fn(**dict(zip(names, values, strict=True)))

    called.__qualname__ = getattr(fn, "__qualname__", type(fn).__name__)
    return called, tuple(given.values())


class _CompiledVariant:
    """A function compiled with some options and called once. ``kernels`` is the number of kernels of its code, and
    ``results`` are the tensors that the call returned. Calling the object runs the function again.
    """

    def __init__(
        self, fn: Callable[..., Any], args: Sequence[Any], options: dict[str, Any], train: bool, dynamic: bool | None
    ) -> None:
        """Compile ``fn`` with ``options`` and ``dynamic``, as arguments of ``torch.compile``. Call it once on ``args``,
        and count the kernels of its code. If ``train`` is true, a backward pass follows each call.
        """
        from shiplap.torch_private.inductor_report import observe_graphs

        self.args, self.train, self.dynamic = args, train, dynamic
        self.compiled = torch.compile(_wrap_in_own_code(fn), options=options, dynamic=dynamic)
        with observe_graphs() as graphs:
            self.results = self()
        self.kernels = sum(bool(g.kernel) for graph in graphs for g in graph.groups_with_kernel_names())

    def __call__(self) -> list[Tensor]:
        """Return the tensors that one call of the compiled function returns. In training, a backward pass runs after
        the call.
        """
        return _run_with_backward(self.compiled, self.args, self.train)


def _measure_variants(
    fn: Callable[..., Any], args: Sequence[Any], scope: Rewrites, changed: _CompiledVariant, say: Callable[[str], None]
) -> SurveyMeasurement:
    """Measure ``fn`` compiled without rewrites, then with the rewrites of ``scope`` that matched, adding one at a time.
    Return the kernels, times and differences of results.

    ``changed`` is ``fn`` compiled with all rewrites. ``say`` is called with a text before each compilation.
    """
    rewrites = {m.rewrite for m in scope.matches}
    # In the order in which the compiler applies them, so that each step adds to the code of the one before.
    matched = sorted((r for r in scope if scope.labels[r] in rewrites), key=lambda r: LEVELS.index(r.level))
    variants = []
    for count in range(len(matched)):
        say(f"compiling with {scope.labels[matched[count - 1]]}, too" if count else "compiling without")
        options = Rewrites(*matched[:count]).options()
        variants.append(_CompiledVariant(fn, args, options, changed.train, changed.dynamic))
    if not matched:
        variants.append(_CompiledVariant(fn, args, {}, changed.train, changed.dynamic))
    say("measuring")
    plain, variants = variants[0], [*variants, changed]
    seconds, kernels = _time_variants(variants), [v.kernels for v in variants]
    steps = [
        SurveyStep(scope.labels[r], (kernels[i], kernels[i + 1]), (seconds[i], seconds[i + 1]))
        for i, r in enumerate(matched)
    ]
    differences = (
        _largest_difference(changed.results, plain.results),
        _largest_difference(plain.results, _run_with_backward(fn, args, changed.train)),
    )
    return SurveyMeasurement((kernels[0], kernels[-1]), (seconds[0], seconds[-1]), *differences, tuple(steps))


def _time_variants(variants: Sequence[_CompiledVariant]) -> list[float]:
    """Return the median seconds of a call of each variant, in the order of ``variants``. A variant is the same function
    compiled with different rewrites. The calls of the variants alternate.
    """
    device = next((t.device for t in tensors_among(variants[0].args)), torch.device("cpu"))
    runs = {i: lambda v=v: tuple(v()) for i, v in enumerate(variants)}
    # No variant is given up: the times of slower ones are reported, too.
    plan = RacePlan(seconds=1.5 * len(variants), hopeless=float("inf"))
    timings = race_runs(runs, clock_for(str(device), "never"), plan)
    return [timings[i].median for i in runs]


def _wrap_in_own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``fn`` and has a code object of its own. torch keeps compiled code by code object,
    so each such function is compiled anew.
    """

    def run(*args: Any) -> Any:
        """Return the result of the wrapped function for ``args``."""
        return fn(*args)

    # A new code object: torch would otherwise find the code that it compiled for the variant before.
    run.__code__ = run.__code__.replace()
    return run


def _run_with_backward(fn: Callable[..., Any], args: Sequence[Any], train: bool) -> list[Tensor]:
    """Return the tensors in the result of ``fn(*args)`` as a list, detached.

    If ``train`` is true, run a backward pass from the tensors that have a gradient. If it is false, ``fn`` runs with
    gradients off.
    """
    with torch.set_grad_enabled(train):
        results = [t for t in leaves(_mapping_as_dict(fn(*args))) if isinstance(t, Tensor)]
        live = [t for t in results if t.requires_grad] if train else []
        if live:
            # One backward through all results, as a loss would have it.
            torch.stack([t.float().sum() for t in live]).sum().backward()
    return [t.detach() for t in results]


def _mapping_as_dict(result: Any) -> Any:
    """Return ``result`` as a dict if it has a method ``keys``, and otherwise unchanged. The outputs of models are often
    mappings of their own classes.
    """
    return dict(result) if hasattr(result, "keys") else result


def _largest_difference(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference between floating-point tensors in ``got`` and ``expected``, relative to the largest
    finite value of the expected tensor. It is infinite if one value is NaN or infinite and the other is not equal to
    it.
    """
    worst = 0.0
    for result, wanted in zip(got, expected, strict=False):
        if wanted.is_floating_point() and wanted.numel():
            g, e = result.double(), wanted.double()
            # Infinities of one sign are equal, and their difference would be NaN.
            differ = ~torch.isclose(g, e, rtol=0, atol=0, equal_nan=True)
            # A NaN on one side only counts as an infinite difference.
            off = (g - e)[differ].abs().nan_to_num(float("inf"), float("inf"))
            scale = max(float(e[e.isfinite()].abs().max()) if e.isfinite().any() else 0.0, 1e-30)
            worst = max(worst, float(off.max()) / scale if off.numel() else 0.0)
    return worst
