"""The audit and the zoo: every broken op is flagged by the check that is there for it, no sound op by any."""

import pytest
import torch

from shiplap.audit import CHECKS, audit
from shiplap_testing.effort import sampled
from shiplap_testing.zoo import bad, boundary, good, gpu, power, power_gradient, stateful

SEED = 20261121
assert power_gradient.M is not None  # it adds to power.PAIRS
# A full audit of these: what fails is the fault itself and what follows from it, and nothing else.
WHOLE = {
    "wrong gradient": {"gradient"},
    "kernel that ignores a scalar": {"numerics"},
    "kernel that crashes on zero rows": {"edges"},
}
LONG = (
    "matrix product, differentiable any number of times",
    "optional tensor, autocast rule",
    "calls another declared op",
    "kernel that takes any strides",
    "C ABI kernel",  # its library: test_a_sound_c_function_passes_what_looks_at_its_library
    "0-dim tensors, any rank",
    "list of tensors",
    "many scalars",
    "an outsider's sound op",
    "several outputs of several dtypes",
    "mutates an argument",
    "reduction, saves its output, workspace",
    "reference returns a view, shiplap copies it",
    "data-dependent sizes",
    "integers that mean rows, with a sampler",
    "preconditions, computed size, contiguous input",
)
LIBRARY = ("numerics", "edges", "fresh", "threads", "stateless", "c_abi")

C_ABI = [s for s in good.SPECIMENS if s.name == "C ABI kernel"]

CPU_BAD = (*bad.SPECIMENS, *stateful.SPECIMENS, *boundary.SPECIMENS)
CPU_SOUND = (*good.SPECIMENS, *stateful.STATELESS, *boundary.SOUND)
EVERY_BAD = (*CPU_BAD, *gpu.BAD)  # those of gpu: tests/gpu/test_zoo_gpu.py


def failures(op, **keywords):
    return {f.check: f for f in audit(op, seed=SEED, budget=600, **keywords) if f.verdict == "fail"}


@pytest.fixture(autouse=True)
def fewer_threads():
    """Two audits at once (pytest -n 2) would otherwise wait for each other's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# The same defects have tests of what their findings say: test_boundary.py, test_stateless.py, test_compiler.py,
# test_autograd.py and test_values.py.
SAME = (
    *(s.name for s in boundary.SPECIMENS),
    *stateful.NAMES,
    "recompiles for each size",
    "stride bug for a transposed input",
    "no fake at all",
    "fake with another dtype",
    "wrong gradient",
    "wrong numerics",
)


@pytest.mark.parametrize("specimen", sampled(CPU_BAD, 7, long=SAME), ids=str)
def test_a_broken_op_is_flagged(specimen):
    for check in sorted(specimen.flagged_by):  # one at a time: a check may wait for another that failed
        (finding,) = audit(specimen.op, checks=[check], seed=SEED)
        assert finding.verdict == "fail", finding.evidence
        assert finding.subject == specimen.op.spec.name
        assert finding.evidence
        assert finding.fix
        assert f"seed {SEED}" in finding.input


@pytest.mark.long
@pytest.mark.parametrize("specimen", [s for s in bad.SPECIMENS if s.name in WHOLE], ids=str)
def test_a_whole_audit_blames_nothing_else(specimen):
    assert failures(specimen.op).keys() == WHOLE[specimen.name]


@pytest.mark.parametrize("specimen", sampled([*stateful.STATELESS, *boundary.SOUND, *C_ABI], 1), ids=str)
def test_a_sound_c_function_passes_what_looks_at_its_library(specimen):
    """Around the function they are the one C ABI kernel of ``good``, which passes everything."""
    findings = audit(specimen.op, checks=LIBRARY, seed=SEED)
    assert {f.check: f.verdict for f in findings} == dict.fromkeys(LIBRARY, "ok"), findings


@pytest.mark.parametrize("specimen", sampled(good.SPECIMENS, long=LONG), ids=str)
def test_a_sound_op_passes_everything(specimen):
    report = audit(specimen.op, seed=SEED, budget=600)
    assert report.proven, str(report)
    assert {f.check for f in report if f.verdict == "ok"} >= {"schema", "fake", "numerics", "fresh", "compile"}


def test_every_check_has_an_op_that_it_flags():
    named = {check for s in EVERY_BAD for check in s.flagged_by} | {pair.flagged_by for pair in power.PAIRS}
    assert named == set(CHECKS)


def test_specimens_are_many_and_each_has_a_name_of_its_own():
    assert len(bad.SPECIMENS) >= 19
    assert len(good.SPECIMENS) >= 10
    names = [s.name for s in (*EVERY_BAD, *CPU_SOUND, *gpu.GOOD)]
    assert len(names) == len(set(names))


def test_gradients_that_nobody_asked_for_are_noted():
    (finding,) = audit(bad.gradients.sl_gradient_wasteful, checks=["gradient"], seed=SEED)
    assert finding.verdict == "ok"
    assert "also computed when not needed: d/dw, d/dx" in finding.evidence
