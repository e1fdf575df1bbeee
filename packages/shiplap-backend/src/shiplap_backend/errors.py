"""Generated backends: SL9xx."""

from __future__ import annotations

from shiplap import ShiplapError
from shiplap.extend import register_errors

__all__ = ["BackendError"]


class BackendError(ShiplapError, RuntimeError):
    """A generated backend that cannot be described, generated, built or loaded (SL9xx)."""


register_errors(
    BackendError,
    [
        (
            "SL901",
            "metadata of a backend",
            "Wrappers are generated from it; a typo must not become a missing operator.",
            "correct the line",
        ),
        (
            "SL902",
            "vendor expression",
            "It is checked against the functions that the vendor's headers declare.",
            "correct the expression; 'shiplap backend functions RUNTIME' lists the signatures",
        ),
        (
            "SL903",
            "argument without a fate",
            "An argument of an ATen overload is mapped, guarded or shape only; one that is dropped gives wrong values.",
            "use it in 'graph', or add it to 'guard' or 'shape_only'",
        ),
        (
            "SL904",
            "torch has drifted from the schema lock",
            "Wrappers were checked against these schemas; others may mean other arguments.",
            "review the difference, then run 'shiplap backend gen --accept-drift'",
        ),
        (
            "SL905",
            "backend project",
            "A project is a directory that 'shiplap backend new' wrote.",
            "name the directory that holds backend.toml",
        ),
        (
            "SL906",
            "backend cannot be built",
            "The compiler or linker refused the generated project.",
            "read the first error of the compiler",
        ),
        (
            "SL907",
            "runtime not available",
            "The vendor's headers and libraries come from its own packages.",
            "install them: pip install 'shiplap-backend[openvino]' or 'shiplap-backend[onednn]'",
        ),
        (
            "SL908",
            "hand-written body has another signature",
            "The generated wrapper calls it: another would not link, or would take one argument for another.",
            "write the signature that generated/bodies.h declares",
        ),
    ],
)
