"""torchdynamo #330: a decoder appends each alignment to a list that it keeps."""

import torch


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.alignments = torch.nn.Linear(4, 4), []

    def forward(self, x):
        attention = torch.softmax(self.linear(x), -1)
        self.alignments.append(attention)
        return attention.sum(0)


decoder = torch.compile(Decoder(), backend="eager")
with torch.no_grad():
    for _ in range(4):
        decoder(torch.randn(3, 4))
