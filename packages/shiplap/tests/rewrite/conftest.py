"""Caches of this run alone: code that an earlier run left there is not compiled, and so not rewritten, nor proven."""

from collections.abc import Iterator, Mapping

import pytest


@pytest.fixture(scope="session")
def new_caches(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")),
        "SHIPLAP_CACHE_DIR": str(tmp_path_factory.mktemp("shiplap")),
    }


@pytest.fixture(autouse=True, scope="module")
def own_caches(new_caches: Mapping[str, str]) -> Iterator[None]:
    """All files of this folder share them. The other tests of the worker keep theirs, which have more in them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in new_caches.items():
            patch.setenv(name, folder)
        yield
