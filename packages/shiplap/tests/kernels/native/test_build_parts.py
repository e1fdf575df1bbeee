"""The parts of a native build: what is generated anew, what is waited for, and what is named."""

import fcntl
import io
import os
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl
from shiplap.errors import ShiplapError
from shiplap.kernels.native import attach, binding, build, build_plan, cache, deploy, gradient_recorder
from shiplap.kernels.native.build_digest import takes_torch
from shiplap.kernels.native.choice_table import _native_choice_key
from shiplap.kernels.native.gradient_recorder import _is_detached
from shiplap.kernels.native.packed_kernel import PackedKernel

X = Float32[Tensor, "n"]


class Form:
    """What the source of an op is kept for."""


def test_the_source_of_an_op_is_kept_until_it_changes(monkeypatch):
    form, facts = Form(), [("one",), ("one", "two")[:1], ("two",)]
    monkeypatch.setattr(build_plan, "_source_facts", lambda op, device, form: facts[0])
    kept = build_plan._native_source(None, "cpu", form)
    assert kept is facts.pop(0)
    assert build_plan._native_source(None, "cpu", form) is kept
    facts.pop(0)
    assert build_plan._native_source(None, "cpu", form) is facts[0]


def test_a_folder_that_cannot_be_removed_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()

    def refuse(*given, **named):
        raise PermissionError(1, "refused")

    monkeypatch.setattr(os, "rmdir", refuse)
    build._remove_path(tmp_path / "broken")
    assert (tmp_path / "broken").is_dir()


def test_a_lock_is_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    held = path.open("ab", buffering=0)
    fcntl.flock(held, fcntl.LOCK_EX)
    monkeypatch.setattr(build.time, "sleep", lambda seconds: held.close())
    with path.open("r+b", buffering=0) as lock:
        build._acquire_build_lock(lock, path, 60.0)
    assert held.closed


def test_a_choice_of_other_numbers_has_no_key(ns):
    @sl.op(f"{ns}::f")
    def f(x: X, by: int = 1) -> X:
        return x * by

    key = ("cpu", 5, 3, "x=float32", "c")
    assert (_native_choice_key(f, key) or [])[:2] == [5, 3]
    assert _native_choice_key(f, ("cpu", 5, 1 << 63, "x=float32", "c")) is None
    assert _native_choice_key(f, ("cpu", 5, -(1 << 63) - 1, "x=float32", "c")) is None
    assert _native_choice_key(f, ("cpu", 5, 0.5, "x=float32", "c")) is None


def test_an_argument_is_detached_if_all_results_are():
    def spec(*detached):
        return SimpleNamespace(results=("a", "b"), detached=detached)

    assert _is_detached(spec("x"), "x")
    assert _is_detached(spec("a", "b"), "x")
    assert not _is_detached(spec("a"), "x")


def test_names_of_deployed_libraries(tmp_path):
    def entry(name, generated=False):
        form = SimpleNamespace(generated=generated)
        return SimpleNamespace(form=form, kernels=Path(name), op=SimpleNamespace(spec=SimpleNamespace(name="demo::f")))

    assert list(deploy._deployed_names([entry("/a/one.so", True), entry("/a/two.so")], tmp_path)) == ["two.so"]
    with pytest.raises(ShiplapError, match="SL308"):
        deploy._deployed_names([entry("/a/one.so"), entry("/b/one.so")], tmp_path)


def test_why_an_op_whose_kernels_python_picks_has_no_binding(monkeypatch):
    spec, form = SimpleNamespace(name="demo::f"), SimpleNamespace(calls=binding.HOT_CALLS, place=None)
    monkeypatch.setattr(binding, "form_is_native", lambda op, form: False)
    monkeypatch.setattr(binding.registry, "find_declared_op", lambda name: object())
    assert binding._advance_binding(spec, form) == "Python picks the kernels of demo::f"
    form.calls -= 1
    assert binding._advance_binding(spec, form) == ""
    form.calls += 1
    monkeypatch.setattr(binding.registry, "find_declared_op", lambda name: None)
    assert binding._advance_binding(spec, form) == ""
    monkeypatch.setenv("SHIPLAP_NATIVE", "0")
    assert binding._advance_binding(spec, form) == binding.BINDING_OFF


def test_the_call_from_which_a_binding_is_asked_for(monkeypatch, tmp_path):
    spec, form = SimpleNamespace(name="demo::f"), SimpleNamespace(calls=binding.HOT_CALLS - 1, place=None)
    plan, started = SimpleNamespace(place=tmp_path / "root" / "digest", source={}), []
    monkeypatch.setattr(binding.registry, "find_declared_op", lambda name: object())
    for name, value in {"form_is_native": True, "_attach_installed": False, "make_plan": plan}.items():
        monkeypatch.setattr(binding, name, lambda *given, value=value: value)
    monkeypatch.setattr(binding, "is_library_present", lambda *given: False)
    monkeypatch.setattr(binding, "compile_command", lambda op: ("c++",))
    monkeypatch.setattr(binding, "build_detached", lambda *given: started.append(given))
    monkeypatch.setattr(binding, "_running_builds", {})
    monkeypatch.delenv("SHIPLAP_BACKGROUND_BUILD", raising=False)
    assert binding._advance_binding(spec, form) == ""
    assert form.place == plan.place
    form.calls += 1
    assert binding._advance_binding(spec, form) == binding.UNBUILT
    monkeypatch.setenv("SHIPLAP_BACKGROUND_BUILD", "1")
    assert binding._advance_binding(spec, form) == ""
    assert started == [(tmp_path / "root", "digest", {}, ("c++",))]
    assert binding._advance_binding(spec, form) == ""  # it runs
    assert len(started) == 1


def test_a_library_has_a_seal_up_to_a_length(monkeypatch):
    monkeypatch.setattr(build, "MOST_LIBRARY_BYTES", 5)
    seals = {build.seal_text(*given) for given in (("a", io.BytesIO(b"12345")), ("b", io.BytesIO(b"12345")))}
    assert len(seals) == 2  # of the name, too
    with pytest.raises(OSError, match="longer than 5 bytes"):
        build.seal_text("a", io.BytesIO(b"123456"))


def test_what_can_be_removed_of_a_folder_is_removed(tmp_path, monkeypatch):
    (tmp_path / "kept").mkdir()
    for name in "abc":
        (tmp_path / "kept" / name).touch()
    unlink, refused = os.unlink, []

    def refuse_once(*given, **named):
        if not refused:
            raise refused.append(given[0]) or PermissionError(1, "refused")
        unlink(*given, **named)

    monkeypatch.setattr(os, "unlink", refuse_once)
    assert not cache.remove_artefact(tmp_path / "kept")
    assert len(os.listdir(tmp_path / "kept")) == 1


@pytest.mark.parametrize(("counting", "why", "stays"), [(False, "no", True), (True, "no", False), (False, "", False)])
def test_calls_that_stay_in_python(counting, why, stays):
    kernel = SimpleNamespace(native=SimpleNamespace(counting=counting, why=why))
    assert PackedKernel.stays_in_python.fget(kernel) is stays


def test_what_is_gone_counts_as_removed(tmp_path):
    (tmp_path / "file").touch()
    assert [cache.remove_artefact(tmp_path / name) for name in ("file", "never there")] == [True, True]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("version", "takes"), [("2.10.1", False), ("2.11.0+cu130", True), ("2.99.0", True), ("3.0.0a0", False)]
)
def test_the_releases_of_torch_that_a_library_serves(version, takes):
    assert takes_torch(version) is takes


def test_a_deployed_library_has_all_cubins_and_the_choices_that_have_one(monkeypatch):
    monkeypatch.setattr(deploy.tuned_choices, "ensure_choices_loaded", lambda: None)
    monkeypatch.setattr(deploy, "packed_rows", lambda op, device: ((7, 8, 1), (7, 8, 2)))
    monkeypatch.setattr(deploy, "config_values", lambda space: [0])
    form = SimpleNamespace(generated=True, holds=lambda config: config == (2,), source=lambda packed: ("made", packed))
    native = make_dataclass("Native", ["space", "source", "rows"])("BLOCK", "", ())
    made = deploy._packed_native(SimpleNamespace(op=None, device="cuda", form=form, native=native))
    assert (made.source, made.rows) == (("made", True), ((7, 8, 2),))
    form.generated = False
    assert deploy._packed_native(SimpleNamespace(op=None, device="cuda", form=form, native=native)).rows[0][2] == 1


def test_only_gradients_of_native_ops_are_recorded_in_native_code(ns, monkeypatch):
    @sl.op(f"{ns}::f")
    def f(x: X) -> X:
        return x.clone()

    @sl.op(f"{ns}::g")
    def g(x: X) -> X:
        return x.clone()

    def is_recorded(*ops):
        recorded = []
        monkeypatch.setattr(attach, "record_in_cpp", recorded.append)
        gradient = SimpleNamespace(ops=[SimpleNamespace(op=op) for op in ops])
        of = SimpleNamespace(gradient=gradient)
        attach.AttachedBinding(of, None, None, {}, None).start_recording()
        return recorded == [of]

    assert not is_recorded(f)
    monkeypatch.setattr(f, "native", object())
    assert is_recorded(f)
    assert not is_recorded(f, g)
    assert not is_recorded(f, len)


def test_the_numbers_by_which_native_code_reads_a_gradient(monkeypatch):
    x, k, y = (SimpleNamespace(name=name, tensor=tensor) for name, tensor in (("x", "t"), ("k", None), ("y", "t")))
    spec = SimpleNamespace(args=[x, k, y], tensors=[x, y], scalars=[k], results=("a", "b"), detached=("b", "x"))
    takes = [("grad", 0), ("other grad", 1), ("k", -1), ("b", -1), ("x", -1)]
    part = SimpleNamespace(
        op=SimpleNamespace(spec=SimpleNamespace(args=takes)), takes=lambda of: takes, gives=("y", "x")
    )
    monkeypatch.setattr(gradient_recorder, "_below_autograd_name", lambda part: "demo::g")
    words, names = gradient_recorder.formula_words(spec, SimpleNamespace(saves=("x", "k", "x", "b"), ops=[part, part]))
    assert names == ["demo::g"] * 2
    of_op = [5, *(0, 0), *(0, 1), *(2, 0), *(1, 1), *(1, 0), 2, 1, 0]
    assert words == [3, *(2, 0, 1), 2, *(1, 0), 2, *(0, 0), *(1, 1), 2, *of_op, *of_op]


@pytest.mark.parametrize(
    ("changed", "recorded"),
    [
        ({}, True),
        ({"gradient": None}, False),
        ({"ops": []}, False),
        ({"can_skip_dispatcher": False}, False),
        ({"there": False}, False),
        ({"mutated": ("x",)}, False),
        ({"traced": ("x",)}, False),
        ({"returns": ("x",)}, False),
        ({"outputs": ()}, False),
        ({"cls": int}, False),
        ({"scalar": "dtype"}, False),
        ({"scalar": "list[str]"}, True),
    ],
)
def test_the_ops_whose_gradient_is_recorded_in_native_code(monkeypatch, changed, recorded):
    of = {"mutated": (), "traced": (), "returns": (), "outputs": ("out",), "cls": None, "scalar": "int", "ops": [1]}
    of |= {"can_skip_dispatcher": True, "there": True, "gradient": "declared"} | changed
    monkeypatch.setattr(gradient_recorder, "available", lambda what: of["there"] and what == "gradients in C++")
    args = [SimpleNamespace(tensor="t"), SimpleNamespace(tensor=None, cls=of["cls"], scalar=of["scalar"])]
    spec = SimpleNamespace(args=args, **{name: of[name] for name in ("mutated", "traced", "returns", "outputs")})
    gradient = of["gradient"] and SimpleNamespace(ops=of["ops"])
    op = SimpleNamespace(spec=spec, gradient=gradient, can_skip_dispatcher=of["can_skip_dispatcher"])
    assert gradient_recorder.can_record(op) is recorded


def test_the_recorded_call_from_which_a_notice_says_how_to_build(monkeypatch):
    told, calls = [], []
    monkeypatch.setattr(gradient_recorder, "notice", lambda key, text: told.append((key, len(calls))))
    monkeypatch.setattr(gradient_recorder.registry, "command_target", lambda name: "demo")
    plain = lambda *given: calls.append(given) or len(calls)  # noqa: E731
    op = SimpleNamespace(spec=SimpleNamespace(name="demo::f"), _record_plain_call=plain)
    gradient_recorder._announce_hot_recording(op)
    counted = op._record_plain_call
    assert counted is not plain
    gradient_recorder._announce_hot_recording(op)
    assert op._record_plain_call is counted  # not twice
    assert [op._record_plain_call(i) for i in range(gradient_recorder.HOT_RECORDINGS - 1)][-1] == len(calls) == 31
    assert (told, op._record_plain_call) == ([], counted)
    assert op._record_plain_call("the last") == 32
    assert (told, op._record_plain_call) == ([("recorder demo::f", 31)], plain)
    gradient_recorder._announce_hot_recording(op := SimpleNamespace(_record_plain_call=None))
    assert op._record_plain_call is None
