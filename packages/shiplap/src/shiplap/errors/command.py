"""Commands: SL6xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register

__all__ = ["CommandError"]


class CommandError(ShiplapError, RuntimeError):
    """A command that cannot be carried out as asked (SL6xx)."""


register(
    CommandError,
    [
        (
            "SL601",
            "target cannot be imported",
            "Ops exist once the module that declares them has been imported.",
            "correct the error it raises, or pass another target",
        ),
        ("SL602", "file cannot be used", "The command reads or writes this file.", "pass another path"),
        (
            "SL603",
            "optional packages are missing",
            "This command needs more than shiplap itself.",
            "install the packages that the message names",
        ),
        (
            "SL604",
            "signature cannot be read",
            "'shiplap init' drafts from annotations, a docstring or a torch schema.",
            "annotate the function, or write its signature as the first line of its docstring",
        ),
        ("SL605", "device not available", "The command runs where it is told to.", "see 'shiplap env' for devices"),
        (
            "SL606",
            "nothing valid to tune on",
            "A kernel that reads through an index is right, or fast, by accident on values that mean nothing.",
            "declare a builder with @op.samples: fn(rng, sizes, dtype, device) -> all arguments",
        ),
        (
            "SL607",
            "no frozen choice",
            "SHIPLAP_STRICT=1 forbids running the declared default instead.",
            "tune this call and freeze again, or unset SHIPLAP_STRICT",
        ),
        (
            "SL608",
            "no tuning here",
            "A measurement takes seconds, and disturbs what surrounds it.",
            "tune before the model runs: shiplap tune, or sl.tune(op) at start-up",
        ),
        (
            "SL609",
            "table of choices not accepted",
            "A damaged or edited table is not believed.",
            "write it again with 'shiplap freeze' or 'shiplap cache export'",
        ),
        (
            "SL610",
            "sample of another bucket",
            "A choice is made on arguments like those that it is made for.",
            "let the builder declared with @op.samples return the sizes that it is asked for",
        ),
        (
            "SL611",
            "tuning process lost",
            "Candidates run in a process of their own, which has to import the op.",
            "make the module that declares the op importable, or tune with isolate=False",
        ),
        ("SL612", "budget", "Tuning ends after a time that you give.", "pass seconds, or text such as 90s, 5m or 1h"),
        ("SL613", "arguments do not fit", "The command needs to know what to work on.", "see 'shiplap VERB --help'"),
        (
            "SL614",
            "no such verb",
            "Some verbs come with shiplap, others with the distributions that are installed beside it.",
            "install the distribution that brings the verb, or take one of those that 'shiplap --help' lists",
        ),
    ],
)
