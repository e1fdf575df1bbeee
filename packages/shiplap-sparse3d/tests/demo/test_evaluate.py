"""Scores that can be checked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shiplap_sparse3d import SparseTensor
from shiplap_sparse3d.demo import evaluate
from shiplap_sparse3d.demo.model import GroundNet
from shiplap_sparse3d.demo.scan import Scan
from shiplap_sparse3d.demo.score import iou
from shiplap_sparse3d.demo.tiles import FeatureScaling, TrainingTile, make_tile

THIN = slice(None, None, 9)


def mask(bits: str) -> Tensor:
    return torch.tensor([b == "1" for b in bits], dtype=torch.bool)


@pytest.mark.parametrize(
    ("predicted", "truth", "expected"),
    [
        ("1100", "1010", 1 / 3),
        ("1111", "1111", 1.0),
        ("1000", "0111", 0.0),
        ("1111", "1000", 0.25),
        ("0000", "0000", 0.0),
        ("", "", 0.0),
    ],
)
def test_iou(predicted: str, truth: str, expected: float) -> None:
    assert iou(mask(predicted), mask(truth)) == pytest.approx(expected)
    assert iou(mask(truth), mask(predicted)) == pytest.approx(expected)


def test_baseline_by_hand() -> None:
    xyz = torch.tensor([[0.0, 0, 5], [11, 11, 5.7], [1, 1, 5.9], [13, 0, 9], [13, 13, 0]])
    assert evaluate.predict_by_height(Scan(xyz, mask("00000"))).tolist() == [True, True, False, True, True]


def test_baseline_held_out(scan: Scan, held: Tensor) -> None:
    assert iou(evaluate.predict_by_height(scan)[held], scan.ground[held]) == pytest.approx(0.221, abs=0.005)


def first_feature(voxels: SparseTensor, points: Tensor, inverse: Tensor) -> Tensor:
    """A forward without a network: the first feature, so that the order of the points can be seen."""
    return points[:, 0] + 0 * voxels.feats[inverse, 0]


def test_prediction_looks_50_m_beyond_and_answers_for_the_wanted(scan: Scan, held: Tensor) -> None:
    scan, held = scan.take(torch.arange(len(scan))[THIN]), held[THIN]
    x = scan.xyz[:, 0]
    near, look = x >= x[held].min() - 50, FeatureScaling.of([scan.take(~held)])[0]
    expected = make_tile(look.describe_area(scan.take(near)), 2).points[held[near], 0]
    assert torch.equal(evaluate.predict_logits(first_feature, look, scan, held, 2), expected)


def test_prediction_does_not_know_labels(scan: Scan, held: Tensor) -> None:
    scan, held = scan.take(torch.arange(len(scan))[THIN]), held[THIN]
    blind = Scan(scan.xyz, torch.zeros_like(scan.ground))
    look = FeatureScaling.of([scan.take(~held)])[0]
    answers = [evaluate.predict_logits(first_feature, look, s, held, 2) for s in (scan, blind)]
    assert torch.equal(*answers)


def test_speed_is_a_median_of_both() -> None:
    draw = torch.Generator().manual_seed(0)
    scan = Scan(torch.rand(300, 3, generator=draw) * 20, torch.rand(300, generator=draw) < 0.5)
    tile: TrainingTile = make_tile(FeatureScaling.of([scan])[1][0], 2)
    net, calls = GroundNet(4, 2), []

    def counted(*args: Tensor) -> Tensor:
        calls.append(1)
        return net(*args)

    measured = evaluate.measure_step_times(net, counted, tile, runs=3)
    assert measured.runs == 3
    assert len(calls) == 4  # one to warm up
    assert min(measured.compiled_ms, measured.eager_ms) > 0
