"""Draft the source of a declaration from the description that an existing function carries. Shared by init and
doctor.
"""

from shiplap.scaffold.signature import (
    DraftParameter,
    DraftSignature,
    signature_of_call,
    signature_of_overload,
    signatures_of_function,
)
from shiplap.scaffold.skeleton import Draft, fill_lines, render_draft
from shiplap.scaffold.unfinished import UnfinishedOp, unfinished

__all__ = [
    "Draft",
    "DraftParameter",
    "DraftSignature",
    "UnfinishedOp",
    "fill_lines",
    "render_draft",
    "signature_of_call",
    "signature_of_overload",
    "signatures_of_function",
    "unfinished",
]
