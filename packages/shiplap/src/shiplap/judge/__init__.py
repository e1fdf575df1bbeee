"""Judge: a verdict on a kernel that nobody trusts, by a process that owns the inputs, the clock and the comparison."""

from shiplap.judge.engine import judge
from shiplap.judge.options import Options
from shiplap.judge.result import JudgeResult, Reason, Timed

__all__ = ["JudgeResult", "Options", "Reason", "Timed", "judge"]
