"""The verdict on a kernel that is not trusted.

The process that judges owns the inputs, the clock and the comparison. The candidate runs in a sandboxed process.
"""

from shiplap.judge.engine import judge
from shiplap.judge.options import JudgeOptions
from shiplap.judge.result import JudgeResult, Reason, Timed

__all__ = ["JudgeOptions", "JudgeResult", "Reason", "Timed", "judge"]
