"""Converted models as packages: a C++ program without Python gives the results of eager calls."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shiplap_slidesparse as ss
from shiplap.packaging import package_model
from shiplap_testing.deployed import compiled_runner, need_packages, run_without_python
from tests.slidesparse.models import TOKENS, llama, mixtral


class Logits(nn.Module):
    """A model of transformers from tokens to logits."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens, use_cache=False).logits


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.long
@pytest.mark.parametrize("make", [llama, mixtral])
def test_a_converted_model_is_one_package_that_a_program_without_python_runs(make: Any, tmp_path: Path) -> None:
    need_packages("cpu")
    net = make()
    ss.convert(net)
    model = Logits(net)
    with torch.no_grad():
        package = package_model(torch.export.export(model, (TOKENS,)), tmp_path / "model.pt2").path
        scenes = [((tokens,), (model(tokens),)) for tokens in (TOKENS, TOKENS.flip(1), (TOKENS * 7 + 3) % 64)]
    done = run_without_python(compiled_runner(tmp_path, "cpu"), package, scenes, "cpu", 1e-5)
    message = done.stdout + done.stderr
    print(message)
    assert message.endswith("equal\n"), message
