"""``make power``: plant faults in kernels, and count how many of those that matter the audit finds.

A mutant counts when it differs from the unmutated kernel, beyond tolerance, on inputs that are drawn here and not by
the audit. Only the audit may kill it. Results are lines of a JSON file, so that a run can be cut off and go on.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from operators import Mutant, python_mutants
from subjects import SUBJECTS, Subject

from shiplap.audit import audit
from shiplap.op import Op
from shiplap.referee.isolate import Death, Limits, stream

ORDER = (
    "numerics",
    "edges",
    "special",
    "sizes",
    "gradient",
    "backward",
    "determinism",
    "kernels",
    "schema",
    "fresh",
    "process",
    "threads",
    "transforms",
)  # cheap ones first: one that fails is enough
DEFECTS = "## Defective ops"  # the part of the page that is kept
INPUTS, RELATIVE = 200, 1e-4


def load(subject: Subject, kernel: str, backward: str, namespace: str, folder: Path) -> Op:
    """The op of these two functions, declared anew from a file of its own."""
    file = folder / f"{namespace}.py"
    file.write_text(subject.module(kernel, backward, namespace))
    spec = importlib.util.spec_from_file_location(namespace, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[namespace] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    op: Op = module.op
    return op


def drawn(op: Op, rng: random.Random) -> list[Any]:
    """Arguments from distributions of this file's own: shapes to 4,096, and values of several scales."""
    sizes: dict[str, int] = {}
    values: list[Any] = []
    torch.manual_seed(rng.randrange(2**31))
    big = rng.random() < 0.2
    for arg in op.spec.args:
        if arg.tensor is None:
            values.append(rng.choice([arg.default, 0.3, 2.5, 25.0]) if arg.scalar == "float" else arg.default)
            continue
        for dim in arg.tensor.dims:
            usual = rng.choice([1, 2, 7, 33, 64, 100])
            sizes.setdefault(dim.text, rng.choice([200, 513, 1024, 4096]) if big and not sizes else usual)
        shape = [sizes[d.text] for d in arg.tensor.dims]
        if arg.tensor.dtypes == ("int64",):
            values.append(torch.randint(0, next(iter(sizes.values())), shape))
        else:
            values.append(torch.randn(shape) * rng.choice([1.0, 1.0, 30.0, 1e-3]))
    return values


def differs(mutant: Op, original: Op, seed: int) -> bool:
    """Whether any input shows the fault, in the result or in a gradient."""
    rng = random.Random(seed)
    return any(_differs(mutant, original, drawn(original, rng)) for _ in range(INPUTS))


def _differs(mutant: Op, original: Op, args: list[Any]) -> bool:
    changed = []
    for op in (original, mutant):
        leaves = [v.clone().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v for v in args]
        out = op(*leaves)
        results = [out.detach()]
        if op.gradient is not None:
            torch.manual_seed(1)
            inputs = [v for v in leaves if isinstance(v, Tensor) and v.requires_grad]
            results += torch.autograd.grad(out, inputs, torch.randn(out.shape))
        changed.append(results)
    for a, b in zip(*changed, strict=True):
        scale = b.abs() + b.square().mean().sqrt() if b.numel() else b
        if a.shape != b.shape or bool(((a - b).abs() > RELATIVE * scale + 1e-30).any()):
            return True
        if bool((torch.isfinite(a) != torch.isfinite(b)).any()):
            return True
    return False


def judged(subject: Subject, mutant: Mutant, which: str, original: Op, folder: Path, seed: int) -> dict[str, Any]:
    """What became of one mutant: stillborn, equal, killed by a check, or a survivor."""
    key = hashlib.sha256(f"{subject.name}{which}{mutant.source}".encode()).hexdigest()[:12]
    row = {
        "key": key,
        "subject": subject.name,
        "part": which,
        "operator": mutant.operator,
        "line": mutant.line,
        "before": mutant.before,
        "after": mutant.after,
    }
    kernel, backward = subject.kernel, subject.backward
    kernel, backward = (mutant.source, backward) if which == "kernel" else (kernel, mutant.source)
    try:
        op = load(subject, kernel, backward, f"mutant_{key}", folder)
    except Exception as e:
        return {**row, "fate": "stillborn", "why": type(e).__name__}

    def compare(send: Any) -> None:
        send({"kind": "case", "patience": 120})
        try:
            send({"kind": "found", "differs": differs(op, original, seed)})
        except Exception as e:
            send({"kind": "found", "differs": True, "raised": type(e).__name__})

    events = list(stream(compare, Limits(busy_s=120, idle_s=20)))
    if not any(isinstance(e, Death) for e in events) and not events[-1]["differs"]:
        return {**row, "fate": "equal"}
    for check in ORDER:
        (finding,) = audit(op, checks=[check], seed=seed, budget_s=120)
        if finding.verdict == "fail":
            return {**row, "fate": "killed", "by": check, "evidence": finding.evidence[:160]}
    return {**row, "fate": "survived"}


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
        "results must differ from those of the correct kernel by more than the tolerance, on inputs that the audit",
        "did not draw. A mutant is *killed* if a check of the audit fails, and it *survives* if no check fails.",
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="power", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("build/power.jsonl"))
    parser.add_argument("--page", type=Path, default=Path("docs/power.md"))
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    known = {(r["subject"], r["part"], r["operator"], r["line"], r["before"], r["after"]) for r in rows}
    everything = [
        (subject, mutant, part)
        for subject in SUBJECTS
        for part, source in (("kernel", subject.kernel), ("backward", subject.backward))
        for mutant in (python_mutants(source) if source else ())
    ]
    random.Random(options.seed).shuffle(everything)
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder, options.results.open("a") as file:
        originals = {s.name: load(s, s.kernel, s.backward, f"original_{s.name}", Path(folder)) for s in SUBJECTS}
        for subject, mutant, part in everything:
            if time.monotonic() > end:
                break
            if (subject.name, part, mutant.operator, mutant.line, mutant.before, mutant.after) in known:
                continue
            row = judged(subject, mutant, part, originals[subject.name], Path(folder), options.seed)
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    written = options.page.read_text(encoding="utf-8") if options.page.exists() else ""
    _, heading, rest = written.partition(DEFECTS)  # written by hand: the score takes hours
    options.page.write_text(page(rows, len(everything)) + (f"\n{heading}{rest}" if heading else ""), encoding="utf-8")
    print(page(rows, len(everything)).splitlines()[5], f"{len(rows)} of {len(everything)} mutants looked at")


if __name__ == "__main__":
    main()
