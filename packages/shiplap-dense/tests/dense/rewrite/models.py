"""Six architectures of transformers from their configs, with random weights: small, with every part that they have.

Whoever has transformers can build them: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as t
from torch import nn
from torch.nn.utils import parametrize

TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 64}
DECODER = {**TEXT, "num_key_value_heads": 2, "use_cache": False}
IMAGE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def _text(model: nn.Module, **more: torch.Tensor) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return model, {"input_ids": torch.randint(0, 100, (2, 8)), **more}


def _image(model: nn.Module, size: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return model, {"pixel_values": torch.randn(2, 3, size, size)}


def _bert() -> Any:
    return _text(t.BertModel(t.BertConfig(**TEXT)), attention_mask=torch.ones(2, 8, dtype=torch.long))


def _resnet() -> Any:
    widths = [16, 32, 32, 64]
    return _image(t.ResNetModel(t.ResNetConfig(embedding_size=8, hidden_sizes=widths, depths=[3, 4, 6, 3])), 32)


def _clip() -> Any:
    text = {**TEXT, "max_position_embeddings": 17, "eos_token_id": 99, "bos_token_id": 98, "pad_token_id": 97}
    model = t.CLIPModel(t.CLIPConfig(text_config=text, vision_config={**IMAGE, "image_size": 32, "patch_size": 8}))
    return model, {"input_ids": torch.randint(0, 97, (2, 17)), "pixel_values": torch.randn(2, 3, 32, 32)}


MODELS: dict[str, Callable[[], Any]] = {
    "bert": _bert,
    "llama": lambda: _text(t.LlamaForCausalLM(t.LlamaConfig(**DECODER))),
    "mixtral": lambda: _text(t.MixtralModel(t.MixtralConfig(**DECODER, num_local_experts=4))),
    "resnet50": _resnet,
    "vit": lambda: _image(t.ViTModel(t.ViTConfig(**IMAGE, image_size=32, patch_size=8)), 32),
    "clip": _clip,  # beside the six: two towers of one width, which batch_linear merges
    "convnext": lambda: _image(
        t.ConvNextModel(t.ConvNextConfig(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 2, 1])), 32
    ),
}


class Dequantised(nn.Module):
    """A parametrization: weights of 8 bits with a scale per output channel."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        scale = weight.detach().abs().amax(1, keepdim=True).clamp_min(1e-6) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (weight.detach() / scale).round().to(torch.int8))

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.weight.to(torch.float32) * self.scale


def quantise(model: nn.Module) -> nn.Module:
    """Weights of all linear layers as int8, unpacked where they are used."""
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            parametrize.register_parametrization(module, "weight", Dequantised(module.weight))
    return model


def build(name: str, *, train: bool = False) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and arguments. Attention is written out; dropout drops nothing, so that runs can be compared."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    if name not in ("resnet50", "convnext"):
        model.set_attn_implementation("eager")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train(train), inputs
