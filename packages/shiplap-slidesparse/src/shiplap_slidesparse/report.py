"""The report on a model: the form that each layer should run per number of rows, and the accuracy that it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shiplap.plugin_api import error
from shiplap.plugin_api.timing import progress_bar, time_in_turn
from shiplap_slidesparse import roofline, tuning
from shiplap_slidesparse.accuracy import AccuracyDrift, logits_of, measure_drift, window_of
from shiplap_slidesparse.convert import SKIPPED, Conversion, convert, layers_of, require_form
from shiplap_slidesparse.formats import Pattern
from shiplap_slidesparse.linear import Linear
from shiplap_slidesparse.packed import known_mode, matmul

EQUAL = 1.03  # times of medians that tell nothing


@dataclass(frozen=True)
class LayerBucket:
    """The times of the layers of one size for calls with ``rows`` rows. ``measured`` and ``predicted`` map the form of
    the layer to seconds. ``base`` is the ``nn.Linear`` before the conversion. ``dense`` and ``slide`` are the converted
    layer with a row-major and with a packed weight.

    ``predicted`` is empty if the peaks of the device are unknown. ``most`` is the largest possible gain of ``slide``
    over ``dense``. It is the ratio of their multiply-adds or of their bytes, whichever limits these rows.
    """

    rows: int
    measured: dict[str, float]
    predicted: dict[str, float]
    most: float

    @property
    def winner(self) -> str:
        """The form of the layer (``base``, ``dense`` or ``slide``) with the shortest measured time, or predicted time
        if none was measured. It is an empty string if no time is known. Of forms that are about equal, it is the first
        one in the order ``base``, ``dense``, ``slide``.
        """
        times = self.measured or self.predicted
        near = [form for form in times if times[form] <= EQUAL * min(times.values())]
        return min(near, key=roofline.FORMS.index) if near else ""

    @property
    def gain(self) -> float:
        """The time of the best other form divided by the time of the winner. It is a little less than 1 if the two are
        about equal, and 1 if there is no other form.
        """
        times = self.measured or self.predicted
        others = [time for form, time in times.items() if form != self.winner]
        return min(others) / times[self.winner] if others else 1.0

    def as_json(self) -> dict[str, Any]:
        """Return all fields, ``winner`` and ``gain`` as a dict that can be written as JSON."""
        return {**asdict(self), "winner": self.winner, "gain": self.gain}


@dataclass(frozen=True)
class LayerSize:
    """The measurements of all layers whose weight has the size ``[n, k]``. ``layers`` holds their names, and
    ``buckets`` the times for each number of rows. ``error`` is the largest relative error of the weights of these
    layers, and ``output_error`` that of their outputs.
    """

    n: int
    k: int
    layers: tuple[str, ...]
    error: float
    output_error: float
    buckets: tuple[LayerBucket, ...]


@dataclass(frozen=True)
class SparsityReport:
    """The whole report on a model that was converted with ``pattern`` and ``dtype`` on ``device``. ``sizes`` holds the
    times of its layers, and ``conversion`` is the result of ``convert``. ``drift`` is the change of the model's
    accuracy, or None if it was not measured. ``ceiling`` is the largest possible speed-up of the pattern. ``peaks`` is
    the name of the device whose peak rates the predictions use, or an empty string if they are not known.
    """

    pattern: str
    dtype: str
    device: str
    ceiling: float
    peaks: str
    sizes: tuple[LayerSize, ...]
    conversion: Conversion
    drift: AccuracyDrift | None

    @property
    def pays(self) -> bool:
        """Whether the form to which the model was converted is fastest for any size and number of rows. This form is
        ``dense`` for the dense pattern, and ``slide`` otherwise.
        """
        wanted = "dense" if self.pattern == "dense" else "slide"
        return any(b.winner == wanted for size in self.sizes for b in size.buckets)

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dict that can be written as JSON, with ``pays`` and with ``winner`` and ``gain`` for
        each number of rows.
        """
        sizes = [{**asdict(s), "buckets": [b.as_json() for b in s.buckets]} for s in self.sizes]
        return {**asdict(self), "sizes": sizes, "pays": self.pays}


def check_form(pattern: str | Pattern, dtype: str) -> None:
    """Raise ``SL211`` for an unknown pattern or dtype. Raise it also for 16 bits with the dense pattern."""
    require_form(Pattern.parse(pattern), known_mode(dtype, "slidesparse report", "dtype"))


def survey_model(
    model: nn.Module,
    pattern: str | Pattern = "dense",
    dtype: str = "int8",
    *,
    rows: Sequence[int] = tuning.ROWS,
    skip: Sequence[str] = SKIPPED,
    tokens: Sequence[int] = (),
    measure: bool = True,
    tune: bool = False,
    seconds: float = 2.0,
    progress: bool | None = None,
) -> SparsityReport:
    """Convert ``model`` in place, measure its layers and its accuracy, and return the report. Raise ``SL613`` if the
    model is already converted.

    Args:
        model, pattern, dtype, skip, progress: as in :func:`convert`.
        rows: the numbers of rows for which the layers are compared.
        tokens: the tokens that both models predict. Without tokens the accuracy is not measured.
        measure: whether to measure times. If false, they are only predicted.
        tune: whether to tune the converted layers before they are measured.
        seconds: the time for one measurement.
    """
    if layers_of(model):
        raise error(
            "SL613",
            where="slidesparse report",
            got="a model that is converted already",
            expected="the dense model, with which its converted form is compared",
        )
    shape, kind = Pattern.parse(pattern), _float_of(model)
    model.eval()
    window = window_of(model)
    # Before the conversion, which replaces the layers in place.
    before = logits_of(model, tokens, window) if tokens else []
    example = torch.tensor([list(tokens[:window])], device=next(model.parameters()).device) if tokens else None
    conversion = convert(model, shape, dtype, skip=skip, example=example, progress=progress)
    moved = measure_drift(before, logits_of(model, tokens, window), tokens, window) if tokens else None
    if tune:
        tuning.tune(model, rows, seconds=seconds, dtype=kind)
    sizes = _survey_sizes(model, conversion, rows, kind, seconds if measure else 0.0, progress)
    device = next(iter(layers_of(model).values())).weight.device
    known = roofline.peaks_of(device)
    return SparsityReport(
        str(shape), dtype, str(device), shape.ceiling, known.name if known else "", sizes, conversion, moved
    )


def _survey_sizes(
    model: nn.Module,
    conversion: Conversion,
    rows: Sequence[int],
    kind: torch.dtype,
    seconds: float,
    progress: bool | None,
) -> tuple[LayerSize, ...]:
    """Return a ``LayerSize`` for each size of a converted layer, with the times of its forms (base, dense, slide) at
    each number of ``rows``. ``kind`` is the dtype of the activations. Each measurement takes ``seconds``. If
    ``seconds`` is 0, times are only predicted. ``progress`` is whether a bar is shown, by default on a terminal.
    """
    errors = {c.name: (c.error, c.output_error) for c in conversion.converted}
    every = tuning.sizes_of(model)
    sizes: list[LayerSize] = []
    with progress_bar(progress) as report_progress:
        for layer in every.values():
            names = tuple(n for n, other in layers_of(model).items() if other.weight.shape == layer.weight.shape)
            buckets = []
            for m in rows:
                report_progress(f"{layer.out_features} x {layer.in_features}, {m} rows", len(sizes), len(every))
                buckets.append(_survey_bucket(layer, m, kind, seconds))
            # Layers of one size share a measurement, but each has its own weights and loss.
            worst = [max(pair) for pair in zip(*(errors[n] for n in names), strict=True)]
            sizes.append(LayerSize(layer.out_features, layer.in_features, names, worst[0], worst[1], tuple(buckets)))
    return tuple(sizes)


def _float_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the weight of the model's first linear layer, which is that of the activations. Return
    float32 if there is no such layer.
    """
    return next((m.weight.dtype for m in model.modules() if isinstance(m, nn.Linear)), torch.float32)


def _survey_bucket(layer: Linear, m: int, kind: torch.dtype, seconds: float) -> LayerBucket:
    """Return the times of ``layer`` at ``m`` rows as a ``LayerBucket``. Each of its forms (base, dense, slide) is
    predicted if the device's peak rates are known. Each is measured for ``seconds`` unless that is 0. ``kind`` is the
    dtype of the activations.
    """
    device, size = layer.weight.device, (layer.out_features, layer.in_features, layer.pattern.pairs)
    units, peaks = device.type == "cuda", roofline.peaks_of(device)
    forms = roofline.FORMS if layer.pattern.sparse else roofline.FORMS[:2]
    done = {
        form: roofline.layer_work(form, layer.mode, m, *size, width=kind.itemsize, sparse_units=units) for form in forms
    }
    predicted = {f: roofline.roofline_seconds(f, layer.mode, w, peaks) for f, w in done.items()} if peaks else {}
    measured = _time_forms(layer, m, kind, seconds) if seconds else {}
    if not layer.pattern.sparse:
        return LayerBucket(m, measured, predicted, 1.0)
    # Without known peaks either resource may be the scarcer one, so the larger ratio bounds the gain.
    compute, memory = done["dense"].macs / done["slide"].macs, done["dense"].bytes / done["slide"].bytes
    most = predicted["dense"] / predicted["slide"] if peaks else max(compute, memory)
    return LayerBucket(m, measured, predicted, most)


def _time_forms(layer: Linear, m: int, kind: torch.dtype, seconds: float) -> dict[str, float]:
    """Return the median seconds of each form of ``layer`` at ``m`` rows, by form, measured in turns. ``base`` is an
    ``nn.Linear`` of the dtype ``kind`` with a random weight. ``dense`` is the converted layer with a row-major weight.
    ``slide`` is the converted layer with the packed weight, and is missing if nothing is packed.
    """
    device = layer.weight.device
    base = torch.randn(layer.weight.shape, device=device, dtype=kind)
    x = torch.randn(m, layer.in_features, device=device, dtype=kind)
    # The 8-bit modes quantise the activations themselves, from any floating dtype.
    inner = x if layer.weight_scale is not None else x.to(layer.weight.dtype)
    weight = layer.as_packed()
    runs: dict[str, Callable[[], tuple[Tensor, ...]]] = {"base": lambda: (torch.nn.functional.linear(x, base),)}
    dense = weight.keeping("dense")
    runs["dense"] = lambda: (matmul(inner, dense),)
    if weight.packed is not None:
        slide = weight.keeping("packed")
        runs["slide"] = lambda: (matmul(inner, slide),)
    with torch.no_grad():
        return time_in_turn(runs, device=str(device), seconds=seconds)
