"""Kernels are compiled with one assembler, whether a process begins with launches or with a graph."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from shiplap.torch_private import triton_assembler
from shiplap_testing.forked import python

CHOSEN = "TRITON_PTXAS_PATH"


@pytest.fixture
def brought(tmp_path, monkeypatch):
    """The assembler of a torch for CUDA that brings one."""
    monkeypatch.delenv(CHOSEN, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    there = tmp_path / "bin" / "ptxas"
    there.parent.mkdir()
    there.write_text("#!/bin/sh\n")
    there.chmod(0o755)
    yield there
    os.environ.pop(CHOSEN, None)


def use_torchs():
    triton_assembler.use_torch_assembler.__wrapped__()
    return os.environ.get(CHOSEN)


def test_the_assembler_of_torch_is_chosen(brought):
    assert use_torchs() == str(brought)


def test_the_choice_of_a_user_stays(brought, monkeypatch):
    monkeypatch.setenv(CHOSEN, "/mine/ptxas")
    assert use_torchs() == "/mine/ptxas"


@pytest.mark.parametrize("spoil", [lambda f: f.unlink(), lambda f: f.chmod(0o644)])
def test_a_torch_that_brings_none_changes_nothing(brought, spoil):
    spoil(brought)
    assert use_torchs() is None


def test_a_torch_without_cuda_changes_nothing(brought, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert use_torchs() is None


KERNEL = """
import triton, triton.language as tl

@triton.jit
def add_one(x, n):
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)
"""
PROGRAM = """
import os, subprocess, sys
import torch, triton
from kernel import add_one
from shiplap.kernels.triton.specialize import SpecializedForm, compile_form

torch.version.cuda, torch.__file__ = "13.0", sys.argv[1]
found = []
triton.knobs.compilation.listener = lambda *, cache_hit, **more: found.append(bool(cache_hit))
if sys.argv[2] == "a graph":
    from shiplap.torch_private import cache_reuse
    cache_reuse.prepare_cache_keys()
compile_form(add_one, SpecializedForm({"x": "*fp32", "n": "i32"}, {}, {(0,): [["tt.divisibility", 16]]}, {}), 0, (), 90)
print(found)
"""


@pytest.mark.long
def test_a_process_that_begins_with_a_graph_finds_the_kernels_of_one_that_launched_them(tmp_path):
    """The key of Triton's cache holds the version of the assembler, which a graph alone had put into force."""
    triton = pytest.importorskip("triton")
    real = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if not real.is_file():
        pytest.skip("this Triton brings no assembler")
    brought = tmp_path / "torch/bin/ptxas"
    brought.parent.mkdir(parents=True)
    brought.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo of torch\nexec "{real}" "$@"\n')
    brought.chmod(0o755)
    (tmp_path / "kernel.py").write_text(KERNEL)
    env = {k: v for k, v in os.environ.items() if k not in (CHOSEN, "TRITON_INTERPRET")}
    paths = os.pathsep.join(filter(None, (str(tmp_path), env.get("PYTHONPATH"))))
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": paths}
    hits = []
    for start in ("a launch", "a graph"):
        done = python("-c", PROGRAM, str(tmp_path / "torch/__init__.py"), start, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        hits.append(done.stdout.splitlines()[-1])
    assert hits == ["[False]", "[True]"]
