"""tt-torch #852: a warning through a logger while special tokens are prepared."""

import logging

import torch

logger = logging.getLogger(__name__)


class Generator(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.pad = None

    def forward(self, ids):
        pad = self.pad
        if pad is None:
            logger.warning("Setting the padding token to the end of the sentence")
            pad = 0
        return self.embed(ids) * (ids != pad).unsqueeze(-1)


model = torch.compile(Generator(), backend="eager")
for _ in range(2):
    model(torch.randint(20, (2, 5)))
