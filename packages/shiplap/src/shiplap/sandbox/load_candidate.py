"""Load what is judged: a function, a class or an op, from a module or a file. Nothing here is cached."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from shiplap.dispatch import Op
from shiplap.sampling.run import split

OWN = "shiplap_judged_"
added: set[str] = set()  # folders that were put on sys.path here


def load_module(home: str) -> ModuleType:
    """The module of this name, or the one in this file; its own folder is searched first, as Python does."""
    if not home.endswith(".py"):
        return importlib.import_module(home)
    path = Path(home).resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
        added.add(str(path.parent))
    name = OWN + path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_named(home: str, names: Sequence[str]) -> Any:
    """The value of a module that has the first of these names which is there. Raises AttributeError for none."""
    module = load_module(home)
    for name in names:
        value: Any = module
        for part in name.split("."):
            value = getattr(value, part, None)
        if value is not None:
            return value
    raise AttributeError(f"{home} has no {' or '.join(names)}")


def build(value: Any, init: Sequence[Any], state: Mapping[str, Any], seed: int) -> Any:
    """What is called: an instance of a class with these parameters, or the function itself."""
    if not isinstance(value, type):
        return value
    torch.manual_seed(seed)
    made = value(*init)
    if state and isinstance(made, torch.nn.Module):
        made.load_state_dict(dict(state), strict=False)
    return made


def renew(made: Callable[..., Any], state: Mapping[str, Any]) -> bool:
    """Other values for the parameters of a module. False, and nothing is changed, if it has not all of them."""
    if not isinstance(made, torch.nn.Module) or not state.keys() <= made.state_dict().keys():
        return False
    made.load_state_dict(dict(state), strict=False)
    return True


def _positional(op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with all arguments of the op in the order of its schema."""

    def positional(*args: Any) -> Any:
        first, named = split(op.spec, args)
        return call(*first, **named)

    return positional


def ready(asked: Mapping[str, Any], init: Sequence[Any], state: Mapping[str, Any]) -> Callable[..., Any]:
    """The callable that a request of the referee names."""
    sys.path[:0] = [p for p in asked["path"] if p not in sys.path]
    if asked["kind"] == "nothing":
        return lambda *args: ()
    value = load_named(asked["home"], asked["names"])
    if asked["kind"] == "maker":
        maker: Callable[..., Any] = value(*init)
        return maker
    if isinstance(value, Op):
        return _positional(value, value.reference if asked["kind"] == "reference" else value)
    made: Callable[..., Any] = build(value, init, state, asked["seed"])
    if any(isinstance(t, torch.Tensor) and t.is_cuda for t in state.values()) and isinstance(made, torch.nn.Module):
        made = made.cuda()
    return torch.compile(made) if asked["compile"] else made
