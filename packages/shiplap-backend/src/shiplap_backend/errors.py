"""The error catalogue of generated backends: SL9xx."""

from __future__ import annotations

from shiplap import ShiplapError
from shiplap.plugin_api import register_errors


class BackendError(ShiplapError, RuntimeError):
    """The error for a generated backend that cannot be described, generated, built or loaded (SL9xx)."""


register_errors(
    BackendError,
    [
        (
            "SL901",
            "the backend metadata is not valid",
            (
                "'shiplap backend' generates C++ from metadata files. It rejects a file with an invalid line, "
                "because skipping the line would silently drop an operator."
            ),
            "change the line under 'where' to what 'expected' shows",
        ),
        (
            "SL902",
            "an expression in the metadata is not valid",
            (
                "The metadata of a backend calls functions of the vendor's library. Shiplap checks each expression "
                "against the functions that the headers of the vendor declare."
            ),
            (
                "write the expression with a signature that 'shiplap backend functions RUNTIME' lists, where RUNTIME "
                "is the name or the directory of the runtime"
            ),
        ),
        (
            "SL903",
            "an ATen argument is not used",
            (
                "The metadata must use every argument of an ATen overload, or say that it affects only shapes. An "
                "argument that is ignored would give wrong values."
            ),
            (
                "use the argument in 'graph'. If the backend supports only some of its values, add it to 'guard'. If "
                "it affects only shapes, add it to 'shape_only'"
            ),
        ),
        (
            "SL904",
            "torch does not match the schema lock",
            (
                "The schema lock is a file with the schemas of torch's operators for which the wrappers were "
                "checked. Under other schemas an argument may have another meaning."
            ),
            (
                "compare the schemas under 'got' with the metadata, and correct the metadata of changed operators. "
                "Then run 'shiplap backend gen DIR --accept-drift'"
            ),
        ),
        (
            "SL905",
            "the backend project cannot be used",
            "A backend project is a directory that 'shiplap backend new' wrote, with a file backend.toml.",
            "pass the directory that holds backend.toml",
        ),
        (
            "SL906",
            "the backend cannot be built",
            "The compiler or the linker rejected the generated project, with the message under 'got'.",
            (
                "correct the hand-written body, or the line of the metadata, from which the code in that message "
                "comes. Then run 'shiplap backend build DIR'"
            ),
        ),
        (
            "SL907",
            "the runtime is not available",
            (
                "A runtime is the vendor's library that a backend calls. Its headers and libraries come from the "
                "vendor's own packages."
            ),
            (
                "install them: pip install 'shiplap-backend[openvino]' or 'shiplap-backend[onednn]'. For another "
                "runtime, install the packages of its vendor"
            ),
        ),
        (
            "SL908",
            "a hand-written body has the wrong signature",
            (
                "The generated wrapper calls the hand-written body. With another signature the call would not link, "
                "or would swap arguments."
            ),
            "define the body with the signature under 'expected', as generated/bodies.h declares it",
        ),
        (
            "SL909",
            "the runtime follows another version of the contract",
            (
                "The contract is the interface between Shiplap and a runtime. Shiplap would call code for another "
                "version of it in the wrong way."
            ),
            (
                "if the version under 'expected' is newer, make the changes that docs/add-a-runtime.md lists for it, "
                "then set contract to that version in runtime.py. If it is older, install a newer shiplap-backend"
            ),
        ),
        (
            "SL910",
            "the description of the runtime cannot be used",
            (
                "A runtime is described by a value of the class Runtime, which runtime.py or an installed package "
                "defines. A field of it, or a file beside it, is missing or wrong."
            ),
            "change the field or the file that 'got' names to what 'expected' shows",
        ),
    ],
)
