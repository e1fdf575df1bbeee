"""The check that a device exists, before anything is drawn or run on it."""

from __future__ import annotations

import torch

from shiplap.errors import error


def require_device(device: str, where: str) -> None:
    """Raise ``SL605`` unless torch can allocate a tensor on ``device``. ``where`` is the option or the argument that
    names it, in the error.
    """
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        # torch appends advice of several sentences, which does not apply here.
        reason = str(e).splitlines()[0].split(". ")[0]
        raise error("SL605", where=where, got=reason, expected="a device of this machine") from None
