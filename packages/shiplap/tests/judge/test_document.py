"""A verdict as a signed file."""

import json

import pytest

from shiplap.errors import JudgeError
from shiplap.judge import Ruling, read_verdict, write_verdict

RULING = Ruling("ref.py:f", "fast.py:g", (), (), ("time",), (), 12, 1.5)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "ref.py").write_text("def f(x): return x\n")
    (tmp_path / "fast.py").write_text("def g(x): return x\n")
    return f"{tmp_path}/ref.py:f", f"{tmp_path}/fast.py:g"


@pytest.fixture
def keys(tmp_path):
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives import serialization as form

    for name in ("mine", "another"):
        private = ed25519.Ed25519PrivateKey.generate()
        pem = private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        (tmp_path / f"{name}.pem").write_bytes(pem)
        public = private.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"{name}.pub").write_bytes(public)
    return tmp_path


def test_a_verdict_reads_back_with_the_digests_of_its_files(files, tmp_path):
    path = tmp_path / "verdict.json"
    assert write_verdict(path, RULING, *files) == [path]
    content = read_verdict(path)
    assert (content["verdict"], content["calls"]) == ("accepted", 12)
    assert len(content["files"]["candidate"]) == 64
    assert content["files"]["candidate"] != content["files"]["reference"]
    assert "torch" in content["facts"]


def test_an_edited_verdict_is_not_believed(files, keys):
    path = keys / "verdict.json"
    _, signature = write_verdict(path, RULING, *files, sign=keys / "mine.pem")
    assert read_verdict(path, signed_by=keys / "mine.pub")["verdict"] == "accepted"
    with pytest.raises(JudgeError, match="SL311"):
        read_verdict(path, signed_by=keys / "another.pub")
    path.write_text(path.read_text().replace('"calls": 12', '"calls": 13'))
    with pytest.raises(JudgeError, match="SL311"):
        read_verdict(path, signed_by=keys / "mine.pub")
    signature.unlink()
    with pytest.raises(JudgeError, match="SL311"):
        read_verdict(path, signed_by=keys / "mine.pub")


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"format": "shiplap-verdict/0"})])
def test_what_is_no_verdict_is_refused(content, tmp_path):
    path = tmp_path / "verdict.json"
    path.write_text(content)
    with pytest.raises(JudgeError, match="SL311"):
        read_verdict(path)
