"""Caches of this run alone: code that an earlier run left there is not compiled, and so not rewritten, nor proven."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path_factory.mktemp("shiplap")))
        yield
