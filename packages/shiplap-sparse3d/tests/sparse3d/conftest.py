"""The devices that tests of any device run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, CUDA])])
def each_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Make tensors on the CPU, and once more on a GPU."""
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)
