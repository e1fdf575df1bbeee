"""Models of torch alone: one of each kind of layer, with constructs that often fail on new devices."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from shiplap_backend.models.case import CaseMaker, ModelCase


def perceptron_case() -> ModelCase:
    """Return the test case of linear layers with an activation of each common kind."""
    layers = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 3)]
    return ModelCase(nn.Sequential(*layers), (torch.randn(5, 6),))


def convolution_case() -> ModelCase:
    """Return the test case of convolutions with batch norm, as in an image classifier."""
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    middle = [nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.BatchNorm2d(8), nn.Hardswish(), nn.AdaptiveAvgPool2d(1)]
    return ModelCase(nn.Sequential(*body, *middle, nn.Flatten(), nn.Linear(8, 4)), (torch.randn(2, 3, 12, 12),))


def volume_case() -> ModelCase:
    """Return the test case of 3D convolutions, pooling and transposed convolutions."""
    layers = [nn.Conv3d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.MaxPool3d(2)]
    return ModelCase(nn.Sequential(*layers, nn.ConvTranspose3d(4, 2, 2, stride=2)), (torch.randn(2, 2, 4, 6, 6),))


class Autoencoder(nn.Module):
    """A convolutional autoencoder whose input is concatenated with the input of its last layer.

    It downsamples by strided convolutions, and upsamples by transposed convolutions and interpolation.
    """

    def __init__(self) -> None:
        """Create the layers of a small convolutional autoencoder."""
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1)
        self.norm, self.out = nn.InstanceNorm2d(8, affine=True), nn.Conv2d(11, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the decoded image of ``x``."""
        y = self.up(torch.relu(self.norm(self.down(x))))
        y = nn.functional.interpolate(y, scale_factor=0.5, mode="bilinear", align_corners=False)
        y = nn.functional.interpolate(y, size=x.shape[-2:], mode="nearest")
        return torch.sigmoid(self.out(torch.cat([y, x], 1)))


class Recurrent(nn.Module):
    """An LSTM followed by a GRU and a linear layer."""

    def __init__(self) -> None:
        """Create a bidirectional LSTM, a GRU and a linear layer."""
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.gru, self.out = nn.GRU(12, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear layer's outputs for each step of ``x``, with its output for the GRU's last state added."""
        hidden, _ = self.lstm(x)
        hidden, last = self.gru(hidden)
        result: Tensor = self.out(hidden) + self.out(last[-1])[:, None]
        return result


class PackedSequences(nn.Module):
    """An LSTM over sequences of different lengths."""

    def __init__(self) -> None:
        """Create a bidirectional LSTM."""
        super().__init__()
        self.lstm = nn.LSTM(4, 6, bidirectional=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the padded outputs and the last hidden states of the LSTM.

        Its input is ``x`` packed as sequences of different lengths.
        """
        packed = pack_padded_sequence(x, torch.tensor([2, 5, 4]), enforce_sorted=False)
        out, (hidden, _) = self.lstm(packed)
        return pad_packed_sequence(out)[0], hidden


class Cells(nn.Module):
    """Three recurrent cells that are called in a Python loop over time, as in decoders."""

    def __init__(self) -> None:
        """Create an LSTM cell, a GRU cell and a plain recurrent cell."""
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(4, 6), nn.GRUCell(6, 6), nn.RNNCell(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last state of three recurrent cells that are applied in turn at every step of ``x``."""
        h = c = x.new_zeros(x.shape[1], 6)
        g, r = h, x.new_zeros(x.shape[1], 3)
        for step in x:
            h, c = self.lstm(step, (h, c))
            g = self.gru(h, g)
            r = self.rnn(g, r)
        return r


class Tied(nn.Module):
    """A Transformer whose output layer uses the weight of its embedding."""

    def __init__(self) -> None:
        """Create a Transformer whose output layer shares the weight of its embedding."""
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8, padding_idx=0), nn.Linear(8, 11, bias=False)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.out.weight = self.embed.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits of the Transformer for ``target`` given ``source``, with a causal mask."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        result: Tensor = self.out(self.body(self.embed(source), self.embed(target), tgt_mask=mask))
        return result


class Experts(nn.Module):
    """A mixture of experts, in which each token is sent to two of four linear layers.

    Tokens are sorted by expert, and counted with ``histc`` and ``bincount``.
    """

    def __init__(self) -> None:
        """Create a gate and four linear experts."""
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the two chosen experts for each token of ``x``.

        The result is zero if ``bincount`` and ``histc`` count the choices differently.
        """
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=4)
        same = torch.histc(chosen.flatten().float(), bins=4, min=0, max=3)
        out = torch.zeros_like(x)
        for expert, places in zip(self.experts, order.split(counts.tolist()), strict=True):
            rows = places // 2
            out = out.index_add(0, rows, expert(x[rows]) * weights.flatten()[places, None])
        # A difference between the counts shows as a result of zeros.
        return out * (same == counts).all()


class MessagePassing(nn.Module):
    """A graph network whose nodes receive the sum and the maximum of the messages along their edges."""

    def __init__(self) -> None:
        """Create the layers for messages and for updates."""
        super().__init__()
        self.message, self.update = nn.Linear(8, 6), nn.Linear(16, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return the features of the nodes ``x``, updated by the messages along ``edges``."""
        source, target = edges
        message = torch.relu(self.message(torch.cat([x[source], x[target]], -1)))
        total = x.new_zeros(len(x), 6).index_add(0, target, message)
        largest = x.new_zeros(len(x), 6).scatter_reduce(0, target[:, None].expand_as(message), message, "amax")
        result: Tensor = self.update(torch.cat([x, total, largest], -1))
        return result


class Spectral(nn.Module):
    """A layer that mixes the channels of a real signal in Fourier space by complex weights."""

    def __init__(self) -> None:
        """Create a complex weight for five frequencies, and a convolution."""
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 5, dtype=torch.complex64) / 3)
        self.out = nn.Conv1d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a signal made of the five lowest frequencies of ``x``, mixed across channels."""
        modes = torch.fft.rfft(x)[..., :5]
        result: Tensor = self.out(torch.fft.irfft(torch.einsum("bix,iox->box", modes, self.weight), n=x.shape[-1]))
        return result


class Sampler(nn.Module):
    """A spatial transformer, which samples an image at points that a small layer computes from it."""

    def __init__(self) -> None:
        """Create the layer that computes the affine map of the points."""
        super().__init__()
        self.where = nn.Linear(64, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return the image ``x`` sampled at the points of an affine map that is computed from ``x``."""
        theta = self.where(x.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, device=x.device)
        grid = nn.functional.affine_grid(theta, list(x.shape), align_corners=False)
        return nn.functional.grid_sample(x, grid, align_corners=False)


class Bag(nn.Module):
    """The mean embeddings of bags of words, followed by a bilinear classifier as used for click rates."""

    def __init__(self) -> None:
        """Create an embedding bag and a bilinear layer."""
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(20, 6, mode="mean"), nn.Bilinear(6, 6, 2)

    def forward(self, words: Tensor, starts: Tensor) -> Tensor:
        """Return a bilinear product of the mean embedding of each bag and of the bag at the same position from the end.

        The bags are consecutive slices of ``words``, and begin at the indices ``starts``.
        """
        bags = self.bag(words, starts)
        result: Tensor = self.out(bags, bags.flip(0))
        return result


MODELS: dict[str, CaseMaker] = {
    "perceptron": perceptron_case,
    "convolutions": convolution_case,
    "conv3d": volume_case,
    "autoencoder": lambda: ModelCase(Autoencoder(), (torch.rand(2, 3, 8, 10),)),
    "lstm-gru": lambda: ModelCase(Recurrent(), (torch.randn(3, 5, 4),)),
    "packed-lstm": lambda: ModelCase(PackedSequences(), (torch.randn(5, 3, 4),)),
    "cells": lambda: ModelCase(Cells(), (torch.randn(4, 3, 4),)),
    "tied-transformer": lambda: ModelCase(Tied(), (torch.randint(11, (2, 6)), torch.randint(11, (2, 4)))),
    "experts": lambda: ModelCase(Experts(), (torch.randn(7, 6),)),
    "graph": lambda: ModelCase(MessagePassing(), (torch.randn(6, 4), torch.randint(6, (2, 14)))),
    "fourier": lambda: ModelCase(Spectral(), (torch.randn(2, 3, 16),)),
    "spatial-transformer": lambda: ModelCase(Sampler(), (torch.randn(2, 1, 8, 8),)),
    "bag-of-words": lambda: ModelCase(Bag(), (torch.randint(20, (10,)), torch.tensor([0, 3, 7]))),
}
