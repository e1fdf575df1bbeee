"""prime-rl #996: token counts of experts become a list that splits the tokens."""

import torch


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x, counts):
        sizes = counts.tolist()
        parts = torch.split(x, sizes)
        return torch.cat([part @ w for part, w in zip(parts, self.weight, strict=True)])


experts = torch.compile(Experts(), backend="eager")
for counts in ([2, 3, 3], [4, 2, 2], [3, 3, 2]):
    experts(torch.randn(8, 8), torch.tensor(counts)).sum().backward()
