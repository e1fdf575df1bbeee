"""Models of transformers, unmodified and small, with inputs and labels: what a device has to run as the CPU does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Case = tuple[torch.nn.Module, dict[str, torch.Tensor], torch.Tensor]


def resnet(small: bool) -> Case:
    """ResNet-50's blocks (bottlenecks 3, 4, 6, 3); ``small`` has fewer channels and pixels."""
    from transformers import ResNetConfig, ResNetForImageClassification

    narrow: dict[str, Any] = {"hidden_sizes": [32, 64, 96, 128], "embedding_size": 16} if small else {}
    config = ResNetConfig(depths=[3, 4, 6, 3], num_labels=10, **narrow)
    pixels = 64 if small else 224
    return (
        ResNetForImageClassification(config),
        {"pixel_values": torch.randn(2, 3, pixels, pixels)},
        torch.tensor([1, 2]),
    )


def bert(small: bool) -> Case:
    """BERT-base; ``small`` has three narrow layers. No dropout, so that a training step can be compared."""
    from transformers import BertConfig, BertForSequenceClassification

    narrow: dict[str, Any] = (
        {
            "hidden_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 192,
            "vocab_size": 200,
        }
        if small
        else {}
    )
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **narrow)
    length = 12 if small else 128
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, length // 2 :] = 0
    ids = torch.randint(0, config.vocab_size, (2, length))
    return BertForSequenceClassification(config), {"input_ids": ids, "attention_mask": mask}, torch.tensor([0, 1])


def llama(small: bool) -> Case:
    """A Llama of two layers with grouped heads; ``small`` is narrow."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 64 if small else 512
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=200,
        use_cache=False,
    )
    ids = torch.randint(0, 200, (2, 10 if small else 128))
    return LlamaForCausalLM(config), {"input_ids": ids}, ids


MODELS: dict[str, Callable[[bool], Case]] = {"resnet50": resnet, "bert-base": bert, "llama": llama}
