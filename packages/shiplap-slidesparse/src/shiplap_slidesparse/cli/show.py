"""The report in the terminal and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shiplap.plugin_api import verbs

if TYPE_CHECKING:
    from shiplap_slidesparse.report import LayerBucket, LayerSize, SparsityReport

__all__ = ["format_times", "print_report", "write_page"]


def write_page(path: Path, title: str, about: dict[str, str], report: SparsityReport) -> None:
    """Write ``report`` as one self-contained HTML page to ``path``, and print a note that names the file. ``about``
    maps the label of each fact that is shown at the top of the page to its value.
    """
    verbs.write_text(
        path,
        verbs.render_html(
            "slidesparse.html.jinja",
            package="shiplap_slidesparse",
            title=title,
            facts=about,
            report=report.as_json(),
            headline=_report_headline(report),
        ),
    )
    verbs.note(f"written: {path}")


def _report_headline(report: SparsityReport) -> str:
    """Return the headline that is shown above the tables of ``report``. It says in how many cases the converted layer
    is fastest, whether times were measured or predicted, and the largest possible gain.
    """
    buckets = [b for size in report.sizes for b in size.buckets if b.winner]
    form = "dense" if report.pattern == "dense" else "slide"
    won = sum(b.winner == form for b in buckets)
    how = "measured" if any(b.measured for b in buckets) else "predicted"
    summary = f"{form} wins {won} of {len(buckets)}, {how}" if buckets else "nothing measured, and no peaks known"
    subject = f"{report.pattern} {report.dtype} on {report.device}"
    ceiling = f"; at most {report.ceiling:.2f}x on sparse tensor cores" if form == "slide" else ""
    return f"{subject}: {summary}{ceiling}"


def print_report(report: SparsityReport) -> None:
    """Print ``report`` in the terminal. There is one table for each size of a layer, then the summary of the conversion
    and of the accuracy.
    """
    from rich.table import Table

    out = verbs.out()
    out.print(_report_headline(report), markup=False, style="bold")
    for size in report.sizes:
        table = Table(
            "rows",
            "base",
            "dense",
            "slide",
            "fastest",
            "slide over dense",
            "at most",
            title=_size_title(size),
            title_justify="left",
        )
        for b in size.buckets:
            times = b.measured or b.predicted
            ratio = f"{times['dense'] / times['slide']:.2f}x" if "slide" in times else "-"
            table.add_row(
                str(b.rows),
                *(format_times(b, form) for form in ("base", "dense", "slide")),
                f"{b.winner} {b.gain:.2f}x" if b.winner else "-",
                ratio,
                f"{b.most:.2f}x",
            )
        out.print(table)
    if any(b.measured and b.predicted for size in report.sizes for b in size.buckets):
        out.print("In brackets: predicted, from peak arithmetic and bandwidth.", markup=False)
    out.print(str(report.conversion), markup=False)
    if report.drift is not None:
        d = report.drift
        out.print(
            f"{d.tokens} tokens: perplexity {d.perplexity:.4g} → {d.perplexity_after:.4g}, divergence "
            f"{d.divergence:.3g} nats, same first choice {d.agreement:.1%}, logits off by up to {d.largest:.3g}",
            markup=False,
        )


def _size_title(size: LayerSize) -> str:
    """Return the title of the table for the layers of one size. It holds the size ``n x k``, the name of one layer, the
    number of other layers, and the relative errors of weight and output.
    """
    more = f" and {len(size.layers) - 1} more" if len(size.layers) > 1 else ""
    off = f"weight off by {size.error:.1%}, output by {size.output_error:.1%}"
    return f"{size.n} x {size.k}: {size.layers[0]}{more}; {off}"


def format_times(bucket: LayerBucket, form: str) -> str:
    """Return the time that a layer in ``form`` (``base``, ``dense`` or ``slide``) takes for the rows of ``bucket``,
    with its unit. If both are known, the result is the measured time with the predicted one in brackets. If neither is
    known, it is ``-``.
    """
    from shiplap.plugin_api.timing import show_time

    told = [show_time(times[form]) for times in (bucket.measured, bucket.predicted) if form in times]
    return f"{told[0]} ({told[1]})" if len(told) > 1 else told[0] if told else "-"
