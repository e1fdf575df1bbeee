"""What the network is told of a point, by brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shiplap_sparse3d.demo.features import FEATURES, describe_points, ground_surfaces, nearest_points, point_spacing
from shiplap_sparse3d.demo.scan import Scan

RADII = 1, 2, 4, 8, 16, 32, 64, 128


def some(n: int, seed: int = 0, extent: tuple[float, float, float] = (30.0, 20.0, 12.0)) -> Tensor:
    return torch.rand(n, 3, generator=torch.Generator().manual_seed(seed)) * torch.tensor(extent)


def test_spacing_of_a_grid() -> None:
    for step in (0.25, 0.5, 1.0):
        x, y = torch.meshgrid(torch.arange(0, 50, step), torch.arange(0, 30, step), indexing="ij")
        xyz = torch.stack([x.flatten(), y.flatten(), torch.zeros(x.numel())], 1)
        assert point_spacing(xyz) == pytest.approx(step, rel=0.01)
        far = xyz + torch.tensor([1000.0, 0, 0])  # what lies between the two has no points
        assert point_spacing(torch.cat([xyz, far])) == pytest.approx(step, rel=0.01)


def windows(values: Tensor, radius: int, worst: float) -> Tensor:
    """The maximum of each square window of a raster, by looking at each."""
    padded = torch.nn.functional.pad(values, (radius,) * 4, value=worst)
    return padded.unfold(0, 2 * radius + 1, 1).unfold(1, 2 * radius + 1, 1).amax((2, 3))


@pytest.mark.parametrize("extent", [(30.0, 20.0, 12.0), (60.0, 0.4, 5.0), (0.4, 60.0, 5.0)])
def test_erosions_and_openings_by_brute_force(extent: tuple[float, float, float]) -> None:
    xyz = some(400, extent=extent)
    cells = ((xyz[:, :2] - xyz[:, :2].amin(0)) / 0.5).long()
    low = torch.full((cells.amax(0) + 1).tolist(), torch.inf)
    for (i, j), z in zip(cells.tolist(), xyz[:, 2], strict=True):
        low[i, j] = torch.minimum(low[i, j], z)
    heights = ground_surfaces(xyz, 1.0)
    for place, radius in enumerate(RADII):
        eroded = -windows(-low, radius, -torch.inf)
        opened = windows(torch.where(eroded.isinf(), -torch.inf, eroded), radius, -torch.inf)
        for offset, surface in enumerate((eroded, opened)):
            expected = xyz[:, 2] - surface[cells[:, 0], cells[:, 1]]
            assert torch.equal(heights[:, 3 * place + offset], expected)
    assert bool((heights.unflatten(1, (-1, 3))[:, :, :2] >= 0).all())


def test_the_mean_surface_of_a_plane_is_the_plane() -> None:
    """On a slope a point of the ground is below no opening, and at the mean of its surroundings."""
    xyz = some(20_000, extent=(40.0, 40.0, 0.0))
    xyz[:, 2] = 0.3 * xyz[:, 0]
    inside = ((xyz[:, :2] > 10) & (xyz[:, :2] < 30)).all(1)
    heights = ground_surfaces(xyz, 0.3)[inside].unflatten(1, (-1, 3))
    assert float(heights[:, 4, 0].mean()) > 0.5  # the lowest point within 16 cells is far below
    assert float(heights[:, :5, 1].mean()) < 0.2
    assert float(heights[:, :5, 2].abs().mean()) < 0.15


def test_nearest_by_brute_force() -> None:
    xyz = torch.cat([some(600), some(5) + 40])
    rise, distance = nearest_points(xyz, 8, 1.0)
    separation = (xyz[:, None, :2] - xyz[:, :2]).norm(dim=2)
    separation.fill_diagonal_(torch.inf)
    value, index = separation.topk(8, largest=False)
    within = value < 5
    torch.testing.assert_close(distance, torch.where(within, value, 5.0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rise, torch.where(within, xyz[index, 2] - xyz[:, 2:], 0), rtol=1e-4, atol=1e-4)
    assert bool(within.any())
    assert not bool(within.all())


@pytest.mark.parametrize(
    "xyz",
    [
        torch.tensor([[7.0, 8.0, 9.0]]),
        torch.tensor([[7.0, 8.0, 9.0]] * 40),
        torch.tensor([[0.0, 0, 0], [400.0, 300.0, 90.0]]),
    ],
)
def test_features_of_few_points_are_finite(xyz: Tensor) -> None:
    told = describe_points(xyz, 1.0)
    assert tuple(told.shape) == (len(xyz), FEATURES)
    assert bool(told.isfinite().all())


def test_features_know_heights_by_their_differences() -> None:
    xyz = some(500)
    torch.testing.assert_close(
        describe_points(xyz + torch.tensor([0, 0, 64.0]), 1.0), describe_points(xyz, 1.0), rtol=0, atol=0.02
    )


def test_features_follow_the_scale(training: Scan) -> None:
    """Twice as far separation and twice as high: the shares and lengths in spacings stay as they are."""
    xyz = training.xyz[:3000]
    near, far = (describe_points(xyz * scale, scale) for scale in (1.0, 2.0))
    lengths = [-5, -4, -3]
    torch.testing.assert_close(near[:, lengths[1:]], far[:, lengths[1:]], rtol=1e-3, atol=1e-3)
