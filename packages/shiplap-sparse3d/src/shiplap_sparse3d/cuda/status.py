"""Late errors of the CUDA kernels of sparse3d: see ``shiplap.plugin_api.LateErrors``."""

from __future__ import annotations

import torch

from shiplap.plugin_api import LateErrors

__all__ = ["ERRORS", "ROW_BITS", "code_of", "poll", "synchronize", "word"]

ERRORS = LateErrors()
ROW_BITS = 40  # of the word: a table has fewer entries than that; the code lies above
word, poll = ERRORS.word, ERRORS.poll


def code_of(op: str, message: str) -> int:
    """Return the number by which a kernel reports the error ``message`` of ``op``. The kernel writes the status word
    ``code << ROW_BITS | row``, from which the host raises the error later.
    """
    return ERRORS.code(f"sparse3d::{op}", message)


def synchronize(device: torch.device | str | None = None) -> None:
    """Wait for ``device`` (by default the current CUDA device), and raise an error that a kernel of sparse3d has
    reported on it, if there is one. For a device that is not a GPU, do nothing.

    Raises:
        ArgumentError: ``SL211``, naming the op and the row.
    """
    if device is None and not torch.cuda.is_available():
        return
    place = torch.device("cuda" if device is None else device)
    if place.type != "cuda":
        return
    # A plain ``cuda`` means the current device, whose index is needed below.
    with torch.cuda.device(place):
        place = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize(place)
    poll(place)
