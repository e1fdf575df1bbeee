"""Samples of a pattern. They are the programs on which a rewrite is proven, and the graphs in which its pattern may
occur.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice, permutations
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from shiplap.cached_property import cached_property
from shiplap.declare.code_digest import code_digest
from shiplap.declare.code_walk import constants_used
from shiplap.dtypes import floating
from shiplap.errors import AuditError, error, error_line
from shiplap.plan import CallPlan
from shiplap.rewrite.graph import fake_value
from shiplap.rewrite.guard import Guard
from shiplap.rewrite.match import Level
from shiplap.rewrite.matcher import PatternGraph
from shiplap.rewrite.normalize_call import canonical_name
from shiplap.rewrite.passthrough_ops import keeps_tensor
from shiplap.rewrite.program import Program
from shiplap.rewrite.signature import PatternSignature
from shiplap.rewrite.walk import as_list
from shiplap.sampling.case import SampleCase
from shiplap.sampling.literals import integers_in_text
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.run import suppress_warnings
from shiplap.sampling.samples import Samples
from shiplap.sampling.sizes import free_dims, name_groups
from shiplap.sampling.values import PLAIN_KINDS
from shiplap.torch_private.graph_nodes import whole_mutation

# Fixed, so that the proof of one digest has one result.
SAMPLE_SEED = 0
STAND_IN_NUMBER = (
    0.7390851332151607  # a float argument while a pattern is traced: no constant of a model is this by accident
)
TRIED_FLOATS = (1e-6, 1e-3, 0.125, 2.0, 16.0)  # tried where the guards do not admit the default of a float argument
# Proven apart from the wide dtypes: casts to float32 and back show only in these.
NARROW_DTYPES = floating(widest=16)
OTHER_DTYPES = (*NARROW_DTYPES, "float64")  # than the base has: in ATen constants and casts name their dtype
MOST_SIZE_ORDERS = 24  # of the sizes of a sample
VARIADIC_RANKS = ((), (2, 3))  # of a variadic dim, besides the usual (2,)
# Numbers of the code around which sizes are drawn, functions that are searched for them, and programs of such sizes.
NEAR_UPPER, NEAR_OBJECTS, MOST_NEAR = 1024, 100, 12

GivenSamples = Callable[[], Iterable[Sequence[Any]]]


class PatternSamples:
    """The test arguments for one pattern, and the graphs to which the pattern is traced on them. The arguments are
    drawn at random from the pattern's annotations, or returned by a function of the pattern's author.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: PatternSignature,
        guards: Sequence[Guard],
        given: GivenSamples | None,
        replacement: Callable[..., Any] | None = None,
    ) -> None:
        """Turn the pattern's annotations and its guards on sizes into a declaration like that of an op. Samples are
        drawn from this declaration. ``given`` is the author's function that returns samples, or None. Sizes are drawn
        around the integer constants in the code of ``replacement``, too.
        """
        self.fn, self.signature, self.guards, self.given, self.replacement = fn, signature, guards, given, replacement
        # With these, `Samples` takes this for an op. Guards on sizes alone are preconditions: it finds what holds.
        self.sampler = None
        self.spec = signature.spec(filter(None, (g.in_named_dims(signature.dim_at, signature.dims) for g in guards)))
        self.bind = CallPlan(self.spec).bind
        self._made: dict[Any, PatternGraph] = {}
        self._narrows: bool | None = None
        floats = (a.name for a in self.spec.scalars if a.scalar == "float")
        # Each float argument is traced as a number of its own, so that its constant is found in the graph.
        self._stands: dict[float, str] = {STAND_IN_NUMBER + i: name for i, name in enumerate(floats)}

    @cached_property
    def samples(self) -> Samples:
        """The generator that draws arguments for the pattern from its annotations. Raise ``SL805`` if the pattern has
        no annotations.
        """
        if not self.signature.args:
            raise error(
                "SL805",
                where=f"rewrite {self.signature.name!r}",
                got="neither annotations nor samples",
                expected="one of them",
                fix='annotate every argument, as in x: Float[Tensor, "*b n"] and eps: float, or give samples=',
            )
        return Samples(self, SAMPLE_SEED)  # type: ignore[arg-type]

    def _listed(self) -> Iterator[tuple[Any, ...]]:
        """Yield the tuples of arguments that the author's function returns. Raise ``SL802`` if one is no tuple or list
        with as many values as the pattern has parameters.
        """
        count = len(self.signature.parameters)
        samples = self.given() if self.given is not None else ()
        # A tensor is iterable, too, but it is no list of samples.
        for args in samples if isinstance(samples, Iterable) and not isinstance(samples, Tensor) else (samples,):
            if not isinstance(args, (list, tuple)) or len(args) != count:
                got = f"{len(args)} arguments" if isinstance(args, (list, tuple)) else type(args).__name__
                raise error(
                    "SL802",
                    where=f"samples of rewrite {self.signature.name!r}",
                    got=got,
                    expected=f"{count} arguments",
                    fix="return a list with one tuple of arguments for each call",
                )
            yield tuple(args)

    @cached_property
    def base(self) -> SampleRecipe:
        """The recipe of the sample from which all others are derived. A recipe states sizes, dtypes and scalars.

        Its floating-point tensors have the dtype float32 if the annotations admit that. All dims have different sizes
        where possible, since equal sizes would share a symbol in a trace. The smallest admitted size is avoided. A
        pattern that halves a size of 2 would compute with 1, which torch does not treat as a symbol.
        """
        try:
            recipe = self.samples.base
        except AuditError as e:  # which speaks of ops
            raise error("SL805", where=f"rewrite {self.signature.name!r}", got=e.got, expected=e.expected) from None
        # Two dims of one size would become one symbol in a trace, and the pattern would fit only equal sizes.
        taken: set[int] = set()
        for name, size in recipe.sizes:
            if not isinstance(size, int):
                taken.update(size)
                continue
            # Multiples come first: a guard such as "k % 16 == 0" admits them.
            for wanted in (*(size * n for n in (2, 3, 4, 5)), size, *(size + n for n in (1, 2, 3))):
                changed = recipe.but(sizes={name: wanted})
                # Sizes 0 and 1 are specialised by torch, so the base avoids them.
                if wanted > 1 and wanted not in taken and self.samples.make(changed) is not None:
                    recipe = changed
                    taken.add(wanted)
                    break
        floats = [a.name for a in self.spec.scalars if a.scalar == "float"]
        tried = (recipe.but(scalars=dict.fromkeys(floats, v)) for v in TRIED_FLOATS)
        return self._with_running_sizes(next((r for r in (recipe, *tried) if self._admitted(r)), recipe))

    def _with_running_sizes(self, recipe: SampleRecipe) -> SampleRecipe:
        """Return ``recipe``, the description of a sample, with its sizes exchanged between dims until the pattern
        raises no error on the sample. Raise ``SL804`` if it raises an error for each of at most 24 orders of the sizes.

        For example, a pattern may require the rotated part of an attention head to be no longer than the head.
        """
        sizes = {name: size for name, size in recipe.sizes if isinstance(size, int)}
        orders = (
            {} if o == (*sizes.values(),) else dict(zip(sizes, o, strict=True)) for o in permutations(sizes.values())
        )
        why = ""
        # n dims have n! orders; 24 are all orders of four dims.
        for changed in islice(orders, MOST_SIZE_ORDERS):
            case = self._admitted(recipe.but(sizes=changed)) if changed else self.samples.make(recipe)
            if case is None:
                continue
            if not (problem := self._error_of_pattern(case)):
                return recipe.but(sizes=changed)
            why = why or f"it raises on {case.label}: {problem}"
        if not why:
            return recipe
        raise error(
            "SL804",
            where=f"the pattern of rewrite {self.signature.name!r}",
            got=why,
            expected="a pattern that runs on sizes that its annotations admit",
            fix='add the sizes that are meant, such as where="r <= d", or give samples=lambda: [(...)]',
        )

    def _error_of_pattern(self, case: SampleCase) -> str:
        """Return the error that the pattern raises on the sample ``case`` as a line of text. Return an empty string if
        it raises none.
        """
        try:
            with suppress_warnings(), torch.no_grad():
                self.fn(*case.fresh())
        except Exception as e:
            return error_line(e)
        return ""

    def _forms(self) -> Iterator[SampleRecipe]:
        """Yield the recipes of samples on which the pattern may be traced to different graphs. They have the sizes of
        ``base``, absent optional arguments, sizes of 1 that broadcast, and other ranks, in this order.
        """
        yield self.base
        yield from (self.base.but(absent=group) for group in name_groups(self.signature.optional))
        for group in name_groups(self.spec.broadcasts, every=True):
            yield self.base.but(sizes=dict.fromkeys(group, 1))
        for dim in (n for n, kind in free_dims(self.spec).items() if kind == "variadic"):
            yield from (self.base.but(sizes={dim: rank}) for rank in VARIADIC_RANKS)

    def _note_narrowing(self, fn: Callable[..., Any], level: Level) -> None:
        """Set ``_narrows`` to whether the pattern ``fn`` casts a float64 value to a narrower dtype of more than 16
        bits, such as float32. It is determined once, and only before autograd.

        Such a pattern is less exact than a replacement that keeps float64. Nothing is then proven or replaced in
        float64.
        """
        if self._narrows is not None or self.given is not None or level != "pre-grad":
            return
        self._narrows = False
        recipe = self._in_dtype(self.base, "float64")
        case = self.samples.make(recipe) if recipe is not None else None
        if case is not None:
            made = trace_pattern(
                fn, self.signature.parameters, self._with_stand_ins(case.fresh())[0], level, self._stands
            )
            casts = (n for n in made.graph.nodes if n.op.startswith("call") and canonical_name(n) == "to")
            # Casts to 16 bits are not meant: a pattern may compute in any narrower dtype that the graph has as well.
            self._narrows = any(fake_value(n.args[0]).dtype.itemsize > fake_value(n).dtype.itemsize > 2 for n in casts)

    def _in_dtype(self, recipe: SampleRecipe, dtype: str) -> SampleRecipe | None:
        """Return ``recipe``, the description of a sample, with the dtype ``dtype`` for all arguments that admit it.
        Return None if no argument admits it, or if it is float64 and the pattern casts float64 to a narrower dtype.
        """
        if dtype == "float64" and self._narrows:
            return None
        classes = self.spec.dtype_classes
        changed = {c: dtype for c, t in classes.items() if dtype in t.dtypes or not t.dtypes}
        return recipe.but(dtypes=changed) if changed else None

    def _admitted(self, recipe: SampleRecipe | None) -> SampleCase | None:
        """Return the sample that ``recipe`` describes, or None if it cannot be used. It can be used if it can be made,
        its arguments fit the annotations, and each guard of the rewrite holds for them.
        """
        case = self.samples.make(recipe) if recipe is not None else None
        if case is None:
            return None
        env, problem = self.signature.bind(dict(zip(self.signature.parameters, case.args, strict=True)))
        return None if problem or any(g.why_refused(env) for g in self.guards) else case

    def programs(self, fn: Callable[..., Any], level: Level) -> Iterator[Program]:
        """Yield the programs on which the rewrite of ``fn`` is proven at the stage ``level``. A program is a function
        with arguments. The programs cover dtypes, ranks, kinds of values, layouts, symbolic sizes, and the sizes 1 and
        0.

        In programs with sizes 1 and 0, the rewrite need not apply, because the compiler may remove the pattern there.
        If the author gave samples, each sample is a program and there are no others.
        """
        self._note_narrowing(fn, level)
        if self.given is not None:
            kinds = ("zeros",)
            yield from (Program(fn, tuple(a), f"sample {i}", kinds=kinds) for i, a in enumerate(self._listed()))
            return
        usual = PLAIN_KINDS[1:]
        for number, recipe in enumerate(self._forms()):
            yield from self._program(
                fn, self._in_dtype(recipe, "float64") or recipe, kinds=usual if number == 0 else ()
            )
        yield from self._program(
            fn, self.base.but(layouts={"every": "transposed"}), fires=level == "pre-grad", runs=False
        )
        # Symbolic sizes take other paths in the compiler than the fixed ones above. After autograd no guard can state
        # that two sizes are equal, so that the program itself states it.
        stated = self._with_equal_sizes(fn) if level == "post-grad" else fn
        fires = level != "post-grad" or not self.guards
        yield from self._program(stated, self.base, dynamic=True, fires=fires)
        for dtype in NARROW_DTYPES:
            yield from self._program(fn, self._in_dtype(self.base, dtype))
        # After autograd a size of 1 folds calls away, so only one case with a size of 0 is run there.
        for sizes in self._edges() if level == "pre-grad" else islice(self._edges(), 1, 2):
            yield from self._program(fn, self.base.but(sizes=sizes), fires=False)
        near = (self._program(fn, self.base.but(sizes=s), fires=False) for s in self._near_constants())
        yield from islice(chain.from_iterable(near), MOST_NEAR)

    def _near_constants(self) -> Iterator[dict[str, int]]:
        """Yield dicts that hold one size each, by the name of its dim. The sizes are the integers from 4 to 1024 in the
        guards and in the replacement's code, and each of these integers plus 1. Every dim gets every such size.

        The replacement may be right only up to such a size, although it is used for every size that the guards admit.
        """
        found = [n for guard in self.guards for n in integers_in_text(guard.source)]
        found += [v for v in constants_used(self.replacement, most=NEAR_OBJECTS) if type(v) is int]
        names = [n for n, kind in free_dims(self.spec).items() if kind != "variadic"]
        # Small numbers are among the usual sizes already.
        for number in dict.fromkeys(v for v in found if 3 < v <= NEAR_UPPER):
            yield from ({name: size} for size in (number + 1, number) for name in names)

    def _with_equal_sizes(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that takes the arguments of the pattern ``fn`` and returns its results. Before it calls
        ``fn``, it asserts that dims with equal names in the annotations have equal sizes. The assertion becomes a part
        of the traced graph.
        """
        pairs: list[tuple[int, int, int, int]] = []
        first: dict[str, tuple[int, int]] = {}
        for i, name in enumerate(self.signature.parameters):
            tensor = next((a.tensor for a in self.spec.tensors if a.name == name), None)
            for at in range(-len(tensor.dims), 0) if tensor else ():
                if dim := self.signature.dim_at(name, at):
                    known = first.setdefault(dim, (i, at))
                    if known != (i, at):
                        pairs.append((*known, i, at))

        def stated(*args: Any) -> Any:
            """Return ``fn(*args)``, the results of the pattern. Before that, assert by ``torch._check`` that dims with
            one name in the annotations have one size.
            """
            for i, a, j, b in pairs:
                if args[i] is not None and args[j] is not None:
                    torch._check(args[i].shape[a] == args[j].shape[b])
            return fn(*args)

        return stated

    def _edges(self) -> Iterator[dict[str, int]]:
        """Yield dicts from the names of dims to sizes. In the first dict all sizes are 1. Each further dict holds one
        dim with size 0.
        """
        names = [n for n, kind in free_dims(self.spec).items() if kind != "variadic"]
        yield dict.fromkeys(names, 1)
        yield from ({n: 0} for n in names)

    def _program(
        self, fn: Callable[..., Any], recipe: SampleRecipe | None, *, runs: bool = True, **options: Any
    ) -> Iterator[Program]:
        """Yield the program of the sample that ``recipe`` describes. Yield nothing if ``recipe`` is None, if the guards
        do not admit the sample, or if ``fn`` raises an error on it. A program is a function with arguments.

        If ``runs`` is true and the rewrite must apply in the program, ``fn`` is taken to raise no error and is not
        called. Otherwise it is called to find out. ``options`` are further attributes of the ``Program``, such as
        ``fires``, whether the rewrite must apply.
        """
        case = self._admitted(recipe)
        if case is not None and ((runs and options.get("fires", True)) or not self._error_of_pattern(case)):
            yield Program(fn, case.fresh(), case.label, **options)

    def patterns(self, fn: Callable[..., Any], level: Level, graph: Graph) -> list[PatternGraph]:
        """Return the graphs to search for in ``graph``. They are those to which the pattern ``fn`` is traced for the
        dtypes, ranks and absent arguments that may occur in ``graph``. A graph that was traced before is reused.

        Before autograd, the traced graph does not depend on the rank. It depends on the dtype only if the pattern
        casts. After autograd it depends on rank, dtype and autocast.
        """
        from shiplap.torch_private.inductor_passes import active_autocasts

        # Under autocast a pattern is traced with other casts.
        of = code_digest(fn), active_autocasts()
        train = level == "joint" and any(str(n.target).startswith("tangents") for n in graph.nodes)
        graphs = []
        casts = False
        self._note_narrowing(fn, level)
        for key, args, stand_ins, other in self._traced(level, graph):
            # Before autograd a graph names no dtypes, unless the pattern casts.
            if other and level == "pre-grad" and not casts:
                continue
            floating = tuple(n for n, a in zip(self.signature.parameters, args, strict=True) if _is_differentiable(a))
            # All are trained, all but the input of the model, or only what flows through frozen weights.
            for leaves in dict.fromkeys((floating, floating[1:], floating[:1])) if train else ((),):
                form = (*of, key, leaves)
                if form not in self._made:
                    self._made[form] = trace_pattern(fn, self.signature.parameters, args, level, stand_ins, leaves)
                graphs.append(self._made[form])
            casts = casts or graphs[-1].casts
        return graphs

    def _traced(self, level: Level, graph: Graph) -> Iterator[tuple[Any, tuple[Any, ...], dict[float, str], bool]]:
        """Yield a tuple ``(key, args, stand_ins, other)`` for each graph to which the pattern may be traced for
        ``graph``.

        ``args`` are the arguments for the trace, and ``key`` identifies them. ``stand_ins`` maps the unusual number
        that stands for each float argument to the argument's name. ``other`` is true if the arguments differ from
        earlier ones only in their dtype.
        """
        if self.given is not None:
            yield from ((i, tuple(args), {}, False) for i, args in enumerate(self._listed()))
            return
        held = [v for v in map(fake_value, graph.nodes) if isinstance(v, Tensor) and v.is_floating_point()]
        dtypes = {str(v.dtype).removeprefix("torch.") for v in held}
        ranks = {v.dim() for v in held}
        for form in self._forms():
            # Another rank gives the same graph before autograd, and cannot occur where no tensor of the graph has it.
            if self._rank(form) != self._rank(self.base) and (level == "pre-grad" or not self._ranks(form) & ranks):
                continue
            for recipe in (form, *(self._in_dtype(form, dtype) for dtype in sorted(dtypes.intersection(OTHER_DTYPES)))):
                if recipe is not None and (case := self.samples.make(recipe)) is not None:  # guards say nothing here
                    yield str(recipe), *self._with_stand_ins(case.fresh()), recipe is not form

    def _with_stand_ins(self, given: Sequence[Any]) -> tuple[tuple[Any, ...], dict[float, str]]:
        """Return a pair of the arguments ``given`` and a dict. In the arguments, an unusual number replaces each float
        argument. The dict maps these numbers to the names of the arguments.

        No model contains such a number by accident, so its occurrences in a trace show where the argument is used.
        """
        floats = {name: number for number, name in self._stands.items()}
        pairs = zip(self.signature.parameters, given, strict=True)
        return tuple(floats.get(n, a) for n, a in pairs), dict(self._stands)

    def _rank(self, recipe: SampleRecipe) -> dict[str, Any]:
        """Return a dict from each variadic dim in ``recipe`` to the tuple of its sizes. A variadic dim stands for any
        number of dims, so these sizes determine the rank of the arguments.
        """
        return {n: v for n, v in recipe.sizes if isinstance(v, tuple)}

    def _ranks(self, recipe: SampleRecipe) -> set[int]:
        """Return the ranks of the arguments with a variadic dim in the sample that ``recipe`` describes."""
        sizes = dict(recipe.sizes)
        kinds = [a.tensor.dims for a in self.spec.tensors if a.tensor and a.tensor.variadic]
        return {sum(len(sizes.get(d.text, ())) if d.kind == "variadic" else 1 for d in dims) for dims in kinds}


def trace_pattern(
    fn: Callable[..., Any],
    names: Sequence[str],
    args: tuple[Any, ...],
    level: Level,
    stand_ins: dict[float, str],
    leaves: Collection[str | None] = (),
) -> PatternGraph:
    """Trace ``fn`` on ``args`` with symbolic sizes, and return the graph with its inputs and results. Raise ``SL804``
    if ``fn`` cannot be traced, does not use an argument, or computes nothing.

    ``names`` are the names of the arguments. Gradients of the arguments ``leaves`` are part of the graph. ``stand_ins``
    maps the unusual number that stands for each float argument to the argument's name.
    """
    from shiplap.torch_private.inductor_passes import capture_graph

    at = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    of_tensors, tensors = Program(fn, args).of_tensors()
    tensors = [t.detach().requires_grad_(names[i] in leaves) for i, t in zip(at, tensors, strict=True)]
    try:
        graph = capture_graph(of_tensors, tensors, level, dynamic=True)
    except Exception as e:
        raise error("SL804", where=fn.__qualname__, got=error_line(e), expected="a graph of its arguments") from e
    if level == "pre-grad" and (node := next((n for n in graph.graph.nodes if whole_mutation(n)), None)) is not None:
        raise error(
            "SL804",
            where=fn.__qualname__,
            got=f"{node.name}, a call of auto_functionalized, which a graph has only behind autograd",
            expected="the calls of a model",
            fix='call the operator itself, as models do, or give level="post-grad"',
        )
    casts = level == "pre-grad" and _remove_idle_casts(graph.graph)
    inputs = {n: names[at[r]] for n, r in graph.roles.items() if isinstance(r, int)}
    unused = [names[i] for i in at if names[i] not in inputs.values()]
    _require_arguments_used(fn, [*unused, *_missing_scalars(graph.graph, stand_ins)])
    pairs = zip(names, args, strict=True)
    fixed = {n: a for n, a in pairs if not isinstance(a, Tensor) and not (type(a) is float and a in stand_ins)}
    tangents = {n: f"gradient {i}" for i, n in enumerate(n for n, r in graph.roles.items() if r == "grad")}
    grads = [inputs[n] for n in graph.roles if inputs.get(n) in leaves] if tangents else []
    results = _pattern_results(graph.graph)
    if tangents:  # gradients come last, one per input, sizes included
        own = [n for n, role in graph.roles.items() if role != "grad"]
        of = dict(zip(own, results[-len(own) :], strict=True))
        results = [*results[: -len(own)], *(of[n] for n in own if inputs.get(n) in leaves)]
    made = PatternGraph(
        graph.graph, {**inputs, **tangents}, results, stand_ins, fixed, tuple(grads), tuple(tangents.values()), casts
    )
    # A pattern without a computation would match everywhere.
    if not made.picked:
        raise error(
            "SL804",
            where=fn.__qualname__,
            got="it computes nothing: its results are its arguments",
            expected="a graph of its arguments",
            fix="write what models compute",
        )
    return made


def _remove_idle_casts(graph: Graph) -> bool:
    """Remove from ``graph``, in place, the casts to the dtype that a value already has, because a model in another
    dtype lacks them. Return whether ``graph`` had any casts.
    """
    casts = [n for n in graph.nodes if n.op.startswith("call") and canonical_name(n) == "to"]
    for node in casts:
        if keeps_tensor(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return bool(casts)


def _missing_scalars(graph: Graph, stand_ins: dict[float, str]) -> list[str]:
    """Return the names of the float arguments whose number does not occur in ``graph``. ``stand_ins`` maps the unusual
    number that stood for each float argument in the trace to the argument's name.
    """
    # The printed graph contains every constant, those inside of lists too.
    text = str(graph)
    return [name for constant, name in stand_ins.items() if repr(constant) not in text]


def _require_arguments_used(fn: Callable[..., Any], missing: Sequence[str]) -> None:
    """Raise ``SL804`` if ``missing`` is not empty. It holds the names of the arguments that the pattern ``fn`` does not
    use.
    """
    # An unused argument could be bound to nothing in the graph.
    if missing:
        raise error(
            "SL804",
            where=fn.__qualname__,
            got=f"it does not use {', '.join(missing)} as it is",
            expected="a graph of its arguments",
            fix="remove the argument, or use it unchanged",
        )


def _pattern_results(graph: Graph) -> list[Any]:
    """Return the values that ``graph`` returns, as a list."""
    (results,) = next(n for n in graph.nodes if n.op == "output").args
    return as_list(results)


def _is_differentiable(value: Any) -> bool:
    """Return whether ``value`` is a floating-point tensor, so that it can have a gradient."""
    return isinstance(value, Tensor) and value.is_floating_point()
