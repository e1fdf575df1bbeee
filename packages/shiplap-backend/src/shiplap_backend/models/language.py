"""Models of `transformers`: unmodified, small, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shiplap_backend.models.case import CaseMaker, ModelCase

WORDS = 61  # of the vocabulary


def _output_loss(output: Any) -> Tensor:
    """Return the loss that a transformers model has computed itself."""
    loss: Tensor = output.loss
    return loss


def _causal_model(kind: str, **options: Any) -> CaseMaker:
    """Return a function that creates the test case of the language model ``kind`` of transformers, such as ``Llama``.

    The model is small, and ``options`` are fields of its configuration. The case compares the logits, the loss of the
    model's own input, and a few generated tokens.
    """

    def make() -> ModelCase:
        """Return the test case with a new model and random tokens."""
        import transformers

        common = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = getattr(transformers, f"{kind}Config")(**{**common, **options})
        # Numbers below 3 are special tokens.
        ids = torch.randint(3, WORDS, (2, 9))
        mask = torch.ones_like(ids)
        mask[0, :3] = 0  # padded on the left, as for generation
        given = {"input_ids": ids, "attention_mask": mask}
        if kind == "Mamba":
            given.pop("attention_mask")
        module = getattr(
            transformers, next(n for n in (f"{kind}ForCausalLM", f"{kind}LMHeadModel") if hasattr(transformers, n))
        )
        more = {**given, "max_new_tokens": 5, "do_sample": False}
        return ModelCase(module(config), kwargs=given, train={"labels": ids}, loss=_output_loss, generate=more)

    return make


LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}


def _bert_case() -> ModelCase:
    """Return the test case of a small BERT classifier, with one padded sequence."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        # Dropout would draw different numbers on each device.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    given = {"input_ids": torch.randint(WORDS, (2, 9)), "attention_mask": mask}
    return ModelCase(
        BertForSequenceClassification(config), kwargs=given, train={"labels": torch.tensor([0, 1])}, loss=_output_loss
    )


def _t5_case() -> ModelCase:
    """Return the test case of a small T5, whose generated tokens are compared, too."""
    from transformers import T5Config, T5ForConditionalGeneration

    start: dict[str, Any] = {"decoder_start_token_id": 0}
    config = T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        **start,
    )
    ids, labels = torch.randint(3, WORDS, (2, 9)), torch.randint(3, WORDS, (2, 6))
    more = {"input_ids": ids, "max_new_tokens": 5, "do_sample": False}
    given = {"input_ids": ids, "labels": labels}
    return ModelCase(T5ForConditionalGeneration(config), kwargs=given, loss=_output_loss, generate=more)


def _whisper_case() -> ModelCase:
    """Return the test case of a small Whisper on random spectrograms."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=30,
        max_target_positions=24,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    given = {"input_features": torch.randn(2, 8, 60), "labels": torch.randint(3, WORDS, (2, 6))}
    return ModelCase(WhisperForConditionalGeneration(config), kwargs=given, loss=_output_loss)


def _vit_case() -> ModelCase:
    """Return the test case of a small vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    classes: dict[str, Any] = {"num_labels": 5}
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
        **classes,
    )
    given = {"pixel_values": torch.randn(2, 3, 32, 32)}
    return ModelCase(
        ViTForImageClassification(config), kwargs=given, train={"labels": torch.tensor([1, 2])}, loss=_output_loss
    )


def _resnet_case() -> ModelCase:
    """Return the test case of a small ResNet."""
    from transformers import ResNetConfig, ResNetForImageClassification

    classes: dict[str, Any] = {"num_labels": 5}
    config = ResNetConfig(depths=[1, 2, 1], hidden_sizes=[16, 32, 48], embedding_size=8, **classes)
    given = {"pixel_values": torch.randn(2, 3, 32, 32)}
    return ModelCase(
        ResNetForImageClassification(config), kwargs=given, train={"labels": torch.tensor([1, 2])}, loss=_output_loss
    )


def _clip_case() -> ModelCase:
    """Return the test case of a small CLIP on random pairs of texts and images."""
    from transformers import CLIPConfig, CLIPModel

    common = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**common, "vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    vision = {**common, "image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    given = {"input_ids": torch.randint(3, WORDS, (3, 7)), "pixel_values": torch.randn(3, 3, 32, 32)}
    return ModelCase(CLIPModel(config), kwargs=given, train={"return_loss": True}, loss=_output_loss)


MODELS: dict[str, CaseMaker] = {
    "bert": _bert_case,
    "gpt2": _causal_model("GPT2", **GPT2),
    "llama": _causal_model("Llama", **LLAMA),
    "mistral": _causal_model("Mistral", **LLAMA, sliding_window=4),
    "qwen3": _causal_model("Qwen3", **LLAMA, head_dim=8),
    "gemma2": _causal_model("Gemma2", **LLAMA, head_dim=8, sliding_window=4),
    "mixtral": _causal_model("Mixtral", **LLAMA, num_local_experts=4),
    "mamba": _causal_model("Mamba", hidden_size=32, state_size=4, num_hidden_layers=2),
    "t5": _t5_case,
    "whisper": _whisper_case,
    "hf-vit": _vit_case,
    "hf-resnet": _resnet_case,
    "clip": _clip_case,
}
