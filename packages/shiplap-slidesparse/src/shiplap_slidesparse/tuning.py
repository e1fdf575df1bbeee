"""``tune``: choose form and algorithm of each converted layer at load, for each number of rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

import shiplap as sl
from shiplap.plugin_api import error
from shiplap_slidesparse import lt
from shiplap_slidesparse.convert import layers_of
from shiplap_slidesparse.linear import Linear
from shiplap_slidesparse.packed import LAYERS

if TYPE_CHECKING:
    from shiplap.plugin_api.tuning import Choice

ROWS = (1, 16, 64, 256, 1024, 4096)  # decoding of few and of many sequences, and prefill


def tune(
    model: nn.Module,
    rows: Iterable[int] = ROWS,
    *,
    seconds: float = 20.0,
    dtype: torch.dtype = torch.bfloat16,
    remeasure: bool = False,
) -> list[Choice]:
    """Choose by measurement between the two weights of each converted layer, packed (slide) and row-major (dense), for
    each number in ``rows``. Return the choices, which are stored and used in this process.

    Each product is verified before it is timed. On a GPU the algorithms of both products are tuned first. Layers of one
    size share a choice. Layers of the pattern ``dense`` have no packed weight, so on a CPU nothing is tuned for them.

    ``dtype`` is that of the activations, and ``seconds`` is the time for one choice. If ``remeasure`` is true, sizes
    with a stored choice are measured again. Otherwise the stored choice is returned. ``shiplap freeze`` can write the
    choices into a file afterwards. Raise ``SL211`` if the model holds no converted layer.
    """
    choices: list[Choice] = []
    rows = numbers_of(rows, "slidesparse.tune")
    for (mode, n, k, pairs, device), layer in sizes_of(model).items():
        op = LAYERS[mode]
        if torch.device(device).type == "cuda":
            from shiplap_slidesparse.lt.tuning import tune_layer

            choices += tune_layer(op, rows, n, k, pairs, dtype, device, seconds, remeasure)
        elif pairs:  # a dense weight has one form
            # The 8-bit ops take several dtypes, which the samples have to name.
            typed = {"dtype": str(dtype)} if layer.weight_scale is not None else {}
            samples = [{"m": m, "n": n, "k": k, "_": 1, "pairs": pairs, "layout": 0, **typed} for m in rows]
            choices += sl.tune(op, samples, seconds * len(rows), device=device, remeasure=remeasure, isolate=False)
    return choices


def prepare(model: nn.Module, rows: Iterable[int], dtype: torch.dtype = torch.bfloat16) -> None:
    """Run a converted layer of each size on each number of ``rows``. Later CUDA graph captures then find the plans and
    modules that they need. ``dtype`` is that of the activations.
    """
    rows = numbers_of(rows, "slidesparse.prepare")
    for layer in sizes_of(model).values():
        lt.prepare_captures(layer, rows, layer.in_features, dtype, layer.weight.device)


def numbers_of(rows: Iterable[int], where: str) -> list[int]:
    """Return each of the numbers ``rows`` once, ascending. Raise ``SL211`` if there is none or one is negative.
    ``where`` names the caller in the error.
    """
    numbers = sorted(set(rows))
    if not numbers or numbers[0] < 0:
        raise error(
            "SL211",
            where=where,
            got=f"rows {numbers}",
            expected="numbers of rows, 0 or more",
            fix="pass for example rows=(1, 16, 256)",
        )
    return numbers


def sizes_of(model: nn.Module) -> dict[tuple[str, int, int, int, str], Linear]:
    """Return one converted layer of ``model`` for each combination of mode, output features, input features, pairs of
    the pattern and device. Raise ``SL211`` if there is none.
    """
    layers: dict[tuple[str, int, int, int, str], Linear] = {}
    for layer in layers_of(model).values():
        key = layer.mode, layer.out_features, layer.in_features, layer.pattern.pairs, str(layer.weight.device)
        layers.setdefault(key, layer)
    if not layers:
        raise error(
            "SL211",
            where="slidesparse",
            got="a model without converted layers",
            expected="one that holds slidesparse.Linear",
            fix="call convert(model) first",
        )
    return layers
