"""Calls of an op and of its reference on a sample, and the effects of these calls."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shiplap.dispatch import AdoptedOp, Op
from shiplap.dispatch.autograd import detach_results
from shiplap.dispatch.outputs import flatten_op_results, fresh_results, tensors_in_arguments
from shiplap.dtypes import integers_alone
from shiplap.errors import ShiplapError, error_line
from shiplap.sampling.case import (
    GENERATOR_SEED,
    SampleCase,
    arguments_by_name,
    copy_generators,
    is_float8,
    plain_copies,
    tensors_among,
    tree_map,
    widen_tensor,
)
from shiplap.sampling.compare import is_finite
from shiplap.sampling.unordered import sort_unordered_rows


class CallMarks:
    """What a process shows of its calls of ops and references to the process that watches it: whether a reference
    runs, and that calls end, so that it is slow at worst and does not hang.
    """

    def __init__(self, *, shared: bool = False) -> None:
        """Make marks of no calls. If ``shared`` is true, all processes that are forked from now on share them."""
        self._bytes: bytearray | mmap.mmap = mmap.mmap(-1, 2) if shared else bytearray(2)

    @property
    def reference_runs(self) -> bool:
        """Whether the reference of an op is running. This stays true if a process is killed while a reference runs in
        it.
        """
        return bool(self._bytes[0])

    def clear(self) -> None:
        """Record that no reference is running."""
        self._bytes[0] = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context for the run of an op's reference. ``reference_runs`` is true inside of it."""
        self._bytes[0] = 1
        try:
            yield
        finally:
            self._bytes[0] = 0

    def count_ended(self) -> None:
        """Count one more call that has ended."""
        self._bytes[1] = (self._bytes[1] + 1) & 0xFF

    def ended(self) -> int:
        """Return the number of calls that have ended. It starts again at 0 after 255."""
        return self._bytes[1]


_marks = CallMarks()


def use_marks(marks: CallMarks) -> None:
    """Let calls of this process be shown by ``marks`` from now on. A process that was forked for an audit calls this
    with the marks that the audit watches.
    """
    global _marks
    _marks = marks


def results_of(op: Op, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return the results of ``function``, called on ``args`` themselves and not on copies, as a flat tuple of tensors.
    ``function`` has the parameters of ``op``.
    """
    positional, named = op.spec.split(args)
    made = function(*positional, **named)
    if not torch.compiler.is_dynamo_compiling():  # a compiled call of it ends when it is compiled
        _marks.count_ended()
    return flatten_op_results(fresh_results(op.spec, args, made))


def call_op(op: Op, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return the results of the registered op, called on ``args`` themselves and not on copies, as a flat tuple of
    tensors. The rows of results that the declaration calls unordered are sorted.
    """
    return sort_unordered_rows(op.spec, results_of(op, op.overload, args))


def op_effects(op: Op, args: tuple[Any, ...], outs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the effects of a call of the op. These are its results ``outs``, then those tensors in ``args`` that the
    op mutates, including tensors in lists.
    """
    return (*outs, *tensors_in_arguments([v for a, v in zip(op.spec.args, args, strict=True) if a.mutated]))


def run_on(op: Op, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return the effects of the op on ``args`` themselves. These are its results, then the arguments that it
    mutates.
    """
    return op_effects(op, args, call_op(op, args))


def run_op(op: Op, case: SampleCase) -> tuple[Tensor, ...]:
    """Return the effects of the op on fresh copies of the case's arguments. These are its results, then the arguments
    that it mutates.
    """
    return run_on(op, case.fresh())


def require_gradients(op: Op, args: tuple[Any, ...], names: Container[str]) -> tuple[Any, ...]:
    """Call ``requires_grad_()`` on each tensor in ``args`` that belongs to an argument with a name in ``names``. Return
    ``args`` as a tuple.
    """
    return tuple(v.requires_grad_() if n in names else v for n, v in arguments_by_name(op, args).items())


def reference_effects(op: Op, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return the effects of the op's reference on copies of ``args``. These are its results, then the arguments that it
    mutates. The reference of a random op draws from a fixed seed.
    """
    copies = copy_generators(plain_copies(args))
    if op.spec.random:  # without a generator argument, the op draws from torch's own
        torch.manual_seed(GENERATOR_SEED)
    with _marks.running():
        made = results_of(op, op.reference, copies)
    return op_effects(op, copies, sort_unordered_rows(op.spec, made))


def reference_accepts(op: Op, args: tuple[Any, ...]) -> bool:
    """Return whether the op's reference runs on ``args`` without an exception. A declaration may admit arguments for
    which the reference is not defined.
    """
    return not reference_error(op, args)


def keeps_bool(op: Op, args: tuple[Any, ...]) -> bool:
    """Return whether the reference returns bool for each result that has the dtype of an argument of any dtype, of
    which ``args`` has a bool one. A sum of a bool and a number is an integer, so that a declaration of any dtype seldom
    means bool.
    """
    results = zip(op.spec.outputs, reference_effects(op, args), strict=False)
    return all(t.dtype == torch.bool for out, t in results if not (out.tensor.concrete or out.tensor.dtypes))


def reference_error(op: Op, args: tuple[Any, ...]) -> str:
    """Return the message of the error that the op's reference raises on ``args``. Return an empty string if it raises
    none.
    """
    try:
        reference_effects(op, args)
    except Exception as e:
        return error_line(e)
    return ""


def surrogate_results(op: Op, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return the results of the op's surrogate on ``args`` themselves, and not on copies. The surrogate is the function
    of PyTorch operators whose derivative is the op's gradient.
    """
    positional, named = op.spec.split(args)
    with _marks.running():
        made: Any = fresh_results(op.spec, args, op.surrogate(*positional, **named))
    return sort_unordered_rows(op.spec, flatten_op_results(detach_results(op.spec, made)))


def reference_effects64(op: Op, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return the effects of the op's reference, computed in float64. These are its results, then the arguments that it
    mutates. If the reference refuses float64, the dtypes of ``args`` are used.
    """
    try:
        return reference_effects(op, tree_map(widen_tensor, args))
    except RuntimeError:
        return reference_effects(op, args)


def all_finite(results: Iterable[Tensor]) -> bool:
    """Return whether all floating-point and complex numbers among the results are finite."""
    return all(is_finite(t) for t in results if t.is_floating_point() or t.is_complex())


def can_carry_gradient(t: Tensor) -> bool:
    """Return whether the dtype of ``t`` can carry a gradient. It must be complex, or floating-point of more than one
    byte.
    """
    return t.is_complex() or (t.is_floating_point() and not is_float8(t))


def random_gradient(t: Tensor, rng: torch.Generator) -> Tensor:
    """Return random normally distributed numbers of the shape of ``t`` in float32 on the CPU, to be used as a gradient.
    They are complex if ``t`` is. Each is a number of bfloat16, so that narrow dtypes and TF32 hold it without an error.
    """
    drawn = torch.randn(t.shape, generator=rng).bfloat16().float()
    if not t.is_complex():
        return drawn
    return torch.complex(drawn, torch.randn(t.shape, generator=rng).bfloat16().float())


def gradients_or_zeros(
    outs: Sequence[Tensor], inputs: Sequence[Tensor], directions: Sequence[Tensor], **keywords: Any
) -> list[Tensor]:
    """Return the gradient of ``outs``, weighted with ``directions``, for each of ``inputs``. An input on which no
    output depends gets zeros. ``keywords`` are passed to ``torch.autograd.grad``.
    """
    gradients = torch.autograd.grad(outs, inputs, directions, allow_unused=True, **keywords)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, inputs, strict=True)]


def floating_args(op: Op, case: SampleCase) -> list[str]:
    """Return the names of the tensor arguments that are present in the case and can carry a gradient. Lists of tensors
    are left out, and so are arguments that the op mutates or that the declaration excludes from gradients.
    """
    pairs = [(a, v) for a, v in zip(op.spec.args, case.args, strict=True) if isinstance(v, Tensor)]
    kept = {*op.spec.mutated, *op.spec.detached}
    return [a.name for a, v in pairs if can_carry_gradient(v) and a.name not in kept]


def is_adopted(op: Op) -> bool:
    """Return whether the op was registered by another library and is only described to Shiplap."""
    return isinstance(op, AdoptedOp)


def needs_builder(op: Op) -> bool:
    """Return whether the op has an argument that can only be an integer tensor, but no builder of samples
    (``@op.samples``). The values of the argument are then drawn without regard to their meaning.
    """
    kinds = [t.tensor.dtypes for t in op.spec.tensors if t.tensor]
    return op.sampler is None and any(map(integers_alone, kinds))


def sum_to_real(t: Tensor) -> Tensor:
    """Return the sum of all elements as a tensor of one real number. Through the sum, gradients reach every element of
    ``t``.
    """
    total = (t.float() if is_float8(t) else t).sum()
    return total.real if total.is_complex() else total


def why_no_backward(op: Op, case: SampleCase) -> str:
    """Return the reason why the op has no backward that can run on this case. Return an empty string if it has one."""
    names = floating_args(op, case)
    if not names or op.spec.mutated:
        if op.spec.mutated:
            return "it mutates arguments"
        excluded = [a.name for a in op.spec.tensors if a.name in op.spec.detached]
        return f"nondifferentiable= names {', '.join(excluded)}" if excluded else "no floating-point tensor argument"
    args = require_gradients(op, case.fresh(), names)
    outs = [o for o in call_op(op, args) if o.requires_grad]
    if not outs:
        return "no output carries a gradient"
    try:
        sums = [sum_to_real(o) for o in outs]
        torch.autograd.grad(sums, [v for v in tensors_among(args) if v.requires_grad], allow_unused=True)
    except Exception as e:
        text = str(e)
        if "SL304" in text or "no autograd formula" in text or "not implemented" in text:
            return f"a gradient is refused: {error_line(e)}"
    return ""


def why_reference_missing(e: BaseException) -> str:
    """Return a text that says that the reference is not written yet if ``e`` is the error ``SL113``. Return an empty
    string for another error.
    """
    written = not (isinstance(e, ShiplapError) and e.id == "SL113")
    return "" if written else "the reference is not written yet, so there is nothing to compare with"


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Return a context in which Python warnings, and logs up to the level of errors, are suppressed. An audit provokes
    failures and reports them as findings.
    """
    import logging
    import warnings

    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # This filter differs from any that a kernel sets, so that a filter of a kernel is still detected.
            warnings.filterwarnings("ignore", message="(?s).*")
            yield
    finally:
        logging.disable(disabled)
