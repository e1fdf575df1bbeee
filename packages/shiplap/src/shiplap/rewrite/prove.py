"""The proof of a rewrite. It compares programs before and after the rewrite in everything that a caller can observe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Graph, Interpreter
from torch.nn import Module

from shiplap.errors import ShiplapError, error, error_line
from shiplap.lazy_imports import uncollected
from shiplap.rewrite import batched_trace
from shiplap.rewrite.match import Match, NearMiss, Outcome
from shiplap.rewrite.program import Program, Provable, proving
from shiplap.rewrite.walk import as_list
from shiplap.sampling.case import widen_tensor
from shiplap.sampling.compare import Reduction, bitwise_difference, compare_within_tolerance
from shiplap.sampling.finding import Finding
from shiplap.sampling.layouts import clone_exactly
from shiplap.sampling.run import suppress_warnings
from shiplap.torch_private import same_storage
from shiplap.torch_private.graph_nodes import node_value, size_hint_of
from shiplap.tuning.key import Key
from shiplap.tuning.proof_cache import keep_proof, proof_key, read_proof

if TYPE_CHECKING:
    from shiplap.torch_private.inductor_passes import CapturedGraph

# In the order of a report: a later check has no meaning where an earlier one fails.
PROOF_CHECKS = ("fires", "deterministic", "outputs", "strides", "aliasing", "mutation", "gradients")
CHECK_FIXES = {
    "fires": "write the pattern as models compute it, and let guards admit its samples",
    "deterministic": "a proof compares two runs: leave randomness out of the pattern",
    "outputs": "correct the replacement: it computes something else",
    "strides": "return the layout that the pattern returns, with .contiguous() or a transpose",
    "aliasing": "return a copy where the pattern does, and a view where it returns one",
    "mutation": "write to the same arguments as the pattern does, or to none",
    "gradients": "let autograd see every step of the replacement, or give its op a backward",
}
TRUSTED_MODULES = (
    "shiplap.rewrite.shipped.",
    "shiplap.rewrite.group.",
)  # modules of rewrites whose programs need no Dynamo
# A replacement that cannot stand is reported under the check that would have found the difference.
CHECK_OF_OBSTACLE = {
    "gradient": "gradients",
    "layout": "strides",
    "dtype": "outputs",
    "shape": "outputs",
    "device": "outputs",
}
GOOD = ("ok", "skip")

R = TypeVar("R", bound=Provable)
_findings: WeakKeyDictionary[Provable, tuple[str, tuple[Finding, ...]]] = WeakKeyDictionary()


def require_proof(rewrite: R) -> R:
    """Return ``rewrite`` unchanged after proving that it keeps results, gradients, strides and writes. Raise ``SL801``
    with the first failed check if it does not.
    """
    for finding in prove_rewrite(rewrite):
        if finding.verdict == "fail":
            raise error(
                "SL801",
                where=f"rewrite {rewrite.name!r} on {finding.input}",
                got=f"{finding.check}: {finding.evidence}",
                expected="the results of the pattern",
                fix=finding.fix,
            )
    return rewrite


def prove_rewrite(rewrite: Provable) -> tuple[Finding, ...]:
    """Return the findings of the proof of ``rewrite``, one for each check of ``PROOF_CHECKS``. The rewrite is refused
    if the verdict of a finding is ``"fail"``.

    The proof of ``rewrite`` runs once in a process. It runs again if a function that it calls has changed meanwhile,
    for example in a notebook. A proof without a fault is kept in the cache (see ``shiplap.tuning.proof_cache``), from
    which other processes read it.

    Raises:
        ShiplapError: ``SL805`` if there is no program to prove it on, ``SL804`` if a program cannot be traced as a
            graph.
    """
    digest = rewrite.digest
    # A function that the rewrite calls may be another one by now, as in a notebook.
    if _findings.get(rewrite, ("",))[0] != digest:
        if known := _read_findings(rewrite, digest):
            _findings[rewrite] = digest, known
        else:
            _run_and_store_proof(rewrite, digest)
    return _findings[rewrite][1]


def _run_and_store_proof(rewrite: Provable, digest: str) -> None:
    """Prove ``rewrite``, whose digest is ``digest``, on its programs. Store the findings in memory and, for other
    processes, in the cache on disk.
    """
    from shiplap.torch_private.inductor_passes import preserving_state, without_autocast

    # A proof may run while a user's model is compiled, so the compiler's state is restored afterwards. A collection of
    # garbage takes 0.2 s with a compiler in memory, and a proof makes little garbage.
    with preserving_state(), without_autocast(), suppress_warnings(), uncollected():
        if _findings.get(rewrite, ("",))[0] != digest:  # no other thread did it meanwhile
            _findings[rewrite] = digest, _run_proof_programs(rewrite)
            # The digest once more: samples that count their calls are others now.
            _keep_findings(rewrite, rewrite.digest, _findings[rewrite][1])


def _read_findings(rewrite: Provable, digest: str) -> tuple[Finding, ...]:
    """Return the findings of the proof of ``rewrite`` that a process has stored in the cache on disk. Return an empty
    tuple if there are no valid ones.

    ``digest`` is the digest of the rewrite. It is passed because computing it again takes longer than reading the file.
    """
    if not rewrite.code_is_fully_hashed:
        return ()
    kept = read_proof(_proof_key(rewrite, digest))
    listed = kept.get("findings") if kept is not None else None
    findings = tuple(map(_parse_finding, listed)) if isinstance(listed, list) else ()
    return () if None in findings else tuple(f for f in findings if f is not None)


def _keep_findings(rewrite: Provable, digest: str, findings: tuple[Finding, ...]) -> None:
    """Store ``findings``, the result of a proof, in the cache on disk. Store nothing if a check failed, or if
    ``digest`` does not cover all code on which the proof depends.
    """
    if rewrite.code_is_fully_hashed and all(f.verdict in GOOD for f in findings):
        keep_proof(_proof_key(rewrite, digest), {"findings": [asdict(f) for f in findings]})


def _proof_key(rewrite: Provable, digest: str) -> Key:
    """Return the key under which the proof of ``rewrite`` is stored in the cache."""
    return proof_key(f"rewrite {rewrite.name}", digest, level=rewrite.level)


def _parse_finding(kept: Any) -> Finding | None:
    """Return the finding that ``kept``, a parsed JSON value, represents. Return None for any other value, and for a
    failed finding.
    """
    if not isinstance(kept, dict) or kept.keys() != asdict(Finding("", "ok", "", "")).keys():
        return None
    if kept["verdict"] not in GOOD or not all(isinstance(v, str) for v in kept.values()):
        return None
    return Finding(**kept)


def _run_proof_programs(rewrite: Provable) -> tuple[Finding, ...]:
    """Apply ``rewrite`` to the programs of its proof and compare their runs before and after. Return a finding for each
    check. A program is a function with arguments.
    """
    # Costs are not compared in a proof: its samples are too small to pay.
    token = proving.set(True)
    try:
        return tuple(_summarize_observations(rewrite, list(_observe_programs(rewrite))))
    finally:
        proving.reset(token)


@dataclass(frozen=True)
class _CheckObservation:
    """The result of one check on one program. ``problem`` is empty if the check passes. ``label`` names the program."""

    check: str
    problem: str
    label: str


def _observe_programs(rewrite: Provable) -> Iterator[_CheckObservation]:
    """Apply ``rewrite`` to its programs one by one, and yield the result of each check. Stop after the first program in
    which a check fails. A program is a function with arguments.
    """
    for batch in batched_trace.group_for_tracing(iter(rewrite.programs()), rewrite.level):
        for program, captured in zip(batch, _capture_batch(rewrite, batch), strict=True):
            seen = list(_check_program(rewrite, program, captured))
            yield from seen
            # One difference is enough, and each program takes time.
            if any(s.problem for s in seen):
                return


def _summarize_observations(rewrite: Provable, seen: Sequence[_CheckObservation]) -> Iterator[Finding]:
    """Yield one finding for each check of ``PROOF_CHECKS`` from ``seen``, the results of the checks on all programs.
    Raise ``SL805`` if ``seen`` is empty because the rewrite applied in no program.
    """
    if not seen:
        raise error(
            "SL805",
            where=f"rewrite {rewrite.name!r}",
            got="no program in which it fires",
            expected="samples that its guards admit",
        )
    for check in PROOF_CHECKS:
        mine = [s for s in seen if s.check == check]
        bad = next((s for s in mine if s.problem), None)
        if bad:
            yield Finding(check, "fail", rewrite.name, bad.problem, bad.label, CHECK_FIXES[check])
        elif mine:
            yield Finding(check, "ok", rewrite.name, "the same before and after", f"{len(mine)} programs")
        else:
            why = "autograd has run before this level" if check == "gradients" and rewrite.level == "post-grad" else ""
            yield Finding(check, "skip", rewrite.name, why or "no program was compared that far")


def _check_program(rewrite: Provable, program: Program, captured: CapturedGraph) -> Iterator[_CheckObservation]:
    """Apply ``rewrite`` to ``captured``, the graph of ``program``, and run the graph before and after. Yield the result
    of each check.

    If the rewrite does not apply, yield one failed result where ``program.fires`` is true, and otherwise nothing.
    """

    def seen(check: str, problem: str = "") -> _CheckObservation:
        """Return the result of ``check`` on the program that is being checked. ``problem`` is the difference, or an
        empty string if the check passes.
        """
        return _CheckObservation(check, problem, program.label)

    train, tensors = _compares_gradients(rewrite, program), program.of_tensors()[1]
    # Copied first, since apply() changes the graph in place.
    before = _copy_to_interpreter(captured.graph)
    outcomes = list(rewrite.apply(captured.graph))
    if not any(isinstance(o, Match) for o in outcomes):
        if program.fires:
            yield _why_it_did_not_fire(outcomes, seen)
        return
    yield seen("fires")
    captured.graph.lint()
    after = _copy_to_interpreter(captured.graph)
    # One graph serves all kinds of values, since they have the same sizes and strides.
    for values in (tensors, *program.others(tensors)):
        functional = rewrite.level != "pre-grad"
        run = _GraphRun(captured, values, rewrite.level if train else "", program, functional=functional)
        yield from (seen(check, problem) for check, problem in _compare_runs(run, before, after))


def _why_it_did_not_fire(
    outcomes: Sequence[Outcome], seen: Callable[[str, str], _CheckObservation]
) -> _CheckObservation:
    """Return the failed result for a program in which the rewrite should have applied and did not. ``seen`` makes a
    result from the name of a check and a problem.

    The problem is the reason of the ``NearMiss`` in ``outcomes`` with the most fitting nodes.
    """
    misses = [o for o in outcomes if isinstance(o, NearMiss)]
    nearest = max(misses, key=lambda o: o.fitting, default=None)
    if nearest is None:
        return seen("fires", "the pattern is not found in its own program")
    replaced = nearest.reason.startswith("the replacement")  # all fits, and it would not stand where the pattern stood
    return seen(CHECK_OF_OBSTACLE.get(nearest.obstacle, "fires") if replaced else "fires", nearest.reason)


def _compares_gradients(rewrite: Provable, program: Program) -> bool:
    """Return whether gradients are compared for ``program``. This is so if ``program.train`` is true and the rewrite
    runs before autograd or on the joint graph.
    """
    return program.train and rewrite.level != "post-grad"


def _capture_batch(rewrite: Provable, batch: Sequence[Program]) -> Iterator[CapturedGraph]:
    """Yield the graph of each program (function with arguments) of ``batch`` at the stage of compilation where the
    rewrite runs. The graphs come from one common trace if that is possible. Raise ``SL804`` if a program cannot be
    traced.
    """
    # Programs of Shiplap's own rewrites are plain calls, which can be recorded without Dynamo.
    if type(rewrite).__module__.startswith(TRUSTED_MODULES):
        for program in batch:
            yield batched_trace.record_calls(program, rewrite.level) or _capture_or_raise(rewrite, program)
        return
    pieces = batched_trace.capture_together(batch, rewrite.level) if batch[1:] else None
    yield from pieces if pieces is not None else (_capture_or_raise(rewrite, program) for program in batch)


def _capture_or_raise(rewrite: Provable, program: Program) -> CapturedGraph:
    """Return the graph of ``program`` at the stage of compilation where the rewrite runs. Raise ``SL804`` if the
    program cannot be traced.
    """
    try:
        return batched_trace.capture_program(program, rewrite.level, _compares_gradients(rewrite, program))
    except ShiplapError:
        # An error of the catalogue states its own reason.
        raise
    except Exception as e:
        raise error(
            "SL804",
            where=f"rewrite {rewrite.name!r} on {program.label}",
            got=error_line(e),
            expected="one graph of tensors",
        ) from e


def _copy_to_interpreter(graph: Graph) -> Interpreter:
    """Return an interpreter of a copy of ``graph``. Later changes of ``graph`` do not affect it."""
    held = Graph()
    held.output(held.graph_copy(graph, {}))
    return Interpreter(graph.owning_module or Module(), graph=held)  # no code is generated for what is interpreted


class _GraphRun:
    """A callable that runs a graph on fresh copies of fixed values. It returns the results, the arguments after the run
    and the gradients as a ``_RunEffect``.
    """

    def __init__(
        self, captured: CapturedGraph, tensors: Sequence[Tensor], train: str, program: Program, *, functional: bool
    ) -> None:
        """Set the captured graph, the values ``tensors`` of its inputs, and the program that it computes. ``train`` is
        the rewrite's level if gradients are compared, and otherwise an empty string. ``functional`` states whether the
        graph is free of writes.
        """
        self.captured, self.tensors, self.program = captured, tensors, program
        self.differentiate, self.joint = train == "pre-grad", train == "joint"
        self.functional = functional
        self.primals = sum(role != "grad" for role in captured.roles.values())
        # An upper bound of the terms in a sum, by which the tolerance for rounding grows.
        self.terms = max((t.numel() for t in tensors), default=1)

    def __call__(self, module: Interpreter, wide: bool = False) -> _RunEffect:
        """Return the effects of running ``module`` on fresh copies of the values. If ``wide`` is true, floating-point
        values are widened to float64.
        """
        # Each run gets fresh copies with the same strides, so that a write does not reach the next run.
        made = [clone_exactly(widen_tensor(t) if wide else t) for t in self.tensors]
        leaves = self.program.leaves(made, self.differentiate)
        # The same numbers in every run: inputs that are gradients must not differ between runs.
        rng = torch.Generator().manual_seed(1)
        given = [self._input(node, role, leaves, rng, wide) for node, role in self.captured.roles.items()]
        with nullcontext() if self.differentiate else torch.no_grad():
            results = module.run(*given)
        results = as_list(results)
        grads = results[-self.primals :] if self.joint else None
        outs = [o for o in (results[: -self.primals] if self.joint else results) if isinstance(o, Tensor)]
        return _RunEffect(outs, leaves, _gradients_of_leaves(outs, leaves) if self.differentiate else grads)

    def _input(self, node: Any, role: Any, leaves: Sequence[Tensor], rng: torch.Generator, wide: bool) -> Any:
        """Return the value of ``node``, an input of the graph. If ``wide`` is true, a drawn value is widened to
        float64.

        If ``role`` is a number, the value is the tensor of ``leaves`` at that position. If ``role`` is ``"size"``, it
        is a size. Otherwise it is the gradient of a result, drawn with ``rng``.
        """
        if isinstance(role, int):
            return leaves[role]
        held = node_value(node)
        if role == "size":
            return size_hint_of(held)
        drawn = torch.randn([size_hint_of(n) for n in held.shape], generator=rng, dtype=torch.float64).to(held.dtype)
        return (widen_tensor(drawn) if wide else drawn).to(held.device)


@dataclass
class _RunEffect:
    """The results of running a graph, and what the run did to its arguments.

    Attributes:
        outs: the results.
        leaves: the arguments after the run.
        grads: the gradients of the arguments, or None if none are computed.
    """

    outs: list[Tensor]
    leaves: list[Tensor]
    grads: list[Tensor | None] | None


def _gradients_of_leaves(outs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of ``leaves`` for fixed random gradients of ``outs``, the results. Each is None for a leaf
    that has no gradient.
    """
    rng = torch.Generator().manual_seed(2)
    # Integer results have no gradient.
    live = [o for o in outs if o.requires_grad]
    if not live:
        return [None] * len(leaves)
    # Drawn in float64 and cast, so that runs in two dtypes get the same numbers.
    cotangents = [torch.randn(o.shape, generator=rng, dtype=torch.float64).to(o) for o in live]
    wanted = [t for t in leaves if t.requires_grad]
    gradients = iter(torch.autograd.grad(live, wanted, cotangents, allow_unused=True))
    return [next(gradients) if t.requires_grad else None for t in leaves]


def _compare_runs(run: _GraphRun, before: Interpreter, after: Interpreter) -> Iterator[tuple[str, str]]:
    """Run the graphs before and after the rewrite on equal values. Yield pairs of the name of a check and the
    difference that it found, which is an empty string if the check passes. Stop after ``"outputs"`` if the rewritten
    graph raises an error.
    """
    # Two runs of the pattern itself show whether a difference can be blamed on the replacement.
    own, repeat, got = run(before), run(before), None
    # A pattern with random numbers cannot be compared, so this check comes first.
    yield "deterministic", bitwise_difference(repeat.outs, own.outs, "then")
    try:
        got = run(after)
    except Exception as e:
        yield "outputs", f"the replacement fails where the pattern does not: {error_line(e)}"
        return
    try:
        # The results in float64 bound the error that rounding explains.
        wide = run(before, wide=True)
    except Exception:  # it insists on a dtype
        wide = own
    yield "outputs", compare_within_tolerance(got.outs, own.outs, wide.outs, Reduction(run.terms)).problem
    yield "strides", _compare_strides(got.outs, own.outs)
    yield "aliasing", _compare_aliasing(got, own, functional=run.functional)
    yield "mutation", _compare_mutation(got, own, run.tensors)
    if own.grads is not None and got.grads is not None and wide.grads is not None:
        yield "gradients", _compare_gradients(run, own, got, wide)


def _compare_strides(got: Sequence[Tensor], own: Sequence[Tensor]) -> str:
    """Compare the strides of the results ``got`` after the rewrite with those of the results ``own`` before it. Return
    the first difference as a sentence, or an empty string if there is none.
    """
    for i, (g, o) in enumerate(zip(got, own, strict=False)):
        if [s for s, n in zip(g.stride(), g.shape, strict=True) if n > 1] != [
            s for s, n in zip(o.stride(), o.shape, strict=False) if n > 1
        ]:
            return f"result {i} has strides {g.stride()}, before {o.stride()}"
    return ""


def _compare_aliasing(got: _RunEffect, own: _RunEffect, *, functional: bool) -> str:
    """Compare which results share memory with arguments or with other results. ``own`` is the run before the rewrite,
    and ``got`` the run after it. Return the first difference as a sentence, or an empty string if there is none.

    If ``functional`` is true, a result may be a new tensor where it was a view before. In a graph without writes, torch
    itself makes views of arguments that it returns.
    """
    for i, (g, o) in enumerate(zip(got.outs, own.outs, strict=False)):
        for j, (a, b) in enumerate(zip(got.leaves, own.leaves, strict=True)):
            if same_storage(g, a) != same_storage(o, b) and not (functional and same_storage(o, b)):
                return f"result {i} is {'a' if same_storage(g, a) else 'no'} view of argument {j}; before it was not so"
        for j in range(i):
            if same_storage(g, got.outs[j]) != same_storage(o, own.outs[j]):
                return f"results {j} and {i} {'share' if same_storage(g, got.outs[j]) else 'no longer share'} memory"
    return ""


def _compare_mutation(got: _RunEffect, own: _RunEffect, tensors: Sequence[Tensor]) -> str:
    """Compare what is written to arguments. ``own`` is the run before the rewrite, and ``got`` the run after it.
    ``tensors`` are the arguments before both runs. Return the first difference as a sentence, or an empty string if
    there is none.
    """
    for i, (g, o, t) in enumerate(zip(got.leaves, own.leaves, tensors, strict=True)):
        if bool(bitwise_difference([g], [t])) != bool(bitwise_difference([o], [t])):
            done = "written to" if bitwise_difference([g], [t]) else "left alone"
            return f"argument {i} is {done}; before it was not so"
        if bitwise_difference([o], [t]) and (problem := compare_within_tolerance([g], [o], [o], Reduction(1)).problem):
            return f"what is written to argument {i}: {problem}"
    return ""


def _compare_gradients(run: _GraphRun, own: _RunEffect, got: _RunEffect, wide: _RunEffect) -> str:
    """Compare the gradients of ``own``, the run before the rewrite, and ``got``, the run after it. ``wide`` is a run in
    float64, whose gradients bound the error of rounding. Return the first difference as a sentence, or an empty string
    if there is none.
    """
    for i, (g, o) in enumerate(zip(got.outs, own.outs, strict=False)):
        if g.requires_grad != o.requires_grad:
            return f"result {i} {'carries' if g.requires_grad else 'carries no'} gradient; before it was not so"
    assert own.grads is not None
    assert got.grads is not None
    assert wide.grads is not None
    for i, (mine, before, exact) in enumerate(zip(got.grads, own.grads, wide.grads, strict=True)):
        if (mine is None) != (before is None):
            return f"argument {i} has {'no gradient' if mine is None else 'a gradient'}; before it was not so"
        if mine is None or before is None or exact is None:
            continue
        if problem := compare_within_tolerance([mine], [before], [exact], Reduction(run.terms)).problem:
            return f"of argument {i}: {problem}"
    return ""
