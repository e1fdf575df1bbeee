"""``shiplap tune``: verify and time the candidates for recorded or named calls, and store the choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiplap.cli import console
from shiplap.cli.target import OWN_NAME, import_home, resolve_targets
from shiplap.errors import ShiplapError, error

if TYPE_CHECKING:
    from shiplap.dispatch import Op
    from shiplap.tuning import TuneResult
    from shiplap.tuning.engine import TuningRequest
    from shiplap.tuning.recorded_calls import RecordedCall
    from shiplap.tuning.selector import SelectionOptions

EPILOG = """\b
Examples:
  shiplap tune --profile calls.jsonl --budget 5m        what a program called
  shiplap tune mylib.ops:rms_norm --sizes n=4096,c=1024 --sizes n=1,c=1024 --device cuda
  shiplap tune mylib.ops --profile calls.jsonl          the ops of one module only
  shiplap tune mylib.ops:conv --sizes n=4096,kernel=[3,3,3] --dtype float16 --under-capture
  shiplap tune mylib.ops:mm --sizes m=64,k=4096,n=4096 --compiled  templates in compiled code, too
  shiplap tune --merge h100.json h200.json -o all.json  one table from those of several machines

\b
Exit status:
  0  every call has a choice, and every candidate was right; or the tables are merged
  1  the same, but a candidate was wrong, crashed or hung: see the findings
  2  the target does not exist, or has no valid inputs to tune on; a table cannot be read
  3  the budget was spent before every call had a choice; those that have one are stored"""


def command(
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="TARGET", help="module[:op], path/to/file.py[:op] or name.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="Calls recorded by a program (JSON lines).")
    ] = None,
    sizes: Annotated[
        list[str] | None, typer.Option("--sizes", metavar="N=V,...", help="Sizes and scalars of a call; repeatable.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Dtype of the calls that --sizes describes.")] = "float32",
    device: Annotated[str | None, typer.Option("--device", help="Device; by default the CPU, or as recorded.")] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="TIME", help="Time for the whole tuning: 90s, 5m, 1h.")
    ] = None,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure what is in the store, too.")] = False,
    under_capture: Annotated[
        bool, typer.Option("--under-capture", help="Time CUDA graph replays; drop what cannot be captured.")
    ] = False,
    in_process: Annotated[bool, typer.Option("--in-process", help="Run candidates in this process.")] = False,
    compiled: Annotated[
        bool | None,
        typer.Option("--compiled/--eager-only", help="Measure templates in compiled code as well, or never there."),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the frozen tables TARGET (files or folders).")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="With --merge: the file to write.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON value: all choices, or what was merged.")
    ] = False,
) -> None:
    """Verify and time the kernels for given calls, and store the fastest choice.

    Each candidate runs in a separate process. Stored choices are not measured again. 'shiplap cache' shows them.

    With --merge nothing is measured, and all entries of the given tables are written to one table. If two entries are
    for the same op, call, device and versions, the one with the shorter measured time is kept. The other one is named
    in the output.
    """
    if merge or output is not None:
        others = [n for n, v in (("--profile", profile), ("--sizes", sizes), ("--device", device)) if v]
        return _merge_to_file(targets or [], output, others if merge else ["no --merge"], json=json)
    # Exactly one of both sources of calls is needed.
    if (profile is None) == (not sizes):
        raise error(
            "SL613",
            where="shiplap tune",
            got="both --profile and --sizes" if sizes else "no calls",
            expected="--profile FILE or --sizes n=...",
        )
    if device is not None:
        console.require_device(device)
    with console.own_stdout():
        requests = (
            _requests_of_profile(targets or [], profile, device)
            if profile
            else _requests_of_sizes(targets or [], sizes or [], dtype, device or "cpu")
        )
        from shiplap.tuning.selector import SelectionOptions

        options = SelectionOptions(remeasure=remeasure, capture="always" if under_capture else "auto")
        result = _tune_requests(requests, budget, options, not in_process, compiled, quiet=json)
    raise typer.Exit(_print_choices(result, budget, json=json))


def _merge_to_file(tables: Sequence[str], output: Path | None, others: Sequence[str], *, json: bool) -> None:
    """Write the entries of the frozen tables (files of tuned choices) ``tables`` to the file ``output``. Print the
    number of choices and the conflicts, as JSON if ``json`` is true and otherwise as text.

    ``others`` are the other options that were given. Raise ``SL613`` if there are any, or if a table or the output is
    missing.
    """
    if others or not tables or output is None:
        missing = [*others, *([] if tables else ["no tables"]), *([] if output else ["no -o FILE"])]
        expected = "--merge TABLE... -o FILE"
        raise error("SL613", where="shiplap tune --merge", got=", ".join(missing), expected=expected)
    with console.own_stdout():
        from shiplap.tuning.merge_tables import merge_frozen_tables

        merged = merge_frozen_tables(tables, output)
    choices = (f"{device}  {count} choices" for device, count in merged.choices.items())
    conflicts = (f"conflict  {conflict}" for conflict in merged.conflicts)
    console.show({"file": str(output), **asdict(merged)}, chain(choices, conflicts), as_json=json)
    if not json:
        console.note(f"wrote {output}: {sum(merged.choices.values())} choices of {len(merged.tables)} tables")


def _print_choices(result: TuneResult, budget: str | None, *, json: bool) -> int:
    """Print the kernels that tuning chose, as JSON if ``json`` is true and otherwise as text. Then print how many calls
    were not reached within ``budget``. Return the exit status.
    """
    from shiplap.render.result import exit_status

    missing = len(result.left_out)
    if json:
        choices = [c.as_json() for c in result]
        console.emit_json({"verdict": result.verdict, "choices": choices, "left_out": missing})
    else:
        console.out().print(result, soft_wrap=True)
    if missing:
        console.note(
            f"{missing} of {len(result)} calls are left out: the budget of {budget} was spent. "
            "The same command goes on with them."
        )
    return exit_status([result.verdict])


def _tune_requests(
    requests: Sequence[TuningRequest],
    budget: str | None,
    options: SelectionOptions,
    isolate: bool,
    compiled: bool | None,
    *,
    quiet: bool,
) -> TuneResult:
    """Return the result of tuning ``requests`` (ops with calls) within ``budget``. Show a progress bar unless ``quiet``
    is true.

    If ``isolate`` is true, candidates run in separate processes, and otherwise in this one. ``compiled`` says whether
    the templates of an op are also measured in compiled code. If it is None, they are measured there if some of them
    run only in compiled code.
    """
    from shiplap.tuning.engine import tune_all

    progress = False if quiet else None
    return tune_all(requests, budget, options=options, isolate=isolate, progress=progress, compiled=compiled)


def _requests_of_sizes(targets: Sequence[str], sizes: Sequence[str], dtype: str, device: str) -> list[TuningRequest]:
    """Return a tuning request (an op with a call) for each of ``sizes``, strings such as ``n=4096,c=64``. The calls
    have the dtype ``dtype`` and the device ``device``. Raise ``SL613`` unless ``targets`` name exactly one op.
    """
    from shiplap.tuning.engine import recipe_of_sizes

    ops = resolve_targets(targets)
    if len(ops) != 1:
        raise error("SL613", where="shiplap tune --sizes", got=f"{len(ops)} ops", expected="one op: module:op")
    return [(ops[0], recipe_of_sizes(ops[0], values_of(text), dtype), device) for text in sizes]


def values_of(text: str) -> dict[str, Any]:
    """Return a dict with the names and values in a string such as ``n=4096,kernel=[3,3,3]``. Lists become tuples. Raise
    ``SL613`` if the string has another form.
    """
    import ast

    try:
        # The text has the syntax of keyword arguments. Python parses it, and only literals are evaluated.
        call: Any = ast.parse(f"f({text})", mode="eval").body
        if call.args or any(k.arg is None for k in call.keywords):
            raise ValueError
        return {k.arg: tuple(v) if isinstance(v := ast.literal_eval(k.value), list) else v for k in call.keywords}
    except (SyntaxError, ValueError, AttributeError, RecursionError, MemoryError):
        raise error("SL613", where="--sizes", got=text, expected="n=4096,c=64") from None


def _requests_of_profile(targets: Sequence[str], profile: Path, device: str | None) -> list[TuningRequest]:
    """Return the calls recorded in the file ``profile`` as tuning requests. If there are ``targets``, only calls of
    their ops are returned. Raise ``SL613`` if no call is left. The calls have the device ``device``, or the recorded
    one if that is None.
    """
    from shiplap.tuning.recorded_calls import read_calls

    calls = read_calls(profile)
    # Names are compared, as a profile may hold calls of ops that cannot be imported here.
    only = {op.spec.name for op in resolve_targets(targets)} if targets else None
    requests = [
        (_op_of_call(call), call.parsed, device or call.device) for call in calls if only is None or call.op in only
    ]
    if not requests:
        raise error("SL613", where=str(profile), got="no calls", expected="calls of declared ops")
    return requests


def _op_of_call(call: RecordedCall) -> Op:
    """Return the op of the recorded call ``call``, after importing the module or file that declared it. Raise ``SL501``
    if the op is not declared there.
    """
    from shiplap.dispatch import registry

    if registry.find_declared_op(call.op) is None:
        # A script and a file loaded by a target have no module name under which another process could import them.
        home = call.file if call.module == "__main__" or call.module.startswith(OWN_NAME) else call.module
        try:
            import_home(home)
        except ShiplapError:
            if not call.file or home == call.file:
                raise
            # The module may have another name here, or none.
            import_home(call.file)
    op = registry.find_declared_op(call.op)
    if op is None:
        raise error(
            "SL501",
            where=call.op,
            what="no op has this name",
            got=f"{call.module} does not declare it",
            expected=call.op,
            fix="pass the module that declares it as TARGET",
        )
    return op
