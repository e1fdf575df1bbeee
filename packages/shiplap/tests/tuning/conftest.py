"""Each test has a store of its own, and no choices in force before and after it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shiplap.dispatch import tuned_choices
from shiplap.tuning import frozen_table


@pytest.fixture(autouse=True)
def store_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(frozen_table, "_made", {})
    frozen_table.thaw()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, two threads that wait for each other take what the scheduler takes
    yield tmp_path / "cache" / "tuned"
    torch.set_num_threads(threads)
    frozen_table.thaw()
    tuned_choices.observer = None
    tuned_choices.refresh_active()
