"""``sharding``: the op of the shards is the shard of the op.

Each sharding rule, declared or derived, is tried on simulated meshes of 2, 3 and 4 ranks, with the even cuts of DTensor
and with uneven and empty ones. The op's own kernels run, in this process, on the shards of each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, islice

from shiplap.audit.check import Check, Observation
from shiplap.declare.sharding_rule import ShardingRule
from shiplap.dispatch import Op
from shiplap.errors import error_line
from shiplap.sampling.case import SampleCase
from shiplap.sampling.compare import derive_reduction
from shiplap.sampling.compare_to_reference import against_run
from shiplap.sampling.run import call_op, run_op
from shiplap.sampling.samples import Samples
from shiplap.sharding.derive import known_rules, why_underivable
from shiplap.sharding.simulate import NotAdmitted, chunk_sizes, cut_size, merge_shards, run_shards

# On three devices the shards of most sizes are unequal.
MESH_SIZES = (2, 3, 4)


def why_skip_sharding(op: Op) -> str:
    """Return why the check ``sharding`` does not apply to the op, or an empty string if it does. It does not apply if
    no sharding rule is declared or can be derived.
    """
    return f"no rule: {why}" if op.shardings is None and (why := why_underivable(op)) else ""


def sharding_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``sharding`` calls the op. They are the base sample, samples without
    optional arguments, and two larger ones.
    """
    yield from chain(samples.plain(), samples.optionals(), islice(samples.grown(2), 2))


def observe_sharding(op: Op, case: SampleCase) -> Observation:
    """Cut the arguments as each sharding rule of the op says, call the op on each shard, and merge the results.

    The returned observation has a problem if the merged results differ from those of a call on the whole arguments.
    """
    rules = known_rules(op, case.args)
    if not rules:
        return Observation(skip="no dim of it may be cut")
    worst = 0.0
    looked: list[str] = []
    for rule in rules:
        size = cut_size(op, rule, case.args)
        for sizes in shard_sizes(size) if size is not None else ():
            problem, error = _compare_cut(op, rule, case, sizes)
            if problem:
                return Observation(f"{rule}; shards of {list(sizes)}: {problem}", error=error)
            worst, looked = max(worst, error), [*looked, rule.name]
    # All shard sizes may violate a precondition, such as a multiple of a tile.
    if not looked:
        return Observation(skip="no shard that the declaration admits")
    return Observation(error=worst, note=f"cut along {', '.join(dict.fromkeys(looked))}")


def shard_sizes(size: int) -> list[Sequence[int]]:
    """Return lists of shard sizes that add up to ``size``, the size of a dim. The divisions that DTensor makes for
    several numbers of devices come first. Uneven divisions, some with empty shards, follow.
    """
    uneven = [[size - 1, 0, 1], [1, size - 1, 0, 0]] if size > 1 else []
    return [*(chunk_sizes(size, world) for world in MESH_SIZES), *uneven]


def _compare_cut(op: Op, rule: ShardingRule, case: SampleCase, sizes: Sequence[int]) -> tuple[str, float]:
    """Call the op on shards of the given ``sizes`` and on the whole arguments, and return ``(problem, error)``.

    ``problem`` describes a difference. It is empty if the results agree, or if the declaration or the rule does not
    admit such shards. ``error`` is the largest error as a multiple of the tolerance.
    """
    if 0 in sizes and not rule.empty:
        return "", 0.0
    try:
        parts = run_shards(op, rule, partial(call_op, op), case.fresh(), sizes)
    except NotAdmitted:
        return "", 0.0
    except Exception as e:  # an op that fails without rows is a finding of `edges`
        return "" if 0 in sizes else f"raised {error_line(e)}", 0.0
    try:
        got = merge_shards(rule.outputs, parts)
    except RuntimeError as e:
        return f"the outputs do not fit together: {error_line(e)}", 0.0
    whole = run_op(op, case)
    got = [g.to(w.dtype) for g, w in zip(got, whole, strict=True)]
    difference = against_run(op, got, whole, derive_reduction(op.spec, case.env), lambda body: body(op, case.args))
    return difference.problem, difference.error


CHECK = Check(
    "sharding",
    order=215,
    observes="the op of the shards is the shard of the op, on meshes of 2, 3 and 4 ranks",
    observe=observe_sharding,
    cases=sharding_cases,
    skips=why_skip_sharding,
    needs=("determinism", "numerics"),
    fix="correct the rule that op.sharding(...) declares; a kernel must not depend on how many rows there are",
    patience=60.0,
)
