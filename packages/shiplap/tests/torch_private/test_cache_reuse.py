"""Keys of torch's and Triton's caches are those of other processes."""

import warnings

import torch
from torch._inductor import config

from shiplap.torch_private import dynamo


def test_checks_are_marked_and_the_assembler_is_chosen(monkeypatch):
    """Which assembler was in force depended on what the caches had, so that a second process compiled kernels again."""
    chosen = []
    monkeypatch.setattr(dynamo.triton_internals, "use_torch_assembler", lambda: chosen.append("torch's"))
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with config.patch(unsafe_marked_cacheable_functions={"mine": "1"}):
        dynamo.prepare_cache_keys()
        assert config.unsafe_marked_cacheable_functions == {"mine": "1", "torch._check": "2.11.0"}
    assert chosen == ["torch's"]


def test_newer_releases_need_no_mark(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    with config.patch(unsafe_marked_cacheable_functions={}):
        dynamo.prepare_cache_keys()
        assert config.unsafe_marked_cacheable_functions == {}


def test_a_cache_that_others_can_write_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    for mode, named in ((None, False), (0o755, False), (0o777, True)):
        if mode is not None:
            folder.mkdir(exist_ok=True)
            folder.chmod(mode)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            dynamo._name_unsafe_folder()
        assert [str(w.message) for w in given] == (
            [
                f"torch.compile loads code from {folder}, which another user could have written: {folder}: it can be "
                "written by others (mode 777); what it holds may be theirs. "
                "Set TORCHINDUCTOR_CACHE_DIR to a folder that only you can write"
            ]
            if named
            else []
        )
