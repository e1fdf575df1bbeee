"""Import of a target, which is a function, a class or an op, from a module or a file. Nothing here is cached."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from shiplap.sandbox.protocol import LoadTarget
from shiplap.sandbox.rng_state import seed_torch

if TYPE_CHECKING:
    from shiplap.dispatch import Op

MODULE_PREFIX = "shiplap_judged_"
added_folders: set[str] = set()  # folders that this module has put on sys.path


def is_declared(value: Any) -> TypeGuard[Op]:
    """Return whether ``value`` is a declared op. The modules of declarations are not imported for the answer, since a
    process that has an op has imported them.
    """
    # Another thread may be importing that module, and no op exists before it has the class.
    op_class = getattr(sys.modules.get("shiplap.dispatch"), "Op", None)
    return op_class is not None and isinstance(value, op_class)


def load_module(home: str) -> ModuleType:
    """Return the module ``home``, which is the name of a module or a file that ends in ``.py``.

    A module is imported. A file is run anew, and its folder is put first on ``sys.path``.
    """
    if not home.endswith(".py"):
        return importlib.import_module(home)
    path = Path(home).resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
        added_folders.add(str(path.parent))
    return run_file(path, MODULE_PREFIX + path.stem)


def run_file(path: Path, name: str) -> ModuleType:
    """Run the Python file ``path`` as a module called ``name``, and return the module. Code below
    ``if __name__ == "__main__"`` does not run. Raise ``ImportError`` if the file is no module.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    # Dataclasses look their module up there while it runs.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_named(home: str, names: Sequence[str]) -> Any:
    """Return the value of the first of the dotted names ``names`` that exists in the module or file ``home``. Raise
    ``AttributeError`` if none of them exists.
    """
    module = load_module(home)
    for name in names:
        value: Any = module
        for part in name.split("."):
            value = getattr(value, part, None)
        if value is not None:
            return value
    raise AttributeError(f"{home} has no {' or '.join(names)}")


def build_callable(value: Any, init: Sequence[Any], state: Mapping[str, Any], seed: int) -> Any:
    """Return an instance of the class ``value``, constructed with the arguments ``init`` after torch was seeded with
    ``seed``.

    If the instance is a module, the parameters and buffers in ``state`` are loaded into it. A value that is not a class
    is returned unchanged.
    """
    if not isinstance(value, type):
        return value
    # Reference and candidate draw the same parameters from this seed.
    seed_torch(seed)
    made = value(*init)
    if state and isinstance(made, torch.nn.Module):
        made.load_state_dict(dict(state), strict=False)
    return made


def load_parameters(made: Callable[..., Any], state: Mapping[str, Any]) -> bool:
    """Load the values of ``state``, which maps names to tensors, into the parameters and buffers of the module ``made``
    and return True. If it is no module or lacks one of the names, change nothing and return False.
    """
    if not isinstance(made, torch.nn.Module) or not state.keys() <= made.state_dict().keys():
        return False
    made.load_state_dict(dict(state), strict=False)
    return True


def _call_by_position(op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes all arguments of the op by position, in the order of its schema. It calls ``call``
    with the keyword-only ones by name.
    """

    def positional(*args: Any) -> Any:
        """Call the enclosing function's ``call`` with ``args``, which are all arguments of the op in the order of its
        schema. Keyword-only arguments are passed by name.
        """
        first, named = op.spec.split(args)
        return call(*first, **named)

    return positional


def load_requested(target: LoadTarget, init: Sequence[Any], state: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the callable that the request ``target`` names. It is a function, an op, the reference of an op, or an
    instance of a class that is constructed from ``init`` and gets the parameters ``state``. If the request's field
    ``compile`` is true, it is compiled with ``torch.compile``.
    """
    sys.path[:0] = [p for p in target.path if p not in sys.path]
    value = load_named(target.home, target.names)
    if is_declared(value):
        return _call_by_position(value, value.reference if target.kind == "reference" else value)
    made: Callable[..., Any] = build_callable(value, init, state, target.seed)
    if any(isinstance(t, torch.Tensor) and t.is_cuda for t in state.values()) and isinstance(made, torch.nn.Module):
        made = made.cuda()
    return torch.compile(made) if target.compile else made
