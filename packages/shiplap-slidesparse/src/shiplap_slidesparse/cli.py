"""``shiplap slidesparse``: what structured sparsity and 8 bits would do to a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiplap.cli import console
from shiplap.cli.target import import_home, near_miss, split
from shiplap.errors import ShiplapError, error

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from shiplap_slidesparse.report import Bucket, Report, Size

__all__ = ["group"]

EPILOG = """\b
Examples:
  shiplap slidesparse report ./llama --pattern 6:8 --dtype fp8 --device cuda --tune
                                  a directory of Hugging Face transformers
  shiplap slidesparse report ./llama --text article.txt --html report.html
                                  with perplexity and drift of logits on a text
  shiplap slidesparse report model.py:net --tokens tokens.json --rows 1,16,256
                                  a module, or a function that returns one; tokens as numbers
  shiplap slidesparse report ./llama --no-measure --json

\b
Exit status:
  0  the sparse form wins somewhere (with --no-measure: is predicted to, or nothing is)
  1  it wins nowhere: dense layers are faster here
  2  no such model, nothing to convert, or tokens that do not fit"""

_MODEL = "pass a directory, or file.py:name of a module or of a function that returns one"

group = typer.Typer(
    help="Sparse and 8-bit linear layers: what they would do to a model.",
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@group.callback()
def _verbs() -> None:
    pass


@group.command("report", epilog=EPILOG)
def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A directory of transformers, or module[:name] or file.py[:name] of a torch module."
        ),
    ],
    pattern: Annotated[str, typer.Option("--pattern", help="2:4, 4:6, 6:8, ...")] = "6:8",
    dtype: Annotated[str, typer.Option("--dtype", help="int8, fp8, bf16 or fp16.")] = "int8",
    rows: Annotated[str, typer.Option("--rows", metavar="M,...", help="Numbers of rows (tokens of a call).")] = "1,16,"
    "64,256,1024,4096",
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="NAME", help="Layers to keep; repeatable. By default lm_head.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option("--tokens", metavar="FILE", help="Numbers of tokens: JSON, or separated by spaces.")
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="Text, for its tokenizer.")] = None,
    device: Annotated[str, typer.Option("--device", help="Where to measure.")] = "cpu",
    tune: Annotated[bool, typer.Option("--tune", help="Choose algorithms first, and store the choices.")] = False,
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Or only predict.")] = True,
    seconds: Annotated[float, typer.Option("--seconds", help="For one size and number of rows.")] = 2.0,
    html: Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Write one self-contained page.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show per layer and number of rows which form is fastest, by how much, and what accuracy it costs.

    The forms: base, the layer as it is; dense, pruned and in 8 (or 16) bits; slide, the same packed for sparse units.
    Predicted is what arithmetic and memory allow, where the device is known; measured is what it did.
    """
    from shiplap.report import facts
    from shiplap_slidesparse.convert import SKIPPED
    from shiplap_slidesparse.report import check, survey

    wanted = _rows(rows)
    check(pattern, dtype)  # before a model is loaded
    _require_time(seconds)
    console.require_device(device)
    if html is not None:
        console.require_file(html)
    with console.own_stdout():
        given = _tokens(tokens, text, model)
        found = survey(
            _model(model).to(device),
            pattern,
            dtype,
            rows=wanted,
            skip=skip or SKIPPED,
            tokens=given,
            measure=measure,
            tune=tune,
            seconds=seconds,
            progress=False if json else None,
        )
    about = facts(model=model, device=found.device)
    if html is not None:
        _write_page(html, f"slidesparse: {model}", about, found)
    _show(found) if not json else console.emit_json({"facts": about, **found.as_json()})
    if not found.pays and (measure or found.peaks):
        raise typer.Exit(console.FAILED)


def _rows(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise error("SL613", where="--rows", got=text, expected="positive numbers: 1,16,256")
    return found


def _require_time(seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise error(
            "SL613",
            where="--seconds",
            got=f"{seconds}",
            expected="more than 0",
            fix="pass --no-measure to measure nothing",
        )


def _model(target: str) -> nn.Module:
    if Path(target).is_dir():
        return _loaded(target)
    from torch import nn

    home, name = split(target)
    if "/" in home and not home.endswith(".py"):
        raise error("SL501", where=target, what="no such model", got="no such directory", fix=_MODEL)
    module = import_home(home or target)
    value = found = getattr(module, name or "model", None)
    if callable(found) and not isinstance(found, nn.Module):
        value = _called(found, target)
    if isinstance(value, nn.Module):
        return value
    if found is not None:
        raise error(
            "SL501", where=target, what="no such model", got=type(value).__name__, expected="a torch module", fix=_MODEL
        )
    names = [
        n
        for n, v in vars(module).items()
        if isinstance(v, nn.Module) or (callable(v) and getattr(v, "__module__", "") == module.__name__)
    ]
    raise error(
        "SL501",
        where=target,
        what="no such model",
        got=name or "model",
        fix=_MODEL,
        expected=near_miss(name or "model", names) if names else "a torch module",
    )


def _loaded(target: str) -> nn.Module:
    """What ``from_pretrained`` makes of a directory; one that was converted, too, for the report to refuse."""
    transformers = _transformers(target)
    from shiplap_slidesparse import hf

    hf.register()
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            target, dtype="auto", local_files_only=True
        )
        return model
    except ShiplapError:
        raise
    except Exception as e:  # whatever is wrong with the files of a user
        raise error(
            "SL601",
            where=target,
            what="model cannot be loaded",
            got=_first_line(e),
            expected="a causal language model that save_pretrained wrote",
            fix=_MODEL,
        ) from e


def _called(make: Callable[[], Any], target: str) -> Any:
    try:
        return make()
    except Exception as e:  # the user's code
        raise error(
            "SL601",
            where=target,
            what="model cannot be made",
            got=_first_line(e),
            expected="a function without arguments that returns a torch module",
        ) from e


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"


def _tokens(tokens: Path | None, text: Path | None, model: str) -> list[int]:
    if tokens is not None and text is not None:
        raise error("SL613", where="slidesparse report", got="both --tokens and --text", expected="one of them")
    if tokens is not None:
        found = _numbers(tokens)
    elif text is not None:
        found = _of_text(text, model)
    else:
        return []
    if len(found) < 2:
        raise error(
            "SL613",
            where=str(tokens or text),
            got=f"{len(found)} tokens",
            expected="two or more: each is predicted from those before it",
            fix="pass another file",
        )
    return found


def _of_text(text: Path, model: str) -> list[int]:
    if not Path(model).is_dir():
        raise error(
            "SL613",
            where="--text",
            got=f"{model}, which has no tokenizer",
            expected="a directory of transformers, or --tokens",
        )
    written, transformers = _read(text), _transformers(model)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, ImportError) as e:
        raise error(
            "SL613",
            where="--text",
            got=f"no tokenizer in {model}: {_first_line(e)}",
            expected="tokenizer.json, say, beside the model",
            fix="save it there, or pass --tokens",
        ) from None
    return list(tokenizer(written)["input_ids"])


def _numbers(path: Path) -> list[int]:
    import json

    written = _read(path)
    try:
        found = json.loads(written) if written.lstrip().startswith("[") else [int(part) for part in written.split()]
    except ValueError:
        found = None
    if not isinstance(found, list) or any(type(v) is not int for v in found):
        raise error("SL613", where=str(path), got="other text", expected="numbers of tokens: [1, 2, 3] or 1 2 3")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise error(
            "SL602",
            where=str(path),
            what="file cannot be read",
            got=getattr(e, "strerror", None) or e,
            expected="a text file",
        ) from None


def _transformers(target: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise error(
            "SL603",
            where=target,
            got="no transformers",
            expected="Hugging Face's library",
            fix="pip install transformers",
        ) from None
    if not (Path(target) / "config.json").is_file():
        raise error(
            "SL501",
            where=target,
            what="no model there",
            got="no config.json",
            expected="a directory that save_pretrained wrote",
            fix="pass that directory, or file.py:name",
        )
    return transformers


def _write_page(path: Path, title: str, about: dict[str, str], found: Report) -> None:
    from shiplap.report import render_html

    console.write_text(
        path,
        render_html(
            "slidesparse.html.jinja",
            package="shiplap_slidesparse",
            title=title,
            facts=about,
            report=found.as_json(),
            headline=_headline(found),
        ),
    )
    console.note(f"written: {path}")


def _headline(found: Report) -> str:
    buckets = [b for size in found.sizes for b in size.buckets if b.winner]
    won = sum(b.winner == "slide" for b in buckets)
    how = "measured" if any(b.measured for b in buckets) else "predicted"
    said = f"slide wins {won} of {len(buckets)}, {how}" if buckets else "nothing measured, and no peaks known"
    return (
        f"{found.pattern} {found.dtype} on {found.device}: {said}; at most {found.ceiling:.2f}x on sparse tensor cores"
    )


def _show(found: Report) -> None:
    from rich.table import Table

    out = console.out()
    out.print(_headline(found), markup=False, style="bold")
    for size in found.sizes:
        table = Table(
            "rows",
            "base",
            "dense",
            "slide",
            "fastest",
            "slide over dense",
            "at most",
            title=_title(size),
            title_justify="left",
        )
        for b in size.buckets:
            times = b.measured or b.predicted
            ratio = f"{times['dense'] / times['slide']:.2f}x" if "slide" in times else "-"
            table.add_row(
                str(b.rows),
                *(_cell(b, form) for form in ("base", "dense", "slide")),
                f"{b.winner} {b.gain:.2f}x" if b.winner else "-",
                ratio,
                f"{b.most:.2f}x",
            )
        out.print(table)
    if any(b.measured and b.predicted for size in found.sizes for b in size.buckets):
        out.print("In brackets: predicted, from peak arithmetic and bandwidth.", markup=False)
    out.print(str(found.conversion), markup=False)
    if found.drift is not None:
        d = found.drift
        out.print(
            f"{d.tokens} tokens: perplexity {d.perplexity:.4g} → {d.perplexity_after:.4g}, divergence "
            f"{d.divergence:.3g} nats, same first choice {d.agreement:.1%}, logits off by up to {d.largest:.3g}",
            markup=False,
        )


def _title(size: Size) -> str:
    more = f" and {len(size.layers) - 1} more" if len(size.layers) > 1 else ""
    return f"{size.n} x {size.k}: {size.layers[0]}{more}; weight off by {size.error:.1%}"


def _cell(bucket: Bucket, form: str) -> str:
    """What was measured, and in brackets what was predicted; either alone where there is no other."""
    from shiplap.selection.choice import show_time

    told = [show_time(times[form]) for times in (bucket.measured, bucket.predicted) if form in times]
    return f"{told[0]} ({told[1]})" if len(told) > 1 else told[0] if told else "-"
