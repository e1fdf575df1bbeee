"""Objects that cross torch's dispatcher whole, which torch calls opaque.

Torch has them since 2.11 or so, and every release has renamed a part. If a part is missing, :data:`REASON` states it,
and a declaration with such an argument is refused with that reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["BASE", "REASON", "read_attribute", "real_object", "register_opaque"]

BASE: Any  # the base of classes of such objects
KIND: str  # that a graph takes such an object as an input, in torch's word
try:
    from torch._library.fake_class_registry import FakeScriptObject
    from torch._library.opaque_object import MemberType, get_opaque_type_name

    REASON = ""
    try:
        from torch._custom_class_base import CustomClassBase as BASE
        from torch._library.opaque_object import is_custom_class, register_custom_class

        KIND = "symbolic"
    except ImportError:  # the names before 2.14; since then, a use of the old ones logs a warning
        from torch._library.opaque_object import is_opaque_type as is_custom_class
        from torch._library.opaque_object import register_opaque_type as register_custom_class
        from torch._opaque_base import OpaqueBase as BASE

        KIND = "reference"
except ImportError as e:
    BASE, REASON = object, f"this torch has no opaque objects ({e})"


def register_opaque(cls: type[Any], fields: Sequence[str]) -> str:
    """Return the name of ``cls`` in a schema. Compiled code is guarded on the attributes ``fields`` of an object."""
    # A class is registered once for the whole process.
    if not is_custom_class(cls):
        members = dict.fromkeys(fields, MemberType.USE_REAL)

        def guarded(value: Any) -> list[Any]:
            return [getattr(value, name) for name in fields]

        register_custom_class(cls, typ=KIND, guard_fn=guarded, members=members)
    name: str = get_opaque_type_name(cls)
    return name


def read_attribute(value: Any, name: str) -> Any:
    """Return an attribute of the object."""
    return getattr(value, name)


def real_object(value: Any) -> Any:
    """Return the object behind ``value`` while a graph is traced, or ``value`` itself."""
    return value.real_obj if not REASON and isinstance(value, FakeScriptObject) else value
