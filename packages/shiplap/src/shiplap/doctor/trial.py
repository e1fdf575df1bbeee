"""Trials of remedies: each is applied to a scratch copy, the program runs again, and its results are compared."""

from __future__ import annotations

import ast
import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from shiplap.doctor.diagnosis import Break, Recompile
from shiplap.doctor.edits import Case
from shiplap.doctor.edits_of_effects import writes_out_of_order
from shiplap.doctor.laboratory import Laboratory, Run
from shiplap.doctor.printed import different_lines, moved_lines, numbers_by_line, zeros_in_output
from shiplap.doctor.remedies import Remedy, list_remedies
from shiplap.doctor.scratch import Program, apply_edits, diff_texts, parse_program, split_lines
from shiplap.doctor.treatment import RunTime, Treatment, TriedEntry, as_first_seen, key_in_any_function
from shiplap.errors import error
from shiplap.safe_io.work_folders import work_folder

# A run may take longer than the first by this factor and these seconds; then its remedy is refused.
_PATIENCE = (4, 60)
# The share of the operations that a remedy which compiles less has to keep in compiled code.
_SHARE = 0.5
# Where another entry takes the place of one, so many remedies are followed, for so many entries in turn.
_STARTS, _FURTHER = 2, 2

# The record of a remedy, the contents of the files that it changes, and the run with it.
_Found = tuple[TriedEntry, dict[str, str], Run]

STILL_THERE, ANOTHER = "the entry was still there", "it was compiled again for another reason: "
TAKEN, MORE = "another break took its place: ", "there are more entries: "
NEVER_AGAIN = "no version was used a second time"
NO_WITNESS = "no call of this run leaves the value out"
OTHER_LINE = "the program prints another line: "
OTHER_ORDER = "the program prints its lines in another order: "


def count_times(entry: Break | Recompile, run: Run) -> int:
    """Return how often ``entry`` occurred in ``run``. For a recompile, this is the number of recompiles of its function
    for any reason.
    """
    if isinstance(entry, Break):
        return sum(e.times for e in run.entries if e.key == entry.key)
    place = (entry.place.file, entry.place.function)
    return sum(r.times for r in run.diagnosis.recompiles if (r.place.file, r.place.function) == place)


def count_calls(entry: Recompile, run: Run) -> int:
    """Return how often the function of ``entry`` was called in ``run``. Return the number of all calls if it is not
    known, as for a function that a compiled one calls.
    """
    calls = (0, run.counts.get("calls", 0))
    for code, number in run.called.items():
        file, line, function = code.rsplit(":", 2) if code else ("", 0, "")
        same = (file, function) == (Path(entry.place.file).name, entry.place.function)
        # Decorators stand above the line of the definition, and an earlier function may have the same name.
        if same and calls[0] < int(line) <= entry.place.line:
            calls = int(line), number
    return calls[1]


def reason_of_refusal(entry: Break | Recompile, before: Run, after: Run | None, *, fewer: bool = False) -> str:
    """Return the reason why the run ``after`` does not prove that a remedy removes ``entry``, or an empty string if it
    does.

    ``entry`` is a break or recompile. ``before`` is the run without the remedy. If ``after`` is None, that run took too
    long. If ``fewer`` is false, ``entry`` must occur less often in ``after`` than in ``before``. If it is true, it may
    occur as often.
    """
    if after is None:
        return "the program ran too long"
    if after.status != before.status:
        without = "without compilation" if before.uncured else "without it"
        return f"with this edit the program ended with exit status {after.status}, {without} with {before.status}"
    if after.differences:
        return after.differences[0]
    # Keys stay equal when lines move, as an edit makes them do.
    old, new = (Counter(e.key for e in run.entries) for run in (before, after))
    if new[entry.key] >= old[entry.key] and not fewer:
        return STILL_THERE
    fresh = [e for e in after.entries if new[e.key] > old[e.key]]
    # A function that was skipped shows its own breaks only once it is compiled, which is progress. So does a program
    # that failed before it came to them.
    hidden = before.uncured or (isinstance(entry, Break) and entry.skipped)
    if isinstance(entry, Recompile) and not fewer:
        other = [e for e in fresh if isinstance(e, Recompile) and e.place.function == entry.place.function]
        if other:
            return f"{ANOTHER}{other[0].subject}"
    for e in fresh:
        same_line = e.place.code == entry.place.code and e.place.file == entry.place.file
        same_function = e.place.file == entry.place.file and e.place.function == entry.place.function
        if isinstance(e, Break) and (same_line or (same_function and not hidden)):
            return f"{TAKEN}{e.reason}"
    if len(after.entries) > len(before.entries) and not hidden:
        return f"{MORE}{len(after.entries)} instead of {len(before.entries)}"
    # Without any graph there is no break either, and nothing is gained.
    skipped = isinstance(entry, Break) and entry.skipped
    if not skipped and after.diagnosis.graphs < 1 <= before.diagnosis.graphs:
        return "nothing was compiled any more"
    return ""


def try_remedies(command: Sequence[str], stdout: IO[Any] | int | None = None, *, measure: bool = True) -> Treatment:
    """Run ``command``, try the remedies for each break and recompile in a copy of the program, and return the results
    of the trials.

    ``stdout`` receives the output of the first run, which is that of the unchanged program. If ``measure`` is false,
    that run is left out and no times are measured. The runs of trials use the eager backend, which breaks graphs at the
    same lines as every backend. Their random generators are seeded, so that equal parameters are drawn.

    Raise ``SL702`` if nothing is compiled, and ``SL703`` for a command that cannot be run in a copy. Raise ``SL704`` if
    the results of two runs of the unchanged program differ.
    """
    program = parse_program(command)
    with work_folder("doctor") as folder:
        laboratory = Laboratory(program, folder, stdout)
        shown = laboratory.run({}, "time", show=True) if measure else None
        recorded = laboratory.run({}, "record")
        if recorded is None or not recorded.diagnosis.compiled:
            status = recorded.status if recorded else 0
            raise error("SL702", where=" ".join(command), got=f"no compiled function was called (status {status})")
        # A remedy may make the program hang, which must not stop the trials.
        laboratory.limit = recorded.seconds * _PATIENCE[0] + _PATIENCE[1]
        again = laboratory.run({}, "compare")
        # Values that differ between two unchanged runs, such as readings of a clock, prove nothing.
        if again is not None and again.unstable:
            laboratory.ignored = again.unstable
            again = laboratory.run({}, "compare")
        if again is None or again.differences:
            raise error("SL704", where=" ".join(command), got=again.differences[0] if again else "no end")
        laboratory.varying = different_lines(recorded.shown, again.shown)
        if recorded.status:
            again = _with_uncompiled_end(laboratory, again)
        tried, texts, after = _try_entries(laboratory, again)
        times = _measure_times(laboratory, shown, texts) if shown else ()
        return Treatment(
            target=" ".join(command),
            before=shown.diagnosis if shown else again.diagnosis,
            after=after.diagnosis,
            tried=tuple(tried),
            times=times,
            diff=diff_texts(program.root, texts),
            changed={str(program.root / f): t for f, t in texts.items()},
            exit_code=(shown or recorded).status,
            ignored=laboratory.ignored,
        )


def _with_uncompiled_end(laboratory: Laboratory, failed: Run) -> Run:
    """Return the run ``failed`` of the unchanged program with the end that the program has without compilation, if it
    does not fail there. The results of later runs are then compared with those.
    """
    plain = laboratory.run({}, "record", uncompiled=True)
    if plain is None or plain.status:
        laboratory.run({}, "record")
        return failed
    return replace(failed, status=0, printed=plain.printed, output=plain.output, shown=plain.shown, uncured=True)


def _try_entries(laboratory: Laboratory, first: Run) -> tuple[list[TriedEntry], dict[str, str], Run]:
    """Try the remedies of each break and recompile. Return ``(records, changed files, last run)``. The changed files
    map paths to contents.

    The changes of remedies that have helped are kept for the trials after them. Breaks and recompiles that only appear
    with these changes are treated as well. ``first`` is the run of the unchanged program.
    """
    texts: dict[str, str] = {}
    now, done, tried = first, set[tuple[str, ...]](), list[TriedEntry]()
    for _ in range(2):  # what failed beside another entry may help once that one is gone
        progress = False
        while entry := next((e for e in _ordered(now) if e.key not in done), None):
            done.add(entry.key)
            found, texts, now = _try_entry(laboratory, entry, texts, now)
            tried = [*(t for t in tried if t.key != found.key), found]
            progress = progress or found.removed
        retried = {t.key for t in tried if any(r != STILL_THERE for r in t.refused.values()) and not t.removed}
        if not progress or not retried:
            break
        done -= retried
    tried = as_first_seen(tried, first.entries)
    gone = [e for e in first.entries if _is_gone(e, first, now)]
    # What another entry's remedy removed was never tried by itself, or was tried before that remedy was found.
    known = {t.key: t for t in tried}
    for entry in gone:
        if entry.key not in known:
            tried.append(TriedEntry.of(entry, with_others=True))
        elif not known[entry.key].remedy:
            tried = [replace(t, with_others=True) if t.key == entry.key else t for t in tried]
    return tried, texts, now


def _is_gone(entry: Break | Recompile, first: Run, now: Run) -> bool:
    """Return whether ``entry`` of the run ``first`` is missing in the run ``now``, also in a function to which an edit
    has moved its statement, and no other entry of its kind and function has come in its place. Another recompile of its
    function may not occur more often either.
    """
    keys = {e.key for e in first.entries}
    same = key_in_any_function(entry.key)
    if any(e.key not in keys and key_in_any_function(e.key) == same for e in now.entries):
        return False
    place = type(entry), entry.place.file, entry.place.function
    fresh = [e for e in now.entries if e.key not in keys and (type(e), e.place.file, e.place.function) == place]
    # Torch names one of several values that vary together, and may name the other one now.
    left = count_times(entry, first) - entry.times if isinstance(entry, Recompile) else count_times(entry, now)
    return count_times(entry, now) <= left and not fresh and all(e.key != entry.key for e in now.entries)


def _ordered(run: Run) -> list[Break | Recompile]:
    """Return the breaks and recompiles of ``run`` in the order in which they are tried.

    Breaks that torch's limit of recompiles has caused come last.
    """
    limits = [e for e in run.entries if e.cause == "recompiles"]
    return [*(e for e in run.entries if e not in limits), *limits]


def _try_entry(
    laboratory: Laboratory, entry: Break | Recompile, texts: dict[str, str], now: Run, further: int = _FURTHER
) -> _Found:
    """Return ``(record, changed files, run)`` of the first remedy that removes ``entry``, a break or recompile.
    ``texts`` has the contents of the files that earlier remedies have changed, by path, and ``now`` is the run with
    them.

    A remedy after which breaks or recompiles appear that were not there before is taken only if no other removes the
    entry. If another entry takes its place, remedies are tried for that one, too, ``further`` times at most. If none
    removes it, but some make a recompile rarer, return the triple of the remedy that leaves the fewest recompiles. If
    none helps, return a record of the failed trials, with ``texts`` and ``now``.
    """
    refused: dict[str, str] = {}
    fewer: _Found | None = None
    second: _Found | None = None
    replaced = list[tuple[Remedy, dict[str, str], Run]]()
    for remedy, changed in _candidates(laboratory.program, entry, texts, now.sites):
        # Where no kind of call came twice, a version for each would compile in each call.
        if remedy.repeated and isinstance(entry, Recompile) and count_times(entry, now) + 1 >= count_calls(entry, now):
            refused[remedy.id] = NEVER_AGAIN
            continue
        after = laboratory.run(changed, "compare")
        reason = reason_of_refusal(entry, now, after)
        # A remedy may make recompiles rarer without removing them.
        partly = False
        if after is not None and isinstance(entry, Recompile) and reason.startswith((STILL_THERE, ANOTHER)):
            most = count_times(entry, fewer[2] if fewer else now)
            partly = count_times(entry, after) < most and not reason_of_refusal(entry, now, after, fewer=True)
        if after is not None and (not reason or partly or reason.startswith((TAKEN, ANOTHER, MORE))):
            beside = _reason_beside(laboratory, remedy, entry, (texts, changed), now, after)
            if beside:
                reason, partly = beside, False
            elif reason.startswith((TAKEN, ANOTHER, MORE)):
                replaced.append((remedy, changed, after))
        if (not reason or partly) and after is not None:
            found = _record(laboratory, entry, remedy, (texts, changed), (now, after), refused)
            if not partly:
                if not _entries_that_came(now, after):
                    return found, changed, after
                second = second or (found, changed, after)
                continue
            found = replace(found, times=(count_times(entry, now), count_times(entry, after)))
            fewer = found, changed, after
        refused[remedy.id] = reason
    best = second
    for start in replaced[:_STARTS] if further and not best else ():
        best = best or _remove_others(laboratory, entry, start, (texts, now), refused, further)
    best = best or fewer
    if best is None:
        return TriedEntry.of(entry, refused=refused), texts, now
    return replace(best[0], refused=refused), *best[1:]


def _record(
    laboratory: Laboratory,
    entry: Break | Recompile,
    remedy: Remedy,
    texts: tuple[dict[str, str], dict[str, str]],
    runs: tuple[Run, Run],
    refused: dict[str, str],
) -> TriedEntry:
    """Return the record of ``remedy``, which removes ``entry``. ``texts`` has the contents of changed files without and
    with it, and ``runs`` the runs. ``refused`` has the reasons by the ids of remedies that failed.
    """
    (now, after), (old, new) = runs, texts
    return TriedEntry.of(
        entry,
        remedy,
        diff=diff_texts(laboratory.program.root, new, old),
        before=len(now.entries),
        after=len(after.entries),
        outputs=after.counts.get("outputs", 0),
        gradients=after.counts.get("gradients", 0),
        refused=dict(refused),
    )


def _entries_that_came(now: Run, after: Run) -> list[Break | Recompile]:
    """Return the breaks and recompiles of the run ``after`` that are not in the run ``now``."""
    known = {e.key for e in now.entries}
    return [e for e in after.entries if e.key not in known]


def _remove_others(
    laboratory: Laboratory,
    entry: Break | Recompile,
    start: tuple[Remedy, dict[str, str], Run],
    before: tuple[dict[str, str], Run],
    refused: dict[str, str],
    further: int,
) -> _Found | None:
    """Return ``(record, changed files, run)`` of several remedies that remove ``entry`` together, or None if they do
    not.

    ``start`` has the first of them, the files that it changes, and the run with it, in which other entries have taken
    the place of ``entry``. For each of these, ``further`` of them at most, a remedy is searched for. ``before`` has the
    changed files and the run without these remedies, and ``refused`` the reasons why others failed.
    """
    (remedy, changed, after), (texts, now), used = start, before, list[TriedEntry]()
    while others := _entries_that_came(now, after):
        if len(used) == further:
            return None
        tried, changed, after = _try_entry(laboratory, others[0], changed, after, further - 1)
        if not tried.removed:
            return None
        used.append(tried)
    if reason_of_refusal(entry, now, after):
        return None
    found = _record(laboratory, entry, remedy, (texts, changed), (now, after), refused)
    parts = [found, *used]
    joined = replace(
        found,
        remedy=" + ".join(t.remedy for t in parts),
        title="; ".join(t.title for t in parts),
        caveat="; ".join(t.caveat for t in parts if t.caveat),
    )
    return joined, changed, after


def _reason_beside(
    laboratory: Laboratory,
    remedy: Remedy,
    entry: Break | Recompile,
    texts: tuple[dict[str, str], dict[str, str]],
    now: Run,
    after: Run,
) -> str:
    """Return the reason why the run ``after`` with ``remedy`` changes something that ``reason_of_refusal`` does not
    see, such as a printed line, or an empty string if it does not.

    ``texts`` has the contents of changed files without and with the remedy. ``now`` is the run without it.
    """
    (old, changed), root = texts, laboratory.program.root
    rows = _rows_computed_always(root, old, changed) if remedy.picks else ()
    reason = _reason_by_remedy(remedy, now, after, rows, laboratory.varying)
    # The line may vary by itself, as a time does. What a program that fails has not printed varies by no means.
    if reason.startswith((OTHER_LINE, OTHER_ORDER)):
        again = laboratory.run(old, "compare", uncompiled=now.uncured)
        if again is not None and again.status == now.status:
            laboratory.varying |= different_lines(now.shown, again.shown) | moved_lines(now.shown, again.shown)
        reason = _reason_by_remedy(remedy, now, after, rows, laboratory.varying)
    if not reason and writes_out_of_order(changed.values()):
        reason = f"{OTHER_ORDER}those of ops and those that torch moves"
    if not reason and not _is_witnessed(laboratory, remedy, entry, old, now):
        reason = NO_WITNESS
    if not reason and isinstance(entry, Break) and entry.skipped:
        reason = _break_in_edit(root, old, changed, now, after)
    return reason


def _is_witnessed(
    laboratory: Laboratory, remedy: Remedy, entry: Break | Recompile, texts: dict[str, str], now: Run
) -> bool:
    """Return whether a call of the program shows what ``remedy`` changes: with the edit of its witness, which raises in
    such a call, the program ends with another status than in the run ``now``. A remedy without a witness needs none.

    ``texts`` has the contents of the files that earlier remedies have changed, by path.
    """
    if remedy.witness is None:
        return True
    for edits in remedy.witness(make_case(laboratory.program, entry, texts, now.sites)):
        changed = apply_edits(texts, laboratory.program.root, edits)
        after = None if changed is None else laboratory.run(changed, "compare")
        if after is not None and after.status != now.status:
            return True
    return False


# What has an infinite or undefined derivative for some values. A gradient of 0 becomes NaN there.
_STEEP = re.compile(
    r"isnan|isinf|isfinite|\b(r?sqrt|log|log2|log10|log1p|pow|\w*norm|normalize|(arc|a)(cosh?|sinh?|tanh|tan2)|"
    r"exp|expm1|sinh|cosh|logit|erfinv|float_power|reciprocal|(true_)?div|divide)\("
    r"|/ *[^\s\d]|\*\* *[^\s2-9]"
)


def _reason_by_remedy(
    remedy: Remedy, now: Run, after: Run | None, rows: Sequence[str], varying: set[tuple[str, ...]]
) -> str:
    """Return the reason why the run ``after`` does not satisfy the conditions of ``remedy`` itself, or an empty string
    if it does.

    ``now`` is the run without the remedy, and ``rows`` has the lines of code that run with it in each call. If
    ``after`` is None, that run took too long. ``varying`` has the lines of the output that vary by themselves.
    """
    if after is None:
        return ""
    if remedy.repeated and after.diagnosis.graphs > now.diagnosis.graphs:
        return f"{after.diagnosis.graphs} graphs are compiled instead of {now.diagnosis.graphs}"
    kept, all_of_them = after.diagnosis.operations, now.diagnosis.operations
    if remedy.parts and kept < _SHARE * all_of_them:
        return f"{kept} of {all_of_them} operations would be compiled"
    if remedy.prints and after.printed != now.printed:
        return f"the program prints {after.printed} lines instead of {now.printed}"
    # What an edit changes besides the results of the compiled functions, such as a list of the program, shows here.
    other = different_lines(now.shown, after.shown) - varying if not remedy.silent else set()
    if other:
        line = next((line for line in numbers_by_line(after.shown) if line in other), min(other))
        return f"{OTHER_LINE}{'…'.join(line)[:80]}"
    moved = set() if remedy.silent else moved_lines(now.shown, after.shown, varying)
    if moved:
        return f"{OTHER_ORDER}{'…'.join(min(moved))[:80]}"
    zeroed = (*after.zeroed, *zeros_in_output(now.output, after.output)) if remedy.measures else ()
    if zeroed:
        return f"{zeroed[0]} is 0, which the program measured"
    # The values that a condition keeps away may come in a later call alone, so that no gradient of this run shows them.
    if remedy.picks and after.counts.get("gradients") and any(map(_STEEP.search, rows)):
        return "the gradient of the side that is not picked may be NaN"
    return ""


def _rows_computed_always(root: Path, texts: dict[str, str], changed: dict[str, str]) -> list[str]:
    """Return the lines of the changed functions from the first to the last one that an edit has inserted.

    The lines between them may be unchanged and still run in more calls than before, such as the rest of a function
    behind an early return. ``texts`` and ``changed`` have the contents of changed files without and with the edit.
    """
    found = list[str]()
    for file, text in changed.items():
        old = texts[file] if file in texts else (root / file).read_text(encoding="utf-8")
        rows = split_lines(text)
        parts = difflib.SequenceMatcher(None, split_lines(old), rows, autojunk=False).get_opcodes()
        inserted = [n for kind, _, _, start, end in parts if kind != "equal" for n in range(start, end)]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = [n for n in inserted if node.lineno <= n + 1 <= (node.end_lineno or node.lineno)]
                found += rows[inside[0] : inside[-1] + 1] if inside else []
    return [_without_comparisons(row) for row in found]


def _without_comparisons(row: str) -> str:
    """Return the line of code ``row`` with True in place of each comparison, through which no gradient flows. A line
    that is no whole statement is returned as it is.
    """
    try:
        tree = ast.parse(row.strip())
    except SyntaxError:
        return row
    compared = any(isinstance(n, ast.Compare) for n in ast.walk(tree))
    return ast.unparse(_Compared().visit(tree)) if compared else row


class _Compared(ast.NodeTransformer):
    """A converter of code that puts True in place of each comparison."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Return the constant True."""
        return ast.Constant(True)


def _break_in_edit(root: Path, texts: dict[str, str], changed: dict[str, str], now: Run, after: Run) -> str:
    """Return in words which new break of the run ``after`` is in a line that the edit has inserted, or an empty string
    if there is none.

    ``texts`` and ``changed`` have the contents of changed files without and with the edit, and ``now`` is the run
    without it. Behind a function that was skipped, breaks of the program come into view, but those of the edit are new.
    """
    known = {e.key for e in now.entries}
    for file, text in changed.items():
        old = texts[file] if file in texts else (root / file).read_text(encoding="utf-8")
        inserted = {row.strip() for row in split_lines(text)} - {row.strip() for row in split_lines(old)}
        for e in after.entries:
            if isinstance(e, Break) and e.key not in known and e.user.code.strip() in inserted:
                return f"{TAKEN}{e.reason}"
    return ""


def _candidates(
    program: Program, entry: Break | Recompile, texts: dict[str, str], sites: dict[str, tuple[str, int, int]]
) -> Iterator[tuple[Remedy, dict[str, str]]]:
    """Yield ``(remedy, changed files)`` for each remedy of ``entry``, a break or recompile, and each edit that the
    remedy proposes.

    ``texts`` maps paths to the contents of files, and contains the edits of remedies that were accepted before. Each
    proposal is applied to ``texts`` alone, which gives a new mapping. Neither ``texts`` nor a file is changed. Two
    proposals with equal results are yielded once. ``sites`` are those of the run with ``texts``.
    """
    seen: list[dict[str, str]] = [texts]
    case = make_case(program, entry, texts, sites)
    for remedy in list_remedies(entry):
        if remedy.own and case.file is None:
            continue
        for edits in remedy.edit(case):
            changed = apply_edits(texts, program.root, edits)
            # Two remedies may make the same edit, and a run takes long.
            if changed is not None and changed not in seen:
                seen.append(changed)
                yield remedy, changed


def make_case(
    program: Program, entry: Break | Recompile, texts: dict[str, str], sites: dict[str, tuple[str, int, int]]
) -> Case:
    """Return the ``Case`` of ``entry``, a break or recompile, which is passed to editors. Editors are functions that
    propose edits. ``texts`` has the contents of files that earlier remedies have changed, by path, and ``sites`` the
    calls of ``torch.compile`` in the run with them.

    The case has the file, the line, the call at fault or varied value, and torch's message.
    """
    place = entry.at
    if isinstance(entry, Break) and not Path(place.file).is_relative_to(program.root):
        place = entry.user  # a line of a library stays; the call that leads to it can change
    path = Path(place.file)
    chain = entry.chain[:-1] if isinstance(entry, Break) else ()
    callers = [(Path(p.file), p.line) for p in reversed(chain) if Path(p.file).is_relative_to(program.root)]
    frames = entry.frames if isinstance(entry, Break) else (entry.place,)
    return Case(
        root=program.root,
        main=program.main_file(),
        file=str(path.relative_to(program.root)) if path.is_relative_to(program.root) else None,
        line=place.line,
        function=entry.place.function,
        subject=entry.subject,
        text=entry.words,
        texts=texts,
        callers=tuple((str(file.relative_to(program.root)), line) for file, line in callers),
        cause=entry.cause,
        frames=tuple((p.file.removeprefix(f"{program.root}/"), p.line) for p in frames),
        compiled_at=tuple(sites[n] for n in entry.observers if n in sites) if entry.observers else None,
        varies=isinstance(entry, Recompile),
    )


def _measure_times(laboratory: Laboratory, shown: Run, texts: dict[str, str]) -> tuple[RunTime, ...]:
    """Return the times of a call of each compiled function. Calls in which something is compiled are left out.

    The times are those without compilation, compiled (from the run ``shown``), and compiled with the changed files
    ``texts``.
    """
    # The limit comes from a run with the eager backend. These runs may generate code, which takes longer.
    laboratory.limit = None
    eager = laboratory.run({}, "time", uncompiled=True)
    better = laboratory.run(texts, "time") if texts else None
    return tuple(
        RunTime(
            name,
            len(seconds),
            *(_steady(run.times.get(name, ())) if run else None for run in (eager, shown, better)),
        )
        for name, seconds in shown.times.items()
    )


def _steady(seconds: Sequence[float]) -> float | None:
    """Return the seconds of a call that compiled nothing, or None for fewer than three calls.

    It is the least time of the later half of ``seconds``, which has the times of all calls in order.
    """
    return min(seconds[len(seconds) // 2 :]) if len(seconds) >= 3 else None
