"""``compile``: eager, aot_eager and inductor agree, in one graph, and a new size does not mean a new compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shiplap import torch_private
from shiplap.audit.check import Check, Observation
from shiplap.declare.opaque import guarded_fields
from shiplap.declare.values import Opaque
from shiplap.dispatch import Op
from shiplap.errors import error_line
from shiplap.sampling.case import SampleCase, is_float8, tensors_among
from shiplap.sampling.compare import derive_reduction
from shiplap.sampling.compare_to_reference import against_run
from shiplap.sampling.run import run_on
from shiplap.sampling.samples import Samples

# The number of larger samples, and the recompiles that torch may need for all of them.
SIZES, MOST_RECOMPILES = 4, 2
NOTHING_COMPILED = "torch.compile has compiled nothing: unset TORCH_COMPILE_DISABLE, and leave force_eager stances"


def compile_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``compile`` calls the op.

    They are the base sample, larger ones, samples in which all tensors are transposed or padded, and samples without
    optional arguments.
    """
    layouts = [c for c in samples.layouts() if "every" in dict(c.recipe.layouts)]
    usual = [c for c in layouts if dict(c.recipe.layouts)["every"] in ("transposed", "padded")]
    if not any(_is_strided(c) for c in usual):  # rows of a vector are contiguous in both
        usual += [c for c in layouts if _is_strided(c)][:1]
    yield from chain(samples.plain(), samples.grown(SIZES), usual, samples.optionals())


def _is_strided(case: SampleCase) -> bool:
    """Return whether a tensor of the sample is not contiguous."""
    return any(not t.is_contiguous() for t in tensors_among(case.args))


def _make_doubled_call(op: Op) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that takes the op's arguments, calls the op and returns a tuple of its results. Each
    floating-point result is doubled.

    For the doubling, Inductor generates code that reads the results with the strides that the fake implementation
    promised.
    """

    def program(*args: Any) -> tuple[Tensor, ...]:
        """Return the results of the op on ``args``, with each floating-point tensor multiplied by two."""
        return _double_results(run_on(op, args))

    return program


def _double_results(results: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return ``results`` with each floating-point tensor multiplied by two. A float8 tensor becomes float32. Other
    tensors are unchanged.
    """
    wide = (t.float() if is_float8(t) else t for t in results)
    return tuple(t * 2 if t.is_floating_point() else t for t in wide)


def observe_compile(op: Op, case: SampleCase) -> Observation:
    """Compile the op with the backend aot_eager and compare its results with eager ones. The returned observation has a
    problem if they differ. Only the base sample and samples with another layout, an absent argument or a size that
    broadcasts are compiled.
    """
    # A layout or an absent argument is another graph, which the shared compiled function would count as a recompile.
    other_form = case.recipe.layouts or case.recipe.absent or _broadcasts_a_size(op, case)
    if not other_form and case.recipe != Samples(op, case.seed, case.device).base:
        return Observation()
    torch_private.reset_compiler()
    with torch_private.data_dependent_sizes():
        return _compare_with_eager(
            op, case, torch.compile(_make_doubled_call(op), backend="aot_eager", fullgraph=True), "aot_eager"
        )


def observe_all_sizes(op: Op, cases: list[SampleCase]) -> Observation:
    """Run samples of several sizes through one compiled function, once with the backend aot_eager and once with
    inductor.

    The returned observation has a problem if results are wrong, if the graph breaks or if there are too many
    recompiles.
    """
    plain = [
        c for c in cases if not c.recipe.layouts and c.graph_key == cases[0].graph_key and not _broadcasts_a_size(op, c)
    ]
    transposed = [c for c in cases if dict(c.recipe.layouts).get("every") == "transposed"]
    kinds = len({str([guarded_fields(v) for v in c.args if isinstance(v, Opaque)]) for c in plain})
    reports = []
    with torch_private.data_dependent_sizes():
        for backend, dynamic in (("aot_eager", None), ("inductor", True)):
            torch_private.reset_compiler()
            # One compiled function for all sizes, so that recompiles are counted.
            compiled = torch.compile(_make_doubled_call(op), backend=backend, fullgraph=True, dynamic=dynamic)
            for case in plain:
                if problem := _why_compiled_differs(op, case, compiled, f"{backend}, dynamic={dynamic}"):
                    return Observation(f"{case.label}: {problem}")
            counts = torch_private.compile_counts()
            if not counts.graphs:
                return Observation(missed=NOTHING_COMPILED)
            if problem := _why_too_many_compiles(counts, backend, len(plain), kinds):
                return Observation(
                    problem, fix="compute sizes with SymInts: no int(), no comparison, no loop over them"
                )
            reports.append(f"{backend} {counts.recompiles} recompiles")
        for case in transposed:
            if problem := _why_compiled_differs(op, case, compiled, "inductor"):
                return Observation(f"{case.label}: {problem}")
    return Observation(note=f"0 graph breaks over {len(plain)} sizes, {', '.join(reports)}")


def _broadcasts_a_size(op: Op, case: SampleCase) -> bool:
    """Return whether the sample gives a dim that broadcasts a size of its own.

    A dim annotated ``#n`` broadcasts, that is, its size is 1 or ``n``. Torch compiles another graph for such a sample.
    """
    return not op.spec.broadcasts.keys().isdisjoint(dict(case.recipe.sizes))


def _why_compiled_differs(op: Op, case: SampleCase, compiled: Callable[..., Any], how: str) -> str:
    """Return a message that says how compiled code differs from an eager call, or with which error it fails. Return an
    empty string if the results agree. ``how`` names the backend in the message.
    """
    try:
        return _compare_with_eager(op, case, compiled, how).problem
    except Exception as e:
        return f"{how}: raised {error_line(e)}"


def _why_too_many_compiles(counts: torch_private.CompileCounts, backend: str, sizes: int, kinds: int) -> str:
    """Return a message that names graph breaks or too many recompiles, or an empty string if there are none.

    ``backend`` and ``sizes``, the number of samples, only appear in the text. ``kinds`` is the number of different
    contents of the objects among the arguments. Each beyond the first may cause one more recompile.
    """
    if counts.graph_breaks:
        return f"{backend}: {counts.graph_breaks} graph breaks: {', '.join(counts.break_reasons)}"
    # One recompile makes a size dynamic, a second one may separate sizes 0 and 1.
    if counts.recompiles > MOST_RECOMPILES + kinds - 1:
        return f"{backend}: {counts.recompiles} recompiles over {sizes} sizes"
    return ""


def _compare_with_eager(op: Op, case: SampleCase, compiled: Callable[..., Any], how: str) -> Observation:
    """Compare the results of ``compiled`` on the sample with those of an eager call, both doubled. The returned
    observation has a problem if they differ. ``how`` names the backend in its text.
    """
    expected = _make_doubled_call(op)(*case.fresh())
    got, sums = compiled(*case.fresh()), derive_reduction(op.spec, case.env)
    difference = against_run(op, got, expected, sums, lambda body: _double_results(body(op, case.args)))
    return Observation(
        f"{how} differs from eager: {difference.problem}" if difference.problem else "", error=difference.error
    )


CHECK = Check(
    "compile",
    order=240,
    observes="eager = aot_eager = inductor with fullgraph=True",
    observe=observe_compile,
    cases=compile_cases,
    obligations=("capture",),
    varies=("mode",),
    needs=("determinism",),
    patience=300.0,
    quiet=120.0,
    fix="make the fake promise what the op returns (see the check fake); keep Python out of the op's signature",
    sequence=observe_all_sizes,
)
