"""``shiplap backend``: wrappers for a new device - write a project, generate, compile, report, prove, compare."""

from __future__ import annotations

import typer

from shiplap.cli import backend_audit, backend_build, backend_coverage, backend_diff, backend_functions, backend_new

__all__ = ["group"]

group = typer.Typer(
    help="Generate, build and prove wrappers for a new device.",
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for name, module, function in (
    ("new", backend_new, backend_new.command),
    ("gen", backend_build, backend_build.gen_command),
    ("build", backend_build, backend_build.command),
    ("coverage", backend_coverage, backend_coverage.command),
    ("audit", backend_audit, backend_audit.command),
    ("diff", backend_diff, backend_diff.command),
    ("functions", backend_functions, backend_functions.command),
):
    group.command(name, epilog=module.EPILOG)(function)
