"""pytorch #161119: a decoder that sees one token, then two, then many."""

import torch


@torch.compile(backend="eager")
def mix(hidden, weight):
    gate = torch.sigmoid(hidden @ weight)
    return hidden * gate


weight = torch.randn(8, 8)
for tokens in (4, 1, 2, 22, 7):
    mix(torch.randn(tokens, 8), weight)
