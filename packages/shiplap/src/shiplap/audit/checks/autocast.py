"""``autocast``: under ``torch.autocast`` the op takes mixed dtypes and follows its declared rule."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

from shiplap.audit.check import Check, Observation, why_random
from shiplap.declare import Arg
from shiplap.dispatch import Op
from shiplap.errors import error_line
from shiplap.sampling.case import SampleCase, tensors_among, tree_map
from shiplap.sampling.compare import bitwise_difference
from shiplap.sampling.run import call_op, run_on, run_op, why_no_backward
from shiplap.sampling.samples import Samples

AUTOCAST_DTYPE = torch.bfloat16
UNCHANGED_FIX = "compute within torch.autocast(device_type, enabled=False), or declare the autocast rule that holds"


def why_skip_autocast(op: Op) -> str:
    """Return why the autocast check does not apply to the op, or an empty string if it does."""
    if reason := why_random(op):
        return reason
    if op.spec.mutated:
        return "the op mutates arguments, which cannot be cast"
    if op.spec.autocast is None:
        return "" if op.spec.tensors else "no argument is a tensor"
    if not any("bfloat16" in t.dtypes or not t.dtypes for t in op.spec.dtype_classes.values()):
        return "no argument admits both float32 and bfloat16"
    return ""


def autocast_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``autocast`` calls the op. They are the base sample and samples without
    optional arguments.
    """
    yield from samples.plain()
    yield from samples.optionals()


def observe_autocast(op: Op, case: SampleCase) -> Observation:
    """Compare calls under autocast with calls outside it on inputs that were cast by the op's declared rule. The
    returned observation has a problem if the bits of the results differ, or if the gradient of a float32 input has
    another dtype.
    """
    if op.spec.autocast is None:
        return _observe_unchanged(op, case)
    flexible = [a.name for a in op.spec.tensors if a.tensor and not a.tensor.concrete]
    present = [
        n for n, v in zip((a.name for a in op.spec.args), case.args, strict=True) if n in flexible and v is not None
    ]
    for narrow in _narrowings(op, present):
        args = tuple(_narrow_argument(a, v, narrow) for a, v in zip(op.spec.args, case.fresh(), strict=True))
        expected_args = _cast_by_rule(op, args)
        try:
            expected = call_op(op, tree_map(torch.clone, expected_args))
        except (RuntimeError, NotImplementedError) as e:
            # torch has no kernel for the narrow dtype on this device, so there is nothing to compare.
            if "not implemented for" in str(e):
                return Observation(skip=error_line(e))
            raise
        mixed = ", ".join(f"{n} in bfloat16" for n in narrow) or "float32 inputs"
        try:
            with torch.autocast(case.device.split(":")[0], dtype=AUTOCAST_DTYPE):
                got = run_on(op, args)
        except Exception as e:
            return Observation(f"{mixed}: raised {error_line(e)}")
        if problem := bitwise_difference(got, expected, "of explicitly cast inputs"):
            return Observation(f"{mixed}, rule {op.spec.autocast!r}: {problem}")
    return _observe_gradient_dtype(op, case)


def _narrowings(op: Op, present: list[str]) -> list[set[str]]:
    """Return a list of sets of argument names. For each set, the check makes one call in which the arguments in the set
    are bfloat16.

    ``present`` has the names of the arguments that can be bfloat16. If the op has an autocast rule and ``present`` has
    several names, each set has one of them, so that dtypes are mixed. Otherwise one set is empty, and another one has
    all names if their dtypes admit bfloat16.
    """
    if op.spec.autocast is None:  # mixed calls are refused, and nothing else may change
        kinds = [a.tensor.dtypes for a in op.spec.tensors if a.tensor and a.name in present]
        return [set(), set(present)] if kinds and all("bfloat16" in kind or not kind for kind in kinds) else [set()]
    return [{name} for name in present] if len(present) > 1 else [set(), set(present)]


def _narrow_argument(arg: Arg, value: object, narrow: set[str]) -> object:
    """Return ``value`` with its floating-point tensors in bfloat16 if the name of the argument is in ``narrow``. Return
    it unchanged otherwise.
    """
    if arg.name not in narrow:
        return value
    return tree_map(lambda t: t.to(AUTOCAST_DTYPE) if t.is_floating_point() else t, (value,))[0]


def _cast_by_rule(op: Op, args: tuple[object, ...]) -> tuple[object, ...]:
    """Return the arguments cast by the op's declared autocast rule. The rule is implemented here a second time,
    independently of the op's own code.
    """
    # Arguments of a fixed dtype are not cast.
    kinds = {a.name: a.tensor.dtype_class for a in op.spec.tensors if a.tensor and not a.tensor.concrete}
    target: dict[str, torch.dtype] = {}
    for kind in set(kinds.values()):
        group = tensors_among(v for a, v in zip(op.spec.args, args, strict=True) if kinds.get(a.name) == kind)
        dtypes = [t.dtype for t in group if t.is_floating_point()]
        if dtypes:
            widest = reduce(torch.promote_types, dtypes)
            rules = {"widest": widest, "autocast": AUTOCAST_DTYPE, "float32": torch.float32}
            target[kind] = widest if widest == torch.float64 else rules.get(op.spec.autocast or "", widest)

    def cast(arg: Arg, value: object) -> object:
        """Return ``value`` with its floating-point tensors in the dtype that ``target`` has for the argument's dtype
        class (such as ``Float``). Return it unchanged if there is none.
        """
        to = target.get(kinds.get(arg.name, ""))
        return value if to is None else tree_map(lambda t: t.to(to) if t.is_floating_point() else t, (value,))[0]

    return tuple(cast(a, v) for a, v in zip(op.spec.args, args, strict=True))


def _observe_gradient_dtype(op: Op, case: SampleCase) -> Observation:
    """Compute gradients of a call under autocast. The returned observation has a problem if the gradient of an input
    has another dtype than the input.
    """
    if why_no_backward(op, case):
        return Observation()
    args = tree_map(lambda t: t.requires_grad_() if t.is_floating_point() else t, case.fresh())
    with torch.autocast(case.device.split(":")[0], dtype=AUTOCAST_DTYPE):
        outs = [o for o in call_op(op, args) if o.requires_grad]
    wanted = [t for t in tensors_among(args) if t.requires_grad]
    grads = torch.autograd.grad([o.float().sum() for o in outs], wanted, allow_unused=True)
    for t, g in zip(wanted, grads, strict=True):
        if isinstance(g, Tensor) and g.dtype != t.dtype:
            return Observation(f"the gradient of a {t.dtype} input is {g.dtype}")
    return Observation()


def _observe_unchanged(op: Op, case: SampleCase) -> Observation:
    """Compare a call under autocast with a call outside it, for an op that is declared with ``autocast=None``. The
    returned observation has a problem if the bits of the results differ.
    """
    with torch.no_grad():
        expected = run_op(op, case)
        with torch.autocast(case.device.split(":")[0], dtype=AUTOCAST_DTYPE):
            got = run_op(op, case)
    if problem := bitwise_difference(got, expected, "without autocast"):
        return Observation(f"autocast=None: {problem}", fix=UNCHANGED_FIX)
    return Observation()


CHECK = Check(
    "autocast",
    order=170,
    observes="mixed float32 and bfloat16 inputs give the bits of explicitly cast inputs; autocast=None changes none",
    observe=observe_autocast,
    cases=autocast_cases,
    varies=("mode",),
    needs=("determinism",),
    patience=60.0,
    fix="give the op an autocast rule (sl.op has one; torch.library.register_autocast)",
    skips=why_skip_autocast,
)
