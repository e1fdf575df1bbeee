"""The script of a finding, which needs torch and the package alone: it holds the text of the check that was run."""

from __future__ import annotations

import inspect
import re
from functools import cache

from shiplap.audit import guarded_memory
from shiplap.audit.installed import checks, gradients, python_function, tensors
from shiplap.audit.installed.result import InstalledFinding

# A long import is written over several lines, in parentheses.
_OWN_IMPORTS = re.compile(r"^from (shiplap\.\S+|__future__) import (\([^)]*\)|.*)\n", re.MULTILINE)
_TEMPLATE = '''\
"""{op}: {problem}

Found by `shiplap audit --installed {package}` ({version}, torch {torch}). The call was {origin}{note}.
This script needs torch and {package}. {ends}
"""

{helpers}

from importlib import import_module

import {module}

inf, nan = float("inf"), float("nan")
op = {address}


def make():
    return {{
{arguments}
    }}


try:
    problem = check_{check}(op, make)
except NotApplicable as refusal:
    problem = ""
    print("the op refuses the call:", refusal)
print(problem or "nothing found: the op has changed since")
assert not problem
'''


def write_script(found: InstalledFinding, package: str, version: str) -> str:
    """Return a Python script that shows the finding ``found`` of a package again. While the problem exists, the script
    raises ``AssertionError`` or crashes as the op did.
    """
    import torch

    space, _, name = found.op.partition("::")
    packet, _, overload = name.partition(".")
    crash = "It ends its process: that is the finding." if found.check == "crash" else "It raises AssertionError."
    return _TEMPLATE.format(
        op=found.op,
        # The problem stands in the docstring of the script, which it must not end.
        problem=found.problem.replace("\\", "\\\\").replace('"""', "'''"),
        package=package,
        module=package,
        version=version,
        torch=torch.__version__,
        origin=found.origin,
        note=f", changed: {found.note}" if found.note else "",
        ends=crash,
        helpers=_helpers(),
        address=found.source or f"torch.ops.{space}.{packet}.{overload or 'default'}",
        arguments="\n".join(f"        {name!r}: {text}," for name, text in found.arguments.items()),
        check=found.check,
    )


@cache
def _helpers() -> str:
    """Return the source code of the modules that contain the checks as one string, for the script of a finding. Their
    imports from Shiplap are left out.
    """
    parts = []
    for module in (guarded_memory, tensors, python_function, checks, gradients):
        source = re.sub(r'\A""".*?"""\n', "", inspect.getsource(module), flags=re.DOTALL)
        parts.append(_OWN_IMPORTS.sub("", source).strip())
    return "from __future__ import annotations\n\n" + "\n\n\n".join(parts)
