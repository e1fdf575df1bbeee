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
            "the target cannot be imported",
            "An op exists only after the module that declares it has been imported.",
            "correct the error that the import raises, or pass another target",
        ),
        (
            "SL602",
            "the file cannot be read or written",
            "The file is missing, is not permitted, or holds something else than the command reads.",
            "correct what 'got' names, or pass another path",
        ),
        (
            "SL603",
            "required packages are not installed",
            "This command needs packages that are not installed with shiplap itself.",
            "install the packages that the message names",
        ),
        (
            "SL604",
            "the signature cannot be read",
            "'shiplap init' drafts a declaration from annotations, a docstring or a torch schema.",
            "annotate the function, or write its signature as the first line of its docstring",
        ),
        (
            "SL605",
            "the device is not available",
            "The command runs only on the device that it was given.",
            "run 'shiplap env' to list the devices, then pass one of them",
        ),
        (
            "SL606",
            "the op has no valid inputs to tune on",
            (
                "An integer tensor may hold indices. With meaningless indices a kernel can look right, or fast, by "
                "accident."
            ),
            "declare a builder with @op.samples: fn(rng, sizes, dtype, device) -> all arguments",
        ),
        (
            "SL607",
            "the frozen table has no choice for this call",
            "The table was written by shiplap freeze. SHIPLAP_STRICT=1 forbids the default config otherwise.",
            "run shiplap tune for this call and shiplap freeze again, or unset SHIPLAP_STRICT",
        ),
        (
            "SL608",
            "tuning is not allowed here",
            "A measurement takes seconds and disturbs the program around it.",
            "tune before the model runs: shiplap tune, or sl.tune(op) at start-up",
        ),
        (
            "SL609",
            "the table of choices cannot be trusted",
            "Shiplap does not use a table that is damaged, edited or made for other versions.",
            "write the table again with 'shiplap freeze' or 'shiplap cache export'",
        ),
        (
            "SL610",
            "the sample falls into another bucket",
            "A choice for a bucket must be measured on arguments of the same bucket.",
            "let the builder declared with @op.samples return the sizes that it is called with",
        ),
        (
            "SL611",
            "the tuning process has failed",
            "Candidates run in a separate process, which has to import the op.",
            "make the module that declares the op importable, or tune with isolate=False",
        ),
        (
            "SL612",
            "the tuning budget is not a valid time",
            "Tuning stops after the time that the budget gives.",
            "pass seconds, or text such as 90s, 5m or 1h",
        ),
        (
            "SL613",
            "the arguments do not fit the command",
            "The command cannot tell from these arguments what to work on.",
            "run 'shiplap VERB --help' and correct the arguments",
        ),
        (
            "SL614",
            "no installed package has this verb",
            "Some verbs come with shiplap. Other verbs come with packages that are installed separately.",
            "install the package that has the verb, or use a verb that 'shiplap --help' lists",
        ),
        (
            "SL615",
            "the reference comes without inputs",
            "The referee calls reference and candidate on inputs that the reference's author describes.",
            "define get_inputs() beside the reference, pass --inputs file.py:function, or declare an op",
        ),
        (
            "SL616",
            "the reference fails on its own inputs",
            "A candidate is compared with the results of the reference.",
            "correct the reference, or what get_inputs and get_init_inputs return",
        ),
        (
            "SL617",
            "no process can be judged here",
            "A candidate is called in a process that the Linux kernel has locked in.",
            "judge on Linux, and look at what 'got' names",
        ),
    ],
)
