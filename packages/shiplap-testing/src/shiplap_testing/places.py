"""Where tests of several ranks run: where ``SHIPLAP_RANKS`` says, and all of them on one GPU if there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

SHARED_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
PLACES: list[Any] = [pytest.param("", id="given"), pytest.param("shared", id="one GPU", marks=SHARED_GPU)]
"""Values for the parameter ``kind`` of ``ranks.outcomes``."""
