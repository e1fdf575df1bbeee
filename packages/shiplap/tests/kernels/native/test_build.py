"""The secret of a user's seals, when a library has both of them, and how long it may be."""

import errno
import os
import sys
from types import SimpleNamespace

import pytest

from shiplap.kernels.native import binding, build
from shiplap.kernels.native.packed_kernel import PackedKernel


@pytest.fixture
def mask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_the_secret_and_its_folder_are_this_user_s_alone(tmp_path, mask):
    folder = tmp_path / "data" / "shiplap"
    key = build._kept_key(folder)
    assert len(key) == build.KEY_BYTES
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.listdir(folder) == ["seal.key"]
    assert (folder / "seal.key").stat().st_mode & 0o777 == 0o600
    assert build._kept_key(folder) == key
    (folder / "seal.key").chmod(0o640)
    with pytest.raises(OSError, match="it is no secret of this user"):
        build._kept_key(folder)
    (folder / "seal.key").chmod(0o600)
    for content in (key[:-1], key + b"x"):
        (folder / "seal.key").write_bytes(content)
        with pytest.raises(OSError, match="it is no secret of this user"):
            build._kept_key(folder)


def test_a_secret_of_another_user_is_none(tmp_path, monkeypatch):
    build._kept_key(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match="it is no secret of this user"):
        build._kept_key(tmp_path)


def test_a_folder_without_a_home_has_a_secret_for_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_keys", {})
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    key, why = build.user_key()
    assert why == "relative: no home folder"
    assert build.user_key() == (key, why)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    kept, why = build.user_key()
    assert (len(kept), why) == (build.KEY_BYTES, "")
    assert kept != key
    assert (tmp_path / "shiplap" / "seal.key").read_bytes() == kept


def test_a_library_needs_both_of_its_seals(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_keys", {})
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    place = tmp_path / "digest"
    place.mkdir()
    (place / build.LIBRARY).write_bytes(b"code")
    with (place / build.LIBRARY).open("rb") as library:
        seal = build.seal_text("digest", library)
    right = {build.SEAL: seal, build.KEYED_SEAL: build.keyed_seal(seal)}
    for missing in ({}, {build.SEAL}, {build.KEYED_SEAL}):
        for name, text in right.items():
            (place / name).write_text("wrong" if name in missing else text)
        assert build.is_sealed_folder(place) is (not missing)
    (place / build.KEYED_SEAL).unlink()
    assert not build.is_sealed_folder(place)


def test_a_library_may_have_256_mib(monkeypatch):
    made = SimpleNamespace(update=lambda piece: None, hexdigest=lambda: "seal")
    monkeypatch.setattr(build.hashlib, "sha256", lambda *given: made)

    def library(length):
        left = [bytes(1 << 20)] * (length >> 20) + [bytes(length & (1 << 20) - 1)]
        return SimpleNamespace(read=lambda size: left.pop(0) if left else b"")

    assert build.seal_text("digest", library(1 << 28)) == "seal"
    with pytest.raises(OSError, match="longer than 268435456 bytes"):
        build.seal_text("digest", library((1 << 28) + 1))


def test_the_notice_that_says_how_to_build(monkeypatch):
    monkeypatch.setattr(binding.registry, "command_target", lambda name: "demo.py")
    assert binding.how_to_build("demo::f") == (
        "demo::f is called through the Python binding. Where a kernel has no work, that takes about 3 times as "
        "long as a native call. "
        "Build the native binding once: op.build() in Python, 'shiplap build demo.py' in a shell, or ship it with "
        "'shiplap package'. SHIPLAP_BACKGROUND_BUILD=1 builds in the background"
    )


def test_the_messages_of_a_compiler_are_read_up_to_a_mebibyte():
    status, output = build._run_compiler([sys.executable, "-c", "print('a' * ((1 << 20) + 5)); raise SystemExit(3)"])
    assert (status, len(output)) == (3, 1 << 20)


def test_a_compiler_that_cannot_be_started_is_named(tmp_path):
    assert build._compile_source(tmp_path, "digest", "code", ["no-such-cc", "-O2"]) == (
        f"no-such-cc: {os.strerror(errno.ENOENT)}"
    )


@pytest.mark.parametrize(("status", "said"), [(0, "out of memory"), (1, "out of memory"), (-9, "SIGKILL")])
def test_a_compiler_for_which_memory_is_lacking(tmp_path, monkeypatch, status, said):
    """Scripts that start a compiler may end with 0 where it was killed."""
    monkeypatch.setattr(build, "_run_compiler", lambda call: (status, "cc1plus: out of memory"))
    problem = build._compile_source(tmp_path, "digest", "code", ["cc"])
    assert problem.startswith(build.LACKING)
    assert said in problem


def test_what_native_code_can_take_over_goes_into_a_package():
    assert not PackedKernel.by_python


def test_the_files_of_a_library_are_this_user_s_alone(tmp_path, mask):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\ncat "$3" > "$2"\n')
    compiler.chmod(0o700)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert build._compile_source(scratch, "digest", "code", [str(compiler)]) == ""
    names = {build.SOURCE, build.LIBRARY, build.SEAL, build.KEYED_SEAL}
    assert {path.name: path.stat().st_mode & 0o777 for path in scratch.iterdir()} == dict.fromkeys(names, 0o600)


def test_an_installed_binding_is_attached_before_the_first_call(monkeypatch):
    attached = []
    monkeypatch.setattr(binding, "_attach_installed", lambda op: attached.append(op) or "found")
    op = SimpleNamespace(native=None)
    monkeypatch.setenv("SHIPLAP_NATIVE", "0")
    assert binding.attach_installed_library(op) is False
    monkeypatch.setenv("SHIPLAP_NATIVE", "1")
    assert binding.attach_installed_library(op) == "found"
    monkeypatch.setattr(binding.torch.compiler, "is_compiling", lambda: True)
    assert binding.attach_installed_library(op) is False
    monkeypatch.setattr(binding.torch.compiler, "is_compiling", lambda: False)
    assert binding.attach_installed_library(SimpleNamespace(native=object())) is True
    assert attached == [op]
