"""The check that a candidate uses the current values of its parameters."""

from __future__ import annotations

from shiplap.judge.case import JudgeSession
from shiplap.judge.endurance import change_parameters
from shiplap.judge.options import StepDeadline
from shiplap.judge.variants import InputForm
from shiplap.sandbox.candidate import TargetProcess


def check_new_parameters(case: JudgeSession, witness: TargetProcess, form: InputForm) -> None:
    """Change the parameters of reference and candidate, then compare a call and the state of the module after it.

    A candidate that computed something from the first values of its parameters has wrong results now.
    """
    problem, pace = case.problem, StepDeadline(case.budget.last)
    state = case.subject.state
    with case.record_faults(f"{form.label}, other parameters"), pace.step(witness.prisoner):
        for zeros in (True, False):
            if not change_parameters(state, lambda new: witness.renew(new) and problem.renew(new), zeros=zeros):
                if state:
                    case.missing["parameters"] = (
                        "other values of the parameters: the candidate lacks some of the reference's, so that nothing "
                        "shows that it uses them; name its parameters as the reference does"
                    )
                return
            args = problem.draw(form)
            # A zero parameter must stay zero, so try again with zeros unchanged.
            if zeros and not problem.gives_numbers(args):
                continue
            kept = problem.kept_after(args)
            witness.call(args, problem.expect_effects(form, args))
            case.calls += 1
            problem.compare_kept(kept, witness.read_module_state(kept))
            return
