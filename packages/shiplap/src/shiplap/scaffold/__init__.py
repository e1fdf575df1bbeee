"""Draft the source of a declaration from the description that an existing function carries. Shared by init and
doctor.
"""

from shiplap.scaffold.signature import Parameter, Signature, of_call, of_function, of_overload
from shiplap.scaffold.skeleton import Draft, fill_lines, render
from shiplap.scaffold.unfinished import Unfinished, unfinished

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
