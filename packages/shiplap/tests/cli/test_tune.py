"""``shiplap tune``, ``freeze`` and ``cache``: from a recorded profile to a table, and what the store says."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from shiplap.dispatch import tuned_choices
from shiplap.tuning import ChoiceStore, frozen_table, record
from shiplap.tuning.key import Key
from tests.tuning import ops

SIZES = ("--sizes", "m=16,k=512,n=16", "--in-process")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(frozen_table, "_made", {})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield ChoiceStore()
    torch.set_num_threads(threads)
    frozen_table.thaw()


def test_a_call_given_by_sizes(run: Any) -> None:
    """Exit status 1: a candidate is wrong."""
    result = run("tune", "tests.tuning.ops:mm", *SIZES)
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "tune_test::mm: failed (1 of 1 calls have a choice, 1 of them unverified)"
    call = "  tune_test::mm  m<=16, k<=512, n<=16  Float=float32  cpu  fail  "
    assert lines[1].startswith(call + "right(WAIT=300): fastest of 3 unverified: ")
    assert lines[1].endswith("2 dropped, see findings (measured)")
    assert [line[:22] for line in lines[2:]] == [
        "    fail  cut(PARTS=10",
        "    fail  cut(PARTS=2)",
        "    unverified  tuned ",
    ]
    repeated = run("tune", "tests.tuning.ops:mm", *SIZES)
    assert repeated.stdout.splitlines()[1].endswith("(stored)")


def test_choices_as_json(run: Any) -> None:
    result = run("tune", "tests.tuning.ops:mm", *SIZES, "--dtype", "bfloat16", "--json")
    (choice,) = json.loads(result.stdout)["choices"]
    assert (choice["op"], choice["kernel"], choice["config"]) == ("tune_test::mm", "right", {"WAIT": 300})
    assert (choice["dtypes"], choice["bucket"], choice["origin"]) == (
        "Float=bfloat16",
        "m<=16, k<=512, n<=16",
        "measured",
    )
    assert len(choice["findings"]) == 2
    assert choice["time"] > 0


def test_from_a_profile_to_a_table(process: Any, tmp_path: Path) -> None:
    """In processes, as a user would: record, tune (isolated), freeze."""
    with record(tmp_path / "calls.jsonl"):
        for n in (3, 60, 3):
            ops.mm(torch.randn(16, n), torch.randn(n, 16))
    done = process("tune", "--profile", tmp_path / "calls.jsonl", "--budget", "2m", "--json")
    assert done.returncode == 1, done.stderr
    parsed = json.loads(done.stdout)["choices"]
    assert {c["bucket"] for c in parsed} == {"m<=16, k<=4, n<=16", "m<=16, k<=64, n<=16"}
    done = process("freeze", "tests.tuning.ops", "-o", tmp_path / "tuned.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"wrote {tmp_path}/tuned.json: 2 choices\n"
    assert len(frozen_table.read_frozen_table(tmp_path / "tuned.json")) == 2


def test_an_empty_table_is_exit_status_1(run: Any, tmp_path: Path) -> None:
    result = run("freeze", "-o", tmp_path / "tuned.json")
    assert result.exit_code == 1
    assert frozen_table.read_frozen_table(tmp_path / "tuned.json") == []


@pytest.mark.parametrize(
    ("arguments", "id", "got"),
    [
        ((), "SL613", "no calls"),
        (("tests.tuning.ops:mm", *SIZES, "--profile", "calls.jsonl"), "SL613", "both --profile and --sizes"),
        (("tests.tuning.ops", *SIZES), "SL613", "4 ops"),
        (("tests.tuning.ops:mm", "--sizes", "m=16,"), "SL502", "no k, no n"),
        (("tests.tuning.ops:mm", "--sizes", "m"), "SL613", "m"),
        (("tests.tuning.ops:mm", "--sizes", "m=f()"), "SL613", "m=f()"),
        (("tests.tuning.ops:pick", "--sizes", "n=8,c=2,m=4"), "SL606", "integer tensors rows without a builder"),
        (("tests.tuning.ops:mm", *SIZES, "--budget", "soon"), "SL612", "'soon'"),
        (("tests.tuning.ops:mm", *SIZES, "--device", "cuda:99"), "SL605", ""),
        (("--profile", "nowhere.jsonl"), "SL602", "No such file or directory"),
    ],
)
def test_what_cannot_be_tuned(run: Any, arguments: tuple[str, ...], id: str, got: str) -> None:
    result = run("tune", *arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0].startswith(f"{id}: ")
    assert f"got      {got}" in result.stderr
    assert (
        id != "SL613"
        or "fix      pass what 'expected' shows. Run the command with --help to list its arguments" in result.stderr
    )
    assert result.stdout == ""


def key(run: Any, store: ChoiceStore) -> Key:
    run("tune", "tests.tuning.ops:mm", *SIZES)
    (entry,) = store.entries()
    assert entry.key is not None
    return entry.key


def test_why_names_the_field_that_changed(run: Any, store: ChoiceStore) -> None:
    here = key(run, store)
    assert run("cache", "why", "tune_test::mm").exit_code == 0
    value = store.get(here)
    assert value is not None
    store.remove(store.path(here))
    store.put(Key.of({**here.as_dict(), "torch": "1.0", "driver": "580.1"}), value)
    result = run("cache", "why", "tune_test::mm")
    assert result.exit_code == 1
    assert f"(driver: 580.1 → -; torch: 1.0 → {torch.__version__})" in result.stdout
    assert "no entry serves here: driver, torch changed" in result.stdout
    parsed = json.loads(run("cache", "why", "tune_test::mm", "--json").stdout)
    assert (parsed["serves"], parsed["entries"][0]["differs"][0]) == (False, "driver: 580.1 → -")


def test_why_sees_that_a_kernel_has_changed(run: Any, store: ChoiceStore) -> None:
    here = key(run, store)
    value = store.get(here)
    assert value is not None
    store.remove(store.path(here))
    store.put(Key.of({**here.as_dict(), "source": "0" * 16}), value)
    result = run("cache", "why", "tests.tuning.ops:mm")
    assert result.exit_code == 1
    assert f"source: {'0' * 16} → {ops.mm.identity} (the op or one of its kernels has changed)" in result.stdout


def test_why_without_an_entry(run: Any) -> None:
    result = run("cache", "why", "tune_test::mm")
    assert result.exit_code == 1
    assert result.stdout.startswith("nothing is stored for tune_test::mm in ")


def test_ls_lists_damaged_entries(run: Any, store: ChoiceStore) -> None:
    here = key(run, store)
    assert run("cache", "ls").exit_code == 0
    path = store.path(here)
    path.write_text(path.read_text()[:100])
    result = run("cache", "ls")
    assert result.exit_code == 1
    assert result.stdout.startswith(f"damaged  {path.name}: damaged: ")
    assert run("cache", "why", "tune_test::mm").stdout.endswith("no entry serves here: tune again\n")
    assert run("cache", "gc").stdout.startswith("removed 1 files from ")
    assert run("cache", "ls").stdout == f"no entries in {store.root}\n"


def test_entries_move_between_stores(run: Any, store: ChoiceStore, tmp_path: Path) -> None:
    here = key(run, store)
    assert run("cache", "export", tmp_path / "all.json").stdout == f"wrote {tmp_path}/all.json: 1 entries\n"
    assert run("cache", "rm", "tune_test::mm").stdout.startswith("removed 1 files")
    assert store.get(here) is None
    assert run("cache", "import", tmp_path / "all.json").exit_code == 0
    assert store.get(here) is not None
    assert run("cache", "gc", "--json").exit_code == 0
    assert store.get(here) is not None, "what serves here stays"
    (tmp_path / "all.json").write_text("{}")
    assert "SL609" in run("cache", "import", tmp_path / "all.json").stderr


def test_gc_removes_what_serves_no_more(run: Any, store: ChoiceStore) -> None:
    here = key(run, store)
    value = store.get(here)
    assert value is not None
    store.put(Key.of({**here.as_dict(), "torch": "1.0"}), value)
    assert json.loads(run("cache", "gc", "--json").stdout)["removed"] == 1
    assert [e.key for e in store.entries()] == [here]


def test_gc_removes_the_folders_of_killed_runs(
    run: Any, store: ChoiceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "shiplap-run-judge-12345678").mkdir()
    assert f"removed 1 folders of runs that were killed from {tmp_path}" in run("cache", "gc").stdout
    assert not (tmp_path / "shiplap-run-judge-12345678").exists()
    assert "killed" not in run("cache", "gc").stdout


def test_actions_need_their_argument(run: Any) -> None:
    for action in ("why", "export", "import", "rm"):
        result = run("cache", action)
        assert result.exit_code == 2
        assert "SL613" in result.stderr
    assert run("cache", "clean").exit_code == 2


def test_nothing_stays_in_force(run: Any) -> None:
    assert tuned_choices.choice_entries() == []
