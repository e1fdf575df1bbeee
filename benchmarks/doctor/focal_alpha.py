"""clcarwin/focal_loss: weights of classes are cast when the type of the input differs."""

import torch
from torch import nn


class FocalLoss(nn.Module):
    def __init__(self, gamma=2):
        super().__init__()
        self.gamma = gamma
        self.alpha = torch.Tensor([0.25, 0.75])

    def forward(self, input, target):
        logpt = input.log_softmax(-1).gather(1, target[:, None]).view(-1)
        pt = logpt.detach().exp()
        if self.alpha is not None:
            if self.alpha.type() != input.data.type():
                self.alpha = self.alpha.type_as(input.data)
            logpt = logpt * self.alpha.gather(0, target)
        return (-1 * (1 - pt) ** self.gamma * logpt).mean()


torch.manual_seed(0)
loss = torch.compile(FocalLoss(), backend="eager")
for dtype in (torch.float32, torch.float64, torch.float64, torch.float32):
    loss(torch.randn(5, 2, dtype=dtype, requires_grad=True), torch.randint(2, (5,))).backward()
