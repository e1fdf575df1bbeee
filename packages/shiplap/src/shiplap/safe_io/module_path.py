"""The search path of modules: the user's folders come last, and not at all if another user could have written them."""

from __future__ import annotations

import os
import sys

from shiplap.safe_io.files import NAMED, OwnershipRule, open_folder, unsafe_reason

OWNED_FOLDER = OwnershipRule(group=True)
"""A folder from which any module may be imported, also one that an installed package tries to import in vain."""


def append_module_folder(folder: str | os.PathLike[str], rule: OwnershipRule = NAMED) -> str:
    """Append ``folder`` to the search path of modules, unless it is there. If ``rule`` refuses the folder, it is not
    appended, and the reason is returned. Otherwise return an empty string.

    The folder comes last, so that no file of it hides a module of Python or of an installed package.
    """
    path = os.fspath(folder)
    if path in sys.path:
        return ""
    try:
        os.close(open_folder(path, rule))
    except OSError as e:
        return unsafe_reason(e)
    sys.path.append(path)
    return ""
