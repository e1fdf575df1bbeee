"""The Jinja2 environment and the C type mapping that every generator shares."""

from shiplap.codegen.ctype import CParameter, prototype
from shiplap.codegen.environment import render

__all__ = ["CParameter", "prototype", "render"]
