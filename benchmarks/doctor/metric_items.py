"""SpecForge #222: an accuracy from two sums that become Python numbers inside of the training step."""

import torch


class Draft(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(16, 32)

    def accuracy(self, logits, target, mask):
        hits = (logits.argmax(-1) == target) * mask
        return hits.sum().item() / (mask.sum().item() + 1e-6)

    def forward(self, hidden, target, mask):
        logits = self.head(hidden)
        losses = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        return (losses * mask).mean(), self.accuracy(logits, target, mask)


draft = torch.compile(Draft(), backend="eager")
for _ in range(3):
    loss, _ = draft(torch.randn(8, 16), torch.randint(32, (8,)), (torch.rand(8) > 0.3).float())
    loss.backward()
