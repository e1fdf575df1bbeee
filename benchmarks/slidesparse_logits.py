"""Errors of logits in 8 bits beside torchao's W8A8, on four models of transformers with random weights.

    python benchmarks/slidesparse_logits.py [--torchao FOLDER] [--json benchmarks/results/slidesparse_logits.json]

Needs torchao, and transformers. A Llama, a mixture (Mixtral), BERT and ViT are converted by ``slidesparse.convert`` and
by ``torchao.quantize_`` with one scale per channel and per token, both in int8; embeddings and heads are kept. An error
is the norm of the change of the logits over the norm of the logits, the mean of seeds. torchao leaves the weights of
experts as they are, so a second row of the mixture converts the attention alone in both. Goal: at most 1.1 times.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _record
import torch
from torch import Tensor, nn

import shiplap_slidesparse as ss

SOURCES = [
    "benchmarks/slidesparse_logits.py",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/convert.py",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/quantise.py",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/layers.py",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/experts.py",
]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
HEADS = ("lm_head", "classifier", "cls", "pooler", "score")  # kept by both


def models() -> dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]]:
    """Return of each model what makes it and its inputs."""
    import transformers as t

    words = {"vocab_size": 512, "max_position_embeddings": 256, **SIZES}
    shared = {"num_key_value_heads": 4, "use_cache": False}
    pixels = {"image_size": 64, "patch_size": 8, "num_labels": 64, **SIZES}

    def tokens() -> dict[str, Tensor]:
        return {"input_ids": torch.randint(0, 512, (4, 96))}

    def mixture() -> nn.Module:
        return t.MixtralForCausalLM(t.MixtralConfig(**words, **shared, num_local_experts=8))

    return {
        "Llama": (lambda: t.LlamaForCausalLM(t.LlamaConfig(**words, **shared)), tokens),
        "Mixtral": (mixture, tokens),
        "Mixtral, attention": (mixture, tokens),
        "BERT": (lambda: t.BertForMaskedLM(t.BertConfig(**words)), tokens),
        "ViT": (
            lambda: t.ViTForImageClassification(t.ViTConfig(**pixels)),
            lambda: {"pixel_values": torch.randn(8, 3, 64, 64)},
        ),
    }


def is_converted(module: nn.Module, name: str) -> bool:
    """Return whether both convert a module."""
    return isinstance(module, nn.Linear) and not any(head in name.split(".") for head in HEADS)


def relative_error(net: nn.Module, inputs: dict[str, Tensor], exact: Tensor) -> float:
    """Return the norm of the change of the logits over their norm."""
    return float((net(**inputs).logits - exact).norm() / exact.norm())


def compare(make: Callable[[], nn.Module], draw: Callable[[], dict[str, Tensor]], seed: int, skip: list[str]) -> Any:
    """Return the errors of both with one seed, and the share of the parameters that we converted."""
    from torchao import quantization as ao

    torch.manual_seed(seed)
    net, inputs = make().eval(), draw()
    exact = net(**inputs).logits
    ours, theirs = copy.deepcopy(net), copy.deepcopy(net)
    kept = [name for name, m in net.named_modules() if isinstance(m, nn.Linear) and not is_converted(m, name)]
    done = ss.convert(ours, skip=[*kept, *skip], progress=False)
    ao.quantize_(theirs, ao.Int8DynamicActivationInt8WeightConfig(), filter_fn=is_converted)
    return relative_error(ours, inputs, exact), relative_error(theirs, inputs, exact), done.share


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--torchao", type=Path, help="a folder with torchao")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    if given.torchao:
        sys.path.insert(0, str(given.torchao))
    import torchao

    rows = []
    for name, (make, draw) in models().items():
        skip = ["*.mlp.experts"] if name.endswith("attention") else []
        found = torch.tensor([compare(make, draw, seed, skip) for seed in range(given.seeds)])
        ours, theirs, share = (float(value) for value in found.mean(0))
        ratio = round(ours / theirs, 3)
        rows.append({"model": name, "int8": round(ours, 5), "torchao": round(theirs, 5), "ratio": ratio})
        rows[-1]["worst_ratio"] = round(float((found[:, 0] / found[:, 1]).max()), 3)
        rows[-1]["converted"] = round(share, 3)
        print(rows[-1], flush=True)
    if given.json:
        _record.write(
            given.json,
            _record.record(SOURCES, ["transformers"], torchao=torchao.__version__, seeds=given.seeds, rows=rows),
        )


if __name__ == "__main__":
    main()
