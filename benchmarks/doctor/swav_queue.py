"""SwAV: a queue of earlier embeddings is used once it is filled."""

import torch
from torch import nn


class Swav(nn.Module):
    def __init__(self):
        super().__init__()
        self.prototypes = nn.Linear(4, 3, bias=False)
        self.register_buffer("queue", torch.zeros(6, 4))
        self.use_queue = False

    def forward(self, embedding):
        out = self.prototypes(embedding)
        with torch.no_grad():
            scores = out.detach()
            if self.use_queue or not torch.all(self.queue[-1, :] == 0):
                self.use_queue = True
                scores = torch.cat((self.queue @ self.prototypes.weight.t(), scores))
            n = embedding.shape[0]
            self.queue[n:] = self.queue[:-n].clone()
            self.queue[:n] = embedding.detach()
            q = (scores / 0.05).softmax(-1)[-n:]
        return -(q * out.log_softmax(-1)).sum(-1).mean()


torch.manual_seed(0)
swav = torch.compile(Swav(), backend="eager")
for _ in range(6):
    swav(torch.randn(2, 4)).backward()
