"""Distributions and libraries on which evidence about an op depends beside its own code."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import torch

from shiplap.declare.code_walk import libraries_used
from shiplap.dispatch import Op


@lru_cache(maxsize=2)
def _owners(searched: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Return a mapping from each top-level package of the installed distributions to the names of the distributions
    that provide it. The result is cached, since reading all metadata takes 0.3 s. ``searched`` must be the folders of
    ``sys.path``, and is the key of the cache.
    """
    return packages_distributions()


def versions_of_packages_used(op: Op) -> dict[str, str]:
    """Return a dict from names of installed distributions to their versions. It has those whose code the op or its
    builder of samples uses.
    """
    modules = libraries_used(op, op.sampler)
    owners = _owners(tuple(sys.path))
    versions = {}
    for distribution in sorted({d for m in modules for d in owners.get(m, ())}):
        try:
            versions[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    return versions


def digests_of_op_libraries() -> dict[str, str]:
    """Return a dict from file name to SHA-256 digest for the libraries that registered operators in this process. All
    of them are needed, because an op that is only declared here may come from any of them.
    """
    paths = sorted(Path(p) for p in torch.ops.loaded_libraries)
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in paths if p.is_file()}
