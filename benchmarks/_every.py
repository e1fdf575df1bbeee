"""Any model type of transformers as a small model with random weights: sizes are set by the names that configs use.

Not every type can be built so: a config that checks its sizes, or a model with inputs of its own, raises.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers as t
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

__all__ = ["build", "kinds"]

Options = dict[str, Any]

NAMES: dict[Any, str] = {
    32: "hidden_size d_model n_embd dim embed_dim encoder_embed_dim projection_dim embedding_size vision_embed_dim "
    "hidden_dim text_embed_dim width decoder_hidden_size encoder_hidden_size mask_feature_size feature_size output_dim "
    "out_hidden_size conv_dim_out decoder_dim fusion_hidden_size image_size img_size max_target_positions",
    64: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner dim_feedforward intermediate_dim "
    "mlp_dim shared_expert_intermediate_size moe_intermediate_size ffn_hidden_size max_position_embeddings n_positions",
    1: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers topk_group "
    "num_decoder_layers depth text_layers bos_token_id decoder_start_token_id cls_token_id",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts sliding_window qk_rope_head_dim rotary_dim attention_window",
    2: "num_key_value_heads num_kv_heads multi_query_group_num num_experts_per_tok moe_k n_group eos_token_id "
    "sep_token_id",
    8: "head_dim d_kv attention_head_dim kv_channels global_head_dim patch_size query_pre_attn_scalar qk_nope_head_dim "
    "v_head_dim hidden_size_per_layer_input",
    16: "q_lora_rank kv_lora_rank num_mel_bins",
    100: "vocab_size text_vocab_size vocab_size_per_layer_input",
    20: "max_source_positions",
    0: "pad_token_id num_kv_shared_layers",
    95: "image_token_id image_token_index",
    96: "video_token_id",
    97: "audio_token_id",
}
SIZES: Options = {name: size for size, names in NAMES.items() for name in names.split()}
SIZES |= {"use_cache": False, "attention_dropout": 0.0, "mask_token_id": 3}
OPTIONAL = ("q_lora_rank", "sliding_window", "num_key_value_heads", "head_dim", "n_inner")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
MOST = 30_000_000  # parameters
TOWERS = ("clip", "siglip", "siglip2", "chinese_clip", "align", "altclip", "groupvit", "blip", "clipseg", "owlvit")


def kinds() -> list[str]:
    """The model types that have a config and a model."""
    return [kind for kind in MODEL_MAPPING_NAMES if kind in CONFIG_MAPPING_NAMES]


def _small(cls: Any) -> Options:
    """Options that make a config of ``cls`` small, its inner configs as well."""
    names = {n for base in cls.__mro__ for n in getattr(base, "__annotations__", {})}
    names |= {*inspect.signature(cls.__init__).parameters}
    try:
        usual: Any = cls()
    except Exception:
        usual = None
    made: Options = {}
    for name in names & SIZES.keys():
        held = getattr(usual, name, None)
        if (held is None and name in OPTIONAL) or isinstance(held, dict):
            continue
        if isinstance(held, (list, tuple)):
            if name in ("image_size", "img_size", "patch_size"):
                made[name] = type(held)([SIZES[name]] * len(held))
        elif not isinstance(held, bool) or isinstance(SIZES[name], bool):
            made[name] = SIZES[name]
    for name in ("layer_types", "layers_block_type", "attn_layer_types"):
        if name in names and getattr(usual, name, None):
            made[name] = list(dict.fromkeys(getattr(usual, name)))[:2]
            made |= {n: len(made[name]) for n in LAYERS if n in made}
    if {"qk_rope_head_dim", "head_dim"} <= made.keys():
        made["head_dim"] = made["qk_rope_head_dim"]
    for name, inner in (getattr(cls, "sub_configs", None) or {}).items():
        held = getattr(usual, name, None)
        made[name] = _small(inner if held is None else type(held))
    return made


def build(kind: str) -> tuple[Any, Options]:
    """A model of one type, with eager attention, and its arguments. Raises what transformers raises."""
    torch.manual_seed(0)
    cls = CONFIG_MAPPING[kind]
    config = cls(**_small(cls))
    name = MODEL_MAPPING_NAMES[kind]
    model = getattr(t, name if isinstance(name, str) else name[0])._from_config(config, attn_implementation="eager")
    if (count := sum(p.numel() for p in model.parameters())) > MOST:
        raise ValueError(f"{count} parameters are too many")
    return model.eval(), _inputs(kind, config, inspect.signature(model.forward).parameters)


def _inputs(kind: str, config: Any, names: Any) -> Options:
    made: Options = {}
    if "input_ids" in names:
        made["input_ids"] = torch.randint(5, 90, (2, 8))
        if "attention_mask" in names:
            made["attention_mask"] = torch.tensor([[1] * 6 + [0] * 2, [1] * 8])
    if "decoder_input_ids" in names:
        made["decoder_input_ids"] = torch.randint(5, 90, (2, 6))
    if "pixel_values" in names and ("input_ids" not in names or kind in TOWERS):
        seen = getattr(config, "vision_config", None) or config
        size = getattr(seen, "image_size", None) or 32
        height, width = (size if isinstance(size, (list, tuple)) else (size, size))[:2]
        made["pixel_values"] = torch.randn(2, getattr(seen, "num_channels", 3) or 3, height, width)
    if "input_features" in names:
        heard = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
        made["input_features"] = torch.randn(2, getattr(heard, "num_mel_bins", 16) or 16, 40)
    if "input_values" in names and "input_ids" not in names:
        made["input_values"] = torch.randn(2, 1600)
    return made
