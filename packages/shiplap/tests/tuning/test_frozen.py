"""A frozen table: nothing is measured, what is missing says so or raises, what is damaged is not believed."""

from __future__ import annotations

import json
import os
import warnings

import pytest
import torch

import shiplap as sl
from shiplap.dispatch import compile_cache_key
from shiplap.dispatch import tuned_choices as choices
from shiplap.errors import ShiplapError, ShiplapNotice
from shiplap.tuning import ChoiceStore, frozen, frozen_table, measure, recipe_of, select, thaw
from shiplap.tuning.key import Key
from shiplap_testing.forked import WITH_VERBS, python
from tests.tuning import ops


def matrices(m=16, k=512, dtype=torch.float32):
    return torch.randn(m, k).to(dtype), torch.randn(k, 16).to(dtype)


def picked(args):
    kernel = ops.mm.pick_kernel(ops.mm.bind(args))
    return f"{kernel.name}({kernel.config})" if kernel else "reference"


@pytest.fixture
def tuned(tmp_path):
    """A table with one choice, right(WAIT=300) for the bucket of ``matrices()``; nothing in force."""
    select(ops.mm, recipe_of(ops.mm, matrices()))
    (written,) = sl.freeze(tmp_path / "tuned.json")
    assert (written.label, written.origin) == ("right(WAIT=300)", "frozen")
    thaw()
    return tmp_path / "tuned.json"


def rewrite(path, **changes):
    """The table with other key fields, sealed again."""
    entries = [(Key.of({**key.as_dict(), **changes}), value) for key, value in frozen_table.read_frozen_table(path)]
    frozen_table.dump_table(path, entries)


def test_a_frozen_process_measures_nothing(tuned):
    before = measure.benchmarks
    frozen(tuned)
    assert picked(matrices()) == "right(WAIT=300)"
    choices = sl.tune(ops.mm, [matrices(), matrices(m=1000)], budget=600)
    assert [c.origin for c in choices] == ["frozen", "default"]
    choices = choices.choices
    assert choices[0].label == "right(WAIT=300)"
    assert choices[1].label == "cut(PARTS=10)"
    assert "declared default" in choices[1].reason
    assert measure.benchmarks == before
    assert len(list(ChoiceStore().entries())) == 1, "nothing was stored either"


def test_what_is_missing_runs_its_default_and_says_so_once(tuned):
    frozen(tuned)
    with pytest.warns(ShiplapNotice, match=r"tune_test::mm m<=64.*is not in .*tuned.json: its declared default runs"):
        assert picked(matrices(m=33)) == "cut(PARTS=10)"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert picked(matrices(m=100)) == "cut(PARTS=10)"


def test_what_is_missing_raises_in_strict_mode(tuned, monkeypatch):
    monkeypatch.setenv("SHIPLAP_STRICT", "1")
    frozen(tuned)
    assert picked(matrices()) == "right(WAIT=300)"
    with pytest.raises(ShiplapError) as caught:
        picked(matrices(m=33))
    assert caught.value.id == "SL607"
    assert "m<=64, k<=512, n<=16, Float=float32 on cpu" in caught.value.where
    with pytest.raises(ShiplapError, match="SL607"):
        select(ops.mm, recipe_of(ops.mm, matrices(m=33)))


def test_an_op_with_nothing_to_choose_needs_no_entry(tuned, monkeypatch, ns):
    monkeypatch.setenv("SHIPLAP_STRICT", "1")
    frozen(tuned)

    @ops.sl.op(f"{ns}::one")
    def one(x: ops.Float[ops.Tensor, "n"]) -> ops.Float[ops.Tensor, "n"]:
        return x + 1

    one.kernel("cpu", lambda x, *, out: torch.add(x, 1, out=out), name="only")
    assert torch.equal(one(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (lambda text: text[: len(text) // 2], "SL609"),
        (lambda text: text.replace('"WAIT": 300', '"WAIT": 3000'), "its checksum does not fit"),
        (lambda text: json.dumps({"format": "other"}), "not of format shiplap-tuned/1"),
        (lambda text: "", "SL609"),
        (lambda text: "[" * 100_000, "SL609"),
    ],
)
def test_a_damaged_table_is_refused_at_every_call(tuned, damage, messages):
    tuned.write_text(damage(tuned.read_text()))
    for _ in range(2):
        with pytest.raises(ShiplapError, match="SL609") as caught:
            frozen(tuned)
        assert messages in str(caught.value)
    assert not choices.frozen


def test_a_missing_table_is_an_error(tmp_path):
    with pytest.raises(ShiplapError) as caught:
        frozen(tmp_path / "none.json")
    assert (caught.value.id, caught.value.got) == ("SL602", "No such file or directory")


def test_entries_of_another_machine_are_left_out(tuned):
    rewrite(tuned, device_name="another processor")
    with pytest.warns(ShiplapNotice, match="of another machine are left out \\(device_name: another processor → "):
        assert frozen(tuned) == []
    with pytest.warns(ShiplapNotice, match="declared default"):
        assert picked(matrices()) == "cut(PARTS=10)"


def test_entries_of_other_versions_are_used_and_said(tuned, monkeypatch):
    rewrite(tuned, torch="1.0", driver="580")
    with pytest.warns(ShiplapNotice, match="of other versions are used \\(driver: 580 → -, torch: 1.0 → "):
        frozen(tuned)
    assert picked(matrices()) == "right(WAIT=300)"
    monkeypatch.setenv("SHIPLAP_STRICT", "1")
    with pytest.raises(ShiplapError, match="the versions it was made on"):
        frozen(tuned)


def test_entries_of_another_source_are_not_served(tuned):
    rewrite(tuned, source="0123456789abcdef")
    frozen(tuned)
    with pytest.warns(ShiplapNotice, match="made for another version of the op or its kernels"):
        assert picked(matrices()) == "cut(PARTS=10)"


def test_a_table_takes_what_holds_here_only(tmp_path, tuned):
    store = ChoiceStore()
    ((key, value),) = frozen_table.read_frozen_table(tuned)
    for changes in ({"torch": "1.0"}, {"device_name": "other"}, {"source": "0" * 16}, {"device": "cuda"}):
        store.put(Key.of({**key.as_dict(), **changes}), value)
    store.put(Key.of({**key.as_dict(), "op": "elsewhere::op"}), value)
    assert [c.op for c in sl.freeze(tmp_path / "again.json")] == ["elsewhere::op", "tune_test::mm"]
    assert [c.op for c in sl.freeze(tmp_path / "mine.json", [ops.mm])] == ["tune_test::mm"]


def test_choices_that_no_store_took_are_frozen_too(tmp_path, monkeypatch):
    monkeypatch.setattr(ChoiceStore, "put", lambda *a: False)
    select(ops.mm, recipe_of(ops.mm, matrices()))
    assert [c.label for c in sl.freeze(tmp_path / "tuned.json")] == ["right(WAIT=300)"]


def test_a_table_changes_the_digest_of_compiled_graphs(tuned):
    before = compile_cache_key.op_cache_key(ops.mm)
    frozen(tuned)
    assert compile_cache_key.op_cache_key(ops.mm) != before
    thaw()
    assert compile_cache_key.op_cache_key(ops.mm) == before


def test_freezing_into_nowhere_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShiplapError, match="SL602: the file cannot be written"):
        sl.freeze(tmp_path / "file" / "tuned.json")


def program(code, **environment):
    return python("-c", code, env={**os.environ, **environment}, imported=WITH_VERBS)


def test_the_variable_is_read_at_the_first_call_and_compiled_code_obeys(tuned, tmp_path):
    """A second process tunes nothing, and its compiled graph runs the frozen choice."""
    code = """
import torch
torch.set_num_threads(1)
import shiplap as sl
from shiplap.dispatch import tuned_choices as choices, compile_cache_key as digest
from shiplap.dispatch.python_kernel import PythonKernel
from shiplap.tuning import measure
from shiplap_testing.forked import python
from tests.tuning import ops
before = digest.op_cache_key(ops.mm)
assert not choices.frozen, "read at import"
a, b = torch.randn(16, 512), torch.randn(512, 16)
seen = []
call = PythonKernel._call
PythonKernel._call = lambda self, *x: (seen.append((self.name, self.values.get("WAIT"))), call(self, *x))[1]
eager = ops.mm(a, b)
compiled = torch.compile(lambda a, b: ops.mm(a, b) + 0, fullgraph=True, backend="aot_eager")(a, b)
torch.testing.assert_close(eager, compiled)
torch.testing.assert_close(eager, a @ b, rtol=1e-3, atol=1e-3)
print(set(seen), measure.benchmarks, digest.op_cache_key(ops.mm) != before)
"""
    done = program(code, SHIPLAP_TUNED=str(tuned), SHIPLAP_CACHE_DIR=str(tmp_path / "elsewhere"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{('right', 300)} 0 True"


def test_a_table_that_cannot_be_read_is_an_error_at_every_call(tmp_path):
    code = """
import torch, shiplap as sl
from shiplap_testing.forked import python
from tests.tuning import ops
for _ in range(2):
    try:
        ops.mm(torch.ones(2, 2), torch.ones(2, 2))
        print("ran")
    except sl.ShiplapError as e:
        print(e.id)
"""
    done = program(code, SHIPLAP_TUNED=str(tmp_path / "none.json"))
    assert done.stdout.split() == ["SL602", "SL602"], done.stderr
