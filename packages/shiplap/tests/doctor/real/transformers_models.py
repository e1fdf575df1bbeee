"""Two randomly initialised transformers: Longformer, Wav2Vec2 in training.

Longformer asks in Python whether any token attends globally; Wav2Vec2 lets NumPy pick masks, and chance pick layers.
"""

import torch
from transformers import LongformerConfig, LongformerModel, Wav2Vec2Config, Wav2Vec2Model

torch.manual_seed(0)
text = LongformerConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    attention_window=4,
    max_position_embeddings=64,
)
speech = Wav2Vec2Config(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    conv_dim=(16, 16),
    conv_stride=(5, 2),
    conv_kernel=(10, 3),
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    mask_time_length=2,
)
with torch.no_grad():
    torch.compile(LongformerModel(text).eval(), backend="eager")(input_ids=torch.randint(5, 90, (1, 16)))
    torch.compile(Wav2Vec2Model(speech).train(), backend="eager")(input_values=torch.randn(1, 400))
