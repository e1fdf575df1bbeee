"""The Jinja2 environment and the C type mapping that every generator shares."""

from shiplap.codegen.ctype import CParameter, c_prototype
from shiplap.codegen.environment import render_source

__all__ = ["CParameter", "c_prototype", "render_source"]
