"""Models of transformers, timm and diffusers as they are published: from their configs, one layer, random weights.

Each entry returns a model and its arguments by name. Whoever has the packages can build them: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as t

__all__ = ["Built", "published"]

Built = tuple[Any, dict[str, Any]]

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
IMAGE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
BOTH = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "d_model": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
HEADS = {"head_dim": 8}
SHORT = {"n_layer": 1, "n_head": 4, "vocab_size": 100, "use_cache": False}
WINDOWS: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
CAPPED = {**HEADS, "query_pre_attn_scalar": 8, "sliding_window": 4}
DECODERS: dict[str, dict[str, Any]] = {
    **{key: {} for key in ("Llama", "Qwen2", "Phi", "Phi3", "Olmo2", "Granite", "Cohere", "StableLm")},
    **{key: {} for key in ("Starcoder2", "GPTNeoX", "SmolLM3", "Nemotron", "Olmo", "Persimmon", "Cohere2", "Exaone4")},
    **dict.fromkeys(("Qwen3", "Gemma", "Glm", "Glm4", "Helium", "Ernie4_5"), HEADS),
    "GptOss": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma3": {**HEADS, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "CodeGen": {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "Mistral": {"sliding_window": 4},
    "Mixtral": {"num_local_experts": 4},
    "Gemma2": CAPPED,
}
ENCODERS = ("Bert", "Roberta", "Esm", "RoFormer", "Electra", "Albert", "DebertaV2", "ModernBert", "MPNet")
PICTURES = ("ViT", "DeiT", "Beit")
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 4}
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": SMALL,
    "eva02_tiny_patch14_224": SMALL,
    "beit_base_patch16_224": SMALL,
    "deit3_small_patch16_224": SMALL,
    "cait_xxs24_224": {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 4},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": (2,),
        "num_heads": (2,),
        "window_size": 4,
    },
}


def _ids(tokens: int = 8) -> torch.Tensor:
    return torch.randint(3, 90, (2, tokens))


def _padded(tokens: int = 8) -> torch.Tensor:
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[0, -2:] = 0
    return mask


def _config(name: str) -> str:
    return "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"


def _built(name: str, config: str, options: dict[str, Any], **inputs: Any) -> Built:
    made = getattr(t, name)._from_config(getattr(t, config)(**options), attn_implementation="eager")
    return made.eval(), inputs


def _transformers() -> Iterator[tuple[str, Callable[[], Built]]]:
    pixels = {"pixel_values": torch.randn(2, 3, 32, 32)}
    padded = {"input_ids": _ids(), "attention_mask": _padded()}
    for name, more in DECODERS.items():
        options = {**GROUPED, **more}
        yield name, lambda n=name, o=options: _built(f"{n}ForCausalLM", _config(n), o, input_ids=_ids())  # type: ignore[misc]
    for name in ENCODERS:
        options = {**TEXT, "pad_token_id": 0, **({"position_embedding_type": "rotary"} if name == "Esm" else {})}
        yield name, lambda n=name, o=options: _built(f"{n}Model", f"{n}Config", o, **padded)  # type: ignore[misc]
    for name in PICTURES:
        yield name, lambda n=name: _built(f"{n}Model", f"{n}Config", IMAGE, **pixels)  # type: ignore[misc]
    others: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
        "GPT2": ("GPT2LMHeadModel", "GPT2Config", {**SHORT, "n_embd": 32, "n_positions": 64}, padded),
        "GPTJ": (
            "GPTJForCausalLM",
            "GPTJConfig",
            {**SHORT, "n_embd": 32, "n_positions": 64, "rotary_dim": 4},
            {"input_ids": _ids()},
        ),
        "Bloom": ("BloomForCausalLM", "BloomConfig", {**SHORT, "hidden_size": 32}, {"input_ids": _ids()}),
        "Falcon": ("FalconForCausalLM", "FalconConfig", TEXT, {"input_ids": _ids()}),
        "Mpt": (
            "MptForCausalLM",
            "MptConfig",
            {"d_model": 32, "n_layers": 1, "n_heads": 4, "vocab_size": 100, "max_seq_len": 64, "use_cache": False},
            {"input_ids": _ids()},
        ),
        "DistilBert": (
            "DistilBertModel",
            "DistilBertConfig",
            {"dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 4, "vocab_size": 100},
            padded,
        ),
        "T5": (
            "T5Model",
            "T5Config",
            {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 100},
            {**padded, "decoder_input_ids": _ids(6)},
        ),
        "Bart": ("BartModel", "BartConfig", {**BOTH, "vocab_size": 100}, padded),
        "Marian": (
            "MarianModel",
            "MarianConfig",
            {**BOTH, "vocab_size": 100},
            {**padded, "decoder_input_ids": _ids(6)},
        ),
        "Whisper": (
            "WhisperModel",
            "WhisperConfig",
            {**BOTH, "vocab_size": 100, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32},
            {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": _ids(6)},
        ),
        "Swin": ("SwinModel", "SwinConfig", WINDOWS, pixels),
        "Swinv2": ("Swinv2Model", "Swinv2Config", WINDOWS, pixels),
        "Dinov2": ("Dinov2Model", "Dinov2Config", {k: v for k, v in IMAGE.items() if k != "intermediate_size"}, pixels),
        "Siglip": (
            "SiglipModel",
            "SiglipConfig",
            {"text_config": TEXT, "vision_config": IMAGE},
            {"input_ids": _ids(17), **pixels},
        ),
        "Blip": (
            "BlipModel",
            "BlipConfig",
            {"text_config": {**TEXT, "encoder_hidden_size": 32}, "vision_config": IMAGE},
            {"input_ids": _ids(9), "attention_mask": _padded(9), **pixels},
        ),
        "Mamba": (
            "MambaForCausalLM",
            "MambaConfig",
            {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 100, "state_size": 4, "use_cache": False},
            {"input_ids": _ids()},
        ),
    }
    for name, (model, config, options, inputs) in others.items():
        yield name, lambda m=model, c=config, o=options, i=inputs: _built(m, c, o, **i)  # type: ignore[misc]


def _timm(name: str) -> Built:
    import timm
    from timm.layers import set_fused_attn

    set_fused_attn(False)
    return timm.create_model(name, pretrained=False, **TIMM[name]).eval(), {"x": torch.randn(2, 3, 32, 32)}


def _diffusers(name: str) -> Built:
    import diffusers
    from diffusers.models.attention_processor import Attention, AttnProcessor

    options: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 1, "norm_num_groups": 4}
    inputs: dict[str, Any] = {"hidden_states": torch.randn(2, 32, 4, 4), "return_dict": False}
    if name == "DiTTransformer2DModel":
        options |= {"in_channels": 4, "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10}
        inputs |= {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 4])}
        inputs["class_labels"] = torch.tensor([1, 2])
    else:
        options |= {"in_channels": 32, "cross_attention_dim": 16}
        inputs["encoder_hidden_states"] = torch.randn(2, 5, 16)
    model = getattr(diffusers, name)(**options).eval()
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_processor(AttnProcessor())
    return model, inputs


def published() -> dict[str, Callable[[], Built]]:
    """All models by name."""
    models = dict(_transformers())
    models |= {f"timm {name}": (lambda n=name: _timm(n)) for name in TIMM}  # type: ignore[misc]
    for name in ("DiTTransformer2DModel", "Transformer2DModel"):
        models[f"diffusers {name}"] = lambda n=name: _diffusers(n)  # type: ignore[misc]
    return models
