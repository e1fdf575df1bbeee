"""pytorch_scatter #457: the size of a scattered result comes from the largest index."""

import torch


def scatter_mean(src, index, dim_size=None):
    if dim_size is None:
        dim_size = 0 if index.numel() == 0 else int(index.max()) + 1
    out = src.new_zeros(dim_size, src.shape[1])
    out.index_add_(0, index, src)
    count = src.new_zeros(dim_size).index_add_(0, index, torch.ones_like(index, dtype=src.dtype))
    return out / count.clamp_min(1)[:, None]


@torch.compile(backend="eager")
def pool(x, batch):
    h = torch.relu(x)
    pooled = scatter_mean(h, batch)
    return pooled.sum(-1)


torch.manual_seed(0)
for graphs in (3, 4, 5):
    batch = torch.arange(12) % graphs
    pool(torch.randn(12, 6), batch)
