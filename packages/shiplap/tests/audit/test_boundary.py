"""c_abi: what leaves a C function on its error paths, and what stays behind; in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl
from shiplap.audit import c_child_process
from shiplap.audit.checks import c_abi
from shiplap_testing.effort import sampled
from shiplap_testing.forked import WITH_VERBS, python
from shiplap_testing.zoo import boundary, good
from tests.audit.common import look
from tests.audit.test_memory import double


@pytest.mark.parametrize("specimen", sampled(boundary.SPECIMENS, 1), ids=str)
def test_c_abi_fires_and_says_what_happened(specimen):
    finding = look(specimen.op, "c_abi")
    assert finding.verdict == "fail"
    assert boundary.SAYS[specimen.name] in finding.evidence
    assert finding.fix


@pytest.mark.parametrize(
    "specimen", sampled([*boundary.SOUND, *(s for s in good.SPECIMENS if s.op is good.saxpy)], 1), ids=str
)
def test_c_abi_is_silent(specimen):
    finding = look(specimen.op, "c_abi")
    assert finding.verdict == "ok", finding.evidence
    assert "kinds of calls" in finding.evidence


def test_c_abi_skips_what_has_no_c_function():
    finding = look(double, "c_abi")
    assert (finding.verdict, finding.evidence) == ("skip", "no C ABI kernel for the CPU")


@pytest.mark.long
def test_the_reproducer_of_an_exception_fails_the_same_way():
    finding = look(boundary.SPECIMENS[0].op, "c_abi")
    done = python("-c", finding.reproducer, imported=WITH_VERBS)
    assert done.returncode == 1, done.stderr
    assert "std::out_of_range leaves the C function" in done.stdout


def test_a_crash_in_what_the_declaration_refuses_is_no_finding(monkeypatch):
    """A kernel may trust the declaration on rank and dtype; an exception is its fault all the same."""
    kernel = c_abi._c_kernels_for_cpu(boundary.SOUND[0].op)[0]
    lax = [c_abi.CCallAttempt("another rank", {}, lax=True)]
    for messages, problem in (
        ("", ""),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "std::bad_alloc"),
    ):
        deaths = [c_abi.ProcessDeath(0, -signal.SIGSEGV, messages)]
        monkeypatch.setattr(c_abi, "_run_attempts", lambda *args, deaths=deaths: ({}, deaths))
        observation = c_abi._observe_kernel(kernel, kernel.native.library, lax)
        assert problem in observation.problem
        assert bool(observation.problem) == bool(problem)


def test_a_library_that_cannot_be_opened_is_an_error_of_the_check(tmp_path):
    (tmp_path / "libno.so").write_text("no")
    with pytest.raises(RuntimeError, match=r"libno\.so cannot be called in a process of its own"):
        c_abi._run_attempts(
            tmp_path / "libno.so", "f", [c_abi.CCallAttempt("a call", {"workspace": 0, "arguments": []})]
        )


def test_a_hang_ends(monkeypatch):
    monkeypatch.setattr(c_abi, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(c_abi.sys, "executable", "/bin/sh")  # -I FILE: sh fails at once, which is an answer as well
    status, _, _ = c_abi._run_child_process("{}")
    assert status != 0


def test_the_process_has_no_torch():
    """Its memory is that of the function: a torch import would cost seconds and hide leaks in noise."""
    done = subprocess.run(
        [sys.executable, "-I", "-X", "importtime", c_child_process.__file__],
        input="",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "json" in done.stderr
    assert "torch" not in done.stderr


def test_leaks_are_counted_per_call():
    still = {"status": 0, "message": "", "calls": 1000, "heap": 7.0, "resident": 500.0, "files": 0.0}
    assert c_abi._describe_leak(still) == ""
    assert c_abi._describe_leak(still | {"heap": 24.0, "files": 1.0}) == "24 bytes and an open file"
    assert c_abi._describe_leak(still | {"resident": 4096.0}) == "4096 bytes of resident memory"


def test_arguments_cross_the_process_as_they_are():
    """Strings, lists, floats and absent tensors: the function sees what the declaration says."""
    from shiplap_testing.build import compile_c

    op = sl.op("audit_c_abi::everything")(_everything)
    folder = boundary._folder
    body = """
int everything(const sl_context* ctx, const DLTensor* x, const DLTensor* bias, DLTensor* out, double a,
               const char* mode, const int64_t* ks, int64_t ks_len) {
  for (int64_t i = 0; i < x->shape[0]; ++i)
    ((float*)out->data)[i] = ((const float*)x->data)[i] + (bias ? ((const float*)bias->data)[i] : 0);
  snprintf(ctx->error, ctx->error_size, "%g %s %d %d", a, mode, (int)ks_len, (int)ks[1]);
  return SL_UNSUPPORTED;
}"""
    op.kernel("cpu", sl.cabi(compile_c(folder, "everything", {"everything": op}, body), "everything"))
    from shiplap.sampling.samples import Samples

    case = Samples(op, 1).build(Samples(op, 1).base)
    kernel = c_abi._c_kernels_for_cpu(op)[0]
    attempts = list(c_abi._make_attempts(op, kernel, case))
    results, deaths = c_abi._run_attempts(folder / "libeverything.so", "everything", attempts[:1])
    assert deaths == []
    assert (results[0]["status"], results[0]["message"]) == (2, "0.5 add 2 7")
    json.dumps(attempts[0].spec)


def _everything(
    x: Float32[Tensor, "n"],
    bias: Float32[Tensor, "n"] | None = None,
    a: float = 0.5,
    mode: str = "add",
    ks: list[int] = (3, 7),
) -> Float32[Tensor, "n"]:
    return x if bias is None else x + bias
