"""Mutants of four rooms of the core, and which tests kill them.

    python benchmarks/mutants.py [--seed 3506] [--jobs 2] [--limit 500] [--text] [--json FILE]

A mutant is one changed expression, drawn at random from each room alike. The tests of the rooms are collected once, and
each runs once, to record its time and the lines that it executes. For each mutant a fork of the same process gets the
changed code in place of the functions' own and runs the tests that execute its lines, in the order of ``make test
ARGS=--changed`` for them, as many as take ``--together`` seconds, up to the first failure. What no test kills there,
and what is not the code of a function, runs again in a copy of the repository with the changed file, with tests that
are collected there, those that start processes too. A test kills only if it passes without the change. ``--jobs`` forks
do this side by side. The sample and its rows are kept in the folder, so that the next run goes on where the limit ended
the last one; ``equivalents.json`` there names mutants that no test can kill, with the reason.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _executed_lines import record_lines, tests_by_line, tests_that_execute
from _record import ROOT, describe_machine, record, write
from _source_mutants import ROOMS, SOURCE, SourceMutant, draw_mutants, keep_sample, statement_lines

from shiplap_testing import cost
from shiplap_testing.changed import Graph
from shiplap_testing.nearest import KEPT, UNKNOWN_COST, order, rank

TESTS = "packages/shiplap/tests"
# Whose tests may kill a mutant, in the order in which they are looked at. Other rooms reach the four through these.
NEAR = (
    "kernels",
    "dispatch",
    "declare",
    "plan",
    "codegen",
    "sampling",
    "sharding",
    "plugin_api",
    "safe_io",
    "packaging",
)
MARKS = "not gpu and not long and not docs and not device"
ONE_S, PIECE_S = 20.0, 6.0
LONGEST_S, CPU_S = 300.0, 90  # seconds of the clock and of a processor for the tests of a mutant together
PACKAGES = ("shiplap",)


def list_tests() -> list[str]:
    """Return the files and folders of tests that may kill a mutant."""
    alone = sorted(path.name for path in (ROOT / TESTS).glob("test_*.py"))
    return [f"{TESTS}/{name}" for name in (*NEAR, *alone) if (ROOT / TESTS / name).exists()]


def exchange_code(mutant: SourceMutant) -> None:
    """Give the functions of this process the code of the mutant. Raise ``LookupError`` if none has the changed code."""
    path, data = ROOT / mutant.file, (ROOT / mutant.file).read_bytes()
    old, new = (compile(text, str(path), "exec", dont_inherit=True) for text in (data, mutant.change(data)))
    codes = {(a.co_qualname, a.co_firstlineno): b for a, b in pair_codes(old, new) if a != b}
    count = 0
    gc.unfreeze()  # what is frozen is not listed
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename == str(path):
            code = codes.get((each.__code__.co_qualname, each.__code__.co_firstlineno))
            if code is not None and len(code.co_freevars) == len(each.__code__.co_freevars):
                each.__code__, count = code, count + 1
    if not count:
        raise LookupError(mutant.name)


def pair_codes(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield the pairs of code objects that stand at the same place of two versions of a file."""
    yield old, new
    within = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new)]
    if [c.co_qualname for c in within[0]] == [c.co_qualname for c in within[1]]:
        for a, b in zip(*within, strict=True):
            yield from pair_codes(a, b)


def fork_child(work: Callable[[Callable[[Any], None]], None], seconds: float, cpu: int) -> tuple[list[Any], str]:
    """Run ``work`` in a fork that may take so many seconds, and return the values that it passes to its argument, and
    how it ended: ``right``, ``time``, or the status.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.close(reading)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
            work(lambda value: void(os.write(writing, json.dumps(value).encode() + b"\n")))
            os._exit(0)
        except BaseException as e:
            os.write(2, f"{e!r}\n".encode())
            os._exit(99)
    os.close(writing)
    os.set_blocking(reading, False)
    text, ends, status = b"", time.monotonic() + seconds, None
    while status is None and time.monotonic() < ends:
        select.select([reading], [], [], 0.05)
        text += read_all(reading)
        done, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else None
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    text += read_all(reading)
    os.close(reading)
    how = (
        "right" if status == 0 else "time" if status in (None, -signal.SIGXCPU, -signal.SIGKILL) else f"status {status}"
    )
    return [json.loads(line) for line in text.splitlines() if line.endswith((b"]", b"}", b'"'))], how


def spread(work: Callable[[int], None], count: int, jobs: int) -> None:
    """Call ``work`` with each number below ``count``, in so many forks side by side."""
    reading, writing = os.pipe()
    os.write(writing, b"".join(number.to_bytes(4, "big") for number in range(count)))
    os.close(writing)
    pids = []
    for _ in range(min(jobs, count)):
        pid = os.fork()
        if pid == 0:
            try:
                while word := os.read(reading, 4):
                    work(int.from_bytes(word, "big"))
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            os._exit(0)
        pids.append(pid)
    os.close(reading)
    for pid in pids:
        os.waitpid(pid, 0)


def void(value: object) -> None:
    """Return nothing."""


def read_all(descriptor: int) -> bytes:
    """Return all bytes that wait in a pipe."""
    text = b""
    with suppress(BlockingIOError):
        while piece := os.read(descriptor, 1 << 16):
            text += piece
    return text


def start_server() -> None:
    """Start the process from which tests fork their programs here, so that it outlives the forks of this process."""
    path = ROOT / "packages" / "shiplap-testing" / "src" / "shiplap_testing" / "forked.py"
    spec = importlib.util.spec_from_file_location("forked_alone", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # In another thread, since a connection is for one thread, and no fork may share one.
    thread = threading.Thread(target=module.python, args=("-c", "pass"))
    thread.start()
    thread.join()


class Workshop:
    """A plugin of pytest that tries mutants in forks instead of running the collected tests."""

    def __init__(self, given: argparse.Namespace, mutants: list[SourceMutant]) -> None:
        """Go on with what ``given.folder`` holds, until ``given.limit`` seconds from now."""
        self.given, self.mutants, self.ends = given, mutants, time.monotonic() + given.limit
        self.folder: Path = given.folder
        self.jobs: int = given.jobs
        self.tried = [mutant for mutant in mutants if mutant.room in given.rooms]
        self.rank = prepare_ranks(self.tried)
        self.seconds, self.by_line = dict[str, float](), dict[str, dict[int, set[str]]]()
        self.files = frozenset(str(path) for room in ROOMS for path in (ROOT / SOURCE / room).glob("*.py"))
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what failed or was left out."""
        if report.outcome != "passed":
            self.failed.append(report.outcome)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try each mutant that has no row."""
        start_server()
        self.record_all(session.items)
        items_by_name = {item.nodeid: item for item in session.items}
        spread(lambda number: self.write_row(self.tried[number], items_by_name), len(self.tried), self.jobs)
        return True

    def record_all(self, items: list[pytest.Item]) -> None:
        """Record what each of the tests ``items`` executes and takes, one fork for each piece of a file of tests."""
        for module in sorted(self.files):  # whose code is instrumented before the first test
            name = Path(module).relative_to((ROOT / SOURCE).parent).with_suffix("")
            importlib.import_module(".".join(name.parts).removesuffix(".__init__"))
        pieces = split_items(items, cost.load())
        sources, kept = b"".join(Path(file).read_bytes() for file in sorted(self.files)), self.folder / "lines"
        kept.mkdir(exist_ok=True)
        places = []
        for piece in pieces:
            names = "\n".join(item.nodeid for item in piece)
            text = sources + names.encode() + (ROOT / names.partition("::")[0]).read_bytes()
            places.append(kept / f"{hashlib.sha256(text).hexdigest()[:24]}.json")
        left = [number for number, place in enumerate(places) if not place.exists()]
        print("tests:", len(items), "pieces to record:", len(left), file=sys.__stderr__, flush=True)
        spread(lambda n: self.record_piece(pieces[left[n]], places[left[n]]), len(left), self.jobs)
        executed = {}
        for place in places:
            for name, (outcome, seconds, lines) in json.loads(place.read_text() if place.exists() else "{}").items():
                self.seconds[name] = seconds
                if outcome == "passed":
                    executed[name] = lines
        self.by_line = tests_by_line(executed)
        left_s = round(self.ends - time.monotonic())
        print("recorded:", len(self.seconds), "seconds left:", left_s, file=sys.__stderr__, flush=True)

    def record_piece(self, items: list[pytest.Item], place: Path) -> None:
        """Write to ``place`` the outcome of each of the tests ``items``, its seconds and the lines that it executes."""
        rows: dict[str, Any] = {}

        def work(pass_on: Callable[[Any], None]) -> None:
            for item, following in zip(items, [*items[1:], None], strict=True):
                self.failed.clear()
                began = time.monotonic()
                with record_lines(self.files) as found:
                    item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                seconds = round(time.monotonic() - began, 3)
                lines = {str(Path(file).relative_to(ROOT)): sorted(each) for file, each in found.items()}
                rows[item.nodeid] = [self.failed[0] if self.failed else "passed", seconds, lines]
            place.write_text(json.dumps(rows))

        fork_child(work, LONGEST_S, int(LONGEST_S))

    def write_row(self, mutant: SourceMutant, items: dict[str, pytest.Item]) -> None:
        """Try a mutant that has no row, and write its row unless the time is over before its tests are."""
        place = self.folder / "rows" / f"{mutant.name}.json"
        if mutant.inside and not place.exists() and time.monotonic() < self.ends:
            row = self.try_mutant(mutant, items)
            if row["killed"] or time.monotonic() < self.ends:
                place.write_text(json.dumps({**row, "way": "exchanged", "machine": describe_machine(PACKAGES)}))
                print(mutant.name, Path(mutant.file).name, mutant.line, row, file=sys.__stderr__, flush=True)

    def run_items(self, items: list[pytest.Item], pass_on: Callable[[Any], None]) -> None:
        """Run tests up to the first failure and pass on for each its name, outcome and seconds."""
        for item, following in zip(items, [*items[1:], None], strict=True):
            self.failed.clear()
            began = time.monotonic()
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            outcome = "failed" if "failed" in self.failed else self.failed[0] if self.failed else "passed"
            pass_on([item.nodeid, outcome, round(time.monotonic() - began, 3)])
            if outcome == "failed":
                break

    def try_mutant(self, mutant: SourceMutant, items: dict[str, pytest.Item]) -> dict[str, Any]:
        """Return what became of the mutant: the test that kills it, and how many run."""
        tests = tests_that_execute(self.by_line.get(mutant.file, {}), statement_lines(mutant))
        chosen = choose_tests(tests & items.keys(), self.rank(mutant), self.seconds, self.given.together)
        while True:
            picked = [items[name] for name in chosen]

            def work(pass_on: Callable[[Any], None], picked: list[pytest.Item] = picked) -> None:
                exchange_code(mutant)
                pass_on(["exchanged"])
                self.run_items(picked, pass_on)

            seconds = min(LONGEST_S, self.ends - time.monotonic())
            rows, how = fork_child(work, seconds, CPU_S) if picked else ([], "right")
            if how == "time" and time.monotonic() > self.ends:
                return {"killed": None}
            ran = rows[1:]
            if picked and not rows:
                return {"killed": None, "ran": 0, "of": len(chosen), "note": how}
            lost = picked[len(ran)].nodeid if how != "right" and len(ran) < len(picked) else None
            killer = next((name for name, outcome, *_ in ran if outcome == "failed"), lost)
            # If all of them took that long, the one that was running gets the time alone.
            if lost is not None and killer == lost and how == "time" and ran:
                chosen = chosen[chosen.index(lost) :]
            elif killer is None or self.is_passing(killer, items):
                note = how if killer and killer == lost else ""
                return {"killed": killer, "ran": len(ran), "of": len(chosen), "note": note}
            else:
                chosen = chosen[chosen.index(killer) + 1 :]

    def is_passing(self, name: str, items: dict[str, pytest.Item]) -> bool:
        """Return whether a test passes in a fork without a change."""
        place = self.folder / "passing" / hashlib.sha256(name.encode()).hexdigest()[:16]
        if not place.exists():  # no other fork of this process has run it yet
            rows, _ = fork_child(lambda pass_on: self.run_items([items[name]], pass_on), 120, 60)
            place.parent.mkdir(exist_ok=True)
            beside = place.with_name(f"{place.name}.{os.getpid()}")
            beside.write_text(json.dumps([name, bool(rows) and rows[0][1] == "passed"]))
            beside.replace(place)
        passes: bool = json.loads(place.read_text())[1]
        return passes


def split_items(items: list[pytest.Item], seconds: Mapping[str, float]) -> list[list[pytest.Item]]:
    """Return the tests ``items`` in pieces of one file each, of about ``PIECE_S`` seconds, the longest first."""
    pieces, took, file = list[list[pytest.Item]](), list[float](), ""
    for item in items:
        function = item.nodeid.partition("[")[0]
        if function.partition("::")[0] != file or took[-1] > PIECE_S:
            file = function.partition("::")[0]
            pieces.append([])
            took.append(0.0)
        pieces[-1].append(item)
        took[-1] += seconds.get(function, UNKNOWN_COST)
    return [pieces[number] for number in sorted(range(len(pieces)), key=took.__getitem__, reverse=True)]


def prepare_ranks(mutants: list[SourceMutant]) -> Callable[[SourceMutant], dict[str, float]]:
    """Return a function that returns for one of ``mutants`` the places of test functions in the order of
    ``make test ARGS=--changed``. Each call takes about a second, so that forks make it side by side.
    """
    graph, seconds, files = Graph(ROOT, KEPT), cost.load(), dict[str, list[str]]()
    if mutants:
        graph.test_costs([mutants[0].file], {})  # makes what later calls share

    def rank_tests(mutant: SourceMutant) -> dict[str, float]:
        """Return the places of test functions in the order for ``mutant``."""
        if mutant.file not in files:
            files[mutant.file] = graph.tests([mutant.file])
        ways = graph.test_costs([mutant.file], {mutant.file: range(mutant.line, mutant.last + 1)})
        ranks: dict[str, float] = rank(graph, files[mutant.file], ways, seconds)["ranks"]
        return ranks

    return rank_tests


def choose_tests(
    names: Iterable[str], ranks: Mapping[str, float], seconds: Mapping[str, float], together: float
) -> list[str]:
    """Return those of the tests ``names`` that ``--changed`` picks, in its order, as many as take ``together`` seconds.
    Tests of more than ``ONE_S`` seconds are left out.
    """
    picked = [name for name in names if name.partition("[")[0] in ranks]
    chosen, spent = [], 0.0
    for name in sorted(picked, key=order(picked, ranks).__getitem__):
        took = seconds.get(name, seconds.get(name.partition("[")[0], UNKNOWN_COST))
        if took < ONE_S and spent + took < together:
            spent += took
            chosen.append(name)
    return chosen


def try_texts(given: argparse.Namespace, mutants: list[SourceMutant], ends: float) -> None:
    """Try the mutants that no exchange killed in copies of the repository whose file is changed."""
    left, seconds, equal = list[SourceMutant](), cost.load(), read_equivalents(given.folder)
    for mutant in mutants:
        place = given.folder / "rows" / f"{mutant.name}.json"
        row = json.loads(place.read_text()) if place.exists() else {}
        wanted = mutant.name in given.only if given.only else row.get("way") != "text" and (row or not mutant.inside)
        if mutant.name not in equal and not row.get("killed") and wanted:
            left.append(mutant)
    rank_tests = prepare_ranks(left)
    start_server()

    def work(number: int) -> None:
        if time.monotonic() < ends:
            mutant = left[number]
            ranks = rank_tests(mutant)
            names = [name for name in ranks if name.startswith(tuple(given.tests))]
            chosen = choose_tests(names, ranks, seconds, given.together)
            try_text(given, mutant, given.also or chosen, ends)

    spread(work, len(left), given.jobs)


def try_text(given: argparse.Namespace, mutant: SourceMutant, chosen: list[str], ends: float) -> None:
    """Try a mutant in this process's copy of the repository, and write its row unless the time is over before."""
    place, row_place = given.folder / f"copy-{os.getpid()}", given.folder / "rows" / f"{mutant.name}.json"
    if not place.exists():
        copy_repository(place)
    path, data = place / mutant.file, (ROOT / mutant.file).read_bytes()
    killer, count, left = None, 0, list(chosen)
    while left:
        path.write_bytes(mutant.change(data))
        try:
            killer, ran = run_texts(place, left, min(180.0, ends - time.monotonic()))
        finally:
            path.write_bytes(data)
        if time.monotonic() > ends:
            return
        count += ran
        if killer is None:
            break
        last = killer if "::" in killer else left[min(ran, len(left) - 1)]  # which was running when the time was over
        if killer == "time" and 0 < ran < len(left):  # all of them took that long: this one has the time alone now
            killer, left = None, left[ran:]
            continue
        if run_texts(place, [last], 120)[0] is None:
            break
        killer, left = None, left[left.index(last) + 1 :] if last in left else []
    before = json.loads(row_place.read_text()) if row_place.exists() else {}
    count += before.get("ran", 0) if given.also else 0
    row = {"killed": killer, "ran": count, "of": len(chosen), "way": "text"}
    row_place.write_text(json.dumps({**row, "machine": describe_machine(PACKAGES)}))
    print(mutant.name, Path(mutant.file).name, mutant.line, row, file=sys.__stderr__, flush=True)


def copy_repository(place: Path) -> None:
    """Copy the repository to the folder ``place``, without what is built and measured."""
    skipped = shutil.ignore_patterns(".git", ".venv", "build", "results", ".*_cache", "site", "__pycache__", ".[gw]*")
    shutil.copytree(ROOT, place, symlinks=True, ignore=skipped)
    (place / "build").mkdir()
    (place / "build" / "test-compilers").symlink_to(ROOT / "build" / "test-compilers")
    (place / ".git").symlink_to(ROOT / ".git")


def run_texts(place: Path, chosen: list[str], seconds: float) -> tuple[str | None, int]:
    """Run tests in the copy ``place`` up to the first failure; return the test that failed, and how many ran."""
    told = place / "build" / "failed"
    told.unlink(missing_ok=True)

    class Teller:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.failed:
                with told.open("a") as file:
                    file.write(f"{report.outcome} {report.nodeid}\n")

    def work(pass_on: Callable[[Any], None]) -> None:
        os.chdir(place)
        for name in [name for name in sys.modules if name.startswith("shiplap")]:  # those of the repository
            del sys.modules[name]
        tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp()
        here = [str(place / f"packages/{p}/src") for p in ("shiplap", "shiplap-testing")]
        sys.path[:0], sys.dont_write_bytecode = here, True
        os.environ["PYTHONPATH"] = os.pathsep.join(here)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        options = ["-q", "-x", "-p", "no:cacheprovider", "-m", MARKS]
        code = pytest.main([*options, *chosen], plugins=[Teller()])
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)
        pass_on([int(code)])

    codes, how = fork_child(work, seconds, int(seconds) + 60) if chosen else ([[0]], "right")
    lines = told.read_text().splitlines() if told.exists() else []
    failed = next((line.partition(" ")[2] for line in lines if line.startswith("failed")), None)
    if failed is None and (how != "right" or codes[0][0] not in (0, 5)):
        failed = how if how != "right" else f"status {codes[0][0]} before the tests"
    return failed, len(lines)


def read_equivalents(folder: Path) -> dict[str, str]:
    """Return the reasons why no test can kill some mutants, by their names."""
    place = folder / "equivalents.json"
    return json.loads(place.read_text()) if place.exists() else {}


def summarise(given: argparse.Namespace, mutants: list[SourceMutant], places: dict[str, int]) -> dict[str, Any]:
    """Return the rates of each room and of all, and the rows of those that no test kills."""
    equal, rows = read_equivalents(given.folder), []
    for mutant in mutants:
        place = given.folder / "rows" / f"{mutant.name}.json"
        row = json.loads(place.read_text()) if place.exists() else {}
        outcome = "killed" if row.get("killed") else "survived" if row else "not tried"
        outcome = "equivalent" if mutant.name in equal and outcome != "killed" else outcome
        where = {
            k: v
            for k, v in asdict(mutant).items()
            if k in ("room", "number", "file", "line", "kind", "before", "after")
        }
        rows.append({**where, "outcome": outcome, **row, "reason": equal.get(mutant.name, "")})
    measured: dict[str, Any] = {"places": places, "machines": [row.pop("machine") for row in rows if "machine" in row]}
    for room in (*ROOMS, "all"):
        count = Counter(row["outcome"] for row in rows if room in ("all", row["room"]))
        counted = count["killed"] + count["survived"]
        measured[room] = {**count, "rate": round(count["killed"] / counted, 4) if counted else None}
    return {**measured, "not_killed": [row for row in rows if row["outcome"] in ("survived", "equivalent")]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=3506)
    parser.add_argument("--each", type=int, default=60)
    parser.add_argument("--rooms", nargs="+", default=ROOMS, help="whose mutants are tried")
    parser.add_argument("--limit", type=float, default=500.0)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="forks side by side")
    parser.add_argument("--tests", nargs="+", default=list_tests())
    parser.add_argument("--together", type=float, default=45.0, help="seconds of the tests of a mutant")
    parser.add_argument("--text", action="store_true", help="try the rest in a copy of the repository")
    parser.add_argument("--only", nargs="+", default=[], help="the names of mutants for --text")
    parser.add_argument(
        "--also", nargs="+", default=[], help="the tests that --text runs, in place of those that reach it"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.chdir(ROOT)
    (given.folder / "rows").mkdir(parents=True, exist_ok=True)
    mutants, places = draw_mutants(given.seed, given.each)
    mutants = keep_sample(mutants, given.folder / "sample.json")
    if given.text:
        import hypothesis  # noqa: F401
        import numpy  # noqa: F401
        import torch  # noqa: F401

        try_texts(given, mutants, time.monotonic() + given.limit)
    elif not given.json:
        options = ["-q", "-q", "--no-header", "-p", "no:cacheprovider", "-m", MARKS]
        pytest.main([*options, *given.tests], plugins=[Workshop(given, mutants)])
    measured = summarise(given, mutants, places)
    print(json.dumps({name: measured[name] for name in ("places", *ROOMS, "all")}))
    if given.json:
        sources = [f"{SOURCE}/{room}/*.py" for room in ROOMS]
        write(given.json, record(sources, PACKAGES, seed=given.seed, each=given.each, **measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
