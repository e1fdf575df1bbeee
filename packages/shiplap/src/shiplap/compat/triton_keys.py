"""Under which key Triton's own launches look for a compiled kernel, for kernels that are compiled without a launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["triton_attributes"]


def triton_attributes(
    kernel: Any,
    backend: Any,
    signature: Mapping[str, str],
    constants: Mapping[Any, object],
    attributes: Mapping[Any, Any],
) -> dict[Any, Any]:
    """``attributes`` as Triton's own launches give them to its compiler, whose cache has them in the key.

    Triton 3.7 lists constants among them, without any attribute; Triton 3.6 lists arguments alone.
    """
    special = [
        (kind, constants[(at,)] if kind == "constexpr" else _marks(attributes.get((at,))))
        for at, kind in enumerate(signature.values())
    ]
    values = {name: constants.get((at,)) for at, name in enumerate(signature)}
    try:
        *_, packed = kernel._pack_args(backend, {}, values, special, {})
    except AttributeError:
        return dict(attributes)
    return dict(packed)


def _marks(attribute: object) -> str | None:
    """What Triton's binder says of an argument: "D" of a multiple of 16, None of what it does not ask about."""
    return None if attribute is None else "D" if attribute else ""
