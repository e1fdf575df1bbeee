"""From a target to ops, and from an op to a script that anyone can paste."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shiplap.errors import error
from shiplap.op import Op, registry

__all__ = ["resolve", "script"]

_OP = re.compile(r"\w+::\w+")


def resolve(target: str) -> list[Op]:
    """Ops of ``module``, ``module:name``, ``file.py``, ``file.py:name`` or ``namespace::op``; SL501 if there are none.

    ``name`` is an attribute or, after a module or file, again ``namespace::op``. A file is run, a module imported.
    """
    if _OP.fullmatch(target):
        found = registry.find(target)
        return [found] if found else _nothing(target, f"not declared here; declared: {_names(registry.ops())}")
    source, _, name = target.partition(":")
    before = set(map(id, registry.ops()))
    scope = _load(source, target)
    ops = _unique(_collect(scope.values()))
    if not name:
        fresh = [o for o in registry.ops() if id(o) not in before]
        return _unique([*ops, *fresh]) or _nothing(target, f"{source} declares no op")
    if _OP.fullmatch(name):
        wanted = [o for o in (*ops, registry.find(name)) if o is not None and o.spec.name == name]
        return wanted[:1] or _nothing(target, f"{source} has {_names(ops)}")
    value: Any = scope.get(name.split(".")[0])
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
    return _unique(_collect([value])) or _nothing(target, f"{source} has {_names(ops)}")


def _load(source: str, target: str) -> dict[str, Any]:
    if not source.endswith(".py"):
        try:
            return vars(importlib.import_module(source))
        except ModuleNotFoundError as e:
            return _nothing(target, str(e))
    path = Path(source).resolve()
    if not path.is_file():
        return _nothing(target, "no such file")
    for module in list(sys.modules.values()):  # running a file twice would declare its ops twice (SL108)
        if getattr(module, "__file__", None) == str(path):
            return vars(module)
    return _run_file(path)


def _run_file(path: Path) -> dict[str, Any]:
    """Run ``path`` as ``python path`` would, siblings importable, but not as ``__main__``."""
    spec = importlib.util.spec_from_file_location(f"shiplap_audit_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return vars(module)


def _nothing(target: str, got: str) -> Any:
    raise error("SL501", where=target, got=got, expected="a declared op")


def _collect(values: Iterable[Any]) -> Iterator[Op]:
    for value in list(values):
        if isinstance(value, Op):
            yield value
        elif isinstance(value, (list, tuple, set)):
            yield from (v for v in value if isinstance(v, Op))
        elif isinstance(value, dict):
            yield from (v for v in value.values() if isinstance(v, Op))


def _unique(ops: Iterable[Op]) -> list[Op]:
    return list({id(o): o for o in ops}.values())


def _names(ops: Iterable[Op]) -> str:
    return ", ".join(o.spec.name for o in ops) or "none"


_SCRIPT = '''\
"""{name}: reproduces what the check {check!r} of `shiplap audit` found."""
{imports}
from shiplap.audit import resolve, sample
from shiplap.audit.checks import {check}

op = resolve({target!r})[0]
{body}
print(found.problem or "nothing found: the op has changed since")
assert not found.problem
'''

_BODY = """\
case = sample(op, {label!r}, seed={seed}{device})
found = {check}.CHECK.observe(op, case)"""

_SEQUENCE = """\
found = {check}.CHECK.replay(op, seed={seed}{device})"""


def script(op: Op, check: str, label: str | None, seed: int, device: str) -> str:
    """A complete script that observes the same sample, or the same series of samples when ``label`` is None."""
    target, root = _address(op)
    imports = f"import sys\n\nsys.path.insert(0, {str(root)!r})\n" if root else ""
    extra = f", device={device!r}" if device != "cpu" else ""
    body = (_BODY if label is not None else _SEQUENCE).format(check=check, label=label, seed=seed, device=extra)
    return _SCRIPT.format(name=op.spec.name, check=check, imports=imports, target=target, body=body)


def _address(op: Op) -> tuple[str, Path | None]:
    """``(target, directory to add to sys.path)`` by which another process finds the op."""
    module = op.reference.__module__
    file = inspect.getsourcefile(op.reference)
    if file is None:
        return f"{module}:{op.spec.name}", None
    path, tail = Path(file).resolve(), Path(*module.split("."))
    stem = path.parent if path.name == "__init__.py" else path.with_suffix("")
    importable = module in sys.modules and str(stem).endswith(str(Path("/") / tail))
    if not importable:
        return f"{path}:{op.spec.name}", None
    root = Path(str(stem)[: -len(str(tail)) - 1])
    installed = "site-packages" in root.parts
    return f"{module}:{op.spec.name}", None if installed else root
