"""One mutant: made, compared with the unmutated kernel on inputs of this file, and given to the audit."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from operators import Mutant, c_mutants, python_mutants, sync_mutants
from subjects import Subject
from torch import Tensor

from shiplap.audit import audit
from shiplap.audit.child_process import ChildDeath, ChildLimits, stream_events
from shiplap.dispatch import Op

__all__ = ["Originals", "judged", "key_of", "load", "mutants"]

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
ON_DEVICE = ("numerics", "edges", "sizes", "special", "determinism", "kernels", "cuda_graph", "sanitizer:racecheck")
INPUTS, RELATIVE = 1000, 1e-4
SECONDS = 12.0  # of comparisons of one mutant with the original: an interpreted kernel sees fewer inputs
BUDGET_S = 240.0  # of one check, on a machine that does other things too


def mutants(subject: Subject) -> list[tuple[str, Mutant]]:
    """Every mutant of a subject, with the part that it changes."""
    of_kernel = c_mutants if subject.language == "c" else python_mutants
    if subject.device != "cpu":
        of_kernel = sync_mutants
    planted = [("kernel", m) for m in of_kernel(subject.kernel)]
    planted += [("backward", m) for m in python_mutants(subject.backward)] if subject.backward else []
    return list({m.source: (part, m) for part, m in planted}.values())


def key_of(subject: Subject, part: str, mutant: Mutant) -> str:
    return hashlib.sha256(f"{subject.name}{part}{mutant.source}".encode()).hexdigest()[:12]


def load(subject: Subject, kernel: str, backward: str, namespace: str, folder: Path) -> Op:
    """The op of these two functions, declared anew from a file of its own."""
    file = folder / f"{namespace}.py"
    file.write_text(subject.module(kernel, backward, namespace))
    module = _imported(file)
    op: Op = module.op
    if subject.compiled:
        from shiplap_testing.build import compile_c

        at = folder / f"built_{namespace}"
        at.mkdir(exist_ok=True)
        compiler = {"c": "cc", "cuda": "nvcc"}[subject.language]
        library = compile_c(at, "kernel", {"kernel": op}, "#include <stdlib.h>\n" + kernel, compiler=compiler)
        bound = f"op.kernel({subject.device!r}, sl.cabi({str(library)!r}, 'kernel', strided={subject.strided!r})"
        bound += f", workspace={subject.workspace!r})\n" if subject.workspace else ")\n"
        exec(bound, vars(module))
        with file.open("a") as text:  # for whoever imports it anew: compute-sanitizer
            text.write(bound)
    return op


def _imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(op: Op, rng: random.Random) -> list[Any]:
    """Arguments from distributions of this file's own: shapes to 4,096, and values of several scales."""
    sizes: dict[str, int] = {}
    values: list[Any] = []
    torch.manual_seed(rng.randrange(2**31))
    big = rng.random() < 0.2
    for arg in op.spec.args:
        if arg.tensor is None:
            offered = {"float": [arg.default, 0.3, 2.5, 25.0], "int": [arg.default, 1, 2, 3, 6]}
            values.append(rng.choice(offered.get(arg.scalar or "", [arg.default])))
            continue
        for dim in arg.tensor.dims:
            usual = rng.choice([1, 2, 7, 33, 64, 100])
            sizes.setdefault(dim.text, rng.choice([200, 513, 1024, 4096]) if big and not sizes else usual)
        shape = [sizes[d.text] for d in arg.tensor.dims]
        if arg.tensor.dtypes == ("int64",):
            values.append(torch.randint(0, next(iter(sizes.values())), shape))
        else:
            values.append(_laid(torch.randn(shape) * rng.choice([1.0, 1.0, 30.0, 1e-3]), rng))
    return values


def _laid(x: Tensor, rng: random.Random) -> Tensor:
    """The same values, now and then behind strides of another order."""
    return x.mT.contiguous().mT if x.dim() > 1 and rng.random() < 0.2 else x


def differs(mutant: Op, original: Op, seed: int, device: str = "cpu") -> tuple[bool, int]:
    """Whether any input shows the fault, in the result or in a gradient; and how many were looked at."""
    rng, end, looked = random.Random(seed), time.process_time() + SECONDS, 0
    for _ in range(20 * INPUTS):
        args = [v.to(device) if isinstance(v, Tensor) else v for v in drawn(original, rng)]
        try:
            want = _results(original, args)
        except Exception:
            continue  # the declaration excludes it
        looked += 1
        with _elsewhere(device) if looked % 2 else nullcontext():
            got = _results(mutant, args)
        if _differs(got, want):
            return True, looked
        if looked == INPUTS or time.process_time() > end:
            break
    return False, looked


@contextmanager
def _elsewhere(device: str) -> Iterator[None]:
    """On a stream of its own that is late; nothing on a CPU."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        torch.cuda._sleep(2_000_000)
        yield
    torch.cuda.synchronize()


def _results(op: Op, args: list[Any]) -> list[Tensor]:
    """The result, and the gradients if the op has any."""
    leaves = [v.clone().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v for v in args]
    out = op(*leaves)
    if op.gradient is None:
        return [out.detach()]
    torch.manual_seed(1)
    inputs = [v for v in leaves if isinstance(v, Tensor) and v.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.randn(out.shape).to(out.device))]


def _differs(got: list[Tensor], want: list[Tensor]) -> bool:
    for a, b in zip(want, got, strict=True):
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return True
            continue
        scale = b.abs() + b.square().mean().sqrt() if b.numel() else b
        if a.shape != b.shape or bool(((a - b).abs() > RELATIVE * scale + 1e-30).any()):
            return True
        if bool((torch.isfinite(a) != torch.isfinite(b)).any()):
            return True
    return False


class Originals:
    """The unmutated ops, and which checks they pass: a check that fails on one of them kills no mutant of it."""

    def __init__(self, folder: Path, seed: int, notes: Path) -> None:
        self.folder, self.seed, self.notes = folder, seed, notes
        self.ops: dict[str, Op] = {}

    def op(self, subject: Subject) -> Op:
        if subject.name not in self.ops:
            name = f"original_{subject.name}"
            self.ops[subject.name] = load(subject, subject.kernel, subject.backward, name, self.folder)
        return self.ops[subject.name]

    def runs(self, subject: Subject) -> bool:
        """Whether the correct kernel is correct on this machine: Triton's interpreter, say, may not fit its numpy."""
        return self.passes(subject, "numerics")

    def passes(self, subject: Subject, check: str) -> bool:
        """Whether ``check`` passes; the processes of a run share the answers through a file."""
        lines = self.notes.read_text(encoding="utf-8").splitlines() if self.notes.exists() else []
        for name, looked, verdict, _ in map(json.loads, lines):
            if (name, looked) == (subject.name, check):
                return bool(verdict != "fail")
        report = audit(self.op(subject), checks=[check], seed=self.seed, budget_s=BUDGET_S, device=subject.device)
        finding = report.findings[0]
        with self.notes.open("ab", buffering=0) as file:
            row = [subject.name, check, finding.verdict, finding.evidence[:160]]
            file.write(json.dumps(row).encode() + b"\n")
        return finding.verdict != "fail"


def judged(subject: Subject, mutant: Mutant, part: str, originals: Originals) -> dict[str, Any]:
    """What became of one mutant: stillborn, equal, killed by a check, or a survivor."""
    original, folder, seed = originals.op(subject), originals.folder, originals.seed
    key = key_of(subject, part, mutant)
    row = {
        "key": key,
        "subject": subject.name,
        "part": part,
        "operator": mutant.operator,
        "line": mutant.line,
        "before": mutant.before,
        "after": mutant.after,
    }
    kernel, backward = subject.kernel, subject.backward
    kernel, backward = (mutant.source, backward) if part == "kernel" else (kernel, mutant.source)
    try:
        op = load(subject, kernel, backward, f"mutant_{key}", folder)
    except Exception as e:
        return {**row, "fate": "stillborn", "why": type(e).__name__}
    if subject.device == "cpu":
        event = _compared(op, original, seed)
    else:
        event = _isolated(folder / f"mutant_{key}.py", folder / f"original_{subject.name}.py", seed, subject.device)
    if event is not None and not event["differs"]:
        return {**row, "fate": "equal", "inputs": event["inputs"]}
    incomplete = []
    for check in ORDER if subject.device == "cpu" else ON_DEVICE:
        finding = audit(op, checks=[check], seed=seed, budget_s=BUDGET_S, device=subject.device).findings[0]
        if finding.verdict == "fail" and originals.passes(subject, check):
            return {**row, "fate": "killed", "by": check, "evidence": finding.evidence[:160]}
        incomplete += [check] if finding.verdict == "incomplete" else []
    compared = event if event is not None else {"ended": True}
    return {**row, "fate": "survived", "incomplete": incomplete, "compared": compared}


def _compared(op: Op, original: Op, seed: int) -> dict[str, Any] | None:
    """What the comparison found, or None if the mutant ended the process in which it ran."""

    def compare(send: Any) -> None:
        send({"kind": "case", "patience": 2 * SECONDS + 30})
        send(_found(op, original, seed, "cpu"))

    events = list(stream_events(compare, ChildLimits(busy_s=2 * SECONDS + 30, idle_s=10)))
    if any(isinstance(e, ChildDeath) for e in events):
        return None
    last: dict[str, Any] = events[-1]  # type: ignore[assignment]
    return last


def _isolated(mutant: Path, original: Path, seed: int, device: str) -> dict[str, Any] | None:
    """The same in a new interpreter: CUDA cannot be used by the fork of a process that has used it."""
    command = [sys.executable, "-W", "ignore", __file__, str(mutant), str(original), str(seed), device]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=4 * SECONDS + 60)
    except subprocess.TimeoutExpired:
        return None
    if ran.returncode:
        return None
    event: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return event


def _found(op: Op, original: Op, seed: int, device: str) -> dict[str, Any]:
    try:
        different, looked = differs(op, original, seed, device)
    except Exception as e:
        return {"kind": "found", "differs": True, "raised": f"{type(e).__name__}: {str(e)[:200]}"}
    return {"kind": "found", "differs": different, "inputs": looked}


if __name__ == "__main__":
    mutated, unmutated = (_imported(Path(file)).op for file in sys.argv[1:3])
    print(json.dumps(_found(mutated, unmutated, int(sys.argv[3]), sys.argv[4])))
