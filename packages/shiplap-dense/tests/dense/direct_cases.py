"""Triton templates as kernels of their own, interpreted: one JSON line a case. Run by test_direct.py.

With ``--sample``, one check of the audit and two compiled cases only.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

import shiplap as sl
from shiplap.declare.kernel import template_kernel
from shiplap.dispatch import Op
from shiplap.errors import ShiplapNotice
from shiplap.kernels.triton import template_kernel as direct
from shiplap_dense import cuda, ops
from shiplap_testing import interpreted
from tests.dense import direct_ops
from tests.dense.direct_ops import gathered

SMALL = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2, "GROUP_M": 8}


def say(name: str, **values: Any) -> None:
    print(json.dumps({"name": name, **values}), flush=True)


def bind() -> None:
    """The shipped templates with one small config each, and the test op's, for the device that the interpreter has."""
    cuda.attach_templates("cpu")
    direct_ops.attach("cpu")
    for op in (ops.mm, ops.bmm, ops.int8_mm, ops.grouped_mm, ops.conv2d):
        more: dict[str, Any] = {"grouped_mm": {"GROUPS": 8}}
        for template in [t for t in op.templates["cpu"] if t.name == op.spec.opname]:
            small = ({**SMALL, **more.get(template.name, {})},)
            kernel = template_kernel(op.spec, dataclasses.replace(template, configs=small))
            assert kernel is not None
            op.kernels["cpu"] = [kernel]


def case(name: str, op: Op, *args: Any, kernel: Any = None) -> Any:
    """The kernel, run, against the reference in float64."""
    call = op.bind(args)
    kernel = kernel or op.kernels["cpu"][0]
    try:
        serving = kernel.variant_for_call(call)
        if isinstance(serving, str):
            return say(name, refused=serving)
        (got,) = serving.run_call(call)
        wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in call.args]
        want = op.run_reference(tuple(wide))
        say(name, error=interpreted._error(got.double(), want), config=str(serving.config), shape=list(got.shape))
    except Exception as e:
        say(name, failed=f"{type(e).__name__}: {e}"[:2000])


def int8(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def dense_cases() -> None:
    a, b, c = torch.randn(40, 50), torch.randn(50, 36), torch.randn(36)  # two blocks each, the second one cut
    case("mm", ops.mm, a, b)
    case("mm bias", ops.mm, a, b, c)
    case("mm transposed", ops.mm, b.t(), a.t())
    case("mm offset", ops.mm, a[1:, 1:], b[1:, 3:], c[3:])
    case("mm expanded", ops.mm, a[:1].expand(33, 50), b, c[:1].expand(36))
    case("mm strided", ops.mm, a[::2, ::3], b[::3], c)
    case("mm one buffer", ops.mm, a, a.t())
    case("mm one row", ops.mm, a[:1], b, c)
    case("mm no rows", ops.mm, a[:0], b, c)
    case("mm no columns", ops.mm, a, b[:, :0])
    case("mm nothing to add", ops.mm, a[:, :0], b[:0])
    case("mm even", ops.mm, torch.randn(64, 96).half(), torch.randn(96, 64).half(), torch.randn(64).half())
    case("mm float64", ops.mm, a.double(), b.double())
    case("bmm", ops.bmm, torch.randn(2, 40, 50), torch.randn(2, 50, 33))
    case("int8_mm", ops.int8_mm, a, int8(36, 50), torch.rand(36) / 100, c)
    case("int8_mm even", ops.int8_mm, torch.randn(64, 96), int8(32, 96), torch.rand(32) / 100)
    ends = torch.tensor([6, 6, 24, 27, 35], dtype=torch.int32)
    case("grouped_mm", ops.grouped_mm, a, torch.randn(5, 50, 36), ends)
    x, w = torch.randn(2, 10, 11, 16), torch.randn(24, 3, 3, 16)
    case("conv2d", ops.conv2d, x, w, torch.randn(24), [2, 2], [1, 1], [1, 1])
    case("conv2d dilated", ops.conv2d, x, w, None, [1, 2], [0, 0], [2, 2])
    disjoint = torch.randn(2, 16, 6, 5).permute(0, 2, 3, 1), torch.randn(24, 16, 3, 3).permute(0, 2, 3, 1)
    case("conv2d channels apart", ops.conv2d, *disjoint, None, [1, 1], [1, 1], [1, 1])


def descriptor_cases() -> None:
    """A template for the bulk copy engine takes what that can read, and says so of the rest."""
    (template,) = [t for t in ops.mm.templates["cpu"] if t.name == "mm_tma"]
    small = ({**SMALL, "PROGRAMS": 4, "FLATTEN": True},)
    kernel = template_kernel(ops.mm.spec, dataclasses.replace(template, configs=small))
    a, b, c = torch.randn(64, 96).half(), torch.randn(96, 64).half(), torch.randn(64).half()
    case("bulk", ops.mm, a, b, c, kernel=kernel)
    case("bulk transposed", ops.mm, a, b.t().contiguous().t(), kernel=kernel)
    case("bulk of odd rows", ops.mm, torch.randn(64, 97).half()[:, :96], b, kernel=kernel)
    case("bulk of no adjacent axis", ops.mm, a, torch.randn(96, 128).half()[:, ::2], kernel=kernel)
    (template,) = [t for t in ops.grouped_mm.templates["cpu"] if t.name == "grouped_mm_tma"]
    rows, experts = torch.randn(80, 96).half(), torch.randn(5, 96, 72).half()
    for flat in (True, False):
        small = ({**SMALL, "PROGRAMS": 3, "GROUPS": 8, "FLATTEN": flat},)
        grouped = template_kernel(ops.grouped_mm.spec, dataclasses.replace(template, configs=small))
        for name, at in {"rows left over": [6, 6, 50, 57, 75], "ends past the rows": [0, 33, 40, 80, 90]}.items():
            ends = torch.tensor(at, dtype=torch.int32)
            case(f"bulk groups, {name}, {flat}", ops.grouped_mm, rows, experts, ends, kernel=grouped)
    turned = experts.mT.contiguous().mT
    case("bulk groups transposed", ops.grouped_mm, rows, turned, torch.tensor([9, 9, 50, 60, 80]).int(), kernel=grouped)
    case("bulk at an odd address", ops.mm, torch.randn(64 * 96 + 1).half()[1:].view(64, 96), b, kernel=kernel)


def draw(m: int = 40, n: int = 30, k: int = 5, g: int = 1, ci: int = 12, co: int = 10) -> list[Any]:
    sizes = {"m": m, "n": n, "k": k, "g": g, "ci": ci, "co": co, "reflect": False, "scale": 1.0, "after": "nothing"}
    return list(gathered.sampler(torch.Generator().manual_seed(m + n), sizes, torch.float32, torch.device("cpu")))


def gather_cases() -> None:
    full = draw()
    feats, weight, table, order, bias = full[:5]
    case("gather", gathered, *full)
    case("gather unordered", gathered, feats, weight, table)
    case("gather bias alone", gathered, feats, weight, table, None, bias)
    case("gather reflected", gathered, feats, weight, table, order, bias, True)
    case("gather scaled", gathered, feats, weight, table, order, None, False, 1, -0.5)
    case("gather relu", gathered, feats, weight, table, order, None, False, 1, 1.0, "relu")
    case("gather groups", gathered, *draw(g=3))
    case("gather second config", gathered, *draw(ci=20, co=30))
    case("gather in partial sums", gathered, *draw(ci=40, co=50, g=2))
    case("gather in partial sums, half", gathered, *[t.half() if t.is_floating_point() else t for t in draw(ci=40)[:5]])
    case("gather too wide", gathered, *draw(ci=80))
    case("gather one row", gathered, *draw(m=1, n=1))
    case("gather no rows", gathered, *draw(m=0))
    case("gather of nothing", gathered, *draw(n=0))
    case(
        "gather views",
        gathered,
        feats.repeat(1, 2)[:, ::2],
        weight.transpose(2, 3).contiguous().transpose(2, 3),
        table.t().contiguous().t(),
        order,
        bias[:1].expand(10),
    )
    case("gather half", gathered, *[t.half() if t.is_floating_point() else t for t in full[:5]])


def compiled_cases() -> None:
    """The same template through Inductor, with neighbours; eager is the kernel here, which ``gather_cases`` prove."""
    relu = torch.relu
    feats, weight, table, order, bias = draw()[:5]
    c = torch.randn(40, 10)
    fns: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "fused": (lambda f, w, t, o, b, c: relu(gathered(f, w, t, o, b) + c), [feats, weight, table, order, bias, c]),
        "fused reflected": (
            lambda f, w, t, c: relu(gathered(f, w, t, None, None, True, 1, 2.0, "relu")) * c,
            [feats, weight, table, c],
        ),
        "fused groups": (lambda f, w, t, o: relu(gathered(f, w, t, o, None, False, 3)), draw(g=3)[:4]),
        "fused in partial sums": (lambda f, w, t, o, b: relu(gathered(f, w, t, o, b)), draw(ci=40)[:5]),
    }
    for name, (fn, args) in fns.items():
        if SAMPLE and name in ("fused reflected", "fused groups"):
            continue
        try:
            _, error, kernels = interpreted.run(fn, *args)
            say(name, error=error, kernels=kernels)
        except Exception as e:
            say(name, failed=f"{type(e).__name__}: {e}"[:2000])


def eager_cases() -> None:
    """What an eager call runs: its template, or a reference that is a library call, or a reference that says why."""
    ran: list[str] = []
    into = direct.TemplateKernel.run_into

    def watch(self: Any, *args: Any) -> None:
        ran.append(self.template.name)
        into(self, *args)

    direct.TemplateKernel.run_into = watch  # type: ignore[method-assign]
    for name, fn in {
        "template": lambda: gathered(*draw(ci=12)),
        "library": lambda: ops.mm(torch.randn(3, 4), torch.randn(4, 5)),
        "reference": lambda: gathered(*draw(ci=80)),
    }.items():
        ran.clear()
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always", ShiplapNotice)
            fn()
        say(
            f"eager {name}",
            ran=ran,
            messages=[str(w.message) for w in messages if "ordinary way" not in str(w.message)],
        )


def tuned_cases() -> None:
    """Configs are candidates of ``sl.tune``; a stored choice is what eager calls run."""
    from shiplap.declare.config import Config
    from shiplap.dispatch import tuned_choices

    args = draw(m=16, n=9, k=2)
    (choice,) = sl.tune(gathered, [tuple(args)], isolate=False, progress=False, budget=120)
    say(
        "tuned",
        tried=choice.tried,
        wrong=[f.evidence for f in choice.findings if f.verdict == "fail"],
        skipped=[f.evidence for f in choice.findings if f.verdict == "skip"],
    )
    key = ("cpu", *gathered.rule.key(gathered.bind(args)))
    for index, config in enumerate(direct_ops.CONFIGS):
        tuned_choices.install_choice_entries(
            [tuned_choices.ChoiceEntry(gathered.spec.name, gathered.identity, key, "gathered", Config.of(config))]
        )
        say(f"chosen {index}", picked=str(gathered.pick_kernel(gathered.bind(args)).config))
    too_wide = gathered.bind(draw(m=16, n=9, k=2, ci=16, co=17))  # of a bucket with what follows
    fits = gathered.bind(draw(m=16, n=9, k=2, ci=16, co=32))
    key = ("cpu", *gathered.rule.key(too_wide))
    assert key == ("cpu", *gathered.rule.key(fits))
    tuned_choices.install_choice_entries(
        [
            tuned_choices.ChoiceEntry(
                gathered.spec.name, gathered.identity, key, "gathered", Config.of(direct_ops.CONFIGS[0])
            )
        ]
    )
    say("chosen too wide", picked=str(gathered.pick_kernel(too_wide).config))
    tuned_choices.install_choice_entries([], file="")


SAMPLE = "--sample" in sys.argv
CHECKS = ["numerics"] if SAMPLE else ["schema", "numerics", "addresses", "fresh", "large"]


def audited() -> None:
    """The audit runs a template as it runs any kernel; the edges are cases of their own."""
    for finding in sl.audit(gathered, checks=CHECKS, device="cpu", budget=600):  # interpreted, and others are at work
        say(f"audit {finding.check}", verdict=finding.verdict, evidence=finding.evidence)


def renderings() -> None:
    """New numbers of rows render or compile nothing; the text is there for whoever asks."""
    import inspect

    (kernel,) = gathered.kernels["cpu"]
    run: Any = kernel
    for m in (3, 16, 17, 100, 33):
        gathered(*draw(m=m))
    before = len(run.jitted)
    for m in (4, 64, 99):
        gathered(*draw(m=m))
    launcher = next(iter(run.jitted.values()))
    say("renderings", before=before, after=len(run.jitted), source=inspect.getsource(launcher.fn).splitlines()[0])
    (conv,) = ops.conv2d.kernels["cpu"]
    (taps,) = conv.tables.values()
    say("tables", tables=len(taps.tables), looked_at=taps.looked_at)


if __name__ == "__main__":
    torch.manual_seed(20261121)
    bind()
    dense_cases()
    gather_cases()
    descriptor_cases()
    eager_cases()
    renderings()
    tuned_cases()
    audited()
    compiled_cases()
    write = direct.render_kernel
    direct.render_kernel = lambda source, *rest: write(
        source.replace("acc = tl.dot(x, w, acc", "acc = tl.dot(x, w"), *rest
    )  # type: ignore[assignment]
    gathered.kernels.clear()
    direct_ops.attach("cpu")
    case("planted bug", gathered, *draw())
