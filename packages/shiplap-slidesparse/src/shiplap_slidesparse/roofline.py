"""The largest possible gain of a layer: bytes, multiply-adds, and the bounds that follow from them.

The counts assume that a kernel of its own quantises (and lifts) the activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shiplap_slidesparse.formats import compressed_bytes, dense_depth, lifted_depth
from shiplap_slidesparse.packed import MODES

__all__ = ["FORMS", "PEAKS", "DevicePeaks", "LayerWork", "layer_work", "peaks_of", "roofline_seconds"]

FORMS = ("base", "dense", "slide")


@dataclass(frozen=True)
class DevicePeaks:
    """The peak rates of a GPU according to its vendor. ``name`` is that of the GPU. ``wide`` and ``narrow`` are
    multiply-adds per second with 16 and 8 bits, without sparsity. ``bandwidth`` is in bytes per second.
    """

    name: str
    wide: float
    narrow: float
    bandwidth: float


# SXM modules, without sparsity (which doubles both rates); a FLOP is half a multiply-add.
PEAKS = (
    DevicePeaks("H200", 494.5e12, 989.5e12, 4.8e12),
    DevicePeaks("H100 80GB HBM3", 494.5e12, 989.5e12, 3.35e12),
    DevicePeaks("A100-SXM4-80GB", 156e12, 312e12, 2.04e12),
)


@dataclass(frozen=True)
class LayerWork:
    """The work of one call of a layer. ``macs`` is the number of multiply-adds, and ``bytes`` is the number of bytes
    that are read and written.
    """

    macs: float
    bytes: int


def layer_work(
    form: str, mode: str, m: int, n: int, k: int, pairs: int, *, width: int = 2, sparse_units: bool = True
) -> LayerWork:
    """Return the multiply-adds, and the bytes read and written, of a layer ``[n, k]`` at ``m`` rows in one of ``FORMS``
    (base, dense or slide). ``mode`` is the format of the converted weight, and ``pairs`` is the number of pairs in a
    group of the pattern. ``width`` is the number of bytes of an element of the model. If ``sparse_units`` is true, the
    device skips half of the multiply-adds of slide. Otherwise it makes all of them.
    """
    # Input and output keep the dtype of the model in every form.
    size, ends = MODES[mode].itemsize, width * m * (k + n)
    if form == "base":
        return LayerWork(m * n * k, width * n * k + ends)
    depth = lifted_depth(k, pairs) if form == "slide" else dense_depth(k)
    reread = 2 * m * depth * size if size == 1 or (form == "slide" and pairs > 2) else 0  # written, and read
    if form == "dense":
        return LayerWork(m * n * k, size * n * k + ends + reread)
    # Sparse units multiply two of four lanes.
    macs = m * n * depth / 2 if sparse_units else m * n * depth
    return LayerWork(macs, compressed_bytes(n, depth, size) + ends + reread)


def peaks_of(device: torch.device) -> DevicePeaks | None:
    """Return the peak arithmetic and bandwidth of a GPU that ``PEAKS`` lists, or None for any other device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((p for p in PEAKS if p.name in name), None)


def roofline_seconds(form: str, mode: str, done: LayerWork, peaks: DevicePeaks) -> float:
    """Return the shortest possible time in seconds of the work ``done``. It is the longer one of the times for
    arithmetic alone and for memory traffic alone. ``form`` and ``mode`` determine the width of the operands, and
    thereby the rate of arithmetic among ``peaks``.
    """
    rate = peaks.wide if form == "base" or MODES[mode].itemsize == 2 else peaks.narrow
    return max(done.macs / rate, done.bytes / peaks.bandwidth)
