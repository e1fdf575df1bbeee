"""Comparison of random results: a test whether two sets of runs have one distribution.

Elements of a result may depend on each other, so a test that assumes independent elements would be wrong. Runs with
different seeds are independent, and under one distribution the assignment of runs to sets does not matter. So features
of each run (moments, the distribution function, neighbours, single positions) are compared between the two sets, and
again between random divisions of all runs. A true difference is far larger than those of random divisions.
"""

from __future__ import annotations

import torch
from torch import Tensor

RUNS = 48  # runs in each set
DIVISIONS = 120  # random divisions of all runs
BEYOND = 2.0  # factor above the largest difference of a random division, about 5 standard deviations
LEVELS = 24  # levels at which the distribution function is compared
POSITIONS = 256  # elements that are compared one by one
ROUNDING = 256.0  # multiples of the dtype's eps that count as no difference


def distribution_difference(got: list[Tensor], wanted: list[Tensor]) -> str:
    """Return a text that names the statistic in which the results of two sets of runs differ more than by chance.
    Return an empty string if there is none.

    ``got`` has one result of the op for each seed, and ``wanted`` one result of the reference for each seed.
    """
    kind = got[0].dtype
    # Integers have no rounding errors.
    exact = not (kind.is_floating_point or kind.is_complex)
    eps = 0.0 if exact else max(torch.finfo(kind).eps, torch.finfo(torch.float32).eps)
    shape = got[0].shape
    # Both sets share the mean and the scale that the statistics use, so that the two sets are treated alike.
    runs = torch.stack([_flatten_to_double(t) for t in (*got, *wanted)])
    if runs[0].numel() == 0:
        return ""
    slack = eps * ROUNDING * float(runs[runs.isfinite()].abs().max()) if bool(runs.isfinite().any()) else 0.0
    rng, half = torch.Generator().manual_seed(len(runs)), len(got)
    signs = torch.cat([torch.ones(half), -torch.ones(half)]).double()
    # Random divisions of the same runs show how large a difference is by chance.
    divided = torch.stack([signs[torch.randperm(2 * half, generator=rng)] for _ in range(DIVISIONS)])
    for name, (features, allowed) in _run_features(runs, shape, slack).items():
        spread = features.std(0)
        if not bool((there := spread > 0).any()):
            continue
        observed = (signs @ features)[there].abs() / half
        usual = (divided @ features)[:, there].abs() / half / spread[there]
        beyond = (observed - allowed).clamp_min(0) / spread[there]
        if float(beyond.max()) > BEYOND * float(usual.max()):
            worst = int(beyond.argmax())
            mine, theirs = features[:half, there][:, worst].mean(), features[half:, there][:, worst].mean()
            return f"{name}: {mine:.4g} over {half} seeds, the reference has {theirs:.4g}"
    return ""


def _flatten_to_double(t: Tensor) -> Tensor:
    """Return the elements of ``t`` as a float64 tensor of one dim on the CPU. A complex number becomes its real part,
    followed by its imaginary part.
    """
    flat = torch.view_as_real(t) if t.is_complex() else t
    return flat.detach().cpu().to(torch.float64).flatten()


def _run_features(runs: Tensor, shape: torch.Size, slack: float) -> dict[str, tuple[Tensor, float]]:
    """Return statistics of random results by name, such as the mean.

    Each value is a pair (features, allowed). ``features`` is a matrix with one row for each run. ``allowed`` is the
    difference between two rows that rounding may cause. ``runs`` has one flattened result in each row, and ``shape`` is
    the shape of one result. ``slack`` is the difference that rounding may cause in one number.
    """
    broken = (~runs.isfinite()).double()
    runs = runs.nan_to_num(0.0, 0.0, 0.0)
    unit = float(runs.std())
    if unit <= slack:  # the same number everywhere, or nearly so
        return {"the mean": (runs.mean(1, keepdim=True), 4 * slack)}
    scaled, loose = (runs - runs.mean()) / unit, slack / unit
    at = torch.linspace(0, 1, LEVELS).double()
    # Of a part, since ``quantile`` sorts, and refuses large tensors.
    levels = torch.quantile(scaled.flatten()[:: 1 + scaled.numel() // 100_000], at).unique()
    below = torch.stack([(scaled <= level + loose).double().mean(1) for level in levels], 1)
    step = 1 + runs.shape[1] // POSITIONS
    features = {
        "the share of numbers that are not finite": (broken.mean(1, keepdim=True), 0.0),
        "the mean": (runs.mean(1, keepdim=True), slack),
        "the mean square, scaled": (scaled.square().mean(1, keepdim=True), 8 * loose),
        "the mean fourth power, scaled": (
            scaled.pow(4).mean(1, keepdim=True),
            32 * loose * float(scaled.abs().max()) ** 3,
        ),
        "the distribution function at a level": (below, 0.0),
        "the mean at one position": (runs[:, ::step], slack),
        "the mean square at one position, scaled": (scaled[:, ::step].square(), loose * 4 * float(scaled.abs().max())),
    }
    for name, values in (("", runs), (" without signs", runs.abs())):
        spread = values.std(0)
        alone = torch.where(spread > slack, (values - values.mean(0)) / spread.clamp_min(1e-300), 0.0)
        for lag in _neighbour_lags(shape, runs.shape[1]):
            product = (alone[:, lag:] * alone[:, :-lag]).mean(1, keepdim=True)
            # A generator that repeats numbers shows in these.
            features[f"the correlation of elements {lag} apart{name}"] = product, 1e-6
    return features


def _neighbour_lags(shape: torch.Size, count: int) -> list[int]:
    """Return the distances in memory, in elements, between neighbours along each dim of a contiguous tensor of
    ``shape``. They are in ascending order and below ``count``.
    """
    lags, stride = {1}, 1
    # Neighbours along a dim are its stride apart in the flat results.
    for size in reversed(shape):
        stride *= size
        lags.add(stride)
    return sorted(lag for lag in lags if 0 < lag < count)
