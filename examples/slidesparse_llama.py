"""A model of Hugging Face transformers with 6:8 weights: converted while it is loaded,
saved, loaded again.

Run it: python examples/slidesparse_llama.py
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import shiplap_slidesparse as slidesparse
from shiplap_slidesparse import hf

folder = Path(tempfile.mkdtemp())
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
# stands for a model of yours
LlamaForCausalLM(config).save_pretrained(folder / "dense")
tokens = torch.arange(12)[None]

# --8<-- [start:convert]
model = AutoModelForCausalLM.from_pretrained(folder / "dense")
done = slidesparse.convert(model, dtype="int8", skip=("lm_head",), example=tokens)
print(done)  # what was converted, how far outputs are off, what was kept and why
# --8<-- [end:convert]

# --8<-- [start:hf]
hf.register()  # once in each process, before from_pretrained
model = AutoModelForCausalLM.from_pretrained(
    folder / "dense",
    quantization_config=hf.SlidesparseConfig(pattern="6:8", dtype="int8"),
)
# pruned dense weights in int8, and their scales
model.save_pretrained(folder / "sparse")
reloaded = AutoModelForCausalLM.from_pretrained(folder / "sparse")
# --8<-- [end:hf]

with torch.no_grad():
    assert torch.equal(reloaded(tokens).logits, model(tokens).logits)
print("reloaded: the same bits")
