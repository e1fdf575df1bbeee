"""The errors of requests to sandboxed processes."""

from __future__ import annotations

from shiplap.sandbox.protocol import printable_text


class ProcessEnded(Exception):
    """An error that says that a sandboxed process or its launcher has ended, or was ended for a violation.

    Attributes:
        lack: whether the machine ended the process or lacks a resource. The process is then not at fault.
    """

    def __init__(self, how: str, *, lack: bool = False) -> None:
        """Make the error. ``how`` is a text about the end of the process. ``lack`` is true if the machine lacked
        something, and false if the process is at fault.
        """
        super().__init__(printable_text(how))
        self.lack = lack


class Timeout(ProcessEnded):
    """An error that says that a sandboxed process was ended because the time of the whole judgement is over. It is also
    raised at the end of a request's time if programs that the process has started still run, as compilers do.
    """


class RequestFailed(Exception):
    """An error for a request in which a sandboxed process has raised an error. The process continues."""


class UnsupportedArguments(Exception):
    """An error for arguments that a callable in a sandboxed process does not support. The callable is not at fault."""
