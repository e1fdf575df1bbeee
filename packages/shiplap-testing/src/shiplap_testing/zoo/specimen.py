"""One animal of the zoo, and how an outsider's op gets in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shiplap.dispatch import Op


@dataclass(frozen=True)
class Specimen:
    """An op on which the audit is tested, with its ``name`` in reports. ``flagged_by`` holds the names of the audit's
    checks that must fail on the op, and is empty for a sound op. ``note`` is a remark, or the empty string.
    """

    name: str
    op: Op
    flagged_by: frozenset[str] = frozenset()
    note: str = ""

    def __str__(self) -> str:
        """Return the name of the specimen."""
        return self.name


_LIBRARY = torch.library.Library("zoo", "DEF")


def register(
    schema: str,
    real: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup: Callable[..., Any] | None = None,
    key: str = "CompositeExplicitAutograd",
) -> str:
    """Define the operator ``zoo::<name>`` with ``torch.library``, as most kernel libraries do, where ``schema`` is its
    schema and begins with the name. Return the string ``zoo::<name>`` for ``sl.adopt``.

    ``real`` is its implementation for the dispatch key ``key``. ``fake``, ``backward`` and ``setup``, the function that
    saves tensors, are registered if they are given.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, real, key)
    if fake is not None:
        torch.library.register_fake(f"zoo::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"zoo::{name}", backward, setup_context=setup, lib=_LIBRARY)
    return f"zoo::{name}"
