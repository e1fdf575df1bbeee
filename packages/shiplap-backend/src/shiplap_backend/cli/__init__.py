"""The commands of ``shiplap backend``: write a project, generate, compile, report, test and compare."""

from __future__ import annotations

from types import ModuleType

import typer

import shiplap_backend.cli.audit as audit
import shiplap_backend.cli.build as build
import shiplap_backend.cli.coverage as coverage
import shiplap_backend.cli.diff as diff
import shiplap_backend.cli.functions as functions
import shiplap_backend.cli.new as new

__all__ = ["group"]

group: typer.Typer = typer.Typer(
    help="Generate, build and prove wrappers for a new device.",
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
_VERBS: tuple[tuple[str, ModuleType, str], ...] = (
    ("new", new, "command"),
    ("gen", build, "gen_command"),
    ("build", build, "command"),
    ("coverage", coverage, "command"),
    ("audit", audit, "command"),
    ("diff", diff, "command"),
    ("functions", functions, "command"),
)
for name, module, function in _VERBS:
    group.command(name, epilog=module.EPILOG)(getattr(module, function))
