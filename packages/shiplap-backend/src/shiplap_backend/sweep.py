"""A process of the sweep: it runs test cases of ``shiplap_backend.opinfo`` and prints one JSON line for each.

The sweep runs ``python -m shiplap_backend.sweep`` in a process of its own, since a broken kernel may end the process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import unittest
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from shiplap.torch_private.aten_operators import op_infos
from shiplap_backend.opinfo import DTYPES, SampleEvidence, case_name, instantiate


def load_device(package: Path) -> str:
    """Import the generated package in the folder ``package``, register its device, and return the device's name."""
    sys.path.insert(0, str(package.parent))
    importlib.import_module(package.name).autoload()
    return package.name.removeprefix("torch_")


def operator_results(package: Path, cases: list[list[str]], samples: int) -> Iterator[dict[str, Any]]:
    """Yield a row with the result of each operator and dtype in ``cases`` that torch tests on the device.

    ``package`` is the folder of the device's package. At most ``samples`` samples are run of each operator. A row is a
    dict with ``op``, ``dtype`` and the fields of the result. Before each case there is a row with ``start`` and
    ``dtype``. It shows the parent process which case crashed.
    """
    device = load_device(package)
    names, dtypes = ({case[i] for case in cases} for i in (0, 1))
    # Tests are made for the operators of these cases only, since the database is large.
    tests = instantiate(globals(), names=names, dtypes=dtypes, samples=samples)
    tests.setUpClass()
    infos = op_infos()
    for name, dtype in cases:
        case = case_name(device, infos[name], DTYPES[dtype])
        if hasattr(tests, case):
            yield {"start": name, "dtype": dtype}
            yield {"op": name, "dtype": dtype, **_run_case(tests(case))}


def model_results(package: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a row with the result of each model in ``names``, which runs in float32.

    ``package`` is the folder of the device's package. Before each model, a row with ``start`` and ``dtype`` is yielded.
    By this row the parent process knows which model ran if this process crashes.
    """
    from shiplap_backend.models import MODELS
    from shiplap_backend.models.compared import compare_model

    device = load_device(package)
    module = getattr(torch, device)
    for name in names:
        needs, make = MODELS[name]
        seen, here = SampleEvidence(), not needs or find_spec(needs) is not None
        # Printed and flushed before the model runs, so that a crash is attributed to the model.
        yield {"start": name, "dtype": "f32"}
        if here:
            module.reset_counters()
            seen.samples = 1
            try:
                seen.failure = compare_model(make, device)
            except Exception as e:
                seen.failure = f"{type(e).__name__}: {str(e)[:300]}"
            seen.count(module.counters())
        yield {"op": name, "dtype": "f32", **_result_row(seen, "" if here else f"needs the package {needs!r}")}


def _run_case(case: Any) -> dict[str, Any]:
    """Run the test ``case`` of torch, and return its result as a row, that is, a dict for JSON."""
    result = unittest.TestResult()
    case.run(result)
    seen: SampleEvidence = getattr(case, "evidence", SampleEvidence())  # none if torch's decorators skip the case
    failure = seen.failure
    if not failure and not seen.refused:
        failure = "".join(text.strip().splitlines()[-1][:300] for _, text in (result.errors + result.failures)[:1])
    seen.failure = failure
    return _result_row(seen, "".join(reason for _, reason in result.skipped[:1]))


def _result_row(seen: SampleEvidence, skipped: str) -> dict[str, Any]:
    """Return the result ``seen`` of a case as a row, that is, a dict for JSON.

    ``skipped`` is the reason why the case was skipped, or an empty string.
    """
    return {
        "samples": seen.samples,
        "gradients": seen.gradients,
        "native": sorted(seen.native),
        "fallback": seen.fallback,
        "failure": seen.failure,
        "refused": seen.refused,
        "skipped": skipped,
    }


def main() -> None:
    """Run the cases in the JSON on stdin, and print one row of JSON for each.

    The command line is ``sweep PACKAGE --samples 8``, and the JSON is ``[[op, dtype], ...]``. With ``--list`` the
    operators are printed instead. With ``--models`` the names are those of models, which run in float32.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("package", type=Path)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--models", action="store_true")
    options = parser.parse_args()
    out = sys.stdout
    sys.stdout = sys.stderr  # what operators print is not ours
    torch.set_num_threads(1)
    if options.list:
        out.write(json.dumps(sorted(op_infos())) + "\n")
        return

    def sweep() -> None:
        """Run the cases in the JSON on stdin, and print a row of JSON for each."""
        cases = json.load(sys.stdin)
        rows = (
            model_results(options.package, [name for name, _ in cases])
            if options.models
            else operator_results(options.package, cases, options.samples)
        )
        for row in rows:
            out.write(json.dumps(row) + "\n")
            # A crash must not lose the rows that a buffer still holds.
            out.flush()

    # For each sample torch's tests look up the source of every frame of the stack, and search all modules for those
    # without a file, which the frames of `python -m` are: a thread has none of them, and takes a tenth of the time.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(sweep).result()


if __name__ == "__main__":
    main()
