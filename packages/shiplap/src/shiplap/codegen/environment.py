"""Rendering of templates, which are data files of a package. A name missing from the context is an error."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def _jinja_environment(package: str) -> Environment:
    """Return the Jinja2 environment for the folder ``templates`` of the Python package ``package``. An undefined name
    in a template raises an error, and nothing is escaped. Every call for one package returns the same object.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # Jinja2 is imported late: most processes find all their code in the cache. Code is not escaped, as it is no HTML.
    return Environment(
        loader=PackageLoader(package),
        # A misspelt name would otherwise render as an empty text, which often is valid C++.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render_source(template: str, *, package: str = "shiplap.codegen", **context: Any) -> str:
    """Return the Jinja2 template ``<package>/templates/<template>``, rendered with the variables ``context``, as a
    string. Raise ``jinja2.UndefinedError`` if the template uses a name that ``context`` lacks.
    """
    return _jinja_environment(package).get_template(template).render(**context)
