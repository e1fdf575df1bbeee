"""The accuracy that a conversion costs: a model's logits and perplexity on given tokens, before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shiplap.plugin_api import error

__all__ = ["AccuracyDrift", "logits_of", "measure_drift", "window_of"]

WINDOW = 2048  # tokens in one forward pass, at most


@dataclass(frozen=True)
class AccuracyDrift:
    """The difference between the predictions of a model before and after its conversion, on the same tokens.

    Attributes:
        tokens: how many were predicted.
        perplexity, perplexity_after: exp of the mean negative log-likelihood of the next token.
        divergence: mean Kullback-Leibler divergence of the predictions after from those before, nats.
        agreement: share of positions in the text at which both models rank the same token first.
        largest: largest absolute difference between corresponding logits of the two models.
    """

    tokens: int
    perplexity: float
    perplexity_after: float
    divergence: float
    agreement: float
    largest: float


def window_of(model: nn.Module) -> int:
    """Return the number of tokens that one forward pass of ``model`` takes here. It is ``WINDOW``, or
    ``model.config.max_position_embeddings`` if the model has that attribute and it is smaller.
    """
    # Models that are not of transformers need not have this attribute.
    places = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return min(WINDOW, places) if isinstance(places, int) and places > 1 else WINDOW


def logits_of(model: nn.Module, tokens: Sequence[int], window: int = WINDOW) -> list[Tensor]:
    """Return the logits of each window of ``tokens``, as a list of float32 tensors ``[t, vocabulary]`` on the CPU. A
    window is a run of ``window`` tokens, which one forward pass of ``model`` takes. A last window of one token is left
    out. Raise ``SL613`` if there are fewer than two tokens, if one is outside the model's vocabulary, or if the model
    returns no logits.
    """
    if len(tokens) < 2:
        raise error(
            "SL613",
            where="tokens",
            got=f"{len(tokens)} of them",
            expected="two or more tokens, since each is predicted from those before it",
        )
    # The first embedding of a language model is that of its tokens.
    known = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if min(tokens) < 0 or (known is not None and max(tokens) >= known):  # a GPU would not survive it
        limit = "numbers from 0" + (f" to {known - 1}" if known else "")
        raise error(
            "SL613",
            where="tokens",
            got=f"tokens from {min(tokens)} to {max(tokens)}",
            expected=limit,
            fix="use the tokenizer of this model",
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.no_grad():
        return [_window_logits(model, torch.tensor([part], device=device)) for part in _token_windows(tokens, window)]


def _window_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the float32 logits ``[t, vocabulary]`` that ``model`` computes for one window of tokens ``[1, t]``. They
    are on the CPU. Raise ``SL613`` if the call fails or its result is not ``[1, t, vocabulary]``.
    """
    cause = None
    try:
        out: Any = model(tokens)
    except (IndexError, RuntimeError, TypeError, ValueError) as e:  # no language model, or one of fewer places
        got, cause = f"{type(e).__name__}: {e}", e
    else:
        logits = getattr(out, "logits", out)
        if isinstance(logits, Tensor) and logits.dim() == 3 and logits.shape[:2] == tokens.shape:
            return logits[0].to("cpu", torch.float32)
        got = f"{tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
    raise error(
        "SL613",
        where=f"model(tokens [1, {tokens.shape[1]}])",
        got=got,
        expected="logits [1, t, vocabulary]",
        fix="leave --tokens and --text out, or pass a language model, or fewer tokens",
    ) from cause


def measure_drift(
    before: Sequence[Tensor], after: Sequence[Tensor], tokens: Sequence[int], window: int = WINDOW
) -> AccuracyDrift:
    """Return how far the logits ``after`` a conversion are from those ``before`` it. Both lists are results of
    :func:`logits_of` for ``tokens`` and ``window``.
    """
    count, nll, nll_after, divergence, same, largest = 0, 0.0, 0.0, 0.0, 0, 0.0
    for part, old, new in zip(_token_windows(tokens, window), before, after, strict=True):
        # Each place predicts the next token, so the first one is not predicted.
        wanted = torch.tensor(part[1:])[:, None]
        was, now = old[:-1].log_softmax(-1), new[:-1].log_softmax(-1)
        nll -= float(was.gather(-1, wanted).sum())
        nll_after -= float(now.gather(-1, wanted).sum())
        # The divergence of Kullback and Leibler of the predictions after from those before.
        divergence += float((was.exp() * (was - now)).sum())
        same += int((old[:-1].argmax(-1) == new[:-1].argmax(-1)).sum())
        largest = max(largest, float((old - new).abs().max()))
        count += len(wanted)
    return AccuracyDrift(
        count,
        _exp_or_infinity(nll / count),
        _exp_or_infinity(nll_after / count),
        divergence / count,
        same / count,
        largest,
    )


def _token_windows(tokens: Sequence[int], window: int) -> list[list[int]]:
    """Return ``tokens`` cut into lists of ``window`` tokens. A single token at the end is left out, since it predicts
    nothing.
    """
    parts = [list(tokens[i : i + window]) for i in range(0, len(tokens), window)]
    # A single token at the end predicts nothing.
    return [part for part in parts if len(part) > 1]


def _exp_or_infinity(value: float) -> float:
    """Return the exponential of ``value``, or infinity if ``value`` is at least 700. ``math.exp`` overflows from about
    709 on.
    """
    # ``math.exp`` raises an OverflowError from about 709 on.
    return math.exp(value) if value < 700 else math.inf
