"""The observation of a sample of sizes and layouts for which the reference raises an error."""

from __future__ import annotations

from shiplap.audit.causes import lack_in_reasons
from shiplap.audit.check import Observation, why_unimplemented
from shiplap.dispatch import Op
from shiplap.errors import ArgumentError, error_line
from shiplap.sampling.case import SampleCase
from shiplap.sampling.run import needs_builder, run_op, why_reference_missing


def observe_reference_error(op: Op, case: SampleCase, e: Exception) -> Observation:
    """Return the observation of a sample for which the reference of the op has raised ``e``. Raise ``e`` again if the
    reference is not written yet or torch lacks its dtype, which the check counts as missed.

    It has a problem, since the declaration admits the sample, unless the machine lacks memory, the op refuses the
    sample with the same error id, or integers were drawn without a builder of samples.
    """
    if isinstance(e, ArgumentError):  # a precondition on values, which the declaration cannot express
        return _observe_refusal(op, case, e)
    if why_reference_missing(e) or why_unimplemented(e):
        raise e
    if lacking := lack_in_reasons([error_line(e)]):
        return Observation(missed=lacking)
    if needs_builder(op):  # for example a row number into no rows: our guess, not the op's fault
        why = f"generated integers mean nothing here, declare @op.samples: {error_line(e)}"
        return Observation(skip=why, limited=True)
    return Observation(
        f"the declaration admits this input, and the reference raised {error_line(e)}",
        fix="handle it in the reference and kernels, or exclude it with requires=(...)",
    )


def _observe_refusal(op: Op, case: SampleCase, e: ArgumentError) -> Observation:
    """Return the observation of a sample that the reference refuses with ``e``. It is a ``skip`` if the op refuses the
    sample with the same error id, and otherwise it has a problem.
    """
    try:
        run_op(op, case)
    except ArgumentError as mine:
        if mine.id == e.id:
            return Observation(skip=f"refused: {error_line(e)}")
    return Observation(f"the reference refuses this input with {error_line(e)}, the kernel does not")
