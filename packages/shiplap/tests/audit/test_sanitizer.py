"""sanitizer: reports of compute-sanitizer become findings, and a tool that cannot run is a reason, never an "ok".

A script named ``compute-sanitizer`` stands for the tool: it prints what that prints, and runs the program it is given.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from shiplap.audit import audit, sanitizer
from shiplap.audit.check import AuditSubject
from shiplap.audit.checks import load_check
from shiplap.audit.checks import sanitizer as check
from shiplap.sampling.samples import Samples
from shiplap_testing.zoo import good
from tests.audit.common import look

MEMCHECK = """\
========= COMPUTE-SANITIZER
shiplap-sample: sizes(n=5, c=3), dtypes(Float='float32')
shiplap-sample: sizes(n=33, c=3), dtypes(Float='float32')
========= Invalid __global__ write of size 4 bytes
=========     at scale_kernel(float *, const float *, int)+0x90
=========     by thread (99,0,0) in block (0,0,0)
=========     Access to 0x7f1d4e00018c is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1d4e000000 of size 396 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x2fb1c0]
=========                in /usr/lib/x86_64-linux-gnu/libcuda.so.1
=========
========= Invalid __global__ write of size 4 bytes
=========     at scale_kernel(float *, const float *, int)+0x90
=========     by thread (100,0,0) in block (0,0,0)
=========
shiplap-done: 2
========= ERROR SUMMARY: 157 errors
"""
RACE = """\
========= COMPUTE-SANITIZER
shiplap-sample: sizes(n=5)
========= Error: Race reported between Write access at sum_kernel(int *)+0x100
=========     and Read access at sum_kernel(int *)+0x160 [508 hazards]
=========
shiplap-done: 1
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
UNINITIALISED = """\
========= COMPUTE-SANITIZER
shiplap-sample: sizes(n=5)
========= Uninitialized __global__ memory read of size 4 bytes
=========     at add_kernel(float *)+0x70
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7fe92d400000
=========
shiplap-done: 1
========= ERROR SUMMARY: 48 errors
"""
CLEAN = "========= COMPUTE-SANITIZER\nshiplap-sample: sizes(n=5)\nshiplap-done: 1\n========= ERROR SUMMARY: 0 errors\n"
RACELESS = CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
REFUSED = """\
========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to the "Supported Devices" section of the sanitizer documentation
shiplap-sample: sizes(n=5)
========= ERROR SUMMARY: 0 errors
"""


def test_memcheck_names_the_access_and_its_sample():
    report = sanitizer.parse_report(MEMCHECK)
    assert (report.errors, len(report.faults), report.samples, report.finished) == (157, 2, 2, True)
    assert report.faults[0].sample == "sizes(n=33, c=3), dtypes(Float='float32')"
    finding = check.observation_of_report(report, "memcheck", 2)
    assert "counts 157 errors: Invalid __global__ write of size 4 bytes; at scale_kernel" in finding.problem
    assert "out of bounds; and is 1 bytes after the nearest allocation" in finding.problem
    assert "[sample sizes(n=33, c=3)" in finding.problem
    assert "Host Frame" not in finding.problem
    assert "mask the last tile" in finding.fix


@pytest.mark.parametrize(
    ("text", "tool", "says"),
    [
        (RACE, "racecheck", "1 errors: Error: Race reported between Write access at sum_kernel(int *)+0x100; and Read"),
        (UNINITIALISED, "initcheck", "48 errors: Uninitialized __global__ memory read of size 4 bytes; at add_kernel"),
    ],
    ids=["race", "init"],
)
def test_other_tools(text, tool, says):
    finding = check.observation_of_report(sanitizer.parse_report(text), tool, 1)
    assert says in finding.problem
    assert finding.fix == check.FIXES_BY_TOOL[tool]


@pytest.mark.parametrize("text", [CLEAN, RACELESS], ids=["memcheck", "racecheck"])
def test_a_clean_report_is_ok_and_says_how_much_it_saw(text):
    finding = check.observation_of_report(sanitizer.parse_report(text), "memcheck", 1)
    assert (finding.problem, finding.skip) == ("", "")
    assert finding.note == "memcheck of compute-sanitizer, 1 samples, 0 errors"


def test_a_tool_that_cannot_run_is_skipped_with_its_reason():
    finding = check.observation_of_report(sanitizer.parse_report(REFUSED, "error 999", 1), "memcheck", 1)
    assert "gave no verdict: Error: Device not supported" in finding.missed
    assert (
        "gave no verdict: error 999"
        in check.observation_of_report(sanitizer.parse_report("", "error 999", 1), "memcheck", 1).missed
    )
    assert (
        "died of SIGSEGV"
        in check.observation_of_report(sanitizer.parse_report("", "", -signal.SIGSEGV), "memcheck", 1).missed
    )


def test_an_op_that_fails_under_the_tool_fails():
    text = CLEAN.replace("shiplap-done: 1\n", "")
    finding = check.observation_of_report(
        sanitizer.parse_report(text, "Traceback\nRuntimeError: no\n", 1), "memcheck", 3
    )
    assert "the op fails in sample 1 of 3: RuntimeError: no" in finding.problem


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Install a ``compute-sanitizer`` of the given Python body, which sees ``argv``."""

    def install(body):
        tool = tmp_path / "compute-sanitizer"
        head = f"#!{sys.executable}\nimport os, sys, subprocess, time\nargv = sys.argv[1:]\n"
        version = (
            "if argv == ['--version']:\n    print('NVIDIA (R) Compute Sanitizer\\nVersion 2025.3.1.0'); sys.exit()\n"
        )
        tool.write_text(head + version + body)
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def test_the_process_gets_the_tool_its_options_and_no_caching_allocator(fake, tmp_path):
    fake(
        "print('========= COMPUTE-SANITIZER')\nat = argv.index(sys.executable)\n"
        f"open({str(tmp_path / 'options')!r}, 'w').write(' '.join(argv[:at]))\n"
        "done = subprocess.run(argv[at:]).returncode\nprint('========= ERROR SUMMARY: 0 errors')\nsys.exit(done)\n"
    )
    program = f"import os; print('{sanitizer.DONE}', os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'])"
    report = sanitizer.run_under_sanitizer([sys.executable, "-c", program], "racecheck", 60, check.UNCACHED_ENVIRONMENT)
    assert report.finished
    assert (report.errors, report.problem) == (0, "")
    assert "--tool racecheck" in (tmp_path / "options").read_text()
    assert sanitizer.sanitizer_version() == "2025.3.1.0"


def test_a_timeout_kills_what_was_started_and_is_no_verdict(fake, tmp_path):
    fake(
        f"child = subprocess.Popen(['sleep', '60'])\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "print('========= COMPUTE-SANITIZER', flush=True)\ntime.sleep(60)\n"
    )
    began = time.monotonic()
    report = sanitizer.run_under_sanitizer([sys.executable, "-c", ""], "memcheck", 2.0)
    assert time.monotonic() - began < 50
    assert "no end within 2 s" in check.observation_of_report(report, "memcheck", 1).missed
    time.sleep(0.2)
    pid = int((tmp_path / "pid").read_text())
    status = Path(f"/proc/{pid}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_a_crash_of_the_tool_is_no_verdict(fake):
    fake("import signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    assert (
        "died of SIGSEGV"
        in check.observation_of_report(
            sanitizer.run_under_sanitizer([sys.executable], "memcheck", 20), "memcheck", 1
        ).missed
    )


def test_the_tool_is_found_beside_nvcc_and_below_cuda_home(fake, tmp_path, monkeypatch):
    fake("")
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    for home in ("CUDA_HOME", "CUDA_PATH"):  # of the machine's own toolkit
        monkeypatch.delenv(home, raising=False)
    assert sanitizer.find_sanitizer() is None
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "bin").symlink_to(tmp_path)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert sanitizer.find_sanitizer() == str(tmp_path / "home" / "bin" / "compute-sanitizer")
    monkeypatch.delenv("CUDA_HOME")
    (tmp_path / "nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "nvcc").chmod(0o755)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "nvcc").symlink_to(tmp_path / "nvcc")
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert sanitizer.find_sanitizer() == str(tmp_path / "compute-sanitizer")


def test_it_is_skipped_without_cuda_and_without_the_tool(monkeypatch, tmp_path):
    finding = look(good.saxpy, "sanitizer")
    assert (finding.verdict, "device='cuda'" in finding.evidence) == ("skip", True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    case = Samples(good.saxpy, 1).build(Samples(good.saxpy, 1).base)
    on_cuda = type(case)(case.recipe, case.seed, case.args, case.env, "cuda")
    assert "is not on PATH" in check.observe_sanitizer(good.saxpy, on_cuda).missed
    assert "is not on PATH" in sanitizer.run_under_sanitizer([sys.executable], "memcheck", 5).problem


@pytest.mark.long
def test_the_whole_way_with_a_program_that_fakes_a_gpu(fake, monkeypatch):
    """A real script of real samples runs under the stand-in; only the device is another."""
    fake(
        "print('========= COMPUTE-SANITIZER', flush=True)\nat = argv.index(sys.executable)\n"
        "argv[-1] = argv[-1].replace('torch.cuda.synchronize()', 'pass')\n"
        "done = subprocess.run(argv[at:]).returncode\n"
        "print('========= Invalid __global__ read of size 4 bytes\\n=========     at k()+0x10\\n"
        "========= ERROR SUMMARY: 1 error')\nsys.exit(done)\n"
    )
    monkeypatch.setattr(check, "observe_sanitizer", lambda op, case: check.Observation())
    cases = [c for c, _ in zip(check.sanitizer_cases(Samples(good.mm, 3)), range(3), strict=False)]
    finding = check.observe_under_tool("memcheck", good.mm, cases)
    assert "counts 1 errors: Invalid __global__ read of size 4 bytes; at k()+0x10" in finding.problem
    assert f"[sample {cases[2].label}]" in finding.problem  # it had come to the last


def test_a_series_without_a_verdict_is_a_skip(monkeypatch):
    """Samples were looked at, but the tool said nothing: that is no "ok"."""
    from dataclasses import replace

    silent = replace(
        load_check("sanitizer"),
        observe=lambda op, case: check.Observation(),
        sequence=lambda op, cases: check.Observation(skip="the tool said nothing"),
    )
    finding = silent.run(AuditSubject(good.saxpy, Samples(good.saxpy, 1)))
    assert (finding.verdict, finding.evidence) == ("skip", "the tool said nothing")


def test_each_tool_has_its_name_and_its_script():
    assert load_check("sanitizer") is load_check("sanitizer:memcheck")
    assert {load_check(f"sanitizer:{tool}").name for tool in sanitizer.SANITIZER_TOOLS} == {"sanitizer"}
    assert {load_check(f"sanitizer:{tool}").symbol.lower() for tool in sanitizer.SANITIZER_TOOLS} == set(
        sanitizer.SANITIZER_TOOLS
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["gpu_out_of_bounds", "gpu_in_bounds"])
def test_memcheck_finds_what_the_caching_allocator_hides(name):
    from shiplap_testing.zoo.gpu import memory

    if not memory.OPS:
        pytest.skip("needs Triton")
    if not sanitizer.sanitizer_version():
        pytest.skip("no compute-sanitizer")
    (finding,) = audit(memory.OPS[name], checks=["sanitizer"], seed=1, device="cuda", budget=300)
    print(f"\n{name}: {finding.verdict}: {finding.evidence}")
    if "not supported" in finding.evidence:
        pytest.skip(finding.evidence)
    assert finding.verdict == ("fail" if name == "gpu_out_of_bounds" else "ok")
    if finding.verdict == "fail":
        assert "Invalid __global__ write" in finding.evidence
