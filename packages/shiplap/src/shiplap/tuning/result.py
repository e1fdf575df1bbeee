"""``TuneResult``: the choices of one tuning, with a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from shiplap.render.result import ResultWithVerdict, Row
from shiplap.tuning.choice import LEFT_OUT, Choice

TuneVerdict = Literal["chosen", "incomplete", "failed"]


@dataclass(frozen=True, repr=False)
class TuneResult(ResultWithVerdict):
    """The choices of one tuning. Iterating over it yields the choices.

    A result has no truth value, so a test has to say ``assert result.verdict == "chosen"``.

    Attributes:
        choices: one choice for each bucket, in the order of the samples. A second one follows for a bucket whose
            templates were measured in compiled code.
        verdict: ``"failed"`` if a candidate was wrong, crashed or hung. Otherwise it is ``"incomplete"`` if the
            budget was spent before each bucket had a choice, or if a kernel was chosen without being verified
            (``Choice.unverified`` says why). It is ``"chosen"`` in all other cases.
    """

    choices: tuple[Choice, ...]
    _good: ClassVar[str] = "chosen"

    @property
    def left_out(self) -> tuple[Choice, ...]:
        """The choices of the buckets (classes of sizes) that were not measured before the budget was spent. They name
        no kernel.
        """
        return tuple(c for c in self.choices if c.origin == LEFT_OUT)

    @property
    def unverified(self) -> tuple[Choice, ...]:
        """The choices whose kernels could not be verified, because this machine lacks something that the verification
        needs. Their field ``unverified`` has the reason.
        """
        return tuple(c for c in self.choices if c.unverified)

    @property
    def verdict(self) -> TuneVerdict:
        """The verdict on the tuning. It is ``"failed"`` if a candidate was wrong, crashed or hung. Otherwise it is
        ``"incomplete"`` if a choice is missing or not verified, and ``"chosen"`` if none is.
        """
        if any(f.verdict == "fail" for c in self.choices for f in c.findings):
            return "failed"
        return "incomplete" if self.left_out or self.unverified else "chosen"

    @property
    def headline(self) -> str:
        """One line with the names of the ops, the verdict and the numbers of choices."""
        names = ", ".join(dict.fromkeys(c.op for c in self.choices)) or "no op"
        chosen = len(self.choices) - len(self.left_out)
        doubts = f", {len(self.unverified)} of them unverified" if self.unverified else ""
        return f"{names}: {self.verdict} ({chosen} of {len(self.choices)} calls have a choice{doubts})"

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row for each choice, as the printed and the HTML report show it."""
        return tuple(_row(choice) for choice in self.choices)

    def __iter__(self) -> Iterator[Choice]:
        """Return an iterator over the choices."""
        return iter(self.choices)

    def __len__(self) -> int:
        """Return the number of choices."""
        return len(self.choices)


def _row(choice: Choice) -> Row:
    """Return the row of a choice in reports. It has the call, the outcome, the kernel with the reason, and a line for
    each candidate that was dropped.
    """
    place = "  in compiled code" if choice.compiled else ""
    name = f"{choice.op}  {choice.bucket}  {choice.dtypes}  {choice.device}{place}"
    dropped = tuple(f"{f.verdict}  {f.evidence}" for f in choice.findings)
    dropped += (f"unverified  {choice.unverified}",) if choice.unverified else ()
    outcome = "fail" if any(f.verdict == "fail" for f in choice.findings) else ""
    outcome = outcome or (LEFT_OUT if choice.origin == LEFT_OUT else "incomplete" if choice.unverified else "chosen")
    return Row(name, outcome, f"{choice.label or 'no choice'}: {choice.reason} ({choice.origin})", dropped)
