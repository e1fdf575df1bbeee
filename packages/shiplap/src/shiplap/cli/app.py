"""The command line: the verbs, and the form of every failure: an id, what, got, expected, one fix, exit status 2.

A module of this folder that defines ``command`` and ``EPILOG`` is a verb of that name. There is no other list of verbs.
"""

from __future__ import annotations

import difflib
import os
import pkgutil
import sys
from collections.abc import Iterator
from errno import ENOSPC
from importlib import import_module
from pathlib import Path
from signal import SIGPIPE
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shiplap.cli import console, families
from shiplap.errors import ShiplapError, error

ASKED = "shiplap.json"  # whether the verb was called with --json
UNREAD = 128 + SIGPIPE  # the status that a shell reports for SIGPIPE
USAGE: type[Any] = typer.BadParameter.__mro__[1]  # click's UsageError, of the click that typer has


class VerbGroup(TyperGroup):
    """The group of all verbs (subcommands). If a verb fails, a text is printed on stderr and, with ``--json``, a JSON
    value on stdout. With ``--traceback`` the exception is raised instead.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return click's tuple (name, command, remaining arguments) for the verb (subcommand) with which ``args``
        begin. Raise ``SL614`` for an unknown verb. The error names the nearest verb and all verbs.
        """
        # The option is searched for in the raw arguments, since a verb whose arguments are wrong never gets its parsed
        # ones.
        ctx.meta[ASKED] = "--json" in (args[: args.index("--")] if "--" in args else args)
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            verbs = sorted(self.list_commands(ctx))
            close = difflib.get_close_matches(args[0], verbs, n=1, cutoff=0.75)
            # The cutoff is high, as verbs are short words, and a lower one would suggest unrelated verbs.
            meant = f"did you mean {close[0]!r}? " if close else ""
            raise error("SL614", where="shiplap", got=args[0], expected=f"{meant}One of {', '.join(verbs)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a verb (subcommand) and return its result. If it raises an exception, print a text about it, with
        ``--json`` also JSON, and exit with status 2. With ``--traceback`` the exception is raised. Errors of usage are
        left to click.
        """
        console.begin_verb()
        try:
            return super().invoke(ctx)
        except ShiplapError as failure:
            if ctx.params.get("traceback"):
                raise
            # The catalogue writes VERB where a fix depends on the verb that was called.
            failure.fix = failure.fix.replace("VERB", str(ctx.invoked_subcommand))
            console.show_error(failure, as_json=ctx.meta.get(ASKED, False))
        except USAGE as usage:
            if ctx.meta.get(ASKED):
                console.emit_failure(what=usage.format_message())
            raise  # click prints it
        except Exception as failure:
            # An ended reader is no failure of the verb. main() turns this exception into the exit status of SIGPIPE.
            if isinstance(failure, BrokenPipeError) and console.nobody_reads():
                raise
            # Both libraries end a program by exceptions of their own, which are no failures.
            if ctx.params.get("traceback") or type(failure).__module__.split(".")[0] in ("click", "typer"):
                raise  # Exit and Abort have their own way out
            # A full disk is the one failure of any verb that the user can correct without knowing the code.
            if isinstance(failure, OSError) and failure.errno == ENOSPC:
                words = {"where": str(failure.filename or "stdout"), "what": "the output cannot be written"}
                full = error("SL602", **words, got=failure.strerror or failure, expected="a disk with room")
                console.show_error(full, as_json=ctx.meta.get(ASKED, False))
            else:
                console.show_defect(failure, as_json=ctx.meta.get(ASKED, False))
        raise typer.Exit(console.ERROR)


app = typer.Typer(
    cls=VerbGroup,
    name="shiplap",
    help="Declare a kernel once; it becomes a native, proven part of torch.compile.",
    epilog="Exit status of every verb: 0 good, 1 the verb found something wrong, 2 it could not do what was asked, "
    "3 nothing is wrong but the result is incomplete (audit, judge, tune).",
    rich_markup_mode=None,  # plain help: the same on a terminal, in a pipe and in docs/cli.md
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    """Print the version and exit if ``wanted`` is true, that is, if ``--version`` was given. Otherwise do nothing."""
    if wanted:
        from shiplap import __version__

        typer.echo(f"shiplap {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show Python tracebacks instead of messages.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Declare the options that stand before a verb (subcommand), for typer's help and parser. The body is empty, since
    ``VerbGroup.invoke`` reads their values.
    """
    pass


def _own_verbs() -> Iterator[tuple[str, ModuleType]]:
    """Import the modules in this folder and yield ``(name, module)`` of those that define a verb (subcommand)."""
    for file in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if file.name not in ("__main__", "app"):
            module = import_module(f"shiplap.cli.{file.name}")
            if "EPILOG" in vars(module):
                yield file.name, module


own = dict(_own_verbs())
for name, module in own.items():
    app.command(name, epilog=module.EPILOG)(module.command)

for name, module in families.installed_verbs(own):
    if hasattr(module, "group"):
        app.add_typer(module.group, name=name)
    else:
        app.command(name, epilog=module.EPILOG)(module.command)


def main() -> None:
    """Run the command line. If the reader of its output has ended, as with ``shiplap env | head -1``, end without a
    message.
    """
    try:
        try:
            app(prog_name="shiplap")
        finally:
            sys.stdout.flush()
    except (SystemExit, BrokenPipeError) as end:
        # Typer and rich turn the exception into exit status 1, which says that the verb found something wrong.
        if not any(isinstance(e, BrokenPipeError) for e in (end, end.__context__)):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), console.STDOUT)  # Python writes once more when it ends
        sys.exit(UNREAD)
