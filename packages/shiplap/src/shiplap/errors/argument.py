"""Arguments of a call: SL2xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register

__all__ = ["ArgumentError"]


class ArgumentError(ShiplapError, ValueError):
    """A call that does not fit the declaration (SL2xx)."""


register(
    ArgumentError,
    [
        ("SL201", "wrong number of dims", "The declaration fixes the rank.", "reshape or unsqueeze it"),
        ("SL202", "sizes disagree", "A dim met twice has one size.", "pass tensors whose named dims agree"),
        ("SL203", "fixed size", "The declaration fixes this size.", "pass a tensor of that size"),
        ("SL204", "dtype not accepted", "The declaration lists the dtypes.", "convert the tensor with .to(dtype)"),
        ("SL205", "dtypes disagree", "One dtype class, one dtype.", "convert one of them with .to(dtype)"),
        ("SL206", "devices disagree", "An op runs on one device.", "move the tensor with .to(device)"),
        ("SL207", "layout", "The op requires this memory layout.", "call .contiguous() first"),
        ("SL208", "precondition", "The declaration requires it.", "pass values that fulfil the condition"),
        ("SL209", "wrong kind of argument", "The schema fixes what each argument is.", "pass the declared type"),
        (
            "SL210",
            "mutated tensor overlaps itself",
            "Two of its elements share memory, so writing it is ambiguous.",
            "pass .clone()",
        ),
        (
            "SL211",
            "values not accepted",
            "The op is not defined for these values; it says which.",
            "correct the values that the message names",
        ),
        (
            "SL212",
            "given output does not fit",
            "An out-variant fills contiguous tensors of declared shape and dtype.",
            "pass torch.empty of the expected shape and dtype",
        ),
        (
            "SL213",
            "given workspace does not fit",
            "The kernel relies on its size and alignment.",
            "pass torch.empty(op.workspace_bytes(...), dtype=torch.uint8, device=...)",
        ),
        (
            "SL214",
            "dtype that the C ABI does not carry",
            "A kernel reads DLPack's code of the dtype; one without a code could only be taken for another.",
            "convert the tensor with .to(dtype), or view its bytes as torch.uint8",
        ),
    ],
)
