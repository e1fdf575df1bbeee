"""Models with the attention that they take by default, compiled with all rewrites: no error, fewer masks, equal."""

from __future__ import annotations

import pytest
import torch

import shiplap as sl
from shiplap.rewrite.shipped import everything

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "vocab_size": 128,
    "use_cache": False,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 1, "vocab_size": 128, "use_cache": False}


@pytest.mark.parametrize(
    ("name", "options"), [("Llama", DECODER), ("Qwen3", DECODER), ("Gemma2", DECODER), ("GPT2", GPT2)]
)
def test_a_decoder_gets_no_mask(name: str, options: dict[str, int]) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    config = getattr(transformers, f"{name}Config")(**options)
    with torch.device("cuda"):
        model = getattr(transformers, f"{name}Model")._from_config(config).to(torch.bfloat16).eval()
        x = torch.randint(1, 100, (2, 64))
    with torch.no_grad(), sl.rewrites(*everything) as placed:
        got = torch.compile(lambda ids: model(ids)[0], dynamic=False)(x)
        want = model(x)[0]
    if config._attn_implementation == "sdpa":
        assert [m.rewrite for m in placed.matches].count("attention_mask") == 1
    assert float((got - want).float().norm() / want.float().norm()) < 3e-2
