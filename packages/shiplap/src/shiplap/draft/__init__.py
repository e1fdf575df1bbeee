"""Draft: what an existing function says about itself, as the source of a declaration. Shared by init and doctor."""

from shiplap.draft.signature import Parameter, Signature, of_call, of_function, of_overload
from shiplap.draft.skeleton import Draft, fill_lines, render

__all__ = ["Draft", "Parameter", "Signature", "fill_lines", "of_call", "of_function", "of_overload", "render"]
