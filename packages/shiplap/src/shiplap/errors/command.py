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
            (
                "An op or a model exists only after the code that defines it has been imported. That code raised the "
                "error under 'got'."
            ),
            "correct the code that raises the error under 'got', or pass another target",
        ),
        (
            "SL602",
            "the file cannot be read or written",
            (
                "The file does not exist, you may not access it, the disk is full, or the content is not what the "
                "command expects."
            ),
            (
                "if the file does not exist or has unexpected content, pass the path of a file that fits 'expected'. "
                "If 'got' names a missing permission or a full disk, grant the permission or free space on the disk"
            ),
        ),
        (
            "SL603",
            "required packages are not installed",
            "This command needs packages that are not installed with shiplap itself.",
            "run pip install with the packages that 'expected' lists",
        ),
        (
            "SL604",
            "the signature cannot be read",
            (
                "'shiplap init' drafts a declaration from annotations, from a signature in the docstring, or from a "
                "torch schema. It found none of them, or one that it cannot read."
            ),
            (
                "annotate every argument and the result of the function, or write the signature of the function, in "
                "the form under 'expected', as the first line of its docstring"
            ),
        ),
        (
            "SL605",
            "the device is not available",
            (
                "A command runs only on the device that --device names, and a function on that of device=. torch "
                "cannot use the device on this machine."
            ),
            "run 'shiplap env' to list the devices, then pass one of them, such as cpu",
        ),
        (
            "SL606",
            "the op has no valid inputs to tune on",
            (
                "The op takes an integer tensor, which may hold indices. With meaningless indices, a wrong kernel can "
                "look right and a slow one fast. So Shiplap draws no random integers for tuning."
            ),
            (
                "write a function build(rng, sizes, dtype, device) that returns all arguments, and decorate it with "
                "@op.samples"
            ),
        ),
        (
            "SL607",
            "the frozen table has no entry for this call",
            (
                "'shiplap freeze' wrote this table of tuned choices, and it has no entry for the shapes of this "
                "call. With SHIPLAP_STRICT=1, Shiplap raises an error instead of using the default config."
            ),
            (
                'run the calls inside of: with shiplap.tuning.record("calls.jsonl"). Then tune them and write the '
                "table again: shiplap tune --profile calls.jsonl && shiplap freeze -o tuned.json. To run with the "
                "default config, unset SHIPLAP_STRICT"
            ),
        ),
        (
            "SL608",
            "tuning is not allowed here",
            (
                "A measurement takes seconds. So Shiplap never tunes inside an op, a backward pass, a traced "
                "function or a CUDA graph capture. It also does not tune while a process that it started for tuning "
                "imports the module of the op."
            ),
            (
                "tune before the model runs, with 'shiplap tune' or with sl.tune(op) at start-up. If sl.tune(op) is "
                'at the top level of a module, put it under if __name__ == "__main__":'
            ),
        ),
        (
            "SL609",
            "the table of choices cannot be trusted",
            (
                "Shiplap does not use a table of tuned choices that is damaged, was edited, or was made with other "
                "versions."
            ),
            (
                "write the table again with: shiplap freeze -o tuned.json. If the table is a file of the cache, write "
                "it with: shiplap cache export FILE"
            ),
        ),
        (
            "SL610",
            "the sample builder returned sizes other than those requested",
            (
                "Calls whose sizes fall into one bucket share a tuned choice. Shiplap must measure it on arguments "
                "of that bucket, and the builder returned arguments of another one."
            ),
            "let the function that @op.samples decorates return arguments of the sizes that it is called with",
        ),
        (
            "SL611",
            "the process that tunes has failed",
            (
                "Shiplap runs the kernels that it compares in a separate process, which imports the op and draws its "
                "inputs. That process ended, or raised the error under 'got'."
            ),
            (
                "if 'got' shows an error, correct it, so that the module that declares the op can be imported in a new "
                "process. If the process ended without an error, pass isolate=False to tune in this process"
            ),
        ),
        (
            "SL612",
            "the tuning budget is not a valid time",
            "The budget is the time after which tuning stops. It must be more than 0 seconds.",
            "pass a number of seconds, or a text such as 90s, 5m or 1h",
        ),
        (
            "SL613",
            "the arguments do not fit the command",
            "An argument is missing or outside of its range, or two arguments contradict each other.",
            "pass what 'expected' shows. Run the command with --help to list its arguments",
        ),
        (
            "SL614",
            "shiplap has no command of this name",
            "Some commands come with shiplap. Others come with packages that are installed separately.",
            (
                "use a command that 'shiplap --help' lists. If the command belongs to another package, install that "
                "package"
            ),
        ),
        (
            "SL615",
            "the inputs of the reference cannot be made",
            (
                "The judge calls the reference and the candidate on inputs that the author of the reference "
                "provides. These must be a list with at least one tensor."
            ),
            (
                "define get_inputs(), which returns such a list, in the file of the reference, or pass --inputs "
                "file.py:function. If the function exists, correct the error under 'got'"
            ),
        ),
        (
            "SL616",
            "the reference fails on its own inputs",
            (
                "The judge compares the results of a candidate with those of the reference, so the reference must "
                "run on its inputs."
            ),
            "call the reference on what get_inputs() returns, and correct the code that raises the error under 'got'",
        ),
        (
            "SL617",
            "the sandbox for the candidate cannot be started",
            (
                "The judge calls a candidate only in a process that the Linux kernel has sandboxed. This system is "
                "not Linux, or the sandboxed process ended before it was ready, such as for lack of memory."
            ),
            (
                "if 'got' names another system, run the judge on Linux. Otherwise give the machine or the container "
                "more memory and processes, and run the judge again"
            ),
        ),
    ],
)


@contextmanager
def writing(
    path: str | PathLike[str], what: str = "the file", expected: str = "a path in a writable directory"
) -> Iterator[None]:
    """Return a context manager whose body writes the file ``path``. It raises ``SL602`` in place of an OSError of the
    body.

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
