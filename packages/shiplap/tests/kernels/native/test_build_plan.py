"""The compiler of a build, and what an op without a native kernel is told."""

import re
import shutil
from types import SimpleNamespace

import pytest

from shiplap.errors import ShiplapError
from shiplap.kernels.native import build_plan
from shiplap.kernels.native.build_plan import (
    _first_native_forms,
    _no_native_form_error,
    compiler_command,
    extra_compiler_flags,
    requested_compiler,
)


@pytest.mark.parametrize(
    ("words", "programs", "flags"),
    [
        ("", ["c++"], []),
        ("  ", ["c++"], []),
        ("g++ -march=native -O1", ["g++"], ["-march=native", "-O1"]),
        ("ccache g++ -O1", ["ccache", "g++"], ["-O1"]),
        ("ccache g++ clang++", ["ccache", "g++"], ["clang++"]),
        ("'one path'/g++", ["one path/g++"], []),
        ("g++ 'open", [], []),
    ],
)
def test_the_compiler_that_is_asked_for(monkeypatch, words, programs, flags):
    monkeypatch.setenv("CXX", words)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert requested_compiler() == (programs, flags)
    assert extra_compiler_flags() == flags
    missing = re.escape(f"no {words.strip() or 'c++'} on the PATH")
    with pytest.raises(ShiplapError, match=missing):
        compiler_command("demo::f")


def test_a_path_with_blanks_is_one_program(monkeypatch):
    monkeypatch.setenv("CXX", "/opt/my tools/g++")
    monkeypatch.setattr(shutil, "which", lambda name: f"/found{name}")
    assert compiler_command("demo::f") == ("/found/opt/my tools/g++",)
    monkeypatch.setenv("CXX", "ccache g++ -O1")
    known = {"ccache": "/bin/ccache", "g++": "/bin/g++"}
    monkeypatch.setattr(shutil, "which", known.get)
    assert compiler_command("demo::f") == ("/bin/ccache", "/bin/g++", "-O1")
    known.pop("g++")
    with pytest.raises(ShiplapError, match="SL405"):
        compiler_command("demo::f")


def kernel(name, native=None, supports=None):
    return SimpleNamespace(name=name, native=native, supports=supports)


def op_of(**kernels):
    spec = SimpleNamespace(name="demo::f", opname="f")
    return SimpleNamespace(
        spec=spec,
        native_kernels=lambda device: kernels.get(device, []),
        native_choices=lambda device: kernels.get(device, []),
    )


def test_what_an_op_without_a_native_kernel_is_told():
    form, devices = object(), ("cpu", "cuda")

    def told(**kernels):
        found = _no_native_form_error(op_of(**kernels), devices)
        assert found.id == "SL404"
        return found.got, found.fix

    got, fix = told()
    assert got.startswith("no kernel on ")
    leave = "call the op without building it, or"
    assert fix == f'{leave} bind a C function: f.kernel("cpu", sl.cabi(...)), or sl.source(...)'
    got, fix = told(cuda=[kernel("p")])
    assert got == "the kernel 'p' on cuda, a Python function, which needs no build"
    assert fix == f'{leave} bind a C function after it: f.kernel("cuda", sl.cabi(...)), or sl.source(...)'
    moved = "bind 'p' before the C kernels, since the kernel that is bound last is tried first"
    assert told(cpu=[kernel("p"), kernel("c", form)])[1] == moved
    assert told(cpu=[kernel("p"), kernel("c", form, len)])[1].startswith(f"{leave} bind a C function after it")
    got, fix = told(cpu=[kernel("c", form, len)])
    assert got == "the kernel 'c' on cpu, which asks supports=, a function of Python"
    assert fix.startswith("bind the kernel without supports=")
    got, fix = told(cpu=[kernel("t", form), kernel("c", form), kernel("d", form)])
    assert got == "the kernel 't' on cpu, whose launches C++ generates, beside c, d"
    assert fix == "declare the op with 't' as its only kernel on cpu"


def test_the_first_native_kernel_of_each_device():
    one, two = object(), object()
    found = _first_native_forms(op_of(cpu=[kernel("p"), kernel("c", one), kernel("d", two)], cuda=[kernel("p")]))
    assert found == {"cpu": one}


def test_several_native_kernels_have_no_single_one(monkeypatch):
    one = object()
    monkeypatch.setattr(build_plan, "_native_source", lambda op, device, form: (device, form))
    assert build_plan.bound_native_kernel(op_of(cpu=[kernel("c", one)]), "cpu") == (("cpu", one), one)
    with pytest.raises(ShiplapError, match="several kernels on cpu: c, d"):
        build_plan.bound_native_kernel(op_of(cpu=[kernel("c", one), kernel("d", one)]), "cpu")
    with pytest.raises(ShiplapError, match="SL404"):
        build_plan.bound_native_kernel(op_of(cpu=[kernel("c", one)]), "cuda")
