"""``autocast``: under ``torch.autocast`` the op takes mixed dtypes and follows its declared rule."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

from shiplap.audit.check import Check, Observation
from shiplap.declare import Arg
from shiplap.dispatch import Op
from shiplap.sampling.case import Case, tree_map
from shiplap.sampling.compare import bitwise
from shiplap.sampling.run import call, effects, has_backward, last_line, tensors
from shiplap.sampling.samples import Samples

NARROW = torch.bfloat16


def skips(op: Op) -> str:
    """Return the reason why the check does not apply to an op, empty where it does."""
    if op.spec.autocast is None:
        return "the declaration says autocast=None"
    if op.spec.draws:
        return "each call draws other numbers"
    if op.spec.mutated:
        return "the op mutates arguments, which cannot be cast"
    classes = [a.tensor for a in op.spec.tensors if a.tensor and not a.tensor.concrete]
    if not any("bfloat16" in t.dtypes or not t.dtypes for t in classes):
        return "no argument admits both float32 and bfloat16"
    return ""


def cases(samples: Samples) -> Iterable[Case]:
    """Yield plain samples, and those without optional arguments."""
    yield from samples.plain()
    yield from samples.optionals()


def observe(op: Op, case: Case) -> Observation:
    """Compare calls under autocast with calls on explicitly cast inputs."""
    flexible = [a.name for a in op.spec.tensors if a.tensor and not a.tensor.concrete]
    present = [
        n for n, v in zip((a.name for a in op.spec.args), case.args, strict=True) if n in flexible and v is not None
    ]
    # Each argument alone in bfloat16 is a mixed call; with one argument there are only all and none.
    for narrow in ({n} for n in present) if len(present) > 1 else (set(), set(present)):
        args = tuple(_narrowed(a, v, narrow) for a, v in zip(op.spec.args, case.fresh(), strict=True))
        expected_args = _cast(op, args)
        try:
            expected = call(op, tree_map(torch.clone, expected_args))
        except (RuntimeError, NotImplementedError) as e:
            if "not implemented for" in str(e):
                return Observation(skip=last_line(e))
            raise
        mixed = ", ".join(f"{n} in bfloat16" for n in narrow) or "float32 inputs"
        try:
            with torch.autocast(case.device.split(":")[0], dtype=NARROW):
                got = effects(op, args, call(op, args))
        except Exception as e:
            return Observation(f"{mixed}: raised {last_line(e)}")
        if problem := bitwise(got, expected, "of explicitly cast inputs"):
            return Observation(f"{mixed}, rule {op.spec.autocast!r}: {problem}")
    return _gradient(op, case)


def _narrowed(arg: Arg, value: object, narrow: set[str]) -> object:
    """Return an argument in bfloat16 if its name is in ``narrow``."""
    if arg.name not in narrow:
        return value
    return tree_map(lambda t: t.to(NARROW) if t.is_floating_point() else t, (value,))[0]


def _cast(op: Op, args: tuple[object, ...]) -> tuple[object, ...]:
    """Return the arguments cast by the declared rule, written a second time here: per dtype class the widest, the
    context's dtype, or float32.
    """
    # Arguments of a fixed dtype are not cast.
    kinds = {a.name: a.tensor.dtype_class for a in op.spec.tensors if a.tensor and not a.tensor.concrete}
    target: dict[str, torch.dtype] = {}
    for kind in set(kinds.values()):
        group = tensors(v for a, v in zip(op.spec.args, args, strict=True) if kinds.get(a.name) == kind)
        dtypes = [t.dtype for t in group if t.is_floating_point()]
        if dtypes:
            widest = reduce(torch.promote_types, dtypes)
            rules = {"widest": widest, "autocast": NARROW, "float32": torch.float32}
            target[kind] = widest if widest == torch.float64 else rules[str(op.spec.autocast)]

    def cast(arg: Arg, value: object) -> object:
        to = target.get(kinds.get(arg.name, ""))
        return value if to is None else tree_map(lambda t: t.to(to) if t.is_floating_point() else t, (value,))[0]

    return tuple(cast(a, v) for a, v in zip(op.spec.args, args, strict=True))


def _gradient(op: Op, case: Case) -> Observation:
    """Check that a float32 parameter which autocast narrows still gets a float32 gradient."""
    if has_backward(op, case):
        return Observation()
    args = tree_map(lambda t: t.requires_grad_() if t.is_floating_point() else t, case.fresh())
    with torch.autocast(case.device.split(":")[0], dtype=NARROW):
        outs = [o for o in call(op, args) if o.requires_grad]
    wanted = [t for t in tensors(args) if t.requires_grad]
    grads = torch.autograd.grad([o.float().sum() for o in outs], wanted, allow_unused=True)
    for t, g in zip(wanted, grads, strict=True):
        if isinstance(g, Tensor) and g.dtype != t.dtype:
            return Observation(f"the gradient of a {t.dtype} input is {g.dtype}")
    return Observation()


CHECK = Check(
    "autocast",
    order=170,
    observes="mixed float32 and bfloat16 inputs give bit for bit what explicitly cast inputs give",
    observe=observe,
    cases=cases,
    varies=("mode",),
    needs=("determinism",),
    patience=60.0,
    fix="give the op an autocast rule (sl.op has one; torch.library.register_autocast)",
    skips=skips,
)
