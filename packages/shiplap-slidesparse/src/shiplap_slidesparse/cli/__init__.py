"""The commands of ``shiplap slidesparse``: the effect of structured sparsity and 8 bits on a model. One verb a file."""

import typer

from shiplap_slidesparse.cli import report

__all__ = ["group"]

group = typer.Typer(
    help="Sparse and 8-bit linear layers: what they would do to a model.",
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@group.callback()
def _verbs() -> None:
    """Make the commands a group, which typer does not do for a single verb."""


group.command("report", epilog=report.EPILOG)(report.command)
