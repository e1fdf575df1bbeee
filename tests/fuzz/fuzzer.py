"""Read mutated files of one kind: ``python fuzzer.py KIND ROUNDS SEED FOLDER``.

Every file of ``corpus/KIND`` is read as it is, then ``ROUNDS`` mutations of them. Half of those change bytes; the other
half change values and put the checksums right again, as whoever writes a file by hand can. A file is accepted or
refused with an error of the catalogue, each within a second of CPU time, and all of them together in 512 MiB more than
the process had. Whatever breaks that is left in ``FOLDER/found``, and the status is 1.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shiplap.errors import ShiplapError
from shiplap.judge.library_imports import imports_from_package
from shiplap.judge.suite_run import describe_suite, read_verdicts
from shiplap.judge.suites import SuiteFolders, find_problems
from shiplap.packaging.worker import read_answer
from shiplap.sandbox.protocol import BrokenMessage, Declined, Failed, Reply, parse_message
from shiplap.sandbox.source_scan import (
    compared_numbers,
    constants_in_sources,
    find_suspicious_names,
    parameters_in_source,
)
from shiplap.sandbox.unsteady_source import find_unsteady_decisions
from shiplap.tuning import packaged_choices
from shiplap.tuning.frozen_table import frozen, thaw
from shiplap.tuning.recorded_calls import read_calls
from shiplap.tuning.store import ChoiceStore
from shiplap_testing.mutate import mutated

CORPUS = Path(__file__).with_name("corpus")
SECONDS, MEBIBYTES = 1.0, 512
REPLIES = tuple(Reply.__subclasses__())
SUITE = {
    "definition.json": '{"axes": {"n": {"type": "var"}}, "inputs": {"x": {"shape": ["n"], "dtype": "float32"}}, '
    '"reference": "def run(x): return x"}',
    "workload.jsonl": '{"axes": {"n": 4}, "inputs": {"x": {"type": "random"}}}',
    "solution.json": '{"spec": {"entry_point": "k.py::run"}, "sources": [{"path": "k.py", "content": ""}]}',
    "func_forward.py": "def forward_fn(x): return x",
    "reference.py": "def ref_kernel(data): return data",
    "submission.py": "def custom_kernel(data): return data",
}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**63 - 1, -(2**63), 2**70, 0.5, -0.0, 1e308, "", "x", "\0", "\ud800", "a" * 5000),
    *(
        [],
        {},
        [[]],
        [None],
        {"": None},
        [0] * 50,
        "<script>alert(1)</script>",
        "../../x",
        "cuda:99",
        "n<=" + "(" * 3000,
    ),
    *(
        "n<=__import__('os')",
        "9" * 400,
        "1e999",
        "-" * 3000 + "1",
        "aten::add",
        "::",
        "f(x)[0]",
        {"tile": 2**70},
        "\x1b[2J",
    ),
)


NUMBERS = (
    b"0",
    b"1e999",
    b"0x" + b"9" * 400,
    b"9" * 5000,
    b"2 ** 999",
    b"float('nan')",
    b"1j",
    "e\u0301\u0316".encode() * 99,
)


def changed(rng: random.Random, value: Any) -> Any:
    """A copy of plain data with one value, or one name, exchanged, left out or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        kind = rng.randrange(8)
        if kind == 0:
            return {k: v for k, v in value.items() if k != name}
        if kind == 1:
            return {(str(rng.choice(VALUES)) if k == name else k): v for k, v in value.items()}
        return {k: changed(rng, v) if k == name else v for k, v in value.items()}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:at] + value[at:] * 2
        return [*value[:at], changed(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, str) and value and rng.random() < 0.5:
        return mutated(rng, value.encode(errors="replace")).decode(errors="replace")
    return rng.choice(VALUES)


def changed_source(rng: random.Random, whole: bytes) -> bytes:
    """A Python source with up to four of its words exchanged, for others of it or for unusual numbers."""
    parts = re.split(rb"(\w+)", whole)
    for _ in range(rng.randint(1, 4)):
        parts[rng.randrange(1, len(parts), 2)] = rng.choice(NUMBERS if rng.random() < 0.4 else parts[1::2])
    return b"".join(parts)


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def plain(data: Any) -> bytes:
    """JSON as it is."""
    return json.dumps(data).encode()


def entries_sealed(data: Any) -> bytes:
    """Packaged choices whose checksums fit."""
    entries = data.get("entries") if isinstance(data, dict) else []
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            entry["sha256"] = _digest({name: entry.get(name) for name in ("format", "key", "value")})
    return plain(data)


def table_sealed(data: Any) -> bytes:
    """A table whose checksums fit."""
    entries_sealed(data)
    if isinstance(data, dict):
        data["sha256"] = _digest({name: data.get(name) for name in ("format", "entries")})
    return plain(data)


def entry_sealed(data: Any) -> bytes:
    """An entry of the store whose checksum fits."""
    entries_sealed({"entries": [data]})
    return plain(data)


def read_table(path: Path) -> None:
    """As ``sl.frozen`` does, and back."""
    try:
        frozen(path)
    finally:
        thaw()


def read_metadata(path: Path) -> None:
    """As ``shiplap backend gen`` does."""
    _metadata().load_metadata(path)


@cache
def _metadata() -> Any:
    """The module. The file that comes with shiplap, which half of all cases extend, is read once, and so are the
    names of the installed runtimes.
    """
    from shiplap_backend import metadata, runtimes

    read, shipped = metadata._read_yaml, metadata.shipped_metadata("any").parent
    once = cache(read)
    metadata._read_yaml = lambda path: once(path) if path.parent == shipped else read(path)
    runtimes.runtime_names, runtimes.find_runtime = cache(runtimes.runtime_names), cache(runtimes.find_runtime)
    return metadata


def read_lock(path: Path) -> None:
    """As ``shiplap backend diff`` does with the schema lock."""
    from shiplap_backend.lock import read_lock

    read_lock(path)


def read_manifest(path: Path) -> None:
    """As a call does that looks for a packaged binding, which takes a ValueError as a reason not to use it."""
    from shiplap.kernels.native import prebuilt

    with suppress(ValueError):
        prebuilt._read_manifest_rows.__wrapped__(path.parent)


def read_cubins(path: Path) -> None:
    """As a call does that looks for a packaged kernel of Triton."""
    from shiplap.kernels.triton import prebuilt

    prebuilt._read_index_rows.__wrapped__(path.parent)


def read_packaged(path: Path) -> None:
    """As a call does that looks for packaged choices."""
    packaged_choices._read_packaged_table.__wrapped__(path)


def read_entry(path: Path) -> None:
    """As a call does that looks for a choice in the cache."""
    ChoiceStore(path.parent)._read(path)


def read_package_answer(path: Path) -> None:
    """As ``shiplap package`` does with what the process answers that has imported a wheel."""
    read_answer(path, ["module"], "the process ended")


def read_suite(path: Path) -> None:
    """As ``shiplap judge --suite`` does: each reader gets the file under the name that it looks for."""
    content, folder = path.read_bytes(), path.parent / "suite"
    for name in ("definition.json", "workload.jsonl", "solution.json", "config_forward.json", "task.yml"):
        problem = folder / name.partition(".")[0]
        if not problem.exists():
            problem.mkdir(parents=True)
            for other, text in SUITE.items():
                (problem / other).write_text(text)
        (problem / name).write_bytes(content)
    find_problems(SuiteFolders(folder, "", path.parent / "written"))


def read_earlier_verdicts(path: Path) -> None:
    """As ``shiplap judge --suite`` does with the verdicts of an earlier run."""
    describe_suite(read_verdicts(path))


def read_baseline(path: Path) -> None:
    """As ``shiplap audit --installed`` does with the findings that are known."""
    from shiplap.cli import audit_installed

    audit_installed._read_baseline(SimpleNamespace(baseline=path, update_baseline=False))


def read_reply(path: Path) -> None:
    """As the judge does with the reply of a process that is not trusted."""
    content = path.read_bytes()
    for kind in REPLIES:
        with suppress(BrokenMessage):
            parse_message(content, kind, Failed, Declined)


def read_mark(path: Path) -> None:
    """As ``shiplap survey`` does. Imported here: tables are read in a third of the time where no family is."""
    from shiplap_sparse3d.survey.folder import SurveyFolder

    SurveyFolder(path.parent).claim(json.loads((CORPUS / "mark" / "survey.json").read_text()))


def read_candidate(path: Path) -> None:
    """As ``shiplap judge`` does with the source of a candidate, which may be no Python, before it is imported."""
    find_suspicious_names(str(path), ["candidate", "Model"])
    find_unsteady_decisions(str(path))
    constants_in_sources(str(path))
    compared_numbers(str(path))
    parameters_in_source(str(path), ["candidate", "Model"])
    imports_from_package(str(path), str(path.parent / "helper"), [str(path.parent)])


READERS: dict[str, tuple[Callable[[Path], object], Callable[[Any], bytes] | None]] = {
    "table": (read_table, table_sealed),
    "record": (read_calls, lambda data: plain(data) + b"\n"),
    "metadata": (read_metadata, None),
    "mark": (read_mark, plain),
    "lock": (read_lock, plain),
    "manifest": (read_manifest, plain),
    "cubins": (read_cubins, plain),
    "packaged": (read_packaged, entries_sealed),
    "entry": (read_entry, entry_sealed),
    "answer": (read_package_answer, plain),
    "suite": (read_suite, plain),
    "reply": (read_reply, None),
    "verdict": (read_earlier_verdicts, plain),
    "baseline": (read_baseline, plain),
    "source": (read_candidate, None),
}
# Of so many hundred files as many are of each kind: none has fewer than 2. Metadata and suites take longest.
SHARES = {
    **{"table": 24, "record": 20, "mark": 10, "metadata": 6, "lock": 6, "manifest": 5, "cubins": 5, "packaged": 5},
    **{"entry": 4, "answer": 4, "suite": 3, "reply": 2, "verdict": 2, "baseline": 2, "source": 2},
}
# What looks for a file of a name.
NAMES = {"mark": "survey.json", "manifest": "manifest.json", "cubins": "index.json", "source": "source.py"}


def attempt(kind: str, path: Path) -> str:
    """What is wrong with how ``path`` is read, or nothing."""
    started = time.process_time()
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            READERS[kind][0](path)
    except ShiplapError:
        pass
    except BaseException:
        return traceback.format_exc(limit=-4)
    took = time.process_time() - started
    if "\x1b" in output.getvalue():
        return "it controls the terminal"
    return f"{took:.1f} s" if took > SECONDS else ""


def next_input(rng: random.Random, kind: str, seeds: list[bytes]) -> bytes:
    """One mutation of one file of the corpus."""
    whole, write = rng.choice(seeds), READERS[kind][1]
    if kind == "source" and rng.random() < 0.8:
        return changed_source(rng, whole)
    if write is None or rng.random() < 0.5:
        return mutated(rng, whole)
    try:
        data = json.loads(whole)
    except ValueError:
        return mutated(rng, whole)
    for _ in range(rng.randint(1, 3)):
        data = changed(rng, data)
    return write(data)


def main(kind: str, rounds: int, seed: int, folder: Path) -> int:
    """Read the corpus and ``rounds`` mutations; how many of them broke something, at most 20."""
    warnings.simplefilter("ignore")
    memory = Path("/dev/shm")  # a disk takes longer to write a file than we to read it
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as place:
        return _rounds(kind, rounds, seed, Path(place) / NAMES.get(kind, f"{kind}.file"), folder / "found")


def _rounds(kind: str, rounds: int, seed: int, path: Path, broken: Path) -> int:
    """The same, with every case written to ``path``, and to ``broken`` if it broke something."""
    seeds = [file.read_bytes() for file in sorted((CORPUS / kind).iterdir())]
    path.touch(mode=0o600)
    rng, wrong = random.Random(f"{kind} {seed}"), 0
    path.write_bytes(seeds[0])
    attempt(kind, path)  # what is imported or cached is no part of a reading
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(-len(seeds), rounds):
        content = seeds[number] if number < 0 else next_input(rng, kind, seeds)
        path.write_bytes(content)
        if problem := attempt(kind, path):
            broken.mkdir(exist_ok=True)
            (broken / f"{kind}-{seed}-{number}").write_bytes(content)
            print(f"{kind} {number}: {problem}", flush=True)
            wrong += 1
            if wrong == 20:
                break
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    print(f"{kind}: {rounds} rounds of seed {seed}, {wrong} wrong, {grown} MiB more")
    return int(wrong > 0 or grown > MEBIBYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
