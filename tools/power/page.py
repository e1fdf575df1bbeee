"""The page of the mutation score."""

from __future__ import annotations

from collections import Counter
from typing import Any

__all__ = ["HAND", "page"]

HAND = "## Defective ops"  # the part of the page that is kept


def page(rows: list[dict[str, Any]], total: int) -> str:
    """The score, and every survivor."""
    fates = Counter(r["fate"] for r in rows)
    counted = fates["killed"] + fates["survived"]
    share = 100 * fates["killed"] / max(1, counted)
    lines = [
        "# Mutation score",
        "",
        "`make power` writes this page. The mutation score measures how many faults the [audit](audit.md) finds.",
        "A *mutant* is a correct kernel with one planted fault. A mutant counts only if its fault has an effect: its",
        "results must differ from those of the correct kernel by more than the tolerance, on one of up to 1,000 inputs",
        "that the audit did not draw (fewer, if 12 seconds are over). A mutant is *killed* if a check of the audit",
        "fails, and it *survives* if no check fails.",
        "A check that fails on the correct kernel kills none of its mutants. The kernels are written in Python, C and",
        "Triton, which its interpreter runs on the CPU. Those that a GPU runs, in CUDA C++ (`cuda_...`) and in Triton",
        "(`gpu_...`), lose what keeps threads, blocks and streams in order: barriers, fences, atomic updates, the",
        "caller's stream.",
        "",
        f"**The audit killed {fates['killed']} of the {counted} mutants that count ({share:.1f} %).** "
        f"Of the mutants that do not count, {fates['equal']} never differed from the correct kernel, and "
        f"{fates['stillborn']} could not be declared as an op. "
        f"This run examined {len(rows)} of {total} mutants.",
        "",
        "| subject | count | killed | survived |",
        "|---|---|---|---|",
    ]
    for name in sorted({r["subject"] for r in rows}):
        mine = Counter(r["fate"] for r in rows if r["subject"] == name)
        lines.append(f"| {name} | {mine['killed'] + mine['survived']} | {mine['killed']} | {mine['survived']} |")
    lines += [
        "",
        "The number of mutants that each check killed: "
        + ", ".join(f"{k} {n}" for k, n in Counter(r["by"] for r in rows if "by" in r).most_common()),
    ]
    lines += ["", "## Survivors", ""]
    alive = [r for r in rows if r["fate"] == "survived"]
    lines += [
        f"- {r['subject']}, {r['part']} line {r['line']}, {r['operator']}: `{r['before']}` → `{r['after']}`"
        for r in alive
    ]
    return "\n".join([*lines, *([] if alive else ["None."]), ""])
