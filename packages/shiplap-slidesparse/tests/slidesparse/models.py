"""Small models to convert, and one of Hugging Face transformers from a configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])


def mlp(k: int = 48, n: int = 40) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(k, n), nn.GELU(), nn.Linear(n, k, bias=False)).eval()


def model() -> nn.Module:
    """What the command line imports."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 48), *mlp(), nn.Linear(48, 32)).eval()


def overflowing() -> nn.Module:
    """Its logits are too far apart for a perplexity."""
    net = model()
    net[-1].weight.data.mul_(1e6)
    return net


def layer_of(size: int) -> nn.Module:
    """Not what the command line can call."""
    return nn.Linear(size, size)


def llama(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes)).eval()


def mixtral(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "use_cache": False}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes | heads | changes)).eval()
