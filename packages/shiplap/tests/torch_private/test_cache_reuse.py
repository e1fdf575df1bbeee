"""Keys of torch's and Triton's caches are those of other processes."""

import torch
from torch._inductor import config

from shiplap.torch_private import cache_reuse


def test_checks_are_marked_and_the_assembler_is_chosen(monkeypatch):
    """Which assembler was in force depended on what the caches had, so that a second process compiled kernels again."""
    chosen = []
    monkeypatch.setattr(cache_reuse.triton_assembler, "use_torchs", lambda: chosen.append("torch's"))
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with config.patch(unsafe_marked_cacheable_functions={"mine": "1"}):
        cache_reuse.prepare_cache_keys()
        assert config.unsafe_marked_cacheable_functions == {"mine": "1", "torch._check": "2.11.0"}
    assert chosen == ["torch's"]


def test_newer_releases_need_no_mark(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    with config.patch(unsafe_marked_cacheable_functions={}):
        cache_reuse.prepare_cache_keys()
        assert config.unsafe_marked_cacheable_functions == {}
