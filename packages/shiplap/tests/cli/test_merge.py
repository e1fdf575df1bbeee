"""``shiplap tune --merge``: tables of several machines as one, nothing lost, and what disagrees is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shiplap.dispatch import tuned_choices
from shiplap.tuning import frozen, frozen_table, thaw
from shiplap.tuning.inputs import draw_inputs, recipe_of
from shiplap.tuning.key import Key
from tests.tuning import ops

VALUE = {
    "kernel": "right",
    "config": {"WAIT": 300},
    "time": 2e-3,
    "runner_up": "",
    "runner_up_time": 0.0,
    "default_time": 4e-3,
    "reason": "fastest of 3 verified",
    "findings": [],
    "tried": 3,
    "sizes": "sizes(m=16, k=512, n=16)",
}


@pytest.fixture(autouse=True)
def thawed() -> Any:
    yield
    thaw()


def key(**changes: str) -> Key:
    here = frozen_table.device_environments(["cpu"])["cpu"]
    call = {"op": "tune_test::mm", "device": "cpu", "bucket": "m<=16, k<=512, n<=16", "dtypes": "Float=float32"}
    return Key.of({**call, "layout": layout(), "source": ops.mm.identity, **here, **changes})


def layout() -> str:
    """How keys write down that both matrices are contiguous."""
    args = torch.randn(16, 512), torch.randn(512, 16)
    return draw_inputs(ops.mm, recipe_of(ops.mm, args), "cpu").layout


def write(path: Path, *entries: tuple[Key, dict[str, Any]]) -> Path:
    frozen_table.dump_table(path, entries)
    return path


def slow(seconds: float) -> dict[str, Any]:
    """A choice of another config, measured as ``seconds``; 0.0 is not measured."""
    return {**VALUE, "config": {"WAIT": 3000}, "time": seconds}


def test_entries_of_other_devices_and_versions_are_all_kept(run: Any, tmp_path: Path) -> None:
    first = write(tmp_path / "a.json", (key(), VALUE), (key(device_name="Xeon"), VALUE))
    second = write(tmp_path / "b.json", (key(device_name="Epyc"), slow(1.0)), (key(torch="2.11"), slow(1e-9)))
    repeated = write(tmp_path / "c.json", (key(), VALUE))
    result = run("tune", "--merge", first, second, repeated, "-o", tmp_path / "all.json")
    assert result.exit_code == 0, result.output
    assert result.stderr == f"wrote {tmp_path}/all.json: 4 choices of 3 tables\n"
    assert "Xeon  1 choices\n" in result.stdout
    assert "conflict" not in result.stdout
    merged = dict(frozen_table.read_frozen_table(tmp_path / "all.json"))
    assert len(merged) == 4
    assert all(merged[k] == v for path in (first, second, repeated) for k, v in frozen_table.read_frozen_table(path))
    (taken,) = frozen(tmp_path / "all.json")
    assert taken.label == "right(WAIT=300)", "the entry of this torch serves, and not the one of 2.11"


@pytest.mark.parametrize(("other", "kept"), [(1e-3, "b"), (3e-3, "a"), (2e-3, "a"), (0.0, "a")])
def test_of_two_choices_the_better_measured_is_kept_and_the_other_named(
    run: Any, tmp_path: Path, other: float, kept: str
) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a.json", (key(), VALUE))
    write(tmp_path / "in" / "b.json", (key(), slow(other)))
    parsed = json.loads(run("tune", "--merge", tmp_path / "in", "-o", tmp_path / "all.json", "--json").stdout)
    (conflict,) = parsed["conflicts"]
    labels = {"a": "right(WAIT=300)", "b": "right(WAIT=3000)"}
    (dropped,) = {"a", "b"} - {kept}
    assert (conflict["kept"], conflict["dropped"]) == (labels[kept], labels[dropped])
    assert conflict["kept_in"].endswith(f"{kept}.json")
    ((_, value),) = frozen_table.read_frozen_table(tmp_path / "all.json")
    assert value["config"]["WAIT"] == (300 if kept == "a" else 3000)
    text = run("tune", "--merge", tmp_path / "in", "-o", tmp_path / "all.json").stdout
    assert f"conflict  tune_test::mm  m<=16, k<=512, n<=16  {key()['device_name']}: {labels[kept]} (" in text


def test_a_merged_table_can_be_merged_again(run: Any, tmp_path: Path) -> None:
    write(tmp_path / "a.json", (key(), VALUE))
    write(tmp_path / "b.json", (key(device_name="Epyc"), VALUE))
    assert run("tune", "--merge", tmp_path, "-o", tmp_path / "all.json").exit_code == 0
    first = (tmp_path / "all.json").read_bytes()
    assert run("tune", "--merge", tmp_path, "-o", tmp_path / "all.json").exit_code == 0
    assert (tmp_path / "all.json").read_bytes() == first


def test_two_versions_of_an_op_do_not_hide_each_other(tmp_path: Path) -> None:
    write(tmp_path / "all.json", (key(), VALUE), (key(source="0" * 16), slow(1e-9)))
    frozen(tmp_path / "all.json")
    assert [(k.name, str(k.config)) for k in tuned_choices.resolved_choices(ops.mm).values() if k] == [
        ("right", "WAIT=300")
    ]


@pytest.mark.parametrize(
    ("arguments", "id", "got"),
    [
        (("--merge",), "SL613", "no tables, no -o FILE"),
        (("--merge", "a.json"), "SL613", "no -o FILE"),
        (("-o", "all.json", "a.json"), "SL613", "no --merge"),
        (("--merge", "a.json", "--sizes", "n=1", "-o", "all.json"), "SL613", "--sizes"),
        (("--merge", "nowhere.json", "-o", "all.json"), "SL602", "No such file or directory"),
        (("--merge", "empty", "-o", "all.json"), "SL602", "no .json file"),
        (("--merge", "damaged.json", "-o", "all.json"), "SL609", ""),
    ],
)
def test_what_cannot_be_merged(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], id: str, got: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.json").write_text("{}")
    result = run("tune", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{id}: ")
    assert f"got      {got}" in result.stderr
    assert not (tmp_path / "all.json").exists()
