"""Turn an op into a script that any user can run, and find the op again from the script."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from shiplap.dispatch import Op, registry
from shiplap.errors import error
from shiplap.safe_io.module_path import append_module_folder


def find(home: str, name: str) -> Op:
    """Import the module or file ``home``, and return the op named ``name`` (``namespace::name``) that it declares or
    adopts. Raise ``SL501`` if there is no such op.
    """
    module = _run_file(Path(home).resolve()) if home.endswith(".py") else importlib.import_module(home)
    # The module's own ops first: another module may register the same name later.
    declared = [op for op in _ops_among(vars(module).values()) if op.spec.name == name]
    declared_op = declared[0] if declared else registry.find_declared_op(name)
    if declared_op is None:
        raise error(
            "SL501",
            where=home,
            got=name,
            expected="an op that is declared when the module is imported",
            fix="import it from where it is declared, then call shiplap.audit.sample(op, ...)",
        )
    return declared_op


def _ops_among(values: Iterable[Any]) -> Iterator[Op]:
    """Yield the ops among ``values``, and those in the lists, tuples and dicts among them."""
    for value in list(values):
        if isinstance(value, Op):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, Op))
        elif isinstance(value, dict):
            yield from (v for v in value.values() if isinstance(v, Op))


def _run_file(path: Path) -> ModuleType:
    """Run the file ``path`` under a module name other than ``__main__``, append its folder to ``sys.path``, and return
    the module. A file that is already loaded is not run again. Raise ``SL501`` if there is no such file.
    """
    for module in list(sys.modules.values()):  # running a file twice would declare its ops twice (SL108)
        if getattr(module, "__file__", None) == str(path):
            return module
    spec = importlib.util.spec_from_file_location(f"shiplap_audit_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise error("SL501", where=str(path), got="no such file", expected="a Python file that declares ops")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    append_module_folder(path.parent)
    spec.loader.exec_module(module)
    return module


_SCRIPT_TEMPLATE = '''\
"""{name}: reproduces what the check {check!r} of `shiplap audit` found."""

{imports}from shiplap.audit import find{more}
from shiplap.audit.checks import {check}

op = find({home!r}, {name!r})
{body}
print(found.problem or "nothing found: the op has changed since")
assert not found.problem
'''

_SAMPLE_TEMPLATE = """\
case = sample(op, {label!r}, seed={seed}{device})
found = {check}.{symbol}.look(op, case)"""

_HISTORY_TEMPLATE = """\
# The fault depends on the calls before: all samples of the check up to this one are repeated.
found = {check}.{symbol}.replay_history(op, {label!r}, seed={seed}{device})"""

_SEQUENCE_TEMPLATE = """\
found = {check}.{symbol}.replay(op, seed={seed}{device})"""


def write_reproducer(
    op: Op, check: str, label: str | None, seed: int, device: str, symbol: str = "CHECK", *, history: bool = False
) -> str:
    """Return a complete Python script that runs ``check`` on the sample ``label`` again, or on its series of samples if
    ``label`` is None.

    ``symbol`` is the name of the variable that holds the check in its module. If ``history`` is true, the script
    repeats the samples before ``label``, too. If it is false, it runs this sample only.
    """
    home, root = address_of_op(op)
    imports = f"import sys\n\nsys.path.append({str(root)!r})\n\n" if root else ""
    extra = f", device={device!r}" if device != "cpu" else ""
    single = _HISTORY_TEMPLATE if history else _SAMPLE_TEMPLATE
    body = (single if label is not None else _SEQUENCE_TEMPLATE).format(
        check=check, symbol=symbol, label=label, seed=seed, device=extra
    )
    more = ", sample" if label is not None and not history else ""
    return _SCRIPT_TEMPLATE.format(name=op.spec.name, check=check, imports=imports, more=more, home=home, body=body)


def address_of_op(op: Op) -> tuple[str, Path | None]:
    """Return ``(module or file, folder)``, by which another process can import the op. The folder is to be added to
    ``sys.path``, and is None if that is not necessary.
    """
    module = op.reference.__module__
    file = inspect.getsourcefile(op.reference)
    if file is None:
        return module, None
    path = Path(file).resolve()
    stem = path.parent if path.name == "__init__.py" else path.with_suffix("")
    parts = tuple(module.split("."))
    # A file that was run as a script has no module name that another process could import.
    if module not in sys.modules or stem.parts[-len(parts) :] != parts:
        return str(path), None
    root = Path(*stem.parts[: -len(parts)])
    return module, None if "site-packages" in root.parts else root
