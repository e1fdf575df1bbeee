"""The shipped rewrites in models as they are published, counted as ``benchmarks/rewrite_coverage.py`` counts them.

Packages that are not installed leave their models out: timm and diffusers are not needed by anything else here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shiplap_testing.effort import sampled

pytest.importorskip("transformers")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    from _published import published
    from rewrite_coverage import look

MODELS = published()
OFTEN = ("Qwen3",)


def test_the_list_is_long_enough() -> None:
    assert len(MODELS) >= 40


@pytest.mark.docs
@pytest.mark.parametrize("name", sampled(MODELS, long=[name for name in MODELS if name not in OFTEN]))
def test_every_place_matches_and_results_and_gradients_are_those_of_eager(name: str) -> None:
    torch.manual_seed(0)
    try:
        model, inputs = MODELS[name]()
    except (ImportError, AttributeError) as e:  # a package or, in an older one, a class
        pytest.skip(str(e))
    seen = look(model, inputs)
    assert seen.hits == seen.places, [str(outcome) for outcome in seen.outcomes]
    assert sum(seen.places.values()) > 0
    assert seen.error < 1e-5
    assert seen.gradient_error < 1e-4
