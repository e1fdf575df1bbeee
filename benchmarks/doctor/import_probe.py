"""TabPFN #1166: whether a fast kernel is installed is found out by an import inside of the compiled region."""

import torch


def fast_kernel():
    try:
        import no_such_attention_package  # noqa: F401
    except ImportError:
        return False
    return True


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if fast_kernel():
            return q
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


attention = torch.compile(Attention(), backend="eager")
for _ in range(2):
    attention(torch.randn(2, 5, 8))
