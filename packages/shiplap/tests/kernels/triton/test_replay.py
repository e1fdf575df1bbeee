"""What is written down of a launch, and C++ that makes it again, with a driver that looks at what it gets.

Whether a GPU computes the same is tested there (sparse3d).
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import weakref
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shiplap.declare.kernel import Kernel
from shiplap.kernels.native.build_digest import FLAGS, INCLUDE
from shiplap.kernels.triton import replay
from shiplap.kernels.triton.replay import ALIGNMENT, NUMBER, SCRATCH, TENSOR, BroughtTensor, LaunchRecording
from shiplap.kernels.triton.template_kernel import TemplateKernel
from shiplap.kernels.triton.template_key import KeptLaunch

HERE = Path(__file__).parent
Facts = namedtuple("Facts", "num_warps num_ctas shared global_scratch_size profile_scratch_size launch_pdl")


def compiled(types, function=4096, **facts):
    """As Triton's compiled kernels are, as far as a recording looks at them."""
    facts = {"num_warps": 4, "num_ctas": 1, "shared": 100, "global_scratch_size": 0, **facts}
    metadata = Facts(**{"profile_scratch_size": 0, "launch_pdl": False, **facts})
    return SimpleNamespace(function=function, metadata=metadata, src=SimpleNamespace(signature=dict(enumerate(types))))


def test_tensors_numbers_and_scratch_are_told_apart():
    x, out, sums = BroughtTensor(0), BroughtTensor(1), torch.empty(2, 5)
    made = LaunchRecording(0, 2)
    made.share_scratch(sums)
    made.add_launch(compiled(["*fp32", "*fp32", "i32", "constexpr", "i64"]), [7], [x, sums, 3, 1, 1 << 40])
    made.add_launch(compiled(["*fp32", "*fp32", "constexpr"], global_scratch_size=128), [2, 3], [sums, out, 2048])
    first = [TENSOR, 0, SCRATCH, 0, NUMBER, 3, NUMBER, 1 << 40, NUMBER, 0, NUMBER, 0]
    second = [SCRATCH, 0, TENSOR, 1, SCRATCH, ALIGNMENT, NUMBER, 0]
    assert made.words == [4096, 7, 1, 1, 128, 100, 6, *first, 4096, 2, 3, 1, 128, 100, 4, *second]
    assert (made.scratch, made.launches, made.unfit) == (ALIGNMENT + 768, 2, "")


@pytest.mark.parametrize(
    ("types", "given", "why"),
    [
        (["fp32"], [1.5], "1.5 as fp32"),
        (["*fp32"], [torch.ones(1)], "does not bring"),
        (["*fp32"], [BroughtTensor(1)], "does not bring"),
        (["i32"], [1, 2], "zip"),
        (["tensordesc<fp16[64, 64]>"], [3], "as tensordesc"),
    ],
)
def test_what_c_cannot_make_stays_with_python(types, given, why):
    made = LaunchRecording(0, 1)
    made.add_launch(compiled(types), [1], given)
    assert why in made.unfit
    assert replay.choose_rerun(None, plain := lambda args: args, made, [0], SimpleNamespace(is_cuda=True)) is plain


@pytest.mark.parametrize("facts", [{"num_ctas": 2}, {"profile_scratch_size": 8}, {"launch_pdl": True}])
def test_a_launch_of_another_kind_stays_with_python(facts):
    made = LaunchRecording(0, 0)
    made.add_launch(compiled([], **facts), [1], [])
    assert "it needs" in made.unfit


def test_a_closed_recording_holds_no_tensor():
    sums = torch.ones(9)
    made, gone = LaunchRecording(0, 1), weakref.ref(sums)
    made.share_scratch(sums)
    made.add_launch(compiled(["*fp32", "*fp32"]), [1], [BroughtTensor(0), sums])
    made.close()
    del sums
    gc.collect()
    assert made.launches == 1
    assert gone() is None


def test_few_calls_start_no_compiler(monkeypatch):
    """And once there is a library, what was prepared is forgotten, so that the next calls are recorded."""
    asked, now = [], replay._ReplayState()
    monkeypatch.setattr(replay, "_replay_state", now)
    monkeypatch.setattr(replay, "replay_library", lambda op, start=False: asked.append(start))
    rerun = replay.choose_rerun(None, lambda args: args, LaunchRecording(0, 0), [], SimpleNamespace(is_cuda=True))
    for _ in range(replay.HOT_REPLAYS):
        rerun(())
    assert asked == [False]
    for _ in range(2 * replay.REPLAYS_BETWEEN_CHECKS):
        rerun(())
    assert asked == [False, True, True]


@pytest.mark.parametrize("split_k", [1, 2])
def test_one_tensor_in_two_places_is_two_tensors_of_another_call(split_k):
    """What a call brings is known by its place, since the next call may bring two."""
    x, out, sums = torch.ones(4), torch.empty(4), torch.empty(2, 4)
    kernel = object.__new__(TemplateKernel)
    kernel._passed = {
        "key": lambda grid, out, sizes, strides, a, sa, da, b, sb, db, c, sc, dc: (a, c, out, sa[0], sizes[0])
    }
    each = [(x, x.shape, x.stride()), (None, (), ()), (x, x.shape, x.stride())]
    kept = KeptLaunch(None, [7], each, "key", compiled(["*fp32", "*fp32", "*fp32", "i32", "i32"]))
    if split_k > 1:
        kept.sums = sums, compiled(["*fp32", "*fp32", "i32", "i32", "constexpr"])
    made = kernel._recording(kept, 2, out)
    stored = [SCRATCH, 0] if split_k > 1 else [TENSOR, 2]
    assert made.unfit == ""
    assert made.words[7:17] == [TENSOR, 0, TENSOR, 1, *stored, NUMBER, 4, NUMBER, 4 if split_k == 1 else 2]
    if split_k > 1:
        assert made.words[28:32] == [SCRATCH, 0, TENSOR, 2]


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_random_recordings_are_replayed_without_touching_other_memory(tmp_path):
    """By four threads, under the sanitizers, with a driver that looks at each parameter; broken words are refused."""
    home, program = Path(torch.__file__).parent, tmp_path / "harness"
    for name in ("libcuda.so.1", "libtorch_cuda.so"):
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(tmp_path / name)]
        subprocess.run([*command, str(HERE / "replay_driver.c")], check=True, timeout=60)
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC", "-O2", "-fwrapv")]
    sanitizers = ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    link = [f"-L{home / 'lib'}", "-ltorch_cpu", "-ldl", "-lpthread", "-Wl,--allow-shlib-undefined"]
    include = ["-I", str(INCLUDE), "-isystem", str(home / "include")]
    call = ["c++", *flags, *sanitizers, "-rdynamic", *include, "-o", str(program), str(HERE / "replay_harness.cpp")]
    built = subprocess.run([*call, *link], check=False, capture_output=True, text=True, timeout=300)
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr[-3000:]
    env = {**os.environ, "LD_LIBRARY_PATH": f"{tmp_path}:{home / 'lib'}", "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([program], env=env, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "replayed\n"), done.stderr[-3000:]


@pytest.mark.parametrize(("value", "on"), [(None, True), ("1", True), ("0", False)])
def test_it_is_on_unless_it_is_turned_off(value, on, monkeypatch):
    monkeypatch.setattr(replay, "_is_known_triton", lambda: True)
    monkeypatch.delenv("SHIPLAP_REPLAY", raising=False)
    if value is not None:
        monkeypatch.setenv("SHIPLAP_REPLAY", value)
    assert replay.is_replay_wanted() is on


def test_kernels_set_only_attributes_that_calls_read():
    """An attribute that no base class has is read by nobody: so calls of templates were not remembered for a while."""
    pending, seen = [Kernel], set[type[Kernel]]()
    while pending:
        kind = pending.pop()
        seen.add(kind)
        pending += kind.__subclasses__()
        known = {name for base in kind.__mro__[1:] for name in (*vars(base), *getattr(base, "__annotations__", {}))}
        values = {n for n, v in vars(kind).items() if not n.startswith("_") and isinstance(v, bool | int | str)}
        assert kind is Kernel or values <= known, kind
    assert TemplateKernel in seen
    assert TemplateKernel.can_repeat
