"""Crossed declarations in a process without shiplap: their ops are written into one library, which torch loads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from shiplap_testing.crossed.calls import Calls, one_line, refusal_id
from shiplap_testing.crossed.declared import Declared
from shiplap_testing.crossed.observe import Observed, difference, flat

PROGRAM = """
import sys, torch
torch.ops.load_library(sys.argv[1])
done = {}
for seed, (name, positional, named) in torch.load(sys.argv[2]).items():
    print(seed, flush=True)
    try:
        with torch.no_grad():
            result = getattr(torch.ops.crossed, name)(*positional, **named)
        done[seed] = "met", result, positional, named
    except Exception as e:
        done[seed] = "raised", f"{type(e).__name__}: {e}", None, None
assert "shiplap" not in sys.modules
torch.save(done, sys.argv[3])
"""


def packaged_results(cases: Sequence[Declared], made: Any, folder: Path, device: str) -> Iterator[tuple[int, str, str]]:
    """Compile the ops of the declarations ``cases`` into one library for ``device``, and call each op from it in a
    process that has torch but not shiplap.

    Yield the seed of the declaration, the outcome and its detail for each op. If the library cannot be made, each op
    has the outcome ``refused`` or ``raised``. If the process crashes, yield only the last op that it called. ``made``
    has the declared ops by seed. Files are written to ``folder``.
    """
    from shiplap.kernels.native.deploy import deploy

    calls = {c.seed: Calls(made.ops[c.seed], c, device) for c in cases}
    try:
        library = deploy([made.ops[c.seed] for c in cases], folder / "deployed")
    except Exception as e:
        outcome = "refused" if refusal_id(e) else "raised"
        yield from ((c.seed, outcome, f"{refusal_id(e)}: {one_line(e)}") for c in cases)
        return
    given = {}
    for seed, call in calls.items():
        # An operator of torch takes the value of an enum member.
        values = [v.value if isinstance(v, Enum) else v for v in call.given.fresh()]
        given[seed] = (f"d{seed}", *call.given.split(values))
    torch.save(given, folder / "packaged.given")
    (folder / "packaged.py").write_text(PROGRAM)
    paths = [str(library), str(folder / "packaged.given"), str(folder / "packaged.done")]
    ended = subprocess.run(
        [sys.executable, str(folder / "packaged.py"), *paths], capture_output=True, text=True, check=False, timeout=300
    )
    if ended.returncode:
        # The program prints each seed before its call, so the last one names the crash.
        last = int((ended.stdout.split() or ["-1"])[-1])
        yield last, "crashed", f"status {ended.returncode}: {ended.stderr[-300:]}"
        return
    for seed, (outcome, result, positional, named) in torch.load(folder / "packaged.done").items():
        if outcome == "raised":
            yield seed, "refused" if "SL" in result else "raised", result
            continue
        yield seed, *_compared(calls[seed], result, positional, named)


def _compared(call: Calls, result: Any, positional: Any, named: Any) -> tuple[str, str]:
    """Compare a call of an op from a compiled library with the reference. Return the pair ``("met", "")`` if they
    agree, and otherwise ``differs`` and a description of the difference.

    ``result`` is what the call returned. ``positional`` and ``named`` are its arguments with their values after the
    call.
    """
    own, wide = call.expected()
    by_name = {
        **dict(zip([n for n in call.given.names if n not in call.given.keywords], positional, strict=True)),
        **named,
    }
    written = [by_name[n] for n in call.given.names if n.startswith("acc") and by_name[n] is not None]
    got = Observed(outs=flat(result), written=written, aliases=own.aliases)
    problem = difference(got, own, wide, call.terms, requires=False)
    return ("differs", problem) if problem else ("met", "")
