"""A program: a converted Llama generates in vLLM, by its plugin, what it generates in transformers."""

from __future__ import annotations

import os
import sys

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_PLUGINS="slidesparse",
    HF_HUB_OFFLINE="1",
)

import torch

import shiplap_slidesparse as ss
from shiplap_slidesparse import hf
from tests.slidesparse.models import llama

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 7, 2, 50, 30]]
SIZES = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}


def main(folder: str) -> None:
    from vllm import LLM, SamplingParams

    net = llama(**SIZES, max_position_embeddings=128).to(torch.bfloat16)
    with torch.no_grad():
        net.lm_head.weight.mul_(20)  # so that no two tokens are nearly as likely
    hf.attach(net, ss.convert(net))
    net.save_pretrained(folder)
    wanted = []
    for prompt in PROMPTS:
        out = net.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        wanted.append(out[0, len(prompt) :].tolist())
    model = LLM(
        folder, dtype="bfloat16", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, max_num_seqs=4
    )
    greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    found = [
        list(each.outputs[0].token_ids) for each in model.generate([{"prompt_token_ids": p} for p in PROMPTS], greedy)
    ]
    print("equal" if found == wanted else f"{found}, wanted {wanted}")


if __name__ == "__main__":
    main(sys.argv[1])
