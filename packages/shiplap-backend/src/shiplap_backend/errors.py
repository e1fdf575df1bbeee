"""The error catalogue of generated backends: SL9xx."""

from __future__ import annotations

from shiplap import ShiplapError
from shiplap.plugin_api import register_errors


class BackendError(ShiplapError, RuntimeError):
    """A generated backend that cannot be described, generated, built or loaded (SL9xx)."""


register_errors(
    BackendError,
    [
        (
            "SL901",
            "the backend metadata is not valid",
            (
                "'shiplap backend' generates C++ from this file. It rejects a file with an invalid line, because "
                "skipping the line would silently drop an operator."
            ),
            "correct the line that the message names",
        ),
        (
            "SL902",
            "the vendor expression is not valid",
            "Shiplap checks each expression against the functions that the headers of the vendor declare.",
            "correct the expression; 'shiplap backend functions RUNTIME' lists the signatures",
        ),
        (
            "SL903",
            "an ATen argument is not used",
            (
                "Every argument of an ATen overload must be mapped, guarded or declared to affect shapes only. An "
                "ignored argument would give wrong values."
            ),
            "use the argument in 'graph', or add it to 'guard' or 'shape_only'",
        ),
        (
            "SL904",
            "torch does not match the schema lock",
            (
                "The wrappers were checked against the locked schemas. Under other schemas an argument may have "
                "another meaning."
            ),
            "review the difference, then run 'shiplap backend gen --accept-drift'",
        ),
        (
            "SL905",
            "the backend project cannot be used",
            "A backend project is a directory that 'shiplap backend new' wrote.",
            "name the directory that holds backend.toml",
        ),
        (
            "SL906",
            "the backend cannot be built",
            "The compiler or the linker refused the generated project.",
            "correct the file that the compiler's first error names",
        ),
        (
            "SL907",
            "the runtime is not available",
            "The vendor's headers and libraries come from the vendor's own packages.",
            "install them: pip install 'shiplap-backend[openvino]' or 'shiplap-backend[onednn]'",
        ),
        (
            "SL908",
            "a hand-written body has the wrong signature",
            (
                "The generated wrapper calls the body. With another signature the call would not link, or would "
                "swap arguments."
            ),
            "write the signature that generated/bodies.h declares",
        ),
        (
            "SL909",
            "the runtime follows another version of the contract",
            (
                "The contract is the interface between Shiplap and a runtime. Code that was written for another "
                "version would be called in the wrong way."
            ),
            (
                "make the changes that docs/add-a-runtime.md lists for the expected version, then set 'contract' in "
                "runtime.py"
            ),
        ),
        (
            "SL910",
            "the description of the runtime cannot be used",
            (
                "A runtime is described by a value of the class Runtime, which runtime.py or an installed package "
                "defines."
            ),
            "correct what 'got' names in the file under 'where'",
        ),
    ],
)
