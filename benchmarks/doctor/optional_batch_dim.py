"""forum threads: a model is called with one sample and with a batch of them."""

import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, obs):
        single = obs.dim() == 1
        if single:
            obs = obs.unsqueeze(0)
        action = self.net(obs).tanh()
        return action.squeeze(0) if single else action


torch.manual_seed(0)
policy = torch.compile(Policy(), backend="eager")
for _ in range(3):
    with torch.no_grad():
        policy(torch.randn(6))
    policy(torch.randn(5, 6)).sum().backward()
