"""The statement of an audit: its form, its digests, the samples that it lists, and no path of this machine."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.audit import CostCard, Finding, Report, audit
from shiplap.audit import statement as statements
from shiplap.audit.statement import SampleCollector, op_digest, part_digests, write_audit_statement
from shiplap.errors import CommandError
from shiplap_testing.zoo import good

CARD = CostCard("zoo_good::saxpy", "cpu", "x float32(5, 3)", "native", 100.04, 2345.6, None, None, ("captured: <no>",))
FINDINGS = [
    Finding("fake", "ok", "zoo_good::saxpy", "as promised", "3 samples, seed 5"),
    Finding("edges", "fail", "zoo_good::saxpy", "wrong", "sizes(n=0); seed 5", "mask it", "import sys\n/home/me"),
]


@pytest.fixture(scope="module")
def collected():
    collector = SampleCollector()
    audit(good.saxpy, checks=["numerics", "edges"], seed=5, examined=collector)
    return collector


def statement(path, collected):
    reports = [Report(good.saxpy.spec.name, tuple(FINDINGS), ("fake", "edges"))]
    write_audit_statement(
        path, [good.saxpy], FINDINGS, {good.saxpy.spec.name: collected}, [CARD], reports, seed=5, device="cpu"
    )
    return json.loads(path.read_text())


def library_of(op):
    return op.kernels["cpu"][0].native.library


def test_it_has_the_form_of_in_toto_and_the_digests_of_the_op_and_its_library(collected, tmp_path):
    written = statement(tmp_path / "a.json", collected)
    assert list(written) == ["_type", "subject", "predicateType", "predicate"]
    assert written["_type"] == "https://in-toto.io/Statement/v1"
    subjects = {s["name"]: s["digest"]["sha256"] for s in written["subject"]}
    assert subjects["libsaxpy.so"] == hashlib.sha256(library_of(good.saxpy).read_bytes()).hexdigest()
    parts = written["predicate"]["ops"]["zoo_good::saxpy"]["digests"]
    assert parts["op"] == good.saxpy.identity
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    assert subjects["zoo_good::saxpy"] == hashlib.sha256(text.encode()).hexdigest()


def test_it_holds_the_evidence_and_no_paths(collected, tmp_path):
    predicate = statement(tmp_path / "a.json", collected)["predicate"]
    assert predicate["verdicts"]["zoo_good::saxpy"]["verdict"] == "failed"
    assert [(f["check"], f["verdict"], f["input"]) for f in predicate["findings"]][1] == (
        "edges",
        "fail",
        "sizes(n=0); seed 5",
    )
    assert (predicate["facts"]["seed"], predicate["costs"][0]["eager_ns"]) == ("5", 2345.6)
    assert predicate["facts"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert any(name in text for name in ("GCC", "clang") for text in predicate["compilers"])
    op = predicate["ops"]["zoo_good::saxpy"]
    assert op["schema"] == "zoo_good::saxpy(Tensor x, Tensor y, float a=2.0) -> Tensor"
    assert "/home/me" not in (tmp_path / "a.json").read_text()


def test_it_lists_the_samples_of_each_check(collected, tmp_path):
    samples = statement(tmp_path / "a.json", collected)["predicate"]["ops"]["zoo_good::saxpy"]["samples"]
    assert samples.keys() == {"edges", "numerics"}
    edges = samples["edges"]
    assert set(edges["sizes"]["n"]) >= {"0", "1", "15", "16", "17", "31", "33"}
    assert edges["dtypes"] == ["float32"]
    assert {"offset", "permuted", "expanded"} <= set(edges["layouts"])
    assert edges["samples"] > 20
    assert "zeros" in samples["numerics"]["values"]


def test_a_check_that_set_a_sample_aside_has_not_examined_it():
    collector = SampleCollector()
    audit(good.saxpy, checks=["cuda_graph"], seed=5, examined=collector)
    assert collector.rows() == {}


def test_a_rebuilt_library_changes_its_digest_and_those_of_the_kernel_and_the_op():
    library, known = library_of(good.saxpy), part_digests(good.saxpy)
    before = library.read_bytes()
    replacement = library.with_suffix(".new")
    replacement.write_bytes(before + b"\0")
    try:
        replacement.replace(library)  # another inode: the process has the old one mapped
        now = part_digests(good.saxpy)
    finally:
        replacement.write_bytes(before)
        replacement.replace(library)
    assert [name for name in now if now[name] != known[name]] == ["kernel cpu/saxpy", "library libsaxpy.so", "op"]
    assert op_digest(now) != op_digest(known)
    assert part_digests(good.saxpy) == known


def declared(ns, factor, kernel=None):
    def scale(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * factor

    op = sl.op(f"{ns}::scale")(scale)
    if kernel:
        op.kernel("cpu", kernel, name="fast")
    return op


def test_the_part_that_changed_is_named(ns):
    known = part_digests(declared(ns, 2.0))
    assert part_digests(declared(ns, 2.0)) == known
    other = part_digests(declared(ns, 3.0))
    assert [name for name in known if other[name] != known[name]] == ["op", "reference"]
    assert part_digests(declared(ns, 2.0, kernel=lambda x: x * 2)).keys() - known.keys() == {"kernel cpu/fast"}


def test_an_adopted_op_states_that_no_digest_covers_it():
    assert part_digests(good.adopted)["implementation"] == "another library's: not in any digest"


class Scaler:
    def __init__(self, factor):
        self.factor = factor

    def launch(self, x):
        return x * self.factor


def test_what_a_kernel_reaches_through_instances_and_containers_is_in_its_digest(ns):
    scaler, table = Scaler(2), {"factor": [2]}
    for kernel, change in (
        (scaler.launch, lambda: setattr(scaler, "factor", 3)),
        (lambda x: x * table["factor"][0], lambda: table["factor"].append(3)),
    ):
        op = declared(ns, 2.0, kernel=kernel)
        before = part_digests(op)
        assert part_digests(op) == before
        change()
        assert part_digests(op)["kernel cpu/fast"] != before["kernel cpu/fast"]


def test_the_builder_is_in_the_digests(ns):
    op = declared(ns, 2.0)
    assert "builder" not in part_digests(op)

    @op.samples
    def _(rng, sizes, dtype, device):
        return (torch.ones(sizes["n"], dtype=dtype),)

    assert "builder" in part_digests(op)


def test_a_path_that_cannot_be_written_is_an_error(collected, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match="SL602: the statement cannot be written"):
        statement(tmp_path / "file" / "a.json", collected)


def test_the_metadata_of_packages_is_read_once(monkeypatch):
    reads = []
    monkeypatch.setattr(statements, "packages_distributions", lambda: reads.append(1) or {"torch": ["torch"]})
    statements._owners.cache_clear()
    try:
        assert statements.versions_of_packages_used(good.saxpy) == statements.versions_of_packages_used(good.saxpy)
    finally:
        statements._owners.cache_clear()
    assert reads == [1]
