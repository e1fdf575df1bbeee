"""DeepSpeech-like report: cuDNN is switched off around a recurrent layer."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x):
        x = self.proj(x).transpose(1, 2)
        with torch.backends.cudnn.flags(enabled=False):
            x = self.conv(x)
        return x.relu().mean(-1)


torch.manual_seed(0)
net = torch.compile(Net(), backend="eager")
for _ in range(2):
    net(torch.randn(2, 5, 4)).sum().backward()
