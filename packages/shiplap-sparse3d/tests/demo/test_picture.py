"""The picture: a PNG as wide as a README, with nothing cut off at its edges."""

from __future__ import annotations

import io

import pytest
import torch

from shiplap_sparse3d.demo.picture import draw_picture
from shiplap_sparse3d.demo.scan import Scan, held_out_mask

pytest.importorskip("matplotlib")


def drawn(extent: tuple[float, float, float]) -> torch.Tensor:
    """``uint8 [height, width, 3]``."""
    import numpy as np
    from PIL import Image

    draw = torch.Generator().manual_seed(0)
    scan = Scan(torch.rand(300, 3, generator=draw) * torch.tensor(extent), torch.rand(300, generator=draw) < 0.5)
    png = draw_picture(scan, held_out_mask(scan), torch.rand(300, generator=draw) < 0.5, "somebody")
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert png.endswith(b"IEND\xaeB`\x82")
    return torch.from_numpy(np.array(Image.open(io.BytesIO(png)).convert("RGB")))


@pytest.mark.parametrize("extent", [(360.0, 170.0, 30.0), (100.0, 100.0, 5.0)])
def test_nothing_is_cut_off(extent: tuple[float, float, float]) -> None:
    image = drawn(extent)
    assert image.shape[1] == 1000
    edges = (image[:3], image[-3:], image[:, :3], image[:, -3:])
    assert all(bool((edge == 255).all()) for edge in edges)
    assert not bool((image[:, 3:70] == 255).all())  # the labels of y are there


def test_a_metre_is_as_long_in_y_as_in_x() -> None:
    low, high = (drawn((200.0, y, 5.0)).shape[0] for y in (50.0, 150.0))
    wide = 1000 * 0.916  # pixels that the wide panel has for 212 m; the small ones have a little less than half
    assert (high - low) * 212 / 100 == pytest.approx(wide * 1.49, rel=0.02)
