"""Other values of parameters, and what a module keeps from call to call."""

from __future__ import annotations

from shiplap.judge.case import Case
from shiplap.judge.endurance import renewed
from shiplap.judge.options import Pace
from shiplap.judge.variants import Form
from shiplap.sandbox.candidate import Witness


def renew(case: Case, witness: Witness, form: Form) -> None:
    """Other values of the parameters: what a candidate has computed from the first ones is no longer right."""
    problem, pace = case.problem, Pace(case.budget.last)
    state = case.subject.state
    with case.noting(f"{form.label}, other parameters"), pace.step(witness.prisoner):
        for zeros in (True, False):
            if not renewed(state, lambda new: witness.renew(new) and problem.renew(new), zeros=zeros):
                if state:
                    case.unchecked.append("other values of the parameters: the candidate has none of the same names")
                return
            args = problem.draw(form)
            if zeros and not problem.gives_numbers(args):  # a parameter has to be zero
                continue
            kept = problem.kept_after(args)
            witness.call(args, problem.expect(form, args))
            case.calls += 1
            problem.compare_kept(kept, witness.state(kept))
            return
