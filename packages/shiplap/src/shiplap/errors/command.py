"""Commands: SL6xx."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

from shiplap.errors.base import ShiplapError, error, register


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
            "The file does not exist, you may not access it, or its content is not what the command expects.",
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
                "An integer tensor may hold indices. With meaningless indices a wrong or slow kernel can look right "
                "or fast."
            ),
            "declare a builder with @op.samples: fn(rng, sizes, dtype, device) -> all arguments",
        ),
        (
            "SL607",
            "the frozen table has no choice for this call",
            (
                "'shiplap freeze' wrote this table, and it has no entry for the shapes of this call. With "
                "SHIPLAP_STRICT=1 Shiplap raises an error instead of using the default config."
            ),
            "run 'shiplap tune' for this call and 'shiplap freeze' again, or unset SHIPLAP_STRICT",
        ),
        (
            "SL608",
            "tuning is not allowed here",
            (
                "A measurement takes seconds, so Shiplap never tunes inside an op, a backward pass or a CUDA graph "
                "capture."
            ),
            "tune before the model runs, with 'shiplap tune' or with sl.tune(op) at start-up",
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
            "A choice applies to all calls of one bucket, so Shiplap must measure it on arguments of that bucket.",
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
            "An argument is missing or outside of its range, or two arguments contradict each other.",
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
            "the inputs of the reference cannot be made",
            "The judge calls the reference and the candidate on inputs that the author of the reference provides.",
            "define get_inputs() in the file of the reference, or pass --inputs file.py:function",
        ),
        (
            "SL616",
            "the reference fails on its own inputs",
            (
                "The judge compares the results of a candidate with those of the reference, so the reference must run"
                " on its inputs."
            ),
            "correct the reference, or the arguments that get_inputs and get_init_inputs return",
        ),
        (
            "SL617",
            "the sandbox for the candidate cannot be started",
            "The judge calls a candidate only in a process that the Linux kernel has sandboxed.",
            "run the judge on Linux, and correct the problem that 'got' names",
        ),
    ],
)


@contextmanager
def writing(
    path: str | PathLike[str], what: str = "the file", expected: str = "a path in a writable directory"
) -> Iterator[None]:
    """Enter a context that raises SL602 in place of an OSError of its body, which writes the file ``path``.

    Args:
        path: The file that is written. The error names it.
        what: The kind of file, for the title of the error.
        expected: Which paths can be written.

    Raises:
        CommandError: SL602 in place of an OSError of the block.
    """
    try:
        yield
    except OSError as e:
        title = f"{what} cannot be written"
        # The OSError says nothing that the catalogue error lacks, so it is not chained.
        raise error("SL602", where=str(path), what=title, got=e.strerror or e, expected=expected) from None
