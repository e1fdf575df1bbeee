"""The table of a crossed run: for each pair of features how often values were compared, and what was refused."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from shiplap_testing.crossed.declared import Declared, pairs
from shiplap_testing.crossed.impossible import is_one_kind, why_impossible
from shiplap_testing.crossed.run import FAILURES, Record

ENOUGH = 20


@dataclass
class Table:
    """The outcomes of a run. ``met`` counts for each pair of features the calls that agreed with the reference.
    ``refused`` counts for each pair the reasons for which shiplap refused calls. ``failures`` are the records of wrong
    calls. ``outcomes`` counts the outcomes of all calls, and ``ways`` counts them for each way of calling an op, such
    as ``vmap``.
    """

    met: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: dict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    failures: list[Record] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    ways: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    @property
    def impossible(self) -> dict[tuple[str, str], str]:
        """The pairs of features of this run of which no declaration can have both, mapped to the reason. A feature is a
        string such as ``rank:2``.
        """
        features = sorted({f for pair in (*self.met, *self.refused) for f in pair})
        return {pair: why for pair in combinations(features, 2) if (why := why_impossible(*pair))}

    @property
    def scarce(self) -> list[tuple[str, str]]:
        """The pairs of features for which fewer than ``ENOUGH`` calls agreed with the reference, as a sorted list. A
        feature is a string such as ``rank:2``. Pairs for which shiplap refused calls are included.
        """
        return sorted(p for p in {*self.met, *self.refused} if self.met[p] < ENOUGH)

    def to_json(self) -> dict[str, Any]:
        """Return the table as a dict for JSON. It has counts of outcomes, in all and for each way of calling an op
        (such as ``vmap``). It also has the failures, impossible pairs of features with the reason, and how often calls
        with each pair passed or were refused.
        """
        return {
            "outcomes": dict(self.outcomes),
            "ways": {way: dict(counts) for way, counts in sorted(self.ways.items())},
            "pairs": [
                {"pair": list(p), "met": self.met[p], "refused": dict(self.refused.get(p, {}))}
                for p in sorted({*self.met, *self.refused})
            ],
            "impossible": [{"pair": list(pair), "reason": why} for pair, why in self.impossible.items()],
            "failures": self.failures,
        }


def missing_pairs(met: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """Return a mapping from pairs of features to the number of further declarations that should have them.

    A pair needs ``ENOUGH`` compared calls. It gets two declarations for each call that it lacks, and 2 more, since not
    every call is compared. ``met`` has the number of compared calls of a pair by a string such as ``rank:2 x way:out``.
    Pairs without any compared call, and pairs with enough, are left out.
    """
    pairs_met = {tuple(name.split(" x ")): count for name, count in met.items()}
    return {(a, b): 2 * (ENOUGH - n) + 2 for (a, b), n in pairs_met.items() if 0 < n < ENOUGH}


def tabulate(cases: Iterable[Declared], records: Iterable[Record]) -> Table:
    """Return the table of ``records``, the outcomes of calls of the op declarations ``cases``. If a call has several
    records, the last one counts.
    """
    table, by_seed = Table(), {c.seed: c for c in cases}
    last = {(r["seed"], r["way"]): r for r in records}  # a batch that was stopped ran again
    for record in last.values():
        outcome, way = record["outcome"], record["way"]
        if way == "whole":
            continue
        table.outcomes[outcome] += 1
        table.ways[way][outcome] += 1
        case = by_seed.get(record["seed"])
        if outcome in FAILURES:
            table.failures.append(record)
        if case is None:
            continue
        if outcome == "met":
            # A kernel that was refused did not meet the other features.
            table.met.update(pairs(_served(case, record.get("served", ())).features, way))
        elif outcome == "refused":
            reason = reason_of(record["detail"])
            for pair in pairs(case.features, way):
                table.refused[pair][reason] += 1
    return table


def _served(case: Declared, served: Sequence[str]) -> Declared:
    """Return a copy of the op declaration ``case`` whose kernel is ``none`` and whose binding is ``python`` if
    ``served`` lacks ``kernel``. If it lacks only ``binding``, only the binding becomes ``python``. The table then does
    not count what no call tested.
    """
    if "kernel" not in served:
        return replace(case, kernel="none", binding="python")
    return case if "binding" in served else replace(case, binding="python")


def reason_of(detail: str) -> str:
    """Return the first 160 characters of ``detail``, the description of a refusal or failure, in a form that is equal
    for similar reasons. Names of ops are replaced by ``<op>`` and numbers by ``#``. Ids of errors stay.
    """
    text = re.sub(r"crossed::d\d+|\bd\d{2,}\b", "<op>", detail)
    return re.sub(r"SL\d{3}|\d+", lambda found: found[0] if found[0].startswith("SL") else "#", text)[:160]


def markdown(table: Table, cases: Sequence[Declared]) -> str:
    """Return ``table``, the results of a run of the op declarations ``cases``, as Markdown.

    It has totals and a row for each way of calling an op (such as ``vmap``). Pairs of features that were refused or
    rarely passed follow, and then impossible pairs and failures.
    """
    pairs_met = list(table.met.values())
    lines = ["# Crossed declarations", "", f"{len(cases)} declarations, {sum(table.outcomes.values())} calls."]
    lines += [f"{len(pairs_met)} pairs of features met, the rarest {min(pairs_met, default=0)} times.", ""]
    kinds = sorted({k for counts in table.ways.values() for k in counts})
    lines += [f"| way | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
    lines += [f"| {w} | {' | '.join(str(c[k]) for k in kinds)} |" for w, c in sorted(table.ways.items())]
    lines += ["", f"## Pairs that met less than {ENOUGH} times", "", "| pair | met | refused |", "|---|---|---|"]
    for pair in table.scarce:
        refused = table.refused.get(pair, Counter())
        why = "; ".join(f"{n} x {r}" for r, n in refused.most_common(2)).replace("|", "/")
        lines.append(f"| {pair[0]} x {pair[1]} | {table.met[pair]} | {why} |")
    lines += ["", "## Pairs that no declaration has", "", "| pair | reason |", "|---|---|"]
    lines += [f"| {a} x {b} | {why} |" for (a, b), why in table.impossible.items() if not is_one_kind(a, b)]
    lines += ["", f"## Failures: {len(table.failures)}", ""]
    lines += [f"* {r['seed']} {r['way']} {r['outcome']}: {r['detail'][:200]}" for r in table.failures]
    return "\n".join(lines) + "\n"
