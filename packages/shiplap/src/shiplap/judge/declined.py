"""Inputs that a candidate refuses by an exception, and need not take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shiplap.judge.checks import JudgeSession
from shiplap.judge.variants import InputForm
from shiplap.sandbox.candidate import CandidateError
from shiplap.sandbox.machine_lack import is_lack

FAR_LACK = "the machine lacks the memory that the reference needs at sizes near constants of the candidate"


@contextmanager
def decline_form(case: JudgeSession, form: InputForm) -> Iterator[None]:
    """Return a context manager for the checks of one ``form`` (shapes, layout and kind of values). It records two kinds
    of ``CandidateError`` in ``case`` without counting them against the candidate.

    An exception that the candidate raises for a special memory layout, for a size that is much larger than those of the
    reference's own inputs, for an argument that ``get_inputs`` leaves out, or for a list that is longer, is recorded as
    unchecked, since no caller gets a wrong result from it. If the machine lacks memory for the reference at a large
    size, that is recorded as a missing check. If the form has a tensor where the reference's own inputs have None, an
    exception or a wrong result is recorded as a missing check. The reference may not be meant for such a tensor.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as e:  # of the reference
        if not (form.far_size and is_lack(e)):
            raise
        case.missing["far sizes"] = f"{FAR_LACK}: {form.label}"
    except CandidateError as e:
        if form.layout and e.check == "raised":
            axis = "alignment" if form.layout == "offset" else "layout"
            case.waived[axis, "value"] = f"the candidate refuses it: {e.evidence}"[:200]
            case.unchecked.append(f"{axis}: the candidate raises for it: {e.evidence}"[:200])
        elif form.far_size and e.check == "raised":
            case.unchecked.append(f"{form.label}: the candidate raises for it: {e.evidence}"[:200])
        elif (form.added or form.longer) and e.check == "raised":
            what = "a longer list" if form.longer else "an argument that get_inputs leaves out"
            case.unchecked.append(f"{what}: the candidate raises for it: {e.evidence}"[:200])
        elif form.given is not None and e.check in ("raised", "values", "results"):
            case.missing["absence"] = (
                f"argument {form.given[0]} is always None, and with a tensor there the candidate differs: "
                f"let get_inputs give what is meant, or leave it out ({e.evidence[:80]})"
            )
        else:
            raise
