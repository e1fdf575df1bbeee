"""HTML pages of one file: all values are escaped, and nothing is loaded from elsewhere."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def _html_environment(package: str) -> Environment:
    """Return the Jinja environment for the templates of a Python package, which escapes all values. Templates are also
    searched for in ``shiplap.render``, whose base page they may extend.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    # A template of a family may extend the base page of this package, so both folders are searched.
    loaders = [PackageLoader(package)] + ([] if package == "shiplap.render" else [PackageLoader("shiplap.render")])
    return Environment(
        loader=ChoiceLoader(loaders), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def render_html(template: str, *, package: str = "shiplap.render", **context: Any) -> str:
    """Return an HTML page or element as a string. It is the template ``<package>/templates/<template>``, rendered with
    the variables ``context``.

    The template may extend ``base.html.jinja`` of this package. That base takes ``title`` and ``facts`` (a mapping,
    shown as a header) and has the blocks ``style``, ``summary`` and ``content``.
    """
    return _html_environment(package).get_template(template).render(**context)
