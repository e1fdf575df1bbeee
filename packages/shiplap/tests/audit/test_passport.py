"""The passport: the same evidence is the same text, whatever moves is named, and a file that was edited is refused."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import msgspec
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.audit import CostCard, Finding, audit
from shiplap.audit import passport as passports
from shiplap.errors import CommandError
from shiplap_testing.zoo import good

CARD = CostCard("zoo_good::saxpy", "cpu", "x float32(5, 3)", "native", 100.04, 2345.6, None, None, ("captured: <no>",))
FINDINGS = [
    Finding("fake", "ok", "zoo_good::saxpy", "as promised", "3 samples, seed 5"),
    Finding(
        "edges", "fail", "zoo_good::saxpy", "<b>wrong</b>", "sizes(n=0); seed 5", "mask it", "import sys\n/home/me"
    ),
    Finding("fake", "ok", "another::op", "not of this one"),
]


def describe(op=good.saxpy, findings=FINDINGS, card=CARD, **changes):
    coverage = passports.Coverage()
    audit(op, checks=["numerics", "edges"], seed=5, looked=coverage)
    keywords = {"seed": 5, "device": "cpu", "date": "2026-11-21", **changes}
    return passports.describe(op, findings, coverage, card, **keywords)


@pytest.fixture(scope="module")
def passport():
    return describe()


def test_the_same_evidence_is_the_same_file(passport, tmp_path):
    one, two = (passports.write(tmp_path / name, p) for name, p in (("a", passport), ("b", describe())))
    assert [path.name for path in one] == ["zoo_good.saxpy.cpu.passport.json", "zoo_good.saxpy.cpu.passport.html"]
    assert one[0].read_text() == two[0].read_text()
    assert one[1].read_text() == two[1].read_text()
    assert list(json.loads(one[0].read_text())) == [
        "schema",
        "op",
        "date",
        "device",
        "seed",
        "declaration",
        "digests",
        "versions",
        "verdict",
        "required",
        "verdicts",
        "findings",
        "coverage",
        "cost",
        "seal",
    ]


def test_it_reads_back(passport, tmp_path):
    path, _ = passports.write(tmp_path, passport)
    assert passports.read(path) == passport


def test_it_holds_the_evidence_and_no_paths(passport):
    assert passport.verdicts == {"fail": 1, "incomplete": 0, "ok": 1, "skip": 0}
    assert passport.verdict == "failed"
    assert [(r.check, r.verdict, r.input) for r in passport.findings][1] == ("edges", "fail", "sizes(n=0); seed 5")
    assert "/home/me" not in str(msgspec.to_builtins(passport))
    assert passport.declaration["schema"] == "zoo_good::saxpy(Tensor x, Tensor y, float a=2.0) -> Tensor"
    assert passport.declaration["arguments"]["x"] == 'Float32[Tensor, "n c"]'
    assert "bounds" not in passport.declaration
    assert (passport.cost.raw_ns, passport.cost.compiled_ns, passport.cost.notes) == (100.0, None, ["captured: <no>"])
    assert passport.device["type"] == "cpu"


def test_it_names_versions_and_the_compiler_that_made_the_library(passport):
    assert passport.versions["torch"] == torch.__version__.partition("+")[0] or "+" in passport.versions["torch"]
    assert {"compiler", "python", "shiplap", "system", "torch", "triton"} == passport.versions.keys()
    assert any(name in passport.versions["compiler"] for name in ("GCC", "clang"))


def test_it_says_what_was_covered(passport):
    assert passport.coverage.keys() == {"edges", "numerics"}
    edges = passport.coverage["edges"]
    assert set(edges.sizes["n"]) >= {"0", "1", "15", "16", "17", "31", "33"}
    assert edges.dtypes == ["float32"]
    assert {"offset", "permuted", "expanded"} <= set(edges.layouts)
    assert edges.samples > 20
    assert "zeros" in passport.coverage["numerics"].values


def test_a_check_that_set_a_sample_aside_has_not_covered_it():
    coverage = passports.Coverage()
    audit(good.saxpy, checks=["cuda_graph"], seed=5, looked=coverage)
    assert coverage.rows() == {}


def library_of(op):
    return op.kernels["cpu"][0].native.library


def test_nothing_has_moved(passport):
    assert passports.moved(passport, good.saxpy) == []
    digest = passport.digests["library libsaxpy.so"]
    assert len(digest) == 64
    assert passport.digests["op"] == good.saxpy.identity


def test_a_rebuilt_library_moves_its_digest_and_nothing_else(passport):
    library = library_of(good.saxpy)
    before = library.read_bytes()
    replacement = library.with_suffix(".new")
    replacement.write_bytes(before + b"\0")
    try:
        replacement.replace(library)  # another inode: the process has the old one mapped
        (move,) = passports.moved(passport, good.saxpy)
        assert move.what == "library libsaxpy.so"
        assert str(move).startswith("library libsaxpy.so: ")
    finally:
        replacement.write_bytes(before)
        replacement.replace(library)
    assert passports.moved(passport, good.saxpy) == []


def declared(ns, factor, bounds=None, kernel=None):
    def scale(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * factor

    op = sl.op(f"{ns}::scale")(scale)
    if kernel:
        op.kernel("cpu", kernel, name="fast")
    return op


def test_what_moved_is_named(ns):
    old = describe(declared(ns, 2.0), [], None)
    repeated = passports.moved(old, declared(ns, 2.0))
    assert repeated == []
    assert [m.what for m in passports.moved(old, declared(ns, 3.0))] == ["op", "reference"]
    added = passports.moved(old, declared(ns, 2.0, kernel=lambda x: x * 2))
    assert [(m.what, m.then) for m in added if m.what.startswith("kernel")] == [("kernel cpu/fast", "absent")]
    assert [m.what for m in passports.moved(old, good.mm)] == ["name"]


def test_an_adopted_op_says_what_no_digest_covers():
    assert passports.digests(good.adopted)["implementation"] == "another library's: not in any digest"


def edited(passport, tmp_path, **changes):
    path, _ = passports.write(tmp_path, passport)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"seed": 6}, "a seal that is not that of its content"),
        ({"verdicts": {"fail": 0, "incomplete": 0, "ok": 2, "skip": 0}}, "a seal that is not that of its content"),
        ({"schema": "shiplap.passport/1"}, "shiplap.passport/1"),
        ({"findings": "none"}, "Expected `array`, got `str`"),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_an_edited_file_is_refused(passport, tmp_path, changes, got):
    with pytest.raises(CommandError, match="SL602: the passport cannot be trusted") as e:
        passports.read(edited(passport, tmp_path, **changes))
    assert got in e.value.got
    assert "--passport" in e.value.fix


def test_what_is_no_passport_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(CommandError, match="SL602"):
        passports.read(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(CommandError, match="SL602"):
        passports.read(tmp_path / "x.json")
    with pytest.raises(CommandError, match="SL602"):
        passports.read(tmp_path / "absent.json")


def test_a_folder_that_cannot_be_written_is_an_error(passport, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="SL602: the passport cannot be written"):
        passports.write(tmp_path / "file" / "folder", passport)


class Page(HTMLParser):
    """Tags, and places that could load something."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.loaded = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action")]


def test_the_page_is_one_file_and_escaped(passport, tmp_path):
    _, path = passports.write(tmp_path, passport)
    page = path.read_text()
    parsed = Page(page)
    assert parsed.loaded == []
    assert not {"script", "link", "iframe", "img", "b2"} & set(parsed.tags)
    assert "url(" not in page
    assert "<b>wrong</b>" not in page
    assert "&lt;b&gt;wrong&lt;/b&gt;" in page
    assert "captured: &lt;no&gt;" in page
    for text in (
        "2,346",
        "libsaxpy.so",
        "Float32[Tensor",
        "1 failed, 0 incomplete, 1 ok, 0 do not apply",
        "offset",
        passport.seal[:16],
    ):
        assert text in page


def test_a_page_without_a_cost_card_says_so(tmp_path):
    _, path = passports.write(tmp_path, describe(card=None))
    assert "Not measured." in path.read_text()


def test_issue_does_it_all(tmp_path):
    passport = passports.issue(good.view, tmp_path, checks=["numerics", "fake"], seed=7)
    assert passports.read(tmp_path / "zoo_good.view.cpu.passport.json") == passport
    assert (passport.seed, passport.verdicts["ok"]) == (7, 2)
    assert passport.cost.eager_ns > 0


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
        before = passports.digests(op)
        assert passports.digests(op) == before
        change()
        assert passports.digests(op)["kernel cpu/fast"] != before["kernel cpu/fast"]


def test_the_builder_and_the_packages_are_in_the_digests(ns):
    op = declared(ns, 2.0)
    assert "builder" not in passports.digests(op)

    @op.samples
    def _(rng, sizes, dtype, device):
        return (torch.ones(sizes["n"], dtype=dtype),)

    assert "builder" in passports.digests(op)


def test_a_signature_says_who_issued_it(passport, tmp_path):
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives import serialization as form

    from shiplap.audit.signature import is_signed_by, sign

    path, _ = passports.write(tmp_path, passport)
    for name in ("mine", "another"):
        private = ed25519.Ed25519PrivateKey.generate()
        pem = private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        (tmp_path / f"{name}.pem").write_bytes(pem)
        public = private.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"{name}.pub").write_bytes(public)
    assert not is_signed_by(path, tmp_path / "mine.pub", path.read_bytes())
    sign(path, tmp_path / "mine.pem")
    assert is_signed_by(path, tmp_path / "mine.pub", path.read_bytes())
    assert not is_signed_by(path, tmp_path / "another.pub", path.read_bytes())
    path.write_bytes(path.read_bytes() + b" ")
    assert not is_signed_by(path, tmp_path / "mine.pub", path.read_bytes())
    with pytest.raises(CommandError, match="SL602: the key cannot be used"):
        sign(path, tmp_path / "mine.pub")
