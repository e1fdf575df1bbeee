"""Models of the audit on the device: inference, generated tokens and one training step are as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from shiplap_backend.models import MODELS
from shiplap_backend.models.compared import compare_model
from shiplap_testing.effort import sampled

FAST = ("bag-of-words", "experts")


@pytest.mark.parametrize("name", sampled(MODELS, long=[n for n in MODELS if n not in FAST]))
def test_a_model_is_the_cpus(dev: Any, device: str, name: str) -> None:
    package, make = MODELS[name]
    if package:
        pytest.importorskip(package)
    assert compare_model(make, device) == ""
    assert any(calls["native"] for calls in dev.counters().values())
