"""What code that is judged replaces or leaves changed in its interpreter is seen."""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from collections.abc import Callable

import pytest
import torch
from _distutils_hack import DistutilsMetaFinder
from torch.autograd import profiler

from shiplap.sandbox import interpreter_state
from shiplap.sandbox.interpreter_state import InterpreterWatch
from shiplap.sandbox.patched_functions import FunctionSnapshot
from shiplap.sandbox.trusted_code import is_trusted_file
from shiplap_testing.forked import child


@pytest.fixture(autouse=True)
def unheard(monkeypatch) -> None:
    """Audit hooks stay for as long as a process lives, and slow this one down."""
    monkeypatch.setattr(sys, "addaudithook", lambda hook: None)


def left_by(act: Callable[[], object], undo: Callable[[], object]) -> list[str]:
    seen = InterpreterWatch()
    try:
        act()
        return seen.read_observations()["left"]
    finally:
        undo()


def test_only_watched_events_are_examined(monkeypatch):
    """Each comparison with a snapshot raises a hundred thousand others."""
    hooks, seen = [], []
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    monkeypatch.setattr(InterpreterWatch, "_record_event", lambda self, event, args: seen.append((event, *args[1:])))
    InterpreterWatch()
    for event, name in (("object.__getattr__", "__code__"), ("object.__getattr__", "tb_frame"), ("open", "r")):
        hooks[0](event, (None, name))
    hooks[0]("gc.get_objects", (-1,))
    assert seen == [("object.__getattr__", "tb_frame"), ("gc.get_objects",)]


def test_nothing_is_left_by_nothing():
    assert left_by(lambda: torch.rand(3).sum(), lambda: None) == []


def test_a_seed_is_left():
    before = torch.get_rng_state()
    assert left_by(lambda: torch.manual_seed(torch.initial_seed() ^ 1), lambda: torch.set_rng_state(before)) == [
        "torch.initial_seed"
    ]


def test_the_garbage_collection_is_left_off():
    assert left_by(gc.disable, gc.enable) == ["garbage collection"]


def test_frozen_objects_are_left():
    """In a fork, since this process has frozen objects of its own."""
    pid = child(lambda: sys.exit(left_by(gc.freeze, lambda: None) != ["gc.freeze"]))
    assert os.waitpid(pid, 0)[1] == 0


def test_hooks_of_all_modules_are_counted_where_torch_has_noted_their_kind(monkeypatch):
    """The first such hook of a process sets a flag beside the hooks, which stays when the hook has gone."""
    monkeypatch.setattr(torch.nn.modules.module, "_global_is_full_backward_hook", True)
    assert left_by(lambda: torch.rand(3).sum(), lambda: None) == []
    hooks = []
    act = lambda: hooks.append(torch.nn.modules.module.register_module_full_backward_hook(lambda *_: None))  # noqa: E731
    assert left_by(act, lambda: hooks.pop().remove()) == ["hooks of all modules of torch"]


def test_the_tracing_of_memory_is_left_on():
    assert left_by(tracemalloc.start, tracemalloc.stop) == ["tracemalloc"]


def test_a_flag_of_a_backend_is_left(monkeypatch):
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    assert left_by(lambda: setattr(cudnn, "benchmark", not before), lambda: setattr(cudnn, "benchmark", before)) == [
        "torch.backends"
    ]


def test_two_ways_to_set_a_precision_are_no_error(monkeypatch):
    def mixed() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    assert InterpreterWatch().read_observations()["left"] == []
    assert interpreter_state._backend_flag("no.such.flag") is None


@pytest.mark.filterwarnings("ignore:Warning only once")
def test_an_operator_of_torch_in_its_own_way_is_left():
    library = torch.library.Library("aten", "IMPL")
    assert left_by(lambda: library.impl("cosh", lambda x: x, "AutogradXLA"), lambda: None) == []  # no such device
    assert left_by(lambda: library.impl("cosh", lambda x: x, "CPU"), library._destroy) == ["operators of torch"]


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="Python 3.12 has it first")
def test_a_monitor_is_left():
    assert left_by(lambda: sys.monitoring.use_tool_id(4, "it"), lambda: sys.monitoring.free_tool_id(4)) == [
        "sys.monitoring"
    ]
    assert "sys.monitoring.register_callback" in interpreter_state.EVENTS


def test_where_files_lie_is_asked_as_it_was_at_first(monkeypatch):
    monkeypatch.setattr("posixpath.realpath", lambda path, **rest: gc.__name__ + torch.__file__)
    assert not is_trusted_file("/somewhere/it.py")


def test_packages_that_this_environment_sees_in_another_one_are_trusted():
    import typing_extensions

    assert is_trusted_file(typing_extensions.__file__)


@pytest.mark.usefixtures("few_modules")
def test_methods_properties_and_code_that_are_replaced_are_seen(monkeypatch):
    before = FunctionSnapshot()
    assert before.changed() == []
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda self, end: 0.001)
    monkeypatch.setattr(profiler.profile, "__exit__", lambda *rest: None)
    monkeypatch.setattr("posixpath.realpath", lambda path: path)
    monkeypatch.setattr(torch.nn.functional.softmax, "__code__", (lambda *args, **rest: args).__code__)
    assert set(before.changed()) == {
        "torch.cuda.streams.Event.elapsed_time",
        "torch.autograd.profiler.profile.__exit__",
        "posixpath.realpath",
        "the code of torch.nn.functional.softmax",
    }


class OwnFinder(DistutilsMetaFinder):
    """A finder with a method of its own, in the place of that of a library."""

    def find_spec(self, *args, **named):
        return None


class OwnLookup(DistutilsMetaFinder):
    """A finder that has the method of a library, and looks up all names by one of its own."""

    def __getattribute__(self, name):
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("kind", ["library", "own class", "own lookup", "own method", "held method", "held function"])
def test_a_finder_of_an_installed_library_may_stay_and_no_other(kind: str) -> None:
    """The import of a library may add one, which may hold data such as modules by name, and no code of others."""
    finder = object.__new__({"own class": OwnFinder, "own lookup": OwnLookup}.get(kind, DistutilsMetaFinder))
    finder.names, finder.known = ["json"], {"torch": torch}
    if kind == "own method":
        finder.find_spec = lambda *args: None
    if kind == "held method":
        finder.spec_for_json = lambda *args: None
    if kind == "held function":
        finder.names = [lambda: None]
    left = left_by(lambda: sys.meta_path.append(finder), lambda: sys.meta_path.remove(finder))
    assert left == ([] if kind == "library" else ["sys.meta_path or sys.path_hooks"])


def test_what_a_known_finder_holds_is_looked_at_with_the_functions_and_not_at_each_call(monkeypatch) -> None:
    """That takes longer than most calls. A finder of others that comes later is found at each of them."""
    finder = object.__new__(DistutilsMetaFinder)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    looked, real = [], interpreter_state._is_trusted_finder
    monkeypatch.setattr(interpreter_state, "_is_trusted_finder", lambda each: looked.append(each) or real(each))
    seen = InterpreterWatch()
    looked.clear()
    finder.find_spec = lambda *args: None
    assert seen.read_observations(thorough=False)["left"] == [] == looked
    assert seen.read_observations()["left"] == ["sys.meta_path or sys.path_hooks"]
    sys.meta_path.append(object.__new__(OwnFinder))
    assert seen.read_observations(thorough=False)["left"] == ["sys.meta_path or sys.path_hooks"]
