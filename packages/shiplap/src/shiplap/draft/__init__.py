"""Draft: what an existing function says about itself, as the source of a declaration. Shared by init and doctor."""

from shiplap.draft.signature import Parameter, Signature, of_call, of_function, of_overload
from shiplap.draft.skeleton import Draft, fill_lines, render
from shiplap.draft.unfinished import Unfinished, unfinished

__all__ = [
    "Draft",
    "Parameter",
    "Signature",
    "Unfinished",
    "fill_lines",
    "of_call",
    "of_function",
    "of_overload",
    "render",
    "unfinished",
]
