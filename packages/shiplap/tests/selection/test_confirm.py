"""Kernels that win a race by other means than speed do not win ``sl.tune``."""

import shiplap as sl
from tests.selection import cheating_ops


def test_no_cheat_wins_a_tuning():
    (choice,) = sl.tune(cheating_ops.chain, [{"n": 384}], budget=120)
    assert choice.kernel in ("plain", "reference"), choice
    dropped = {f.evidence.partition(":")[0] for f in choice.findings if f.check == "tune.confirm"}
    assert dropped, choice.findings
    # The one that changes the clock makes the times of all that race beside it untrue: the honest one may go as well.
    assert dropped <= {"stack", "fingerprint", "pointer", "clock", "judge", "calls", "plain"}
