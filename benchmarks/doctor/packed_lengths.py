"""MochiWrapper #44: each prompt brings the longest length of its batch as a number in a dict."""

import torch


@torch.compile(backend="eager")
def attend(x, packed):
    longest = packed["longest"]
    return (x[:, :longest] @ x[:, :longest].mT).softmax(-1).sum(1)


x = torch.rand(2, 40, 8)
for longest in (31, 24, 18, 12):
    attend(x, {"longest": longest, "rows": torch.arange(2)})
