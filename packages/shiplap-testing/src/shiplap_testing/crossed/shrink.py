"""What fails with fewer features: one after another is dropped as long as it still fails, each time in a child."""

from __future__ import annotations

from dataclasses import replace

from shiplap_testing.crossed.declared import Declared, fitting
from shiplap_testing.crossed.run import FAILURES, Limits, Record, run_batch

TRIES = 60


def fails_alike(case: Declared, failure: Record, device: str, limit: float = 120.0) -> bool:
    """Run the op declaration ``case`` in a child process on ``device``, and return whether it fails like ``failure``.

    It fails alike if the op, called as in ``failure`` (such as under ``vmap``), has the outcome of ``failure``. The
    process counts as hung after ``limit`` seconds without a result.
    """
    found: list[Record] = []
    run_batch([case], device, found.append, Limits(limit))
    return any(_alike(r, failure) for r in found)


def _alike(record: Record, failure: Record) -> bool:
    """Return whether ``record``, the outcome of one call, is a failure like ``failure``. Their outcomes must be equal,
    and so must the ways of calling the op (such as ``vmap``). If the calls raised exceptions, the types of these must
    be equal as well.
    """
    if record["outcome"] not in FAILURES or record["outcome"] != failure["outcome"]:
        return False
    same_way = record["way"] == failure["way"]
    kind = record["detail"].partition(":")[0] == failure["detail"].partition(":")[0]
    return same_way and (kind or record["outcome"] != "raised")


def shrink(case: Declared, failure: Record, device: str = "cpu", tries: int = TRIES) -> Declared:
    """Return a smaller op declaration than ``case`` that still fails like ``failure``, with features dropped one after
    another. At most ``tries`` smaller declarations are run on ``device``. If all of them pass, return ``case`` with
    only the failing way of calling.
    """
    way = failure["way"]
    least = replace(case, ways=(way,) if way in case.ways else ())
    # Fitting may map several simpler declarations to the same one.
    seen = {least}
    again = True
    while again and tries > 0:
        again = False
        for simpler in least.simpler():
            simpler = fitting(simpler, device)
            if simpler in seen or tries <= 0:
                continue
            seen.add(simpler)
            tries -= 1
            if fails_alike(simpler, failure, device):
                least, again = simpler, True
                break
    return least


def script(case: Declared, failure: Record, device: str = "cpu") -> str:
    """Return the source code of a Python program that shows ``failure``. It has the module of the op declaration
    ``case`` in comments, and calls the op on ``device``.
    """
    from shiplap_testing.crossed.source import module_text

    declaration = "\n".join(f"# {line}".rstrip() for line in module_text(case, device).splitlines())
    detail = " ".join(failure["detail"].split())[:400]
    return f'''"""{failure["way"]}: {failure["outcome"]}: {detail!r}"""
{declaration}

import os
import tempfile
from pathlib import Path

os.environ["SHIPLAP_NATIVE"] = "0"
{'os.environ["TRITON_INTERPRET"] = "1"' if device == "cpu" else ""}
os.environ["SHIPLAP_CACHE_DIR"] = tempfile.mkdtemp()

from shiplap_testing.crossed.child import run
from shiplap_testing.crossed.declared import Declared

case = Declared.from_json({case.to_json()!r})
run([case], Path(tempfile.mkdtemp()), "{device}", set(), lambda **fields: print(fields, flush=True))
'''
