"""Models of torch alone, of the blocks of larger ones: rotary attention, detection, alignment, normed weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.nn.utils import parametrizations

from shiplap_backend.models.case import CaseMaker, ModelCase


class RotaryAttention(nn.Module):
    """Attention over a window of positions, followed by a gated layer.

    Four heads of queries share two heads of keys. Positions are encoded by rotations of complex numbers.
    """

    def __init__(self, width: int = 32) -> None:
        """Create the layers of the block for tokens of ``width`` features."""
        super().__init__()
        self.norm, self.query, self.out = nn.RMSNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.keys = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the query or key ``x`` rotated by ``positions``.

        Each pair of numbers is rotated as a complex number.
        """
        rates = 100.0 ** -torch.arange(0, 1, 0.25, device=x.device, dtype=x.dtype)
        angles = positions[:, None].to(x.dtype) * rates
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result for the tokens ``x``.

        The results of the attention and of the gated layer are each added to their input.
        """
        batch, length, width = x.shape
        hidden = self.norm(x)
        places = torch.arange(length, device=x.device)
        query = self.query(hidden).view(batch, length, 4, 8).transpose(1, 2)
        key, value = self.keys(hidden).view(batch, length, 4, 8).transpose(1, 2).chunk(2, 1)
        far = places[:, None] - places
        mask = torch.where((far >= 0) & (far < 3), 0.0, float("-inf")).to(x.dtype)
        query, key = self.rotated(query, places), self.rotated(key, places)
        seen = f.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.up(x).chunk(2, -1)
        result: Tensor = x + self.down(f.silu(gate) * up)
        return result


class Detector(nn.Module):
    """A detector that predicts a box and a score for each pixel of an image.

    It keeps the boxes that do not overlap a better one.
    """

    def __init__(self) -> None:
        """Create a small convolutional network with one output for scores and one for boxes."""
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.score, self.sides = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the boxes ``[n, 4]`` (left, top, right, bottom) of the image ``x`` that do not overlap a better one,
        and their scores ``[n]``.

        The best box comes first.
        """
        hidden = self.body(x)
        scores = self.score(hidden).flatten()
        sides = f.softplus(self.sides(hidden))[0].flatten(1).t()
        rows, columns = torch.meshgrid(*(torch.arange(n, device=x.device) for n in x.shape[-2:]), indexing="ij")
        centres = torch.stack([columns, rows], -1).reshape(-1, 2).to(x.dtype)
        boxes = torch.cat([centres - sides[:, :2], centres + sides[:, 2:]], 1)
        # A stable sort orders equal scores alike on each device.
        order = scores.argsort(descending=True, stable=True)
        best = boxes[order]
        inside = torch.minimum(best[:, None, 2:], best[:, 2:]) - torch.maximum(best[:, None, :2], best[:, :2])
        shared = inside.clamp(min=0).prod(-1)
        areas = (best[:, 2:] - best[:, :2]).prod(1)
        overlap = shared > 0.3 * (areas[:, None] + areas - shared)
        kept = torch.ones_like(order, dtype=torch.bool)
        for place in range(len(order)):
            if kept[place]:
                kept[place + 1 :] &= ~overlap[place, place + 1 :]
        return best[kept], scores[order[kept]].sigmoid()


class Aligner(nn.Module):
    """A convolution and a recurrent layer over sound, with the CTC loss of a sequence of letters."""

    def __init__(self) -> None:
        """Create a convolution, a recurrent layer and a linear layer with letters as classes."""
        super().__init__()
        self.conv, self.rnn, self.out = nn.Conv1d(4, 8, 3, stride=2), nn.GRU(8, 6, bidirectional=True), nn.Linear(12, 5)

    def forward(self, sound: Tensor, letters: Tensor) -> Tensor:
        """Return the CTC loss of ``letters`` for the ``sound``."""
        hidden, _ = self.rnn(f.gelu(self.conv(sound)).permute(2, 0, 1))
        chances = self.out(hidden).log_softmax(-1)
        heard, written = (torch.full((sound.shape[0],), n) for n in (len(chances), letters.shape[1]))
        return f.ctc_loss(chances, letters, heard, written)


def normed_case() -> ModelCase:
    """Return the test case of layers whose weights are normalised in each call.

    Some weights are divided by their length, and others by their largest singular value.
    """
    layers = (
        parametrizations.weight_norm(nn.Conv1d(3, 6, 3)),
        nn.ELU(),
        parametrizations.spectral_norm(nn.Conv1d(6, 4, 1)),
        nn.Flatten(),
        parametrizations.weight_norm(nn.Linear(24, 3), dim=-1),
    )
    return ModelCase(nn.Sequential(*layers), (torch.randn(2, 3, 8),))


MODELS: dict[str, CaseMaker] = {
    "rotary-attention": lambda: ModelCase(RotaryAttention(), (torch.randn(2, 7, 32),)),
    "detector": lambda: ModelCase(Detector(), (torch.randn(1, 3, 6, 7),)),
    "aligner": lambda: ModelCase(Aligner(), (torch.randn(2, 4, 21), torch.randint(1, 5, (2, 3)))),
    "normed-weights": normed_case,
}
